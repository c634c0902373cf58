//! One to eight activation rows: unpacking and multiplying in one pass, straight from the transposed words.
//!
//! For a single row the weights are touched once and everything stays in registers: for Q4_K 32 loads of weights, 64
//! masks and 64 dot products per 4,096 weights, about 120 cycles on Zen 4 against 300 to 500 that memory takes to bring
//! the 2,304 bytes; each further row costs 76 cycles of dot products and multiplications, which share one pipe. So up to
//! three rows cost what one costs, provided that loads run ahead: addresses follow from constants, dot products stay
//! where they are written ([`Simd::dp4_row`]), and from [`FAR`] rows on lines are asked for. The integers are the same
//! as those of `tile`, so the bits are.

use muser_gguf::GgmlType;

use super::four::{self, Packed};
use super::layout::{BlockShape, TILE_ROWS, ask_to_write, place_five, place_six};
use super::matmul::{Finish, Product, SCRATCH, SUPER_SUMS, Storage, fetch, finish};
use super::tile::{PanelBlock, stride};
use super::words::{Words, high_nibbles, low_nibbles, shift_right};
use crate::simd::Simd;

/// Does [`tile`] have this type, with rows of `k` inputs?
pub(crate) fn has(ty: GgmlType, k: usize) -> bool {
    match ty {
        GgmlType::Q4_K | GgmlType::Q5_K | GgmlType::Q6_K | GgmlType::Q8_0 => true,
        GgmlType::NVFP4 => k.is_multiple_of(256),
        _ => false,
    }
}

/// Product of one row tile with `T` rows from row `row` of the step on, whose part of a panel is `x` (its first block).
///
/// # Safety
/// As [`super::product::product_run`], and the matrix is of a type that [`has`] knows.
#[inline(always)]
pub(super) unsafe fn tile<S: Simd, const T: usize>(
    p: &Product,
    shape: BlockShape,
    tile: usize,
    row: usize,
    x: PanelBlock,
    scratch: &mut [u8; SCRATCH],
) {
    match p.matrix.ty {
        GgmlType::Q4_K => blocks::<S, T, 4>(p, shape, tile, row, x, scratch),
        GgmlType::Q5_K => blocks::<S, T, 5>(p, shape, tile, row, x, scratch),
        GgmlType::NVFP4 => blocks::<S, T, FP4>(p, shape, tile, row, x, scratch),
        GgmlType::Q8_0 => blocks::<S, T, 8>(p, shape, tile, row, x, scratch),
        _ => blocks::<S, T, 6>(p, shape, tile, row, x, scratch),
    }
}

/// Stands for NVFP4 where else bits of a code tell the types apart.
const FP4: usize = 0;

