//! The numbers themselves: the bits of each numeric route on the bundled model, recorded, and how far they are from the
//! model computed in f64.
//!
//! The other suites compare instruction sets, chunks and backends with each other; what would change on all paths at once is
//! seen here only. A change of these hashes is a new route ([`muser_backend::arith::attention::route`]), since packs on disk
//! hold the old bits.

#![expect(clippy::unwrap_used, reason = "a test may fail that way")]

#[path = "../../muser-backend/tests/support/mod.rs"]
mod support;

use std::path::{Path, PathBuf};

use muser_backend::conformance::agreement;
use muser_backend::{Executor, KvCapacity, KvType, Row, RowInput, RowWants, StepBatch, StepOutput};
use muser_cpu::{CpuExecutor, CpuOptions};
use muser_kv::{BLOCK_LEN, BlockId, KvGroup};
use muser_model::Model;
// `support` reads the headers of goldens with it.
use serde_json as _;
use support::Tensors;

fn bundled() -> (Model, Tensors) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let golden = root.join("crates/muser-backend/tests/golden/muse-tiny-Q4_K_M.cut.safetensors");
    (Model::load(root.join("models/muse-tiny-Q4_K_M.gguf")).unwrap(), Tensors::open(&golden))
}

/// Logits of all ids, and a hash of those and of every block of K and V.
fn run(model: &Model, kv: KvType, ids: &[u32]) -> (Vec<f32>, String) {
    let mut executor = CpuExecutor::new(model.clone(), CpuOptions { kv, ..CpuOptions::default() }).unwrap();
    let blocks = ids.len().div_ceil(BLOCK_LEN) as u32;
    executor.allocate_kv(KvCapacity { full: blocks, sliding: blocks }).unwrap();
    let table: Vec<BlockId> = (0..blocks).map(BlockId).collect();
    let (mut batch, mut out, mut all) = (StepBatch::default(), StepOutput::default(), Vec::new());
    for (i, chunk) in ids.chunks(100).enumerate() {
        batch.clear();
        batch.push_seq(100 * i as u32, &table, 0, &table);
        for &id in chunk {
            let wants = RowWants { logits: true, ..RowWants::default() };
            batch.push_row(Row { input: RowInput::Token(id), wants });
        }
        executor.step(&batch, &mut out).unwrap();
        all.extend_from_slice(&out.logits);
    }
    let mut hasher = blake3::Hasher::new();
    all.iter().for_each(|logit| {
        hasher.update(&logit.to_le_bytes());
    });
    for group in [KvGroup::Full, KvGroup::Sliding] {
        let mut bytes = vec![0; executor.info().block_bytes(group)];
        for (i, block) in table.iter().enumerate() {
            executor.export_block(group, *block, &mut bytes).unwrap();
            executor.clear_rows(group, ids.len().saturating_sub(i * BLOCK_LEN), &mut bytes);
            hasher.update(&bytes);
        }
    }
    (all, hasher.finalize().to_hex()[..32].to_owned())
}

#[test]
fn each_route_has_the_bits_that_it_had() {
    let (model, golden) = bundled();
    let ids = golden.u32("ids");
    for (kv, recorded) in [
        (KvType::Int16, "3a60b5af71bf1bda15b42f42c12b7037"),
        (KvType::Int8, "67d35a67990194ed49cb88187919a6ea"),
    ] {
        let (_, found) = run(&model, kv, &ids);
        assert_eq!(found, recorded, "KV type {}: other bits need another route", kv.name());
    }
}

#[test]
fn quality_against_the_model_in_f64() {
    let (model, golden) = bundled();
    let (ids, rows, hf) = (golden.u32("ids"), golden.u32("rows"), golden.f32("hf64_rows"));
    let vocab = model.geometry.vocab;
    // Of seven rows; of all 384 below.
    for (kv, most) in [(KvType::Int16, 0.009), (KvType::Int8, 0.0105)] {
        let (logits, _) = run(&model, kv, &ids);
        let found: Vec<f32> =
            rows.iter().flat_map(|row| logits[*row as usize * vocab..][..vocab].to_vec()).collect();
        let agreement = agreement(&hf, &found, vocab);
        println!("KV type {}: {agreement:?} over {} rows", kv.name(), rows.len());
        assert!(agreement.mean_kl <= most, "KV type {}: {agreement:?}, at most {most}", kv.name());
    }
}

/// Mean KL that the uncut goldens allow with 16 and with 8 bits: the F16 file shows attention alone, in the quantised ones 8-bit
/// activations are most of it.
const UNCUT: [(&str, [f64; 2]); 3] = [
    ("muse-tiny-F16", [1e-6, 0.0015]),
    ("muse-tiny-Q8_0", [0.00187, 0.0033]),
    ("muse-tiny-Q4_K_M", [0.006, 0.007]),
];

#[test]
fn quality_on_uncut_goldens_when_given() {
    let Some(dir) = std::env::var_os("MUSER_GOLDEN_DIR").map(PathBuf::from) else {
        println!("skipped: MUSER_GOLDEN_DIR is not set");
        return;
    };
    for (name, most) in UNCUT {
        let golden = Tensors::open(&dir.join(name).with_extension("safetensors"));
        let model = Model::load(dir.join(name).with_extension("gguf")).unwrap();
        for (kv, most) in [KvType::Int16, KvType::Int8].into_iter().zip(most) {
            let (logits, _) = run(&model, kv, &golden.u32("ids"));
            let agreement = agreement(&golden.f32("hf64"), &logits, model.geometry.vocab);
            println!("{name}, KV type {}: {agreement:?}", kv.name());
            assert!(agreement.mean_kl <= most, "{name}, KV type {}: {agreement:?}", kv.name());
        }
    }
}
