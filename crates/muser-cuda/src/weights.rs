//! Weights on the card: file map -> pinned staging -> device -> tiles.
//!
//! Two staging slots on two streams: while one is repacked, the other is filled by several threads from the map, so that
//! the page cache or the disk sets the pace. The embedding table stays in the file's format (rows are looked up).

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use muser_backend::LayerRange;
use muser_backend::arith::MatrixRole;
use muser_gguf::GgmlType;
use muser_model::{Matrix, Model};

use crate::CudaError;
use crate::driver::{Buffer, Context, Function, Launch, Pinned, Stream};
use crate::kernels::RepackArgs;
use crate::matrix::{AnyKind, Part, Product, RawPart, Tile};

/// Bytes of a staging slot, when the model is large enough to fill it.
const STAGING_BYTES: usize = 64 << 20;

/// Products and norm weights of a layer.
pub(crate) struct LayerOnDevice {
    /// q, k, gate, v.
    pub(crate) attn_in: Product,
    pub(crate) attn_out: Product,
    /// gate, up.
    pub(crate) ffn_in: Product,
    pub(crate) ffn_down: Product,
    pub(crate) attn_norm: u64,
    pub(crate) q_norm: u64,
    pub(crate) k_norm: u64,
    pub(crate) post_attention_norm: u64,
    pub(crate) ffn_norm: u64,
    pub(crate) post_ffw_norm: u64,
}

impl LayerOnDevice {
    pub(crate) fn products(&self) -> [&Product; 4] {
        [&self.attn_in, &self.attn_out, &self.ffn_in, &self.ffn_down]
    }

    fn products_mut(&mut self) -> [&mut Product; 4] {
        [&mut self.attn_in, &mut self.attn_out, &mut self.ffn_in, &mut self.ffn_down]
    }
}

/// Weights of a range of a model's layers.
pub(crate) struct Weights {
    pub(crate) layers: Vec<LayerOnDevice>,
    /// Without rows where the range does not end with the last layer.
    pub(crate) output: Product,
    pub(crate) output_norm: u64,
    /// Empty where the range does not begin with the first layer, unless there is a draft.
    pub(crate) embedding: Buffer<u8>,
    pub(crate) embedding_type: GgmlType,
    pub(crate) embedding_row_bytes: usize,
    /// Factor on the rows of the table.
    pub(crate) embedding_factor: f32,
    _tiles: Buffer<u8>,
    _norms: Buffer<f32>,
}

/// A matrix and where it goes: as tiles, or as it is in the file.
pub(crate) struct Job<'a> {
    matrix: &'a Matrix,
    tile: Option<Tile>,
    at: usize,
}

impl Weights {
    /// Bytes of tiles that one decoded token reads.
    pub(crate) fn bytes_per_token(&self) -> usize {
        let layers = self.layers.iter().flat_map(LayerOnDevice::products);
        layers.map(Product::bytes).sum::<usize>() + self.output.bytes()
    }

    /// Copies and repacks; `repack[tile]` are the kernels.
    pub(crate) fn load(
        context: &Arc<Context>,
        model: &Model,
        range: LayerRange,
        repack: &Repack,
    ) -> Result<Self, CudaError> {
        with_fallback(|unfit| Self::load_with(context, model, range, repack, unfit))
    }

    /// Copies the embedding table for a draft behind a cut.
    pub(crate) fn load_table(&mut self, context: &Arc<Context>, model: &Model) -> Result<(), CudaError> {
        let table = model.token_embd.bytes();
        self.embedding = Buffer::<u8>::from_slice(context, table, "the embedding table")?;
        Ok(())
    }

