//! Products of float matrices with many rows (`kernels/matmul_float.cu`).

use muser_gguf::GgmlType;

use super::{Product, ProductKernels, RawPart};
use crate::CudaError;
use crate::driver::{Launch, Stream};
use crate::kernels::{Act, FloatArgs};

/// Rows and tokens of a CTA of the float kernel of many rows.
const FLOAT_TILE: [u32; 2] = [64, 32];

impl ProductKernels {
    pub(super) fn many_float(
        &self,
        stream: &Stream,
        product: &Product,
        part: &RawPart,
        act: Act,
        out: u64,
        n: usize,
    ) -> Result<(), CudaError> {
        let padded_rows = part.rows.next_multiple_of(16);
        let args = FloatArgs {
            w: part.address,
            x: act.f,
            out,
            row_bytes: part.row_bytes as u64,
            rows: part.rows,
            padded_rows,
            k: product.k as u32,
            out_segments: self.output_segments(product, n),
            first_row: part.first_row,
            out_rows: product.out_rows as u32,
            n: n as u32,
            scale: part.scale,
            _padding: 0,
        };
        let grid = (padded_rows.div_ceil(FLOAT_TILE[0]), (n as u32).div_ceil(FLOAT_TILE[1]));
        let [f32, f16, bf16] = &self.many_float;
        let function = match part.ty {
            GgmlType::F16 => f16,
            GgmlType::BF16 => bf16,
            _ => f32,
        };
        stream.launch(function, Launch::new(grid, 256), &args)
    }
}
