//! Products: which tiles a weight type becomes, which matrices share an input and a launch, how a launch is shaped.
//!
//! A [`Product`] is all that reads one activation buffer at one place of the model (q, k, gate and v; or gate and up): its
//! outputs lie side by side in one row. Matrices whose tiles agree are stored as one part.

use muser_backend::arith::{MatrixRole, Segments};
use muser_gguf::GgmlType;

use crate::CudaError;
use crate::driver::{Function, Launch, Stream};
use crate::kernels::{Act, FewArgs, ManyArgs, Tuning};

/// Most rows that the few-row kernel takes in one launch.
pub(crate) const FEW_ROWS: usize = 16;
/// Up to here several launches of the few-row kernel beat one of the many-row kernel.
pub(crate) const FEW_PASSES_ROWS: usize = 32;
/// Ring slots of a warp of the few-row kernel.
const FEW_STAGES: u32 = 3;
const FEW_WARPS: u32 = 16;
/// Tokens of a CTA and super-blocks in flight of the warpgroup kernel.
const WIDE_TOKENS: u32 = 128;
const WIDE_STAGES: u32 = 3;

/// Layout of a weight tile (16 rows x 256 of k), see `kernels/tiles.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Tile {
    Q4K,
    Q5K,
    Q6K,
    Q80,
}

impl Tile {
    pub(crate) const ALL: [Self; 4] = [Self::Q4K, Self::Q5K, Self::Q6K, Self::Q80];

    /// The tile that holds a type's integers, if there is one.
    pub(crate) fn of(ty: GgmlType) -> Option<Self> {
        Some(match ty {
            GgmlType::Q4_K => Self::Q4K,
            GgmlType::Q5_K => Self::Q5K,
            GgmlType::Q6_K | GgmlType::Q3_K => Self::Q6K,
            GgmlType::Q8_0 | GgmlType::Q4_0 | GgmlType::Q5_0 | GgmlType::IQ4_NL => Self::Q80,
            _ => return None,
        })
    }

    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::Q4K => 2304,
            Self::Q5K => 2816,
            Self::Q6K => 3360,
            Self::Q80 => 4352,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Q4K => "q4k",
            Self::Q5K => "q5k",
            Self::Q6K => "q6k",
            Self::Q80 => "q80",
        }
    }

    /// Does it multiply with activations that have one scale per 32 values (else one per 256)?
    pub(crate) fn small_blocks(self) -> bool {
        self == Self::Q80
    }
}

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

/// Matrices that read the same activations.
#[derive(Clone, Debug)]
pub(crate) struct Product {
    pub(crate) parts: Vec<Part>,
    pub(crate) k: usize,
    pub(crate) segments: Segments,
    /// Length of an output row (rows of all parts, whole tiles).
    pub(crate) out_rows: usize,
}

impl Product {
    pub(crate) fn new(role: MatrixRole, k: usize) -> Self {
        Self { parts: Vec::new(), k, segments: Segments::of(role, k), out_rows: 0 }
    }

    /// Weight bytes that one pass reads.
    pub(crate) fn bytes(&self) -> usize {
        self.parts.iter().map(|p| p.row_tiles as usize * (self.k / 256) * p.tile.bytes()).sum()
    }

    pub(crate) fn wants_small_blocks(&self) -> bool {
        self.parts.iter().any(|p| p.tile.small_blocks())
    }

    pub(crate) fn wants_super_blocks(&self) -> bool {
        self.parts.iter().any(|p| !p.tile.small_blocks())
    }

    /// Segments that the output of a product of `n` rows still has to be summed over.
    pub(crate) fn output_segments(&self, n: usize) -> u32 {
        if n <= FEW_PASSES_ROWS { self.segments.count() as u32 } else { 1 }
    }

    /// f32 values that the output of up to `max_rows` rows takes. Many-row kernels write whole tiles of 128 rows.
    pub(crate) fn output_len(&self, max_rows: usize) -> usize {
        let few = self.segments.count() * max_rows.min(FEW_PASSES_ROWS);
        few.max(if max_rows > FEW_PASSES_ROWS { max_rows.next_multiple_of(128) } else { 0 }) * self.out_rows
    }

    fn longest_segment(&self) -> u32 {
        (0..self.segments.count()).map(|s| self.segments.range(s).len()).max().unwrap_or(1) as u32
    }
}

/// Kernels of the products and the card's limits.
pub(crate) struct ProductKernels {
    /// By tile: for 1, 8 and 16 rows.
    few: [[Function; 3]; 4],
    /// Q4_K rows followed by Q6_K rows.
    few_pair: [Function; 3],
    many: [Function; 4],
    /// By tile, on Hopper; there is none for Q8_0.
    wide: Option<[Function; 3]>,
    multiprocessors: u32,
    shared_bytes: u32,
    tuning: Tuning,
}

