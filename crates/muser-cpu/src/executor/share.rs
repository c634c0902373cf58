//! How threads share out products and rows; the same for the model and its draft.
#![allow(unsafe_code, reason = "calls kernels on raw pointers")]

use crate::kernels::Kernels;
use crate::kernels::matmul::{self, Finish, Input, MatrixView, Product, RUN_TILES};
use crate::pool::Worker;

/// Values that a thread takes at a time where rows are cut (whole quantisation blocks).
const ROW_CHUNK: usize = 1024;

/// Shares out the row tiles of products that read the same input: matrix, output, values from one output row to the next.
pub(crate) fn share_products(
    kernels: &Kernels,
    worker: &Worker<'_>,
    input: Input,
    products: &[(MatrixView, *mut f32, usize)],
    finish: Finish,
    scratch: &mut matmul::Scratch,
) {
    // With few rows a run is one tile after the other; with many, tiles share each block of the input.
    let run = if input.rows > matmul::PANEL { RUN_TILES } else { 1 };
    let tiles: usize = products.iter().map(|(m, ..)| m.tiles()).sum();
    let chunk = if input.rows > matmul::PANEL {
        RUN_TILES
    } else {
        // Long enough for the prefetchers, short enough that nobody waits long at the end.
        (tiles / (worker.threads() * 8)).clamp(1, 16)
    };
    let chunks: usize = products.iter().map(|(m, ..)| m.tiles().div_ceil(chunk)).sum();
    worker.share(chunks, |item| {
        let (mut item, mut at) = (item, 0);
        while item >= products[at].0.tiles().div_ceil(chunk) {
            item -= products[at].0.tiles().div_ceil(chunk);
            at += 1;
        }
        let (matrix, out, out_stride) = products[at];
        let product = Product { matrix, input, out, out_stride, finish };
        let end = ((item + 1) * chunk).min(matrix.tiles());
        for first in (item * chunk..end).step_by(run) {
            // SAFETY: the tiles are inside the matrix, their output columns belong to this item.
            unsafe { matmul::product_run(kernels, &product, first, run.min(end - first), scratch) };
        }
    });
}

/// Shares out `rows` rows of `width` values in pieces: row, first value, end.
pub(crate) fn share_chunks(
    worker: &Worker<'_>,
    rows: usize,
    width: usize,
    mut f: impl FnMut(usize, usize, usize),
) {
    let chunks = width.div_ceil(ROW_CHUNK);
    worker.share(rows * chunks, |item| {
        let (row, from) = (item / chunks, item % chunks * ROW_CHUNK);
        f(row, from, (from + ROW_CHUNK).min(width));
    });
}
