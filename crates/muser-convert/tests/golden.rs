//! Checkpoints that public libraries wrote: the converted weights are theirs bit for bit, and the model says what transformers says.
//!
//! `golden/make.py` makes them. What is compared to the bit is what the library itself decodes: of NVFP4 code times block scale
//! (the tensor's factor is a number beside it), of the others the weights in bf16.

#![expect(clippy::unwrap_used, reason = "a test may fail that way")]

#[path = "../../muser-backend/tests/support/mod.rs"]
mod support;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use muser_backend::{
    Executor, KvCapacity, KvType, ReferenceExecutor, Row, RowInput, RowWants, StepBatch, StepOutput,
};
use muser_convert::{Choices, MatrixType, Types, convert};
use muser_cpu::{CpuExecutor, CpuOptions};
use muser_gguf::{GgmlType, GgufFile, dequantize_row};
use muser_kv::BlockId;
use muser_model::{Matrix, Model};
use support::Tensors;

/// Error of the logits (root of the mean square, relative) that a float executor may have, and one with activations of eight bits.
const FLOATS: f64 = 3e-5;
const INTEGERS: f64 = 0.03;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// The converted file's bytes.
fn converted(name: &str, types: Types) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out.gguf");
    convert(&golden(name), &out, &Choices { types, ..Choices::default() }, &mut |_, _| {}).unwrap();
    std::fs::read(&out).unwrap()
}

fn model(bytes: &[u8]) -> Model {
    Model::from_gguf(Arc::new(GgufFile::from_bytes(bytes).unwrap())).unwrap()
}

fn logits(executor: &mut dyn Executor, ids: &[u32]) -> Vec<f32> {
    executor.allocate_kv(KvCapacity { full: 1, sliding: 1 }).unwrap();
    let (mut batch, mut out) = (StepBatch::default(), StepOutput::default());
    let table = [BlockId(0)];
    batch.push_seq(0, &table, 0, &table);
    for &id in ids {
        let wants = RowWants { logits: true, ..RowWants::default() };
        batch.push_row(Row { input: RowInput::Token(id), wants });
    }
    executor.step(&batch, &mut out).unwrap();
    out.logits
}

/// Relative error of a file's logits, computed in floats.
fn error_of(bytes: &[u8], expected: &Tensors) -> f64 {
    let mut executor = ReferenceExecutor::new(model(bytes), KvType::F32).unwrap();
    distance(&logits(&mut executor, &expected.u32("ids")), &expected.f32("logits"))
}

fn distance(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let square = |v: f64| v * v;
    let error: f64 = found.iter().zip(expected).map(|(a, b)| square(f64::from(a - b))).sum();
    let size: f64 = expected.iter().map(|b| square(f64::from(*b))).sum();
    (error / size).sqrt()
}

fn fnv(bytes: &[u8]) -> String {
    let hash = bytes
        .iter()
        .fold(0xCBF2_9CE4_8422_2325u64, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01B3));
    format!("{hash:016x}")
}

/// Digests of the library, by its names.
fn digests(name: &str) -> HashMap<String, String> {
    let bytes = std::fs::read(golden(name).join("expected.safetensors")).unwrap();
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + len]).unwrap();
    serde_json::from_value(header["__metadata__"].clone()).unwrap()
}

