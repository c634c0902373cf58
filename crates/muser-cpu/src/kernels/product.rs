//! A product's way through the kernels of a set: a run of row tiles of one matrix with all rows of the step.
//!
//! Loops, outermost first: segments of K, blocks of a segment, the row tiles of the run, panels of up to eight activation rows.
//! A block is unpacked once and used by every panel while it is in the first-level cache; the accumulators of a run and one
//! block of all activation rows fit in the second level.

use super::layout::{BlockShape, TILE_ROWS};
use super::matmul::{Input, PANEL, Product, RUN_TILES, SCRATCH, SUPER_SUMS, fetch, panel_of};
use super::tile::PanelBlock;
use super::unpack::Class;
use super::words::Tile;
use super::{Kernels, fused};

/// Working memory of one thread.
pub(crate) struct Scratch {
    tile: Box<Tile>,
    words: Box<[u8; SCRATCH]>,
    acc: Vec<f32>,
    total: Vec<f32>,
}

impl Scratch {
    /// For steps of up to `max_rows` rows.
    pub(crate) fn new(max_rows: usize) -> Self {
        let len = RUN_TILES * max_rows.max(1).next_multiple_of(PANEL) * TILE_ROWS;
        Self {
            tile: Box::new(Tile::zeroed()),
            words: Box::new([0; SCRATCH]),
            acc: vec![0.0; len],
            total: vec![0.0; len],
        }
    }
}

/// Computes row tiles `first .. first + count` (at most [`RUN_TILES`]) for all rows.
///
/// # Safety
/// Pointers of `p` are valid for the shapes stated there, nobody else writes these columns of `out`.
pub(crate) unsafe fn product_run(
    kernels: &Kernels,
    p: &Product,
    first: usize,
    count: usize,
    scratch: &mut Scratch,
) {
    let Some(class) = Class::of(p.matrix.ty) else {
        return (kernels.float_run)(p, first, count);
    };
    let Some(shape) = BlockShape::of(p.matrix.ty) else { return };
    let (n, k) = (p.input.rows, p.input.k);
    if n <= PANEL && fused::has(p.matrix.ty, k) {
        for tile in first..first + count {
            let mut row = 0;
            while row < n {
                let x = panel_block(class, &p.input, row, 0);
                climb(&kernels.fused, x, |kernel, x, t| {
                    kernel(p, shape, tile, row + t, x, &mut scratch.words);
                });
                row += x.width;
            }
        }
        return;
    }
    let values = count * n * TILE_ROWS;
    let segments = p.matrix.segments;
    for segment in 0..segments.count() {
        scratch.acc[..values].fill(0.0);
        for block in segments.range(segment) {
            for tile in 0..count {
                let (words, extra) = fetch(&p.matrix, shape, first + tile, block, &mut scratch.words);
                let acc = scratch.acc.as_mut_ptr().add(tile * n * TILE_ROWS);
                let inputs = (k - block * 256).min(256);
                let unpack = if class.is_super() { kernels.unpack_super } else { kernels.unpack_small };
                unpack(p.matrix.ty, words, extra, inputs, &mut scratch.tile);
                let ladder = &kernels.panels[class.variant()];
                let mut row = 0;
                while row < n {
                    let x = panel_block(class, &p.input, row, block);
                    climb(ladder, x, |kernel, x, t| {
                        kernel(&scratch.tile, class.offset(), inputs, x, acc.add((row + t) * TILE_ROWS));
                    });
                    row += x.width;
                }
            }
        }
        let (total, acc) = (&mut scratch.total[..values], &scratch.acc[..values]);
        if segment == 0 {
            total.copy_from_slice(acc);
        } else {
            for (t, a) in total.iter_mut().zip(acc) {
                *t += a;
            }
        }
    }
    for tile in 0..count {
        for row in 0..n {
            let lanes = scratch.total.as_mut_ptr().add((tile * n + row) * TILE_ROWS);
            (kernels.finish)(p, first + tile, row, lanes);
        }
    }
}

/// One block of the panel that begins at `row`.
unsafe fn panel_block(class: Class, input: &Input, row: usize, block: usize) -> PanelBlock {
    let (_, width) = panel_of(row, input.rows);
    let k = input.k;
    if class.is_super() {
        let s = &input.super_blocks;
        s.reach.holds((row + width) * k);
        let blocks = k.div_ceil(256);
        let sums = s.sums.add(row * blocks * SUPER_SUMS + block * SUPER_SUMS * width);
        let d = s.d.add(row * blocks + block * width);
        return PanelBlock { q: s.q.add(row * k + block * 256 * width), d, sums, width };
    }
    let s = &input.small_blocks;
    s.reach.holds((row + width) * k);
    let at = row * (k / 32) + block * 8 * width;
    PanelBlock { q: s.q.add(row * k + block * 256 * width), d: s.d.add(at), sums: s.sums.add(at), width }
}

/// Goes through the rows of a panel with the widest kernels that fit; the call has the kernel's first row in the panel.
#[inline]
unsafe fn climb<K: Copy>(
    ladder: &[Option<K>; PANEL],
    x: PanelBlock,
    mut call: impl FnMut(K, PanelBlock, usize),
) {
    let mut t = 0;
    while t < x.width {
        let mut rows = x.width - t;
        let kernel = loop {
            // Every set has a kernel of one row.
            match ladder[rows - 1] {
                Some(kernel) => break kernel,
                None => rows -= 1,
            }
        };
        let part = PanelBlock { q: x.q.add(4 * t), d: x.d.add(t), sums: x.sums.add(t), width: x.width };
        call(kernel, part, t);
        t += rows;
    }
}
