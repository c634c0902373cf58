//! What can be set about an engine, with defaults that suit a desktop.

use std::time::Duration;

use crate::{EngineError, sampler::DraftSampling};

/// Most sequences computed together.
pub const MOST_PARALLEL: usize = 256;

/// How many tokens a draft proposes for a sequence in a round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DraftLength {
    /// As many as pay, by measured costs and acceptance; none where none do.
    #[default]
    Auto,
    /// Always so many, as far as the draft can; 0 leaves it idle.
    Fixed(usize),
}

/// Settings of an engine; they do not change while it runs.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Sequences computed together, 1 to 256; [`crate::parallel_that_fits`] knows how many memory bears.
    pub parallel: usize,
    /// Most positions of a sequence; `None` takes the model's. Never more than the model's.
    pub context: Option<usize>,
    /// Bytes for KV blocks; never exceeded. `None`: enough for `parallel` sequences of full context, but at most what the device
    /// has left, or, in host memory, 4 GiB unless one sequence alone needs more.
    pub kv_bytes: Option<u64>,
    /// Bytes of host memory for blocks that leave the device; they come back when a request needs them. 0 turns it off:
    /// on the CPU the blocks are in host memory already, so give them the bytes instead.
    pub host_bytes: usize,
    /// Most rows of a step in which nothing is being decoded; never more than the executor takes.
    pub prefill_rows: usize,
    /// Most rows of a step in which sequences are being decoded. What bounds such steps is `mixed_step`.
    pub mixed_rows: usize,
    /// Longest a step should take in which nothing is being decoded: prefill rows are cut to it (never below 64), so that
    /// cancelling and new requests take effect soon on slow machines too.
    pub prefill_step: Duration,
    /// Longest a step should take in which sequences are being decoded: how long prefill of one request may hold up the next
    /// token of another. By measured cost of rows and depth; a prompt goes on by 16 rows a step in any case.
    pub mixed_step: Duration,
    /// Bytes of host memory for rows of pictures that a later request may ask for again.
    pub image_cache_bytes: usize,
    /// Requests that may wait for a place.
    pub max_waiting: usize,
    /// Longest wait for a place, unless the request says otherwise.
    pub queue_timeout: Option<Duration>,
    /// Events that a reader may be behind before its sequence pauses.
    pub event_ring: usize,
    /// How long a sequence stays paused for its reader before it is dropped.
    pub slow_reader_timeout: Duration,
    /// Proposals per round when the executor has a draft model; they are verified with the next step.
    pub draft_length: DraftLength,
    /// How proposals for sampled sequences are drawn and verified.
    pub draft_sampling: DraftSampling,
    /// Positions beyond the window that stay in memory (draft verification writes that far ahead).
    pub window_slack: usize,
    /// Shortest part of a known block worth copying so that a request can continue inside it (positions).
    pub min_copy_tokens: usize,
    /// How long a request waits to hear from a [`crate::KvConnector`] how much of its prompt it has.
    pub source_timeout: Duration,
    /// How long a restore from a source may go without a block before the prompt is computed instead.
    pub restore_stall: Duration,
    /// What the prefix identity is salted with besides the executor's numeric route: fingerprints of the model and of
    /// the tokenizer.
    pub identity: Vec<u8>,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            parallel: 4,
            context: None,
            kv_bytes: None,
            host_bytes: 0,
            prefill_rows: 2048,
            mixed_rows: 2048,
            prefill_step: Duration::from_secs(1),
            mixed_step: Duration::from_millis(300),
            image_cache_bytes: 256 << 20,
            max_waiting: 256,
            queue_timeout: None,
            event_ring: 256,
            slow_reader_timeout: Duration::from_secs(30),
            draft_length: DraftLength::Auto,
            draft_sampling: DraftSampling::Exact,
            window_slack: 16,
            min_copy_tokens: 16,
            source_timeout: Duration::from_millis(500),
            restore_stall: Duration::from_secs(2),
            identity: Vec::new(),
        }
    }
}

impl EngineConfig {
    /// Is everything possible, for sequences of `context` positions in steps of `max_rows` rows?
    pub(crate) fn check(&self, context: usize, max_rows: usize) -> Result<(), EngineError> {
        let check = |key: &'static str, value: usize, expected: &str, good: bool| {
            if good {
                Ok(())
            } else {
                Err(EngineError::Config { key, expected: expected.into(), found: value.to_string() })
            }
        };
        check("parallel", self.parallel, "1 to 256", (1..=MOST_PARALLEL).contains(&self.parallel))?;
        check("context", context, "at least 2", context >= 2)?;
        check("prefill_rows", self.prefill_rows, "at least 1", self.prefill_rows >= 1)?;
        check("mixed_rows", self.mixed_rows, "at least 1", self.mixed_rows >= 1)?;
        check("event_ring", self.event_ring, "at least 1", self.event_ring >= 1)?;
        let rows_for_all = max_rows >= self.parallel;
        check("parallel", self.parallel, "at most the rows of a step on this device", rows_for_all)
    }
}
