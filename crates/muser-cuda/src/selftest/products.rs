//! Products of random blocks against a scalar loop in the order of `muser_backend::arith`.
//!
//! Odd numbers of rows and tokens, every kernel variant. The loop gets a block's integers from the readable dequantiser by
//! setting the block's scales to one, so it shares no layout code with the kernels.

use half::{bf16, f16};
use muser_backend::arith::{MatrixRole, Segments, nvfp4, quantize_block};
use muser_backend::conformance::Random;
use muser_gguf::{GgmlType, dequantize_row, mxfp4_scale};

use super::Card;
use super::rounded::RoundedRow;
use crate::CudaError;
use crate::driver::{Buffer, Launch};
use crate::forward::Activations;
use crate::kernels::{QuantiseArgs, RepackArgs};
use crate::matrix::{AnyKind, Part, Product, RawPart, Tile};

/// Types that products are checked with.
const TYPES: [GgmlType; 17] = [
    GgmlType::Q4_K,
    GgmlType::Q5_K,
    GgmlType::Q6_K,
    GgmlType::Q8_0,
    GgmlType::Q3_K,
    GgmlType::Q4_0,
    GgmlType::Q5_0,
    GgmlType::IQ4_NL,
    GgmlType::Q2_K,
    GgmlType::IQ4_XS,
    GgmlType::Q4_1,
    GgmlType::Q5_1,
    GgmlType::MXFP4,
    GgmlType::NVFP4,
    GgmlType::F32,
    GgmlType::F16,
    GgmlType::BF16,
];
/// Numbers of tokens: each kernel variant, full and partly filled, and several passes.
const TOKENS: [usize; 14] = [1, 2, 7, 8, 9, 16, 17, 29, 33, 64, 65, 128, 129, 300];

/// How much is checked.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    /// Numbers of tokens.
    tokens: &'static [usize],
    rows: usize,
    k: usize,
}

impl Extent {
    /// Every kernel variant, full and partly filled, and several passes.
    pub(super) const FULL: Self = Self { tokens: &TOKENS, rows: 88, k: 1280 };
    /// Every kernel variant once.
    pub(super) const BRIEF: Self = Self { tokens: &[1, 7, 12, 20, 40, 129], rows: 40, k: 768 };
    /// So many rows that the digits of all weights are written first.
    pub(super) const LONG: Self = Self { tokens: &[1024, 1100], rows: 24, k: 768 };
    /// The same, and no more than it takes.
    pub(super) const LONG_BRIEF: Self = Self { tokens: &[1025], rows: 16, k: 768 };
    /// Many rows, for weights rounded to 8 bits: two blocks of tokens, the second partly filled.
    pub(super) const ROUNDED: Self = Self { tokens: &[129, 150, 260], rows: 88, k: 768 };
}

/// Types of [`all_types`] that a product may have.
pub(super) fn all_types() -> Vec<Vec<GgmlType>> {
    let single = TYPES.iter().map(|ty| vec![*ty]);
    let pairs = [GgmlType::Q6_K, GgmlType::Q8_0].map(|other| vec![GgmlType::Q4_K, other]);
    single.chain(pairs).collect()
}

/// Checks one product for each entry of `types`; returns how many values were compared.
pub(super) fn check(
    card: &Card<'_>,
    types: &[Vec<GgmlType>],
    extent: Extent,
    random: &mut Random,
) -> Result<usize, CudaError> {
    let most = extent.tokens.iter().copied().max().unwrap_or(1);
    let x: Vec<f32> = (0..most * extent.k).map(|i| sample(random, i)).collect();
    let bench = Bench { card, extent, x: &x, large: Codes::new(&x, 256), small: Codes::new(&x, 32) };
    let compared =
        types.iter().map(|types| bench.check(types, Tile::of, random)).sum::<Result<usize, _>>()?;
    // What no tile can hold.
    let wide = types.iter().any(|types| types.contains(&GgmlType::NVFP4));
    let wide = if wide { bench.check(&[GgmlType::NVFP4], |_| None, random)? } else { 0 };
    Ok(compared + wide)
}

/// Activations with outliers, zeros and a whole block of zeros.
pub(super) fn sample(random: &mut Random, i: usize) -> f32 {
    if (i / 256).is_multiple_of(7) {
        return 0.0;
    }
    let unit = |r: u64| (r >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
    let v = unit(random.next_u64()) + unit(random.next_u64());
    if random.below(97) == 0 { v * 12.0 } else { v }
}

struct Bench<'a> {
    card: &'a Card<'a>,
    extent: Extent,
    x: &'a [f32],
    /// `x` as types with super-blocks multiply it, and as those with small blocks do.
    large: Codes,
    small: Codes,
}

