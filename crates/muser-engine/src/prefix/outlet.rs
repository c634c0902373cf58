//! A prompt that is given away while it is computed.

use super::PrefixExport;

/// Hears how far a request's prompt has become final, so that its blocks can leave while later rows are computed.
///
/// Called on the engine's thread between steps; it returns at once.
pub trait PrefixOutlet: Send {
    /// The request has its place and its memory, and `known` positions of its prompt need not be computed.
    fn admitted(&mut self, known: usize) {
        let _ = known;
    }

    /// A position behind `computed` at which a step is to end, so that [`PrefixOutlet::grown`] is called with exactly that: the
    /// window of the sliding layers is there then.
    fn next_stop(&self, computed: usize) -> Option<usize> {
        let _ = computed;
        None
    }

    /// The positions of `offer` are final, more than at the last call: at admission those that memory knew, then after each
    /// step. Its last block may be unfinished. Sliding blocks are part of it where a step was to end, and at the prompt's end. The blocks are held until the offer is dropped, or sequences need the memory.
    fn grown(&mut self, offer: PrefixExport);
}

/// A sequence's outlet, and what it has been told.
pub(crate) struct Outlet {
    pub(crate) outlet: Box<dyn PrefixOutlet>,
    /// Positions that it knows to be final; `None` before it heard of its admission.
    pub(crate) told: Option<usize>,
}

impl Outlet {
    pub(crate) fn new(outlet: Box<dyn PrefixOutlet>) -> Self {
        Self { outlet, told: None }
    }
}
