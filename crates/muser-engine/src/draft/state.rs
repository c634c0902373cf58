//! What a sequence knows of its draft.

use crate::draft::acceptance::{Acceptance, MOST_PROPOSALS};

/// Proposals for the positions after a sequence's text, and what became of earlier ones.
pub(crate) struct DraftState {
    pub(super) proposals: Vec<u32>,
    /// First of their rows among the draft's logits.
    pub(super) first_row: usize,
    /// How its proposals have fared.
    pub(super) acceptance: Acceptance,
    /// Position behind the last rows whose draft context was left out; 0 if there are none.
    gap_end: usize,
    /// Have the blocks that it did not fill itself been looked at for such rows?
    gaps_looked_for: bool,
}

impl DraftState {
    pub(crate) fn new() -> Self {
        Self {
            proposals: Vec::with_capacity(MOST_PROPOSALS),
            first_row: 0,
            acceptance: Acceptance::of_sequence(),
            gap_end: 0,
            gaps_looked_for: false,
        }
    }

    pub(crate) fn proposals(&self) -> &[u32] {
        &self.proposals
    }

    /// The proposals are void: taken, or overtaken.
    pub(crate) fn clear(&mut self) {
        self.proposals.clear();
    }

    /// Its blocks are given back: what they held is no longer known.
    pub(crate) fn leave_blocks(&mut self) {
        self.proposals.clear();
        (self.gap_end, self.gaps_looked_for) = (0, false);
    }

    /// Rows up to `end` have no draft context.
    pub(crate) fn note_gap(&mut self, end: usize) {
        self.gap_end = self.gap_end.max(end);
    }

    /// Are blocks that it did not fill itself still to be looked at for gaps? Asked once.
    pub(super) fn looks_for_gaps(&mut self) -> bool {
        !std::mem::replace(&mut self.gaps_looked_for, true)
    }

    /// Rows with draft context at the end of `computed` positions, without a gap; without bound if there is no gap at all.
    pub(super) fn context(&self, computed: usize) -> usize {
        if self.gap_end == 0 { usize::MAX } else { computed.saturating_sub(self.gap_end) }
    }

    /// Where the last gap ends, once it has been looked for.
    #[cfg(test)]
    pub(crate) fn found_gap_end(&self) -> Option<usize> {
        self.gaps_looked_for.then_some(self.gap_end)
    }
}
