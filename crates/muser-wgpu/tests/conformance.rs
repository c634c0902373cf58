//! The contract on a device that CI has: logits, K and V equal the CPU backend's bit for bit, and rows do not meet.
//!
//! The device is lavapipe (`mesa-vulkan-drivers`), which computes as slowly as a processor must; shapes are small. Where
//! `MUSER_WGPU_ADAPTER` names another one, that is taken.

mod support;

use std::sync::Arc;

use muser_backend::conformance::{
    cleared_rows_tell_nothing, draft_invariance, draft_logits, import_continues, row_invariance,
    skipped_context_is_blank,
};
use muser_backend::{Executor, KvCapacity, KvType, Row, RowInput, RowWants, StepBatch, StepOutput};
use muser_cpu::{CpuExecutor, CpuOptions};
use muser_gguf::{GgmlType, GgufFile};
use muser_kv::{BLOCK_LEN, BlockId, KvGroup};
use muser_model::synth::Mix;
use muser_model::{DflashConfig, Draft, Geometry, Model, synth};
use muser_wgpu::{Gpu, WgpuExecutor, WgpuOptions};
use support::gpu;

/// Two layers, one of each kind, with a window of 40.
fn geometry() -> Geometry {
    let tiny = synth::Preset::Tiny.geometry();
    Geometry { sliding: vec![true, false], window: 40, ffn: 512, ..tiny }
}

fn model(geometry: &Geometry, ty: GgmlType) -> Model {
    let bytes = synth::tiny(geometry, ty, 3).expect("a file");
    Model::from_gguf(Arc::new(GgufFile::from_bytes(bytes).expect("valid"))).expect("a model")
}

fn on_gpu(gpu: &Arc<Gpu>, model: &Model, kv: KvType) -> Box<dyn Executor> {
    let options = WgpuOptions { max_rows: 64, kv };
    Box::new(WgpuExecutor::new(gpu, model.clone(), options).expect("an executor"))
}

fn on_cpu(model: &Model, kv: KvType) -> Box<dyn Executor> {
    let options = CpuOptions { threads: Some(1), max_rows: 64, kv, ..CpuOptions::default() };
    Box::new(CpuExecutor::new(model.clone(), options).expect("an executor"))
}

/// What an executor makes of ids in chunks: logits and hidden states, the largest logits' ids, all blocks.
#[derive(PartialEq)]
struct Trace {
    values: Vec<u32>,
    argmax: Vec<Option<u32>>,
    blocks: Vec<Vec<u8>>,
}

fn trace(executor: &mut dyn Executor, ids: &[u32], chunks: &[usize]) -> Trace {
    let blocks = ids.len().div_ceil(BLOCK_LEN) as u32;
    executor.allocate_kv(KvCapacity { full: blocks, sliding: blocks }).expect("KV memory");
    let table: Vec<BlockId> = (0..blocks).map(BlockId).collect();
    let (mut batch, mut out) = (StepBatch::default(), StepOutput::default());
    let mut trace = Trace { values: Vec::new(), argmax: Vec::new(), blocks: Vec::new() };
    let (mut from, mut chunk) = (0, chunks.iter().cycle());
    while from < ids.len() {
        let count = chunk.next().expect("a chunk").min(&(ids.len() - from)).to_owned();
        batch.clear();
        batch.push_seq(from as u32, &table, 0, &table);
        for &id in &ids[from..from + count] {
            let wants = RowWants { logits: true, hidden: true, argmax: true, candidates: 0 };
            batch.push_row(Row { input: RowInput::Token(id), wants });
        }
        executor.step(&batch, &mut out).expect("step");
        trace.values.extend(out.logits.iter().chain(&out.hidden).map(|value| value.to_bits()));
        trace.argmax.extend(&out.argmax);
        from += count;
    }
    for group in [KvGroup::Full, KvGroup::Sliding] {
        for block in &table {
            let mut bytes = vec![0; executor.info().block_bytes(group)];
            executor.export_block(group, *block, &mut bytes).expect("export");
            trace.blocks.push(bytes);
        }
    }
    trace
}

