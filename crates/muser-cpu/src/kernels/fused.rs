//! One to eight activation rows: unpacking and multiplying in one pass, straight from the transposed words.
//!
//! For a single row the weights are touched once and everything stays in registers: for Q4_K 32 loads of weights, 64
//! masks and 64 dot products per 4,096 weights, about 150 cycles on Zen 4 against some 500 that memory takes to bring
//! the 2,304 bytes. Eight rows compute so long between two lines that the hardware does not run ahead far enough: there,
//! and only there, asking for lines ahead helps (10.3 instead of 7.9 in the unit of `kernel_bench`; four rows lose by
//! it). The integers are the same as those of `tile`, so the bits are.

use muser_gguf::GgmlType;

use super::layout::{BlockShape, TILE_ROWS, place_five, place_six};
use super::matmul::{MatrixView, SCRATCH, SUPER_SUMS, fetch};
use super::tile::{PanelBlock, stride};
use super::unpack::{Words, high_nibbles, low_nibbles, shift_right};
use crate::simd::Simd;

/// Does [`tile`] have this type?
pub(crate) fn has(ty: GgmlType) -> bool {
    matches!(ty, GgmlType::Q4_K | GgmlType::Q5_K | GgmlType::Q6_K)
}

/// Product of one row tile with `T` rows of the panel `x` (its first block): sums to `out[t][16]`.
///
/// # Safety
/// The matrix is of a type that [`has`] knows, the panel is complete, `out` is writable for `16 T` values.
#[inline(always)]
pub(super) unsafe fn tile<S: Simd, const T: usize>(
    m: &MatrixView,
    shape: BlockShape,
    tile: usize,
    x: PanelBlock,
    scratch: &mut [u8; SCRATCH],
    out: *mut f32,
) {
    match m.ty {
        GgmlType::Q4_K => blocks::<S, T, 4>(m, shape, tile, x, scratch, out),
        GgmlType::Q5_K => blocks::<S, T, 5>(m, shape, tile, x, scratch, out),
        _ => blocks::<S, T, 6>(m, shape, tile, x, scratch, out),
    }
}

#[inline(always)]
unsafe fn blocks<S: Simd, const T: usize, const BITS: usize>(
    m: &MatrixView,
    shape: BlockShape,
    tile: usize,
    x: PanelBlock,
    scratch: &mut [u8; SCRATCH],
    out: *mut f32,
) {
    let zero = S::f_splat(0.0);
    let parts = TILE_ROWS / S::N;
    let width = stride::<S, T>(x);
    for segment in 0..m.segments.count() {
        let mut acc = [[zero; T]; 4];
        for block in m.segments.range(segment) {
            let (words, extra) = fetch(m, shape, tile, block, scratch);
            let x = PanelBlock {
                q: x.q.add(block * 256 * width),
                d: x.d.add(block * width),
                sums: x.sums.add(block * SUPER_SUMS * width),
                width,
            };
            for (part, acc) in acc.iter_mut().enumerate().take(parts) {
                let w = Words::<S>::new(words, part * S::N);
                match BITS {
                    4 => with_mins::<S, T, false>(&w, x, acc),
                    5 => with_mins::<S, T, true>(&w, x, acc),
                    _ => six_bits::<S, T>(&w, extra, x, acc),
                }
            }
        }
        for (part, acc) in acc.iter().enumerate().take(parts) {
            for (t, &sum) in acc.iter().enumerate() {
                let at = out.add(t * TILE_ROWS + part * S::N);
                S::f_store(at, if segment == 0 { sum } else { S::f_add(S::f_load(at), sum) });
            }
        }
    }
}

/// The word of four codes that row `t` has at `k_group`. With several rows the compiler would load those of adjacent
/// rows as one vector and take it apart again; kept apart, each load is an operand of its dot product.
#[inline(always)]
unsafe fn activation<S: Simd, const T: usize>(x: &PanelBlock, k_group: usize, t: usize) -> S::I {
    if T > 2 {
        std::sync::atomic::compiler_fence(std::sync::atomic::Ordering::SeqCst);
    }
    S::i_splat(x.q.add((k_group * x.width + t) * 4).cast::<i32>().read_unaligned())
}

