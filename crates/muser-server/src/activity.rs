//! What a connection is doing, and how long it may go on doing nothing.
//!
//! A connection is busy while it has a request whose answer has not been sent to its end. Between requests it may stay for
//! the keep-alive time; a head that has begun must arrive within the head's time; HTTP/2 pings are not requests, so a client
//! that only answers them is let go too. The places for connections are counted here as well: in all, and per address.
//! When all are taken, the connection that has been idle longest makes room.

use std::collections::HashMap;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use tokio::sync::Notify;
use tokio::time::Instant;

/// Locks, whoever panicked before.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What one connection is doing.
#[derive(Debug)]
pub(crate) struct Activity {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug)]
struct State {
    requests: usize,
    idle_since: Instant,
    /// When the head that is being read began.
    head_since: Option<Instant>,
    http2: bool,
    must_go: bool,
}

/// Until when a connection may stay as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Due {
    /// As long as its requests take.
    Never,
    /// Then it is closed in good manners.
    Idle(Instant),
    /// Then it is cut.
    Head(Instant),
    /// Somebody else needs the place.
    Now,
}

impl Activity {
    /// A connection that has just been taken: its first head begins.
    pub(crate) fn new() -> Arc<Self> {
        let now = Instant::now();
        let state =
            State { requests: 0, idle_since: now, head_since: Some(now), http2: false, must_go: false };
        Arc::new(Self { state: Mutex::new(state), changed: Notify::new() })
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut lock(&self.state));
        self.changed.notify_one();
    }

    /// The version is told.
    pub(crate) fn speaks(&self, http2: bool) {
        if http2 {
            self.change(|state| (state.http2, state.head_since) = (true, None));
        }
    }

    /// Something arrived.
    pub(crate) fn heard(&self) {
        let mut state = lock(&self.state);
        if state.requests == 0 && !state.http2 && state.head_since.is_none() {
            state.head_since = Some(Instant::now());
            self.changed.notify_one();
        }
    }

    /// A request begins; it ends when the value is dropped.
    pub(crate) fn request(self: &Arc<Self>) -> Busy {
        self.change(|state| {
            state.requests += 1;
            state.head_since = None;
        });
        Busy(Arc::clone(self))
    }

    /// Tells it to make room.
    fn make_room(&self) {
        self.change(|state| state.must_go = true);
    }

    /// Since when it is idle; nothing while it is busy or going.
    fn idle_since(&self) -> Option<Instant> {
        let state = lock(&self.state);
        (state.requests == 0 && !state.must_go).then_some(state.idle_since)
    }

    /// Until when it may go on like this.
    pub(crate) fn due(&self, head_time: Duration, idle_time: Duration) -> Due {
        let state = lock(&self.state);
        match (state.requests, state.must_go, state.head_since) {
            (0, true, _) => Due::Now,
            (0, false, Some(since)) => Due::Head(since + head_time),
            (0, false, None) => Due::Idle(state.idle_since + idle_time),
            _ => Due::Never,
        }
    }

    /// Completes when [`due`](Self::due) may have changed.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }
}

/// A request of a connection.
#[derive(Debug)]
pub(crate) struct Busy(Arc<Activity>);

impl Busy {
    /// Goes on until the body has been sent or given up.
    pub(crate) fn until_sent(self, body: Body) -> Body {
        Body::new(BusyBody { body, _busy: self })
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.change(|state| {
            state.requests = state.requests.saturating_sub(1);
            state.idle_since = Instant::now();
        });
    }
}

struct BusyBody {
    body: Body,
    _busy: Busy,
}

impl HttpBody for BusyBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The places for connections.
#[derive(Debug)]
pub(crate) struct Places {
    limit: usize,
    per_address: usize,
    taken: Mutex<Taken>,
    freed: Notify,
}

#[derive(Debug, Default)]
struct Taken {
    next: u64,
    connections: HashMap<u64, (Option<IpAddr>, Arc<Activity>)>,
}

impl Taken {
    /// Tells the connection that has been idle longest to go, among those of `of` if given. `false`: all are busy.
    fn make_room(&self, of: Option<IpAddr>) -> bool {
        let candidates = self.connections.values().filter(|(from, _)| of.is_none() || *from == of);
        let longest = candidates.filter_map(|(_, activity)| Some((activity.idle_since()?, activity)));
        match longest.min_by_key(|(since, _)| *since) {
            Some((_, activity)) => {
                activity.make_room();
                true
            }
            None => false,
        }
    }
}

