//! Masks of grammars, made on threads of their own while the device computes.
//!
//! What may come next is known as soon as a token was drawn, and needed only when the step after it has been computed. So a turn
//! that is inside a grammar goes to one of these threads with each token and comes back with its mask. The engine goes on
//! without a sequence whose mask takes longer ([`Constraint::wait`]); what is allowed does not depend on where or when it was
//! made.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::Duration;

use muser_engine::{Constraint, TokenMask};
use muser_text::grammar::TurnConstraint;

/// Most threads that make masks.
const MAX_THREADS: usize = 8;

/// What a turn comes back with: the allowed tokens, or why there are none.
type Mask = Result<Vec<u32>, String>;

/// A turn on its way: takes the token, makes the mask, and goes back.
struct Errand {
    turn: TurnConstraint,
    token: Option<u32>,
    back: Sender<(TurnConstraint, Mask)>,
}

impl Errand {
    fn run(mut self) {
        // A panic of the grammar's engine is that request's fault alone: its turn does not come back.
        let made = catch_unwind(AssertUnwindSafe(|| {
            let mask = advance(&mut self.turn, self.token);
            (self.turn, mask)
        }));
        if let Ok(made) = made {
            // Nobody waits for it any more if the client has left.
            let _ = self.back.send(made);
        }
    }
}

fn advance(turn: &mut TurnConstraint, token: Option<u32>) -> Mask {
    let taken = token.map_or(Ok(()), |token| turn.commit(token));
    taken.and_then(|()| turn.mask()).map_err(|error| error.to_string())
}

static ERRANDS: LazyLock<Sender<Errand>> = LazyLock::new(|| {
    let (sender, receiver) = channel::<Errand>();
    let receiver = Arc::new(Mutex::new(receiver));
    let threads = std::thread::available_parallelism().map_or(2, usize::from).clamp(2, MAX_THREADS);
    for _ in 0..threads {
        let receiver = Arc::clone(&receiver);
        let next = move || receiver.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let thread = std::thread::Builder::new().name("muser-masks".into());
        // Without any thread errands are refused, and done where they were sent from.
        if let Err(error) = thread.spawn(move || std::iter::from_fn(|| next().ok()).for_each(Errand::run)) {
            tracing::error!(%error, "a thread for masks could not be started");
        }
    }
    sender
});

/// A turn's constraint as the engine takes it.
pub(crate) struct MaskedTurn {
    at: At,
    back: Option<Receiver<(TurnConstraint, Mask)>>,
}

enum At {
    /// Here, with its mask.
    Here(Box<TurnConstraint>, Mask),
    /// On a thread that makes its mask.
    Away,
    /// It does not come back.
    Lost,
}

impl MaskedTurn {
    /// A turn at its beginning.
    pub(crate) fn new(turn: TurnConstraint) -> Self {
        Self::go_on(turn, None)
    }

    /// A turn that allows nothing.
    pub(crate) fn lost() -> Self {
        Self { at: At::Lost, back: None }
    }

    fn go_on(mut turn: TurnConstraint, token: Option<u32>) -> Self {
        if turn.is_free() {
            let taken = token.map_or(Ok(()), |token| turn.commit(token));
            if let Err(error) = taken {
                return Self { at: At::Here(Box::new(turn), Err(error.to_string())), back: None };
            }
            if turn.is_free() {
                let mask = advance(&mut turn, None);
                return Self { at: At::Here(Box::new(turn), mask), back: None };
            }
            return Self::send(turn, None);
        }
        Self::send(turn, token)
    }

    fn send(turn: TurnConstraint, token: Option<u32>) -> Self {
        let (sender, receiver) = channel();
        if let Err(unsent) = ERRANDS.send(Errand { turn, token, back: sender }) {
            unsent.0.run();
        }
        Self { at: At::Away, back: Some(receiver) }
    }

    fn receive(&mut self, most: Option<Duration>) -> bool {
        let (At::Away, Some(back)) = (&self.at, &self.back) else { return true };
        let received = match most {
            Some(most) => back.recv_timeout(most),
            None => back.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match received {
            Ok((turn, mask)) => self.at = At::Here(Box::new(turn), mask),
            Err(RecvTimeoutError::Timeout) => return false,
            Err(RecvTimeoutError::Disconnected) => self.at = At::Lost,
        }
        true
    }
}

impl Constraint for MaskedTurn {
    fn mask(&mut self, allowed: &mut TokenMask) -> bool {
        self.receive(None);
        // Without a mask no token is allowed: the engine then ends the request and says so.
        match &self.at {
            At::Here(_, Ok(words)) => allowed.copy_words(words),
            At::Here(_, Err(error)) => tracing::warn!(error, "a constraint failed"),
            At::Away | At::Lost => tracing::warn!("a constraint was lost"),
        }
        true
    }

    fn wait(&mut self, most: Duration) -> bool {
        self.receive(Some(most))
    }

    fn commit(&mut self, token: u32) -> Result<(), String> {
        self.receive(None);
        match std::mem::replace(&mut self.at, At::Lost) {
            At::Here(turn, Ok(_)) => {
                *self = Self::go_on(*turn, Some(token));
                match &self.at {
                    At::Here(_, Err(error)) => Err(error.clone()),
                    _ => Ok(()),
                }
            }
            At::Here(_, Err(error)) => Err(error),
            At::Away | At::Lost => Err("there is no constraint for this choice".into()),
        }
    }

    fn fork(&self) -> Option<Box<dyn Constraint>> {
        match &self.at {
            At::Here(turn, mask) => {
                Some(Box::new(Self { at: At::Here(Box::new(turn.fork()), mask.clone()), back: None }))
            }
            At::Away | At::Lost => None,
        }
    }
}
