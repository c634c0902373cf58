//! What a draft behind a cut reads of layers before it.

use crate::driver::Buffer;

/// Layers whose inputs go over the cut for a draft behind it.
#[derive(Default)]
pub(crate) struct Taps {
    pub(crate) layers: Vec<usize>,
    /// `[tap][most rows of a step][hidden]`
    pub(crate) features: Option<Buffer<f32>>,
    pub(crate) most_rows: usize,
}

impl Taps {
    /// Where the rows of a layer's input go, if it is tapped: a buffer and the place in it.
    pub(crate) fn place(&self, layer: usize, hidden: usize) -> Option<(&Buffer<f32>, usize)> {
        let tap = self.layers.iter().position(|tapped| *tapped == layer)?;
        Some((self.features.as_ref()?, tap * self.most_rows * hidden))
    }
}
