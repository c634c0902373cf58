//! The steps between products and attention, on random rows, against the scalar definitions.

use half::f16;
use muser_backend::argmax;
use muser_backend::arith::{self, MatrixRole, ResidualSums};
use muser_backend::conformance::Random;
use muser_kv::BLOCK_LEN;

use super::Card;
use super::products::sample;
use crate::CudaError;
use crate::driver::{Buffer, Launch};
use crate::forward::{
    Activations, COMBINE_RING_BYTES, EXACT_SHARED_BYTES, EXACT_THREADS, id_of_rank, logit_launch,
    norm_launch, short_launch,
};
use crate::kernels::{
    AttnArgs, CombineArgs, ExactArgs, LogitArgs, NormArgs, RopeArgs, ShortArgs, SiluArgs, Tuning,
};
use crate::matrix::{Part, Product, Tile};

pub(super) const HEAD: usize = 128;
pub(super) const EPS: f32 = 1e-5;
const POST_EPS: f32 = 1e-8;

/// Checks every kernel; returns how many values were compared.
pub(super) fn check(card: &Card<'_>, random: &mut Random) -> Result<usize, CudaError> {
    let mut compared = 0;
    // With a cluster of CTAs a row on Hopper, and with one CTA.
    for hidden in [2560, 512] {
        compared += norms(card, hidden, random)?;
    }
    compared += silu(card, random)?;
    for exact in [true, false] {
        compared += rope(card, exact, random)?;
    }
    compared += logits(card, random)?;
    for window in [0, 100] {
        compared += attention(card, window, random)?;
    }
    for (kv_heads, group) in [(1, 16), (2, 2), (2, 1)] {
        for (position, window) in [(0, 0), (41, 0), (41, 17), (127, 0), (128, 0), (255, 0), (255, 100)] {
            compared += short_attention(card, (kv_heads, group), (position, window), random)?;
        }
    }
    Ok(compared)
}

pub(super) fn row(random: &mut Random, len: usize) -> Vec<f32> {
    // From 256 on: the first values of `sample` are zeros.
    (0..len).map(|i| sample(random, 256 + i)).collect()
}

