use std::path::Path;

use super::*;
use crate::options::Repack;
use muser_backend::{ReferenceExecutor, Row, RowInput, RowWants, conformance};
use muser_kv::BLOCK_LEN;

pub(super) fn tiny() -> Model {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/muse-tiny-Q4_K_M.gguf");
    Model::load(path).expect("the bundled model loads")
}

fn executor(model: &Model, isa: Isa, threads: usize, repack: Repack) -> Box<dyn Executor> {
    let options = CpuOptions { threads: Some(threads), repack, isa: Some(isa), max_rows: 256 };
    Box::new(CpuExecutor::new(model.clone(), options).expect("executor"))
}

pub(super) fn logits(executor: &mut dyn Executor, ids: &[u32], chunk: usize) -> Vec<f32> {
    let blocks = ids.len().div_ceil(BLOCK_LEN) as u32;
    executor.allocate_kv(KvCapacity { full: blocks, sliding: blocks }).expect("KV memory");
    let table: Vec<BlockId> = (0..blocks).map(BlockId).collect();
    let (mut batch, mut out) = (StepBatch::default(), StepOutput::default());
    let mut all = Vec::new();
    for (i, ids) in ids.chunks(chunk).enumerate() {
        batch.clear();
        batch.push_seq((i * chunk) as u32, &table, 0, &table);
        for &id in ids {
            batch.push_row(Row {
                input: RowInput::Token(id),
                wants: RowWants { logits: true, ..RowWants::default() },
            });
        }
        executor.step(&batch, &mut out).expect("step");
        all.extend_from_slice(&out.logits);
    }
    all
}

/// Hash of the logits of every position and of all KV bytes.
fn trace(executor: &mut dyn Executor, ids: &[u32], chunk: usize) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    for v in logits(executor, ids, chunk) {
        hasher.update(&v.to_bits().to_le_bytes());
    }
    for group in [KvGroup::Full, KvGroup::Sliding] {
        let mut bytes = vec![0; executor.info().block_bytes(group)];
        for block in 0..ids.len().div_ceil(BLOCK_LEN) as u32 {
            executor.export_block(group, BlockId(block), &mut bytes).expect("export");
            hasher.update(&bytes);
        }
    }
    hasher.finalize()
}

pub(super) fn supported() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_supported())
}

#[test]
fn agrees_with_the_reference() {
    let model = tiny();
    let ids: Vec<u32> = (0..300).map(|i| (i * 37 + 11) % 4000).collect();
    let mut reference = ReferenceExecutor::new(model.clone(), KvType::F16).expect("reference");
    let expected = logits(&mut reference, &ids, 64);
    let found = logits(&mut *executor(&model, Isa::detect(), 2, Repack::On), &ids, 64);
    let agreement = conformance::agreement(&expected, &found, model.geometry.vocab);
    // Arbitrary ids put the model far from any text it knows, where int8 activations show most.
    assert!(agreement.mean_kl < 0.015 && agreement.max_error < 0.05, "{agreement:?}");
}

#[test]
fn every_instruction_set_gives_the_same_bits() {
    let model = tiny();
    let ids: Vec<u32> = (0..270).map(|i| (i * 41 + 7) % 4000).collect();
    let expected = trace(&mut *executor(&model, Isa::Scalar, 2, Repack::Off), &ids, 100);
    for isa in supported() {
        for (threads, repack, chunk) in [(1, Repack::On, 64), (3, Repack::Off, 33)] {
            let found = trace(&mut *executor(&model, isa, threads, repack), &ids, chunk);
            assert_eq!(found, expected, "{}, {threads} threads, {repack:?}, chunks of {chunk}", isa.name());
        }
    }
}

#[test]
fn rows_do_not_see_their_neighbours() {
    let model = tiny();
    for seed in 0..1 {
        // More threads than tiles, so that attention is also cut along the KV.
        let mut threads = 0;
        let make = || {
            threads = threads % 5 + 2;
            executor(&model, Isa::detect(), threads, Repack::Auto)
        };
        conformance::row_invariance(make, &model.geometry, seed, 3, 560);
    }
}

