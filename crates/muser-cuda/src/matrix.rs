//! Products: which tiles a weight type becomes, which matrices share an input and a launch, how a launch is shaped.
//!
//! A [`Product`] is all that reads one activation buffer at one place of the model (q, k, gate and v; or gate and up): its
//! outputs lie side by side in one row. Matrices whose tiles agree are stored as one part.

mod float;
mod tile;

use std::sync::Arc;

use muser_backend::arith::{MatrixRole, Segments};
use muser_gguf::GgmlType;

use crate::CudaError;
use crate::driver::{Buffer, Context, Function, Launch, Stream};
use crate::fused::{FUSED_SHAPES, FusedShape};
use crate::kernels::{Act, AnyArgs, FewArgs, FusedArgs, ManyArgs, SplitArgs, Tuning, WideArgs};

pub(crate) use tile::{AnyKind, Tile};

/// How steps of more rows than a few (128) multiply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Prefill {
    /// With the bits of decoding: a row's results do not depend on the step that it is in.
    #[default]
    Exact,
    /// With weights rounded to 8 bits, on Hopper (elsewhere the same as `Exact`): faster, with bits of its own, so that a
    /// prompt's results depend on how it was cut into steps.
    Fast,
}

/// Most rows that the few-row kernel takes in one launch.
pub(crate) const FEW_ROWS: usize = 16;
/// Without the fused kernel, up to here launches of the few-row kernel, one after the other, beat the kernel of many rows (on an
/// H200, full-size file: 44.3 against 52.6 ms a step at 128 rows, 17.3 against 45.3 at 48).
const FEW_PASSES_ROWS: usize = 128;
/// Most rows of the fused kernel. Beyond, one that writes the digits of all weights first is faster, and sums of segments would take
/// more memory than they are worth (on an H200, all products of a full-size file: 51 against 70 ms at 512 rows, 99 against 119 at 1,024).
const FUSED_ROWS: usize = 1024;
/// Most rows that a float matrix takes row by row.
const ANY_ROWS: usize = 8;
/// Ring slots of a warp of the few-row kernel: at least, at most.
const FEW_STAGES: [u32; 2] = [3, 6];
/// Its warps: at least, at most.
const FEW_WARPS: [u32; 2] = [12, 16];
/// The same for one row of NVFP4, which takes fewer registers and more instructions.
const SINGLE_WARPS: [u32; 2] = [12, 20];
/// Tokens and rows of a CTA of the warpgroup kernel, half super-blocks in flight, threads.
const WIDE_TOKENS: u32 = 128;
const WIDE_ROWS: u32 = 128;
const WIDE_SLOTS: u32 = 3;
const WIDE_THREADS: u32 = 384;
/// Bytes of the two digits of 128 rows x 256 weights.
const DIGIT_BYTES: usize = 65536;
/// As many of these as the self-test needs before [`ProductKernels::reserve`] has seen the model.
const SELF_TEST_IMAGES: usize = 16;

/// A run of output rows with one tile layout.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) tile: Tile,
    /// Device address of the first tile.
    pub(crate) address: u64,
    pub(crate) row_tiles: u32,
    /// Place of its first row in the product's output row.
    pub(crate) first_row: u32,
}

impl Part {
    /// Bytes that the warpgroup kernel's form of the weights takes.
    fn digit_bytes(&self, k: usize) -> usize {
        let blocks =
            if self.tile.small_blocks() { 0 } else { self.row_tiles.div_ceil(WIDE_ROWS / 16) as usize };
        blocks * (k / 256) * DIGIT_BYTES
    }
}

/// A matrix in the file's own format: types without a tile, and what no tile can hold.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawPart {
    pub(crate) ty: GgmlType,
    pub(crate) kind: AnyKind,
    /// Device address of the first row.
    pub(crate) address: u64,
    pub(crate) rows: u32,
    pub(crate) row_bytes: usize,
    /// Place of its first row in the product's output row.
    pub(crate) first_row: u32,
    /// Factor on the product, applied by its kernel.
    pub(crate) scale: f32,
}

