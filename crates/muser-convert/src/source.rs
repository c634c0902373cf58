//! A matrix of a checkpoint: what its tensors are, and its rows as floats.
//!
//! | kind | tensors beside each other | a weight is |
//! |---|---|---|
//! | floats | `weight` F32, F16 or BF16 | itself |
//! | NVFP4, compressed-tensors | `weight_packed` U8, `weight_scale` E4M3, `weight_global_scale` | code * scale / global scale |
//! | NVFP4, ModelOpt | `weight` U8, `weight_scale` E4M3, `weight_scale_2` | code * scale * scale 2 |
//! | FP8 | `weight` E4M3, `weight_scale` or `weight_scale_inv`, of one value, one a row or one for 128 x 128 | code * scale |
//! | MXFP8 | `weight` E4M3, `weight_scale` E8M0 (or U8), one for 32 inputs | code * 2^(scale - 127) |
//!
//! Everything else beside a weight is refused: what is left out of a formula gives garbage without a word.

use std::ops::Range;

use muser_gguf::E2M1_DOUBLED;

use crate::ConvertError;
use crate::checkpoint::{Checkpoint, check_finite, decode_floats};
use crate::error::wrong;
use crate::safetensors::{Dtype, Entry};
use crate::scheme::{Kind, Scheme};

/// Where the tower is.
pub(crate) const TOWER: &str = "model.vision_tower.";

/// Rows and inputs of a block of FP8.
const BLOCK: u64 = 128;
/// Inputs that share a scale in MXFP8.
const MX_GROUP: u64 = 32;
/// Inputs that share a scale in NVFP4.
pub(crate) const FP4_GROUP: usize = 16;
/// Leaves beside a weight that are about activations, which muser quantises by itself.
const OF_ACTIVATIONS: [&str; 4] = ["input_global_scale", "input_scale", "k_scale", "v_scale"];

/// A matrix of `rows` output rows of `cols` inputs.
pub(crate) struct Source {
    /// Name of the module.
    pub(crate) module: String,
    pub(crate) rows: u64,
    pub(crate) cols: u64,
    pub(crate) codes: Codes,
    /// Scale of activations, as a multiplier, if the checkpoint has one.
    pub(crate) input_scale: Option<f32>,
}

/// What a matrix is made of.
pub(crate) enum Codes {
    Floats(Entry),
    Nvfp4 { codes: Entry, scales: Entry, factor: f32 },
    Fp8 { codes: Entry, scale: Scale },
}

/// Scales of FP8.
pub(crate) enum Scale {
    Tensor(f32),
    Rows(Vec<f32>),
    /// Of blocks, `per_row` beside each other.
    Blocks {
        values: Vec<f32>,
        per_row: usize,
    },
    /// Powers of two.
    Groups(Entry),
}

impl Source {
    /// Finds out what the tensors of `module` are; they have to be a matrix of this shape, and of a kind of the settings.
    pub(crate) fn of(
        checkpoint: &Checkpoint,
        scheme: &Scheme,
        module: &str,
        rows: usize,
        cols: usize,
    ) -> Result<Source, ConvertError> {
        let (rows, cols) = (rows as u64, cols as u64);
        let finder = Finder { checkpoint, module, rows, cols };
        let (codes, kind) = finder.codes()?;
        if let Some(kind) = kind {
            scheme.check(module, kind)?;
        }
        Ok(Source { module: module.to_owned(), rows, cols, codes, input_scale: finder.input_scale()? })
    }

    /// Bytes of a row in the checkpoint, about: for sharing work.
    pub(crate) fn row_values(&self) -> usize {
        self.cols as usize
    }