/// Activations in int8, with a scale for each block.
struct Codes {
    block_len: usize,
    q: Vec<i8>,
    d: Vec<f32>,
}

impl Codes {
    fn new(x: &[f32], block_len: usize) -> Self {
        let mut q = vec![0i8; x.len()];
        let blocks = x.chunks(block_len).zip(q.chunks_mut(block_len));
        let d = blocks.map(|(x, q)| quantize_block(x, q)).collect();
        Self { block_len, q, d }
    }
}

impl Bench<'_> {
    /// One product of matrices of these types, for every number of tokens.
    fn check(
        &self,
        types: &[GgmlType],
        tile_of: impl Fn(GgmlType) -> Option<Tile>,
        random: &mut Random,
    ) -> Result<usize, CudaError> {
        let Card { context, kernels, products, stream } = *self.card;
        let Extent { tokens, rows: all_rows, k } = self.extent;
        let mut product = Product::new(MatrixRole::AttnIn, k);
        let repack = kernels.repack()?;
        let unfit = Buffer::<u32>::zeroed(context, 1, "self-test weights")?;
        let (mut tiles, mut matrices) = (Vec::new(), Vec::new());
        for (i, ty) in types.iter().enumerate() {
            // A part that others follow has whole tiles, the last one need not.
            let rows = if i + 1 < types.len() { all_rows / 16 * 16 } else { all_rows };
            let tile = tile_of(*ty);
            let blocks = random_blocks(*ty, rows * k, tile.is_some(), random);
            let Some(tile) = tile else {
                let raw = Buffer::from_slice(context, &blocks, "self-test weights")?;
                product.raw.push(RawPart {
                    ty: *ty,
                    kind: AnyKind::of(*ty).expect("only supported types are listed"),
                    address: raw.at(0),
                    rows: rows as u32,
                    row_bytes: blocks.len() / rows,
                    first_row: product.out_rows as u32,
                    scale: 1.0,
                });
                matrices.push((*ty, product.out_rows, rows, blocks));
                product.add_rows(rows, 1.0);
                tiles.push(raw);
                continue;
            };
            let row_tiles = rows.div_ceil(16);
            let bytes = row_tiles * (k / 256) * tile.bytes();
            let raw = Buffer::from_slice(context, &blocks, "self-test weights")?;
            let packed = Buffer::<u8>::zeroed(context, bytes, "self-test weights")?;
            let args = RepackArgs {
                src: raw.at(0),
                dst: packed.at(0),
                words: (bytes / 4) as u64,
                rows: rows as u32,
                kb: (k / 256) as u32,
                type_id: ty.id(),
                _padding: 0,
                unfit: unfit.at(0),
            };
            let shape = Launch { overlap: false, ..Launch::new((args.words.div_ceil(256) as u32, 1), 256) };
            stream.launch(&repack[tile as usize], shape, &args)?;
            stream.synchronize()?;
            let mut count = [0u32];
            unfit.read(0, &mut count)?;
            if count != [0] {
                return Err(CudaError::SelfTest {
                    kernel: format!("tiles of {}", ty.name()),
                    what: format!("expected scales that fit, found {} that do not", count[0]),
                });
            }
            product.parts.push(Part {
                tile,
                address: packed.at(0),
                row_tiles: row_tiles as u32,
                first_row: product.out_rows as u32,
            });
            matrices.push((*ty, product.out_rows, rows, blocks));
            product.add_rows(rows, 1.0);
            tiles.push(packed);
        }
        let name = types.iter().map(|t| t.name()).collect::<Vec<_>>().join("+");
        let expected = Expected::new(&matrices, self, k, products.rounds());

        let most = self.x.len() / k;
        let activations = Activations::new(context, most, k, &[&product])?;
        let x = Buffer::from_slice(context, self.x, "self-test activations")?;
        let mut compared = 0;
        for &n in tokens {
            let act = products.input(&product, activations.act, n);
            let shape = Launch { overlap: false, ..Launch::new(((k / 256) as u32, most as u32), 32) };
            stream.launch(&kernels.get("quantise")?, shape, &QuantiseArgs { x: x.at(0), act })?;
            let mut out = vec![f32::NAN; product.output_len(n)];
            let device = Buffer::from_slice(context, &out, "self-test results")?;
            products.multiply(stream, &product, act, device.at(0), n)?;
            stream.synchronize()?;
            device.read(0, &mut out)?;
            for token in 0..n {
                for (row, at) in expected.rows.iter().enumerate() {
                    let place = token * product.out_rows + at;
                    let mut sum = out[place];
                    for s in 1..products.output_segments(&product, n) as usize {
                        sum += out[s * n * product.out_rows + place];
                    }
                    let wanted = expected.values[token * expected.rows.len() + row];
                    compared += 1;
                    if sum.to_bits() != wanted.to_bits() {
                        return Err(CudaError::SelfTest {
                            kernel: format!("product {name}, {n} tokens"),
                            what: format!("token {token}, row {row}: expected {wanted:e}, found {sum:e}"),
                        });
                    }
                }
            }
        }
        Ok(compared)
    }
}

