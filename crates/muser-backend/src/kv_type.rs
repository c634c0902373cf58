//! How keys and values are stored, and how many blocks of them.

use crate::arith::attention::Digits;

/// Storage type of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvType {
    /// 4 bytes; the scalar reference's default, for comparisons.
    F32,
    /// 2 bytes: the scalar reference, and the CPU for comparisons and its vision tower. Values are clamped to the finite range when stored.
    F16,
    /// Two int8 digits a value, an f32 scale a head and position, the default: [`crate::arith::attention`].
    Int16,
    /// One int8 digit a value.
    Int8,
}

impl KvType {
    /// Bytes of the codes of one stored value.
    pub fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Int16 => 2,
            Self::Int8 => 1,
        }
    }

    /// Digits of a stored value, `None` for floats.
    pub fn digits(self) -> Option<Digits> {
        match self {
            Self::F32 | Self::F16 => None,
            Self::Int16 => Some(Digits::Two),
            Self::Int8 => Some(Digits::One),
        }
    }

    /// Bytes of K and V of one position and one KV head, scales included.
    pub fn head_bytes(self, head_dim: usize) -> usize {
        2 * head_dim * self.size() + self.digits().map_or(0, |_| 2 * size_of::<f32>())
    }

    /// `f32`, `f16`, `16`, `8`.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Int16 => "16",
            Self::Int8 => "8",
        }
    }
}

/// Blocks per group that an executor holds memory for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvCapacity {
    /// Blocks of the full-attention group.
    pub full: u32,
    /// Blocks of the sliding-window group.
    pub sliding: u32,
}