/// Matrices that read the same activations.
#[derive(Clone, Debug)]
pub(crate) struct Product {
    pub(crate) parts: Vec<Part>,
    pub(crate) raw: Vec<RawPart>,
    pub(crate) k: usize,
    pub(crate) segments: Segments,
    /// Length of an output row (rows of all parts, whole tiles).
    pub(crate) out_rows: usize,
    /// Factors on the product that whoever reads it applies to the sum of its segments: runs of output rows, in order.
    pub(crate) runs: Vec<(usize, f32)>,
    /// Device address of these factors, one a row; none where all are 1.
    pub(crate) factors: Option<u64>,
}

impl Product {
    pub(crate) fn new(role: MatrixRole, k: usize) -> Self {
        let (parts, raw, runs) = (Vec::new(), Vec::new(), Vec::new());
        Self { parts, raw, k, segments: Segments::of(role, k), out_rows: 0, runs, factors: None }
    }

    /// Appends output rows, rounded up to whole tiles.
    pub(crate) fn add_rows(&mut self, rows: usize, factor: f32) {
        let rows = rows.next_multiple_of(16);
        self.out_rows += rows;
        self.runs.push((rows, factor));
    }

    /// Address of the factors as kernels want it.
    pub(crate) fn factors(&self) -> u64 {
        self.factors.unwrap_or(0)
    }

    /// A factor for each output row, unless all are 1.
    pub(crate) fn all_factors(&self) -> Option<Vec<f32>> {
        let rows = || self.runs.iter().flat_map(|(rows, factor)| std::iter::repeat_n(*factor, *rows));
        self.runs.iter().any(|(_, factor)| *factor != 1.0).then(|| rows().collect())
    }

    /// Weight bytes that one pass reads.
    pub(crate) fn bytes(&self) -> usize {
        let tiles = self.parts.iter().map(|p| p.row_tiles as usize * (self.k / 256) * p.tile.bytes());
        tiles.chain(self.raw.iter().map(|p| p.rows as usize * p.row_bytes)).sum()
    }

    pub(crate) fn wants_small_blocks(&self) -> bool {
        self.parts.iter().any(|p| p.tile.small_blocks()) || self.has_raw(AnyKind::Small)
    }

    pub(crate) fn wants_super_blocks(&self) -> bool {
        self.parts.iter().any(|p| !p.tile.small_blocks()) || self.has_raw(AnyKind::Super)
    }

    pub(crate) fn wants_floats(&self) -> bool {
        self.has_raw(AnyKind::Float)
    }

    /// Makes addresses of offsets.
    pub(crate) fn place(&mut self, tiles: &Buffer<u8>, norms: &Buffer<f32>) {
        self.addresses().for_each(|address| *address += tiles.at(0));
        self.factors = self.factors.map(|offset| norms.at(offset as usize));
    }

    /// Where each matrix or run of tiles begins.
    pub(crate) fn addresses(&mut self) -> impl Iterator<Item = &mut u64> {
        let tiles = self.parts.iter_mut().map(|p| &mut p.address);
        tiles.chain(self.raw.iter_mut().map(|p| &mut p.address))
    }

    /// Adds output rows `first .. first + rows` of `from`, which reads the same input, behind the rows of this product. They
    /// are whole matrices, or a run of tiles.
    pub(crate) fn borrow_rows(&mut self, from: &Self, first: usize, rows: usize) {
        let first_row = self.out_rows as u32;
        let covers = |at: u32, len: u32| at as usize <= first && first + rows <= (at + len) as usize;
        let part = from.parts.iter().find(|p| covers(p.first_row, p.row_tiles * 16));
        self.parts.extend(part.map(|p| {
            let tiles_before = (first - p.first_row as usize) / 16;
            let address = p.address + (tiles_before * (from.k / 256) * p.tile.bytes()) as u64;
            Part { address, row_tiles: rows.div_ceil(16) as u32, first_row, ..*p }
        }));
        let raw = from.raw.iter().find(|p| covers(p.first_row, p.rows));
        self.raw.extend(raw.map(|p| RawPart { first_row, ..*p }));
        assert!(part.is_some() || raw.is_some(), "the rows belong to one matrix of the product");
        self.add_rows(rows, from.factor_of(first));
    }

