//! How quantised weights lie in memory when 16 output rows are interleaved.
//!
//! A *tile row* is 16 output rows over all of K. Of each block, the 32-bit words of the file's layout are transposed:
//! one word of rows 0..16 becomes 64 consecutive bytes, so that lane `r` of a 16-lane vector belongs to output row `r`
//! and nothing needs a sum across lanes. Types whose size is not a multiple of four keep their odd scale (an f16, or one
//! byte) in front of the words of the tile row:
//!
//! ```text
//! tile row:  extra 0           extra 1   ...   block 0                block 1                ...
//!            d r0 .. d r15 |   d r0 ...        w0 r0..r15 | w1 ... |  w0 r0..r15 | w1 ... |
//! ```
//!
//! Words of a block lie in the order in which the one-row kernels read them ([`BlockShape::place`]): the hardware's
//! streams follow nothing but ascending lines. Not one byte more than the file has, but for rounding a row's extras up to
//! a cache line. A matrix is either transposed once at load (*repacked*) or tile by tile into
//! scratch memory at each use (*native*); both give the same words to the same code, hence the same bits.

use muser_gguf::GgmlType;

/// Rows of a tile.
pub(crate) const TILE_ROWS: usize = 16;

/// Words of a Q5_K block: no other type has as many.
const FIVE_BITS: usize = 44;
/// Words of a Q6_K block: no other type has as many.
const SIX_BITS: usize = 52;

/// Q5_K: head and scales, then each word of fifth bits before the first word of nibbles that it belongs to.
#[inline(always)]
pub(crate) const fn place_five(j: usize) -> usize {
    match j {
        4..12 => 2 * j - 4,
        12..20 => 2 * j - 19,
        _ => j,
    }
}

/// Q6_K: for each half its two words of scales, then low bits, low bits of 32 inputs on, and their high bits, in turn.
#[inline(always)]
pub(crate) const fn place_six(j: usize) -> usize {
    match j {
        0..32 => 26 * (j / 16) + 2 + 3 * (j % 8) + j % 16 / 8,
        32..48 => 26 * ((j - 32) / 8) + 4 + 3 * (j % 8),
        _ => 26 * ((j - 48) / 2) + j % 2,
    }
}

/// Words and odd bytes of one block of a type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockShape {
    /// Values of a block.
    pub(crate) len: usize,
    /// Bytes of a block of one row.
    pub(crate) bytes: usize,
    /// Where the 32-bit words begin.
    pub(crate) words_at: usize,
    /// How many there are.
    pub(crate) words: usize,
    /// Where the odd scale lies.
    pub(crate) extra_at: usize,
    /// Its size: 0, 1 or 2 bytes.
    pub(crate) extra: usize,
}

impl BlockShape {
    /// The shape of a quantised type that has kernels, `None` for others.
    pub(crate) fn of(ty: GgmlType) -> Option<Self> {
        let shape = |len, bytes, words_at, words, extra_at, extra| Self {
            len,
            bytes,
            words_at,
            words,
            extra_at,
            extra,
        };
        Some(match ty {
            GgmlType::Q4_0 | GgmlType::IQ4_NL => shape(32, 18, 2, 4, 0, 2),
            GgmlType::Q4_1 => shape(32, 20, 0, 5, 0, 0),
            GgmlType::Q5_0 => shape(32, 22, 2, 5, 0, 2),
            GgmlType::Q5_1 => shape(32, 24, 0, 6, 0, 0),
            GgmlType::Q8_0 => shape(32, 34, 2, 8, 0, 2),
            GgmlType::Q2_K => shape(256, 84, 0, 21, 0, 0),
            GgmlType::Q3_K => shape(256, 110, 0, 27, 108, 2),
            GgmlType::Q4_K => shape(256, 144, 0, 36, 0, 0),
            GgmlType::Q5_K => shape(256, 176, 0, 44, 0, 0),
            GgmlType::Q6_K => shape(256, 210, 0, 52, 208, 2),
            GgmlType::IQ4_XS => shape(256, 136, 0, 34, 0, 0),
            GgmlType::MXFP4 => shape(32, 17, 1, 4, 0, 1),
            GgmlType::NVFP4 => shape(64, 36, 0, 9, 0, 0),
            _ => return None,
        })
    }

    /// Bytes of the transposed words of one block.
    pub(crate) fn word_bytes(&self) -> usize {
        self.words * 4 * TILE_ROWS
    }

    /// Bytes of the odd scales of one block of 16 rows.
    pub(crate) fn extra_bytes(&self) -> usize {
        self.extra * TILE_ROWS
    }

    /// Where the words of a tile row of `blocks` blocks begin; its odd scales begin at 0.
    pub(crate) fn words_start(&self, blocks: usize) -> usize {
        (self.extra_bytes() * blocks).next_multiple_of(64)
    }

