//! What is wanted, and a plan.

use muser_backend::{KvType, LayerRange};

use crate::Expected;

/// A figure that is wanted, and whether less will do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    /// The figure.
    pub value: u32,
    /// It was asked for: rather nothing than less.
    pub fixed: bool,
}

impl Asked {
    /// Asked for by a person.
    pub fn fixed(value: u32) -> Self {
        Self { value, fixed: true }
    }

    /// What is usual.
    pub fn usual(value: u32) -> Self {
        Self { value, fixed: false }
    }
}

/// What is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wish {
    /// Positions of a sequence.
    pub context: Asked,
    /// Sequences with so many positions at the same time.
    pub parallel: Asked,
    /// How K and V are stored.
    pub kv: KvType,
    /// Bytes of a draft model.
    pub draft: u64,
}

/// A part of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartPlan {
    /// Number of the device in the list that was given.
    pub device: usize,
    /// Its layers.
    pub range: LayerRange,
    /// Bytes of weights, embedding table and draft included.
    pub weights: u64,
    /// Bytes of K and V.
    pub kv: u64,
    /// Bytes of working memory.
    pub scratch: u64,
    /// Bytes that are free then, the reserve not counted.
    pub left: u64,
}

impl PartPlan {
    /// Bytes of all.
    pub fn bytes(&self) -> u64 {
        self.weights + self.kv + self.scratch
    }
}

/// Which layers go where, and what is expected of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// In the order of the layers.
    pub parts: Vec<PartPlan>,
    /// Positions of a sequence.
    pub context: u32,
    /// Sequences with so many positions.
    pub parallel: u32,
    /// Most rows of a step.
    pub rows: u32,
    /// Are the processor's layers computed by a card in steps of many rows?
    pub streams: bool,
    /// What the plan was chosen by: seconds for a token of one sequence, and for reading the tokens that come with it.
    pub seconds: f64,
    /// How K and V are stored.
    pub kv: KvType,
    /// Bytes of weights that memory does not hold: the processor's part is read from the file again and again.
    pub from_file: u64,
    /// Rates.
    pub expected: Expected,
    /// What would change it, in words.
    pub change: String,
}