    fn factor_of(&self, row: usize) -> f32 {
        let mut end = 0;
        let run = self.runs.iter().find(|(rows, _)| {
            end += rows;
            row < end
        });
        run.map_or(1.0, |(_, factor)| *factor)
    }

    fn has_raw(&self, kind: AnyKind) -> bool {
        self.raw.iter().any(|p| p.kind == kind)
    }

    /// f32 values that the output of up to `max_rows` rows takes, whichever kernel computes it. Kernels of many rows write whole tiles
    /// of 128 rows.
    pub(crate) fn output_len(&self, max_rows: usize) -> usize {
        let segments = self.segments.count() * max_rows.min(FUSED_ROWS);
        segments.max(if max_rows > FEW_PASSES_ROWS { max_rows.next_multiple_of(128) } else { 0 })
            * self.out_rows
    }

    fn longest_segment(&self) -> u32 {
        (0..self.segments.count()).map(|s| self.segments.range(s).len()).max().unwrap_or(1) as u32
    }
}

/// Which kernels compute a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Path {
    /// The few-row kernel, in passes.
    Few,
    /// The fused kernel of Hopper.
    Fused,
    /// A kernel of many rows, or those of [`WideKernels`].
    Many,
}

/// Many-row kernels of Hopper, and memory for the digits of one matrix; there is none for Q8_0.
struct WideKernels {
    /// By tile and [`FUSED_SHAPES`].
    fused: [[Function; 3]; 4],
    split: [Function; 4],
    multiply: [Function; 4],
    /// There is none for NVFP4, which stays exact.
    round: [Function; 3],
    multiply_rounded: Function,
    prefill: Prefill,
    digits: Buffer<u8>,
}

/// A launch of a few-row kernel.
struct FewPlan {
    function: Function,
    warps: u32,
    /// Ring slots of a warp.
    stages: u32,
    shared_bytes: u32,
}

/// Kernels of the products and the card's limits.
pub(crate) struct ProductKernels {
    /// By tile: for 1, 8 and 16 rows.
    few: [[Function; 3]; 5],
    /// Q4_K rows followed by Q6_K rows.
    few_pair: [Function; 3],
    many: [Function; 5],
    /// By kind, for 1 and 8 rows.
    any: [[Function; 2]; 3],
    /// Float weights with many rows.
    many_float: [Function; 3],
    /// On Hopper.
    wide: Option<WideKernels>,
    multiprocessors: u32,
    shared_bytes: u32,
    tuning: Tuning,
}

impl ProductKernels {
    pub(crate) fn new(
        context: &Arc<Context>,
        find: &dyn Fn(&str) -> Result<Function, CudaError>,
    ) -> Result<Self, CudaError> {
        let three = |name: &str| -> Result<[Function; 3], CudaError> {
            Ok([
                find(&format!("few_{name}_1"))?,
                find(&format!("few_{name}_8"))?,
                find(&format!("few_{name}_16"))?,
            ])
        };
        let fused = |name: &str| -> Result<[Function; 3], CudaError> {
            let [a, b, c] = FUSED_SHAPES.map(|shape| find(&format!("fused_{name}_{}", shape.tokens)));
            Ok([a?, b?, c?])
        };
        let [a, b, c, d, e] = Tile::ALL.map(Tile::name);
        Ok(Self {
            few: [three(a)?, three(b)?, three(c)?, three(d)?, three(e)?],
            few_pair: three("q4k_q6k")?,
            many: [
                find(&format!("many_{a}"))?,
                find(&format!("many_{b}"))?,
                find(&format!("many_{c}"))?,
                find(&format!("many_{d}"))?,
                find(&format!("many_{e}"))?,
            ],
            any: [
                [find("any_super_1")?, find("any_super_8")?],
                [find("any_small_1")?, find("any_small_8")?],
                [find("any_float_1")?, find("any_float_8")?],
            ],
            many_float: [find("many_f32")?, find("many_f16")?, find("many_bf16")?],
            wide: match find("wide_q4k") {
                Err(_) => None,
                Ok(q4k) => Some(WideKernels {
                    fused: [fused(a)?, fused(b)?, fused(c)?, fused(d)?],
                    split: [find("split_q4k")?, find("split_q5k")?, find("split_q6k")?, find("split_nv4")?],
                    multiply: [q4k, find("wide_q5k")?, find("wide_q6k")?, find("wide_nv4")?],
                    round: [find("round_q4k")?, find("round_q5k")?, find("round_q6k")?],
                    multiply_rounded: find("wide_rounded")?,
                    prefill: Prefill::Exact,
                    digits: Buffer::new(context, SELF_TEST_IMAGES * DIGIT_BYTES, "weight digits")?,
                }),
            },
            multiprocessors: context.multiprocessors,
            shared_bytes: context.shared_bytes,
            tuning: Tuning::of(context.arch),
        })
    }

