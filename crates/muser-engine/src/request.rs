//! What a caller asks of the engine: plain values, valid by type as far as that goes; [`crate::EngineHandle::submit`]
//! checks the rest at the door, and nothing re-checks afterwards.

use std::{ops::Range, sync::Arc, time::Duration};

use muser_backend::TowerImage;
use muser_kv::CacheScope;

use crate::{PrefixOutlet, SamplingParams, constraint::Constraint};

/// What the engine reads before it writes: token ids, some of which may stand for image rows.
#[derive(Clone, Debug, Default)]
pub struct Prompt {
    /// One id per position. At image positions any valid id serves (it is not looked up).
    pub tokens: Vec<u32>,
    /// Images, ascending and not overlapping.
    pub images: Vec<ImageRows>,
}

impl From<Vec<u32>> for Prompt {
    fn from(tokens: Vec<u32>) -> Self {
        Self { tokens, images: Vec::new() }
    }
}

/// An image whose rows take the place of as many token rows from `at` on.
#[derive(Clone, Debug)]
pub struct ImageRows {
    /// First position.
    pub at: usize,
    /// The rows, or what they are made of.
    pub source: ImageSource,
    /// Digest of everything the rows depend on (pixels, projector, preprocessing); it enters the prefix identity, also of the
    /// position before the first row, which opens the image.
    pub digest: [u8; 32],
}

/// Where the rows of an image come from.
#[derive(Clone, Debug)]
pub enum ImageSource {
    /// Hidden size values per position.
    Rows(Arc<[f32]>),
    /// The executor's tower makes them when a step needs one: not at all for a prefix that is known.
    Picture(TowerImage),
}

impl ImageRows {
    /// Positions that it takes.
    pub fn positions(&self, hidden: usize) -> usize {
        match &self.source {
            ImageSource::Rows(rows) => rows.len() / hidden,
            ImageSource::Picture(picture) => picture.tokens(),
        }
    }
}

/// What is wanted for the prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RequestKind {
    /// Continue it with sampled tokens.
    #[default]
    Generate,
    /// The mean of its final hidden states; no token is sampled.
    Embed,
}

/// Watches the tokens of one choice and says when to stop (stop strings, end of a turn, ...).
///
/// Made on the submitting thread; the engine calls it on its own, once per token and after the token's event was sent.
pub trait StopWatch: Send {
    /// Takes the next token; `true` ends the choice with [`crate::FinishReason::StopWatch`].
    fn push(&mut self, token: u32) -> bool;
}

/// Makes the stop watch of choice `index`.
pub type StopWatchFactory = Box<dyn Fn(u32) -> Box<dyn StopWatch> + Send>;

/// Makes the constraint of choice `index`.
pub type ConstraintFactory = Box<dyn Fn(u32) -> Box<dyn Constraint> + Send>;

/// What happens when prompt and output have filled the context.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ContextPolicy {
    /// A prompt that leaves no room is refused at the door; a choice that fills the context ends with
    /// [`crate::FinishReason::Context`].
    #[default]
    Error,
    /// Whole old turns are dropped (of plain text the older half) and the rest is read again as if it had been the prompt. Each time an
    /// [`crate::Event::Shifted`] says how much went. When no turn may be dropped any more, as with `Error`.
    Shift(ShiftPlan),
}

/// Which parts of a prompt may go. Offsets are positions in [`Prompt::tokens`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShiftPlan {
    /// Positions `0..keep` (system message, tools) always stay, and so does everything before the first turn.
    pub keep: usize,
    /// First position of each turn after `keep`, ascending. The last one (the newest, with everything generated after
    /// it) always stays; the others go oldest first and only whole, until an eighth of the context is free.
    pub turns: Vec<usize>,
    /// The text has no turns: of what stands after `keep` the older half goes, read or written. The prompt itself must fit.
    pub plain: bool,
}

impl ShiftPlan {
    /// What goes of a text of `len` positions so that it is shorter than `limit`; it is taken off the plan.
    pub(crate) fn leaving(&mut self, len: usize, limit: usize) -> Option<Range<usize>> {
        let fits = |gone: &Range<usize>| !gone.is_empty() && len - gone.len() < limit;
        let Some(&first) = self.turns.first() else {
            let left = len.saturating_sub(self.keep);
            return Some(self.keep..self.keep + left / 2).filter(|gone| self.plain && fits(gone));
        };
        let target = limit - (limit / 8).max(1);
        let last = self.turns.len() - 1;
        let drop = (1..=last).find(|&k| len - (self.turns[k] - first) <= target).unwrap_or(last);
        let gone = Some(first..self.turns[drop]).filter(fits)?;
        self.turns.drain(..drop);
        self.turns.iter_mut().for_each(|turn| *turn -= gone.len());
        Some(gone)
    }
}

