//! What the engine's side and the transport are to each other. The transport ([`crate::Node`]) has [`Peers`]; whoever glues an
//! engine to it implements [`Serving`] (to give) and [`Sink`] (to take).

use std::sync::Arc;
use std::time::Duration;

use muser_kv::{CacheScope, KvGroup};

use crate::frame::{Hello, Load, Quote, Quoted, Reason, Request};
use crate::ids::{Digest, NodeKey, Nonce};
use crate::plan::{Place, Plan};
use crate::planes::{Component, Planes};
use crate::{Part, Refusal, Series};

/// What a node says of itself in HELLO: facts that do not change while it runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Does it read prompts for others?
    pub serves_prefill: bool,
    /// Does it take and give sessions?
    pub serves_sessions: bool,
    /// Most positions of a prompt.
    pub max_positions: u32,
    /// Digest of what is computed and how it lies in memory, without a draft.
    pub identity: Digest,
    /// The same of the draft's part; zeros without a draft.
    pub draft: Digest,
    /// Digest of what is computed, however.
    pub semantic: Digest,
    /// Positions that a row of a sliding layer reads.
    pub window: u32,
    /// What the engine's blocks consist of.
    pub planes: Planes,
    /// The numeric route.
    pub route: String,
    /// The program and its version.
    pub build: String,
    /// Parts of the identity.
    pub parts: Vec<Part>,
}

impl Facts {
    /// What HELLO says of them: on stream `stream` of `streams`, to a peer that is known as `knows` and may do what `limits`
    /// says.
    pub fn hello(
        &self,
        connection: Nonce,
        (stream, streams): (u8, u8),
        limits: Limits,
        knows: NodeKey,
    ) -> Hello {
        Hello {
            connection,
            stream,
            streams,
            serves_prefill: self.serves_prefill && limits.may_prefill,
            serves_sessions: self.serves_sessions,
            max_positions: self.max_positions,
            max_transfers: limits.transfers,
            rows_a_minute: limits.rows_a_minute,
            identity: self.identity,
            draft: self.draft,
            semantic: self.semantic,
            window: self.window,
            planes: self.planes.clone(),
            route: self.route.clone(),
            build: self.build.clone(),
            parts: self.parts.clone(),
            knows,
            next_key: NodeKey([0; 32]),
            next_proof: [0; 64],
        }
    }
}

/// What a peer may do here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// May it ask for prompts to be read?
    pub may_prefill: bool,
    /// Transfers at once.
    pub transfers: u16,
    /// Rows a minute; 0: as many as it likes.
    pub rows_a_minute: u32,
}

/// Whether a node could give what another one would have computed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fit {
    /// Bit for bit.
    Exact,
    /// The same model by another route: only where the consumer said `nearby`.
    Nearby,
    /// Not at all.
    Unlike {
        /// The part that differs.
        part: String,
        /// Ours, if it can be shown.
        ours: String,
        /// Theirs.
        theirs: String,
    },
}

impl Fit {
    /// How a peer fits.
    pub fn of(ours: &Facts, theirs: &Hello) -> Self {
        if ours.identity == theirs.identity {
            return Self::Exact;
        }
        let same_rows = ours.planes.select(false) == theirs.planes.select(false);
        if ours.semantic == theirs.semantic && same_rows {
            return Self::Nearby;
        }
        let differing = ours.parts.iter().find_map(|part| {
            let their = theirs.parts.iter().find(|their| their.name == part.name);
            (their.map(|their| their.digest) != Some(part.digest)).then_some((part, their))
        });
        let (part, ours, theirs) = match differing {
            Some((part, their)) => (
                part.name.clone(),
                part.shown.clone(),
                their.map_or_else(|| "nothing".to_owned(), |their| their.shown.clone()),
            ),
            None => ("identity".to_owned(), String::new(), String::new()),
        };
        Self::Unlike { part, ours, theirs }
    }
}

