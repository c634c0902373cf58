//! What the routes need of an engine, as one narrow trait.
//!
//! Token ids go in, token ids come out; text is this crate's business (through `muser-text`). The live engine is
//! bound in [`crate::engine_backend`]; tests bind a script. The invariants an implementation keeps: dropping a
//! [`EventStream`] cancels its request within one step, and a stream that is not polled holds up nobody else.

use std::pin::Pin;

use futures_util::Stream;
use muser_backend::TowerInfo;
use muser_engine::{Event, HistogramSnapshot, Request, SubmitError};

/// The events of one request; dropping it cancels the request.
pub struct EventStream {
    /// The seed in use.
    pub seed: u64,
    /// The events, in the engine's order.
    pub events: Pin<Box<dyn Stream<Item = Event> + Send>>,
}

/// One slot's state, for `/slots` and the page.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Slot {
    /// Its number.
    pub id: usize,
    /// Whether a request runs in it.
    pub busy: bool,
    /// Prompt tokens of the request.
    pub prompt_tokens: usize,
    /// Prompt tokens in the cache so far.
    pub processed_tokens: usize,
    /// Prompt tokens that were reused.
    pub cached_tokens: usize,
    /// Tokens generated.
    pub generated_tokens: usize,
}

/// The engine's state and totals since the start.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Snapshot {
    /// Slots.
    pub slots: Vec<Slot>,
    /// Requests that run.
    pub running: u64,
    /// Requests that wait.
    pub waiting: u64,
    /// KV blocks of the full layers that running sequences use.
    pub kv_blocks_used: u64,
    /// All KV blocks of the full layers.
    pub kv_blocks_total: u64,
    /// Bytes of all KV blocks that running sequences use.
    pub kv_bytes_used: u64,
    /// Bytes of all KV blocks that are kept for reuse.
    pub kv_bytes_kept: u64,
    /// Bytes of all KV blocks.
    pub kv_bytes_total: u64,
    /// Prompt tokens looked up in the prefix cache.
    pub prefix_queries: u64,
    /// Prompt tokens found there.
    pub prefix_hits: u64,
    /// Prompt tokens looked up in packs.
    pub external_queries: u64,
    /// Prompt tokens found there.
    pub external_hits: u64,
    /// Of these, read by other nodes.
    pub handed_tokens: u64,
    /// Rows of prompts computed.
    pub prefill_rows: u64,
    /// Rows of a prompt that a second computes at its beginning, by measured steps; 0 before that is known.
    pub prefill_rate: u64,
    /// Restores from packs that came to nothing, so that the prompt was computed, by reason.
    pub restore_failures: Vec<(&'static str, u64)>,
    /// Objects of the store that were not believed, by reason.
    pub pack_refusals: Vec<(&'static str, u64)>,
    /// Lookups of prompts that the store has under another KV type, numeric route or model.
    pub pack_unlike: u64,
    /// Packs in the store.
    pub packs: u64,
    /// Bytes of the store.
    pub pack_bytes: u64,
    /// Bytes of KV blocks in host memory.
    pub host_bytes: u64,
    /// KV blocks that came back from there.
    pub host_blocks_restored: u64,
    /// Steps of the device.
    pub steps: HistogramSnapshot,
    /// Drafts for all sequences.
    pub draft_rounds: HistogramSnapshot,
    /// Prefixes brought from packs.
    pub restores: HistogramSnapshot,
    /// Blocks copied out for packs.
    pub exports: HistogramSnapshot,
    /// Pictures whose rows were made, the rows, and the time that took.
    pub images_encoded: u64,
    /// See above.
    pub image_rows_encoded: u64,
    /// See above.
    pub tower_time: std::time::Duration,
    /// Pictures whose rows were still there.
    pub image_cache_hits: u64,
    /// Pictures whose rows could not be made.
    pub image_errors: u64,
    /// Bytes of rows that are kept.
    pub image_cache_bytes: u64,
    /// Requests that were set aside and run again.
    pub preemptions: u64,
    /// Time from a slot to the end of choices that ended lately; zero before the first.
    pub turnaround: std::time::Duration,
    /// Drafts verified.
    pub drafts: u64,
    /// Tokens proposed by the draft model.
    pub drafted: u64,
    /// Tokens of them accepted.
    pub drafted_accepted: u64,
    /// The same by place in the draft, the first one first; places that were never proposed for are left out.
    pub drafted_accepted_by_place: Vec<u64>,
}

impl Snapshot {
    /// When a request that comes now may get a slot: behind those that wait, as slots become free at the pace of late; `None`
    /// before anything has ended.
    pub fn expected_wait(&self, slots: usize) -> Option<std::time::Duration> {
        let free_every = self.turnaround.checked_div(u32::try_from(slots.max(1)).unwrap_or(u32::MAX))?;
        let ahead = u32::try_from(self.waiting).unwrap_or(u32::MAX).saturating_add(1);
        (!self.turnaround.is_zero()).then(|| free_every.saturating_mul(ahead))
    }
}

/// An engine.
pub trait Backend: Send + Sync + 'static {
    /// Takes a request or says at once why not.
    fn submit(&self, request: Request) -> Result<EventStream, SubmitError>;

    /// State and totals; never waits for a step.
    fn snapshot(&self) -> Snapshot;

    /// The number of slots.
    fn slots(&self) -> usize;

    /// Ends all running requests as cancelled and takes no more.
    fn abort_all(&self);

    /// Why no request can succeed until the process is started anew; `None` as long as the device works.
    fn lost(&self) -> Option<String> {
        None
    }

    /// The tower that makes rows of pictures, if there is one.
    fn tower(&self) -> Option<TowerInfo> {
        None
    }

    /// Words about backend and device, for `/props` and the page.
    fn device(&self) -> String;

    /// How K and V are stored, and the numeric route: equal routes give equal bits. For `/props`.
    fn numerics(&self) -> Numerics;
}

/// What decides the bits of an answer besides the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Numerics {
    /// `16`, `8`; with the scalar reference `f32` or `f16`.
    pub kv_type: &'static str,
    /// Arithmetic, its revision and the KV type.
    pub route: String,
}
