//! How fast the engine itself would be: what a source that computes elsewhere is measured against.

use std::time::Duration;

use crate::planner::{CostModel, Load};

/// What computing a prompt here would take, by measured steps.
#[derive(Clone, Copy, Debug, Default)]
pub struct LocalPace {
    cost: CostModel,
    /// Rows of a step where nobody decodes.
    rows: usize,
    /// What others have to compute before.
    ahead: Duration,
}

impl LocalPace {
    pub(crate) fn new(cost: &CostModel, rows: usize, ahead: Duration) -> Self {
        Self { cost: *cost, rows, ahead }
    }

    /// How long others keep the device busy before a prompt that comes now.
    pub fn ahead(&self) -> Duration {
        self.ahead
    }

    /// What computing the positions from `from` to `to` takes, alone; `None` before steps of prompts were measured.
    pub fn time(&self, from: usize, to: usize) -> Option<Duration> {
        if !self.cost.knows_many() {
            return None;
        }
        let mut seconds = 0.0;
        let mut at = from;
        while at < to {
            let rows = (to - at).min(self.rows.max(1));
            seconds += self.cost.expected(Load::of(rows, at))?;
            at += rows;
        }
        Some(Duration::from_secs_f64(seconds))
    }
}