#[inline(always)]
unsafe fn blocks<S: Simd, const T: usize, const BITS: usize>(
    p: &Product,
    shape: BlockShape,
    tile: usize,
    row: usize,
    x: PanelBlock,
    scratch: &mut [u8; SCRATCH],
) {
    let m = &p.matrix;
    let parts = TILE_ROWS / S::N;
    let width = stride::<S, T>(x);
    // Sizes of 256 inputs are constants here: a division in the way of an address keeps loads from running ahead.
    let (word_bytes, extra_bytes) = match BITS {
        4 | FP4 => (36 * 4 * TILE_ROWS, 0),
        5 => (44 * 4 * TILE_ROWS, 0),
        6 => (52 * 4 * TILE_ROWS, 2 * TILE_ROWS),
        _ => (8 * 8 * 4 * TILE_ROWS, 8 * 2 * TILE_ROWS),
    };
    debug_assert!(word_bytes == 256 / shape.len * shape.word_bytes());
    debug_assert!(extra_bytes == 256 / shape.len * shape.extra_bytes());
    let (scales, sums) = if BITS == 8 { (8, 8) } else { (1, SUPER_SUMS) };
    let repacked = match m.storage {
        Storage::Repacked(..) => Some(fetch(m, shape, tile, 0, scratch)),
        Storage::Native(..) => None,
    };
    // The sums of a tile go to lines that nobody has touched for a while. Stores wait for each other, so one that has to
    // fetch its line would hold up those that spill registers.
    for t in 0..T {
        ask_to_write(p.out.wrapping_add((row + t) * p.out_stride + tile * TILE_ROWS));
    }
    let mut total = [[S::f_splat(0.0); T]; 4];
    let mut acc = [[S::f_splat(0.0); T]; 4];
    let (mut segment, mut end) = (0, m.segments.range(0).end);
    for block in 0..m.cols.div_ceil(256) {
        let (words, extra) = match repacked {
            Some((words, extra)) => (words.add(block * word_bytes), extra.add(block * extra_bytes)),
            None => fetch(m, shape, tile, block, scratch),
        };
        let x = PanelBlock {
            q: x.q.add(block * 256 * width),
            d: x.d.add(block * scales * width),
            sums: x.sums.add(block * sums * width),
            width,
        };
        for (part, acc) in acc.iter_mut().enumerate().take(parts) {
            let w = Words::<S>::new(words, part * S::N);
            match BITS {
                4 => with_mins::<S, T, false>(&w, x, acc),
                FP4 => four_bits::<S, T>(&w, x, acc),
                5 => with_mins::<S, T, true>(&w, x, acc),
                6 => six_bits::<S, T>(&w, extra, x, acc),
                _ => eight_bits::<S, T>(&w, extra, (m.cols - block * 256).min(256) / 32, x, acc),
            }
        }
        if block + 1 == end {
            for (total, acc) in total.iter_mut().zip(&mut acc).take(parts) {
                for (total, acc) in total.iter_mut().zip(acc) {
                    *total = if segment == 0 { *acc } else { S::f_add(*total, *acc) };
                    *acc = S::f_splat(0.0);
                }
            }
            segment += 1;
            end = m.segments.range(segment).end;
        }
    }
    if matches!(p.finish, Finish::Plain) && m.scale == 1.0 && (tile + 1) * TILE_ROWS <= m.rows {
        for t in 0..T {
            let out = p.out.add((row + t) * p.out_stride + tile * TILE_ROWS);
            for part in 0..parts {
                S::f_store(out.add(part * S::N), total[part][t]);
            }
        }
        return;
    }
    for t in 0..T {
        let mut lanes = [0.0f32; TILE_ROWS];
        for part in 0..parts {
            S::f_store(lanes.as_mut_ptr().add(part * S::N), total[part][t]);
        }
        finish::<S>(p, tile, row + t, lanes.as_mut_ptr());
    }
}

/// Writes `$body` out for each row `R` of `$rows`, a constant of at most 8.
macro_rules! for_rows {
    ($rows:expr, $body:ident) => {
        for_rows!(@ $rows, $body, 0 1 2 3 4 5 6 7)
    };
    (@ $rows:expr, $body:ident, $($r:literal)*) => {
        $(if $r < $rows { $body!($r); })*
    };
}

/// Rows from which on lines are asked for ahead.
const FAR: usize = 3;

/// The next word of a tile. With several rows a kernel computes so long between two lines that the hardware does not run
/// ahead far enough.
#[inline(always)]
unsafe fn word<S: Simd, const T: usize>(w: &Words<S>, j: usize) -> S::I {
    if T >= FAR && S::N == TILE_ROWS { w.next_asking::<true>(j) } else { w.next(j) }
}