/// One request. [`Request::new`] gives the defaults.
pub struct Request {
    /// What to read.
    pub prompt: Prompt,
    /// What for.
    pub kind: RequestKind,
    /// Most tokens to sample per choice; `None` means until the context is full. 0 reads the prompt and samples nothing.
    pub max_tokens: Option<u32>,
    /// Filters and temperature.
    pub sampling: SamplingParams,
    /// Seed of the sampler; `None` draws one, which [`crate::Submission::seed`] and [`crate::Event::Started`] report.
    pub seed: Option<u64>,
    /// Ids that end a choice. They come as [`crate::FinishReason::Stop`], never as a token event.
    pub stop_ids: Vec<u32>,
    /// Makes the stop watch of each choice.
    pub stop_watch: Option<StopWatchFactory>,
    /// Makes the constraint of each choice.
    pub constraint: Option<ConstraintFactory>,
    /// Choices to sample from the same prompt (at least 1). They share the prompt's blocks.
    pub n: u32,
    /// `Some(k)`: each token comes with its log-probability and the `k` most probable alternatives (0 to 20).
    pub logprobs: Option<u8>,
    /// `Some(k)`: the prompt's tokens, too, have their log-probabilities reported, with `k` alternatives each (0 to 20), in
    /// one [`crate::Event::Prompt`]. Rows that are known already have no logits any more, so such a request reuses nothing
    /// and leaves nothing; it is read in chunks all the same.
    pub prompt_logprobs: Option<u8>,
    /// Each token comes with a hash of the logits it was drawn from (exactness tests; costs a pass over the logits).
    pub hash_logits: bool,
    /// Higher goes first in the waiting queue and is preempted last.
    pub priority: i32,
    /// Longest wait for a place; `None` takes the engine's setting.
    pub queue_timeout: Option<Duration>,
    /// Longest time from submission to the end; what exists by then is kept.
    pub deadline: Option<Duration>,
    /// Use known prefixes and leave this one for others. With `false` nothing is reused and nothing stays.
    pub cache: bool,
    /// Ids that have been written already, where an answer goes on that was begun elsewhere: they count as sampled (limits,
    /// penalties, sampler, stop watch, constraint) and come as no event. The text is the one that it would have been without the
    /// break, given the same seed. For one choice.
    pub written: Vec<u32>,
    /// Most positions that are taken from what is known, in memory or from a source; `None` for all. What is known further is
    /// computed again, to the same bits.
    pub most_reused: Option<usize>,
    /// Hears how far the prompt is final, to give it away while the rest is computed. For one choice.
    pub outlet: Option<Box<dyn PrefixOutlet>>,
    /// It is computed for a peer: no other peer is asked for its prefix.
    pub for_peer: bool,
    /// Whose prefixes those are: nothing is reused from other scopes, nor left for them.
    pub scope: CacheScope,
    /// What to do when the context is full.
    pub context_policy: ContextPolicy,
}

impl Request {
    /// A request with the published sampling defaults, one choice, no stops but `stop_ids`.
    pub fn new(prompt: impl Into<Prompt>, stop_ids: Vec<u32>) -> Self {
        Self {
            prompt: prompt.into(),
            kind: RequestKind::Generate,
            max_tokens: None,
            sampling: SamplingParams::default(),
            seed: None,
            stop_ids,
            stop_watch: None,
            constraint: None,
            n: 1,
            logprobs: None,
            prompt_logprobs: None,
            hash_logits: false,
            priority: 0,
            queue_timeout: None,
            deadline: None,
            cache: true,
            written: Vec::new(),
            most_reused: None,
            outlet: None,
            for_peer: false,
            scope: CacheScope::EVERYBODY,
            context_policy: ContextPolicy::Error,
        }
    }
}

impl std::fmt::Debug for Request {
    // No prompt text or ids: requests end up in logs.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Request")
            .field("kind", &self.kind)
            .field("prompt_tokens", &self.prompt.tokens.len())
            .field("max_tokens", &self.max_tokens)
            .field("n", &self.n)
            .finish_non_exhaustive()
    }
}