/// Q4_K, and Q5_K with its fifth bits.
#[inline(always)]
unsafe fn with_mins<S: Simd, const T: usize, const FIFTH: bool>(
    w: &Words<S>,
    x: PanelBlock,
    acc: &mut [S::F; T],
) {
    let (head, s0, s1, s2) = (w.next(0), w.next(1), w.next(2), w.next(3));
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
    mins_word::<S, T, FIFTH, C>(w, x, bits, &mut low_dot, &mut high_dot, 0);
    mins_word::<S, T, FIFTH, C>(w, x, bits, &mut low_dot, &mut high_dot, 1);
    mins_word::<S, T, FIFTH, C>(w, x, bits, &mut low_dot, &mut high_dot, 2);
    mins_word::<S, T, FIFTH, C>(w, x, bits, &mut low_dot, &mut high_dot, 3);
    mins_word::<S, T, FIFTH, C>(w, x, bits, &mut low_dot, &mut high_dot, 4);
    mins_word::<S, T, FIFTH, C>(w, x, bits, &mut low_dot, &mut high_dot, 5);
    mins_word::<S, T, FIFTH, C>(w, x, bits, &mut low_dot, &mut high_dot, 6);
    mins_word::<S, T, FIFTH, C>(w, x, bits, &mut low_dot, &mut high_dot, 7);
    let byte = S::i_splat(255);
    let mut low_scale = S::i_and(shift_right::<S>(scales, C % 2 * 16), byte);
    let high_scale = S::i_and(shift_right::<S>(scales, C % 2 * 16 + 8), byte);
    if in_place {
        // As large as the high dot; at most 8 * 32 * 15 * 127 * 63 * 16 < 2^29 in all.
        low_scale = S::i_shl::<4>(low_scale);
    }
    for t in 0..T {
        isum[t] = S::i_add(isum[t], S::i_mul(low_dot[t], low_scale));
        isum[t] = S::i_add(isum[t], S::i_mul(high_dot[t], high_scale));
    }
}

/// Quant word `j` of quarter `C` with the activations of both of its nibbles.
#[inline(always)]
unsafe fn mins_word<S: Simd, const T: usize, const FIFTH: bool, const C: usize>(
    w: &Words<S>,
    x: &PanelBlock,
    bits: &mut [S::I; 8],
    low_dot: &mut [S::I; T],
    high_dot: &mut [S::I; T],
    j: usize,
) {
    let quants = if FIFTH { 12 } else { 4 };
    let fifth = S::i_splat(0x1010_1010);
    let in_place = !FIFTH && S::ANY_BYTE;
    if FIFTH && C == 0 {
        bits[j] = w.next(place_five(4 + j));
    }
    let at = quants + 8 * C + j;
    let v = w.next(if FIFTH { place_five(at) } else { at });
    if T == 8 {
        w.ask_ahead(if FIFTH { place_five(at) } else { at });
    }
    let mut low = low_nibbles::<S>(v);
    let mut high =
        if in_place { S::i_and(v, S::i_splat(0xf0f0_f0f0_u32 as i32)) } else { high_nibbles::<S>(v) };
    if FIFTH {
        let bits = bits[j];
        let (a, b) = match C {
            0 => (S::i_shl::<4>(bits), S::i_shl::<3>(bits)),
            1 => (S::i_shl::<2>(bits), S::i_shl::<1>(bits)),
            2 => (bits, S::i_shr::<1>(bits)),
            _ => (S::i_shr::<2>(bits), S::i_shr::<3>(bits)),
        };
        low = S::i_or(low, S::i_and(a, fifth));
        high = S::i_or(high, S::i_and(b, fifth));
    }
    for t in 0..T {
        low_dot[t] = S::dp4(low_dot[t], low, activation::<S, T>(x, 16 * C + j, t));
        high_dot[t] = S::dp4(high_dot[t], high, activation::<S, T>(x, 16 * C + 8 + j, t));
    }
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
    let scales = [w.next(place_six(48)), w.next(place_six(49))];
    six_half::<S, T, 0>(w, &x, scales, &mut isum);
    let scales = [w.next(place_six(50)), w.next(place_six(51))];
    six_half::<S, T, 1>(w, &x, scales, &mut isum);
    for t in 0..T {
        let scale = S::f_mul(d, S::f_splat(*x.d.add(t)));
        acc[t] = S::f_fma(S::f_from_i(isum[t]), scale, acc[t]);
    }
}

