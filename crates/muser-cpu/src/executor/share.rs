//! How threads share out products and rows; the same for the model and its draft.
#![allow(unsafe_code, reason = "calls kernels on raw pointers")]

use crate::kernels::Kernels;
use crate::kernels::matmul::{Finish, Input, MatrixView, PANEL, Product, RUN_TILES};
use crate::kernels::product;
use crate::pool::Worker;

/// Values that a thread takes at a time where rows are cut (whole quantisation blocks).
const ROW_CHUNK: usize = 1024;

/// Products that read the same input.
#[derive(Clone, Copy)]
pub(crate) struct ProductSet<'a> {
    pub(crate) input: Input,
    /// Matrix, output, values from one output row to the next.
    pub(crate) products: &'a [(MatrixView, *mut f32, usize)],
    pub(crate) finish: Finish,
}

impl<'a> ProductSet<'a> {
    /// Products whose results nothing more is done to.
    pub(crate) fn plain(input: Input, products: &'a [(MatrixView, *mut f32, usize)]) -> Self {
        Self { input, products, finish: Finish::Plain }
    }

    /// None.
    pub(crate) fn empty(input: Input) -> Self {
        Self::plain(input, &[])
    }
}

/// Shares out the row tiles of all products of all sets.
pub(crate) fn share_products(
    kernels: &Kernels,
    worker: &Worker<'_>,
    sets: &[ProductSet<'_>],
    scratch: &mut product::Scratch,
) {
    let all = || sets.iter().flat_map(|set| set.products.iter().map(move |product| (set, product)));
    let tiles: usize = all().map(|(_, (m, ..))| m.tiles()).sum();
    // Long enough for the prefetchers, short enough that nobody waits long at the end.
    let few = (tiles / (worker.threads() * 8)).clamp(1, 16);
    let chunk_of = |set: &ProductSet<'_>| if set.input.rows > PANEL { RUN_TILES } else { few };
    let chunks: usize = all().map(|(set, (m, ..))| m.tiles().div_ceil(chunk_of(set))).sum();
    worker.share(chunks, |item| {
        let mut item = item;
        for (set, &(matrix, out, out_stride)) in all() {
            let chunk = chunk_of(set);
            let chunks = matrix.tiles().div_ceil(chunk);
            if item >= chunks {
                item -= chunks;
                continue;
            }
            let product = Product { matrix, input: set.input, out, out_stride, finish: set.finish };
            let end = ((item + 1) * chunk).min(matrix.tiles());
            // With few rows a run is one tile after the other; with many, tiles share each block of the input.
            let run = if set.input.rows > PANEL { RUN_TILES } else { 1 };
            for first in (item * chunk..end).step_by(run) {
                // SAFETY: the tiles are inside the matrix, their output columns belong to this item.
                unsafe { product::product_run(kernels, &product, first, run.min(end - first), scratch) };
            }
            return;
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
