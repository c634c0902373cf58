//! What a draft behind a cut reads of layers before it.

use crate::device::{Buffer, Recorder};

/// Layers whose inputs go over the cut for a draft behind it.
pub(crate) struct Taps {
    pub(crate) layers: Vec<usize>,
    /// `[tap][row][hidden]`, with room for the most rows of a step.
    pub(crate) features: Buffer,
}

impl Taps {
    /// Copies the residual stream at the input of a layer, if it is tapped.
    pub(crate) fn record(&self, recorder: &mut Recorder, layer: usize, h: &Buffer, bytes: u64) {
        if let Some(tap) = self.layers.iter().position(|tapped| *tapped == layer) {
            let row = bytes_of_tap(self.features.size(), self.layers.len());
            recorder.copy(h, 0, &self.features, tap as u64 * row, bytes);
        }
    }
}

pub(crate) fn bytes_of_tap(all: u64, taps: usize) -> u64 {
    all / taps.max(1) as u64 / 4 * 4
}
