//! A node that keeps failing is left alone for a while: 1, 2, 4 … 60 seconds, each node for itself.

use std::time::{Duration, Instant};

const FIRST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_mins(1);

/// Whether a node is to be asked.
#[derive(Debug, Default)]
pub(crate) struct Circuit {
    faults: u32,
    open_until: Option<Instant>,
    /// One hand-off has been let through to see whether it is well again.
    trying: bool,
}

impl Circuit {
    /// May it be asked now?
    pub(crate) fn lets_through(&self, now: Instant) -> bool {
        self.open_until.is_none_or(|until| now >= until && !self.trying)
    }

    /// It has been chosen.
    pub(crate) fn note_chosen(&mut self) {
        self.trying = self.open_until.is_some();
    }

    /// What it was chosen for did not come to its end, for no fault of its own.
    pub(crate) fn note_nothing(&mut self) {
        self.trying = false;
    }

    pub(crate) fn note_success(&mut self) {
        *self = Self::default();
    }

    pub(crate) fn note_fault(&mut self, now: Instant) {
        let wait = FIRST.saturating_mul(1 << self.faults.min(10)).min(LONGEST);
        self.faults += 1;
        self.open_until = Some(now + wait);
        self.trying = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_opens_for_longer_each_time_and_one_closes_it() {
        let mut circuit = Circuit::default();
        let mut now = Instant::now();
        assert!(circuit.lets_through(now));
        for seconds in [1, 2, 4, 8, 16, 32, 60, 60] {
            circuit.note_fault(now);
            assert!(!circuit.lets_through(now + Duration::from_millis(seconds * 1000 - 1)));
            now += Duration::from_secs(seconds);
            assert!(circuit.lets_through(now), "after {seconds} s");
            circuit.note_chosen();
            assert!(!circuit.lets_through(now), "one at a time");
        }
        circuit.note_nothing();
        assert!(circuit.lets_through(now), "a client that left says nothing of the node");
        circuit.note_chosen();
        circuit.note_success();
        circuit.note_fault(now);
        assert!(circuit.lets_through(now + FIRST));
    }
}
