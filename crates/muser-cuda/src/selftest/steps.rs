//! The steps between products and attention, on random rows, against the scalar definitions.

use muser_backend::argmax;
use muser_backend::arith::{self, MatrixRole, ResidualSums};
use muser_backend::conformance::Random;

use super::Card;
use super::products::sample;
use crate::CudaError;
use crate::driver::{Buffer, Launch};
use crate::forward::{Activations, combine_launch, gate_launch, id_of_rank, logit_launch, norm_launch};
use crate::kernels::{CombineArgs, LogitArgs, NormArgs, NormCutArgs, SiluArgs};
use crate::matrix::{Part, Product, Tile};

pub(super) const HEAD: usize = 128;
pub(super) const EPS: f32 = 1e-5;
const POST_EPS: f32 = 1e-8;

/// Checks every kernel; returns how many values were compared.
pub(super) fn check(card: &Card<'_>, random: &mut Random) -> Result<usize, CudaError> {
    let mut compared = 0;
    // With a cluster of CTAs a row on Hopper, and with one CTA.
    for (hidden, factors) in [(2560, true), (512, false)] {
        compared += norms(card, hidden, factors, random)?;
    }
    for factors in [false, true] {
        compared += silu(card, factors, random)?;
        compared += logits(card, factors, random)?;
    }
    // One after the other, and through all stages of the ring in shared memory.
    for (parts, factors) in [(1, true), (8, false), (100, true)] {
        compared += combine(card, parts, factors, random)?;
    }
    Ok(compared)
}

pub(super) fn row(random: &mut Random, len: usize) -> Vec<f32> {
    // From 256 on: the first values of `sample` are zeros.
    (0..len).map(|i| sample(random, 256 + i)).collect()
}

/// Factors of a product's output rows.
pub(super) struct Factors {
    values: Vec<f32>,
    on_card: Option<Buffer<f32>>,
}

impl Factors {
    /// All 1, or from 0.5 to 1.5.
    pub(super) fn of(
        card: &Card<'_>,
        width: usize,
        random: &mut Random,
        on: bool,
    ) -> Result<Self, CudaError> {
        if !on {
            return Ok(Self { values: vec![1.0; width], on_card: None });
        }
        let values: Vec<f32> = (0..width).map(|_| 0.5 + random.below(1001) as f32 * 1e-3).collect();
        let on_card = Some(Buffer::from_slice(card.context, &values, "self-test factors")?);
        Ok(Self { values, on_card })
    }

    /// As kernels want it.
    pub(super) fn address(&self) -> u64 {
        self.on_card.as_ref().map_or(0, |buffer| buffer.at(0))
    }
}

/// Sum of the segments of values `at .. at + len` of row `r` in `[segments][n][width]`, times their factors.
pub(super) fn summed(
    part: &[f32],
    factors: &Factors,
    (n, width): (usize, usize),
    r: usize,
    at: usize,
    len: usize,
) -> Vec<f32> {
    let mut rows = part.chunks_exact(n * width).map(|segment| &segment[r * width + at..][..len]);
    let mut sum = rows.next().map_or_else(Vec::new, <[f32]>::to_vec);
    rows.for_each(|row| sum.iter_mut().zip(row).for_each(|(s, v)| *s += v));
    sum.iter_mut().zip(&factors.values[at..]).for_each(|(s, factor)| *s *= factor);
    sum
}

/// Compares bits.
pub(super) fn same(kernel: &str, what: &str, expected: &[f32], found: &[f32]) -> Result<usize, CudaError> {
    match expected.iter().zip(found).position(|(e, f)| e.to_bits() != f.to_bits()) {
        None => Ok(expected.len()),
        Some(at) => Err(CudaError::SelfTest {
            kernel: kernel.to_owned(),
            what: format!("{what} {at}: expected {:e}, found {:e}", expected[at], found[at]),
        }),
    }
}

pub(super) fn read(buffer: &Buffer<f32>, len: usize) -> Result<Vec<f32>, CudaError> {
    let mut values = vec![f32::NAN; len];
    buffer.read(0, &mut values)?;
    Ok(values)
}

/// A buffer of quantised activations for `rows` rows.
pub(super) fn activations(card: &Card<'_>, rows: usize, k: usize) -> Result<Activations, CudaError> {
    let mut reader = Product::new(MatrixRole::AttnOut, k);
    reader.parts.push(Part { tile: Tile::Q4K, address: 0, row_tiles: 0, first_row: 0 });
    Activations::new(card.context, rows, k, &[&reader])
}

