use muser_backend::DraftExecutor as _;
use std::sync::Arc;

use super::super::tests::{KV, supported, tiny};
use super::super::{CpuExecutor, Isa};
use crate::options::{CpuOptions, Repack};

use muser_backend::{
    DraftBatch, ExecError, Executor, KvCapacity, KvType, ReferenceExecutor, Row, RowInput, RowWants,
    StepBatch, StepOutput, conformance,
};
use muser_gguf::GgufFile;
use muser_kv::{BlockId, KvGroup};
use muser_model::synth::{self, Mix};
use muser_model::{DflashConfig, Draft, Model};

fn tiny_draft() -> Draft {
    let path = muser_testkit::muse_tiny_draft();
    Draft::load(path).expect("the bundled draft loads")
}

fn executor(model: &Model, draft: &Draft, isa: Isa, threads: usize, repack: Repack) -> Box<dyn Executor> {
    executor_with(model, draft, isa, threads, repack, KvType::F16)
}

fn executor_with(
    model: &Model,
    draft: &Draft,
    isa: Isa,
    threads: usize,
    repack: Repack,
    kv: KvType,
) -> Box<dyn Executor> {
    let options = CpuOptions { threads: Some(threads), repack, isa: Some(isa), max_rows: 256, kv };
    let mut executor = CpuExecutor::new(model.clone(), options).expect("executor");
    executor.attach_draft(draft.clone()).expect("draft");
    Box::new(executor)
}

/// A draft for Muse Tiny with other heads, angles, window and types than the bundled one.
fn odd_draft(mix: &str) -> Draft {
    let config = DflashConfig {
        hidden: 512,
        ffn: 768,
        heads: 8,
        kv_heads: 2,
        head_dim: 64,
        context: 4096,
        window: 100,
        sliding: vec![true; 3],
        rope_theta: 10_000.0,
        rms_eps: 1e-5,
        block_size: 11,
        target_layers: vec![0, 1, 5],
        mask_token: 4090,
        vocab: None,
    };
    let bytes = synth::draft_to_bytes(&config, Mix::from_name(mix).expect("a mix"), 3).expect("draft");
    Draft::from_gguf(Arc::new(GgufFile::from_bytes(bytes).expect("valid"))).expect("draft")
}

fn ids(n: usize, step: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * step + 11) % 4000) as u32).collect()
}

#[test]
fn agrees_with_the_reference() {
    let model = tiny();
    for draft in [tiny_draft(), odd_draft("q4_k_m"), odd_draft("f16")] {
        let mut reference = ReferenceExecutor::new(model.clone(), KvType::F16).expect("reference");
        reference.attach_draft(draft.clone()).expect("draft");
        for prompt in [ids(1, 5), ids(140, 41)] {
            let proposals = draft.config.max_draft();
            let expected = conformance::draft_logits(&mut reference, &prompt, proposals);
            for kv in KV {
                let mut fast = executor_with(&model, &draft, Isa::detect(), 2, Repack::On, kv);
                let found = conformance::draft_logits(&mut *fast, &prompt, proposals);
                let agreement = conformance::agreement(&expected, &found, model.geometry.vocab);
                let close = agreement.max_error < 0.03 && agreement.mean_kl < 0.005;
                assert!(close, "{kv:?}, {} positions: {agreement:?}", prompt.len());
            }
        }
    }
}

/// The factor of the embedding table reaches the rows of a draft, which no norm hides, here and in the reference.
#[test]
fn the_tables_factor_is_applied() {
    let (model, draft, prompt) = (tiny(), tiny_draft(), ids(30, 41));
    let scaled = conformance::with_factor_on_table(&model);
    assert_eq!(scaled.token_embd.scale, 1.0 / 128.0);
    let mut forgotten = scaled.clone();
    forgotten.token_embd.scale = 1.0;
    let proposals = draft.config.max_draft();
    let fast = |model: &Model| {
        let mut executor = executor_with(model, &draft, Isa::detect(), 2, Repack::On, KvType::Int16);
        conformance::draft_logits(&mut *executor, &prompt, proposals)
    };
    let slow = |model: &Model| {
        let mut reference = ReferenceExecutor::new(model.clone(), KvType::F16).expect("reference");
        reference.attach_draft(draft.clone()).expect("draft");
        conformance::draft_logits(&mut reference, &prompt, proposals)
    };
    for logits in [&fast as &dyn Fn(&Model) -> Vec<f32>, &slow] {
        let expected = logits(&model);
        assert!(logits(&scaled) == expected);
        assert!(logits(&forgotten) != expected, "a forgotten factor would be seen");
    }
}