/// Q4_K, and Q5_K with its fifth bits.
#[inline(always)]
unsafe fn with_mins<S: Simd, const T: usize, const FIFTH: bool>(
    w: &Words<S>,
    x: PanelBlock,
    acc: &mut [S::F; T],
) {
    let (head, s0) = (word::<S, T>(w, 0), word::<S, T>(w, 1));
    let (s1, s2) = (word::<S, T>(w, 2), word::<S, T>(w, 3));
    let six = S::i_splat(0x3f3f_3f3f);
    let top = S::i_splat(0x3030_3030);
    // Eight 6-bit scales and mins: see `unpack`.
    let scales = [S::i_and(s0, six), S::i_or(low_nibbles::<S>(s2), S::i_and(S::i_shr::<2>(s0), top))];
    let mins = [S::i_and(s1, six), S::i_or(high_nibbles::<S>(s2), S::i_and(S::i_shr::<2>(s1), top))];
    let mut isum = [S::i_splat(0); T];
    let mut bits = [S::i_splat(0); 8];
    mins_quarter::<S, T, FIFTH, 0>(w, &x, scales[0], &mut bits, &mut isum);
    mins_quarter::<S, T, FIFTH, 1>(w, &x, scales[0], &mut bits, &mut isum);
    mins_quarter::<S, T, FIFTH, 2>(w, &x, scales[1], &mut bits, &mut isum);
    mins_quarter::<S, T, FIFTH, 3>(w, &x, scales[1], &mut bits, &mut isum);
    let mask = S::i_splat(0x00ff_00ff);
    let pairs = [
        S::i_and(mins[0], mask),
        S::i_and(S::i_shr::<8>(mins[0]), mask),
        S::i_and(mins[1], mask),
        S::i_and(S::i_shr::<8>(mins[1]), mask),
    ];
    let (d, m) = (S::f_from_half(head), S::f_from_half(S::i_shr::<16>(head)));
    for t in 0..T {
        let mut msum = S::i_splat(0);
        for (p, &pair) in pairs.iter().enumerate() {
            msum = S::dp2(msum, pair, S::i_splat(*x.sums.add((8 + p) * x.width + t)));
        }
        let dx = S::f_splat(*x.d.add(t));
        // Everything in the sum is 16 times as large, so nothing is shifted out.
        let isum = if !FIFTH && S::ANY_BYTE { S::i_sra::<4>(isum[t]) } else { isum[t] };
        let a = S::f_fma(S::f_from_i(isum), S::f_mul(d, dx), acc[t]);
        acc[t] = S::f_fnma(S::f_from_i(msum), S::f_mul(m, dx), a);
    }
}

/// 64 inputs of Q4_K or Q5_K: quarter `C` of a block. Its number is a constant, so that nothing is decided at run time.
#[inline(always)]
unsafe fn mins_quarter<S: Simd, const T: usize, const FIFTH: bool, const C: usize>(
    w: &Words<S>,
    x: &PanelBlock,
    scales: S::I,
    bits: &mut [S::I; 8],
    isum: &mut [S::I; T],
) {
    // Without a fifth bit the high nibble may stay where it is: the dot is 16 times as large.
    let in_place = !FIFTH && S::ANY_BYTE;
    let mut low_dot = [S::i_splat(0); T];
    let mut high_dot = [S::i_splat(0); T];
    // Written out: the compiler leaves longer bodies rolled, and then moves what follows a loop behind all loops.
    mins_word::<S, T, FIFTH, C, 0>(w, x, bits, &mut low_dot, &mut high_dot);
    mins_word::<S, T, FIFTH, C, 1>(w, x, bits, &mut low_dot, &mut high_dot);
    mins_word::<S, T, FIFTH, C, 2>(w, x, bits, &mut low_dot, &mut high_dot);
    mins_word::<S, T, FIFTH, C, 3>(w, x, bits, &mut low_dot, &mut high_dot);
    mins_word::<S, T, FIFTH, C, 4>(w, x, bits, &mut low_dot, &mut high_dot);
    mins_word::<S, T, FIFTH, C, 5>(w, x, bits, &mut low_dot, &mut high_dot);
    mins_word::<S, T, FIFTH, C, 6>(w, x, bits, &mut low_dot, &mut high_dot);
    mins_word::<S, T, FIFTH, C, 7>(w, x, bits, &mut low_dot, &mut high_dot);
    let byte = S::i_splat(255);
    let mut low_scale = S::i_and(shift_right::<S>(scales, C % 2 * 16), byte);
    let high_scale = S::i_and(shift_right::<S>(scales, C % 2 * 16 + 8), byte);
    if in_place {
        // As large as the high dot; at most 8 * 32 * 15 * 127 * 63 * 16 < 2^29 in all.
        low_scale = S::i_shl::<4>(low_scale);
    }
    for t in 0..T {
        isum[t] = S::i_add(isum[t], S::i_mul(low_dot[t], low_scale));
        isum[t] = S::here(S::i_add(isum[t], S::i_mul(high_dot[t], high_scale)));
    }
}

