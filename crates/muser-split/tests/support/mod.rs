//! What the tests of this crate share.

#![allow(dead_code, reason = "each test uses its part")]

use muser_backend::{Executor, KvType, LayerRange, PartExecutor};
use muser_cpu::{CpuExecutor, CpuOptions, Repack};
use muser_model::{Draft, Model};
use muser_split::{Grouping, SplitExecutor};

/// The bundled model.
pub(crate) fn tiny() -> Model {
    Model::load(muser_testkit::muse_tiny()).expect("the bundled model loads")
}

/// The draft that belongs to it.
pub(crate) fn tiny_draft() -> Draft {
    Draft::load(muser_testkit::muse_tiny_draft()).expect("the bundled draft loads")
}

/// Cuts of Muse Tiny's eight layers into two parts, all of them, and some into three and more.
pub(crate) const CUTS: [&[usize]; 11] =
    [&[1], &[2], &[3], &[4], &[5], &[6], &[7], &[1, 2], &[2, 5], &[3, 7], &[1, 2, 3, 4, 5, 6, 7]];

pub(crate) fn options(kv: KvType) -> CpuOptions {
    CpuOptions { threads: Some(1), repack: Repack::Off, isa: None, max_rows: 256, kv }
}

/// Parts on the CPU, cut before the layers of `cuts`.
pub(crate) fn parts(model: &Model, cuts: &[usize], kv: KvType) -> Vec<Box<dyn PartExecutor>> {
    let layers = model.geometry.layers();
    let ends = cuts.iter().copied().chain([layers]);
    let mut first = 0;
    ends.map(|end| -> Box<dyn PartExecutor> {
        let range = LayerRange::new(first..end, layers).expect("a cut inside the model");
        first = end;
        Box::new(CpuExecutor::part(model.clone(), range, options(kv)).expect("a part"))
    })
    .collect()
}

pub(crate) fn split(model: &Model, cuts: &[usize], kv: KvType, grouping: Grouping) -> Box<dyn Executor> {
    Box::new(SplitExecutor::new(parts(model, cuts, kv), model, grouping).expect("a split"))
}

pub(crate) fn whole(model: &Model, kv: KvType) -> Box<dyn Executor> {
    Box::new(CpuExecutor::new(model.clone(), options(kv)).expect("an executor"))
}
