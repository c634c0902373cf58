//! The ggml tensor types: ids, block sizes.

/// Type of a tensor's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "names of the format")]
#[expect(non_camel_case_types, reason = "names of the format")]
pub enum GgmlType {
    F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, Q8_K, IQ2_XXS, IQ2_XS, IQ3_XXS, IQ1_S, IQ4_NL,
    IQ3_S, IQ2_S, IQ4_XS, IQ1_M, BF16, MXFP4, NVFP4, I8, I16, I32, I64, F64,
}