/// Quant word `J` of quarter `C` with the activations of both of its nibbles.
#[inline(always)]
unsafe fn mins_word<S: Simd, const T: usize, const FIFTH: bool, const C: usize, const J: usize>(
    w: &Words<S>,
    x: &PanelBlock,
    bits: &mut [S::I; 8],
    low_dot: &mut [S::I; T],
    high_dot: &mut [S::I; T],
) {
    let quants = if FIFTH { 12 } else { 4 };
    let fifth = S::i_splat(0x1010_1010);
    let in_place = !FIFTH && S::ANY_BYTE;
    if FIFTH && C == 0 {
        bits[J] = word::<S, T>(w, place_five(4 + J));
    }
    let at = quants + 8 * C + J;
    let v = word::<S, T>(w, if FIFTH { place_five(at) } else { at });
    let mut low = low_nibbles::<S>(v);
    let mut high =
        if in_place { S::i_and(v, S::i_splat(0xf0f0_f0f0_u32 as i32)) } else { high_nibbles::<S>(v) };
    if FIFTH {
        let bits = bits[J];
        let (a, b) = match C {
            0 => (S::i_shl::<4>(bits), S::i_shl::<3>(bits)),
            1 => (S::i_shl::<2>(bits), S::i_shl::<1>(bits)),
            2 => (bits, S::i_shr::<1>(bits)),
            _ => (S::i_shr::<2>(bits), S::i_shr::<3>(bits)),
        };
        low = S::i_or(low, S::i_and(a, fifth));
        high = S::i_or(high, S::i_and(b, fifth));
    }
    macro_rules! row {
        ($r:literal) => {
            low_dot[$r] = S::dp4_row::<C, 0, J, T, $r, false>(low_dot[$r], low, x.q, x.width);
            // High nibbles in place are bytes of any size.
            high_dot[$r] = S::dp4_row::<C, 1, J, T, $r, false>(high_dot[$r], high, x.q, x.width);
        };
    }
    for_rows!(T, row);
}

/// Q6_K.
#[inline(always)]
unsafe fn six_bits<S: Simd, const T: usize>(
    w: &Words<S>,
    extra: *const u8,
    x: PanelBlock,
    acc: &mut [S::F; T],
) {
    let mut isum = [S::i_splat(0); T];
    let d = S::f_load_f16(extra.cast::<u16>().add(w.lane));
    let scales = [word::<S, T>(w, place_six(48)), word::<S, T>(w, place_six(49))];
    six_half::<S, T, 0>(w, x, scales, &mut isum);
    let scales = [word::<S, T>(w, place_six(50)), word::<S, T>(w, place_six(51))];
    six_half::<S, T, 2>(w, x, scales, &mut isum);
    for t in 0..T {
        let scale = S::f_mul(d, S::f_splat(*x.d.add(t)));
        acc[t] = S::f_fma(S::f_from_i(isum[t]), scale, acc[t]);
    }
}

/// The 128 values from quarter `C` of a block on. More than four rows go in two groups: four sums a row for all of them
/// would not fit in registers.
#[inline(always)]
unsafe fn six_half<S: Simd, const T: usize, const C: usize>(
    w: &Words<S>,
    x: PanelBlock,
    scales: [S::I; 2],
    isum: &mut [S::I; T],
) {
    match T {
        5 => six_groups::<S, T, 3, 2, C>(w, x, scales, isum),
        6 => six_groups::<S, T, 3, 3, C>(w, x, scales, isum),
        7 => six_groups::<S, T, 4, 3, C>(w, x, scales, isum),
        8 => six_groups::<S, T, 4, 4, C>(w, x, scales, isum),
        _ => {
            six_first::<S, T, T, C, true>(w, x, scales, isum);
            six_second::<S, T, T, C, true>(w, x, scales, isum);
        }
    }
}

/// `A` rows, then `B` rows, half by half, so that the second group finds the words in the first-level cache.
#[inline(always)]
unsafe fn six_groups<S: Simd, const T: usize, const A: usize, const B: usize, const C: usize>(
    w: &Words<S>,
    x: PanelBlock,
    scales: [S::I; 2],
    isum: &mut [S::I; T],
) {
    let (first, second) = isum.split_at_mut(A);
    let rest = PanelBlock { q: x.q.add(4 * A), d: x.d.add(A), sums: x.sums.add(A), width: x.width };
    six_first::<S, T, A, C, true>(w, x, scales, first);
    six_first::<S, T, B, C, false>(w, rest, scales, second);
    six_second::<S, T, A, C, true>(w, x, scales, first);
    six_second::<S, T, B, C, false>(w, rest, scales, second);
}