    /// Bytes of a tile row of `blocks` blocks: whole cache lines.
    pub(crate) fn tile_bytes(&self, blocks: usize) -> usize {
        self.words_start(blocks) + self.word_bytes() * blocks
    }

    /// Place in the transposed block of the file's word `j`.
    #[inline(always)]
    pub(crate) const fn place(&self, j: usize) -> usize {
        match self.words {
            FIVE_BITS => place_five(j),
            SIX_BITS => place_six(j),
            _ => j,
        }
    }

    /// Transposes `count` blocks of 16 rows. `row[r]` points at the first block of row `r`.
    ///
    /// # Safety
    /// Rows are readable for `count * bytes`, `words` writable for `count * word_bytes()`, `extra` for
    /// `count * extra_bytes()`.
    #[inline]
    pub(crate) unsafe fn transpose(
        &self,
        row: &[*const u8; TILE_ROWS],
        count: usize,
        words: *mut u8,
        extra: *mut u8,
    ) {
        for block in 0..count {
            let words = words.add(block * self.word_bytes());
            let from = block * self.bytes + self.words_at;
            let whole = self.words / 4 * 4;
            for j in (0..whole).step_by(4) {
                let to: [*mut u8; 4] = std::array::from_fn(|i| words.wrapping_add(self.place(j + i) * 64));
                for r in (0..TILE_ROWS).step_by(4) {
                    let four = std::array::from_fn(|i| row[r + i].wrapping_add(from + 4 * j));
                    transpose_four(&four, to.map(|to| to.wrapping_add(4 * r)));
                }
            }
            for j in whole..self.words {
                for (r, row) in row.iter().enumerate() {
                    let word = row.add(from + 4 * j).cast::<u32>().read_unaligned();
                    words.add((self.place(j) * TILE_ROWS + r) * 4).cast::<u32>().write_unaligned(word);
                }
            }
            let extra = extra.add(block * self.extra_bytes());
            let from = block * self.bytes + self.extra_at;
            for (r, row) in row.iter().enumerate() {
                match self.extra {
                    0 => break,
                    2 => extra
                        .cast::<u16>()
                        .add(r)
                        .write_unaligned(row.add(from).cast::<u16>().read_unaligned()),
                    _ => *extra.add(r) = *row.add(from),
                }
            }
        }
    }
}

/// Asks for the cache line at `p`, which may be anywhere.
#[inline(always)]
pub(super) fn ask(p: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has the instruction; it never faults.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(p.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
}

/// As [`ask`], no nearer than into the second-level cache.
#[inline(always)]
pub(super) fn ask_second_level(p: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as in `ask`.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(p.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
}

/// Asks for the cache line at `p`, which may be anywhere, to write to it.
#[inline(always)]
pub(super) fn ask_to_write(p: *mut f32) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the instruction never faults; processors that do not have it take it for no operation.
    unsafe {
        std::arch::asm!("prefetchw byte ptr [{p}]", p = in(reg) p, options(readonly, nostack, preserves_flags));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
}

/// Four words of four rows: word `i` of row `r` goes to word `r` of `to[i]`.
///
/// # Safety
/// All are valid for four words.
#[inline(always)]
unsafe fn transpose_four(from: &[*const u8; 4], to: [*mut u8; 4]) {
    // Every x86-64 processor has these instructions.
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::*;
        // SAFETY: by the contract of this function.
        let [a, b, c, d] = from.map(|p| unsafe { _mm_loadu_si128(p.cast()) });
        let (ab, cd) = (_mm_unpacklo_epi32(a, b), _mm_unpacklo_epi32(c, d));
        let (ab_high, cd_high) = (_mm_unpackhi_epi32(a, b), _mm_unpackhi_epi32(c, d));
        _mm_storeu_si128(to[0].cast(), _mm_unpacklo_epi64(ab, cd));
        _mm_storeu_si128(to[1].cast(), _mm_unpackhi_epi64(ab, cd));
        _mm_storeu_si128(to[2].cast(), _mm_unpacklo_epi64(ab_high, cd_high));
        _mm_storeu_si128(to[3].cast(), _mm_unpackhi_epi64(ab_high, cd_high));
    }
    #[cfg(not(target_arch = "x86_64"))]
    for (r, from) in from.iter().enumerate() {
        for (i, to) in to.iter().enumerate() {
            to.cast::<u32>().add(r).write_unaligned(from.cast::<u32>().add(i).read_unaligned());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_has_a_place_of_its_own() {
        for ty in (0..64).filter_map(GgmlType::from_id) {
            let Some(shape) = BlockShape::of(ty) else { continue };
            let mut places: Vec<_> = (0..shape.words).map(|j| shape.place(j)).collect();
            places.sort_unstable();
            assert_eq!(places, (0..shape.words).collect::<Vec<_>>(), "{}", ty.name());
            assert_eq!(shape.words == FIVE_BITS, ty == GgmlType::Q5_K);
            assert_eq!(shape.words == SIX_BITS, ty == GgmlType::Q6_K);
        }
    }
}
