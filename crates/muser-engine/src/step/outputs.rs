//! What a step is asked for on behalf of each sequence, and where it lies in the outputs.

use muser_backend::RowWants;

use crate::{RequestKind, plan::PlanItem, sampler::DraftSampling, sequence::Sequence};

/// Rows in the outputs of a step: how many, or where they begin.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct OutputRows {
    pub(super) logits: usize,
    /// Rows of which the executor tells the largest logit alone.
    pub(super) largest: usize,
    /// Logits that it tells of a row, where it tells the largest ones, and rows of which it does; or where they begin.
    pub(super) candidates: usize,
    candidate_rows: usize,
    pub(super) hidden: usize,
}

impl OutputRows {
    /// Where what follows `count` rows begins.
    pub(super) fn behind(self, count: Self) -> Self {
        Self {
            logits: self.logits + count.logits,
            largest: self.largest + count.largest,
            candidates: self.candidates + count.candidates * count.candidate_rows,
            candidate_rows: 0,
            hidden: self.hidden + count.hidden,
        }
    }

    /// What is asked of the row that is `from_end` rows from the end of its item (the last is 1).
    pub(super) fn wants(self, from_end: usize) -> RowWants {
        RowWants {
            logits: from_end <= self.logits,
            argmax: from_end <= self.largest,
            candidates: if from_end <= self.candidate_rows { self.candidates as u16 } else { 0 },
            hidden: self.hidden > 0,
        }
    }
}

/// What tokens are taken from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Needs {
    /// All logits.
    Logits,
    /// The largest.
    Largest,
    /// As many of the largest.
    Candidates(usize),
}

/// What the executor can tell.
#[derive(Clone, Copy, Debug)]
pub(super) struct Facts {
    pub(super) hidden: usize,
    pub(super) vocab: usize,
    /// How many of a row's largest logits the executor can tell by themselves.
    pub(super) most_candidates: usize,
}

impl Facts {
    /// What a sequence's next tokens are taken from. `rejects`: proposals are judged against their own logits.
    pub(super) fn needs(&self, sequence: &Sequence, drafts: usize, how: DraftSampling) -> Needs {
        let task = &sequence.task;
        let sampling = &task.sampling;
        let rejects = drafts > 0 && how == DraftSampling::Rejection;
        let logprobs = task.logprobs.or(task.prompt_logprobs).is_some();
        // Forbidden ids (`ignore_eos` forbids those that end a text) need as many more of the largest logits, not all.
        let Some(forbidden) = sequence.only_forbids().filter(|_| !logprobs && !task.hash_logits) else {
            return Needs::Logits;
        };
        let wanted = match sampling.top_k as usize {
            _ if sampling.is_greedy() && forbidden == 0 => return Needs::Largest,
            _ if sampling.is_greedy() => 1 + forbidden,
            0 => return Needs::Logits,
            top_k => top_k.saturating_add(forbidden),
        };
        if wanted <= self.most_candidates && !rejects {
            Needs::Candidates(wanted.min(self.vocab))
        } else {
            Needs::Logits
        }
    }
}

/// Rows of an item that come with logits, with the largest logits alone, and with hidden states.
pub(super) fn wanted(sequence: &Sequence, item: PlanItem, needs: Needs) -> OutputRows {
    let none = OutputRows::default();
    match sequence.task.kind {
        RequestKind::Embed => OutputRows { hidden: item.rows, ..none },
        RequestKind::Generate => match sequence.prompt_rows_from() {
            // From the first row that tells of a prompt token to the last one of the item.
            Some(from) => {
                OutputRows { logits: (item.start + item.rows).saturating_sub(from).min(item.rows), ..none }
            }
            None if item.to_end && sequence.tokens_left() > 0 => {
                let rows = 1 + item.drafts;
                match needs {
                    Needs::Logits => OutputRows { logits: rows, ..none },
                    Needs::Largest => OutputRows { largest: rows, ..none },
                    Needs::Candidates(n) => OutputRows { candidates: n, candidate_rows: rows, ..none },
                }
            }
            None => none,
        },
    }
}
