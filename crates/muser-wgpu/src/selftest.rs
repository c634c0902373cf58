//! Every kernel that a model uses, run on a small model of the same types and heads, against the processor's scalar code.
//!
//! The small model has a layer of each kind; its steps have one row, a few and many, so that each kernel of a product has its turn.
//! Logits, the best of them, K and V must be those of the processor bit for bit.

use std::sync::Arc;

use muser_backend::{Executor, KvCapacity, KvType, Row, RowInput, RowWants, StepBatch, StepOutput};
use muser_cpu::{CpuExecutor, CpuOptions, Isa};
use muser_gguf::{GgmlType, GgufFile};
use muser_kv::{BlockId, KvGroup};
use muser_model::{Geometry, Model, synth};

use crate::{Gpu, WgpuError, WgpuExecutor, WgpuOptions};

/// Rows of the steps.
const STEPS: [usize; 4] = [18, 1, 3, 7];

/// Types of a model's matrices, each once.
pub(crate) fn types(model: &Model) -> Vec<GgmlType> {
    let mut types: Vec<GgmlType> = model.matrices().map(|matrix| matrix.ty).collect();
    types.sort_unstable();
    types.dedup();
    types
}

/// Tries the kernels of these types with heads of `dim` values; how many values were compared.
pub(crate) fn run(gpu: &Arc<Gpu>, types: &[GgmlType], dim: usize, kv: KvType) -> Result<usize, WgpuError> {
    types.iter().map(|ty| of_type(gpu, *ty, dim, kv)).sum()
}

fn of_type(gpu: &Arc<Gpu>, ty: GgmlType, dim: usize, kv: KvType) -> Result<usize, WgpuError> {
    let failed = |what: String| WgpuError::SelfTest { kernel: format!("a model of {}", ty.name()), what };
    let model = small(ty, dim).map_err(failed)?;
    let options =
        CpuOptions { threads: Some(1), isa: Some(Isa::Scalar), max_rows: 32, kv, ..CpuOptions::default() };
    let mut cpu = CpuExecutor::new(model.clone(), options).map_err(|error| failed(error.to_string()))?;
    let mut device = WgpuExecutor::new(gpu, model.clone(), WgpuOptions { max_rows: 32, kv })?;
    let expected = trace(&mut cpu, &model).map_err(failed)?;
    let found = trace(&mut device, &model).map_err(failed)?;
    for ((what, expected), (_, found)) in expected.iter().zip(&found) {
        if let Some(at) = expected.iter().zip(found).position(|(a, b)| a != b) {
            let (expected, found) = (expected[at], found[at]);
            return Err(failed(format!("{what}, value {at}: {found:08x}, expected {expected:08x}")));
        }
    }
    Ok(expected.iter().map(|(_, values)| values.len()).sum())
}

fn small(ty: GgmlType, dim: usize) -> Result<Model, String> {
    let tiny = synth::Preset::Tiny.geometry();
    let heads = if (4 * dim).is_multiple_of(256) { 4 } else { 16 };
    let sliding = vec![true, false];
    let geometry = Geometry { heads, kv_heads: 2, head_dim: dim, sliding, window: 20, ffn: 512, ..tiny };
    let bytes = synth::tiny(&geometry, ty, 7).map_err(|error| error.to_string())?;
    let file = GgufFile::from_bytes(bytes).map_err(|error| error.to_string())?;
    Model::from_gguf(Arc::new(file)).map_err(|error| error.to_string())
}

/// All results, with what they are.
fn trace(executor: &mut dyn Executor, model: &Model) -> Result<Vec<(String, Vec<u32>)>, String> {
    let text = |error: muser_backend::ExecError| error.to_string();
    executor.allocate_kv(KvCapacity { full: 1, sliding: 1 }).map_err(text)?;
    let (mut batch, mut out, mut all) = (StepBatch::default(), StepOutput::default(), Vec::new());
    let mut at = 0u32;
    for rows in STEPS {
        batch.clear();
        batch.push_seq(at, &[BlockId(0)], 0, &[BlockId(0)]);
        for i in 0..rows as u32 {
            let input = RowInput::Token((at + i) * 37 % model.geometry.vocab as u32);
            let wants = RowWants { logits: i % 4 == 0, argmax: true, ..RowWants::default() };
            batch.push_row(Row { input, wants });
        }
        executor.step(&batch, &mut out).map_err(text)?;
        all.push((
            format!("logits of a step of {rows} rows"),
            out.logits.iter().map(|v| v.to_bits()).collect(),
        ));
        let best = out.argmax.iter().map(|id| id.unwrap_or(u32::MAX)).collect();
        all.push((format!("the largest logits of a step of {rows} rows"), best));
        at += rows as u32;
    }
    for group in [KvGroup::Full, KvGroup::Sliding] {
        let mut bytes = vec![0; executor.info().block_bytes(group)];
        executor.export_block(group, BlockId(0), &mut bytes).map_err(text)?;
        let words = bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
        all.push((format!("K and V, {group:?}"), words));
    }
    Ok(all)
}
