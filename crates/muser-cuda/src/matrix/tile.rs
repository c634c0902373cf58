//! What a weight type becomes on the card: a tile, or the blocks of the file.

use muser_gguf::GgmlType;

/// Layout of a weight tile (16 rows x 256 of k), see `kernels/tiles.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Tile {
    Q4K,
    Q5K,
    Q6K,
    Nv4,
    Q80,
}

impl Tile {
    pub(crate) const ALL: [Self; 5] = [Self::Q4K, Self::Q5K, Self::Q6K, Self::Nv4, Self::Q80];

    /// The tile that holds a type's integers, if there is one.
    pub(crate) fn of(ty: GgmlType) -> Option<Self> {
        Some(match ty {
            GgmlType::Q4_K => Self::Q4K,
            GgmlType::Q5_K => Self::Q5K,
            GgmlType::Q6_K | GgmlType::Q3_K => Self::Q6K,
            GgmlType::Q8_0 | GgmlType::Q4_0 | GgmlType::Q5_0 | GgmlType::IQ4_NL => Self::Q80,
            GgmlType::NVFP4 => Self::Nv4,
            _ => return None,
        })
    }

    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::Q4K | Self::Nv4 => 2304,
            Self::Q5K => 2816,
            Self::Q6K => 3360,
            Self::Q80 => 4352,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Q4K => "q4k",
            Self::Q5K => "q5k",
            Self::Q6K => "q6k",
            Self::Nv4 => "nv4",
            Self::Q80 => "q80",
        }
    }

    /// Does it multiply with activations that have one scale per 32 values (else one per 256)?
    pub(crate) fn small_blocks(self) -> bool {
        self == Self::Q80
    }

    /// Bytes of a token's group sums beside a super-block, for the mins of the weights.
    pub(crate) fn sum_bytes(self) -> u32 {
        if matches!(self, Self::Q4K | Self::Q5K) { 32 } else { 0 }
    }

    /// Shared memory that a warp of the few- and many-row kernels needs beside a tile (`scratch_bytes` in `tiles.cuh`).
    pub(super) fn scratch_bytes(self) -> u32 {
        if self == Self::Nv4 { 1088 } else { 0 }
    }
}

/// How a type without a tile multiplies, see `kernels/matmul_any.cu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AnyKind {
    /// One activation scale per 256 values.
    Super,
    /// One per 32 values.
    Small,
    /// Activations in f32.
    Float,
}

impl AnyKind {
    /// `None` for types that cannot be multiplied with.
    pub(crate) fn of(ty: GgmlType) -> Option<Self> {
        Some(match ty {
            GgmlType::F32 | GgmlType::F16 | GgmlType::BF16 => Self::Float,
            GgmlType::Q2_K
            | GgmlType::Q3_K
            | GgmlType::Q4_K
            | GgmlType::Q5_K
            | GgmlType::Q6_K
            | GgmlType::IQ4_XS
            | GgmlType::NVFP4 => Self::Super,
            GgmlType::Q4_0
            | GgmlType::Q4_1
            | GgmlType::Q5_0
            | GgmlType::Q5_1
            | GgmlType::Q8_0
            | GgmlType::IQ4_NL
            | GgmlType::MXFP4 => Self::Small,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_decodable_type_has_a_product() {
        for ty in GgmlType::all().filter(|ty| ty.is_decodable() && *ty != GgmlType::Q8_K) {
            let kind = AnyKind::of(ty).unwrap_or_else(|| panic!("{} has no product", ty.name()));
            assert_eq!(kind == AnyKind::Float, ty.block_len() == 1, "{}", ty.name());
            let large = ty.block_len() == 256 || ty == GgmlType::NVFP4;
            assert_eq!(kind == AnyKind::Super, large, "{}", ty.name());
            if let Some(tile) = Tile::of(ty) {
                assert_eq!(tile.small_blocks(), kind == AnyKind::Small, "{}", ty.name());
            }
        }
    }

    #[test]
    fn a_tile_is_not_a_byte_more_than_its_blocks() {
        for (ty, tile) in [
            (GgmlType::Q4_K, Tile::Q4K),
            (GgmlType::Q5_K, Tile::Q5K),
            (GgmlType::Q6_K, Tile::Q6K),
            (GgmlType::NVFP4, Tile::Nv4),
            (GgmlType::Q8_0, Tile::Q80),
        ] {
            assert_eq!(Tile::of(ty), Some(tile));
            assert_eq!(tile.bytes(), 16 * ty.row_bytes(256).expect("256 values are whole blocks"));
        }
    }
}
