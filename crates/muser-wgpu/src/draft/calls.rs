//! What a step and a round launch for the draft, made once for the memory that it names.

use crate::call::Call;
use crate::products::Product;
use crate::program::Block;

/// Calls of a step.
pub(super) struct Extend {
    /// Of each target layer that is read, its number and its tap.
    pub(super) taps: Vec<(usize, Call)>,
    pub(super) fc: Product,
    pub(super) norm: [Call; 2],
    pub(super) layers: Vec<ExtendLayer>,
}

pub(super) struct ExtendLayer {
    pub(super) products: [Product; 2],
    pub(super) stores: [Call; 2],
    pub(super) blanks: [Call; 2],
}

/// Calls of a round.
pub(super) struct Round {
    pub(super) embed: Vec<Call>,
    pub(super) layers: Vec<Block>,
    pub(super) top: [Call; 2],
    pub(super) output: Product,
    pub(super) logits: Vec<Call>,
}