    fn load_with(
        context: &Arc<Context>,
        model: &Model,
        range: LayerRange,
        repack: &Repack,
        without_tile: &Unfit,
    ) -> Result<(Self, Unfit), CudaError> {
        let geometry = &model.geometry;
        let mut plan = Plan::new(without_tile);
        let mut layers = Vec::with_capacity(range.count());
        for layer in &model.layers[range.layers()] {
            let attention = [&layer.attn_q, &layer.attn_k, &layer.attn_gate, &layer.attn_v];
            let hidden = geometry.hidden;
            layers.push(LayerOnDevice {
                attn_in: plan.product(MatrixRole::AttnIn, hidden, &attention)?,
                attn_out: plan.product(MatrixRole::AttnOut, geometry.q_width(), &[&layer.attn_output])?,
                ffn_in: plan.product(MatrixRole::FfnIn, hidden, &[&layer.ffn_gate, &layer.ffn_up])?,
                ffn_down: plan.product(MatrixRole::FfnDown, geometry.ffn, &[&layer.ffn_down])?,
                attn_norm: plan.norm(&layer.attn_norm),
                q_norm: plan.norm(&layer.attn_q_norm),
                k_norm: plan.norm(&layer.attn_k_norm),
                post_attention_norm: plan.norm(&layer.post_attention_norm),
                ffn_norm: plan.norm(&layer.ffn_norm),
                post_ffw_norm: plan.norm(&layer.post_ffw_norm),
            });
        }
        let of_output = if range.has_output() { vec![&model.output] } else { Vec::new() };
        let mut output = plan.product(MatrixRole::Output, geometry.hidden, &of_output)?;
        let output_norm = plan.norm(&model.output_norm);
        layers.iter_mut().flat_map(LayerOnDevice::products_mut).for_each(|product| plan.factors(product));
        plan.factors(&mut output);

        let table = &model.token_embd;
        if AnyKind::of(table.ty).is_none() {
            return Err(CudaError::Unsupported(format!("{table:?}: no lookup for this type")));
        }
        let tiles = Buffer::<u8>::new(context, plan.bytes, "the weights")?;
        let norms = Buffer::from_slice(context, &plan.norms, "the norm weights")?;
        let bytes = if range.has_embedding() { table.bytes() } else { &[] };
        let embedding = Buffer::<u8>::new(context, bytes.len(), "the embedding table")?;
        let unfit = upload(context, &plan.jobs, &tiles, repack, Some((bytes, &embedding)))?;

        // Until now addresses were offsets.
        let norm = |offset: &mut u64| *offset = norms.at(*offset as usize);
        for layer in &mut layers {
            layer.products_mut().into_iter().for_each(|product| product.place(&tiles, &norms));
            for offset in [
                &mut layer.attn_norm,
                &mut layer.q_norm,
                &mut layer.k_norm,
                &mut layer.post_attention_norm,
                &mut layer.ffn_norm,
                &mut layer.post_ffw_norm,
            ] {
                norm(offset);
            }
        }
        output.place(&tiles, &norms);
        let mut output_norm = output_norm;
        norm(&mut output_norm);
        let loaded = Self {
            layers,
            output,
            output_norm,
            embedding_type: table.ty,
            embedding_row_bytes: table.row_bytes(),
            embedding_factor: table.scale,
            embedding,
            _tiles: tiles,
            _norms: norms,
        };
        Ok((loaded, unfit))
    }
}

/// The kernels that make tiles, by [`Tile`].
pub(crate) type Repack = [Function; 5];

/// Names of matrices whose numbers no tile of their type can hold.
pub(crate) type Unfit = BTreeSet<String>;

/// Loads, and once more if there were matrices without a tile, which only shows when it is made.
pub(crate) fn with_fallback<T>(
    load: impl Fn(&Unfit) -> Result<(T, Unfit), CudaError>,
) -> Result<T, CudaError> {
    let (loaded, unfit) = load(&Unfit::new())?;
    if unfit.is_empty() {
        return Ok(loaded);
    }
    drop(loaded);
    Ok(load(&unfit)?.0)
}

/// Matrices and norm vectors on their way to the card; until they are there, addresses are offsets.
pub(crate) struct Plan<'a> {
    pub(crate) jobs: Vec<Job<'a>>,
    pub(crate) bytes: usize,
    pub(crate) norms: Vec<f32>,
    without_tile: Unfit,
    /// Do the readers of products apply factors ([`Product::factors`])?
    factors_apart: bool,
}

impl<'a> Plan<'a> {
    /// For a text model or a draft; `without_tile`: what stays in the file's format.
    pub(crate) fn new(without_tile: &Unfit) -> Self {
        let (jobs, norms) = (Vec::new(), Vec::new());
        Self { jobs, bytes: 0, norms, without_tile: without_tile.clone(), factors_apart: true }
    }

