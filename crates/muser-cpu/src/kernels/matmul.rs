//! Matrix products: what they read and write, how blocks are fetched and results finished, and products of float types. The
//! arithmetic is that of `muser_backend::arith`.

use muser_backend::arith::{Segments, tree16};
use muser_gguf::GgmlType;

use super::layout::{BlockShape, TILE_ROWS, ask};
use super::math::tanh;
use crate::bounds::Reach;
use crate::simd::Simd;

/// Activation rows that share one pass over a tile.
pub(crate) const PANEL: usize = 8;
/// Row tiles whose accumulators are kept together when there are many activation rows.
pub(crate) const RUN_TILES: usize = 4;

/// First row and width of the panel of row `row`, of `rows` rows: panels of eight, then one of what is left.
#[inline]
pub(crate) fn panel_of(row: usize, rows: usize) -> (usize, usize) {
    let first = row / PANEL * PANEL;
    (first, (rows - first).min(PANEL))
}

/// Bytes of transposed words and odd scales of 256 inputs.
pub(crate) const SCRATCH: usize = 4096 + 512;

/// Words of group sums that super-block types use per block and row.
pub(crate) const SUPER_SUMS: usize = 28;

/// Where the bytes of a matrix are, and how many.
#[derive(Clone, Copy)]
pub(crate) enum Storage {
    /// As in the file: row after row.
    Native(*const u8, Reach),
    /// Tile rows as in [`super::layout`].
    Repacked(*const u8, Reach),
}

/// A weight matrix as kernels see it.
#[derive(Clone, Copy)]
pub(crate) struct MatrixView {
    pub(crate) ty: GgmlType,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) row_bytes: usize,
    /// Factor on the product.
    pub(crate) scale: f32,
    pub(crate) segments: Segments,
    pub(crate) storage: Storage,
}

// SAFETY: weights are only read.
unsafe impl Send for MatrixView {}
// SAFETY: as above.
unsafe impl Sync for MatrixView {}

impl MatrixView {
    /// Number of row tiles.
    pub(crate) fn tiles(&self) -> usize {
        self.rows.div_ceil(TILE_ROWS)
    }

    /// The last row that a tile reads.
    #[inline(always)]
    fn last_row(&self, tile: usize) -> usize {
        (tile * TILE_ROWS + TILE_ROWS).min(self.rows) - 1
    }

    /// Bytes from one repacked tile row to the next: whole cache lines.
    pub(crate) fn tile_stride(&self, shape: BlockShape) -> usize {
        shape.tile_bytes(self.cols / shape.len)
    }
}

/// Quantised activation rows in panels; which of the arrays a type uses follows from its [`super::unpack::Class`].
///
/// A panel has width `w` of 1 to 8 ([`panel_of`]); its arrays begin at its first row times the size of one row.
/// `q` is `[k / 4][w]` words; `d` `[k / 256][w]` or `[k / 32][w]`; `sums` is `[k / 256][28][w]` (8 pairs of sums of
/// 16, 4 pairs of sums of 32, 16 sums of 16 times -32) for super-block types and NVFP4 (whose last block may be
/// shorter), and `[k / 32][w]` for small-block types.
#[derive(Clone, Copy)]
pub(crate) struct Panels {
    pub(crate) q: *mut u8,
    pub(crate) d: *mut f32,
    pub(crate) sums: *mut i32,
    /// Codes that there is room for.
    pub(crate) reach: Reach,
}

/// The input of a product in all forms that its matrices need.
#[derive(Clone, Copy)]
pub(crate) struct Input {
    pub(crate) rows: usize,
    pub(crate) k: usize,
    pub(crate) super_blocks: Panels,
    pub(crate) small_blocks: Panels,
    /// `[rows][k]`.
    pub(crate) float: *const f32,
}

/// What happens to a finished product.
#[derive(Clone, Copy)]
pub(crate) enum Finish {
    /// Nothing.
    Plain,
    /// `cap * tanh(scale * z / cap)`, or `scale * z` without a cap.
    Logits { scale: f32, cap: Option<f32> },
}