/// `n` values' worth of random blocks with sane scales, which for NVFP4 a tile can hold or not.
fn random_blocks(ty: GgmlType, n: usize, tiled: bool, random: &mut Random) -> Vec<u8> {
    let bytes = ty.row_bytes(n).expect("whole blocks");
    let number = |random: &mut Random| (random.below(2001) as f32 - 1000.0) * 1e-3;
    match ty {
        GgmlType::F32 => return (0..n).flat_map(|_| number(random).to_le_bytes()).collect(),
        GgmlType::F16 => return (0..n).flat_map(|_| f16::from_f32(number(random)).to_le_bytes()).collect(),
        GgmlType::BF16 => return (0..n).flat_map(|_| bf16::from_f32(number(random)).to_le_bytes()).collect(),
        _ => {}
    }
    let mut blocks: Vec<u8> = (0..bytes).map(|_| random.next_u64() as u8).collect();
    for block in blocks.chunks_exact_mut(ty.block_bytes()) {
        for at in scale_places(ty) {
            let d = f16::from_f32((1 + random.below(1000)) as f32 * 1e-5);
            block[*at..*at + 2].copy_from_slice(&d.to_le_bytes());
        }
        if ty == GgmlType::MXFP4 {
            block[0] = 110 + block[0] % 16;
        }
        if ty == GgmlType::NVFP4 && tiled {
            // Exponents of eight octaves, any mantissa; and zeros.
            block[..4]
                .iter_mut()
                .for_each(|scale| *scale = (0x28 + *scale % 64) * u8::from(*scale % 11 != 0));
        }
    }
    blocks
}

/// Byte offsets of the f16 scales in a block: d, then dmin where there is one.
fn scale_places(ty: GgmlType) -> &'static [usize] {
    match ty {
        GgmlType::Q4_K | GgmlType::Q5_K | GgmlType::Q4_1 | GgmlType::Q5_1 => &[0, 2],
        GgmlType::Q2_K => &[80, 82],
        GgmlType::MXFP4 | GgmlType::NVFP4 | GgmlType::F32 | GgmlType::F16 | GgmlType::BF16 => &[],
        GgmlType::Q6_K => &[208],
        GgmlType::Q3_K => &[108],
        _ => &[0],
    }
}

/// Results of the scalar loop, `[token][row]`.
struct Expected {
    /// Place of each row in an output row.
    rows: Vec<usize>,
    values: Vec<f32>,
}

impl Expected {
    fn new(
        matrices: &[(GgmlType, usize, usize, Vec<u8>)],
        bench: &Bench<'_>,
        k: usize,
        rounded: bool,
    ) -> Self {
        let x = bench.x;
        let mut rows = Vec::new();
        let mut columns: Vec<Vec<f32>> = Vec::new();
        for (ty, at, count, blocks) in matrices {
            let row_bytes = blocks.len() / count;
            for (row, bytes) in blocks.chunks_exact(row_bytes).enumerate() {
                rows.push(at + row);
                if AnyKind::of(*ty) == Some(AnyKind::Float) {
                    let mut w = vec![0.0; k];
                    dequantize_row(*ty, bytes, &mut w).expect("whole rows of a float type");
                    columns.push(x.chunks(k).map(|x| float_product(&w, x)).collect());
                    continue;
                }
                if *ty == GgmlType::NVFP4 {
                    let segments = Segments::of(MatrixRole::AttnIn, k);
                    columns.push(x.chunks(k).map(|x| nvfp4::product(bytes, x, segments, 1.0)).collect());
                    continue;
                }
                let small = AnyKind::of(*ty) == Some(AnyKind::Small);
                let Codes { block_len, q, d } = if small { &bench.small } else { &bench.large };
                let codes = q.chunks(k).zip(d.chunks(k / block_len));
                if rounded {
                    let row = RoundedRow::new(*ty, bytes);
                    columns.push(codes.map(|(q, d)| row.product(q, d)).collect());
                    continue;
                }
                let row = ScalarRow::new(*ty, bytes, k);
                columns.push(codes.map(|(q, d)| row.product(q, d, *block_len)).collect());
            }
        }
        let tokens = x.len() / k;
        let values = (0..tokens).flat_map(|t| columns.iter().map(move |c| c[t])).collect();
        Self { rows, values }
    }
}