    /// Chooses between the many-row kernels.
    pub(crate) fn set_prefill(&mut self, prefill: Prefill) {
        if let Some(wide) = &mut self.wide {
            wide.prefill = prefill;
        }
    }

    /// Are weights of many-row products rounded to 8 bits?
    pub(crate) fn rounds(&self) -> bool {
        self.wide.as_ref().is_some_and(|wide| wide.prefill == Prefill::Fast)
    }

    /// Makes room for what products of many rows keep beside the weights.
    pub(crate) fn reserve<'a>(
        &mut self,
        context: &Arc<Context>,
        products: impl Iterator<Item = &'a Product>,
    ) -> Result<(), CudaError> {
        let bytes =
            products.flat_map(|p| p.parts.iter().map(|part| part.digit_bytes(p.k))).max().unwrap_or(0);
        match &mut self.wide {
            Some(wide) if wide.digits.len() < bytes => {
                wide.digits = Buffer::new(context, bytes, "weight digits")?;
            }
            _ => {}
        }
        Ok(())
    }

    /// `act` as `product` wants it for `n` rows: without the formats that nobody reads, in the order that its kernel reads.
    pub(crate) fn input(&self, product: &Product, act: Act, n: usize) -> Act {
        Act {
            q: if product.wants_super_blocks() { act.q } else { 0 },
            q32: if product.wants_small_blocks() { act.q32 } else { 0 },
            f: if product.wants_floats() { act.f } else { 0 },
            // Matrices without a tile read codes in the plain order.
            tiled: u32::from(self.path(product, n) != Path::Few && self.reads_tiled(product)),
            ..act
        }
    }

    fn reads_tiled(&self, product: &Product) -> bool {
        self.wide.is_some() && !product.has_raw(AnyKind::Super)
    }

    fn path(&self, product: &Product, n: usize) -> Path {
        let small_blocks = product.parts.iter().any(|p| p.tile.small_blocks());
        let fused = self.reads_tiled(product) && !small_blocks;
        match n {
            _ if n <= FEW_ROWS => Path::Few,
            _ if n > if fused && !self.rounds() { FUSED_ROWS } else { FEW_PASSES_ROWS } => Path::Many,
            _ if fused => Path::Fused,
            _ => Path::Few,
        }
    }

    /// Segments that the output of a product of `n` rows still has to be summed over.
    pub(crate) fn output_segments(&self, product: &Product, n: usize) -> u32 {
        if self.path(product, n) == Path::Many { 1 } else { product.segments.count() as u32 }
    }

    /// Multiplies `n` rows of `act` with all parts; see [`Self::output_segments`] for the shape of `out`.
    pub(crate) fn multiply(
        &self,
        stream: &Stream,
        product: &Product,
        act: Act,
        out: u64,
        n: usize,
    ) -> Result<(), CudaError> {
        product.raw.iter().try_for_each(|part| self.any(stream, product, part, act, out, n))?;
        let parts = product.parts.as_slice();
        match (self.path(product, n), &self.wide) {
            (Path::Fused, Some(wide)) => {
                return parts
                    .iter()
                    .try_for_each(|part| self.fused(stream, wide, product, part, act, out, n));
            }
            (Path::Many, _) => {
                return parts.iter().try_for_each(|part| self.many(stream, product, part, act, out, n));
            }
            _ => {}
        }
        let mut first = 0;
        while first < n {
            let rows = (n - first).min(FEW_ROWS);
            let mut parts = parts;
            while let [part, rest @ ..] = parts {
                // One kernel for both if the second's rows follow the first's.
                let end = part.first_row + part.row_tiles * 16;
                let pair = rest
                    .first()
                    .filter(|next| part.tile == Tile::Q4K && next.tile == Tile::Q6K && next.first_row == end);
                self.few(stream, product, (part, pair), act, out, (first, rows, n))?;
                parts = if pair.is_some() { &rest[1..] } else { rest };
            }
            first += rows;
        }
        Ok(())
    }

    fn any(
        &self,
        stream: &Stream,
        product: &Product,
        part: &RawPart,
        act: Act,
        out: u64,
        n: usize,
    ) -> Result<(), CudaError> {
        let padded_rows = part.rows.next_multiple_of(16);
        if part.kind == AnyKind::Float && n > ANY_ROWS {
            return self.many_float(stream, product, part, act, out, n);
        }
        let args = AnyArgs {
            w: part.address,
            act,
            out,
            row_bytes: part.row_bytes as u64,
            type_id: part.ty.id(),
            rows: part.rows,
            padded_rows,
            kb: (product.k / 256) as u32,
            segments: product.segments.count() as u32,
            out_segments: self.output_segments(product, n),
            first_row: part.first_row,
            out_rows: product.out_rows as u32,
            first: 0,
            n: n as u32,
            n_all: n as u32,
            scale: part.scale,
        };
        let [one, eight] = self.any[part.kind as usize];
        let (function, tokens) = if n == 1 { (one, 1) } else { (eight, 8) };
        let rows_of_cta = if part.kind == AnyKind::Float { 16 } else { 8 };
        let grid = (padded_rows.div_ceil(rows_of_cta), (n as u32).div_ceil(tokens));
        // It waits for the whole kernel before, so that it may read through the first-level cache.
        stream.launch(&function, Launch { overlap: false, ..Launch::new(grid, 256) }, &args)
    }

    fn few(
        &self,
        stream: &Stream,
        product: &Product,
        (part, pair): (&Part, Option<&Part>),
        act: Act,
        out: u64,
        (first, rows, all): (usize, usize, usize),
    ) -> Result<(), CudaError> {
        let segments = product.segments.count() as u32;
        let plan = self.few_plan(product, part, pair, rows).ok_or_else(|| {
            CudaError::Unsupported(format!(
                "{rows} rows of {} inputs do not fit the {} bytes of shared memory that the card has",
                product.k, self.shared_bytes
            ))
        })?;
        let first64 = first as u64;
        let args = FewArgs {
            w_a: part.address,
            w_b: pair.map_or(part.address, |p| p.address),
            act: Act {
                q: act.q + first64 * act.k as u64,
                d: act.d + first64 * 4,
                sums: act.sums + first64 * 16,
                q32: act.q32 + first64 * act.k as u64,
                d32: act.d32 + first64 * 32,
                ..act
            },
            part: out + first64 * product.out_rows as u64 * 4,
            tiles_a: part.row_tiles,
            tiles_b: pair.map_or(0, |p| p.row_tiles),
            kb: (product.k / 256) as u32,
            segments,
            n: rows as u32,
            n_all: all as u32,
            first_row: part.first_row,
            out_rows: product.out_rows as u32,
            stages: plan.stages,
            _padding: 0,
        };
        let columns_of_ctas = (self.multiprocessors / segments).max(1);
        let shape = Launch {
            shared_bytes: plan.shared_bytes,
            ..Launch::new((columns_of_ctas * segments, 1), plan.warps * 32)
        };
        stream.launch(&plan.function, shape, &args)
    }

    /// How a launch of the few-row kernels uses shared memory; `None` if nothing fits.
    fn few_plan(&self, product: &Product, part: &Part, pair: Option<&Part>, rows: usize) -> Option<FewPlan> {
        // As `SINGLE` in `matmul_few.cu`.
        let single = part.tile == Tile::Nv4 && rows == 1 && self.tuning.shared_bytes == 227 << 10;
        let slot = pair.map_or(part.tile, |p| p.tile).bytes().max(part.tile.bytes()) as u32;
        let longest = product.longest_segment();
        let n = rows as u32;
        let columns = if rows > 8 { 16 } else { 8 };
        let (sums, scales) = match part.tile {
            Tile::Q80 => (0, 32),
            Tile::Nv4 => (0, 4),
            _ => (16, 4),
        };
        // NVFP4 multiplies codes and their negatives.
        let (block, gap) = match part.tile {
            Tile::Nv4 if single => (4096, 16),
            Tile::Nv4 => (512, 16),
            _ => (256, 64),
        };
        let activations =
            block + n * (longest * block + gap) + longest * n * sums + longest * columns * scales;
        let width = if rows == 1 { 0 } else { usize::from(rows > 8) + 1 };
        let function =
            if pair.is_some() { self.few_pair[width] } else { self.few[part.tile as usize][width] };
        let [fewest, most_warps] = if single { SINGLE_WARPS } else { FEW_WARPS };
        let [least, most] = FEW_STAGES;
        let scratch = part.tile.scratch_bytes();
        let room = self.shared_bytes.saturating_sub(activations + most_warps * scratch) / slot;
        // Row tiles go round by round over the warps: as many warps as leave the fewest idle in the last round. Many rows
        // are arithmetic enough to want all.
        let columns_of_ctas = (self.multiprocessors / product.segments.count() as u32).max(1);
        let row_tiles = (part.row_tiles + pair.map_or(0, |p| p.row_tiles)).div_ceil(columns_of_ctas);
        let fewest = if rows > 8 { most_warps } else { fewest };
        let warps = (fewest..=most_warps)
            .rev()
            .filter(|w| w * least <= room)
            .min_by_key(|w| row_tiles.next_multiple_of(*w))
            .unwrap_or((room / least).min(most_warps));
        let stages = (room / warps.max(1)).min(longest).clamp(least, most);
        (warps > 0).then_some(FewPlan {
            function,
            warps,
            stages,
            shared_bytes: activations + warps * (stages * slot + scratch),
        })
    }

    fn many(
        &self,
        stream: &Stream,
        product: &Product,
        part: &Part,
        act: Act,
        out: u64,
        n: usize,
    ) -> Result<(), CudaError> {
        if let Some(wide) = self.wide.as_ref().filter(|_| act.tiled != 0 && !part.tile.small_blocks()) {
            return self.wide(stream, wide, product, part, act, out, n);
        }
        let Tuning { tokens, warp_row_tiles, stages, .. } = self.tuning;
        let row_tiles = 4 * warp_row_tiles;
        let scales = tokens * if part.tile.small_blocks() { 32 } else { 20 };
        let stage = row_tiles * part.tile.bytes() as u32 + tokens * 256 + scales;
        let totals = tokens * 4 * warp_row_tiles * 4 * 16;
        let args = ManyArgs {
            w: part.address,
            act,
            out,
            row_tiles: part.row_tiles,
            kb: (product.k / 256) as u32,
            segments: product.segments.count() as u32,
            n: n as u32,
            first_row: part.first_row,
            out_rows: product.out_rows as u32,
        };
        let shape = Launch {
            shared_bytes: stages * stage + totals + 16 + tokens / 8 * part.tile.scratch_bytes(),
            ..Launch::new(
                (n.div_ceil(tokens as usize) as u32, part.row_tiles.div_ceil(row_tiles)),
                tokens * 4,
            )
        };
        stream.launch(&self.many[part.tile as usize], shape, &args)
    }

    #[expect(clippy::too_many_arguments, reason = "a launch has that many")]
    fn fused(
        &self,
        stream: &Stream,
        wide: &WideKernels,
        product: &Product,
        part: &Part,
        act: Act,
        out: u64,
        n: usize,
    ) -> Result<(), CudaError> {
        let (place, shape) = FusedShape::of(n);
        let segments = product.segments.count() as u32;
        let args = FusedArgs {
            w: part.address,
            act,
            part: out,
            row_tiles: part.row_tiles,
            kb: (product.k / 256) as u32,
            segments,
            n: n as u32,
            first_row: part.first_row,
            out_rows: product.out_rows as u32,
        };
        let units = (n as u32).div_ceil(shape.tokens) * segments * part.row_tiles.div_ceil(4);
        let launch = Launch {
            shared_bytes: shape.shared_bytes(part.tile, self.tuning.shared_bytes),
            ..Launch::new((units.min(self.multiprocessors), 1), (shape.groups + 1) * 128)
        };
        stream.launch(&wide.fused[part.tile as usize][place], launch, &args)
    }

    #[expect(clippy::too_many_arguments, reason = "a launch has that many")]
    fn wide(
        &self,
        stream: &Stream,
        wide: &WideKernels,
        product: &Product,
        part: &Part,
        act: Act,
        out: u64,
        n: usize,
    ) -> Result<(), CudaError> {
        let kb = (product.k / 256) as u32;
        assert!(part.digit_bytes(product.k) <= wide.digits.len(), "`reserve` has seen every product");
        let row_blocks = part.row_tiles.div_ceil(WIDE_ROWS / 16);
        let images = row_blocks * kb;
        let rounded = wide.prefill == Prefill::Fast && part.tile != Tile::Nv4;
        let image_bytes = if rounded { DIGIT_BYTES / 2 } else { DIGIT_BYTES } as u32;
        let digits = wide.digits.at(0);
        // Rounded weights take half the room; their scales follow.
        let scales = wide.digits.at(if rounded { images as usize * image_bytes as usize } else { 0 });
        let split = SplitArgs { w: part.address, digits, scales, row_tiles: part.row_tiles, kb };
        let shape = Launch {
            shared_bytes: image_bytes + 8 * part.tile.bytes() as u32,
            ..Launch::new((kb, row_blocks), 256)
        };
        let kernels = if rounded { &wide.round[..] } else { &wide.split };
        stream.launch(&kernels[part.tile as usize], shape, &split)?;
        let args = WideArgs {
            w: if rounded { scales } else { part.address },
            act,
            out,
            row_tiles: part.row_tiles,
            kb,
            segments: if rounded { 1 } else { product.segments.count() as u32 },
            n: n as u32,
            first_row: part.first_row,
            out_rows: product.out_rows as u32,
            digits,
        };
        let jobs = (n as u32).div_ceil(WIDE_TOKENS) * row_blocks;
        let shape = Launch {
            shared_bytes: wide_shared_bytes(part.tile, rounded),
            ..Launch::new((jobs.min(self.multiprocessors), 1), WIDE_THREADS)
        };
        let function = if rounded { &wide.multiply_rounded } else { &wide.multiply[part.tile as usize] };
        stream.launch(function, shape, &args)
    }
}

