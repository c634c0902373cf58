//! Weight matrices: used from the map as they are, or transposed once into memory of our own.
//!
//! A repacked copy has exactly the bytes of the file's matrices (`kernels::layout`), on huge pages. It saves the
//! transposition at every use and the small pages of a file map; it costs its size in memory and one pass over the file
//! at load. The embedding table is never copied: one row of it is read per token.
#![allow(unsafe_code, reason = "writes tile rows of one buffer from several threads")]

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use muser_backend::arith::{MatrixRole, Segments};
use muser_backend::{ExecError, LayerRange};
use muser_gguf::GgmlType;
use muser_model::{Matrix, Model, ModelError};

use crate::bounds::Reach;
use crate::kernels::layout::{BlockShape, TILE_ROWS};
use crate::kernels::matmul::{MatrixView, Storage};
use crate::kernels::unpack::Class;
use crate::memory::{HugeBuffer, available_bytes, drop_from_cache, free_huge_bytes};
use crate::options::Repack;
use crate::pool::Pool;

/// Matrices of one layer.
#[derive(Clone, Copy)]
pub(crate) struct LayerViews {
    pub(crate) attn_q: MatrixView,
    pub(crate) attn_k: MatrixView,
    pub(crate) attn_v: MatrixView,
    pub(crate) attn_gate: MatrixView,
    pub(crate) attn_output: MatrixView,
    pub(crate) ffn_gate: MatrixView,
    pub(crate) ffn_up: MatrixView,
    pub(crate) ffn_down: MatrixView,
}

/// The matrices of some layers that products read. Views point into the model's map or into `copy`.
pub(crate) struct Weights {
    pub(crate) layers: Vec<LayerViews>,
    /// Of the last layers.
    pub(crate) output: Option<MatrixView>,
    copy: Option<HugeBuffer>,
}

/// Memory left for others when deciding by ourselves to repack.
const MARGIN: u64 = 1 << 30;

impl Weights {
    /// Binds the matrices of a range of `model`, and repacks them if `repack` says so.
    pub(crate) fn new(
        model: &Model,
        range: LayerRange,
        repack: Repack,
        pool: &mut Pool,
    ) -> Result<Self, ExecError> {
        let mut matrices = Vec::with_capacity(8 * range.count() + 1);
        for l in &model.layers[range.layers()] {
            matrices.extend([&l.attn_q, &l.attn_k, &l.attn_v, &l.attn_gate].map(|m| (m, MatrixRole::AttnIn)));
            matrices.push((&l.attn_output, MatrixRole::AttnOut));
            matrices.extend([&l.ffn_gate, &l.ffn_up].map(|m| (m, MatrixRole::FfnIn)));
            matrices.push((&l.ffn_down, MatrixRole::FfnDown));
        }
        if range.has_output() {
            matrices.push((&model.output, MatrixRole::Output));
        }
        let Bound { views, copy } = Bound::new(&matrices, repack, pool)?;
        // Nothing else goes over the table.
        if range.has_embedding() {
            check_all(&[&model.token_embd], pool)?;
        }
        let layers = views.chunks_exact(8).map(|v| LayerViews {
            attn_q: v[0],
            attn_k: v[1],
            attn_v: v[2],
            attn_gate: v[3],
            attn_output: v[4],
            ffn_gate: v[5],
            ffn_up: v[6],
            ffn_down: v[7],
        });
        let output = views.last().copied().filter(|_| range.has_output());
        Ok(Self { layers: layers.collect(), output, copy })
    }

    /// Bytes of the repacked copy; 0 when weights are used from the map.
    pub(crate) fn copied_bytes(&self) -> usize {
        self.copy.as_ref().map_or(0, HugeBuffer::len)
    }
}

/// Views of some matrices, in the order given, and the memory of the repacked ones.
pub(crate) struct Bound {
    pub(crate) views: Vec<MatrixView>,
    pub(crate) copy: Option<HugeBuffer>,
}