#[test]
fn every_instruction_set_proposes_the_same_bits() {
    let model = tiny();
    for draft in [tiny_draft(), odd_draft("q4_k_m")] {
        let prompt = ids(30, 41);
        let proposals = draft.config.max_draft();
        for kv in KV {
            let run = |isa, threads, repack| {
                conformance::draft_logits(
                    &mut *executor_with(&model, &draft, isa, threads, repack, kv),
                    &prompt,
                    proposals,
                )
            };
            let expected = run(Isa::Scalar, 2, Repack::Off);
            for isa in supported() {
                for (threads, repack) in [(1, Repack::On), (3, Repack::Off)] {
                    let found = run(isa, threads, repack);
                    assert!(found == expected, "{kv:?}, {}, {threads} threads", isa.name());
                }
            }
        }
    }
}

#[test]
fn proposals_do_not_depend_on_company_chunks_or_copies() {
    let model = tiny();
    let drafts = [tiny_draft(), odd_draft("q4_k_m")];
    for (seed, draft, kv) in [
        (1, 0, KvType::F16),
        (2, 1, KvType::F16),
        (3, 0, KvType::Int16),
        (4, 1, KvType::Int16),
        (5, 1, KvType::Int8),
    ] {
        let mut threads = 0;
        let make = || {
            threads = threads % 2 + 1;
            executor_with(&model, &drafts[draft], Isa::detect(), threads, Repack::Auto, kv)
        };
        conformance::draft_invariance(make, &model.geometry, seed, 3, 330);
    }
}

#[test]
fn the_target_is_what_it_was_and_the_planes_are_row_invariant() {
    let model = tiny();
    let draft = tiny_draft();
    let mut threads = 0;
    let make = || {
        threads = threads % 2 + 1;
        executor(&model, &draft, Isa::detect(), threads, Repack::Auto)
    };
    conformance::row_invariance(make, &model.geometry, 7, 2, 330);
    // Logits with and without a draft, and the sliding blocks' own planes.
    let prompt = ids(280, 13);
    let options =
        CpuOptions { threads: Some(2), repack: Repack::Off, isa: None, max_rows: 256, kv: KvType::F16 };
    let mut plain = CpuExecutor::new(model.clone(), options).expect("executor");
    let mut drafting = executor(&model, &draft, Isa::detect(), 2, Repack::Off);
    let expected = super::super::tests::logits(&mut plain, &prompt, 50);
    assert!(super::super::tests::logits(&mut *drafting, &prompt, 50) == expected);
    let [mut a, mut b] = [&plain as &dyn Executor, &*drafting].map(|e| vec![0; e.info().sliding_block_bytes]);
    let block = (KvGroup::Sliding, BlockId(0));
    plain.export_block(block.0, block.1, &mut a).expect("export");
    drafting.export_block(block.0, block.1, &mut b).expect("export");
    assert!(b.len() > a.len() && b[..a.len()] == a[..]);
    assert_ne!(plain.info().route, drafting.info().route);
}

#[test]
fn a_step_without_context_leaves_zeros() {
    let model = tiny();
    for kv in KV {
        let options = CpuOptions { threads: Some(1), repack: Repack::Off, isa: None, max_rows: 64, kv };
        let plain = CpuExecutor::new(model.clone(), options).expect("executor");
        for draft in [tiny_draft(), odd_draft("q4_k_m")] {
            let make = || executor_with(&model, &draft, Isa::detect(), 2, Repack::Off, kv);
            conformance::skipped_context_is_blank(make, &model.geometry, plain.info().sliding_block_bytes);
        }
    }
}

