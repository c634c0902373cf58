//! How fast the kernels themselves go through the weights of one type, with nothing else in between.
//!
//! A step mixes types, barriers and attention; this measures one product over a matrix much larger than any cache, in the
//! layout of repacked weights, each thread on a contiguous part. Beside [`crate::BandwidthProbe`] it tells whether a
//! kernel keeps up with memory, and what huge pages bring.
#![allow(unsafe_code, reason = "runs kernels over a buffer of its own from several threads")]

use std::time::Instant;

use muser_backend::ExecError;
use muser_backend::arith::{MatrixRole, Segments};
use muser_gguf::GgmlType;

use crate::bounds::Reach;
use crate::isa::Isa;
use crate::kernels::Kernels;
use crate::kernels::layout::{BlockShape, TILE_ROWS};
use crate::kernels::matmul::{Finish, Input, MatrixView, Panels, Product, SUPER_SUMS, Storage};
use crate::kernels::product::{Scratch, product_run};
use crate::memory::HugeBuffer;
use crate::pool::Pool;
use crate::probe::ReadBandwidth;

/// Weights that a thread goes through in one measurement.
const SLICE_BYTES: usize = 4 << 20;

/// A matrix of one type and threads to multiply with it.
pub struct KernelProbe {
    buffer: HugeBuffer,
    pool: Pool,
    kernels: &'static Kernels,
    matrix: MatrixView,
    tile_bytes: usize,
    huge_pages: bool,
}

impl KernelProbe {
    /// A matrix of `ty` with `inputs` inputs (a multiple of 256) and about `bytes` bytes; threads as for the executor.
    ///
    /// # Errors
    /// A type without an integer kernel, or not enough memory.
    pub fn new(
        ty: GgmlType,
        inputs: usize,
        bytes: usize,
        threads: Option<usize>,
        huge_pages: bool,
    ) -> Result<Self, ExecError> {
        let device = |what| ExecError::Device { device: "cpu".into(), what };
        let Some(shape) = BlockShape::of(ty).filter(|_| inputs > 0 && inputs.is_multiple_of(256)) else {
            let what = format!("no probe for type {} with {inputs} inputs", ty.name());
            return Err(ExecError::Unsupported { backend: "cpu", what });
        };
        let mut pool = Pool::new(threads).map_err(|error| device(format!("starting threads: {error}")))?;
        let mut matrix = MatrixView {
            ty,
            rows: 0,
            cols: inputs,
            row_bytes: shape.bytes * (inputs / shape.len),
            scale: 1.0,
            segments: Segments::of(MatrixRole::FfnIn, inputs),
            storage: Storage::Repacked(std::ptr::null(), Reach::of(0)),
        };
        let tile_bytes = matrix.tile_stride(shape);
        let tiles_each = (bytes / tile_bytes / pool.threads()).max(1);
        let buffer = HugeBuffer::new(tile_bytes * tiles_each * pool.threads(), huge_pages, "kernel probe")?;
        matrix.rows = tiles_each * pool.threads() * TILE_ROWS;
        matrix.storage = Storage::Repacked(buffer.ptr(), Reach::of(buffer.len()));
        let part = tile_bytes * tiles_each;
        pool.run(&|worker| {
            // SAFETY: every thread fills its own part. 0x01 everywhere is a valid block of every type, of small numbers.
            unsafe { std::ptr::write_bytes(buffer.ptr().add(worker.index * part), 1, part) };
            Ok(())
        })
        .map_err(device)?;
        Ok(Self {
            buffer,
            pool,
            kernels: Kernels::of(Isa::from_environment()?),
            matrix,
            tile_bytes,
            huge_pages,
        })
    }

    /// Multiplies with `rows` activation rows (at least 1) `passes` times; rates are bytes of weights per second, one for
    /// each slice of the matrix.
    ///
    /// # Errors
    /// A thread panicked.
    pub fn measure(&mut self, rows: usize, passes: usize) -> Result<ReadBandwidth, ExecError> {
        let (rows, k) = (rows.max(1), self.matrix.cols);
        let values = rows * k;
        let (mut q, mut d, mut sums) =
            (vec![1u8; values], vec![1f32; values / 32], vec![1i32; values / 256 * SUPER_SUMS]);
        let panels = Panels {
            q: q.as_mut_ptr(),
            d: d.as_mut_ptr(),
            sums: sums.as_mut_ptr(),
            reach: Reach::of(values),
        };
        let float = vec![1f32; rows * k];
        let mut out = vec![0f32; rows * self.matrix.rows];
        let product = Shared(Product {
            matrix: self.matrix,
            input: Input { rows, k, super_blocks: panels, small_blocks: panels, float: float.as_ptr() },
            out: out.as_mut_ptr(),
            out_stride: self.matrix.rows,
            finish: Finish::Plain,
        });
        let mut scratch: Vec<_> = (0..self.pool.threads()).map(|_| Scratch::new(rows)).collect();
        let scratch = Shared(scratch.as_mut_ptr());
        let tiles_each = self.matrix.tiles() / self.pool.threads();
        let kernels = self.kernels;
        // Short slices, so that some are not disturbed on a machine that is shared.
        let slice = (SLICE_BYTES / self.tile_bytes).clamp(1, tiles_each);
        let slices = tiles_each / slice;
        let mut rates = Vec::with_capacity(passes * slices);
        for number in 0..passes * slices {
            let from = number % slices * slice;
            let start = Instant::now();
            self.pool
                .run(&|worker| {
                    // SAFETY: every thread has scratch and tiles of its own; all shapes are those of the matrix.
                    unsafe {
                        let scratch = &mut *scratch.get().add(worker.index);
                        let first = worker.index * tiles_each + from;
                        for tile in first..first + slice {
                            product_run(kernels, &product.get(), tile, 1, scratch);
                        }
                    }
                    Ok(())
                })
                .map_err(|what| ExecError::Device { device: "cpu".into(), what })?;
            rates
                .push((self.tile_bytes * slice * self.pool.threads()) as f64 / start.elapsed().as_secs_f64());
        }
        Ok(ReadBandwidth {
            threads: self.pool.threads(),
            huge_pages: self.huge_pages,
            bytes: self.buffer.len(),
            passes: rates,
        })
    }
}

/// Pointers that threads share by the rule of their user: each writes a part of its own.
struct Shared<T>(T);

impl<T: Copy> Shared<T> {
    fn get(&self) -> T {
        self.0
    }
}

// SAFETY: see the type.
unsafe impl<T> Sync for Shared<T> {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measures_every_row_count() {
        let mut probe = KernelProbe::new(GgmlType::Q4_K, 512, 1 << 20, Some(2), true).expect("probe");
        for rows in [1, 3, 8, 20] {
            let found = probe.measure(rows, 2).expect("measurement");
            assert!(found.passes.len() >= 2 && found.best() > 0.0);
        }
    }

    #[test]
    fn float_types_are_refused() {
        assert!(KernelProbe::new(GgmlType::F16, 512, 1 << 20, Some(1), false).is_err());
    }
}