/// The first 16 values of each of the four runs of 32, for `R` of `T` rows; `NEW` if they are the first to read the words.
#[inline(always)]
unsafe fn six_first<S: Simd, const T: usize, const R: usize, const C: usize, const NEW: bool>(
    w: &Words<S>,
    x: PanelBlock,
    scales: [S::I; 2],
    isum: &mut [S::I],
) {
    let mut dot = six_offsets::<S, R>(x, 4 * C);
    six_word::<S, T, R, C, 0, NEW>(w, x, &mut dot);
    six_word::<S, T, R, C, 1, NEW>(w, x, &mut dot);
    six_word::<S, T, R, C, 2, NEW>(w, x, &mut dot);
    six_word::<S, T, R, C, 3, NEW>(w, x, &mut dot);
    six_scale::<S, R, 0>(&dot, scales, isum);
}

/// The other 16 values of each.
#[inline(always)]
unsafe fn six_second<S: Simd, const T: usize, const R: usize, const C: usize, const NEW: bool>(
    w: &Words<S>,
    x: PanelBlock,
    scales: [S::I; 2],
    isum: &mut [S::I],
) {
    let mut dot = six_offsets::<S, R>(x, 4 * C + 1);
    six_word::<S, T, R, C, 4, NEW>(w, x, &mut dot);
    six_word::<S, T, R, C, 5, NEW>(w, x, &mut dot);
    six_word::<S, T, R, C, 6, NEW>(w, x, &mut dot);
    six_word::<S, T, R, C, 7, NEW>(w, x, &mut dot);
    six_scale::<S, R, 1>(&dot, scales, isum);
}

/// Where the sums of four groups of 16 start, every other one from `group` on: codes are 32 too large.
#[inline(always)]
unsafe fn six_offsets<S: Simd, const R: usize>(x: PanelBlock, group: usize) -> [[S::I; R]; 4] {
    let mut dot = [[S::i_splat(0); R]; 4];
    for (run, dot) in dot.iter_mut().enumerate() {
        for (t, dot) in dot.iter_mut().enumerate() {
            *dot = S::i_splat(*x.sums.add((12 + group + 2 * run) * x.width + t));
        }
    }
    dot
}

/// Adds the dots of half `HALF` of the four runs, each times its scale.
#[inline(always)]
unsafe fn six_scale<S: Simd, const R: usize, const HALF: usize>(
    dot: &[[S::I; R]; 4],
    scales: [S::I; 2],
    isum: &mut [S::I],
) {
    for run in 0..4 {
        let word = scales[run / 2];
        // Signed byte 2 (run % 2) + HALF.
        let scale = match run % 2 * 2 + HALF {
            0 => S::i_sra::<24>(S::i_shl::<24>(word)),
            1 => S::i_sra::<24>(S::i_shl::<16>(word)),
            2 => S::i_sra::<24>(S::i_shl::<8>(word)),
            _ => S::i_sra::<24>(word),
        };
        for t in 0..R {
            isum[t] = S::i_add(isum[t], S::i_mul(dot[run][t], scale));
        }
    }
    for isum in isum.iter_mut().take(R) {
        *isum = S::here(*isum);
    }
}

/// Words `J` of the 128 values from quarter `C` on: four codes a lane for each of the four runs.
#[inline(always)]
unsafe fn six_word<
    S: Simd,
    const T: usize,
    const R: usize,
    const C: usize,
    const J: usize,
    const NEW: bool,
