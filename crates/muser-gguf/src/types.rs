//! The ggml tensor types: ids, names, block sizes.
//!
//! One table holds all figures. A type that is not in it has no size that we could trust, so a file with one is refused.

/// Type of a tensor's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[expect(missing_docs, reason = "names of the format")]
#[expect(non_camel_case_types, reason = "names of the format")]
pub enum GgmlType {
    F32,
    F16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    Q8_K,
    IQ2_XXS,
    IQ2_XS,
    IQ3_XXS,
    IQ1_S,
    IQ4_NL,
    IQ3_S,
    IQ2_S,
    IQ4_XS,
    IQ1_M,
    BF16,
    MXFP4,
    NVFP4,
    I8,
    I16,
    I32,
    I64,
    F64,
}

#[allow(clippy::enum_glob_use, reason = "a table of all of them")]
use GgmlType::*;

/// Type, id, name, values in a block, bytes of a block; in the order of the enum.
const TABLE: [(GgmlType, u32, &str, usize, usize); 30] = [
    (F32, 0, "F32", 1, 4),
    (F16, 1, "F16", 1, 2),
    (Q4_0, 2, "Q4_0", 32, 18),
    (Q4_1, 3, "Q4_1", 32, 20),
    (Q5_0, 6, "Q5_0", 32, 22),
    (Q5_1, 7, "Q5_1", 32, 24),
    (Q8_0, 8, "Q8_0", 32, 34),
    (Q2_K, 10, "Q2_K", 256, 84),
    (Q3_K, 11, "Q3_K", 256, 110),
    (Q4_K, 12, "Q4_K", 256, 144),
    (Q5_K, 13, "Q5_K", 256, 176),
    (Q6_K, 14, "Q6_K", 256, 210),
    (Q8_K, 15, "Q8_K", 256, 292),
    (IQ2_XXS, 16, "IQ2_XXS", 256, 66),
    (IQ2_XS, 17, "IQ2_XS", 256, 74),
    (IQ3_XXS, 18, "IQ3_XXS", 256, 98),
    (IQ1_S, 19, "IQ1_S", 256, 50),
    (IQ4_NL, 20, "IQ4_NL", 32, 18),
    (IQ3_S, 21, "IQ3_S", 256, 110),
    (IQ2_S, 22, "IQ2_S", 256, 82),
    (IQ4_XS, 23, "IQ4_XS", 256, 136),
    (IQ1_M, 29, "IQ1_M", 256, 56),
    (BF16, 30, "BF16", 1, 2),
    (MXFP4, 39, "MXFP4", 32, 17),
    (NVFP4, 40, "NVFP4", 64, 36),
    (I8, 24, "I8", 1, 1),
    (I16, 25, "I16", 1, 2),
    (I32, 26, "I32", 1, 4),
    (I64, 27, "I64", 1, 8),
    (F64, 28, "F64", 1, 8),
];

/// Ids that mean something elsewhere; only for the error message.
const REFUSED: [(u32, &str); 15] = [
    (4, "Q4_2, removed from the format"),
    (5, "Q4_3, removed from the format"),
    (9, "Q8_1, for activations only"),
    (31, "Q4_0_4_4, removed from the format"),
    (32, "Q4_0_4_8, removed from the format"),
    (33, "Q4_0_8_8, removed from the format"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (36, "IQ4_NL_4_4, removed from the format"),
    (37, "IQ4_NL_4_8, removed from the format"),
    (38, "IQ4_NL_8_8, removed from the format"),
    (41, "newer than muser"),
    (42, "newer than muser"),
    (1000, "a private NVFP4 payload of another program"),
    (1001, "private NVFP4 scales of another program"),
];

impl GgmlType {
    /// All types, in the order of the enum.
    pub fn all() -> impl Iterator<Item = GgmlType> {
        TABLE.iter().map(|row| row.0)
    }

    /// The type of this id in a tensor table; `None` when muser does not know its size.
    pub fn from_id(id: u32) -> Option<GgmlType> {
        TABLE.iter().find(|row| row.1 == id).map(|row| row.0)
    }

    /// The type of this name, in any case: `q4_k` or `Q4_K`.
    pub fn from_name(name: &str) -> Option<GgmlType> {
        TABLE.iter().find(|row| row.2.eq_ignore_ascii_case(name)).map(|row| row.0)
    }

    /// Id in a tensor table.
    pub fn id(self) -> u32 {
        TABLE[self as usize].1
    }

    /// Name as people write it.
    pub fn name(self) -> &'static str {
        TABLE[self as usize].2
    }

    /// Values in one block; a row is a whole number of blocks.
    pub fn block_len(self) -> usize {
        TABLE[self as usize].3
    }

    /// Bytes of one block.
    pub fn block_bytes(self) -> usize {
        TABLE[self as usize].4
    }

    /// Bytes of a row of `values` values; `None` when that is no whole number of blocks or does not fit `usize`.
    pub fn row_bytes(self, values: usize) -> Option<usize> {
        if !values.is_multiple_of(self.block_len()) {
            return None;
        }
        (values / self.block_len()).checked_mul(self.block_bytes())
    }

    /// Can [`crate::dequantize_row`] decode it?
    pub fn is_decodable(self) -> bool {
        !matches!(
            self,
            IQ2_XXS | IQ2_XS | IQ3_XXS | IQ1_S | IQ3_S | IQ2_S | IQ1_M | I8 | I16 | I32 | I64 | F64
        )
    }
}

/// An id without a known size, in words.
pub(crate) fn describe_unknown_id(id: u32) -> String {
    match REFUSED.iter().find(|row| row.0 == id) {
        Some((_, name)) => format!("{id} ({name})"),
        None => id.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_the_enum_and_ids_are_unique() {
        for (index, row) in TABLE.iter().enumerate() {
            assert_eq!(row.0 as usize, index, "{}", row.2);
            assert_eq!(GgmlType::from_id(row.1), Some(row.0));
            assert_eq!(GgmlType::from_name(&row.2.to_lowercase()), Some(row.0));
        }
        for (id, name) in REFUSED {
            assert_eq!(GgmlType::from_id(id), None, "{name}");
        }
    }

    #[test]
    fn row_bytes_of_the_released_model() {
        for (ty, values, bytes) in
            [(Q4_K, 6656, 3744), (Q5_K, 6656, 4576), (Q6_K, 19968, 16380), (Q6_K, 4096, 3360)]
        {
            assert_eq!(ty.row_bytes(values), Some(bytes));
        }
        assert_eq!(Q4_K.row_bytes(255), None);
        assert_eq!(F32.row_bytes(usize::MAX), None);
    }
}
