//! Matrices by the book: a row dequantised, a product of sums in order.

use muser_model::Matrix;

use super::ops;

/// `x` is `[n, m.cols]`, the result `[n, m.rows]`. Output rows are shared out to the machine's cores; each output
/// value is one dot product, so how they are shared cannot show.
pub(super) fn product(m: &Matrix, x: &[f32]) -> Vec<f32> {
    let n = x.len() / m.cols;
    if n == 0 {
        return Vec::new();
    }
    let workers = std::thread::available_parallelism().map_or(1, usize::from).min(m.rows.div_ceil(64));
    let share = m.rows.div_ceil(workers);
    // Transposed while it is made, so that each worker owns one run of it.
    let mut columns = vec![0.0f32; m.rows * n];
    std::thread::scope(|scope| {
        for (worker, out) in columns.chunks_mut(share * n).enumerate() {
            scope.spawn(move || {
                let mut w = vec![0.0f32; m.cols];
                for (i, out) in out.chunks_mut(n).enumerate() {
                    dequantize(m, worker * share + i, &mut w).expect("checked when the executor was made");
                    for (out, x) in out.iter_mut().zip(x.chunks(m.cols)) {
                        *out = ops::dot(&w, x) * m.scale;
                    }
                }
            });
        }
    });
    let mut y = vec![0.0; columns.len()];
    for (row, values) in columns.chunks(n).enumerate() {
        for (i, v) in values.iter().enumerate() {
            y[i * m.rows + row] = *v;
        }
    }
    y
}

pub(super) fn dequantize(m: &Matrix, row: usize, out: &mut [f32]) -> Result<(), String> {
    muser_gguf::dequantize_row(m.ty, m.row(row), out).map_err(|e| format!("tensor {}: {e}", m.name))
}
