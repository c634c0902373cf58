//! Attention in exact integers against its scalar definition: what is stored, every kernel that attends, blocks that leave.

use muser_backend::arith;
use muser_backend::arith::attention::{
    self as definition, Digits, StoredHead, TOP_16, digits, hadamard, quantize, score_factor,
};
use muser_backend::conformance::Random;
use muser_kv::BLOCK_LEN;

use super::Card;
use super::steps::{EPS, Factors, HEAD, read, rotated, row, same, summed};
use crate::CudaError;
use crate::driver::{Buffer, Launch};
use crate::forward::{digits_many_launch, digits_split_launch, head_layout};
use crate::kernels::{DigitArgs, RopeArgs, TransposeArgs, Tuning};

/// Checks the kernels of one width; returns how many values were compared.
pub(super) fn check(card: &Card<'_>, kv: Digits, random: &mut Random) -> Result<usize, CudaError> {
    let mut compared = heads(card, kv, true, random)? + heads(card, kv, false, random)?;
    for shape in [
        Shape { group: 16, rows: 1, start: 300, window: 0 },
        Shape { group: 16, rows: 9, start: 505, window: 100 },
        Shape { group: 2, rows: 16, start: 250, window: 0 },
        Shape { group: 1, rows: 3, start: 0, window: 0 },
    ] {
        compared += attention(card, kv, shape, random)?;
    }
    Ok(compared + transposed(card, kv, random)?)
}

/// A head on the card, written at a position.
pub(super) fn put(head: &mut [u8], kv: Digits, row: usize, k: &StoredHead, v: &StoredHead) {
    let layout = head_layout(kv);
    for (plane, (k, v)) in [(&k.hi, &v.hi), (&k.lo, &v.lo)].into_iter().take(kv.count()).enumerate() {
        for d in 0..HEAD {
            head[layout.k(plane) + row * HEAD + d] = k[d] as u8;
            head[layout.v(plane) + d * BLOCK_LEN + row] = v[d] as u8;
        }
    }
    head[layout.k_scales() + 4 * row..][..4].copy_from_slice(&k.d.to_le_bytes());
    head[layout.v_scales() + 4 * row..][..4].copy_from_slice(&v.d.to_le_bytes());
}

pub(super) fn rotated_key(mut k: Vec<f32>, kv: Digits) -> StoredHead {
    hadamard(&mut k);
    StoredHead::of(&k, kv)
}

pub(super) fn failure(kernel: &str, what: String) -> CudaError {
    CudaError::SelfTest { kernel: kernel.to_owned(), what }
}

/// A query before the Hadamard matrix, as its digits (`[hi 128, lo 128]`) and the factor of its scores.
pub(super) fn stored_query(mut q: Vec<f32>, kv: Digits) -> (Vec<u8>, f32) {
    hadamard(&mut q);
    let mut codes = [0i16; HEAD];
    let f = quantize(&q, TOP_16, true, &mut codes) * score_factor(HEAD, kv);
    let (hi, lo): (Vec<u8>, Vec<u8>) =
        codes.map(digits).map(|(hi, lo)| (hi as u8, lo as u8)).into_iter().unzip();
    ([hi, lo].concat(), f)
}

/// Compares digits and factors of queries that a kernel has written.
pub(super) fn same_queries(
    kernel: &str,
    expected: &[(Vec<u8>, f32)],
    (digits, factors): (&Buffer<u8>, &Buffer<f32>),
) -> Result<usize, CudaError> {
    let mut found = vec![0u8; expected.len() * 2 * HEAD];
    digits.read(0, &mut found)?;
    let factors = read(factors, expected.len())?;
    for (i, ((codes, f), found)) in expected.iter().zip(found.chunks_exact(2 * HEAD)).enumerate() {
        let same_factor = f.to_bits() == factors[i].to_bits() || (f.is_nan() && factors[i].is_nan());
        if codes != found || !same_factor {
            let what = format!("query {i}: expected the factor {f:e} and its codes, found {:e}", factors[i]);
            return Err(failure(kernel, what));
        }
    }
    Ok(found.len())
}

