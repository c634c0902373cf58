//! How many rows each sequence gets in the next step: a pure function of what everybody could compute, and of limits.
//!
//! The scheduler says who could compute what ([`Candidate`]), in the order of [`sort`]; [`divide`] sees all of them at once
//! and answers with rows. Nothing here knows a sequence, memory, a reader or the time. Where memory or a reader then refuses
//! rows, the scheduler asks again for the candidates behind, with what has been [`Given`]: what one could not take others may
//! have, and whoever chooses sizes need not know why.
//!
//! Sizes never change a bit of any result (E1, E2), so they may follow measured time ([`CostModel`]).

mod cost;

pub(crate) use cost::{CostModel, Load};
use smallvec::SmallVec;

/// Most sequences that are usual in a step; more cost an allocation.
const USUAL: usize = 16;

/// Everybody who could have rows in a step.
pub(crate) type Candidates = SmallVec<[Candidate; USUAL]>;
/// Rows of each, in the same order.
pub(crate) type Rows = SmallVec<[usize; USUAL]>;

/// A sequence that could have rows in the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Candidate {
    pub(crate) slot: usize,
    /// Positions that its first row attends to besides itself.
    pub(crate) depth: usize,
    pub(crate) work: Work,
}

/// What a sequence could compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// The row of the token sampled last, and behind it one for each proposal of a draft, if there is room for those.
    Decode {
        /// Proposals that could be verified.
        proposals: usize,
    },
    /// Rows of a prompt.
    Prefill {
        /// Most that can be computed now, at least 1.
        ready: usize,
    },
}

/// What bounds a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowLimits {
    /// Rows that the executor takes.
    pub(crate) most: usize,
    /// Rows where somebody decodes; one row of a prompt goes beside any number of those.
    pub(crate) mixed: usize,
    /// Rows where nobody decodes.
    pub(crate) prefill: usize,
}

/// Rows of the step that are given out already.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Given {
    decode: usize,
    prefill: usize,
}

impl Given {
    /// `candidate` has its rows.
    pub(crate) fn note(&mut self, candidate: &Candidate, rows: usize) {
        match candidate.work {
            Work::Decode { .. } => self.decode += rows,
            Work::Prefill { .. } => self.prefill += rows,
        }
    }
}

/// Puts the candidates, which come in order of rank, into the order in which they are served: those that decode, then those
/// that read prompts. Of the latter another one is first from `turn` to `turn`, so that whatever does not divide goes round.
pub(crate) fn sort(candidates: &mut Candidates, turn: usize) {
    candidates.sort_by_key(|candidate| matches!(candidate.work, Work::Prefill { .. }));
    let first = candidates.partition_point(|candidate| matches!(candidate.work, Work::Decode { .. }));
    let prompts = &mut candidates[first..];
    if !prompts.is_empty() {
        prompts.rotate_left(turn % prompts.len());
    }
}

/// Rows for each of `candidates`, which are in the order of [`sort`] and have nothing yet.
pub(crate) fn divide(candidates: &[Candidate], given: Given, limits: RowLimits) -> Rows {
    let mut rows = Rows::new();
    let mut decode = given.decode;
    for candidate in candidates {
        let Work::Decode { proposals } = candidate.work else { break };
        let left = limits.most.saturating_sub(decode + given.prefill);
        let take = left.min(1 + proposals);
        decode += take;
        rows.push(take);
    }
    let budget = if decode > 0 { limits.mixed.max(decode + 1) } else { limits.prefill };
    let mut left = budget.min(limits.most).saturating_sub(decode + given.prefill);
    let prompts = &candidates[rows.len()..];
    let first = rows.len();
    rows.resize(candidates.len(), 0);
    let mut wanting = prompts.len();
    // Evenly, and what short prompts leave of their share evenly again.
    while left > 0 && wanting > 0 {
        let mut waiting = wanting;
        wanting = 0;
        for (candidate, rows) in prompts.iter().zip(&mut rows[first..]) {
            let Work::Prefill { ready } = candidate.work else { continue };
            let open = ready - *rows;
            if open == 0 {
                continue;
            }
            let take = open.min(left.div_ceil(waiting));
            waiting -= 1;
            left -= take;
            *rows += take;
            wanting += usize::from(open > take);
        }
    }
    rows
}

#[cfg(test)]
mod tests;