fn matrices(model: &Model) -> [(&'static str, &Matrix); 9] {
    let l = &model.layers[0];
    [
        ("self_attn.q_proj", &l.attn_q),
        ("self_attn.k_proj", &l.attn_k),
        ("self_attn.v_proj", &l.attn_v),
        ("self_attn.gate_proj", &l.attn_gate),
        ("self_attn.o_proj", &l.attn_output),
        ("mlp.gate_proj", &l.ffn_gate),
        ("mlp.up_proj", &l.ffn_up),
        ("mlp.down_proj", &l.ffn_down),
        ("lm_head", &model.output),
    ]
}

fn full_name(module: &str) -> String {
    if module == "lm_head" { module.to_owned() } else { format!("model.language_model.layers.0.{module}") }
}

/// What of a file's matrices is not as the library has it, and how many matrices the library quantised.
fn faults(name: &str, bytes: &[u8]) -> (Vec<String>, usize) {
    let model = model(bytes);
    let source = Tensors::open(&golden(name).join("model.safetensors"));
    let digests = digests(name);
    let mut faults = Vec::new();
    for (module, matrix) in matrices(&model) {
        let module = full_name(module);
        let mut expect = |what: &str, same: bool| {
            if !same {
                faults.push(format!("{module}: {what}"));
            }
        };
        let Some(digest) = digests.get(&module) else {
            expect("type", matrix.ty == GgmlType::BF16);
            continue;
        };
        let factor = if source.has(&format!("{module}.weight_global_scale")) {
            1.0 / source.f32(&format!("{module}.weight_global_scale"))[0]
        } else if source.has(&format!("{module}.weight_scale_2")) {
            source.f32(&format!("{module}.weight_scale_2"))[0]
        } else {
            expect("type", matrix.ty == GgmlType::BF16);
            expect("factor", matrix.scale == 1.0);
            expect("weights", &fnv(matrix.bytes()) == digest);
            continue;
        };
        let mut weights = vec![0.0; matrix.rows * matrix.cols];
        dequantize_row(matrix.ty, matrix.bytes(), &mut weights).unwrap();
        let bytes: Vec<u8> = weights.iter().flat_map(|weight| weight.to_le_bytes()).collect();
        expect("type", matrix.ty == GgmlType::NVFP4);
        expect("factor", matrix.scale == factor);
        expect("weights", &fnv(&bytes) == digest);
    }
    (faults, digests.len())
}

#[test]
fn weights_are_those_of_compressed_tensors() {
    let name = "compressed-tensors";
    assert_eq!(faults(name, &converted(name, Types::default())), (Vec::new(), 9));
}

#[test]
fn weights_are_those_of_modelopt() {
    let name = "modelopt";
    assert_eq!(faults(name, &converted(name, Types::default())), (Vec::new(), 7));
}

#[test]
fn logits_are_those_of_transformers() {
    for name in ["compressed-tensors", "modelopt"] {
        let expected = Tensors::open(&golden(name).join("expected.safetensors"));
        let bytes = converted(name, Types::default());
        let floats = error_of(&bytes, &expected);
        assert!(floats < FLOATS, "{name}: {floats}");
        let mut executor = CpuExecutor::new(model(&bytes), CpuOptions::default()).unwrap();
        let integers = distance(&logits(&mut executor, &expected.u32("ids")), &expected.f32("logits"));
        assert!(integers < INTEGERS, "{name}: {integers}");
    }
}

/// Every other choice is the same model, as near as its types are.
#[test]
fn other_types_are_the_same_model() {
    let expected = Tensors::open(&golden("modelopt").join("expected.safetensors"));
    let of = |layers, rest| error_of(&converted("modelopt", Types { layers, rest }), &expected);
    for (layers, rest, most) in [
        (MatrixType::Bf16, MatrixType::Keep, 0.01),
        (MatrixType::Q8_0, MatrixType::Q8_0, 0.04),
        (MatrixType::Keep, MatrixType::Q8_0, 0.04),
        // Eight-bit matrices lose half of their bits.
        (MatrixType::Nvfp4, MatrixType::Keep, 0.3),
    ] {
        let error = of(layers, rest);
        assert!(error < most, "{layers:?} {rest:?}: {error}");
    }
}

/// Changes the bytes of a tensor of a converted file.
fn changed(bytes: &[u8], tensor: &str, change: impl Fn(&mut [u8])) -> Vec<u8> {
    let file = GgufFile::from_bytes(bytes).unwrap();
    let info = file.tensor(tensor).unwrap();
    let mut bytes = bytes.to_vec();
    change(&mut bytes[info.offset..info.offset + info.len]);
    bytes
}

/// What converters have got wrong elsewhere: the comparison with transformers sees every one of these.
#[test]
fn each_mistake_would_be_seen() {
    for name in ["compressed-tensors", "modelopt"] {
        let expected = Tensors::open(&golden(name).join("expected.safetensors"));
        let right = converted(name, Types::default());
        // Norms behind most products leave of a factor nothing but their epsilon: then only the weights show it.
        let seen = |what: &str, bytes: &[u8], of_weights: bool, of_logits: bool| {
            let (faults, _) = faults(name, bytes);
            assert_eq!(faults.len(), usize::from(of_weights), "{name}: {what}: {faults:?}");
            let error = error_of(bytes, &expected);
            assert!(!of_logits || error > 1000.0 * FLOATS, "{name}: {what} has an error of only {error}");
        };
        let number = |bytes: &mut [u8], change: fn(f32) -> f32| {
            let value = f32::from_le_bytes(bytes.try_into().unwrap());
            bytes.copy_from_slice(&change(value).to_le_bytes());
        };
        for part in ["attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up"] {
            let stem = format!("blk.0.{part}");
            let shows = part == "ffn_gate";
            let forgotten = changed(&right, &format!("{stem}.scale"), |b| number(b, |_| 1.0));
            seen(&format!("no factor on {part}"), &forgotten, true, shows);
            let divisor = changed(&right, &format!("{stem}.scale"), |b| number(b, |v| 1.0 / v));
            seen(&format!("a divisor on {part}"), &divisor, true, shows);
            let swapped = changed(&right, &format!("{stem}.weight"), |bytes| {
                for block in bytes.chunks_mut(36) {
                    block[4..].iter_mut().for_each(|byte| *byte = byte.rotate_left(4));
                }
            });
            seen(&format!("swapped nibbles in {part}"), &swapped, true, true);
            let in_pairs = changed(&right, &format!("{stem}.weight"), |bytes| {
                for group in bytes.chunks_mut(36).flat_map(|block| block[4..].chunks_mut(8)) {
                    let value = |i: usize| group[i % 8] >> (4 * (i / 8)) & 15;
                    let pairs: [u8; 8] = std::array::from_fn(|j| value(2 * j) | value(2 * j + 1) << 4);
                    group.copy_from_slice(&pairs);
                }
            });
            seen(&format!("nibbles of {part} left in pairs"), &in_pairs, true, true);
        }
        for part in ["attn_q", "attn_k"] {
            let rows = changed(&right, &format!("blk.0.{part}.weight"), |bytes| in_halves(bytes, 36));
            seen(&format!("rows of {part} left in halves"), &rows, true, true);
            let scales = changed(&right, &format!("blk.0.{part}.weight"), |bytes| in_halves(bytes, 4));
            seen(&format!("scales of {part} left in halves"), &scales, true, true);
        }
        for part in ["attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"] {
            let less = changed(&right, &format!("blk.0.{part}.weight"), |bytes| {
                bytes.chunks_mut(4).for_each(|b| number(b, |v| v - 1.0));
            });
            seen(&format!("{part} without its 1"), &less, false, true);
        }
        let ones = changed(&right, "blk.0.attn_q_norm.weight", |bytes| {
            bytes.chunks_mut(4).for_each(|b| number(b, |_| 1.0));
        });
        seen("a q-norm of ones", &ones, false, true);
    }
}

/// Takes the first `take` bytes of each block of 36 back to the checkpoint's order of rows, heads of 32 rows of one block.
fn in_halves(bytes: &mut [u8], take: usize) {
    let before = bytes.to_vec();
    for (row, block) in bytes.chunks_mut(36).enumerate() {
        let (head, t) = (row / 32 * 32, row % 32);
        let from = head + t % 16 * 2 + t / 16;
        block[..take].copy_from_slice(&before[from * 36..][..take]);
    }
}