/// What quantised activations stand for: code times scale, `[rows][k]`.
pub(super) fn dequantised(activations: &Activations, rows: usize) -> Result<Vec<f32>, CudaError> {
    let act = activations.act;
    let (k, ld) = (act.k as usize, act.ld as usize);
    let mut codes = vec![0u8; rows * k];
    activations.read(act.q, &mut codes)?;
    let mut scales = vec![0u8; k / 256 * ld * 4];
    activations.read(act.d, &mut scales)?;
    let scale = |block: usize, row: usize| {
        let at = (block * ld + row) * 4;
        f32::from_le_bytes([scales[at], scales[at + 1], scales[at + 2], scales[at + 3]])
    };
    // `perm64` of kernels/common.cuh.
    let place =
        |i: usize| (i & !63) + ((i & 15) >> 2) * 16 + ((i >> 5) & 1) * 8 + ((i >> 4) & 1) * 4 + (i & 3);
    let value = |row: usize, i: usize| {
        f32::from(codes[row * k + i / 256 * 256 + place(i % 256)] as i8) * scale(i / 256, row)
    };
    Ok((0..rows).flat_map(|row| (0..k).map(move |i| (row, i))).map(|(row, i)| value(row, i)).collect())
}

/// What [`dequantised`] gives if `x` was quantised.
pub(super) fn quantised(x: &[f32]) -> Vec<f32> {
    let mut codes = [0i8; 256];
    x.chunks(256)
        .flat_map(|x| {
            let d = arith::quantize_block(x, &mut codes);
            codes.map(|q| f32::from(q) * d)
        })
        .collect()
}

fn norms(card: &Card<'_>, hidden: usize, factors: bool, random: &mut Random) -> Result<usize, CudaError> {
    let (n, segments) = (3, 4);
    let factors = Factors::of(card, hidden, random, factors)?;
    let (h, part) = (row(random, n * hidden), row(random, segments * n * hidden));
    let (post, w) = (row(random, hidden), row(random, hidden));
    let buffer = |values: &[f32]| Buffer::from_slice(card.context, values, "self-test rows");
    let (h_on, part_on, post_on, w_on) = (buffer(&h)?, buffer(&part)?, buffer(&post)?, buffer(&w)?);
    let y_on = buffer(&vec![f32::NAN; n * hidden])?;
    let target = activations(card, n, hidden)?;
    let args = NormArgs {
        part: part_on.at(0),
        factors: factors.address(),
        h: h_on.at(0),
        post: post_on.at(0),
        w: w_on.at(0),
        y: y_on.at(0),
        act: target.act,
        segments: segments as u32,
        n: n as u32,
        hidden: hidden as u32,
        eps: EPS,
        post_eps: POST_EPS,
        ..NormArgs::default()
    };
    card.stream.launch(&card.kernels.get("norm_rows")?, norm_launch(card.context.arch, hidden, n), &args)?;
    card.stream.synchronize()?;
    let residual = read(&h_on, n * hidden)?;
    let (mut sums, mut normed, mut cut_factors) = (Vec::new(), Vec::new(), Vec::new());
    for (r, h) in h.chunks(hidden).enumerate() {
        let o = summed(&part, &factors, (n, hidden), r, 0, hidden);
        let s = ResidualSums::of(h, &o, &post);
        let c = s.post_factor(POST_EPS);
        let factor = s.next_factor(c, EPS);
        cut_factors.push(factor);
        for i in 0..hidden {
            let sum = c.mul_add(o[i] * post[i], h[i]);
            sums.push(sum);
            normed.push(sum * factor * w[i]);
        }
    }
    let codes = quantised(&normed);
    let at_cut = norms_at_a_cut(card, &args, (&h, &h_on), (&sums, &normed), &cut_factors)?;
    Ok(at_cut
        + same("norm_rows", "residual", &sums, &residual)?
        + same("norm_rows", "normed value", &normed, &read(&y_on, n * hidden)?)?
        + same("norm_rows", "quantised value", &codes, &dequantised(&target, n)?)?)
}

