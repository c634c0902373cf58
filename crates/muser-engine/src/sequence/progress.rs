//! How far a sequence has come, for its limits and its last words.

use std::time::Duration;

use crate::{Timings, Usage};

/// Counts and times of one choice.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Progress {
    admitted_at: Option<Duration>,
    first_token_at: Option<Duration>,
    generated: u32,
    decode_steps: u32,
    drafted: u32,
    accepted: u32,
}

impl Progress {
    /// Tokens sampled.
    pub(crate) fn generated(&self) -> u32 {
        self.generated
    }

    /// It has a slot. The first time counts.
    pub(crate) fn note_admitted(&mut self, now: Duration) {
        self.admitted_at.get_or_insert(now);
    }

    pub(crate) fn admitted_at(&self) -> Option<Duration> {
        self.admitted_at
    }

    /// A step that samples from its rows.
    pub(crate) fn note_step(&mut self) {
        self.decode_steps += 1;
    }

    pub(crate) fn note_token(&mut self, now: Duration) {
        self.first_token_at.get_or_insert(now);
        self.generated += 1;
    }

    /// A token that was sampled elsewhere.
    pub(crate) fn note_written(&mut self) {
        self.generated += 1;
    }

    pub(crate) fn note_proposals(&mut self, drafted: usize, accepted: usize) {
        self.drafted += drafted as u32;
        self.accepted += accepted as u32;
    }

    /// Its part of the usage.
    pub(crate) fn usage(&self) -> Usage {
        Usage {
            completion_tokens: self.generated,
            decode_steps: self.decode_steps,
            drafted_tokens: self.drafted,
            accepted_tokens: self.accepted,
            ..Usage::default()
        }
    }

    /// Its part of the times, for a request that came at `submitted_at`.
    pub(crate) fn timings(&self, submitted_at: Duration, now: Duration) -> Timings {
        let admitted = self.admitted_at.unwrap_or(now);
        let first = self.first_token_at.unwrap_or(now);
        Timings {
            queue: admitted.saturating_sub(submitted_at),
            prefill: first.saturating_sub(admitted),
            decode: now.saturating_sub(first),
            ..Timings::default()
        }
    }
}