>(
    w: &Words<S>,
    x: PanelBlock,
    dot: &mut [[S::I; R]; 4],
) {
    let two = S::i_splat(0x3030_3030);
    let places = [place_six(8 * C + J), place_six(8 * C + 8 + J), place_six(32 + 4 * C + J)];
    let [a, b, high] = if NEW { places.map(|j| word::<S, T>(w, j)) } else { places.map(|j| w.next(j)) };
    let codes = [
        S::i_or(low_nibbles::<S>(a), S::i_and(S::i_shl::<4>(high), two)),
        S::i_or(low_nibbles::<S>(b), S::i_and(S::i_shl::<2>(high), two)),
        S::i_or(high_nibbles::<S>(a), S::i_and(high, two)),
        S::i_or(high_nibbles::<S>(b), S::i_and(S::i_shr::<2>(high), two)),
    ];
    macro_rules! row {
        ($r:literal) => {
            dot[0][$r] = S::dp4_row::<C, 0, J, T, $r, false>(dot[0][$r], codes[0], x.q, x.width);
            dot[1][$r] = S::dp4_row::<C, 1, J, T, $r, false>(dot[1][$r], codes[1], x.q, x.width);
            dot[2][$r] = S::dp4_row::<C, 2, J, T, $r, false>(dot[2][$r], codes[2], x.q, x.width);
            dot[3][$r] = S::dp4_row::<C, 3, J, T, $r, false>(dot[3][$r], codes[3], x.q, x.width);
        };
    }
    for_rows!(R, row);
}

/// NVFP4.
#[inline(always)]
unsafe fn four_bits<S: Simd, const T: usize>(w: &Words<S>, x: PanelBlock, acc: &mut [S::F; T]) {
    let heads = [word::<S, T>(w, 0), word::<S, T>(w, 9), word::<S, T>(w, 18), word::<S, T>(w, 27)];
    let scales = Packed::<S>::new(heads);
    if scales.wide {
        return four::wide_block::<S, T>(w, x, acc);
    }
    let mut isum = [S::i_splat(0); T];
    four_quarter::<S, T, 0>(w, &x, &scales, &mut isum);
    four_quarter::<S, T, 1>(w, &x, &scales, &mut isum);
    four_quarter::<S, T, 2>(w, &x, &scales, &mut isum);
    four_quarter::<S, T, 3>(w, &x, &scales, &mut isum);
    let unit = scales.unit();
    for t in 0..T {
        let term = S::f_mul(S::f_from_i(isum[t]), unit);
        acc[t] = S::f_fma(term, S::f_splat(*x.d.add(t)), acc[t]);
    }
}

/// 64 inputs of NVFP4: block `C` of the four.
#[inline(always)]
unsafe fn four_quarter<S: Simd, const T: usize, const C: usize>(
    w: &Words<S>,
    x: &PanelBlock,
    scales: &Packed<S>,
    isum: &mut [S::I; T],
) {
    if S::HALVES {
        // The sum of a group is at most 16 * 12 * 127 and fits half a lane, so two go through one dot product with their scales.
        let scales = scales.pairs(C);
        let first = four_group::<S, T, C, 0, 0, 1, 2, 3>(w, x);
        let second = four_group::<S, T, C, 0, 4, 5, 6, 7>(w, x);
        four_pair::<S, T>(&first, &second, scales[0], isum);
        let first = four_group::<S, T, C, 1, 0, 1, 2, 3>(w, x);
        let second = four_group::<S, T, C, 1, 4, 5, 6, 7>(w, x);
        return four_pair::<S, T>(&first, &second, scales[1], isum);
    }
    four_scale::<S, T>(&four_group::<S, T, C, 0, 0, 1, 2, 3>(w, x), scales.scale(C, 0), isum);
    four_scale::<S, T>(&four_group::<S, T, C, 0, 4, 5, 6, 7>(w, x), scales.scale(C, 1), isum);
    four_scale::<S, T>(&four_group::<S, T, C, 1, 0, 1, 2, 3>(w, x), scales.scale(C, 2), isum);
    four_scale::<S, T>(&four_group::<S, T, C, 1, 4, 5, 6, 7>(w, x), scales.scale(C, 3), isum);
}

/// Adds the sums of two groups, each times its scale: halves of `scales`.
#[inline(always)]
unsafe fn four_pair<S: Simd, const T: usize>(
    first: &[S::I; T],
    second: &[S::I; T],
    scales: S::I,
    isum: &mut [S::I; T],
) {
    for t in 0..T {
        isum[t] = S::here(S::dp2(isum[t], S::i_pair(first[t], second[t]), scales));
    }
}