    /// Rows as they lie in the checkpoint, as floats: one rounding, of the product of code and scale.
    pub(crate) fn floats(
        &self,
        checkpoint: &Checkpoint,
        rows: Range<u64>,
        out: &mut [f32],
    ) -> Result<(), ConvertError> {
        let cols = self.cols;
        let count = (rows.end - rows.start) * cols;
        debug_assert_eq!(out.len() as u64, count);
        match &self.codes {
            Codes::Floats(entry) => {
                let size = entry.dtype.size().unwrap_or(4);
                let mut bytes = vec![0; (count * size) as usize];
                checkpoint.read(entry, rows.start * cols * size, &mut bytes)?;
                decode_floats(entry, &bytes, rows.start * cols, out)
            }
            Codes::Nvfp4 { factor, .. } => {
                let (codes, scales) = self.fp4_rows(checkpoint, rows.clone())?;
                for ((out, codes), &scale) in out.chunks_mut(FP4_GROUP).zip(codes.chunks(8)).zip(&scales) {
                    // Exact: at most six bits. The factor is the one rounding.
                    let scale = muser_gguf::nvfp4_scale(scale);
                    for (out, byte) in out.chunks_mut(2).zip(codes) {
                        out[0] = scale * f32::from(E2M1_DOUBLED[usize::from(byte & 15)]) * factor;
                        out[1] = scale * f32::from(E2M1_DOUBLED[usize::from(byte >> 4)]) * factor;
                    }
                }
                check_finite(&self.module, rows.start * cols, out)
            }
            Codes::Fp8 { codes: entry, scale } => {
                let mut codes = vec![0; count as usize];
                checkpoint.read(entry, rows.start * cols, &mut codes)?;
                for (i, row) in out.chunks_mut(cols as usize).enumerate() {
                    let codes = &codes[i * cols as usize..][..cols as usize];
                    scale.row(checkpoint, rows.start + i as u64, cols, codes, row)?;
                }
                check_finite(&self.module, rows.start * cols, out)
            }
        }
    }

    /// Codes (two a byte, the first in the low nibble) and scales of rows of an NVFP4 matrix, checked.
    pub(crate) fn fp4_rows(
        &self,
        checkpoint: &Checkpoint,
        rows: Range<u64>,
    ) -> Result<(Vec<u8>, Vec<u8>), ConvertError> {
        let Codes::Nvfp4 { codes: code_entry, scales: scale_entry, .. } = &self.codes else {
            return Err(wrong(&self.module, "NVFP4", "another kind"));
        };
        let groups = self.cols / FP4_GROUP as u64;
        let count = rows.end - rows.start;
        let mut codes = vec![0; (count * self.cols / 2) as usize];
        let mut scales = vec![0; (count * groups) as usize];
        checkpoint.read(code_entry, rows.start * self.cols / 2, &mut codes)?;
        checkpoint.read(scale_entry, rows.start * groups, &mut scales)?;
        if let Some(at) = scales.iter().position(|scale| *scale >= 0x7F) {
            let (row, group) = (rows.start + at as u64 / groups, at as u64 % groups);
            let found = format!("byte {:#04X} in row {row}, group {group}", scales[at]);
            return Err(wrong(
                format!("tensor {}", scale_entry.name),
                "scales that are numbers of zero or more",
                found,
            ));
        }
        Ok((codes, scales))
    }
}

impl Scale {
    fn row(
        &self,
        checkpoint: &Checkpoint,
        row: u64,
        cols: u64,
        codes: &[u8],
        out: &mut [f32],
    ) -> Result<(), ConvertError> {
        let decode = |out: &mut [f32], codes: &[u8], scale: f32| {
            out.iter_mut().zip(codes).for_each(|(out, code)| *out = E4M3[usize::from(*code)] * scale);
        };
        match self {
            Scale::Tensor(scale) => decode(out, codes, *scale),
            Scale::Rows(scales) => decode(out, codes, scales[row as usize]),
            Scale::Blocks { values, per_row } => {
                let scales = &values[(row / BLOCK) as usize * per_row..];
                let blocks = out.chunks_mut(BLOCK as usize).zip(codes.chunks(BLOCK as usize));
                blocks.zip(scales).for_each(|((out, codes), scale)| decode(out, codes, *scale));
            }
            Scale::Groups(entry) => {
                let groups = cols / MX_GROUP;
                let mut scales = vec![0; groups as usize];
                checkpoint.read(entry, row * groups, &mut scales)?;
                let parts = out.chunks_mut(MX_GROUP as usize).zip(codes.chunks(MX_GROUP as usize));
                for ((out, codes), &scale) in parts.zip(&scales) {
                    if scale == 0xFF {
                        let found = format!("a NaN in row {row}");
                        return Err(wrong(format!("tensor {}", entry.name), "powers of two", found));
                    }
                    decode(out, codes, power_of_two(scale));
                }
            }
        }
        Ok(())
    }
}

/// `2^(code - 127)`.
fn power_of_two(code: u8) -> f32 {
    f32::from_bits(if code == 0 { 1 << 22 } else { u32::from(code) << 23 })
}