impl Places {
    /// So many in all, and so many for one address.
    pub(crate) fn new(limit: usize, per_address: usize) -> Arc<Self> {
        let taken = Mutex::default();
        Arc::new(Self { limit, per_address, taken, freed: Notify::new() })
    }

    /// A place for a connection from `from`; waits while all are busy. Nothing: this address has its share already.
    pub(crate) async fn take(
        self: &Arc<Self>,
        from: Option<IpAddr>,
        activity: &Arc<Activity>,
    ) -> Option<Place> {
        loop {
            let freed = self.freed.notified();
            {
                let mut taken = lock(&self.taken);
                let same = taken.connections.values().filter(|(other, _)| from.is_some() && *other == from);
                if same.count() >= self.per_address && !taken.make_room(from) {
                    return None;
                }
                if taken.connections.len() < self.limit {
                    let number = taken.next;
                    taken.next += 1;
                    taken.connections.insert(number, (from, Arc::clone(activity)));
                    return Some(Place { places: Arc::clone(self), number });
                }
                taken.make_room(None);
            }
            freed.await;
        }
    }
}

/// A connection's place; free again when dropped.
#[derive(Debug)]
pub(crate) struct Place {
    places: Arc<Places>,
    number: u64,
}

impl Drop for Place {
    fn drop(&mut self) {
        lock(&self.places.taken).connections.remove(&self.number);
        self.places.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: Duration = Duration::from_secs(10);
    const IDLE: Duration = Duration::from_secs(90);

    #[tokio::test(start_paused = true)]
    async fn each_state_has_its_own_limit() {
        let begun = Instant::now();
        let activity = Activity::new();
        assert_eq!(activity.due(HEAD, IDLE), Due::Head(begun + HEAD));
        let busy = activity.request();
        let second = activity.request();
        activity.heard();
        assert_eq!(activity.due(HEAD, IDLE), Due::Never);
        drop(busy);
        assert_eq!(activity.due(HEAD, IDLE), Due::Never);
        tokio::time::advance(Duration::from_secs(500)).await;
        drop(second);
        let ended = Instant::now();
        assert_eq!(activity.due(HEAD, IDLE), Due::Idle(ended + IDLE));
        tokio::time::advance(Duration::from_mins(1)).await;
        activity.heard();
        let head = Instant::now();
        tokio::time::advance(Duration::from_secs(5)).await;
        // More of the same head gives no more time.
        activity.heard();
        assert_eq!(activity.due(HEAD, IDLE), Due::Head(head + HEAD));
        let pings = Activity::new();
        pings.speaks(true);
        pings.heard();
        assert_eq!(pings.due(HEAD, IDLE), Due::Idle(Instant::now() + IDLE));
    }

    #[tokio::test(start_paused = true)]
    async fn the_longest_idle_makes_room_and_an_address_has_a_share() {
        let places = Places::new(3, 2);
        let address = |last: u8| Some(IpAddr::from([10, 0, 0, last]));
        let (old, young, other) = (Activity::new(), Activity::new(), Activity::new());
        let busy = (other.request(), old.request(), young.request());
        let first = places.take(address(1), &old).await.expect("room");
        let _second = places.take(address(1), &young).await.expect("room");
        assert!(places.take(address(1), &Activity::new()).await.is_none(), "its share is two");
        let _third = places.take(address(2), &other).await.expect("room");
        drop(busy.1);
        tokio::time::advance(Duration::from_secs(1)).await;
        drop(busy.2);
        let newcomer = Activity::new();
        let waiting = {
            let (places, newcomer) = (Arc::clone(&places), Arc::clone(&newcomer));
            tokio::spawn(async move { places.take(address(3), &newcomer).await.is_some() })
        };
        tokio::time::sleep(Duration::from_millis(1)).await;
        assert_eq!(old.due(HEAD, IDLE), Due::Now);
        assert!(matches!(young.due(HEAD, IDLE), Due::Head(_) | Due::Idle(_)));
        drop(first);
        assert!(waiting.await.expect("it gets the place"));
    }
}
