//! How a block of K and V in digits ([`crate::arith::attention`]) lies in memory: the one layout of exporting, importing and
//! lending, and of every backend that computes in it.
//!
//! A block of a group holds all layers of the group, one after the other, a layer its KV heads. Of one head, for 256 positions:
//!
//! ```text
//! K hi      [dim / 4][256 positions][4 dims]   int8      four bytes are four inputs of a dot product
//! K lo      the same; only with 16-bit KV
//! V hi      [64][dim][4 positions]             int8      position 4 i + j is byte j of group i
//! V lo      the same; only with 16-bit KV
//! d of k    [256]                              f32
//! d of v    [256]                              f32
//! ```

use std::ops::Range;

use muser_kv::BLOCK_LEN;

use crate::arith::attention::Digits;

/// The name of this layout, for whoever keeps blocks: equal names and sizes are equal bytes, whichever backend wrote them.
pub const NAME: &str = "digits-1";

/// One KV head of one layer of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadLayout {
    /// Values of a head; a multiple of 4.
    pub dim: usize,
    /// Digits of a value.
    pub digits: Digits,
}

impl HeadLayout {
    /// Bytes of a plane of digits.
    pub fn plane(&self) -> usize {
        BLOCK_LEN * self.dim
    }

    /// Where a plane of K's digits begins; plane 0 is the high one.
    pub fn k(&self, plane: usize) -> usize {
        plane * self.plane()
    }

    /// Where a plane of V's digits begins.
    pub fn v(&self, plane: usize) -> usize {
        (self.digits.count() + plane) * self.plane()
    }

    /// Where the scales of k begin.
    pub fn k_scales(&self) -> usize {
        2 * self.digits.count() * self.plane()
    }

    /// Where the scales of v begin.
    pub fn v_scales(&self) -> usize {
        self.k_scales() + 4 * BLOCK_LEN
    }

    /// Bytes of a head in a block.
    pub fn bytes(&self) -> usize {
        self.v_scales() + 4 * BLOCK_LEN
    }

    /// Byte of dim `d` of position `row` in a plane of K.
    pub fn k_at(&self, row: usize, d: usize) -> usize {
        (d / 4 * BLOCK_LEN + row) * 4 + d % 4
    }

    /// Byte of dim `d` of position `row` in a plane of V.
    pub fn v_at(&self, row: usize, d: usize) -> usize {
        (row / 4 * self.dim + d) * 4 + row % 4
    }

    /// Makes some positions of a head those of a block that nothing was written to.
    pub fn clear(&self, head: &mut [u8], rows: Range<usize>) {
        for plane in 0..self.digits.count() {
            let k = &mut head[self.k(plane)..][..self.plane()];
            for positions in k.chunks_exact_mut(4 * BLOCK_LEN) {
                positions[4 * rows.start..4 * rows.end].fill(0);
            }
            let v = &mut head[self.v(plane)..][..self.plane()];
            for row in rows.clone() {
                let at = self.v_at(row, 0);
                v[at..at + 4 * self.dim - row % 4].iter_mut().step_by(4).for_each(|byte| *byte = 0);
            }
        }
        for scales in [self.k_scales(), self.v_scales()] {
            head[scales + 4 * rows.start..scales + 4 * rows.end].fill(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_one_place_and_clearing_takes_whole_rows() {
        for digits in [Digits::One, Digits::Two] {
            let layout = HeadLayout { dim: 32, digits };
            let mut head = vec![0u8; layout.bytes()];
            let mut mark = |row: usize, value: u8| {
                for plane in 0..digits.count() {
                    for d in 0..layout.dim {
                        for at in
                            [layout.k(plane) + layout.k_at(row, d), layout.v(plane) + layout.v_at(row, d)]
                        {
                            assert_eq!(head[at], 0, "no byte belongs to two");
                            head[at] = value;
                        }
                    }
                }
                for scales in [layout.k_scales(), layout.v_scales()] {
                    head[scales + 4 * row..][..4].fill(value);
                }
            };
            (0..BLOCK_LEN).for_each(|row| mark(row, if (100..203).contains(&row) { 2 } else { 1 }));
            assert!(head.iter().all(|byte| *byte != 0), "no byte is nobody's");
            layout.clear(&mut head, 100..203);
            let left: usize = head.iter().map(|byte| usize::from(*byte)).sum();
            assert_eq!(left, (256 - 103) * (2 * digits.count() * layout.dim + 8));
            assert!(head.iter().all(|byte| *byte != 2), "the rows are gone, and the others are there");
        }
    }

    #[test]
    fn sizes_of_the_30b_model() {
        assert_eq!(2 * HeadLayout { dim: 128, digits: Digits::Two }.bytes(), 266_240);
        assert_eq!(2 * HeadLayout { dim: 128, digits: Digits::One }.bytes(), 135_168);
    }
}
