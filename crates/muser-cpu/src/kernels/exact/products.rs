//! `256 sum xh wh + sum (xh wl + xl wh)` of words of four digits.

use muser_backend::arith::attention::UNIT;
use muser_backend::kv_layout::HeadLayout;
use muser_kv::BLOCK_LEN;

use crate::simd::Simd;

/// Where words of the many-row side lie: the digits of queries, or of weights.
///
/// Sets with a dot product of bytes take for each step a word of high digits and one of low digits. Those that multiply pairs
/// of 16 bits take four: values 0 and 2, 1 and 3 of whole codes, and the same of high digits.
pub(super) struct Plane;

impl Plane {
    /// Words of a step.
    #[inline(always)]
    pub(super) fn count<S: Simd>() -> usize {
        if S::PAIRS { 4 } else { 2 }
    }

    /// Words from one step of weights to the next.
    #[inline(always)]
    pub(super) fn step<S: Simd>() -> usize {
        if S::PAIRS { 2 } else { 1 }
    }

    /// Word `plane` of step `step` of row `i`: rows of weights follow each other, rows of queries are interleaved.
    #[inline(always)]
    fn at<S: Simd, const VALUES: bool>(step: usize, plane: usize, i: usize) -> usize {
        if !VALUES {
            return (step * Self::count::<S>() + plane) * S::QUERIES + i;
        }
        let row = i * UNIT / 4 * Self::count::<S>();
        if S::PAIRS {
            row + plane / 2 * (UNIT / 2) + step * 2 + plane % 2
        } else {
            row + plane * (UNIT / 4) + step
        }
    }
}

/// K or V of a unit: vectors of words, a lane for each result.
#[derive(Clone, Copy)]
pub(super) struct Words {
    /// High digits, low digits.
    pub(super) planes: [*const u8; 2],
    /// Bytes from one step to the next.
    pub(super) stride: usize,
    /// Are they as products take them, by [`prepare`]?
    pub(super) ready: bool,
}

/// Cache lines that will be needed next: K or V of a unit, both planes.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    first: *const u8,
    /// Bytes from one four lines to the next.
    stride: usize,
    plane: usize,
    lines: usize,
    from: usize,
}

impl Ahead {
    /// Nothing.
    pub(super) const NONE: Self = Self { first: std::ptr::null(), stride: 0, plane: 0, lines: 0, from: 0 };

    /// K of the unit at position `at` of a block.
    #[inline(always)]
    pub(super) fn keys(head: HeadLayout, block: *const u8, at: usize) -> Self {
        let first = block.wrapping_add(head.k_at(at, 0));
        Self { first, stride: 4 * BLOCK_LEN, plane: head.plane(), lines: head.dim, from: 0 }
    }

    /// V of the unit at position `at` of a block.
    #[inline(always)]
    pub(super) fn values(head: HeadLayout, block: *const u8, at: usize) -> Self {
        let first = block.wrapping_add(head.v(0) + head.v_at(at, 0));
        Self { first, stride: 256, plane: head.plane(), lines: head.dim, from: 0 }
    }

    /// The same, `steps` steps later.
    #[inline(always)]
    pub(super) fn at(self, steps: usize) -> Self {
        Self { from: self.from + steps, ..self }
    }

    #[inline(always)]
    unsafe fn ask<S: Simd, const TWO: bool>(&self, step: usize) {
        let line = self.from + step;
        if line < self.lines {
            let at = self.first.wrapping_add((line >> 2) * self.stride + (line & 3) * 64);
            S::prefetch(at);
            if TWO {
                S::prefetch(at.wrapping_add(self.plane));
            }
        }
    }
}

/// Copies `lanes` lanes of `steps` steps to `to`, as products take them.
#[inline(always)]
pub(super) unsafe fn prepare<S: Simd, const TWO: bool>(
    words: Words,
    steps: usize,
    lanes: usize,
    ahead: Ahead,
    to: *mut u8,
) -> Words {
    let width = if S::PAIRS { 8 } else { 4 };
    let stride = lanes * width;
    let plane = steps * stride;
    for step in 0..steps {
        for lane in (0..lanes).step_by(S::N) {
            ahead.ask::<S, TWO>(step * (lanes / S::N) + lane / S::N);
            for digit in 0..=usize::from(TWO) {
                let word = S::i_load(words.planes[digit].add(step * words.stride + 4 * lane));
                let to = to.add(digit * plane + step * stride + width * lane);
                if S::PAIRS {
                    let (even, odd) = S::widen(word);
                    S::i_store(to, even);
                    S::i_store(to.add(4 * S::N), odd);
                } else {
                    S::i_store(to, S::biased(word));
                }
            }
        }
    }
    Words { planes: [to, to.add(plane)], stride, ready: true }
}