impl Bound {
    /// Binds matrices, and repacks those that have a layout of their own if `repack` says so.
    pub(crate) fn new(
        matrices: &[(&Matrix, MatrixRole)],
        repack: Repack,
        pool: &mut Pool,
    ) -> Result<Self, ExecError> {
        let mut jobs = Vec::new();
        let mut bytes = 0usize;
        let mut views = Vec::with_capacity(matrices.len());
        for (index, &(matrix, role)) in matrices.iter().enumerate() {
            let view = native(matrix, role)?;
            if let Some(shape) = BlockShape::of(matrix.ty) {
                let tile_stride = view.tile_stride(shape);
                jobs.push(Job { index, matrix, from: view, at: bytes, shape, tile_stride });
                bytes += tile_stride * view.tiles();
            }
            views.push(view);
        }
        let wanted = match repack {
            Repack::Off => false,
            Repack::On => true,
            Repack::Auto => {
                available_bytes().is_some_and(|free| bytes as u64 + bytes as u64 / 16 + MARGIN < free)
            }
        };
        if !wanted || jobs.is_empty() {
            check_all(&matrices.iter().map(|(matrix, _)| *matrix).collect::<Vec<_>>(), pool)?;
            return Ok(Self { views, copy: None });
        }
        if let Some(available) = available_bytes().filter(|&free| free < bytes as u64) {
            return Err(ExecError::OutOfMemory {
                device: "cpu".into(),
                what: "repacked weights (repacking can be turned off)".into(),
                needed: bytes as u64,
                available,
            });
        }
        // The file cannot stay in the system's cache beside the copy: what has been read goes first, and huge pages are
        // asked for only while the system has some at hand. It would else move cached pages about to make them, which was
        // seen to take several times as long as the copying.
        let tight = available_bytes().is_some_and(|free| free < 2 * bytes as u64 + MARGIN);
        let copy = HugeBuffer::new(bytes, !tight, "repacked weights")?;
        repack_all(&jobs, &copy, tight, pool)?;
        if tight {
            // From now on the system may do so in the background.
            copy.advise(0, bytes, true);
        }
        for job in &jobs {
            views[job.index].storage = Storage::Repacked(
                copy.ptr().wrapping_add(job.at),
                Reach::of(job.tile_stride * job.from.tiles()),
            );
        }
        Ok(Self { views, copy: Some(copy) })
    }
}

/// One matrix to repack: where its copy begins, and how.
struct Job<'a> {
    /// Number of its view.
    index: usize,
    matrix: &'a Matrix,
    from: MatrixView,
    at: usize,
    shape: BlockShape,
    tile_stride: usize,
}

impl Job<'_> {
    /// Tile rows that a thread takes at a time: about a megabyte.
    fn chunk(&self) -> usize {
        ((1 << 20) / self.tile_stride).clamp(1, 64)
    }
}

/// Transposes all matrices, tile rows shared out among the threads.
///
/// The file's pages are brought in a chunk at a time and leave the process again behind it, so that the model is not in
/// memory twice; if memory is `tight`, they leave the system's cache as well.
fn repack_all(jobs: &[Job<'_>], copy: &HugeBuffer, tight: bool, pool: &mut Pool) -> Result<(), ExecError> {
    let chunks: Vec<usize> = jobs.iter().map(|job| job.from.tiles().div_ceil(job.chunk())).collect();
    let total = chunks.iter().sum();
    let advised = Mutex::new(0);
    let fault = Fault::default();
    pool.run(&|worker| {
        // A thread's items ascend, so it finds its matrix by going on from the last one.
        let (mut matrix, mut first) = (0, 0);
        worker.share(total, |item| {
            while item >= first + chunks[matrix] {
                first += chunks[matrix];
                matrix += 1;
            }
            let job = &jobs[matrix];
            let tile = (item - first) * job.chunk();
            let tiles = tile..(tile + job.chunk()).min(job.from.tiles());
            let tile_bytes = TILE_ROWS * job.from.row_bytes;
            let bytes = tiles.start * tile_bytes..tiles.end * tile_bytes;
            if tight {
                advise_up_to(copy, &advised, job.at + tiles.end * job.tile_stride);
            }
            job.matrix.will_read(bytes.clone());
            fault.keep(job.matrix.check_scales(rows_of(&tiles, job.matrix)));
            for tile in tiles {
                let to = copy.ptr().wrapping_add(job.at + tile * job.tile_stride);
                // SAFETY: `to` begins a tile row of this job inside the copy, which no other item writes; the rows of
                // the view are whole blocks of the map.
                unsafe { repack_tile(job, tile, to) };
            }
            if tight {
                let bytes = bytes.start..bytes.end.min(job.matrix.bytes().len());
                drop_from_cache(&job.matrix.bytes()[bytes]);
            }
            job.matrix.has_read(bytes);
        });
        Ok(())
    })
    .map_err(|what| ExecError::Device { device: "cpu".into(), what })?;
    fault.raise()
}

/// Rows of some row tiles.
fn rows_of(tiles: &Range<usize>, matrix: &Matrix) -> Range<usize> {
    tiles.start * TILE_ROWS..(tiles.end * TILE_ROWS).min(matrix.rows)
}

/// Goes over the block scales of matrices that are used as they lie in the file ([`Matrix::check_scales`]).
fn check_all(matrices: &[&Matrix], pool: &mut Pool) -> Result<(), ExecError> {
    const CHUNK_ROWS: usize = 1024;
    let has_scales = |matrix: &&&Matrix| matches!(matrix.ty, GgmlType::NVFP4 | GgmlType::MXFP4);
    let chunks = |matrix: &Matrix| (0..matrix.rows).step_by(CHUNK_ROWS);
    let all: Vec<(&Matrix, usize)> = matrices
        .iter()
        .filter(has_scales)
        .flat_map(|&matrix| chunks(matrix).map(move |first| (matrix, first)))
        .collect();
    if all.is_empty() {
        return Ok(());
    }
    let fault = Fault::default();
    pool.run(&|worker| {
        worker.share(all.len(), |item| {
            let (matrix, first) = all[item];
            fault.keep(matrix.check_scales(first..(first + CHUNK_ROWS).min(matrix.rows)));
        });
        Ok(())
    })
    .map_err(|what| ExecError::Device { device: "cpu".into(), what })?;
    fault.raise()
}

/// What the threads found wrong with the weights; one of it is told.
#[derive(Default)]
struct Fault(Mutex<Option<ModelError>>);

impl Fault {
    fn keep(&self, result: Result<(), ModelError>) {
        if let Err(error) = result {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        }
    }

    fn raise(self) -> Result<(), ExecError> {
        match self.0.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(ExecError::Unsupported { backend: "cpu", what: error.to_string() }),
            None => Ok(()),
        }
    }
}