/// Who asks: the registry's name and key of the peer at the other end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its name here.
    pub name: Arc<str>,
    /// Its key.
    pub key: NodeKey,
}

/// The giving side, and what a node says of itself. Calls come on the transport's threads and must return at once.
pub trait Serving: Send + Sync {
    /// What HELLO says.
    fn facts(&self) -> Facts;

    /// How busy the engine is; stamps are filled in by the transport.
    fn load(&self) -> Load;

    /// Answers a question, now or later; dropping `answer` is no answer.
    fn quote(&self, peer: &Peer, quote: Quote, answer: Answer);

    /// A request that the frames' checks, the peer's rights and its limits let through. The producer admits it with
    /// [`Outlet::begin`] or refuses it with [`Outlet::give_up`], then computes, and gives blocks as they become final.
    /// Requests of one series of one peer follow each other: the earlier one's outlet has ended then, and what it has computed
    /// may serve. A connection that is lost ends the outlet with [`Ended::Lost`]: the producer goes on computing for
    /// [`RESUMPTION`] in case a request of the same series comes.
    fn request(&self, peer: &Peer, request: Arc<Request>, outlet: Arc<dyn Outlet>);
}

/// How long a producer goes on for a consumer whose connection is lost.
pub const RESUMPTION: Duration = Duration::from_secs(10);

/// Takes the answer to a quote; dropped without a call where there is none.
pub type Answer = Box<dyn FnOnce(Quoted) + Send>;

/// Why nothing can be given any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Ended {
    /// The consumer has all of it installed.
    #[error("the consumer has it")]
    Acknowledged,
    /// The consumer, or the producer itself, ended it.
    #[error("the transfer is over: {}", .0.label())]
    Aborted(Reason),
    /// The connection is lost.
    #[error("the connection is lost")]
    Lost,
}

/// The producer's end of a transfer. May be used from several threads, none of them the engine's: [`Outlet::block`] waits.
///
/// ```text
/// request ─► begin(stages) ─► for each block that is final: block(…) ─► (STAGE and SEAL go by themselves) ─► wait_end()
///                             progress(rows, rest) at least after each step
/// ```
pub trait Outlet: Send + Sync {
    /// Admits the request. `stages`: those of the request's that will be given; a window that has left memory cannot be.
    fn begin(&self, stages: &[u32]) -> Result<(), Ended>;

    /// The chunks of the request.
    fn plan(&self) -> Arc<Plan>;

    /// Must this block still be given? Also those that an earlier transfer of the series has brought: their digests are part
    /// of the root.
    fn lacks(&self, group: KvGroup, block: u32) -> bool;

    /// Gives a block whose rows (those that belong to the prefix) are final: its bytes as the engine exported them, of which
    /// [`Facts::planes`] says what they are. Waits while the consumer has no room. What the consumer holds is not sent.
    fn block(&self, group: KvGroup, block: u32, bytes: &[u8]) -> Result<(), Ended>;

    /// Gives one layer of a block, for engines that give layers before the whole step is over.
    fn layer(
        &self,
        group: KvGroup,
        block: u32,
        component: Component,
        layer: u16,
        bytes: &[u8],
    ) -> Result<(), Ended>;

    /// Positions that are final, and how long the rest will take. Sent at once; the transport repeats it as a sign of life.
    fn progress(&self, rows: u32, rest: Option<Duration>);

    /// Ends the transfer: [`Reason::Gone`] where memory was needed, [`Reason::Busy`] instead of an admission, and so on.
    fn give_up(&self, reason: Reason);

    /// Is it over?
    fn ended(&self) -> Option<Ended>;

    /// Is called once when it is over, from any thread; at once if it is.
    fn on_end(&self, told: Box<dyn FnOnce(Ended) + Send>);
}

