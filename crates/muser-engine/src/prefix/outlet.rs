//! A prompt that is given away while it is computed.

use super::PrefixOffer;

/// Hears how far a request's prompt has become final, so that its blocks can leave while later rows are computed.
///
/// Called on the engine's thread between steps; it returns at once.
pub trait PrefixOutlet: Send {
    /// The positions of `offer` are final, more than at the last call: at admission those that memory knew, then after each
    /// step. Its last block may be unfinished. The blocks are held until the offer is dropped, or sequences need the memory.
    fn grown(&mut self, offer: PrefixOffer);
}

/// A sequence's outlet, and what it has been told.
pub(crate) struct Outlet {
    pub(crate) outlet: Box<dyn PrefixOutlet>,
    /// Positions that it knows to be final.
    pub(crate) told: usize,
}

impl Outlet {
    pub(crate) fn new(outlet: Box<dyn PrefixOutlet>) -> Self {
        Self { outlet, told: 0 }
    }
}