/// Adds the sum of a group times its scale.
#[inline(always)]
unsafe fn four_scale<S: Simd, const T: usize>(dot: &[S::I; T], scale: S::I, isum: &mut [S::I; T]) {
    for t in 0..T {
        isum[t] = S::here(S::i_add(isum[t], S::i_mul(dot[t], scale)));
    }
}

/// The sum of the 16 values with the activations of words `A` to `D` of half `H` of block `C`.
#[inline(always)]
unsafe fn four_group<
    S: Simd,
    const T: usize,
    const C: usize,
    const H: usize,
    const A: usize,
    const B: usize,
    const A_HIGH: usize,
    const B_HIGH: usize,
>(
    w: &Words<S>,
    x: &PanelBlock,
) -> [S::I; T] {
    let at = 9 * C + 1 + 4 * H + A / 2;
    let codes = four::codes::<S>(word::<S, T>(w, at), word::<S, T>(w, at + 1));
    let mut dot = four::offsets::<S, T>(*x, x.width, 4 * C + 2 * H + A / 4);
    macro_rules! row {
        ($r:literal) => {
            dot[$r] = S::dp4_row::<C, H, A, T, $r, false>(dot[$r], codes[0], x.q, x.width);
            dot[$r] = S::dp4_row::<C, H, B, T, $r, false>(dot[$r], codes[1], x.q, x.width);
            dot[$r] = S::dp4_row::<C, H, A_HIGH, T, $r, false>(dot[$r], codes[2], x.q, x.width);
            dot[$r] = S::dp4_row::<C, H, B_HIGH, T, $r, false>(dot[$r], codes[3], x.q, x.width);
        };
    }
    for_rows!(T, row);
    dot
}

/// Q8_0: `groups` blocks of 32.
#[inline(always)]
unsafe fn eight_bits<S: Simd, const T: usize>(
    w: &Words<S>,
    extra: *const u8,
    groups: usize,
    x: PanelBlock,
    acc: &mut [S::F; T],
) {
    for group in 0..groups {
        let w = w.block(group * 8);
        let d = S::f_load_f16(extra.cast::<u16>().add(group * TILE_ROWS + w.lane));
        let q = x.q.add(group * 32 * x.width);
        let mut dot = [S::i_splat(0); T];
        for (t, dot) in dot.iter_mut().enumerate() {
            // Codes are 128 too large.
            *dot = S::i_splat(-128 * *x.sums.add(group * x.width + t));
        }
        eight_word::<S, T, 0>(&w, q, x.width, &mut dot);
        eight_word::<S, T, 1>(&w, q, x.width, &mut dot);
        eight_word::<S, T, 2>(&w, q, x.width, &mut dot);
        eight_word::<S, T, 3>(&w, q, x.width, &mut dot);
        eight_word::<S, T, 4>(&w, q, x.width, &mut dot);
        eight_word::<S, T, 5>(&w, q, x.width, &mut dot);
        eight_word::<S, T, 6>(&w, q, x.width, &mut dot);
        eight_word::<S, T, 7>(&w, q, x.width, &mut dot);
        for t in 0..T {
            let dx = S::f_splat(*x.d.add(group * x.width + t));
            acc[t] = S::f_fma(S::f_from_i(dot[t]), S::f_mul(d, dx), acc[t]);
        }
    }
}

/// Word `J` of a block, its codes made unsigned.
#[inline(always)]
unsafe fn eight_word<S: Simd, const T: usize, const J: usize>(
    w: &Words<S>,
    q: *const u8,
    width: usize,
    dot: &mut [S::I; T],
) {
    // The scales are a second stream, so already one row is better off asking.
    let word = if S::N == TILE_ROWS { w.next_asking::<true>(J) } else { w.next(J) };
    let code = S::i_xor(word, S::i_splat(0x8080_8080_u32 as i32));
    macro_rules! row {
        ($r:literal) => {
            dot[$r] = S::dp4_row::<0, 0, J, T, $r, true>(dot[$r], code, q, width);
        };
    }
    for_rows!(T, row);
}