fn ids(count: usize, vocab: usize) -> Vec<u32> {
    (0..count).map(|i| ((i * 37 + 11) % vocab) as u32).collect()
}

#[test]
fn every_type_has_the_bits_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let geometry = geometry();
    let types = GgmlType::all().filter(|ty| ty.is_decodable() && *ty != GgmlType::Q8_K);
    let mut count = 0;
    for (i, ty) in types.enumerate() {
        let model = model(&geometry, ty);
        let kv = if i % 2 == 0 { KvType::Int16 } else { KvType::Int8 };
        let ids = ids(9, geometry.vocab);
        let expected = trace(&mut *on_cpu(&model, kv), &ids, &[3, 1, 5]);
        let found = trace(&mut *on_gpu(gpu, &model, kv), &ids, &[3, 1, 5]);
        assert!(found.values == expected.values, "{}: logits or hidden states differ", ty.name());
        assert!(found.argmax == expected.argmax, "{}: the largest logits differ", ty.name());
        assert!(found.blocks == expected.blocks, "{}: K or V differ", ty.name());
        count += 1;
    }
    assert_eq!(count, 17, "types");
}

#[test]
fn long_sequences_have_the_bits_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    // Two blocks, the sliding layer's window across their border; partial results for blocks and rows that loop over them.
    let geometry = Geometry { window: 100, ..geometry() };
    let model = model(&geometry, GgmlType::Q4_K);
    let ids = ids(300, geometry.vocab);
    for (kv, ids) in [(KvType::Int16, &ids[..]), (KvType::Int8, &ids[..30])] {
        let expected = trace(&mut *on_cpu(&model, kv), ids, &[64]);
        let mut executor =
            WgpuExecutor::new(gpu, model.clone(), WgpuOptions { max_rows: 128, kv }).expect("an executor");
        let found = trace(&mut executor, ids, &[100, 64, 110, 26]);
        assert!(found.blocks == expected.blocks, "{kv:?}: K or V differ");
        assert!(found.argmax == expected.argmax, "{kv:?}: the largest logits differ");
    }
}

#[test]
fn muse_tiny_has_the_bits_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let model = Model::load(muser_testkit::muse_tiny()).expect("the bundled model");
    let ids = ids(6, model.geometry.vocab);
    let expected = trace(&mut *on_cpu(&model, KvType::Int16), &ids, &[5, 1]);
    let found = trace(&mut *on_gpu(gpu, &model, KvType::Int16), &ids, &[5, 1]);
    assert!(found == expected, "logits, hidden states, K or V differ");
}

#[test]
fn rows_do_not_see_their_neighbours() {
    let Some(gpu) = gpu() else { return };
    let geometry = geometry();
    let model = model(&geometry, GgmlType::Q6_K);
    row_invariance(|| on_gpu(gpu, &model, KvType::Int16), &geometry, 1, 3, 20);
    row_invariance(|| on_gpu(gpu, &model, KvType::Int8), &geometry, 2, 2, 30);
}

#[test]
fn blocks_go_between_executors() {
    let Some(gpu) = gpu() else { return };
    let geometry = geometry();
    let model = model(&geometry, GgmlType::Q8_0);
    // Every other one is the processor: what one has computed the other goes on with.
    for first in [0, 1] {
        let mut turn = first;
        let make = || {
            turn += 1;
            if turn % 2 == 0 { on_gpu(gpu, &model, KvType::Int16) } else { on_cpu(&model, KvType::Int16) }
        };
        import_continues(make, &geometry, 5, 30, 4);
    }
}

#[test]
fn what_leaves_holds_no_rows_of_another_sequence() {
    let Some(gpu) = gpu() else { return };
    let geometry = geometry();
    let model = model(&geometry, GgmlType::Q5_K);
    cleared_rows_tell_nothing(|| on_gpu(gpu, &model, KvType::Int16), &geometry, 9, &[1, 30]);
}

