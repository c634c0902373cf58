//! What the engine says about a request: plain data, token ids instead of text.

use std::time::Duration;

/// Most alternatives that come with a token.
pub const MAX_TOP_LOGPROBS: usize = 20;

/// One event of a submission. After the last `Finished` (one per choice) or a `Failed` the stream ends.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The prompt has been read; the first token follows.
    Started(Started),
    /// Log-probabilities of the prompt's tokens, if asked for. Comes once, before `Started`.
    Prompt(PromptLogprobs),
    /// A token was sampled.
    Token(Token),
    /// The context was full: old turns were dropped and the rest was read again.
    Shifted {
        /// Which choice.
        index: u32,
        /// Positions dropped.
        dropped_tokens: u32,
    },
    /// The answer to a [`crate::RequestKind::Embed`] request: hidden size values.
    Embedding(Box<[f32]>),
    /// A choice has ended.
    Finished(Finished),
    /// The whole request has failed; nothing follows.
    Failed(RequestError),
}

/// Facts known once the prompt has been read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Started {
    /// Positions in the prompt.
    pub prompt_tokens: u32,
    /// Of these, taken from known blocks instead of computed.
    pub cached_tokens: u32,
    /// Time in the waiting queue.
    pub queue_time: Duration,
    /// Time from admission until the prompt was read.
    pub prefill_time: Duration,
    /// Seed in use, given or drawn.
    pub seed: u64,
}

/// How probable the prompt's own tokens were, each after those before it. The first one has nothing before it and is not
/// among them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PromptLogprobs {
    /// Log-probability and rank (1: nothing was more probable) of the tokens at positions 1, 2, ...
    pub tokens: Vec<(f32, u32)>,
    /// The most probable tokens at the same positions, as many of each as were asked for, most probable first.
    pub top: Vec<(u32, f32)>,
    /// How many of each.
    pub top_each: usize,
}

impl PromptLogprobs {
    /// The most probable tokens at position `at` (from 1).
    pub fn top_at(&self, at: usize) -> &[(u32, f32)] {
        let from = at.saturating_sub(1) * self.top_each;
        self.top.get(from..from + self.top_each).unwrap_or_default()
    }
}

/// A sampled token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Token {
    /// Which choice, from 0.
    pub index: u32,
    /// The token id.
    pub id: u32,
    /// Log-probability in the model's own distribution (before bias, penalties, mask and filters), if asked for.
    pub logprob: Option<f32>,
    /// The most probable tokens of that distribution, if asked for.
    pub top: TopLogprobs,
    /// First 8 bytes of BLAKE3 over the logits (f32, little-endian), if asked for.
    pub logit_hash: Option<u64>,
}

/// Up to [`MAX_TOP_LOGPROBS`] pairs of token id and log-probability, most probable first, ties by lower id. Inline, so
/// that an event costs no allocation.
#[derive(Clone, Copy, PartialEq)]
pub struct TopLogprobs {
    len: u8,
    items: [(u32, f32); MAX_TOP_LOGPROBS],
}

impl Default for TopLogprobs {
    fn default() -> Self {
        Self { len: 0, items: [(0, 0.0); MAX_TOP_LOGPROBS] }
    }
}

impl TopLogprobs {
    /// Adds a pair; the caller adds them in order. Beyond the capacity nothing is kept.
    pub fn push(&mut self, id: u32, logprob: f32) {
        if let Some(item) = self.items.get_mut(usize::from(self.len)) {
            *item = (id, logprob);
            self.len += 1;
        }
    }

    /// The pairs.
    pub fn as_slice(&self) -> &[(u32, f32)] {
        &self.items[..usize::from(self.len)]
    }
}

impl std::fmt::Debug for TopLogprobs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.as_slice()).finish()
    }
}

/// The end of a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finished {
    /// Which choice.
    pub index: u32,
    /// Why.
    pub reason: FinishReason,
    /// What it took.
    pub usage: Usage,
    /// How long.
    pub timings: Timings,
}

/// Why a choice ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// This stop id was sampled.
    Stop(u32),
    /// The stop watch said so (its token was sent).
    StopWatch,
    /// `max_tokens` were sampled.
    Length,
    /// Prompt and output fill the context.
    Context,
    /// The caller dropped or cancelled the submission, or the engine shut down.
    Cancelled,
    /// The request's deadline passed.
    Deadline,
    /// Events were not read for too long.
    SlowReader,
}

/// Token counts of a choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Positions in the prompt.
    pub prompt_tokens: u32,
    /// Of these, taken from known blocks.
    pub cached_tokens: u32,
    /// Positions that a prefix source brought, so that they were not computed.
    pub restored_tokens: u32,
    /// Of these, positions that a peer computed.
    pub handed_tokens: u32,
    /// Tokens sampled, a final stop id included.
    pub completion_tokens: u32,
    /// Steps in which tokens of this choice were sampled: with drafting fewer than tokens.
    pub decode_steps: u32,
    /// Proposals of a draft that were verified.
    pub drafted_tokens: u32,
    /// Proposals accepted.
    pub accepted_tokens: u32,
}

/// Durations of a choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timings {
    /// From submission to admission.
    pub queue: Duration,
    /// From admission to the first sampled token.
    pub prefill: Duration,
    /// Of this, bringing positions from a prefix source.
    pub restore: Duration,
    /// From the first sampled token to the end.
    pub decode: Duration,
}

/// Why a request failed after it was accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// It waited too long for a place.
    #[error("no place became free within {waited_ms} ms")]
    QueueTimeout {
        /// How long it waited.
        waited_ms: u64,
    },
    /// The step that computed it failed on the device; other requests go on.
    #[error("the device failed while computing this request: {0}")]
    Device(String),
    /// The step panicked: a bug in muser.
    #[error("bug: the step that computed this request panicked: {0}")]
    Panic(String),
    /// The KV memory does not hold it although nothing else runs: blocks are held for export or import.
    #[error("KV memory ran out at {positions} positions although nothing else is running")]
    Capacity {
        /// Positions that had memory.
        positions: usize,
    },
    /// The model's logits were not numbers.
    #[error(
        "the model's logits at position {position} are not finite: the weights or the device are at fault"
    )]
    NotFinite {
        /// Position of the row.
        position: u32,
    },
    /// The constraint refused the sampled token or left none.
    #[error("the constraint failed: {0}")]
    Constraint(String),
    /// The engine stopped before the request was done.
    #[error("the engine shut down")]
    ShutDown,
}