/// Compares all bytes of K and V.
pub(super) fn same_blocks(kernel: &str, expected: &[u8], on_card: &Buffer<u8>) -> Result<usize, CudaError> {
    let mut found = vec![0u8; expected.len()];
    on_card.read(0, &mut found)?;
    match expected.iter().zip(&found).position(|(e, f)| e != f) {
        Some(at) => {
            let what = format!("byte {at} of K and V: expected {}, found {}", expected[at], found[at]);
            Err(failure(kernel, what))
        }
        None => Ok(found.len()),
    }
}

/// Two rows through `rope_digits_*`, with rotation and (as on layers that see everything) without: one with infinities in its
/// query, key and value, whose codes are zeros. Bytes of other rows stay.
fn heads(card: &Card<'_>, kv: Digits, rotates: bool, random: &mut Random) -> Result<usize, CudaError> {
    let name = format!("rope_digits_{}", kv.count());
    let (n, heads, segments) = (2, 4, 3);
    let (k_at, v_at, width) = (heads * HEAD, 2 * heads * HEAD + HEAD, 2 * heads * HEAD + 2 * HEAD);
    let mut part = row(random, segments * n * width);
    part[width + 5] = f32::INFINITY;
    part[width + k_at + 9] = f32::INFINITY;
    part[width + v_at + 7] = f32::NEG_INFINITY;
    let weights = row(random, 2 * HEAD);
    let turned = row(random, n * HEAD);
    let unturned = [1.0, 0.0].repeat(n * HEAD / 2);
    let angles = if rotates { turned } else { unturned };
    let places = [(1usize, 255usize), (0, 3)];
    let data: Vec<u32> = [0, 1].into_iter().chain(places.map(|(b, p)| (b * BLOCK_LEN + p) as u32)).collect();
    let floats = |values: &[f32]| Buffer::from_slice(card.context, values, "self-test rows");
    let (part_on, weights_on, angles_on) = (floats(&part)?, floats(&weights)?, floats(&angles)?);
    let data_on = Buffer::from_slice(card.context, &data, "self-test positions")?;
    let layout = head_layout(kv);
    let mut expected = vec![0xABu8; 2 * layout.bytes()];
    let kv_on = Buffer::from_slice(card.context, &expected, "self-test KV")?;
    let q_on = Buffer::<u8>::zeroed(card.context, n * heads * 2 * HEAD, "self-test queries")?;
    let f_on = Buffer::<f32>::zeroed(card.context, n * heads, "self-test queries")?;
    let factors = Factors::of(card, width, random, rotates)?;
    let args = RopeArgs {
        part: part_on.at(0),
        factors: factors.address(),
        q_norm: weights_on.at(0),
        k_norm: weights_on.at(HEAD),
        angles: if rotates { angles_on.at(0) } else { 0 },
        positions: data_on.at(0),
        slots: data_on.at(2),
        q: q_on.at(0),
        f: f_on.at(0),
        kv: kv_on.at(0),
        block_bytes: layout.bytes() as u64,
        segments: segments as u32,
        n: n as u32,
        heads: heads as u32,
        kv_heads: 1,
        width: width as u32,
        k_at: k_at as u32,
        v_at: v_at as u32,
        eps: EPS,
        factor: score_factor(HEAD, kv),
    };
    let grid = ((heads + 2).div_ceil(4) as u32, n as u32);
    card.stream.launch(&card.kernels.get(&name)?, Launch::new(grid, 128), &args)?;
    card.stream.synchronize()?;
    let mut queries = Vec::new();
    for (r, (block, position)) in places.into_iter().enumerate() {
        let angles = &angles[r * HEAD..][..HEAD];
        for head in 0..heads {
            let x = summed(&part, &factors, (n, width), r, head * HEAD, HEAD);
            queries.push(stored_query(rotated(&x, &weights[..HEAD], angles), kv));
        }
        let k = rotated(&summed(&part, &factors, (n, width), r, k_at, HEAD), &weights[HEAD..], angles);
        let v = summed(&part, &factors, (n, width), r, v_at, HEAD);
        let head = &mut expected[block * layout.bytes()..][..layout.bytes()];
        put(head, kv, position, &rotated_key(k, kv), &StoredHead::of(&v, kv));
    }
    Ok(same_queries(&name, &queries, (&q_on, &f_on))? + same_blocks(&name, &expected, &kv_on)?)
}