/// How a fetch ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FetchEnd {
    /// Everything is installed and acknowledged.
    #[error("installed")]
    Installed,
    /// The peer ended it.
    #[error("the node ended it: {}", .0.label())]
    Peer(Reason),
    /// What the peer sent was not believed.
    #[error("refused: {0}")]
    Refused(Refusal),
    /// The connection is lost, or there was none.
    #[error("the connection is lost")]
    Lost,
    /// The peer has been silent for [`SILENCE`].
    #[error("the node is silent")]
    Silent,
    /// The budget is used up.
    #[error("the time is used up")]
    Late,
    /// The consumer cancelled.
    #[error("cancelled")]
    Cancelled,
}

/// How long a busy peer may be silent.
pub const SILENCE: Duration = Duration::from_millis(1500);

/// The taking side. Calls come on the transport's threads, in the order of what they tell but for chunks, which come in any
/// order and from several threads at once.
pub trait Sink: Send + Sync {
    /// The producer has admitted the request and will give these stages and the cut.
    fn begun(&self, stages: &[u32]);

    /// A chunk whose digest is right. `rows` is what [`crate::Plane::gather`] of the consumer's plane gives, so that
    /// [`crate::Plane::scatter`] puts it in its place. `false`: it could not be written, and the fetch ends as cancelled.
    fn chunk(&self, place: &Place, rows: &[u8]) -> bool;

    /// Everything without which the prefix cannot be resumed at `boundary` has been written and was bound by the producer: a
    /// stage, or at the end the cut. To be answered with [`Fetching::installed`] after the switch.
    fn ready(&self, boundary: u32);

    /// A sign of life: rows that are final there, and how long the rest will take.
    fn progress(&self, rows: u32, rest: Option<Duration>);

    /// It is over; the series has what came. Called exactly once, and nothing is called after it.
    fn ended(&self, series: Series, end: FetchEnd);
}

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Fetch {
    /// The prefix, with what is there of it.
    pub series: Series,
    /// After this nobody wants it any more.
    pub budget: Duration,
    /// Smaller is sooner; 128 is a client's.
    pub priority: u8,
}

/// The consumer's end of a transfer. Dropping it does not cancel.
pub trait Fetching: Send + Sync {
    /// The prefix up to a boundary that [`Sink::ready`] named is installed; the cut's is what ACK tells the producer.
    fn installed(&self, boundary: u32);

    /// Nobody wants it any more. [`Sink::ended`] follows.
    fn cancel(&self);
}

/// A peer as it is known now.
#[derive(Clone, Debug)]
pub struct PeerState {
    /// Who it is.
    pub peer: Peer,
    /// Where it can be reached; `None`: it dials us.
    pub address: Option<String>,
    /// May it ask us to read prompts?
    pub may_prefill: bool,
    /// Is there a connection?
    pub connected: bool,
    /// What it said of itself; kept when the connection is lost.
    pub hello: Option<Arc<Hello>>,
    /// How busy it said it is, and how long ago.
    pub load: Option<(Load, Duration)>,
    /// Round trip, smoothed.
    pub round_trip: Option<Duration>,
    /// Bytes a second that came while something was coming, smoothed.
    pub link_rate: Option<f64>,
    /// Transfers from it that go on.
    pub fetching: usize,
    /// Transfers to it that go on.
    pub giving: usize,
    /// The last thing that went wrong, for people.
    pub last_fault: Option<String>,
}

/// All peers, as the consuming side sees them.
pub trait Peers: Send + Sync {
    /// Those in the registry.
    fn list(&self) -> Vec<PeerState>;

    /// What nodes are told of whose prompt it is: of a cache scope of this process, by a key that never leaves, so that it tells
    /// them nothing but that two prompts are of the same client or of different ones. Zeros of the scope of everybody.
    fn tenant(&self, scope: &CacheScope) -> Digest;

    /// Asks one. `answer` is dropped if the connection is lost, or the peer does not answer for a second.
    fn quote(&self, peer: &str, quote: Quote, answer: Answer);

    /// Fetches from one. The outcome is told to `sink`, also where there is no connection.
    fn fetch(&self, peer: &str, fetch: Fetch, sink: Arc<dyn Sink>) -> Arc<dyn Fetching>;
}
