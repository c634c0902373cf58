//! Layers in host memory that another part computes: the same bits, whoever computes them and whatever goes wrong on the way.
//!
//! The device here is an executor on the processor with KV of its own, to which blocks and rows go as they go to a card.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use muser_backend::{
    Crossing, DraftBatch, DraftExecutor, ExecError, Executor, HostLayers, KvCapacity, KvType, LayerRange,
    LayerStreamer, PartExecutor, Row, RowInput, RowWants, StepBatch, StepOutput, StreamedStep, TowerExecutor,
    conformance, delegate_executor,
};
use muser_cpu::CpuExecutor;
use muser_kv::{BLOCK_LEN, BlockId, KvGroup};
use muser_model::Model;
use muser_split::{Grouping, SplitExecutor};
use support::{options, parts, tiny, tiny_draft, whole};

/// What is told to a device, and what it tells.
#[derive(Default)]
struct Script {
    /// Steps that were streamed.
    steps: AtomicUsize,
    /// What comes of the step of this number (from 1), by [`Mishap`].
    at: AtomicUsize,
    mishap: AtomicUsize,
}

#[derive(Clone, Copy, PartialEq)]
enum Mishap {
    NoRoom = 1,
    Failure,
    Loss,
    NotPrepared,
}

/// A part that computes layers of others, too.
struct Device {
    inner: Box<dyn PartExecutor>,
    model: Model,
    kv: KvType,
    away: Option<CpuExecutor>,
    step: StreamedStep,
    script: Arc<Script>,
}

impl Executor for Device {
    delegate_executor!(self => self.inner; info, allocate_kv, step, most_candidates, read_bandwidth, export_block, clear_rows,
        import_block, lend_block);
}

impl DraftExecutor for Device {
    delegate_executor!(self => self.inner; attach_draft, draft, draft_largest, has_draft_context);
}

impl TowerExecutor for Device {
    delegate_executor!(self => self.inner; attach_projector, tower, begin_image, encode_image, drop_image);
}

impl PartExecutor for Device {
    fn range(&self) -> LayerRange {
        self.inner.range()
    }

    fn tap_features(&mut self, layers: &[usize]) -> Result<(), ExecError> {
        self.inner.tap_features(layers)
    }

    fn step_part(
        &mut self,
        batch: &StepBatch,
        crossing: &mut Crossing,
        out: &mut StepOutput,
    ) -> Result<(), ExecError> {
        self.inner.step_part(batch, crossing, out)
    }

    fn as_host(&mut self) -> Option<&mut dyn HostLayers> {
        None
    }

    fn as_streamer(&mut self) -> Option<&mut dyn LayerStreamer> {
        Some(self)
    }
}

impl Device {
    fn told(&self) -> Option<Mishap> {
        let step = self.script.steps.load(Ordering::SeqCst);
        let mishap = self.script.mishap.load(Ordering::SeqCst);
        let all = [Mishap::NoRoom, Mishap::Failure, Mishap::Loss, Mishap::NotPrepared];
        all.into_iter().find(|m| *m as usize == mishap && step == self.script.at.load(Ordering::SeqCst))
    }
}

/// Layers of a range that a group has, in the order of its blocks.
fn layers_of(model: &Model, range: LayerRange, group: KvGroup) -> impl Iterator<Item = usize> {
    range.layers().filter(move |layer| model.geometry.sliding[*layer] == (group == KvGroup::Sliding))
}

impl LayerStreamer for Device {
    fn prepare_layers(&mut self, range: LayerRange, _: usize) -> Result<(), ExecError> {
        if self.script.mishap.load(Ordering::SeqCst) == Mishap::NotPrepared as usize {
            return Err(ExecError::Unsupported { backend: "test", what: "as told".into() });
        }
        self.away = Some(CpuExecutor::part(self.model.clone(), range, options(self.kv))?);
        Ok(())
    }

