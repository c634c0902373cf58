//! The forms of the fused kernel (`kernels/matmul_fused.cu`): how many rows and warpgroups a CTA has.

use crate::matrix::Tile;

/// A form of the fused kernel.
#[derive(Clone, Copy)]
pub(crate) struct FusedShape {
    /// Rows (tokens) of a CTA.
    pub(crate) tokens: u32,
    /// Warpgroups of a CTA, each with 64 output rows.
    pub(crate) groups: u32,
}

/// By ascending number of rows (`FUSED_ALL` in `matmul_fused.cu`).
pub(crate) const FUSED_SHAPES: [FusedShape; 3] = [
    FusedShape { tokens: 32, groups: 4 },
    FusedShape { tokens: 64, groups: 3 },
    FusedShape { tokens: 128, groups: 2 },
];
/// Most slots of its ring.
const FUSED_SLOTS: u32 = 6;

impl FusedShape {
    /// The one for so many rows, and its place.
    pub(crate) fn of(n: usize) -> (usize, Self) {
        let fits = FUSED_SHAPES.iter().position(|shape| n <= shape.tokens as usize);
        let place = fits.unwrap_or(FUSED_SHAPES.len() - 1);
        (place, FUSED_SHAPES[place])
    }

    /// Shared memory: a ring of super-blocks, as many as fit; two barriers and what the producer says of a slot.
    pub(crate) fn shared_bytes(self, tile: Tile, limit: u32) -> u32 {
        let slot = self.tokens * (256 + tile.sum_bytes() + 4) + self.groups * 4 * tile.bytes() as u32;
        let slot = slot.next_multiple_of(1024);
        // NVFP4's scales as integers, of each warp.
        let scratch = if tile == Tile::Nv4 { self.groups * 4 * 512 } else { 0 };
        ((limit - 1152 - scratch) / slot).min(FUSED_SLOTS) * (slot + 32) + scratch
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::Tuning;

    #[test]
    fn the_smallest_form_that_holds_the_rows_and_three_super_blocks_in_flight() {
        for (n, tokens) in [(17, 32), (32, 32), (33, 64), (64, 64), (65, 128), (1024, 128)] {
            assert_eq!(FusedShape::of(n).1.tokens, tokens, "{n} rows");
        }
        let limit = Tuning::of(90).shared_bytes;
        for shape in FUSED_SHAPES {
            for tile in [Tile::Q4K, Tile::Q5K, Tile::Q6K, Tile::Nv4] {
                let bytes = shape.shared_bytes(tile, limit);
                assert!(bytes <= limit, "{tile:?}, {} tokens: {bytes} bytes", shape.tokens);
                let slot = shape.tokens * 256 + shape.groups * 4 * tile.bytes() as u32;
                assert!(bytes / slot >= 3, "{tile:?}, {} tokens: a ring of less than three", shape.tokens);
            }
        }
    }
}
