//! A model that is cut between layers: what computes one range of them, and what goes over the cut.

use std::fmt;
use std::ops::Range;

use muser_kv::BlockId;

use crate::{ExecError, Executor, KvCapacity, StepBatch, StepOutput};

/// Consecutive layers of a model. The range that begins with the first layer also has the embedding table, the one that ends
/// with the last layer the final norm and the vocabulary matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LayerRange {
    first: usize,
    end: usize,
    of: usize,
}

impl LayerRange {
    /// All layers of a model of so many.
    pub fn whole(of: usize) -> Self {
        Self { first: 0, end: of, of }
    }

    /// Some layers of a model of `of`; `None` if there are none in the range, or it reaches beyond the last.
    pub fn new(layers: Range<usize>, of: usize) -> Option<Self> {
        let Range { start: first, end } = layers;
        (first < end && end <= of).then_some(Self { first, end, of })
    }

    /// The numbers of the layers.
    pub fn layers(self) -> Range<usize> {
        self.first..self.end
    }

    /// The first layer.
    pub fn first(self) -> usize {
        self.first
    }

    /// The layer after the last one.
    pub fn end(self) -> usize {
        self.end
    }

    /// Layers.
    pub fn count(self) -> usize {
        self.end - self.first
    }

    /// Does it begin with the embedding?
    pub fn has_embedding(self) -> bool {
        self.first == 0
    }

    /// Does it end with the logits?
    pub fn has_output(self) -> bool {
        self.end == self.of
    }

    /// Is there no cut?
    pub fn is_whole(self) -> bool {
        self.has_embedding() && self.has_output()
    }
}

impl fmt::Display for LayerRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.count() {
            1 => write!(f, "layer {}", self.first),
            _ => write!(f, "layers {} to {}", self.first, self.end - 1),
        }
    }
}

/// What goes over a cut before layer `l`, for all rows of a step in the batch's order. One layout for all backends.
///
/// With the row its norm's factor goes along: it comes out of the same pass over the layer before
/// ([`crate::arith::ResidualSums`]), and computed again from the row it would have other bits.
#[derive(Clone, Debug, Default)]
pub struct Crossing {
    /// The residual stream at the input of `l`, `[row][hidden]`.
    pub rows: Vec<f32>,
    /// `[row]`: factor of the norm before `l`'s attention.
    pub factors: Vec<f32>,
    /// What a draft reads of the layers before `l`: `[tap][row][hidden]`, taps in the order of
    /// [`PartExecutor::tap_features`]. Empty where nobody drafts, or the step leaves the draft's context out.
    pub features: Vec<f32>,
}

impl Crossing {
    /// Gives it the size of a step; what it holds then means nothing.
    pub fn shape(&mut self, rows: usize, hidden: usize, taps: usize) {
        self.rows.resize(rows * hidden, 0.0);
        self.factors.resize(rows, 0.0);
        self.features.resize(taps * rows * hidden, 0.0);
    }

    /// Refuses a crossing of another step.
    pub fn check(&self, rows: usize, hidden: usize, taps: usize) -> Result<(), ExecError> {
        let found = (self.rows.len(), self.factors.len(), self.features.len());
        let expected = (rows * hidden, rows, taps * rows * hidden);
        if found == expected {
            return Ok(());
        }
        Err(ExecError::InvalidBatch(format!(
            "a crossing of {found:?} values, factors and features, expected {expected:?}"
        )))
    }
}

/// An executor that has a range of a model's layers, the KV of these and no other.
///
/// Its blocks hold the layers of the range in the order of [`crate::kv_layout`], so that the bytes of a model's block are those of
/// its parts' blocks, one after the other. [`Executor::step`] of a part that is not the whole model is refused. A draft is attached
/// to the part that has the output ([`crate::DraftExecutor`]); the others refuse it, and tap.
pub trait PartExecutor: Executor {
    /// Which layers.
    fn range(&self) -> LayerRange;