/// What a sequence of one KV head asks for.
#[derive(Clone, Copy)]
struct Shape {
    group: usize,
    rows: usize,
    /// Position of the first row.
    start: usize,
    window: usize,
}

/// Rows of one sequence over blocks 2, 1, 0 of memory, through the split kernel and through those of many rows.
fn attention(card: &Card<'_>, kv: Digits, shape: Shape, random: &mut Random) -> Result<usize, CudaError> {
    let Shape { group, rows, start, window } = shape;
    let (end, layout) = (start + rows, head_layout(kv));
    // Stale codes behind the end must not matter.
    let written = end + 5;
    let keys: Vec<_> = (0..written).map(|_| rotated_key(normed(random, 2.0), kv)).collect();
    let values: Vec<_> = (0..written).map(|_| StoredHead::of(&row(random, HEAD), kv)).collect();
    let blocks = written.div_ceil(BLOCK_LEN);
    let mut memory = vec![0u8; blocks * layout.bytes()];
    for (position, (k, v)) in keys.iter().zip(&values).enumerate() {
        let block = blocks - 1 - position / BLOCK_LEN;
        put(&mut memory[block * layout.bytes()..][..layout.bytes()], kv, position % BLOCK_LEN, k, v);
    }
    let (mut q_bytes, mut factors, mut expected) = (Vec::new(), Vec::new(), Vec::new());
    for r in 0..rows {
        let position = start + r;
        let first = if window == 0 { 0 } else { (position + 1).saturating_sub(window) };
        for _ in 0..group {
            let q = normed(random, 1.9);
            expected.push(definition::attend(&q, &keys, &values, |j| (first..=position).contains(&j), kv));
            let (codes, f) = stored_query(q, kv);
            q_bytes.extend(codes);
            factors.push(f);
        }
    }
    let upload = |bytes: &[u8]| Buffer::from_slice(card.context, bytes, "self-test KV");
    let (kv_on, q_on) = (upload(&memory)?, upload(&q_bytes)?);
    let f_on = Buffer::from_slice(card.context, &factors, "self-test queries")?;
    let table: Vec<u32> = (0..blocks as u32).rev().collect();
    let table_on = Buffer::from_slice(card.context, &table, "self-test data")?;
    let tuning = Tuning::of(card.context.arch);
    let tokens = 16 / group;
    let mut compared = 0;
    for split in [true, false] {
        let mut tiles: Vec<[u32; 8]> = Vec::new();
        let mut parts = 0;
        for first_row in (0..rows).step_by(tokens) {
            let (count, pos) = (tokens.min(rows - first_row), start + first_row);
            let first = if window == 0 { 0 } else { (pos + 1).saturating_sub(window) } / BLOCK_LEN;
            let of_tile = (pos + count).div_ceil(BLOCK_LEN) - first;
            let own = if split { of_tile } else { 1 };
            let tile = [first_row, count, pos, first, first, of_tile, parts, own].map(|v| v as u32);
            tiles.push(tile);
            parts += own;
        }
        let many = tuning.many_warps as usize;
        let groups: Vec<u32> = (0..tiles.len())
            .step_by(many)
            .flat_map(|at| [at as u32, many.min(tiles.len() - at) as u32])
            .collect();
        let counts = [parts as u32, tiles.len() as u32];
        let tiles_flat: Vec<u32> = tiles.iter().flatten().copied().collect();
        let words = |values: &[u32]| Buffer::from_slice(card.context, values, "self-test data");
        let (tiles_on, groups_on, counts_on) = (words(&tiles_flat)?, words(&groups)?, words(&counts)?);
        let args = |part_o: &Buffer<f32>, part_l: &Buffer<f32>| DigitArgs {
            q: q_on.at(0),
            f: f_on.at(0),
            kv: kv_on.at(0),
            block_bytes: layout.bytes() as u64,
            tiles: tiles_on.at(0),
            groups: groups_on.at(0),
            counts: counts_on.at(0),
            tables: table_on.at(0),
            part_o: part_o.at(0),
            part_l: part_l.at(0),
            heads: group as u32,
            kv_heads: 1,
            group: group as u32,
            window: window as u32,
            ..DigitArgs::default()
        };
        let digits = kv.count();
        let grid = (groups.len() as u32 / 2, 1);
        let kernels = if split {
            vec![(format!("digits_split_{digits}"), digits_split_launch(kv, &tuning, 3))]
        } else {
            ["many", "wide"]
                .map(|kind| (format!("digits_{kind}_{digits}"), digits_many_launch(kv, &tuning, grid)))
                .into_iter()
                .filter(|(name, _)| card.kernels.get(name).is_ok())
                .collect()
        };
        for (name, launch) in kernels {
            let part_o =
                Buffer::from_slice(card.context, &vec![f32::NAN; parts * 16 * HEAD], "self-test sums")?;
            let part_l = Buffer::from_slice(card.context, &vec![f32::NAN; parts * 16], "self-test sums")?;
            card.stream.launch(&card.kernels.get(&name)?, launch, &args(&part_o, &part_l))?;
            card.stream.synchronize()?;
            let (o, l) = (read(&part_o, parts * 16 * HEAD)?, read(&part_l, parts * 16)?);
            for tile in &tiles {
                let [first_row, count, _, _, _, _, part, own] = tile.map(|v| v as usize);
                for m in 0..count * group {
                    let (mut sum, mut sums) = (0.0f32, [0.0f32; HEAD]);
                    for p in part..part + own {
                        sum += l[p * 16 + m];
                        let o = &o[(p * 16 + m) * HEAD..][..HEAD];
                        sums.iter_mut().zip(o).for_each(|(sum, o)| *sum += o);
                    }
                    let found = sums.map(|o| o * (1.0 / sum));
                    let what = format!("row {} head {}, value", first_row + m / group, m % group);
                    compared += same(&name, &what, &expected[first_row * group + m], &found)?;
                }
            }
        }
    }
    Ok(compared)
}

