//! A model cut between the processor and a GPU, either way round: the bits of the processor alone, drafts included.
//!
//! The device is lavapipe, as in `conformance.rs`; shapes are small.

mod support;

use std::sync::Arc;

use muser_backend::conformance::{draft_logits, import_continues, row_invariance, skipped_context_is_blank};
use muser_backend::{Executor, KvType, LayerRange, PartExecutor};
use muser_cpu::{CpuExecutor, CpuOptions};
use muser_gguf::{GgmlType, GgufFile};
use muser_model::synth::{self, Mix};
use muser_model::{DflashConfig, Draft, Geometry, Model};
use muser_split::{Grouping, SplitExecutor};
use muser_wgpu::{Gpu, WgpuExecutor, WgpuOptions};
use support::gpu;

/// Four layers, three of them with a window of 40.
fn geometry() -> Geometry {
    let tiny = synth::Preset::Tiny.geometry();
    Geometry { sliding: vec![true, false, true, true], window: 40, ffn: 512, ..tiny }
}

fn model() -> Model {
    let bytes = synth::tiny(&geometry(), GgmlType::Q4_K, 3).expect("a file");
    Model::from_gguf(Arc::new(GgufFile::from_bytes(bytes).expect("valid"))).expect("a model")
}

/// A draft that reads of the first layer, of one in the middle and of the last.
fn draft() -> Draft {
    let config = DflashConfig {
        hidden: geometry().hidden,
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
        target_layers: vec![0, 1, 3],
        mask_token: 500,
        vocab: None,
    };
    let bytes = synth::draft_to_bytes(&config, Mix::from_name("q4_k_m").expect("a mix"), 3).expect("a draft");
    Draft::from_gguf(Arc::new(GgufFile::from_bytes(bytes).expect("valid"))).expect("a draft")
}

fn cpu(kv: KvType) -> CpuOptions {
    CpuOptions { threads: Some(1), max_rows: 64, kv, ..CpuOptions::default() }
}

/// Parts cut before the layers of `cuts`, in turn on the processor and on the GPU, which comes first if `gpu_first`.
fn split(
    gpu: &Arc<Gpu>,
    model: &Model,
    cuts: &[usize],
    gpu_first: bool,
    kv: KvType,
    grouping: Grouping,
) -> Box<dyn Executor> {
    let (mut first, mut on_gpu) = (0, gpu_first);
    let ends = cuts.iter().copied().chain([4]);
    let parts = ends.map(|end| -> Box<dyn PartExecutor> {
        let range = LayerRange::new(first..end, 4).expect("inside");
        first = end;
        on_gpu = !on_gpu;
        if on_gpu {
            Box::new(CpuExecutor::part(model.clone(), range, cpu(kv)).expect("a part"))
        } else {
            let options = WgpuOptions { max_rows: 64, kv };
            Box::new(WgpuExecutor::part(gpu, model.clone(), range, options).expect("a part"))
        }
    });
    Box::new(SplitExecutor::new(parts.collect(), model, grouping).expect("a split"))
}

fn whole(model: &Model, kv: KvType) -> Box<dyn Executor> {
    Box::new(CpuExecutor::new(model.clone(), cpu(kv)).expect("an executor"))
}

fn drafting(mut executor: Box<dyn Executor>, draft: &Draft) -> Box<dyn Executor> {
    executor.attach_draft(draft.clone()).expect("it fits");
    executor
}

/// The processor alone and splits, in turns: what one computes is what the others do, alone and among others.
#[test]
fn cuts_between_processor_and_gpu_have_the_bits_of_the_processor() {
    let Some(gpu) = gpu() else { return };
    let (model, draft) = (model(), draft());
    for (seed, kv, with_draft) in [(1, KvType::Int16, true), (2, KvType::Int8, false)] {
        let mut turn = 0;
        let make = || {
            turn += 1;
            let (gpu_first, cuts) = (turn % 2 == 0, [&[2][..], &[1, 3], &[3]][turn % 3]);
            let executor = match turn {
                1 => whole(&model, kv),
                _ => split(gpu, &model, cuts, gpu_first, kv, Grouping::Fixed(1 + turn % 2)),
            };
            if with_draft { drafting(executor, &draft) } else { executor }
        };
        row_invariance(make, &geometry(), seed, 3, 20);
    }
}

#[test]
fn blocks_go_between_splits_and_whole_executors() {
    let Some(gpu) = gpu() else { return };
    let (model, draft) = (model(), draft());
    let mut turn = 0;
    let make = || {
        turn += 1;
        let executor = match turn % 3 {
            0 => whole(&model, KvType::Int16),
            1 => split(gpu, &model, &[1], true, KvType::Int16, Grouping::Fixed(1)),
            _ => split(gpu, &model, &[3], false, KvType::Int16, Grouping::Fixed(2)),
        };
        drafting(executor, &draft)
    };
    import_continues(make, &geometry(), 5, 30, 4);
}

#[test]
fn drafts_read_over_every_cut() {
    let Some(gpu) = gpu() else { return };
    let (model, draft) = (model(), draft());
    let prompt: Vec<u32> = (0..23).map(|i| (i * 37 + 11) % 500).collect();
    let proposals = draft.config.max_draft();
    let kv = KvType::Int16;
    let expected = draft_logits(&mut *drafting(whole(&model, kv), &draft), &prompt, proposals);
    for cut in 1..4 {
        for gpu_first in [true, false] {
            let split = split(gpu, &model, &[cut], gpu_first, kv, Grouping::Fixed(1));
            let found = draft_logits(&mut *drafting(split, &draft), &prompt, proposals);
            let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            assert!(bits(&found) == bits(&expected), "cut at {cut}, the GPU first: {gpu_first}");
        }
    }
    let bytes = whole(&model, kv).info().sliding_block_bytes;
    let make = || drafting(split(gpu, &model, &[2], false, kv, Grouping::Fixed(1)), &draft);
    skipped_context_is_blank(make, &geometry(), bytes);
}

#[test]
fn a_part_holds_its_layers_and_no_others() {
    let Some(gpu) = gpu() else { return };
    let model = model();
    let part = |layers: std::ops::Range<usize>| {
        let range = LayerRange::new(layers, 4).expect("inside");
        let options = WgpuOptions { max_rows: 64, kv: KvType::Int16 };
        WgpuExecutor::part(gpu, model.clone(), range, options).expect("a part")
    };
    let (first, last) = (part(0..2), part(2..4));
    let all = WgpuExecutor::new(gpu, model.clone(), WgpuOptions { max_rows: 64, kv: KvType::Int16 });
    let all = all.expect("an executor");
    assert_eq!(first.weight_bytes() + last.weight_bytes(), all.weight_bytes());
    let bytes = |executor: &dyn Executor| {
        let info = executor.info();
        (info.full_block_bytes, info.sliding_block_bytes)
    };
    let [(a, b), (c, d), (full, sliding)] = [bytes(&first), bytes(&last), bytes(&all)];
    assert_eq!((a + c, b + d), (full, sliding));
    assert!((c, b) != (full, sliding));
    let mut first = first;
    muser_backend::DraftExecutor::attach_draft(&mut first, draft()).expect_err("no output layer");
}
