//! Weights on the card: which tiles they become and where these lie. The embedding table stays in the file's format (rows are looked
//! up).

use std::collections::BTreeSet;
use std::sync::Arc;

use muser_backend::LayerRange;
use muser_backend::arith::MatrixRole;
use muser_gguf::GgmlType;
use muser_model::{Geometry, LayerWeights, Matrix, Model};

use crate::CudaError;
use crate::driver::{Buffer, Context};
use crate::matrix::{AnyKind, Part, Product, RawPart, Tile};
use crate::uploader::{Job, Repack, Uploader};

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

    /// Makes addresses of offsets.
    pub(crate) fn place(&mut self, tiles: &Buffer<u8>, norms: &Buffer<f32>) {
        self.products_mut().into_iter().for_each(|product| product.place(tiles, norms));
        for offset in [
            &mut self.attn_norm,
            &mut self.q_norm,
            &mut self.k_norm,
            &mut self.post_attention_norm,
            &mut self.ffn_norm,
            &mut self.post_ffw_norm,
        ] {
            *offset = norms.at(*offset as usize);
        }
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
            layers.push(plan.layer(layer, geometry)?);
        }
        let of_output = if range.has_output() { vec![&model.output] } else { Vec::new() };
        let mut output = plan.product(MatrixRole::Output, geometry.hidden, &of_output)?;
        let output_norm = plan.norm(&model.output_norm);
        plan.factors_of(&mut layers);
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
        layers.iter_mut().for_each(|layer| layer.place(&tiles, &norms));
        output.place(&tiles, &norms);
        let output_norm = norms.at(output_norm as usize);
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

    /// The same for all products of some layers.
    pub(crate) fn factors_of(&mut self, layers: &mut [LayerOnDevice]) {
        layers.iter_mut().flat_map(LayerOnDevice::products_mut).for_each(|product| self.factors(product));
    }

    /// Matrices and norm vectors of a layer.
    pub(crate) fn layer(
        &mut self,
        layer: &'a LayerWeights,
        geometry: &Geometry,
    ) -> Result<LayerOnDevice, CudaError> {
        let attention = [&layer.attn_q, &layer.attn_k, &layer.attn_gate, &layer.attn_v];
        let hidden = geometry.hidden;
        Ok(LayerOnDevice {
            attn_in: self.product(MatrixRole::AttnIn, hidden, &attention)?,
            attn_out: self.product(MatrixRole::AttnOut, geometry.q_width(), &[&layer.attn_output])?,
            ffn_in: self.product(MatrixRole::FfnIn, hidden, &[&layer.ffn_gate, &layer.ffn_up])?,
            ffn_down: self.product(MatrixRole::FfnDown, geometry.ffn, &[&layer.ffn_down])?,
            attn_norm: self.norm(&layer.attn_norm),
            q_norm: self.norm(&layer.attn_q_norm),
            k_norm: self.norm(&layer.attn_k_norm),
            post_attention_norm: self.norm(&layer.post_attention_norm),
            ffn_norm: self.norm(&layer.ffn_norm),
            post_ffw_norm: self.norm(&layer.post_ffw_norm),
        })
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
    let slot_bytes = STAGING_BYTES.min(total.div_ceil(4)).max(widest(jobs)).max(1 << 20);
    let mut uploader = Uploader::new(context, slot_bytes)?;
    let unfit = Buffer::<u32>::zeroed(context, jobs.len().max(1), "counts of what does not fit")?;
    for (index, job) in jobs.iter().enumerate() {
        uploader.matrix(job, tiles, repack, unfit.at(index))?;
    }
    if let Some((table, on_device)) = table {
        uploader.bytes(table, on_device, 0)?;
    }
    uploader.synchronize()?;
    unfit_of(jobs, &unfit)
}

/// Names of the matrices that were counted as not fitting, by the counts of their jobs.
pub(crate) fn unfit_of(jobs: &[Job<'_>], counts: &Buffer<u32>) -> Result<Unfit, CudaError> {
    let mut found = vec![0u32; counts.len()];
    counts.read(0, &mut found)?;
    let unfit = jobs.iter().zip(found).filter(|(_, count)| *count > 0);
    Ok(unfit.map(|(job, _)| job.matrix.name.clone()).collect())
}

/// Bytes of the longest run of rows that goes to the card in one piece.
pub(crate) fn widest(jobs: &[Job<'_>]) -> usize {
    jobs.iter().map(|job| job.matrix.row_bytes() * 16).max().unwrap_or(0)
}