    /// For a tower: whose kernels know of no factors, and whose matrices of NVFP4, if any, have no tile.
    pub(crate) fn of_tower() -> Self {
        Self { factors_apart: false, ..Self::new(&Unfit::new()) }
    }

    /// Puts a product's factors beside the norms, once all its rows are there.
    pub(crate) fn factors(&mut self, product: &mut Product) {
        product.factors = product.all_factors().map(|factors| self.norm(&factors));
    }

    fn tile_of(&self, matrix: &Matrix) -> Option<Tile> {
        let tile = Tile::of(matrix.ty)?;
        let fits = !self.without_tile.contains(&matrix.name);
        let simple = self.factors_apart || (matrix.scale == 1.0 && tile != Tile::Nv4);
        (fits && simple).then_some(tile)
    }

    pub(crate) fn product(
        &mut self,
        role: MatrixRole,
        k: usize,
        matrices: &[&'a Matrix],
    ) -> Result<Product, CudaError> {
        let mut product = Product::new(role, k);
        matrices.iter().try_for_each(|matrix| self.add(&mut product, matrix))?;
        Ok(product)
    }

    /// Appends a matrix to a product, to its last part if the tiles agree.
    fn add(&mut self, product: &mut Product, matrix: &'a Matrix) -> Result<(), CudaError> {
        let unsupported = |what: &str| Err(CudaError::Unsupported(format!("{matrix:?}: {what}")));
        let Some(kind) = AnyKind::of(matrix.ty) else { return unsupported("no kernel for this type") };
        if !matrix.cols.is_multiple_of(256) {
            return unsupported("inputs must be a multiple of 256");
        }
        let Some(tile) = self.tile_of(matrix) else {
            let at = self.bytes.next_multiple_of(256);
            product.raw.push(RawPart {
                ty: matrix.ty,
                kind,
                address: at as u64,
                rows: matrix.rows as u32,
                row_bytes: matrix.row_bytes(),
                first_row: product.out_rows as u32,
                scale: matrix.scale,
            });
            self.jobs.push(Job { matrix, tile: None, at });
            self.bytes = at + matrix.bytes().len();
            product.add_rows(matrix.rows, 1.0);
            return Ok(());
        };
        let row_tiles = matrix.rows.div_ceil(16);
        let bytes = row_tiles * (matrix.cols / 256) * tile.bytes();
        let at = match product.parts.last_mut() {
            // The jobs of one product follow each other, so its last part ends where the next matrix begins.
            Some(last)
                if last.tile == tile
                    && last.first_row as usize + last.row_tiles as usize * 16 == product.out_rows =>
            {
                last.row_tiles += row_tiles as u32;
                self.bytes
            }
            _ => {
                self.bytes = self.bytes.next_multiple_of(256);
                product.parts.push(Part {
                    tile,
                    address: self.bytes as u64,
                    row_tiles: row_tiles as u32,
                    first_row: product.out_rows as u32,
                });
                self.bytes
            }
        };
        self.jobs.push(Job { matrix, tile: Some(tile), at });
        self.bytes = at + bytes;
        product.add_rows(matrix.rows, matrix.scale);
        Ok(())
    }

    /// Adds a norm vector and returns its offset in values, aligned for 16-byte loads.
    pub(crate) fn norm(&mut self, values: &[f32]) -> u64 {
        let at = self.norms.len().next_multiple_of(4);
        self.norms.resize(at, 0.0);
        self.norms.extend_from_slice(values);
        at as u64
    }
}

struct Slot {
    stream: Stream,
    pinned: Pinned<u8>,
    raw: Buffer<u8>,
}

/// Copies and repacks all matrices to their places in `tiles`, and copies an embedding table. Says which matrices their tiles could
/// not hold; what is in their places means nothing.
pub(crate) fn upload(
    context: &Arc<Context>,
    jobs: &[Job<'_>],
    tiles: &Buffer<u8>,
    repack: &Repack,
    table: Option<(&[u8], &Buffer<u8>)>,
) -> Result<Unfit, CudaError> {
    let total: usize = jobs.iter().map(|j| j.matrix.bytes().len()).sum();
    let widest = jobs.iter().map(|j| j.matrix.row_bytes() * 16).max().unwrap_or(0);
    let slot_bytes = STAGING_BYTES.min(total.div_ceil(4)).max(widest).max(1 << 20);
    let slot = || -> Result<Slot, CudaError> {
        Ok(Slot {
            stream: Stream::new(context)?,
            pinned: Pinned::zeroed(context, slot_bytes)?,
            raw: Buffer::new(context, slot_bytes, "weight staging")?,
        })
    };
    let mut slots = [slot()?, slot()?];
    let mut turn = 0;
    let unfit = Buffer::<u32>::zeroed(context, jobs.len().max(1), "counts of what does not fit")?;
    for (index, job) in jobs.iter().enumerate() {
        let bytes = job.matrix.bytes();
        let (row_bytes, kb) = (job.matrix.row_bytes(), job.matrix.cols / 256);
        let rows_per_chunk = slot_bytes / row_bytes / 16 * 16;
        let mut first = 0;
        while first < job.matrix.rows {
            let rows = rows_per_chunk.min(job.matrix.rows - first);
            let chunk = &bytes[first * row_bytes..][..rows * row_bytes];
            check_scales(job.matrix, first..first + rows)?;
            let slot = &mut slots[turn % 2];
            turn += 1;
            slot.stream.synchronize()?;
            copy_in_parallel(chunk, slot.pinned.slice_mut());
            first += rows;
            let Some(tile) = job.tile else {
                let to = job.at + (first - rows) * row_bytes;
                slot.stream.upload(&slot.pinned, 0, tiles, to, chunk.len())?;
                continue;
            };
            slot.stream.upload(&slot.pinned, 0, &slot.raw, 0, chunk.len())?;
            let words = (rows.div_ceil(16) * kb * tile.bytes() / 4) as u64;
            let args = RepackArgs {
                src: slot.raw.at(0),
                dst: tiles.at(job.at + (first - rows) / 16 * kb * tile.bytes()),
                words,
                rows: rows as u32,
                kb: kb as u32,
                type_id: job.matrix.ty.id(),
                _padding: 0,
                unfit: unfit.at(index),
            };
            let shape = Launch { overlap: false, ..Launch::new((words.div_ceil(256) as u32, 1), 256) };
            slot.stream.launch(&repack[tile as usize], shape, &args)?;
        }
    }
    if let Some((table, on_device)) = table {
        for (i, chunk) in table.chunks(slot_bytes).enumerate() {
            let slot = &mut slots[turn % 2];
            turn += 1;
            slot.stream.synchronize()?;
            copy_in_parallel(chunk, slot.pinned.slice_mut());
            slot.stream.upload(&slot.pinned, 0, on_device, i * slot_bytes, chunk.len())?;
        }
    }
    slots.iter().try_for_each(|s| s.stream.synchronize())?;
    let mut counts = vec![0u32; unfit.len()];
    unfit.read(0, &mut counts)?;
    let unfit = jobs.iter().zip(counts).filter(|(_, count)| *count > 0);
    Ok(unfit.map(|(job, _)| job.matrix.name.clone()).collect())
}

/// [`Matrix::check_scales`] by several threads, like the copy that follows it.
fn check_scales(matrix: &Matrix, rows: Range<usize>) -> Result<(), CudaError> {
    if !matches!(matrix.ty, GgmlType::NVFP4 | GgmlType::MXFP4) {
        return Ok(());
    }
    let share = rows.len().div_ceil(copy_threads()).max(1);
    let checked = std::thread::scope(|scope| {
        let parts = rows.clone().step_by(share).map(|from| from..(from + share).min(rows.end));
        let threads: Vec<_> = parts.map(|part| scope.spawn(|| matrix.check_scales(part))).collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    });
    checked.map_err(|error| CudaError::Unsupported(error.to_string()))
}

fn copy_threads() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(8)
}

/// One thread cannot read a map at the speed of the bus (page faults), so several do.
pub(crate) fn copy_in_parallel<T: Copy + Send + Sync>(from: &[T], to: &mut [T]) {
    let threads = copy_threads();
    let share = from.len().div_ceil(threads).max((1 << 20) / size_of::<T>());
    if from.len() <= share {
        to[..from.len()].copy_from_slice(from);
        return;
    }
    std::thread::scope(|scope| {
        for (source, target) in from.chunks(share).zip(to.chunks_mut(share)) {
            scope.spawn(|| target[..source.len()].copy_from_slice(source));
        }
    });
}