#[test]
fn imported_blocks_continue_the_same() {
    let model = tiny();
    let make = || executor(&model, Isa::detect(), 2, Repack::Off);
    conformance::import_continues(make, &model.geometry, 5, 300, 40);
}

#[test]
fn rows_behind_the_end_of_an_exported_block_can_be_cleared() {
    let model = tiny();
    let ids: Vec<u32> = (0..256).map(|i| (i * 31 + 3) % 4000).collect();
    let mut executor = executor(&model, Isa::detect(), 2, Repack::Off);
    let first = |executor: &mut dyn Executor, ids: &[u32], group| {
        logits(executor, ids, 256);
        let mut bytes = vec![0; executor.info().block_bytes(group)];
        executor.export_block(group, BlockId(0), &mut bytes).expect("export");
        bytes
    };
    for group in [KvGroup::Full, KvGroup::Sliding] {
        for rows in [1, 100, 255] {
            // In fresh memory the rows behind are zeros.
            let expected = first(&mut *executor, &ids[..rows], group);
            let mut bytes = first(&mut *executor, &ids, group);
            assert!(bytes != expected);
            executor.clear_rows(group, rows, &mut bytes);
            assert!(bytes == expected, "{group:?}, {rows} rows");
        }
    }
}

#[test]
fn what_leaves_holds_no_rows_of_another_sequence() {
    let model = tiny();
    conformance::cleared_rows_tell_nothing(
        || executor(&model, Isa::detect(), 2, Repack::Off),
        &model.geometry,
        9,
        &[1, 100, 255, 259],
    );
}

#[test]
fn a_lent_block_is_the_borrowers_until_it_comes_back() {
    let model = tiny();
    let mut executor = executor(&model, Isa::detect(), 2, Repack::Off);
    let size = executor.info().block_bytes(KvGroup::Full);
    logits(&mut *executor, &[1, 2, 3], 8);
    executor.allocate_kv(KvCapacity { full: 3, sliding: 3 }).expect("KV memory");
    let mut loan = executor.lend_block(KvGroup::Full, BlockId(1)).expect("it is memory");
    assert!(executor.lend_block(KvGroup::Full, BlockId(1)).is_none(), "lent already");
    assert!(executor.lend_block(KvGroup::Full, BlockId(3)).is_none(), "there is no such block");
    let mut bytes = vec![0; size];
    assert!(executor.export_block(KvGroup::Full, BlockId(1), &mut bytes).is_err());
    assert!(executor.import_block(KvGroup::Full, BlockId(1), &bytes).is_err());
    let step = |full: u32, executor: &mut dyn Executor| {
        let (mut batch, mut out) = (StepBatch::default(), StepOutput::default());
        batch.push_seq(0, &[BlockId(full)], 0, &[BlockId(0)]);
        batch.push_row(Row { input: RowInput::Token(5), wants: RowWants::default() });
        executor.step(&batch, &mut out)
    };
    assert!(step(1, &mut *executor).is_err(), "a step may not touch it");
    // Others go on while another thread writes.
    std::thread::scope(|scope| {
        scope.spawn(|| loan.bytes().fill(7));
        step(0, &mut *executor).expect("another block");
        executor
            .export_block(KvGroup::Sliding, BlockId(1), &mut vec![0; executor.info().sliding_block_bytes])
            .expect("the other group's");
    });
    drop(loan);
    executor.export_block(KvGroup::Full, BlockId(1), &mut bytes).expect("it is back");
    assert!(bytes.iter().all(|&byte| byte == 7));
    step(1, &mut *executor).expect("it is back");
    // A loan outlives memory that is allocated anew, and then concerns nobody.
    let mut old = executor.lend_block(KvGroup::Full, BlockId(2)).expect("free");
    executor.allocate_kv(KvCapacity { full: 3, sliding: 3 }).expect("KV memory");
    old.bytes().fill(9);
    step(2, &mut *executor).expect("not lent");
    executor.export_block(KvGroup::Full, BlockId(0), &mut bytes).expect("there");
    assert!(bytes.iter().all(|&byte| byte == 0));
}
