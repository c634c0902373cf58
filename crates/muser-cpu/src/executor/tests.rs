use super::*;
use crate::options::Repack;
use muser_backend::{ReferenceExecutor, Row, RowInput, RowWants, conformance};
use muser_kv::BLOCK_LEN;

pub(super) fn tiny() -> Model {
    let path = muser_testkit::muse_tiny();
    Model::load(path).expect("the bundled model loads")
}

/// Types of K and V.
pub(super) const KV: [KvType; 3] = [KvType::F16, KvType::Int16, KvType::Int8];

fn executor(model: &Model, isa: Isa, threads: usize, repack: Repack) -> Box<dyn Executor> {
    executor_with(model, isa, threads, repack, KvType::F16)
}

fn executor_with(model: &Model, isa: Isa, threads: usize, repack: Repack, kv: KvType) -> Box<dyn Executor> {
    let options = CpuOptions { threads: Some(threads), repack, isa: Some(isa), max_rows: 256, kv };
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
    for kv in KV {
        let found = logits(&mut *executor_with(&model, Isa::detect(), 2, Repack::On, kv), &ids, 64);
        let agreement = conformance::agreement(&expected, &found, model.geometry.vocab);
        // Arbitrary ids put the model far from any text it knows, where int8 activations show most.
        assert!(agreement.mean_kl < 0.015 && agreement.max_error < 0.05, "{kv:?}: {agreement:?}");
    }
}

#[test]
fn every_instruction_set_gives_the_same_bits() {
    let model = tiny();
    let ids: Vec<u32> = (0..270).map(|i| (i * 41 + 7) % 4000).collect();
    for kv in KV {
        let expected = trace(&mut *executor_with(&model, Isa::Scalar, 2, Repack::Off, kv), &ids, 100);
        for isa in supported() {
            for (threads, repack, chunk) in [(1, Repack::On, 64), (3, Repack::Off, 33)] {
                let found = trace(&mut *executor_with(&model, isa, threads, repack, kv), &ids, chunk);
                let how = format!("{kv:?}, {}, {threads} threads, {repack:?}, chunks of {chunk}", isa.name());
                assert_eq!(found, expected, "{how}");
            }
        }
    }
}

#[test]
fn rows_do_not_see_their_neighbours() {
    let model = tiny();
    let cases = muser_testkit::long_or(200, 6);
    for (seed, kv) in KV.into_iter().cycle().take(cases).enumerate() {
        // More threads than tiles, so that attention is also cut along the KV.
        let mut threads = 0;
        let make = || {
            threads = threads % 5 + 2;
            executor_with(&model, Isa::detect(), threads, Repack::Auto, kv)
        };
        // One case is long enough for three blocks, the others meet more batches and cuts.
        let (sequences, positions) =
            if seed < KV.len() { (3, 560) } else { (2 + seed % 3, 40 + 37 * (seed % 9)) };
        conformance::row_invariance(make, &model.geometry, seed as u64, sequences, positions);
    }
}

#[test]
fn imported_blocks_continue_the_same() {
    let model = tiny();
    for kv in KV {
        let make = || executor_with(&model, Isa::detect(), 2, Repack::Off, kv);
        conformance::import_continues(make, &model.geometry, 5, 300, 40);
    }
}

#[test]
fn rows_behind_the_end_of_an_exported_block_can_be_cleared() {
    let model = tiny();
    let ids: Vec<u32> = (0..256).map(|i| (i * 31 + 3) % 4000).collect();
    let first = |executor: &mut dyn Executor, ids: &[u32], group| {
        logits(executor, ids, 256);
        let mut bytes = vec![0; executor.info().block_bytes(group)];
        executor.export_block(group, BlockId(0), &mut bytes).expect("export");
        bytes
    };
    for kv in KV {
        let mut executor = executor_with(&model, Isa::detect(), 2, Repack::Off, kv);
        for group in [KvGroup::Full, KvGroup::Sliding] {
            for rows in [1, 100, 255] {
                // In fresh memory the rows behind are zeros.
                let expected = first(&mut *executor, &ids[..rows], group);
                let mut bytes = first(&mut *executor, &ids, group);
                assert!(bytes != expected);
                executor.clear_rows(group, rows, &mut bytes);
                assert!(bytes == expected, "{kv:?}, {group:?}, {rows} rows");
            }
        }
    }
}

#[test]
fn what_leaves_holds_no_rows_of_another_sequence() {
    let model = tiny();
    for kv in KV {
        conformance::cleared_rows_tell_nothing(
            || executor_with(&model, Isa::detect(), 2, Repack::Off, kv),
            &model.geometry,
            9,
            &[1, 100, 255, 259],
        );
    }
}

#[test]
fn routes_and_sizes_are_those_of_the_kv_type() {
    let model = tiny();
    let g = &model.geometry;
    for (kv, route) in [(KvType::Int16, "exact-1/kv16"), (KvType::Int8, "exact-1/kv8")] {
        let executor = executor_with(&model, Isa::detect(), 1, Repack::Off, kv);
        let info = executor.info();
        assert_eq!((info.kv_type, &info.route[..]), (kv, route));
        let layers = g.sliding.iter().filter(|sliding| !**sliding).count();
        let expected = layers * g.kv_heads * kv.head_bytes(g.head_dim) * BLOCK_LEN;
        assert_eq!(info.full_block_bytes, expected);
    }
    let options = CpuOptions { kv: KvType::F32, ..CpuOptions::default() };
    assert!(matches!(CpuExecutor::new(model, options), Err(ExecError::Unsupported { .. })));
}

#[test]
fn norms_that_allow_scores_beyond_the_arithmetic_are_refused() {
    let check = |value: f32, kv: KvType| {
        let mut model = tiny();
        model.layers[2].attn_k_norm[5] = value;
        CpuExecutor::new(
            model,
            CpuOptions { threads: Some(1), repack: Repack::Off, kv, ..CpuOptions::default() },
        )
    };
    for kv in [KvType::Int16, KvType::Int8] {
        for value in [50.0, -1000.0, f32::NAN, f32::INFINITY] {
            match check(value, kv) {
                Err(ExecError::Unsupported { what, .. }) => {
                    assert!(what.contains("layer 2") && what.contains("2^90"), "{what}");
                }
                Err(other) => panic!("{other}"),
                Ok(_) => panic!("{value} was taken"),
            }
        }
    }
    check(50.0, KvType::F16).expect("floats subtract a maximum");
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