/// One product.
#[derive(Clone, Copy)]
pub(crate) struct Product {
    pub(crate) matrix: MatrixView,
    pub(crate) input: Input,
    /// `[rows][out_stride]`.
    pub(crate) out: *mut f32,
    pub(crate) out_stride: usize,
    pub(crate) finish: Finish,
}

/// The transposed words and odd scales of 256 inputs of one row tile.
#[inline(always)]
pub(super) unsafe fn fetch(
    m: &MatrixView,
    shape: BlockShape,
    tile: usize,
    block: usize,
    scratch: &mut [u8; SCRATCH],
) -> (*const u8, *const u8) {
    // Blocks of the type in 256 inputs.
    let per = (256 / shape.len).max(1);
    match m.storage {
        Storage::Repacked(base, reach) => {
            reach.holds((tile + 1) * m.tile_stride(shape));
            let blocks = m.cols / shape.len;
            let base = base.add(tile * m.tile_stride(shape));
            let words = base.add(shape.words_start(blocks) + block * per * shape.word_bytes());
            (words, base.add(block * per * shape.extra_bytes()))
        }
        Storage::Native(base, reach) => {
            reach.holds(
                m.last_row(tile) * m.row_bytes + (m.cols / shape.len).min((block + 1) * per) * shape.bytes,
            );
            transpose_native(m, shape, base, tile, block, scratch)
        }
    }
}

/// Out of line: it would crowd the registers of its callers.
#[inline(never)]
unsafe fn transpose_native(
    m: &MatrixView,
    shape: BlockShape,
    base: *const u8,
    tile: usize,
    block: usize,
    scratch: &mut [u8; SCRATCH],
) -> (*const u8, *const u8) {
    let per = (256 / shape.len).max(1);
    let count = (m.cols - block * 256).min(256).div_ceil(shape.len);
    let mut rows = [base; TILE_ROWS];
    for (r, row) in rows.iter_mut().enumerate() {
        // A last tile that is not full repeats the last row; `finish` drops it.
        let index = (tile * TILE_ROWS + r).min(m.rows - 1);
        *row = base.add(index * m.row_bytes + block * per * shape.bytes);
    }
    // Sixteen rows are sixteen streams, too many for the hardware; the next tile row is one run of memory.
    let next =
        base.wrapping_add((tile + 1) * TILE_ROWS * m.row_bytes + block * per * shape.bytes * TILE_ROWS);
    for line in (0..count * shape.bytes * TILE_ROWS).step_by(64) {
        ask(next.wrapping_add(line));
    }
    let words = scratch.as_mut_ptr();
    let extra = words.add(4096);
    shape.transpose(&rows, count, words, extra);
    (words.cast_const(), extra.cast_const())
}

/// Writes 16 finished values of one row.
///
/// # Safety
/// As [`super::product::product_run`]; `lanes` is valid for 16 values.
#[inline(always)]
pub(crate) unsafe fn finish<S: Simd>(p: &Product, tile: usize, row: usize, lanes: *mut f32) {
    let scale = p.matrix.scale;
    for lane in (0..TILE_ROWS).step_by(S::N) {
        let at = lanes.add(lane);
        let mut v = S::f_load(at);
        if scale != 1.0 {
            v = S::f_mul(v, S::f_splat(scale));
        }
        if let Finish::Logits { scale, cap } = p.finish {
            v = S::f_mul(v, S::f_splat(scale));
            if let Some(cap) = cap {
                let cap = S::f_splat(cap);
                v = S::f_mul(cap, tanh::<S>(S::f_div(v, cap)));
            }
        }
        S::f_store(at, v);
    }
    let count = (p.matrix.rows - tile * TILE_ROWS).min(TILE_ROWS);
    Reach::of(p.input.rows).holds(row + 1);
    Reach::of(p.out_stride).holds(tile * TILE_ROWS + count);
    let out = p.out.add(row * p.out_stride + tile * TILE_ROWS);
    if count == TILE_ROWS {
        for lane in (0..TILE_ROWS).step_by(S::N) {
            S::f_store(out.add(lane), S::f_load(lanes.add(lane)));
        }
    } else {
        std::ptr::copy_nonoverlapping(lanes, out, count);
    }
}