impl ProductKernels {
    pub(crate) fn new(
        find: &dyn Fn(&str) -> Result<Function, CudaError>,
        multiprocessors: u32,
        shared_bytes: u32,
        tuning: Tuning,
    ) -> Result<Self, CudaError> {
        let three = |name: &str| -> Result<[Function; 3], CudaError> {
            Ok([
                find(&format!("few_{name}_1"))?,
                find(&format!("few_{name}_8"))?,
                find(&format!("few_{name}_16"))?,
            ])
        };
        let [a, b, c, d] = Tile::ALL.map(Tile::name);
        Ok(Self {
            few: [three(a)?, three(b)?, three(c)?, three(d)?],
            few_pair: three("q4k_q6k")?,
            many: [
                find(&format!("many_{a}"))?,
                find(&format!("many_{b}"))?,
                find(&format!("many_{c}"))?,
                find(&format!("many_{d}"))?,
            ],
            wide: find("wide_q4k")
                .ok()
                .map(|q4k| Ok([q4k, find("wide_q5k")?, find("wide_q6k")?]))
                .transpose()?,
            multiprocessors,
            shared_bytes,
            tuning,
        })
    }

    /// `act` as `product` wants it for `n` rows: without the formats that nobody reads, in the order that its kernel reads.
    pub(crate) fn input(&self, product: &Product, act: Act, n: usize) -> Act {
        Act {
            q: if product.wants_super_blocks() { act.q } else { 0 },
            q32: if product.wants_small_blocks() { act.q32 } else { 0 },
            tiled: u32::from(self.wide.is_some() && n > FEW_PASSES_ROWS),
            ..act
        }
    }

    /// Multiplies `n` rows of `act` with all parts; see [`Product::output_segments`] for the shape of `out`.
    pub(crate) fn multiply(
        &self,
        stream: &Stream,
        product: &Product,
        act: Act,
        out: u64,
        n: usize,
    ) -> Result<(), CudaError> {
        if n > FEW_PASSES_ROWS {
            return product.parts.iter().try_for_each(|part| self.many(stream, product, part, act, out, n));
        }
        let mut first = 0;
        while first < n {
            let rows = (n - first).min(FEW_ROWS);
            let mut parts = product.parts.as_slice();
            while let [part, rest @ ..] = parts {
                let pair = rest.first().filter(|next| part.tile == Tile::Q4K && next.tile == Tile::Q6K);
                self.few(stream, product, (part, pair), act, out, (first, rows, n))?;
                parts = if pair.is_some() { &rest[1..] } else { rest };
            }
            first += rows;
        }
        Ok(())
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
        let width = if rows == 1 { 0 } else { usize::from(rows > 8) + 1 };
        let function =
            if pair.is_some() { self.few_pair[width] } else { self.few[part.tile as usize][width] };
        let segments = product.segments.count() as u32;
        let slot = pair.map_or(part.tile, |p| p.tile).bytes().max(part.tile.bytes()) as u32;
        let longest = product.longest_segment();
        let n = rows as u32;
        let columns = if rows > 8 { 16 } else { 8 };
        let (sums, scales) = if part.tile.small_blocks() { (0, 32) } else { (16, 4) };
        let activations = 256 + n * (longest * 256 + 64) + longest * n * sums + longest * columns * scales;
        let warp_bytes = FEW_STAGES * slot;
        let warps = (self.shared_bytes.saturating_sub(activations) / warp_bytes).min(FEW_WARPS);
        if warps == 0 {
            return Err(CudaError::Unsupported(format!(
                "{rows} rows of {} inputs need {} bytes of shared memory, the card has {}",
                product.k,
                activations + warp_bytes,
                self.shared_bytes
            )));
        }
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
            n,
            n_all: all as u32,
            first_row: part.first_row,
            out_rows: product.out_rows as u32,
        };
        let columns_of_ctas = (self.multiprocessors / segments).max(1);
        let shape = Launch {
            shared_bytes: warps * warp_bytes + activations,
            ..Launch::new((columns_of_ctas * segments, 1), warps * 32)
        };
        stream.launch(&function, shape, &args)
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
        if let Some(wide) = self.wide.filter(|_| !part.tile.small_blocks()) {
            let stage = (WIDE_TOKENS * (256 + 20) + 8 * part.tile.bytes() as u32).next_multiple_of(1024);
            let grid = (n.div_ceil(WIDE_TOKENS as usize) as u32, part.row_tiles.div_ceil(8));
            let shape = Launch { shared_bytes: WIDE_STAGES * stage + 1024, ..Launch::new(grid, 384) };
            return stream.launch(&wide[part.tile as usize], shape, &args);
        }
        let shape = Launch {
            shared_bytes: stages * stage + totals + 16,
            ..Launch::new(
                (n.div_ceil(tokens as usize) as u32, part.row_tiles.div_ceil(row_tiles)),
                tokens * 4,
            )
        };
        stream.launch(&self.many[part.tile as usize], shape, &args)
    }
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
                    + 16;
                assert!(bytes <= limit * 1024, "sm_{arch} {tile:?}: {bytes} bytes");
            }
        }
    }

    #[test]
    fn a_tile_is_not_a_byte_more_than_its_blocks() {
        for (ty, tile) in [
            (GgmlType::Q4_K, Tile::Q4K),
            (GgmlType::Q5_K, Tile::Q5K),
            (GgmlType::Q6_K, Tile::Q6K),
            (GgmlType::Q8_0, Tile::Q80),
        ] {
            assert_eq!(Tile::of(ty), Some(tile));
            assert_eq!(tile.bytes(), 16 * ty.row_bytes(256).expect("256 values are whole blocks"));
        }
    }
}