/// The 128 values `N`. More than four rows go in two groups: four sums a row for all of them would not fit in registers.
#[inline(always)]
unsafe fn six_half<S: Simd, const T: usize, const N: usize>(
    w: &Words<S>,
    x: &PanelBlock,
    scales: [S::I; 2],
    isum: &mut [S::I; T],
) {
    match T {
        5 => six_groups::<S, T, 3, 2, N>(w, x, scales, isum),
        6 => six_groups::<S, T, 3, 3, N>(w, x, scales, isum),
        7 => six_groups::<S, T, 4, 3, N>(w, x, scales, isum),
        8 => six_groups::<S, T, 4, 4, N>(w, x, scales, isum),
        _ => {
            six_quarter::<S, T, T, N, 0>(w, x, scales, isum, 0);
            six_quarter::<S, T, T, N, 1>(w, x, scales, isum, 0);
        }
    }
}

/// `A` rows, then `B` rows, half by half, so that the second group finds the words in the first-level cache.
#[inline(always)]
unsafe fn six_groups<S: Simd, const T: usize, const A: usize, const B: usize, const N: usize>(
    w: &Words<S>,
    x: &PanelBlock,
    scales: [S::I; 2],
    isum: &mut [S::I; T],
) {
    six_quarter::<S, T, A, N, 0>(w, x, scales, isum, 0);
    six_quarter::<S, T, B, N, 0>(w, x, scales, isum, A);
    six_quarter::<S, T, A, N, 1>(w, x, scales, isum, 0);
    six_quarter::<S, T, B, N, 1>(w, x, scales, isum, A);
}

/// Half `HALF` (16 values) of each of the four runs of 32 values in the 128 values `N`, for `R` rows from `from` on.
#[inline(always)]
unsafe fn six_quarter<S: Simd, const T: usize, const R: usize, const N: usize, const HALF: usize>(
    w: &Words<S>,
    x: &PanelBlock,
    scales: [S::I; 2],
    isum: &mut [S::I; T],
    from: usize,
) {
    // Each of the four halves has a scale of its own.
    let mut dot = [[S::i_splat(0); R]; 4];
    for (run, dot) in dot.iter_mut().enumerate() {
        for (t, dot) in dot.iter_mut().enumerate() {
            let group = 8 * N + 2 * run + HALF;
            *dot = S::i_splat(*x.sums.add((12 + group) * x.width + from + t));
        }
    }
    six_word::<S, T, R, N>(w, x, &mut dot, from, 4 * HALF);
    six_word::<S, T, R, N>(w, x, &mut dot, from, 4 * HALF + 1);
    six_word::<S, T, R, N>(w, x, &mut dot, from, 4 * HALF + 2);
    six_word::<S, T, R, N>(w, x, &mut dot, from, 4 * HALF + 3);
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
            isum[from + t] = S::i_add(isum[from + t], S::i_mul(dot[run][t], scale));
        }
    }
}

/// Words `j` of the 128 values `N`: four codes a lane for each of the four runs.
#[inline(always)]
unsafe fn six_word<S: Simd, const T: usize, const R: usize, const N: usize>(
    w: &Words<S>,
    x: &PanelBlock,
    dot: &mut [[S::I; R]; 4],
    from: usize,
    j: usize,
) {
    let two = S::i_splat(0x3030_3030);
    let a = w.next(place_six(16 * N + j));
    let b = w.next(place_six(16 * N + 8 + j));
    let high = w.next(place_six(32 + 8 * N + j));
    if T == 8 && from == 0 {
        w.ask_ahead(place_six(16 * N + j));
        w.ask_ahead(place_six(16 * N + 8 + j));
        w.ask_ahead(place_six(32 + 8 * N + j));
    }
    let codes = [
        S::i_or(low_nibbles::<S>(a), S::i_and(S::i_shl::<4>(high), two)),
        S::i_or(low_nibbles::<S>(b), S::i_and(S::i_shl::<2>(high), two)),
        S::i_or(high_nibbles::<S>(a), S::i_and(high, two)),
        S::i_or(high_nibbles::<S>(b), S::i_and(S::i_shr::<2>(high), two)),
    ];
    for run in 0..4 {
        for t in 0..R {
            dot[run][t] =
                S::dp4(dot[run][t], codes[run], activation::<S, T>(x, 32 * N + 8 * run + j, from + t));
        }
    }
}