/// Float weights: 16 partial sums by `k % 16`, then a tree.
///
/// # Safety
/// As [`super::product::product_run`].
#[inline(always)]
pub(crate) unsafe fn float_run<S: Simd>(p: &Product, first: usize, count: usize) {
    let Storage::Native(base, reach) = p.matrix.storage else { return };
    let k = p.input.k;
    for tile in first..first + count {
        reach.holds((p.matrix.last_row(tile) + 1) * p.matrix.row_bytes);
        for row in 0..p.input.rows {
            let x = p.input.float.add(row * k);
            let mut lanes = [0.0f32; TILE_ROWS];
            for r in (0..TILE_ROWS).step_by(4) {
                let mut w = [base; 4];
                for (i, w) in w.iter_mut().enumerate() {
                    *w = base.add((tile * TILE_ROWS + r + i).min(p.matrix.rows - 1) * p.matrix.row_bytes);
                }
                let sums = match p.matrix.ty {
                    GgmlType::F16 => float_dots::<S, 2, false>(&w, x, k),
                    GgmlType::BF16 => float_dots::<S, 2, true>(&w, x, k),
                    _ => float_dots::<S, 4, false>(&w, x, k),
                };
                lanes[r..r + 4].copy_from_slice(&sums);
            }
            finish::<S>(p, tile, row, lanes.as_mut_ptr());
        }
    }
}

/// Dots of four weight rows with one activation row.
#[inline(always)]
unsafe fn float_dots<S: Simd, const BYTES: usize, const BF16: bool>(
    w: &[*const u8; 4],
    x: *const f32,
    k: usize,
) -> [f32; 4] {
    let parts = 16 / S::N;
    let mut acc = [[S::f_splat(0.0); 4]; 4];
    for at in (0..k / 16 * 16).step_by(16) {
        for part in 0..parts {
            let i = at + part * S::N;
            let xv = S::f_load(x.add(i));
            for r in 0..4 {
                acc[r][part] = S::f_fma(load_float::<S, BYTES, BF16>(w[r].add(i * BYTES)), xv, acc[r][part]);
            }
        }
    }
    if !k.is_multiple_of(16) {
        // The last few values, padded with zeros.
        let (at, rest) = (k / 16 * 16, k % 16);
        let mut xs = [0.0f32; 16];
        std::ptr::copy_nonoverlapping(x.add(at), xs.as_mut_ptr(), rest);
        for r in 0..4 {
            let mut ws = [0u8; 64];
            std::ptr::copy_nonoverlapping(w[r].add(at * BYTES), ws.as_mut_ptr(), rest * BYTES);
            for part in 0..parts {
                let xv = S::f_load(xs.as_ptr().add(part * S::N));
                acc[r][part] = S::f_fma(
                    load_float::<S, BYTES, BF16>(ws.as_ptr().add(part * S::N * BYTES)),
                    xv,
                    acc[r][part],
                );
            }
        }
    }
    let mut sums = [0.0f32; 4];
    for (sum, acc) in sums.iter_mut().zip(&acc) {
        let mut lanes = [0.0f32; 16];
        for part in 0..parts {
            S::f_store(lanes.as_mut_ptr().add(part * S::N), acc[part]);
        }
        *sum = tree16(&lanes);
    }
    sums
}

#[inline(always)]
unsafe fn load_float<S: Simd, const BYTES: usize, const BF16: bool>(p: *const u8) -> S::F {
    if BYTES == 4 {
        S::f_load(p.cast())
    } else if BF16 {
        S::f_load_bf16(p.cast())
    } else {
        S::f_load_f16(p.cast())
    }
}
