//! Weights rounded to 8 bits, as `round_*` and `wide_rounded` of `kernels/matmul_wide.cu` define them.
//!
//! A weight is `slope * code + offset`; of each row's 256 weights the largest that any code could reach gets 127. What a
//! block holds is found with the readable dequantiser and changed copies of the block, so no tile layout is shared.

use half::f16;
use muser_gguf::{GgmlType, dequantize_row};

/// Types with a rounding kernel.
pub(super) const TYPES: [GgmlType; 3] = [GgmlType::Q4_K, GgmlType::Q5_K, GgmlType::Q6_K];

/// Where a block keeps things, in bytes, and its largest code.
struct Layout {
    scales: std::ops::Range<usize>,
    /// Scale bytes that give every group the scale 1 and no min.
    ones: &'static [u8],
    codes: std::ops::Range<usize>,
    /// Place of the f16 factor, and of that of the mins.
    d: usize,
    dmin: Option<usize>,
    largest_code: f32,
    /// What is taken off a code.
    center: f32,
}

impl Layout {
    fn of(ty: GgmlType) -> Self {
        let mins = |codes, largest_code| Self {
            scales: 4..16,
            ones: &[1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1],
            codes,
            d: 0,
            dmin: Some(2),
            largest_code,
            center: 0.0,
        };
        match ty {
            GgmlType::Q4_K => mins(16..144, 15.0),
            GgmlType::Q5_K => mins(16..176, 31.0),
            _ => Self {
                scales: 192..208,
                ones: &[1; 16],
                codes: 0..192,
                d: 208,
                dmin: None,
                largest_code: 63.0,
                center: 32.0,
            },
        }
    }
}

/// A weight row in 8 bits.
pub(super) struct RoundedRow {
    codes: Vec<i32>,
    /// One per 256 weights.
    scales: Vec<f32>,
}

impl RoundedRow {
    pub(super) fn new(ty: GgmlType, bytes: &[u8]) -> Self {
        let layout = Layout::of(ty);
        let (mut codes, mut scales) = (Vec::new(), Vec::new());
        for block in bytes.chunks_exact(ty.block_bytes()) {
            let decode = |d: f32, dmin: f32, change: &dyn Fn(&mut [u8])| -> Vec<f32> {
                let mut copy = block.to_vec();
                copy[layout.d..layout.d + 2].copy_from_slice(&f16::from_f32(d).to_le_bytes());
                if let Some(at) = layout.dmin {
                    copy[at..at + 2].copy_from_slice(&f16::from_f32(dmin).to_le_bytes());
                }
                change(&mut copy);
                let mut values = vec![0.0; 256];
                dequantize_row(ty, &copy, &mut values).expect("a whole block of a decodable type");
                values
            };
            let factor = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f32();
            let d = factor(layout.d);
            let q = decode(1.0, 0.0, &|b| b[layout.scales.clone()].copy_from_slice(layout.ones));
            let reach = layout.largest_code - layout.center;
            let full = decode(1.0, 0.0, &|b| b[layout.codes.clone()].fill(0xFF));
            let slope: Vec<f32> = full.iter().map(|v| d * (v / reach)).collect();
            let offset: Vec<f32> = match layout.dmin {
                Some(at) => {
                    decode(0.0, 1.0, &|_| ()).iter().map(|minus_min| factor(at) * minus_min).collect()
                }
                None => slope.iter().map(|s| -layout.center * s).collect(),
            };
            let most = slope.iter().zip(&offset).fold(0.0f32, |most, (slope, offset)| {
                let ends =
                    if layout.dmin.is_some() { (slope * layout.largest_code + offset).abs() } else { 0.0 };
                most.max(offset.abs()).max(ends)
            });
            let scale = most / 127.0;
            let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
            codes.extend(q.iter().zip(slope.iter().zip(&offset)).map(|(q, (slope, offset))| {
                let code = q + layout.center;
                // Rounded to even: the sum has no bits behind the point left.
                (code.mul_add(slope * inverse, offset * inverse) + 12_582_912.0 - 12_582_912.0) as i32
            }));
            scales.push(scale);
        }
        Self { codes, scales }
    }

    /// The row times activation codes `q` with one scale `d` per 256 values; K is one segment.
    pub(super) fn product(&self, q: &[i8], d: &[f32]) -> f32 {
        let blocks = self.codes.chunks(256).zip(q.chunks(256)).zip(self.scales.iter().zip(d));
        blocks.fold(0.0, |acc, ((w, q), (scale, d))| {
            let sum: i32 = w.iter().zip(q).map(|(w, q)| w * i32::from(*q)).sum();
            (sum as f32).mul_add(scale * d, acc)
        })
    }
}