/// The numbers that E4M3 codes stand for.
static E4M3: [f32; 256] = {
    let mut table = [0.0f32; 256];
    let mut code = 0;
    while code < 256 {
        let (exponent, mantissa) = ((code >> 3) & 15, code & 7);
        let magnitude = if exponent == 0 {
            mantissa as f32 / 512.0
        } else if code & 0x7F == 0x7F {
            f32::NAN
        } else {
            // (8 + m) * 2^(e - 10)
            (8 + mantissa) as f32 * f32::from_bits(((exponent + 117) as u32) << 23)
        };
        table[code] = if code & 0x80 == 0 { magnitude } else { -magnitude };
        code += 1;
    }
    table
};

/// Looks at the tensors of one module.
struct Finder<'a> {
    checkpoint: &'a Checkpoint,
    module: &'a str,
    rows: u64,
    cols: u64,
}

impl Finder<'_> {
    fn get(&self, leaf: &str) -> Option<&Entry> {
        self.checkpoint.get(&format!("{}.{leaf}", self.module))
    }

    fn codes(&self) -> Result<(Codes, Option<Kind>), ConvertError> {
        let leaves = self.leaves();
        let of_weights: Vec<&str> =
            leaves.iter().map(String::as_str).filter(|leaf| !OF_ACTIVATIONS.contains(leaf)).collect();
        let weight = self.get("weight");
        match (of_weights.as_slice(), weight.map(|entry| &entry.dtype)) {
            (["weight"], Some(dtype)) if dtype.is_float() => {
                let entry = self.shaped("weight", &[self.rows, self.cols])?;
                Ok((Codes::Floats(entry), None))
            }
            (["weight_global_scale", "weight_packed", "weight_scale"], None) => {
                let divisor = self.number("weight_global_scale")?;
                Ok((self.nvfp4("weight_packed", 1.0 / divisor)?, Some(Kind::Nvfp4)))
            }
            (["weight", "weight_scale", "weight_scale_2"], Some(Dtype::U8)) => {
                let factor = self.number("weight_scale_2")?;
                Ok((self.nvfp4("weight", factor)?, Some(Kind::Nvfp4)))
            }
            (["weight", scale @ ("weight_scale" | "weight_scale_inv")], Some(Dtype::E4M3)) => self.fp8(scale),
            _ => Err(wrong(
                format!("module {}", self.module),
                "the tensors of a matrix in floats, NVFP4, FP8 or MXFP8",
                self.describe(&leaves),
            )),
        }
    }

    fn nvfp4(&self, codes: &str, factor: f32) -> Result<Codes, ConvertError> {
        if !self.cols.is_multiple_of(64) {
            let place = format!("module {}", self.module);
            return Err(wrong(place, "a multiple of 64 inputs for NVFP4", self.cols.to_string()));
        }
        let code_entry = self.shaped(codes, &[self.rows, self.cols / 2])?;
        if code_entry.dtype != Dtype::U8 {
            return Err(wrong(format!("tensor {}", code_entry.name), "type U8", code_entry.describe()));
        }
        let scales = self.shaped("weight_scale", &[self.rows, self.cols / FP4_GROUP as u64])?;
        if scales.dtype != Dtype::E4M3 {
            return Err(wrong(format!("tensor {}", scales.name), "type F8_E4M3", scales.describe()));
        }
        if !factor.is_normal() || factor < 0.0 {
            let place = format!("module {}", self.module);
            return Err(wrong(place, "a factor that is a number above zero", factor.to_string()));
        }
        Ok(Codes::Nvfp4 { codes: code_entry, scales, factor })
    }

    fn fp8(&self, leaf: &str) -> Result<(Codes, Option<Kind>), ConvertError> {
        let codes = self.shaped("weight", &[self.rows, self.cols])?;
        let scale = self.checkpoint.entry(&format!("{}.{leaf}", self.module))?;
        let blocks = [self.rows.div_ceil(BLOCK), self.cols.div_ceil(BLOCK)];
        let (scale, kind) = match (&scale.dtype, scale.shape.as_slice()) {
            (Dtype::E8M0 | Dtype::U8, [rows, groups])
                if [*rows, groups * MX_GROUP] == [self.rows, self.cols] =>
            {
                (Scale::Groups(scale.clone()), Kind::Mxfp8)
            }
            (dtype, [] | [1]) if dtype.is_float() => (Scale::Tensor(self.number(leaf)?), Kind::Fp8Tensor),
            (dtype, [rows] | [rows, 1]) if dtype.is_float() && *rows == self.rows => {
                (Scale::Rows(self.scales(scale)?), Kind::Fp8Channel)
            }
            (dtype, shape) if dtype.is_float() && shape == blocks => {
                let per_row = blocks[1] as usize;
                (Scale::Blocks { values: self.scales(scale)?, per_row }, Kind::Fp8Block)
            }
            _ => {
                let expected = format!(
                    "one float, {} of them (rows), {blocks:?} (blocks of 128 x 128), or a power of two for each 32 inputs",
                    self.rows
                );
                return Err(wrong(format!("tensor {}", scale.name), expected, scale.describe()));
            }
        };
        Ok((Codes::Fp8 { codes, scale }, Some(kind)))
    }

    fn scales(&self, entry: &Entry) -> Result<Vec<f32>, ConvertError> {
        let values = self.checkpoint.floats(entry)?;
        match values.iter().position(|value| *value < 0.0) {
            Some(at) => {
                let found = format!("{} at index {at}", values[at]);
                Err(wrong(format!("tensor {}", entry.name), "scales of zero or more", found))
            }
            None => Ok(values),
        }
    }

    /// A tensor of one number above zero.
    fn number(&self, leaf: &str) -> Result<f32, ConvertError> {
        let entry = self.checkpoint.entry(&format!("{}.{leaf}", self.module))?;
        if entry.shape.iter().any(|dim| *dim != 1) || !entry.dtype.is_float() {
            return Err(wrong(format!("tensor {}", entry.name), "one float", entry.describe()));
        }
        match self.checkpoint.floats(entry)?.first() {
            Some(value) if *value > 0.0 => Ok(*value),
            found => {
                let found = format!("{found:?}");
                Err(wrong(format!("tensor {}", entry.name), "a number above zero", found))
            }
        }
    }

    /// Scale of activations: compressed-tensors has a divisor.
    fn input_scale(&self) -> Result<Option<f32>, ConvertError> {
        if self.get("input_global_scale").is_some() {
            return self.number("input_global_scale").map(|divisor| Some(1.0 / divisor));
        }
        match self.get("input_scale") {
            Some(entry) if entry.shape.iter().all(|dim| *dim == 1) => self.number("input_scale").map(Some),
            _ => Ok(None),
        }
    }

    fn shaped(&self, leaf: &str, shape: &[u64]) -> Result<Entry, ConvertError> {
        let entry = self.checkpoint.entry(&format!("{}.{leaf}", self.module))?;
        if entry.shape != shape {
            return Err(wrong(
                format!("tensor {}", entry.name),
                format!("shape {shape:?}"),
                entry.describe(),
            ));
        }
        Ok(entry.clone())
    }

    /// What there is below the module, sorted, but for a bias of the tower, which its file has beside the matrix.
    fn leaves(&self) -> Vec<String> {
        let prefix = format!("{}.", self.module);
        let leaves = self.checkpoint.names().filter_map(|name| name.strip_prefix(&prefix));
        let biased = self.module.starts_with(TOWER);
        let mut leaves: Vec<String> =
            leaves.filter(|leaf| !(biased && *leaf == "bias")).map(str::to_owned).collect();
        leaves.sort();
        leaves
    }

    fn describe(&self, leaves: &[String]) -> String {
        let describe = |leaf: &String| match self.get(leaf) {
            Some(entry) => format!("{leaf} {}", entry.describe()),
            None => leaf.clone(),
        };
        let all: Vec<String> = leaves.iter().map(describe).collect();
        if all.is_empty() { "no tensor".to_owned() } else { all.join(", ") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_of_eight_bits_are_their_numbers() {
        assert_eq!(
            [E4M3[0x00], E4M3[0x01], E4M3[0x08], E4M3[0x38], E4M3[0x7E]],
            [0.0, 1.0 / 512.0, 1.0 / 64.0, 1.0, 448.0]
        );
        assert_eq!([E4M3[0xB8], E4M3[0xFE]], [-1.0, -448.0]);
        assert!(E4M3[0x7F].is_nan() && E4M3[0xFF].is_nan());
        for code in 0..0x7F {
            // The block scales of NVFP4 are the same numbers, halved.
            assert_eq!(E4M3[usize::from(code)] * 0.5, muser_gguf::nvfp4_scale(code));
        }
        assert_eq!(
            [power_of_two(127), power_of_two(0), power_of_two(254)],
            [1.0, 2.0f32.powi(-127), 2.0f32.powi(127)]
        );
    }
}