/// A random head with a root mean square of `size`.
pub(super) fn normed(random: &mut Random, size: f32) -> Vec<f32> {
    let x = row(random, HEAD);
    let r = size * arith::inverse_rms(arith::row_dot(&x, &x), HEAD, EPS);
    x.into_iter().map(|x| x * r).collect()
}

/// A block out and in again.
fn transposed(card: &Card<'_>, kv: Digits, random: &mut Random) -> Result<usize, CudaError> {
    let (layout, heads) = (head_layout(kv), 3);
    let mut here = vec![0u8; heads * layout.bytes()];
    let mut there = here.clone();
    for (here, there) in here.chunks_exact_mut(layout.bytes()).zip(there.chunks_exact_mut(layout.bytes())) {
        for row in [0, 1, 30, 33, 127, 128, 255] {
            let (k, v) = (
                rotated_key(super::steps::row(random, HEAD), kv),
                StoredHead::of(&super::steps::row(random, HEAD), kv),
            );
            put(here, kv, row, &k, &v);
            for (plane, (k, v)) in [(&k.hi, &v.hi), (&k.lo, &v.lo)].into_iter().take(kv.count()).enumerate() {
                for d in 0..HEAD {
                    there[layout.k(plane) + layout.k_at(row, d)] = k[d] as u8;
                    there[layout.v(plane) + layout.v_at(row, d)] = v[d] as u8;
                }
            }
            let scales = layout.k_scales()..layout.bytes();
            let (from, to) = (here[scales.clone()].to_vec(), scales);
            there[to].copy_from_slice(&from);
        }
    }
    let from = Buffer::from_slice(card.context, &here, "self-test KV")?;
    let middle = Buffer::<u8>::zeroed(card.context, here.len(), "self-test KV")?;
    let back = Buffer::<u8>::zeroed(card.context, here.len(), "self-test KV")?;
    for (src, dst, out, expected) in [(&from, &middle, 1, &there), (&middle, &back, 0, &here)] {
        let args = TransposeArgs { src: src.at(0), dst: dst.at(0), digits: kv.count() as u32, out };
        let grid = (2 * kv.count() as u32 + 1, heads as u32);
        card.stream.launch(&card.kernels.get("kv_transpose")?, Launch::new(grid, 256), &args)?;
        card.stream.synchronize()?;
        let mut found = vec![0u8; here.len()];
        dst.read(0, &mut found)?;
        if let Some(at) = expected.iter().zip(&found).position(|(e, f)| e != f) {
            let what = format!("byte {at}: expected {}, found {}", expected[at], found[at]);
            return Err(failure("kv_transpose", what));
        }
    }
    Ok(2 * here.len())
}