/// 16 sums by `k % 16`, then a tree.
fn float_product(w: &[f32], x: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 16];
    for (k, (w, x)) in w.iter().zip(x).enumerate() {
        lanes[k % 16] = w.mul_add(*x, lanes[k % 16]);
    }
    for step in [8, 4, 2, 1] {
        for i in 0..step {
            lanes[i] += lanes[i + step];
        }
    }
    lanes[0]
}

/// A weight row as integers (scale times code, and mins) and the float scales of its groups.
struct ScalarRow {
    codes: Vec<i32>,
    /// What is subtracted, times `m`.
    mins: Vec<i32>,
    d: Vec<f32>,
    m: Vec<f32>,
    /// Values that share a float scale.
    group: usize,
}

impl ScalarRow {
    fn new(ty: GgmlType, bytes: &[u8], k: usize) -> Self {
        let places = scale_places(ty);
        let decode = |d: f32, m: f32| {
            let mut copy = bytes.to_vec();
            for block in copy.chunks_exact_mut(ty.block_bytes()) {
                for (at, value) in places.iter().zip([d, m]) {
                    block[*at..*at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
                }
                if ty == GgmlType::MXFP4 {
                    block[0] = 128; // stands for 2; half of it is the scale
                }
            }
            let mut values = vec![0.0; k];
            dequantize_row(ty, &copy, &mut values).expect("whole blocks of a decodable type");
            values.iter().map(|v| *v as i32).collect::<Vec<i32>>()
        };
        let scales = |which: usize| -> Vec<f32> {
            let scale = |b: &[u8]| match ty {
                GgmlType::MXFP4 => vec![mxfp4_scale(b[0])],
                _ => {
                    vec![places.get(which).map_or(0.0, |at| f16::from_le_bytes([b[*at], b[at + 1]]).to_f32())]
                }
            };
            bytes.chunks_exact(ty.block_bytes()).flat_map(scale).collect()
        };
        // Small blocks add their mins, so subtracting is adding with the other sign.
        let sign = if ty.block_len() == 256 { -1.0 } else { 1.0 };
        let mins: Vec<i32> = if places.len() > 1 { decode(0.0, sign) } else { Vec::new() };
        let mins = if sign > 0.0 { mins.iter().map(|m| -m).collect() } else { mins };
        Self { codes: decode(1.0, 0.0), mins, d: scales(0), m: scales(1), group: ty.block_len() }
    }

    /// The row times activation codes `q` with one scale `d` per `block_len` values.
    fn product(&self, q: &[i8], d: &[f32], block_len: usize) -> f32 {
        let dot = |w: &[i32], q: &[i8]| w.iter().zip(q).map(|(w, q)| w * i32::from(*q)).sum::<i32>();
        let segments = Segments::of(MatrixRole::AttnIn, q.len());
        let mut total = 0.0f32;
        for s in 0..segments.count() {
            let mut acc = 0.0f32;
            let range = segments.range(s);
            for g in range.start * 256 / self.group..range.end * 256 / self.group {
                let at = g * self.group..(g + 1) * self.group;
                let dx = d[at.start / block_len];
                acc = (dot(&self.codes[at.clone()], &q[at.clone()]) as f32).mul_add(self.d[g] * dx, acc);
                if !self.mins.is_empty() {
                    acc = (-(dot(&self.mins[at.clone()], &q[at]) as f32)).mul_add(self.m[g] * dx, acc);
                }
            }
            total = if s == 0 { acc } else { total + acc };
        }
        total
    }
}