/// Shared memory of the warpgroup kernel: ring, scales, totals, barriers.
fn wide_shared_bytes(tile: Tile, rounded: bool) -> u32 {
    let (slots, digits) = if rounded { (WIDE_SLOTS * 2, 1) } else { (WIDE_SLOTS, 2) };
    let slot = (WIDE_TOKENS + digits * WIDE_ROWS) * 128;
    let scales = match tile {
        _ if rounded => (WIDE_TOKENS + WIDE_ROWS) * 4,
        _ => WIDE_TOKENS * (4 + tile.sum_bytes()) + 8 * if tile == Tile::Q6K { 32 } else { 256 },
    };
    let totals = if rounded { 0 } else { WIDE_TOKENS * WIDE_ROWS * 4 };
    slots * slot + 2 * scales + totals + (slots + 2) * 16
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::Tuning;

    #[test]
    fn many_row_tiles_fit_every_architectures_shared_memory() {
        for (arch, limit) in [(80, 163), (86, 99), (89, 99), (90, 227), (100, 227), (120, 99)] {
            let t = Tuning::of(arch);
            let row_tiles = 4 * t.warp_row_tiles as usize;
            for tile in Tile::ALL {
                let scales = if tile.small_blocks() { 32 } else { 20 };
                let tokens = t.tokens as usize;
                let bytes = t.stages as usize * (row_tiles * tile.bytes() + tokens * (256 + scales))
                    + tokens * 4 * t.warp_row_tiles as usize * 4 * 16
                    + tokens / 8 * tile.scratch_bytes() as usize
                    + 16;
                assert!(bytes <= limit * 1024, "sm_{arch} {tile:?}: {bytes} bytes");
            }
        }
    }
}