    /// From now on the part writes what is at the input of these layers of the model, as far as they are its own, to their places in
    /// [`Crossing::features`], in steps that want the draft's context. None: no longer. The part that has the draft reads there
    /// what lies before it.
    fn tap_features(&mut self, layers: &[usize]) -> Result<(), ExecError>;

    /// The part of a step: takes `crossing` at the input of its first layer (what it holds means nothing to the part that has the
    /// embedding) and leaves it at the input of the layer after its last. Only the part that has the output fills `out`.
    fn step_part(
        &mut self,
        batch: &StepBatch,
        crossing: &mut Crossing,
        out: &mut StepOutput,
    ) -> Result<(), ExecError>;

    /// Its KV, where that is host memory and its weights are in the model's file: then others may compute its layers.
    fn as_host(&mut self) -> Option<&mut dyn HostLayers>;

    /// What computes layers of others, if it can.
    fn as_streamer(&mut self) -> Option<&mut dyn LayerStreamer>;
}

/// A part whose KV is host memory.
pub trait HostLayers {
    /// Its blocks.
    fn kv_capacity(&self) -> KvCapacity;

    /// K and V of one layer of a block, in the layout of [`crate::kv_layout`]; `layer` counts from the model's first.
    fn kv_of(&self, layer: usize, block: BlockId) -> Result<&[u8], ExecError>;

    /// The same to write.
    fn kv_of_mut(&mut self, layer: usize, block: BlockId) -> Result<&mut [u8], ExecError>;
}

/// A device that computes layers of another part, with weights that it reads from the model's file when it needs them.
pub trait LayerStreamer {
    /// Makes room to compute these layers for sequences of up to `positions`.
    ///
    /// # Errors
    /// Not enough memory, or weights that cannot be streamed. What was there before is left.
    fn prepare_layers(&mut self, range: LayerRange, positions: usize) -> Result<(), ExecError>;

    /// A step through the layers that were prepared: as [`PartExecutor::step_part`] of `home`, whose layers they are, and which
    /// writes down the input of `taps`. `false`: there is no room for a step of this shape, and nothing was done.
    ///
    /// # Errors
    /// Nothing of `home` was changed.
    fn step_streamed(
        &mut self,
        home: &mut dyn HostLayers,
        batch: &StepBatch,
        taps: &[usize],
        crossing: &mut Crossing,
    ) -> Result<bool, ExecError>;
}

/// What [`Executor::step`] of a part of a model answers.
pub fn only_a_part(range: LayerRange) -> ExecError {
    ExecError::InvalidBatch(format!("a step of a whole model on an executor of {range}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_have_layers_and_lie_inside_the_model() {
        for (layers, of) in [(0..0, 8), (3..3, 8), (7..9, 8), (8..9, 8), (0..1, 0)] {
            assert_eq!(LayerRange::new(layers.clone(), of), None, "{layers:?} of {of}");
        }
        let ends = |layers: Range<usize>| {
            let range = LayerRange::new(layers, 8).expect("inside");
            (range.has_embedding(), range.has_output(), range.is_whole(), range.count())
        };
        assert_eq!(ends(0..8), (true, true, true, 8));
        assert_eq!(ends(0..3), (true, false, false, 3));
        assert_eq!(ends(3..8), (false, true, false, 5));
        assert_eq!(ends(3..4), (false, false, false, 1));
        assert_eq!(LayerRange::new(3..4, 8).expect("inside").to_string(), "layer 3");
        assert_eq!(LayerRange::whole(8).to_string(), "layers 0 to 7");
    }

    #[test]
    fn crossings_of_other_steps_are_refused() {
        let mut crossing = Crossing::default();
        crossing.shape(3, 4, 2);
        crossing.check(3, 4, 2).expect("its own");
        for (rows, hidden, taps) in [(2, 4, 2), (3, 5, 2), (3, 4, 0)] {
            assert!(crossing.check(rows, hidden, taps).is_err(), "{rows} {hidden} {taps}");
        }
    }
}