/// The norm on both sides of a cut: before it the factors are kept, behind it they are taken.
fn norms_at_a_cut(
    card: &Card<'_>,
    args: &NormArgs,
    (h, h_on): (&[f32], &Buffer<f32>),
    (sums, normed): (&[f32], &[f32]),
    factors: &[f32],
) -> Result<usize, CudaError> {
    let (hidden, n) = (args.hidden as usize, args.n as usize);
    let cut_on = Buffer::from_slice(card.context, &vec![f32::NAN; n], "self-test rows")?;
    let y_on = Buffer::from_slice(card.context, &vec![f32::NAN; n * hidden], "self-test rows")?;
    let norm = NormArgs { y: y_on.at(0), ..*args };
    let shape = norm_launch(card.context.arch, hidden, n);
    let run = |norm: NormArgs| {
        let cut = NormCutArgs { norm, cut: cut_on.at(0) };
        card.stream.launch(&card.kernels.get("norm_cut")?, shape, &cut)?;
        card.stream.synchronize()
    };
    h_on.write(0, h)?;
    run(norm)?;
    let mut compared = same("norm_cut", "residual", sums, &read(h_on, n * hidden)?)?
        + same("norm_cut", "factor", factors, &read(&cut_on, n)?)?;
    y_on.write(0, &vec![f32::NAN; n * hidden])?;
    run(NormArgs { part: 0, ..norm })?;
    compared += same("norm_cut", "normed value", normed, &read(&y_on, n * hidden)?)?;
    Ok(compared)
}

fn silu(card: &Card<'_>, factors: bool, random: &mut Random) -> Result<usize, CudaError> {
    let (n, ffn, segments) = (2, 512, 2);
    let factors = Factors::of(card, 2 * ffn, random, factors)?;
    let part = row(random, segments * n * 2 * ffn);
    let part_on = Buffer::from_slice(card.context, &part, "self-test rows")?;
    let target = activations(card, n, ffn)?;
    let args = SiluArgs {
        part: part_on.at(0),
        factors: factors.address(),
        act: target.act,
        segments: segments as u32,
        n: n as u32,
        ffn: ffn as u32,
    };
    card.stream.launch(&card.kernels.get("silu_rows")?, Launch::new((1, n as u32), 128), &args)?;
    card.stream.synchronize()?;
    let products = (0..n).flat_map(|r| {
        let values = summed(&part, &factors, (n, 2 * ffn), r, 0, 2 * ffn);
        (0..ffn).map(|i| arith::silu_times(values[i], values[ffn + i])).collect::<Vec<_>>()
    });
    same("silu_rows", "value", &quantised(&products.collect::<Vec<_>>()), &dequantised(&target, n)?)
}

/// Norm and rotation of a head.
pub(super) fn rotated(x: &[f32], weight: &[f32], angles: &[f32]) -> Vec<f32> {
    let r = arith::inverse_rms(arith::row_dot(x, x), HEAD, EPS);
    let x: Vec<f32> = x.iter().zip(weight).map(|(x, w)| x * r * w).collect();
    let pairs = x.chunks(2).zip(angles.chunks(2));
    pairs.flat_map(|(x, cs)| [x[0] * cs[0] - x[1] * cs[1], x[0] * cs[1] + x[1] * cs[0]]).collect()
}

fn logits(card: &Card<'_>, factors: bool, random: &mut Random) -> Result<usize, CudaError> {
    let (n, segments, vocab, out_rows) = (2usize, 2usize, 777usize, 784usize);
    let factors = Factors::of(card, out_rows, random, factors)?;
    let (scale, cap) = (0.75f32, 20.0f32);
    let part: Vec<f32> = row(random, segments * n * out_rows).iter().map(|v| v * 9.0).collect();
    let part_on = Buffer::from_slice(card.context, &part, "self-test rows")?;
    let logits_on = Buffer::from_slice(card.context, &vec![f32::NAN; n * vocab], "self-test rows")?;
    let best_on = Buffer::<u64>::zeroed(card.context, n, "self-test rows")?;
    let args = LogitArgs {
        part: part_on.at(0),
        factors: factors.address(),
        logits: logits_on.at(0),
        best: best_on.at(0),
        segments: segments as u32,
        n: n as u32,
        out_rows: out_rows as u32,
        vocab: vocab as u32,
        scale,
        cap,
    };
    card.stream.launch(&card.kernels.get("logit_rows")?, logit_launch(vocab, n), &args)?;
    card.stream.synchronize()?;
    let mut best = vec![0u64; n];
    best_on.read(0, &mut best)?;
    let mut expected = Vec::new();
    for (r, &best) in best.iter().enumerate() {
        let sums = summed(&part, &factors, (n, out_rows), r, 0, vocab);
        let values: Vec<f32> = sums.iter().map(|z| cap * arith::tanh(z * scale / cap)).collect();
        let (wanted, found) = (argmax(&values), id_of_rank(best));
        if wanted != found {
            let what = format!("largest of row {r}: expected {wanted:?}, found {found:?}");
            return Err(CudaError::SelfTest { kernel: "logit_rows".to_owned(), what });
        }
        expected.extend(values);
    }
    same("logit_rows", "logit", &expected, &read(&logits_on, n * vocab)?)
}