#[test]
fn a_round_larger_than_a_step_is_cut() {
    let model = tiny();
    let draft = tiny_draft();
    let run = |max_rows| {
        let options =
            CpuOptions { threads: Some(2), repack: Repack::Off, isa: None, max_rows, kv: KvType::F16 };
        let mut executor = CpuExecutor::new(model.clone(), options).expect("executor");
        executor.attach_draft(draft.clone()).expect("draft");
        executor.allocate_kv(KvCapacity { full: 1, sliding: 1 }).expect("KV memory");
        let mut round = DraftBatch::default();
        (0..9).for_each(|i| round.push(50 + i, 0, 1 + i % 7, 0, &[]));
        let mut logits = Vec::new();
        executor.draft(&round, &mut logits).expect("draft");
        assert_eq!(logits.len(), round.proposals() * model.geometry.vocab);
        logits
    };
    let whole = run(256);
    assert!(run(3) == whole && run(20) == whole);
}

#[test]
fn refuses_what_cannot_be() {
    let model = tiny();
    let options =
        CpuOptions { threads: Some(1), repack: Repack::Off, isa: None, max_rows: 16, kv: KvType::F16 };
    let make = || CpuExecutor::new(model.clone(), options).expect("executor");
    let unsupported = |result: Result<(), ExecError>, text: &str| match result {
        Err(ExecError::Unsupported { what, .. }) => assert!(what.contains(text), "{what}"),
        other => panic!("{other:?}, expected {text}"),
    };
    let mut executor = make();
    let (mut round, mut logits) = (DraftBatch::default(), Vec::new());
    round.push(5, 0, 1, 0, &[]);
    assert!(matches!(executor.draft(&round, &mut logits), Err(ExecError::InvalidBatch(_))));
    executor.attach_draft(tiny_draft()).expect("draft");
    unsupported(executor.attach_draft(tiny_draft()), "second");
    round.clear();
    round.push(5, 0, 8, 0, &[]);
    assert!(matches!(executor.draft(&round, &mut logits), Err(ExecError::InvalidBatch(_))));

    let mut executor = make();
    executor.allocate_kv(KvCapacity { full: 1, sliding: 1 }).expect("KV memory");
    unsupported(executor.attach_draft(tiny_draft()), "allocated");

    let mut draft = tiny_draft();
    draft.config.sliding[1] = false;
    unsupported(make().attach_draft(draft), "no window");
    let mut draft = tiny_draft();
    draft.config.target_layers[2] = 8;
    unsupported(make().attach_draft(draft), "target_layers");
    let mut draft = tiny_draft();
    draft.layers[1].attn_q_norm[0] = 1e4;
    make().attach_draft(draft.clone()).expect("floats subtract a maximum");
    let options = CpuOptions { kv: KvType::Int16, ..options };
    let mut digits = CpuExecutor::new(model.clone(), options).expect("executor");
    unsupported(digits.attach_draft(draft), "draft layer 1");
    let mut draft = tiny_draft();
    draft.config.head_dim = 40;
    unsupported(make().attach_draft(draft), "head size 40");
}

/// Whether a block holds a draft's context is not looked at while somebody else fills it: until it is back it may.
#[test]
fn a_lent_block_is_not_asked_for_context() {
    let model = tiny();
    let mut executor = executor(&model, &tiny_draft(), Isa::detect(), 2, Repack::Off);
    executor.allocate_kv(KvCapacity { full: 2, sliding: 2 }).expect("KV memory");
    let (mut batch, mut out) = (StepBatch::default(), StepOutput::default());
    batch.push_seq(0, &[BlockId(0)], 0, &[BlockId(1)]);
    for id in ids(4, 5) {
        batch.push_row(Row { input: RowInput::Token(id), wants: RowWants::default() });
    }
    executor.step(&batch, &mut out).expect("step");
    let asked = |executor: &dyn Executor| [3, 4].map(|row| executor.has_draft_context(BlockId(1), row));
    assert_eq!(asked(&*executor), [true, false]);
    let mut loan = executor.lend_block(KvGroup::Sliding, BlockId(1)).expect("it is memory");
    std::thread::scope(|scope| {
        scope.spawn(|| loan.bytes().fill(0));
        assert_eq!(asked(&*executor), [true, true]);
        // The other block is nobody else's.
        assert!(!executor.has_draft_context(BlockId(0), 0));
    });
    drop(loan);
    assert_eq!(asked(&*executor), [false, false], "it is back, and blank");
}
