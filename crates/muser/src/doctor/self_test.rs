//! Every kernel path of the CPU backend against the scalar reference, on this processor, in a second.
//!
//! For each block type a small random model is made in memory and read by the reference and by the CPU backend once for
//! each instruction set. The instruction sets must agree to the last bit, and all with the reference within rounding.

use std::sync::Arc;

use muser_backend::{Executor, KvType, ReferenceExecutor};
use muser_cpu::{CpuExecutor, CpuOptions, Isa, Repack};
use muser_gguf::{GgmlType, GgufFile};
use muser_model::synth::{self, Preset};
use muser_model::{Geometry, Model};
use serde::Serialize;

use crate::one_sequence::read_through;

/// More than the window of 32 and no multiple of a tile.
const POSITIONS: u32 = 41;

/// Relative RMS difference of all logits that rounding explains: for weights that meet activations of 8 bits, and for those
/// that meet f32. A random model carries every rounding through to the end, and a wrong kernel gives a difference near 1.
const BOUND_8_BIT: f64 = 0.12;
const BOUND_F32: f64 = 0.002;

/// What became of one block type.
#[derive(Debug, Serialize)]
pub struct TypeResult {
    /// Name of the type.
    #[serde(rename = "type")]
    pub ty: &'static str,
    /// One result for each instruction set and layout.
    pub paths: Vec<PathResult>,
}

/// What became of one kernel path.
#[derive(Debug, Serialize)]
pub struct PathResult {
    /// Instruction set, and `repacked` where weights were copied into another layout.
    pub path: String,
    /// Root of the mean square difference from the reference, over the root of the reference's mean square.
    pub relative_error: f64,
    /// What is wrong, if anything.
    pub fault: Option<String>,
}

/// The types that the CPU backend multiplies with.
pub fn tested_types() -> Vec<GgmlType> {
    GgmlType::all().filter(|ty| ty.is_decodable() && *ty != GgmlType::Q8_K).collect()
}

/// Tests all paths of one type.
pub fn self_test(ty: GgmlType, threads: Option<usize>) -> anyhow::Result<TypeResult> {
    // One layer of each kind shows every path.
    let geometry = Geometry { sliding: vec![true, false], ..Preset::Tiny.geometry() };
    let file = GgufFile::from_bytes(synth::tiny(&geometry, ty, 1)?)?;
    let model = Model::from_gguf(Arc::new(file))?;
    let mut reference = ReferenceExecutor::new(model.clone(), KvType::F32)?;
    let expected = logits(&mut reference, &geometry)?;
    let is_float = matches!(ty, GgmlType::F32 | GgmlType::F16 | GgmlType::BF16);
    let bound = if is_float { BOUND_F32 } else { BOUND_8_BIT };
    let mut first: Option<Vec<f32>> = None;
    let mut paths = Vec::new();
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
        for repack in [Repack::Off, Repack::On] {
            let options = CpuOptions { threads, isa: Some(isa), repack, ..CpuOptions::default() };
            let found = logits(&mut CpuExecutor::new(model.clone(), options)?, &geometry)?;
            let relative_error = relative_rms(&expected, &found);
            let same = first.as_ref().is_none_or(|first| same_bits(first, &found));
            let fault = if relative_error.is_nan() || relative_error > bound {
                Some(format!(
                    "differs from the reference by {:.2} %, expected at most {} %",
                    relative_error * 100.0,
                    bound * 100.0
                ))
            } else if !same {
                Some("differs in bits from the first path".to_owned())
            } else {
                None
            };
            let layout = if repack == Repack::On { " repacked" } else { "" };
            paths.push(PathResult { path: format!("{}{layout}", isa.name()), relative_error, fault });
            first.get_or_insert(found);
        }
    }
    Ok(TypeResult { ty: ty.name(), paths })
}

fn logits(executor: &mut dyn Executor, geometry: &Geometry) -> anyhow::Result<Vec<f32>> {
    let tokens: Vec<u32> = (0..POSITIONS).map(|i| (i * 97 + 11) % geometry.vocab as u32).collect();
    let mut all = Vec::new();
    read_through(executor, geometry, &tokens, 32, &mut |_, logits| {
        all.extend_from_slice(logits);
        Ok(())
    })?;
    Ok(all)
}

fn relative_rms(reference: &[f32], other: &[f32]) -> f64 {
    let difference: f64 = reference.iter().zip(other).map(|(r, o)| f64::from(r - o).powi(2)).sum();
    let size: f64 = reference.iter().map(|r| f64::from(*r).powi(2)).sum();
    (difference / size).sqrt()
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}