    fn step_streamed(
        &mut self,
        home: &mut dyn HostLayers,
        batch: &StepBatch,
        taps: &[usize],
        crossing: &mut Crossing,
    ) -> Result<bool, ExecError> {
        self.script.steps.fetch_add(1, Ordering::SeqCst);
        let told = self.told();
        let away = self.away.as_mut().expect("prepared");
        let range = away.range();
        self.step.make(batch, &self.model, range, home.kv_capacity(), 256)?;
        if told == Some(Mishap::NoRoom) {
            return Ok(false);
        }
        let count = |group| self.step.blocks(group).len() as u32;
        let groups = [KvGroup::Full, KvGroup::Sliding];
        away.allocate_kv(KvCapacity { full: count(groups[0]), sliding: count(groups[1]) })?;
        away.tap_features(taps)?;
        for group in groups {
            for (number, block) in self.step.blocks(group).iter().enumerate() {
                let mut bytes = Vec::new();
                for layer in layers_of(&self.model, range, group) {
                    bytes.extend_from_slice(home.kv_of(layer, *block)?);
                }
                away.import_block(group, BlockId(number as u32), &bytes)?;
            }
        }
        away.step_part(self.step.batch(), crossing, &mut StepOutput::default())?;
        match told {
            Some(Mishap::Failure) => {
                return Err(ExecError::Device { device: "test".into(), what: "as told".into() });
            }
            Some(Mishap::Loss) => {
                return Err(ExecError::Lost { device: "test".into(), what: "as told".into() });
            }
            _ => {}
        }
        for group in groups {
            let mut bytes = vec![0; away.info().block_bytes(group)];
            for number in self.step.written(group) {
                away.export_block(group, BlockId(*number as u32), &mut bytes)?;
                let mut rest = &bytes[..];
                for layer in layers_of(&self.model, range, group) {
                    let to = home.kv_of_mut(layer, self.step.blocks(group)[*number])?;
                    let (own, others) = rest.split_at(to.len());
                    to.copy_from_slice(own);
                    rest = others;
                }
            }
        }
        Ok(true)
    }
}

/// A split whose last part is a device that layers of the first one are streamed to.
fn streaming(model: &Model, cuts: &[usize], kv: KvType, grouping: Grouping) -> (SplitExecutor, Arc<Script>) {
    let script: Arc<Script> = Arc::default();
    (streaming_as(model, cuts, kv, grouping, &script), script)
}

fn streaming_as(
    model: &Model,
    cuts: &[usize],
    kv: KvType,
    grouping: Grouping,
    script: &Arc<Script>,
) -> SplitExecutor {
    let mut parts = parts(model, cuts, kv);
    let inner = parts.pop().expect("a last part");
    let (model, step, script) = (model.clone(), StreamedStep::default(), Arc::clone(script));
    parts.push(Box::new(Device { inner, model: model.clone(), kv, away: None, step, script }));
    SplitExecutor::new(parts, &model, grouping).expect("a split").with_streaming(2048)
}

/// Logits, ids and proposals of chunks of a text, and all blocks at the end.
fn trace(executor: &mut dyn Executor, chunks: &[usize], with_context: bool) -> Vec<u8> {
    let count: usize = chunks.iter().sum();
    let blocks = count.div_ceil(BLOCK_LEN) as u32;
    executor.allocate_kv(KvCapacity { full: blocks, sliding: blocks }).expect("KV memory");
    let table: Vec<BlockId> = (0..blocks).rev().map(BlockId).collect();
    let (mut batch, mut out, mut all) = (StepBatch::default(), StepOutput::default(), Vec::new());
    let floats = |all: &mut Vec<u8>, values: &[f32]| {
        all.extend(values.iter().flat_map(|value| value.to_bits().to_le_bytes()));
    };
    let mut at = 0;
    for rows in chunks {
        batch.clear();
        if !with_context {
            batch.skip_draft_context();
        }
        batch.push_seq(at as u32, &table, 0, &table);
        for position in at..at + rows {
            let wants = RowWants { logits: true, hidden: true, ..RowWants::default() };
            batch.push_row(Row { input: RowInput::Token((position * 41 % 4000) as u32), wants });
        }
        executor.step(&batch, &mut out).expect("step");
        floats(&mut all, &out.logits);
        floats(&mut all, &out.hidden);
        at += rows;
    }
    if executor.info().draft.is_some() && with_context {
        let (mut round, mut logits) = (DraftBatch::default(), Vec::new());
        round.push(7, count as u32, 5, 0, &table);
        executor.draft(&round, &mut logits).expect("draft");
        floats(&mut all, &logits);
    }
    for group in [KvGroup::Full, KvGroup::Sliding] {
        let mut bytes = vec![0; executor.info().block_bytes(group)];
        for block in &table {
            executor.export_block(group, *block, &mut bytes).expect("export");
            all.extend_from_slice(&bytes);
        }
    }
    all
}

