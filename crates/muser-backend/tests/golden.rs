//! The scalar reference executor against Hugging Face's implementation, computed in f64.
//!
//! The committed fixture covers the bundled quantised model over 384 positions, half again its window (see
//! `golden/cut.py`). `MUSER_GOLDEN_DIR` may name a folder with uncut pairs `NAME.gguf` + `NAME.safetensors` (tensors
//! `ids`, `hf64`): then every pair in it is checked too.

#![expect(clippy::unwrap_used, reason = "a test may fail that way")]

mod support;

use std::path::{Path, PathBuf};

use muser_backend::{
    Executor, KvCapacity, KvType, ReferenceExecutor, Row, RowInput, RowWants, StepBatch, StepOutput,
};
use muser_kv::{BLOCK_LEN, BlockId};
use muser_model::Model;
use support::Tensors;

/// Largest error allowed, relative to the range of the reference logits.
const BOUND: f32 = 2e-5;

/// Logits of every position, run in chunks of the given sizes (cycled).
fn logits(model: &Model, kv_type: KvType, ids: &[u32], chunks: &[usize]) -> Vec<f32> {
    let mut executor = ReferenceExecutor::new(model.clone(), kv_type).unwrap();
    let blocks = ids.len().div_ceil(BLOCK_LEN) as u32;
    executor.allocate_kv(KvCapacity { full: blocks, sliding: blocks }).unwrap();
    // The two groups use different orders, so that a mixed-up table cannot pass.
    let full: Vec<BlockId> = (0..blocks).map(BlockId).collect();
    let sliding: Vec<BlockId> = (0..blocks).rev().map(BlockId).collect();
    let (mut batch, mut out, mut all) = (StepBatch::default(), StepOutput::default(), Vec::new());
    let (mut at, mut turn) = (0, 0);
    while at < ids.len() {
        let n = chunks[turn % chunks.len()].min(ids.len() - at);
        batch.clear();
        batch.push_seq(at as u32, &full, 0, &sliding);
        for &id in &ids[at..at + n] {
            batch.push_row(Row {
                input: RowInput::Token(id),
                wants: RowWants { logits: true, ..RowWants::default() },
            });
        }
        executor.step(&batch, &mut out).unwrap();
        all.extend_from_slice(&out.logits);
        at += n;
        turn += 1;
    }
    all
}

fn range(x: &[f32]) -> f32 {
    x.iter().copied().fold(f32::MIN, f32::max) - x.iter().copied().fold(f32::MAX, f32::min)
}

fn worst(a: impl Iterator<Item = f32>, b: &[f32]) -> f32 {
    a.zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn bundled_model_matches_hugging_face() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let model = Model::load(root.join("../../models/muse-tiny-Q4_K_M.gguf")).unwrap();
    let golden = Tensors::open(&root.join("tests/golden/muse-tiny-Q4_K_M.cut.safetensors"));
    let (ids, rows, columns) = (golden.u32("ids"), golden.u32("rows"), golden.u32("columns"));
    let (hf_rows, hf_columns) = (golden.f32("hf64_rows"), golden.f32("hf64_columns"));
    assert!(ids.len() > model.geometry.window, "the fixture must leave the window");

    let got = logits(&model, KvType::F32, &ids, &[128]);
    let vocab = model.geometry.vocab;
    assert_eq!(got.len(), ids.len() * vocab);
    let at_rows = rows.iter().flat_map(|r| got[*r as usize * vocab..][..vocab].iter().copied());
    let at_columns = got.chunks(vocab).flat_map(|row| columns.iter().map(|c| row[*c as usize]));
    let error = worst(at_rows, &hf_rows).max(worst(at_columns, &hf_columns)) / range(&hf_rows);
    println!("largest error {error:.2e} of the logit range");
    assert!(error < BOUND, "largest error {error:.2e} of the logit range, bound {BOUND:.0e}");
}

#[test]
fn chunks_do_not_change_a_bit() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let model = Model::load(root.join("../../models/muse-tiny-Q4_K_M.gguf")).unwrap();
    let ids: Vec<u32> = (0..40u32).map(|i| (i * 977 + 13) % 4000).collect();
    for kv_type in [KvType::F32, KvType::F16] {
        let whole = logits(&model, kv_type, &ids, &[ids.len()]);
        let pieces = logits(&model, kv_type, &ids, &[1, 7, 3]);
        assert!(whole.iter().zip(&pieces).all(|(a, b)| a.to_bits() == b.to_bits()));
    }
}

#[test]
fn uncut_goldens_when_given() {
    let Some(dir) = std::env::var_os("MUSER_GOLDEN_DIR") else {
        muser_testkit::skip(
            muser_testkit::Need::Data,
            "uncut goldens are compared where MUSER_GOLDEN_DIR names their folder",
        );
        return;
    };
    let mut found = 0;
    for entry in std::fs::read_dir(PathBuf::from(dir)).unwrap() {
        let path = entry.unwrap().path();
        let tensors = path.with_extension("safetensors");
        if path.extension().is_some_and(|e| e == "gguf") && tensors.exists() {
            let golden = Tensors::open(&tensors);
            let hf = golden.f32("hf64");
            let got = logits(&Model::load(&path).unwrap(), KvType::F32, &golden.u32("ids"), &[64, 5]);
            let error = worst(got.iter().copied(), &hf) / range(&hf);
            println!("{}: largest error {error:.2e} of the logit range", path.display());
            assert!(error < BOUND, "{}: {error:.2e}", path.display());
            found += 1;
        }
    }
    assert!(found > 0, "no NAME.gguf + NAME.safetensors in MUSER_GOLDEN_DIR");
}