#[test]
fn a_step_of_several_sequences_in_shuffled_blocks_and_given_rows() {
    let Some(gpu) = gpu() else { return };
    let geometry = geometry();
    let model = model(&geometry, GgmlType::F16);
    let given: Vec<f32> = (0..geometry.hidden).map(|i| (i as f32 * 0.37).sin()).collect();
    let run = |executor: &mut dyn Executor| {
        executor.allocate_kv(KvCapacity { full: 3, sliding: 3 }).expect("KV memory");
        let (mut batch, mut out) = (StepBatch::default(), StepOutput::default());
        for (seq, blocks) in [[2u32, 0], [0, 2]].iter().enumerate() {
            batch.push_seq(0, &[BlockId(blocks[0])], 0, &[BlockId(blocks[1])]);
            for row in 0..3u32 {
                let input = if row == 1 {
                    RowInput::Embedding(batch.push_embedding(&given))
                } else {
                    RowInput::Token(5 + row + seq as u32)
                };
                let wants = RowWants { logits: row == 2, argmax: row != 1, hidden: row == 0, candidates: 0 };
                batch.push_row(Row { input, wants });
            }
        }
        executor.step(&batch, &mut out).expect("step");
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        (bits(&out.logits), bits(&out.hidden), out.argmax)
    };
    let (cpu, found) =
        (run(&mut *on_cpu(&model, KvType::Int16)), run(&mut *on_gpu(gpu, &model, KvType::Int16)));
    assert!(cpu == found);
    assert_eq!((found.0.len(), found.2.len()), (2 * geometry.vocab, 4));
}

/// A draft for the small model, with heads of its own.
fn draft(geometry: &Geometry) -> Draft {
    let config = DflashConfig {
        hidden: geometry.hidden,
        ffn: 512,
        heads: 4,
        kv_heads: 2,
        head_dim: 64,
        context: 4096,
        window: 30,
        sliding: vec![true; 2],
        rope_theta: 10_000.0,
        rms_eps: 1e-5,
        block_size: 6,
        target_layers: vec![0, 1],
        mask_token: 500,
        vocab: None,
    };
    let bytes = synth::draft_to_bytes(&config, Mix::from_name("q4_k_m").expect("a mix"), 3).expect("a draft");
    Draft::from_gguf(Arc::new(GgufFile::from_bytes(bytes).expect("valid"))).expect("a draft")
}

fn drafting(mut executor: Box<dyn Executor>, draft: &Draft) -> Box<dyn Executor> {
    executor.attach_draft(draft.clone()).expect("it fits");
    executor
}

#[test]
fn drafts_have_the_bits_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let geometry = geometry();
    let (model, draft) = (model(&geometry, GgmlType::Q4_K), draft(&geometry));
    for kv in [KvType::Int16, KvType::Int8] {
        for count in if kv == KvType::Int16 { [1, 45] } else { [2, 12] } {
            let (prompt, proposals) = (ids(count, geometry.vocab), draft.config.max_draft());
            let expected = draft_logits(&mut *drafting(on_cpu(&model, kv), &draft), &prompt, proposals);
            let found = draft_logits(&mut *drafting(on_gpu(gpu, &model, kv), &draft), &prompt, proposals);
            let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            assert!(bits(&expected) == bits(&found), "{kv:?}, {count} positions");
        }
    }
}

#[test]
fn proposals_do_not_depend_on_company_chunks_or_copies() {
    let Some(gpu) = gpu() else { return };
    let geometry = geometry();
    let (model, draft) = (model(&geometry, GgmlType::Q4_K), draft(&geometry));
    let make = || drafting(on_gpu(gpu, &model, KvType::Int16), &draft);
    draft_invariance(make, &geometry, 1, 2, 20);
    row_invariance(make, &geometry, 2, 2, 12);
    skipped_context_is_blank(make, &geometry, on_gpu(gpu, &model, KvType::Int16).info().sliding_block_bytes);
    cleared_rows_tell_nothing(make, &geometry, 4, &[7]);
    // Blocks of a draft go between backends, too.
    let mut turn = 0;
    let either = || {
        turn += 1;
        let executor =
            if turn % 2 == 0 { on_cpu(&model, KvType::Int16) } else { on_gpu(gpu, &model, KvType::Int16) };
        drafting(executor, &draft)
    };
    import_continues(either, &geometry, 5, 20, 3);
}
