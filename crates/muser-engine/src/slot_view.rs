//! What each slot is doing, for `/slots` and the dashboard. Written by the engine, read by anyone, no locks: each field
//! is exact, fields of one view may be a step apart.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// What a slot is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotState {
    /// Nothing.
    Idle,
    /// Reading a prompt.
    Prefill,
    /// Writing tokens.
    Decode,
    /// Waiting for its reader.
    Paused,
}

/// One slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotView {
    /// Slot number, from 0.
    pub slot: usize,
    /// What it is doing; the rest is meaningful unless `Idle`.
    pub state: SlotState,
    /// [`crate::Submission::id`] of its request.
    pub request: u64,
    /// Which choice of the request.
    pub index: u32,
    /// Positions in the prompt.
    pub prompt_tokens: u32,
    /// Of these, taken from known blocks.
    pub cached_tokens: u32,
    /// Positions whose KV exists.
    pub computed_tokens: u32,
    /// Tokens sampled.
    pub generated_tokens: u32,
}

#[derive(Debug, Default)]
pub(crate) struct SlotCell {
    state: AtomicU32,
    request: AtomicU64,
    index: AtomicU32,
    prompt: AtomicU32,
    cached: AtomicU32,
    computed: AtomicU32,
    generated: AtomicU32,
}

impl SlotCell {
    pub(crate) fn write(&self, view: &SlotView) {
        self.request.store(view.request, Ordering::Relaxed);
        self.index.store(view.index, Ordering::Relaxed);
        self.prompt.store(view.prompt_tokens, Ordering::Relaxed);
        self.cached.store(view.cached_tokens, Ordering::Relaxed);
        self.computed.store(view.computed_tokens, Ordering::Relaxed);
        self.generated.store(view.generated_tokens, Ordering::Relaxed);
        self.state.store(view.state as u32, Ordering::Release);
    }

    pub(crate) fn clear(&self) {
        self.state.store(SlotState::Idle as u32, Ordering::Release);
    }

    pub(crate) fn read(&self, slot: usize) -> SlotView {
        let state = match self.state.load(Ordering::Acquire) {
            1 => SlotState::Prefill,
            2 => SlotState::Decode,
            3 => SlotState::Paused,
            _ => SlotState::Idle,
        };
        SlotView {
            slot,
            state,
            request: self.request.load(Ordering::Relaxed),
            index: self.index.load(Ordering::Relaxed),
            prompt_tokens: self.prompt.load(Ordering::Relaxed),
            cached_tokens: self.cached.load(Ordering::Relaxed),
            computed_tokens: self.computed.load(Ordering::Relaxed),
            generated_tokens: self.generated.load(Ordering::Relaxed),
        }
    }
}