/// Sum of the segments of values `at .. at + len` of row `r` in `[segments][n][width]`.
pub(super) fn summed(part: &[f32], (n, width): (usize, usize), r: usize, at: usize, len: usize) -> Vec<f32> {
    let mut rows = part.chunks_exact(n * width).map(|segment| &segment[r * width + at..][..len]);
    let mut sum = rows.next().map_or_else(Vec::new, <[f32]>::to_vec);
    rows.for_each(|row| sum.iter_mut().zip(row).for_each(|(s, v)| *s += v));
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

fn norms(card: &Card<'_>, hidden: usize, random: &mut Random) -> Result<usize, CudaError> {
    let (n, segments) = (3, 4);
    let (h, part) = (row(random, n * hidden), row(random, segments * n * hidden));
    let (post, w) = (row(random, hidden), row(random, hidden));
    let buffer = |values: &[f32]| Buffer::from_slice(card.context, values, "self-test rows");
    let (h_on, part_on, post_on, w_on) = (buffer(&h)?, buffer(&part)?, buffer(&post)?, buffer(&w)?);
    let y_on = buffer(&vec![f32::NAN; n * hidden])?;
    let target = activations(card, n, hidden)?;
    let args = NormArgs {
        part: part_on.at(0),
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
    let (mut sums, mut normed) = (Vec::new(), Vec::new());
    for (r, h) in h.chunks(hidden).enumerate() {
        let o = summed(&part, (n, hidden), r, 0, hidden);
        let s = ResidualSums::of(h, &o, &post);
        let c = s.post_factor(POST_EPS);
        let factor = s.next_factor(c, EPS);
        for i in 0..hidden {
            let sum = c.mul_add(o[i] * post[i], h[i]);
            sums.push(sum);
            normed.push(sum * factor * w[i]);
        }
    }
    let codes = quantised(&normed);
    Ok(same("norm_rows", "residual", &sums, &read(&h_on, n * hidden)?)?
        + same("norm_rows", "normed value", &normed, &read(&y_on, n * hidden)?)?
        + same("norm_rows", "quantised value", &codes, &dequantised(&target, n)?)?)
}

fn silu(card: &Card<'_>, random: &mut Random) -> Result<usize, CudaError> {
    let (n, ffn, segments) = (2, 512, 2);
    let part = row(random, segments * n * 2 * ffn);
    let part_on = Buffer::from_slice(card.context, &part, "self-test rows")?;
    let target = activations(card, n, ffn)?;
    let args = SiluArgs {
        part: part_on.at(0),
        act: target.act,
        segments: segments as u32,
        n: n as u32,
        ffn: ffn as u32,
    };
    card.stream.launch(&card.kernels.get("silu_rows")?, Launch::new((1, n as u32), 128), &args)?;
    card.stream.synchronize()?;
    let products = (0..n).flat_map(|r| {
        let values = summed(&part, (n, 2 * ffn), r, 0, 2 * ffn);
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

fn rope(card: &Card<'_>, exact: bool, random: &mut Random) -> Result<usize, CudaError> {
    let (n, heads, segments) = (2, 4, 3);
    let (k_at, v_at, width) = (heads * HEAD, 2 * heads * HEAD + HEAD, 2 * heads * HEAD + 2 * HEAD);
    let part = row(random, segments * n * width);
    let weights = row(random, 2 * HEAD);
    let angles: Vec<f32> = (0..n * HEAD / 2)
        .flat_map(|i| {
            <[f32; 2]>::from(arith::rotation(i / (HEAD / 2) * 77, 1.0 / (1 + i % (HEAD / 2)) as f64))
        })
        .collect();
    // Row 0 at the end of block 1, row 1 at the start of block 0.
    let places = [(1usize, 255usize), (0, 3)];
    let data: Vec<u32> = [0, 1].into_iter().chain(places.map(|(b, p)| (b * BLOCK_LEN + p) as u32)).collect();
    let floats = |values: &[f32]| Buffer::from_slice(card.context, values, "self-test rows");
    let (part_on, weights_on, angles_on) = (floats(&part)?, floats(&weights)?, floats(&angles)?);
    let data_on = Buffer::from_slice(card.context, &data, "self-test positions")?;
    let block_halves = 2 * BLOCK_LEN * HEAD;
    let kv_on = Buffer::<u16>::zeroed(card.context, 2 * block_halves, "self-test KV")?;
    let q_on = Buffer::<f32>::zeroed(card.context, n * heads * HEAD, "self-test queries")?;
    let q_scale = 0.17f32;
    let args = RopeArgs {
        part: part_on.at(0),
        q_norm: weights_on.at(0),
        k_norm: weights_on.at(HEAD),
        angles: angles_on.at(0),
        positions: data_on.at(0),
        slots: data_on.at(2),
        q: q_on.at(0),
        q_exact: q_on.at(0),
        exact_below: if exact { u32::MAX } else { 0 },
        kv: kv_on.at(0),
        block_halves: block_halves as u64,
        segments: segments as u32,
        n: n as u32,
        heads: heads as u32,
        kv_heads: 1,
        width: width as u32,
        k_at: k_at as u32,
        v_at: v_at as u32,
        eps: EPS,
        q_scale,
        f: 0,
    };
    let grid = ((heads + 2).div_ceil(4) as u32, n as u32);
    card.stream.launch(&card.kernels.get("rope_rows")?, Launch::new(grid, 128), &args)?;
    card.stream.synchronize()?;
    let mut kv = vec![0u16; 2 * block_halves];
    kv_on.read(0, &mut kv)?;
    let bits = read(&q_on, n * heads * HEAD)?;
    let stored = |x: f32| f16::from_f32(x.clamp(-65504.0, 65504.0)).to_f32();
    let mut compared = 0;
    for (r, (block, position)) in places.into_iter().enumerate() {
        let angles = &angles[r * HEAD..][..HEAD];
        for head in 0..heads {
            let x = summed(&part, (n, width), r, head * HEAD, HEAD);
            let q = rotated(&x, &weights[..HEAD], angles);
            let at = (r * heads + head) * HEAD;
            let (expected, found): (Vec<f32>, Vec<f32>) = if exact {
                (q, bits[at..at + HEAD].to_vec())
            } else {
                // Two halves in every f32.
                let half = |i: usize| {
                    let word = bits[at / 2 + i / 2].to_bits();
                    f16::from_bits((word >> (16 * (i % 2))) as u16).to_f32()
                };
                let rounded = q.iter().map(|q| f16::from_f32(q * q_scale).to_f32()).collect();
                (rounded, (0..HEAD).map(half).collect())
            };
            compared += same("rope_rows", "query value", &expected, &found)?;
        }
        let half = |at: usize| f16::from_bits(kv[block * block_halves + at]).to_f32();
        let k = rotated(&summed(&part, (n, width), r, k_at, HEAD), &weights[HEAD..], angles);
        let k: Vec<f32> = k.into_iter().map(stored).collect();
        let v: Vec<f32> = summed(&part, (n, width), r, v_at, HEAD).into_iter().map(stored).collect();
        let k_found: Vec<f32> = (0..HEAD).map(|d| half(position * HEAD + d)).collect();
        let v_found: Vec<f32> =
            (0..HEAD).map(|d| half(BLOCK_LEN * HEAD + d * BLOCK_LEN + position)).collect();
        compared += same("rope_rows", "key value", &k, &k_found)? + same("rope_rows", "value", &v, &v_found)?;
    }
    Ok(compared)
}

fn logits(card: &Card<'_>, random: &mut Random) -> Result<usize, CudaError> {
    let (n, segments, vocab, out_rows) = (2usize, 2usize, 777usize, 784usize);
    let (scale, cap) = (0.75f32, 20.0f32);
    let part: Vec<f32> = row(random, segments * n * out_rows).iter().map(|v| v * 9.0).collect();
    let part_on = Buffer::from_slice(card.context, &part, "self-test rows")?;
    let logits_on = Buffer::from_slice(card.context, &vec![f32::NAN; n * vocab], "self-test rows")?;
    let best_on = Buffer::<u64>::zeroed(card.context, n, "self-test rows")?;
    let args = LogitArgs {
        part: part_on.at(0),
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
        let sums = summed(&part, (n, out_rows), r, 0, vocab);
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

/// One row of 16 query heads and one key head at position 300: two blocks, the second partly seen.
fn attention(card: &Card<'_>, window: usize, random: &mut Random) -> Result<usize, CudaError> {
    let (heads, position) = (16usize, 300usize);
    let width = heads * HEAD;
    let (q, gate) = (row(random, width), row(random, width));
    let block_halves = 2 * BLOCK_LEN * HEAD;
    let kv: Vec<u16> = row(random, 2 * block_halves).iter().map(|v| f16::from_f32(*v).to_bits()).collect();
    let q_scale = std::f32::consts::LOG2_E / (HEAD as f32).sqrt();
    let q_half: Vec<u16> = q.iter().map(|q| f16::from_f32(q * q_scale).to_bits()).collect();
    let first = if window == 0 { 0 } else { position + 1 - window };
    let expected: Vec<f32> = (0..heads)
        .flat_map(|head| attended(&q[head * HEAD..][..HEAD], &kv, first, position + 1))
        .zip(&gate)
        .map(|(o, g)| o * arith::sigmoid(*g))
        .collect();
    let (codes, largest) = (quantised(&expected), expected.iter().fold(0.0f32, |m, v| m.max(v.abs())));

    let (q_on, q_half_on) = (
        Buffer::from_slice(card.context, &q, "self-test queries")?,
        Buffer::from_slice(card.context, &q_half, "self-test queries")?,
    );
    let (gate_on, kv_on) = (
        Buffer::from_slice(card.context, &gate, "self-test rows")?,
        Buffer::from_slice(card.context, &kv, "self-test KV")?,
    );
    let part_o = Buffer::<f32>::zeroed(card.context, 2 * heads * HEAD, "self-test sums")?;
    let part_l = Buffer::<f32>::zeroed(card.context, 2 * heads * 2, "self-test sums")?;
    let target = activations(card, 1, width)?;
    let tuning = Tuning::of(card.context.arch);
    let mut compared = 0;
    for split in [true, false] {
        // counts, tables, row_tile and padding, a tile, a group of one tile.
        let parts = if split { 2 } else { 1 };
        let data = [parts, 1, 1, 0, 0, 0, 0, 0, 0, 1, position as u32, 0, 0, 2, 0, parts, 0, 1];
        let kv_table = [1u32, 0];
        let data_on = Buffer::from_slice(card.context, &data, "self-test data")?;
        let table_on = Buffer::from_slice(card.context, &kv_table, "self-test data")?;
        let fast = AttnArgs {
            q: q_half_on.at(0),
            kv: kv_on.at(0),
            block_halves: block_halves as u64,
            tiles: data_on.at(8),
            groups: data_on.at(16),
            counts: data_on.at(0),
            tables: table_on.at(0),
            part_o: part_o.at(0),
            part_l: part_l.at(0),
            heads: heads as u32,
            kv_heads: 1,
            group: heads as u32,
            window: window as u32,
        };
        let exact = ExactArgs {
            q: q_on.at(0),
            kv: fast.kv,
            block_halves: fast.block_halves,
            tiles: fast.tiles,
            groups: fast.groups,
            counts: fast.counts,
            tables: fast.tables,
            part_o: fast.part_o,
            part_ml: fast.part_l,
            heads: fast.heads,
            kv_heads: 1,
            group: fast.group,
            window: fast.window,
            group_tiles: 1,
            scale: 1.0 / (HEAD as f32).sqrt(),
            ..ExactArgs::default()
        };
        let combine = CombineArgs {
            part_o: fast.part_o,
            part_l: fast.part_l,
            tiles: fast.tiles,
            row_tile: data_on.at(3),
            qkvg: gate_on.at(0),
            act: target.act,
            segments: 1,
            n: 1,
            width: width as u32,
            gate_at: 0,
            group: fast.group,
        };
        let exact_shape = Launch { shared_bytes: EXACT_SHARED_BYTES, ..Launch::new((2, 1), EXACT_THREADS) };
        let exact_shape = if split { exact_shape } else { Launch { grid: (1, 1), ..exact_shape } };
        let name = if split { "exact_split" } else { "exact_walk" };
        card.stream.launch(&card.kernels.get(name)?, exact_shape, &exact)?;
        let grid = ((width / 256) as u32, 1);
        card.stream.launch(&card.kernels.get("exact_combine")?, Launch::new(grid, 256), &combine)?;
        card.stream.synchronize()?;
        compared += same(name, "output", &codes, &dequantised(&target, 1)?)?;

        let (name, shape, combiner, combiner_shape) = if split {
            let Tuning { split_warps: warps, .. } = tuning;
            let shape = Launch {
                shared_bytes: warps * 32768 + 4 * 16 * 132 * 4,
                ..Launch::new((card.context.multiprocessors, 1), warps * 32)
            };
            let combine = Launch { shared_bytes: COMBINE_RING_BYTES, ..Launch::new(grid, 256) };
            ("attend_split", shape, "attend_combine", combine)
        } else {
            let Tuning { many_warps: warps, .. } = tuning;
            let shape = Launch { shared_bytes: 2 * 32768 + warps * 8192, ..Launch::new((1, 1), warps * 32) };
            ("attend_many", shape, "attend_gate", Launch::new((grid.0.div_ceil(4), 1), 128))
        };
        card.stream.launch(&card.kernels.get(name)?, shape, &fast)?;
        card.stream.launch(&card.kernels.get(combiner)?, combiner_shape, &combine)?;
        card.stream.synchronize()?;
        // f16 probabilities, and half a step of the code.
        let far = |(e, f): (&f32, &f32)| (e - f).is_nan() || (e - f).abs() > 0.01 * largest;
        let found = dequantised(&target, 1)?;
        if let Some(at) = expected.iter().zip(&found).position(far) {
            return Err(CudaError::SelfTest {
                kernel: name.to_owned(),
                what: format!("output {at}: expected about {:e}, found {:e}", expected[at], found[at]),
            });
        }
        compared += found.len();
    }
    Ok(compared)
}

/// One row in the first block of its sequence, which is block 1 in memory.
fn short_attention(
    card: &Card<'_>,
    (kv_heads, group): (usize, usize),
    (position, window): (usize, usize),
    random: &mut Random,
) -> Result<usize, CudaError> {
    let heads = kv_heads * group;
    let width = heads * HEAD;
    let (q, gate) = (row(random, width), row(random, width));
    let half = BLOCK_LEN * HEAD;
    let per_head: Vec<Vec<u16>> = (0..kv_heads)
        .map(|_| row(random, 4 * half).iter().map(|v| f16::from_f32(*v).to_bits()).collect())
        .collect();
    // Blocks hold K of all heads, then V of all heads.
    let kv: Vec<u16> = (0..4)
        .flat_map(|part| per_head.iter().flat_map(move |h| &h[part * half..][..half]))
        .copied()
        .collect();
    let first = if window == 0 { 0 } else { (position + 1).saturating_sub(window) };
    let expected: Vec<f32> = (0..heads)
        .flat_map(|head| attended(&q[head * HEAD..][..HEAD], &per_head[head / group], first, position + 1))
        .zip(&gate)
        .map(|(o, g)| o * arith::sigmoid(*g))
        .collect();
    let codes = quantised(&expected);

    let floats = |values: &[f32]| Buffer::from_slice(card.context, values, "self-test rows");
    let (q_on, gate_on) = (floats(&q)?, floats(&gate)?);
    let kv_on = Buffer::from_slice(card.context, &kv, "self-test KV")?;
    let data_on = Buffer::from_slice(card.context, &[0, (BLOCK_LEN + position) as u32], "self-test data")?;
    let target = activations(card, 1, width)?;
    let mut compared = 0;
    // Few rows and many; what was written before this step is fetched before the wait.
    for (rows, recent) in [(1, 1), (1, BLOCK_LEN), (1000, 16)] {
        let args = ShortArgs {
            q: q_on.at(0),
            kv: kv_on.at(0),
            block_halves: (2 * kv_heads * half) as u64,
            rows: data_on.at(0),
            slots: data_on.at(1),
            qkvg: gate_on.at(0),
            act: target.act,
            segments: 1,
            n: 1,
            width: width as u32,
            gate_at: 0,
            heads: heads as u32,
            kv_heads: kv_heads as u32,
            group: group as u32,
            window: window as u32,
            recent: recent as u32,
            scale: 1.0 / (HEAD as f32).sqrt(),
        };
        let (variant, shape) = short_launch(&args, rows);
        let name = ["attend_short_1", "attend_short_2", "attend_short_8"][variant];
        let shape = Launch { grid: (shape.grid.0, 1), ..shape };
        card.stream.launch(&card.kernels.get(name)?, shape, &args)?;
        card.stream.synchronize()?;
        compared += same(name, "output", &codes, &dequantised(&target, 1)?)?;
    }
    Ok(compared)
}

/// Attention of one query over positions `first .. end`. The table of the test swaps the blocks: block 0 of the sequence
/// is the second in memory.
fn attended(q: &[f32], kv: &[u16], first: usize, end: usize) -> Vec<f32> {
    let blocks = (first / BLOCK_LEN..end.div_ceil(BLOCK_LEN)).map(|block| {
        let at = block * BLOCK_LEN;
        let seen = first.max(at) - at..end.min(at + BLOCK_LEN) - at;
        (&kv[(1 - block) * 2 * BLOCK_LEN * HEAD..][..2 * BLOCK_LEN * HEAD], seen)
    });
    attended_over(q, &blocks.collect::<Vec<_>>())
}

/// Attention of one query over the positions that it sees of some blocks. A block holds K as `[256][128]`, then V as
/// `[128][256]`.
pub(super) fn attended_over(q: &[f32], blocks: &[(&[u16], std::ops::Range<usize>)]) -> Vec<f32> {
    let scale = 1.0 / (HEAD as f32).sqrt();
    let (mut top, mut total, mut out) = (f32::NEG_INFINITY, 0.0f32, vec![0.0f32; HEAD]);
    for (memory, seen) in blocks {
        let half = |at: usize| f16::from_bits(memory[at]).to_f32();
        let mut p = [f32::NEG_INFINITY; BLOCK_LEN];
        for j in seen.clone() {
            p[j] = (0..HEAD).fold(0.0f32, |s, d| q[d].mul_add(half(j * HEAD + d), s)) * scale;
        }
        let m = p.iter().fold(f32::NEG_INFINITY, |a, &b| if a > b { a } else { b });
        let mut lanes = [0.0f32; 16];
        for (j, p) in p.iter_mut().enumerate() {
            *p = arith::exp(*p - m);
            lanes[j % 16] += *p;
        }
        for step in [8, 4, 2, 1] {
            for i in 0..step {
                lanes[i] += lanes[i + step];
            }
        }
        let v = BLOCK_LEN * HEAD;
        let new_top = if top > m { top } else { m };
        let (a, b) = (arith::exp(top - new_top), arith::exp(m - new_top));
        total = total.mul_add(a, lanes[0] * b);
        top = new_top;
        for (d, out) in out.iter_mut().enumerate() {
            let chain =
                (0..BLOCK_LEN).fold(0.0f32, |o, j| p[j].mul_add(half(v + d * BLOCK_LEN + j), o)) + 0.0;
            *out = out.mul_add(a, chain * b);
        }
    }
    out.iter().map(|o| o * (1.0 / total)).collect()
}
