//! What the next step is: the scheduler's answer, which everything else of a turn carries out.

use std::time::Duration;

use crate::{
    RestoreFailure,
    memory::{BlockMove, Brought},
    planner::Load,
    prefix::Fetching,
    sequence::{End, Sequence},
};

/// Rows of one sequence in the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PlanItem {
    pub(crate) slot: usize,
    /// Position of the first row.
    pub(crate) start: usize,
    /// Rows from the sequence's tokens.
    pub(crate) rows: usize,
    /// Rows from its drafts after those.
    pub(crate) drafts: usize,
    /// Do the rows reach the end of its tokens?
    pub(crate) to_end: bool,
}

/// What the next step is. Reused from step to step.
#[derive(Default)]
pub(crate) struct StepPlan {
    pub(crate) items: Vec<PlanItem>,
    /// What happens to blocks before the step, in this order.
    pub(crate) moves: Vec<BlockMove>,
    pub(crate) ended: Vec<(Sequence, End)>,
    pub(crate) preempted: u64,
    /// Prefixes that a source did not bring after all.
    pub(crate) restore_failures: Vec<RestoreFailure>,
    /// Prefixes that a source brought.
    pub(crate) restored: Vec<Brought>,
    /// Fetches that begin when the moves have been made.
    pub(crate) fetches: Vec<Fetching>,
    /// Something happened beside the items (an admission), so plan again soon.
    pub(crate) changed: bool,
    /// When to look again though nothing happens.
    pub(crate) wake_at: Option<Duration>,
}

impl StepPlan {
    pub(crate) fn clear(&mut self) {
        self.items.clear();
        self.moves.clear();
        self.ended.clear();
        self.preempted = 0;
        self.restore_failures.clear();
        self.restored.clear();
        self.fetches.clear();
        self.changed = false;
        self.wake_at = None;
    }

    pub(crate) fn wake_by(&mut self, at: Option<Duration>) {
        if let Some(at) = at {
            self.wake_at = Some(self.wake_at.map_or(at, |before| before.min(at)));
        }
    }

    /// What the executor has to compute.
    pub(crate) fn load(&self) -> Load {
        let each = self.items.iter().map(|item| Load::of(item.rows + item.drafts, item.start));
        each.fold(Load::default(), Load::and)
    }

    /// Is there anything for the executor to do?
    pub(crate) fn has_step(&self) -> bool {
        !self.items.is_empty() || !self.moves.is_empty()
    }

    /// Has a sequence rows in it?
    pub(crate) fn includes(&self, slot: usize) -> bool {
        self.items.iter().any(|item| item.slot == slot)
    }
}