/// Products of `count` rows of digits with the lanes from `lane` on: one vector of them or more, `left` at most. `done` gets
/// row, vector and result, which lacks the row's correction; returns the number of vectors.
#[inline(always)]
pub(super) unsafe fn products<S: Simd, const TWO: bool, const VALUES: bool>(
    words: Words,
    lane: usize,
    left: usize,
    steps: usize,
    x: *const i32,
    count: usize,
    ahead: Ahead,
    mut done: impl FnMut(usize, usize, S::I),
) -> usize {
    macro_rules! run {
        ($q:literal, $w:literal) => {{
            let out = if words.ready {
                chunk::<S, $q, $w, TWO, VALUES, true>(words, lane, steps, x, ahead)
            } else {
                chunk::<S, $q, $w, TWO, VALUES, false>(words, lane, steps, x, ahead)
            };
            for i in 0..$q {
                for w in 0..$w {
                    done(i, w, out[i][w]);
                }
            }
            $w
        }};
    }
    if S::QUERIES == 8 && count > 4 {
        return run!(8, 1);
    }
    if S::QUERIES == 8 && left >= 2 {
        if count > 2 { run!(4, 2) } else { run!(2, 2) }
    } else if count > 2 {
        run!(4, 1)
    } else {
        run!(2, 1)
    }
}

#[inline(always)]
unsafe fn chunk<
    S: Simd,
    const Q: usize,
    const W: usize,
    const TWO: bool,
    const VALUES: bool,
    const READY: bool,
>(
    words: Words,
    lane: usize,
    steps: usize,
    x: *const i32,
    ahead: Ahead,
) -> [[S::I; W]; Q] {
    let zero = S::i_splat(0);
    let mut high = [[zero; W]; Q];
    let mut mixed = [[zero; W]; Q];
    let width = if READY && S::PAIRS { 8 } else { 4 };
    let [plane_h, plane_l] = words.planes.map(|plane| plane.wrapping_add(lane * width));
    for step in 0..steps {
        if !READY {
            ahead.ask::<S, TWO>(step * W);
            if W == 2 {
                ahead.ask::<S, TWO>(step * W + 1);
            }
        }
        let row = |plane: usize, i: usize| {
            S::i_splat(x.add(Plane::at::<S, VALUES>(step, plane, i)).read_unaligned())
        };
        if S::PAIRS {
            // Whole codes times high digits, then high digits times low ones: the same sum.
            for (digit, plane) in [plane_h, plane_l].into_iter().enumerate().take(1 + usize::from(TWO)) {
                let mut even = [zero; W];
                let mut odd = [zero; W];
                for w in 0..W {
                    let at = plane.add(step * words.stride + w * width * S::N);
                    (even[w], odd[w]) = if READY {
                        (S::i_load(at), S::i_load(at.add(4 * S::N)))
                    } else {
                        S::widen(S::i_load(at))
                    };
                }
                for i in 0..Q {
                    let (x_even, x_odd) = (row(2 * digit, i), row(2 * digit + 1, i));
                    for w in 0..W {
                        mixed[i][w] = S::dp2(S::dp2(mixed[i][w], even[w], x_even), odd[w], x_odd);
                    }
                }
            }
            continue;
        }
        let load = |plane: *const u8, w: usize| {
            let word = S::i_load(plane.add(step * words.stride + 4 * w * S::N));
            if READY { word } else { S::biased(word) }
        };
        let (mut wh, mut wl) = ([zero; W], [zero; W]);
        for w in 0..W {
            wh[w] = load(plane_h, w);
            if TWO {
                wl[w] = load(plane_l, w);
            }
        }
        for i in 0..Q {
            let (xh, xl) = (row(0, i), row(1, i));
            for w in 0..W {
                high[i][w] = S::dp4_digits(high[i][w], wh[w], xh);
                mixed[i][w] = S::dp4_digits(mixed[i][w], wh[w], xl);
                if TWO {
                    mixed[i][w] = S::dp4_digits(mixed[i][w], wl[w], xh);
                }
            }
        }
    }
    if !S::PAIRS {
        for i in 0..Q {
            for w in 0..W {
                mixed[i][w] = S::i_add(S::i_shl::<8>(high[i][w]), mixed[i][w]);
            }
        }
    }
    mixed
}