/// Decides about the pages of `copy` up to `end`, a stretch at a time: huge ones if there are enough at hand.
fn advise_up_to(copy: &HugeBuffer, advised: &Mutex<usize>, end: usize) {
    const STRETCH: usize = 64 << 20;
    let mut advised = advised.lock().unwrap_or_else(PoisonError::into_inner);
    while *advised < end {
        if free_huge_bytes().is_some_and(|free| free > 2 * STRETCH) {
            copy.advise(*advised, *advised + STRETCH, true);
        }
        *advised += STRETCH;
    }
}

/// # Safety
/// `to` is writable for a tile row.
unsafe fn repack_tile(job: &Job<'_>, tile: usize, to: *mut u8) {
    let m = &job.from;
    let Storage::Native(base, _) = m.storage else { return };
    let blocks = m.cols / job.shape.len;
    let mut rows = [base; TILE_ROWS];
    for (r, row) in rows.iter_mut().enumerate() {
        *row = base.wrapping_add((tile * TILE_ROWS + r).min(m.rows - 1) * m.row_bytes);
    }
    // SAFETY: by the contract of this function, and rows lie inside the matrix.
    unsafe {
        job.shape.transpose(&rows, blocks, to.add(job.shape.words_start(blocks)), to);
    }
}

/// The matrix as it is in the map.
fn native(matrix: &Matrix, role: MatrixRole) -> Result<MatrixView, ExecError> {
    let unsupported = |what: String| ExecError::Unsupported { backend: "cpu", what };
    let float = matches!(matrix.ty, GgmlType::F32 | GgmlType::F16 | GgmlType::BF16);
    if !float && Class::of(matrix.ty).is_none() {
        return Err(unsupported(format!("{}: no kernel for type {}", matrix.name, matrix.ty.name())));
    }
    let bytes = matrix.bytes();
    let row_bytes = matrix.row_bytes();
    if matrix.ty.row_bytes(matrix.cols) != Some(row_bytes)
        || bytes.len() != row_bytes * matrix.rows
        || matrix.rows == 0
    {
        return Err(unsupported(format!(
            "{}: rows of {} inputs of type {} have {row_bytes} bytes",
            matrix.name,
            matrix.cols,
            matrix.ty.name()
        )));
    }
    let segments = if float { Segments::whole(matrix.cols) } else { Segments::of(role, matrix.cols) };
    Ok(MatrixView {
        ty: matrix.ty,
        rows: matrix.rows,
        cols: matrix.cols,
        row_bytes,
        scale: matrix.scale,
        segments,
        storage: Storage::Native(bytes.as_ptr(), Reach::of(bytes.len())),
    })
}