#[test]
fn streamed_layers_have_the_same_bits() {
    let (model, draft) = (tiny(), tiny_draft());
    for (kv, chunks, with_draft) in [
        (KvType::Int16, &[200, 1, 70, 3][..], true),
        (KvType::Int8, &[1, 40], true),
        (KvType::F16, &[30, 1], false),
    ] {
        for with_context in [true, false] {
            let mut one = whole(&model, kv);
            if with_draft {
                one.attach_draft(draft.clone()).expect("draft");
            }
            let expected = trace(&mut *one, chunks, with_context);
            for cuts in [&[1][..], &[4], &[7], &[2, 5], &[1, 2, 3]] {
                let (mut split, script) = streaming(&model, cuts, kv, Grouping::Streamed);
                if with_draft {
                    split.attach_draft(draft.clone()).expect("draft");
                }
                assert_eq!(split.info().prompt_rows, split.info().max_rows, "{cuts:?}");
                assert!(trace(&mut split, chunks, with_context) == expected, "{kv:?} {cuts:?}");
                assert_eq!(script.steps.load(Ordering::SeqCst), chunks.len(), "{cuts:?}: every step was");
            }
        }
    }
}

#[test]
fn it_does_not_matter_who_computed_the_step_before() {
    let model = tiny();
    let mut turn = 0;
    let mut make = |kv| {
        turn += 1;
        let grouping = [Grouping::Streamed, Grouping::Fixed(2), Grouping::Measured][turn % 3];
        Box::new(streaming(&model, [&[3][..], &[2, 6]][turn % 2], kv, grouping).0) as Box<dyn Executor>
    };
    for (seed, kv) in [KvType::Int16, KvType::Int8].into_iter().enumerate() {
        conformance::row_invariance(|| make(kv), &model.geometry, seed as u64, 3, 90 + 200 * (1 - seed));
        conformance::import_continues(|| make(kv), &model.geometry, seed as u64, 290, 20);
    }
}

/// The trace of a split whose device has a mishap in its second step.
fn after(mishap: Mishap, chunks: &[usize]) -> (Vec<u8>, usize) {
    let script = Arc::new(Script::default());
    script.at.store(2, Ordering::SeqCst);
    script.mishap.store(mishap as usize, Ordering::SeqCst);
    let mut split = streaming_as(&tiny(), &[4], KvType::Int16, Grouping::Streamed, &script);
    let found = trace(&mut split, chunks, true);
    let rows = if mishap == Mishap::NoRoom { split.info().max_rows } else { 0 };
    assert_eq!(split.info().prompt_rows, rows, "short steps are as good where nothing is streamed");
    (found, script.steps.load(Ordering::SeqCst))
}

#[test]
fn what_cannot_be_streamed_is_computed_where_it_is() {
    let chunks = [20, 9, 5, 1];
    let expected = trace(&mut *whole(&tiny(), KvType::Int16), &chunks, true);
    let check = |mishap, tried: usize| {
        let (found, steps) = after(mishap, &chunks);
        assert!(found == expected, "mishap {}: other bits", mishap as usize);
        assert_eq!(steps, tried, "mishap {}", mishap as usize);
    };
    // No room for one step says nothing of the next; an error ends it.
    check(Mishap::NoRoom, 4);
    check(Mishap::Failure, 2);
    check(Mishap::NotPrepared, 0);
}

#[test]
fn a_device_that_is_lost_ends_the_step_and_leaves_blocks_as_they_were() {
    let model = tiny();
    let (mut split, script) = streaming(&model, &[4], KvType::Int16, Grouping::Streamed);
    script.at.store(2, Ordering::SeqCst);
    script.mishap.store(Mishap::Loss as usize, Ordering::SeqCst);
    split.allocate_kv(KvCapacity { full: 1, sliding: 1 }).expect("KV memory");
    let step = |split: &mut SplitExecutor, at: u32| {
        let mut batch = StepBatch::default();
        batch.push_seq(at, &[BlockId(0)], 0, &[BlockId(0)]);
        batch.push_row(Row { input: RowInput::Token(at), wants: RowWants::default() });
        split.step(&batch, &mut StepOutput::default())
    };
    let blocks = |split: &SplitExecutor| {
        let mut bytes = vec![0; split.info().full_block_bytes];
        split.export_block(KvGroup::Full, BlockId(0), &mut bytes).expect("export");
        bytes
    };
    step(&mut split, 0).expect("the first step");
    let before = blocks(&split);
    let error = step(&mut split, 1).expect_err("as told");
    assert!(matches!(error, ExecError::Lost { .. }), "{error}");
    assert!(blocks(&split) == before, "nothing came back");
}
