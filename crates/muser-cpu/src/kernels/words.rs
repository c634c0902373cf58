//! Words of 16 rows on their way into a tile of byte codes, whatever their type.
//!
//! [`Tile`] holds 16 rows of up to 256 inputs: code `k` of row `r` lies at byte `64 (k / 4) + 4 r + k % 4`.

use super::layout::ask_second_level;
use crate::simd::Simd;

/// 16 rows x 256 inputs, unpacked. Stays in the first-level cache.
#[repr(C, align(64))]
pub(crate) struct Tile {
    /// Unsigned codes.
    pub(super) codes: [u8; 4096],
    /// Integer scale of group `g`, row `r` at `16 g + r` (super-block types).
    pub(super) scale: [i32; 256],
    /// Two 16-bit factors of the group sums of `x` for each row: mins, or scales where codes have an offset. Entry
    /// `2 a` holds groups `4 a` and `4 a + 2`, entry `2 a + 1` groups `4 a + 1` and `4 a + 3`.
    pub(super) pairs: [i32; 128],
    /// Float scale; of the super-block at `r`, or of small block `b` at `16 b + r`.
    pub(super) d: [f32; 256],
    /// Float factor of the mins, likewise.
    pub(super) m: [f32; 256],
    /// Low digits beside the scales, if they are `wide` (NVFP4).
    pub(super) low: [i32; 256],
    /// Do scales need two digits?
    pub(super) wide: bool,
}

impl Tile {
    pub(super) fn zeroed() -> Self {
        Self {
            codes: [0; 4096],
            scale: [0; 256],
            pairs: [0; 128],
            d: [0.0; 256],
            m: [0.0; 256],
            low: [0; 256],
            wide: false,
        }
    }
}

const NIBBLE: i32 = 0x0f0f_0f0f;

/// How far ahead [`Words::next_asking`] asks, in bytes. 1,024 to 4,608 are worse than not asking at all: lines are then still on
/// their way when they are needed, and the hardware has stopped running ahead.
const AHEAD: usize = 9216;

/// Reads the words of one tile at lane offset `lane`.
pub(super) struct Words<S> {
    words: *const u8,
    pub(super) lane: usize,
    simd: std::marker::PhantomData<S>,
}

impl<S: Simd> Words<S> {
    #[inline(always)]
    pub(super) fn new(words: *const u8, lane: usize) -> Self {
        Self { words, lane, simd: std::marker::PhantomData }
    }

    /// The words from word `j` on.
    #[inline(always)]
    pub(super) fn block(&self, j: usize) -> Self {
        Self::new(self.words.wrapping_add(j * 64), self.lane)
    }

    #[inline(always)]
    pub(super) unsafe fn get(&self, j: usize) -> S::I {
        S::i_load(self.words.add(j * 64 + self.lane * 4))
    }

    /// [`Self::get`] that the compiler leaves in its place: loads before it stay before, loads after it after. The
    /// hardware follows a stream of ascending lines; the compiler would move loads by thousands of bytes.
    #[inline(always)]
    pub(super) unsafe fn next(&self, j: usize) -> S::I {
        let word = self.get(j);
        std::sync::atomic::compiler_fence(std::sync::atomic::Ordering::SeqCst);
        word
    }

    /// [`Self::next`]; with `ASK` also asks for the line that lies [`AHEAD`] behind. Into the second level: a line on its way to the first
    /// occupies one of few places there all the time.
    #[inline(always)]
    pub(super) unsafe fn next_asking<const ASK: bool>(&self, j: usize) -> S::I {
        let word = self.next(j);
        if ASK {
            ask_second_level(self.words.wrapping_add(j * 64 + AHEAD));
        }
        word
    }
}

/// Writes at lane offset `lane`.
#[inline(always)]
pub(super) unsafe fn put<S: Simd>(tile: &mut Tile, k_group: usize, lane: usize, codes: S::I) {
    S::i_store(tile.codes.as_mut_ptr().add(k_group * 64 + lane * 4), codes);
}

#[inline(always)]
pub(super) unsafe fn put_scale<S: Simd>(tile: &mut Tile, group: usize, lane: usize, scale: S::I) {
    S::i_store(tile.scale.as_mut_ptr().add(group * 16 + lane).cast(), scale);
}

#[inline(always)]
pub(super) unsafe fn put_pair<S: Simd>(tile: &mut Tile, pair: usize, lane: usize, value: S::I) {
    S::i_store(tile.pairs.as_mut_ptr().add(pair * 16 + lane).cast(), value);
}

#[inline(always)]
pub(super) unsafe fn low_nibbles<S: Simd>(v: S::I) -> S::I {
    S::i_and(v, S::i_splat(NIBBLE))
}

#[inline(always)]
pub(super) unsafe fn high_nibbles<S: Simd>(v: S::I) -> S::I {
    S::i_and(S::i_shr::<4>(v), S::i_splat(NIBBLE))
}

/// Shifts right by a count that is a constant after unrolling.
#[inline(always)]
pub(super) unsafe fn shift_right<S: Simd>(v: S::I, count: usize) -> S::I {
    match count {
        0 => v,
        1 => S::i_shr::<1>(v),
        2 => S::i_shr::<2>(v),
        3 => S::i_shr::<3>(v),
        4 => S::i_shr::<4>(v),
        5 => S::i_shr::<5>(v),
        6 => S::i_shr::<6>(v),
        7 => S::i_shr::<7>(v),
        8 => S::i_shr::<8>(v),
        12 => S::i_shr::<12>(v),
        16 => S::i_shr::<16>(v),
        20 => S::i_shr::<20>(v),
        24 => S::i_shr::<24>(v),
        28 => S::i_shr::<28>(v),
        _ => S::i_splat(0),
    }
}