/// Three rows in two tiles, of two query heads on each of two KV heads: what the attention kernels put out for a row, added up,
/// gated (or not, as for a draft) and quantised.
fn combine(card: &Card<'_>, parts: usize, factors: bool, random: &mut Random) -> Result<usize, CudaError> {
    let (n, kv_heads, group, segments) = (3usize, 2usize, 2usize, 2usize);
    let k = kv_heads * group * HEAD;
    let (gate_at, width) = (HEAD, HEAD + k);
    let all = 2 * kv_heads * parts;
    let factors = Factors::of(card, width, random, factors)?;
    let part_o = row(random, all * 16 * HEAD);
    // Sums of probabilities: positive.
    let part_l: Vec<f32> = row(random, all * 16).iter().map(|v| v.abs() + 0.25).collect();
    let qkvg = row(random, segments * n * width);
    let row_tile = [0u32, 0, 1];
    let tile = |first_row: usize, count: usize, part: usize| {
        [first_row, count, 0, 0, 0, parts, part, parts].map(|v| v as u32)
    };
    let tiles = [tile(0, 2, 0), tile(2, 1, kv_heads * parts)];
    let floats = |values: &[f32]| Buffer::from_slice(card.context, values, "self-test sums");
    let words = |values: &[u32]| Buffer::from_slice(card.context, values, "self-test data");
    let (o_on, l_on, qkvg_on) = (floats(&part_o)?, floats(&part_l)?, floats(&qkvg)?);
    let (tiles_on, row_tile_on) = (words(tiles.as_flattened())?, words(&row_tile)?);

    let whole: Vec<f32> = (0..n * kv_heads * group)
        .flat_map(|i| {
            let (r, head) = (i / (kv_heads * group), i % (kv_heads * group));
            let [first_row, _, _, _, _, _, part, _] = tiles[row_tile[r] as usize].map(|v| v as usize);
            let (first, m) = (part + head / group * parts, (r - first_row) * group + head % group);
            let places = (first..first + parts).map(|p| p * 16 + m);
            let l = places.clone().fold(0.0f32, |l, at| l + part_l[at]);
            let sum = |d: usize| places.clone().fold(0.0f32, |o, at| o + part_o[at * HEAD + d]);
            (0..HEAD).map(|d| sum(d) * (1.0 / l)).collect::<Vec<f32>>()
        })
        .collect();
    let gates = (0..n).flat_map(|r| summed(&qkvg, &factors, (n, width), r, gate_at, k));
    let gated: Vec<f32> = whole.iter().zip(gates).map(|(o, z)| o * arith::sigmoid(z)).collect();

    let (few, many) = (combine_launch(k, n), gate_launch(k, n));
    let mut compared = 0;
    for (name, shape, gate, expected) in [
        ("digits_combine", few, qkvg_on.at(0), &gated),
        ("digits_combine", few, 0, &whole),
        ("digits_gate", many, qkvg_on.at(0), &gated),
    ] {
        let target = activations(card, n, k)?;
        let args = CombineArgs {
            part_o: o_on.at(0),
            part_l: l_on.at(0),
            tiles: tiles_on.at(0),
            row_tile: row_tile_on.at(0),
            qkvg: gate,
            factors: factors.address(),
            act: target.act,
            segments: segments as u32,
            n: n as u32,
            width: width as u32,
            gate_at: gate_at as u32,
            group: group as u32,
        };
        card.stream.launch(&card.kernels.get(name)?, shape, &args)?;
        card.stream.synchronize()?;
        compared += same(name, "output", &quantised(expected), &dequantised(&target, n)?)?;
    }
    Ok(compared)
}
