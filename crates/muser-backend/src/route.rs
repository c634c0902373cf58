//! The name of the arithmetic that a model is computed with.

use muser_gguf::GgmlType;
use muser_model::Model;

use crate::arith::attention::{Digits, route};

/// Revision of [`crate::arith::nvfp4`]. The first arithmetic of that type (activations in runs of 32) had no name of its own.
pub(crate) const NVFP4_REVISION: &str = "nvfp4-2";

/// The numeric route of `model` on every backend that computes all of [`crate::arith`]: [`route`], and for models with NVFP4
/// matrices, or with a factor on the embedding table, the revision of that arithmetic too. So what was kept of other
/// models stays valid when it changes.
pub fn numeric_route(kv: Digits, model: &Model) -> String {
    let base = route(kv);
    if uses_nvfp4(model) { format!("{base}+{NVFP4_REVISION}") } else { base }
}

fn uses_nvfp4(model: &Model) -> bool {
    model.matrices().any(|m| m.ty == GgmlType::NVFP4) || model.token_embd.scale.to_bits() != 1.0f32.to_bits()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use muser_gguf::GgufFile;
    use muser_model::synth::{self, Preset};

    use super::*;

    fn model(ty: GgmlType) -> Model {
        let bytes = synth::tiny(&Preset::Tiny.geometry(), ty, 3).expect("possible");
        Model::from_gguf(Arc::new(GgufFile::from_bytes(bytes).expect("a file"))).expect("a model")
    }

    #[test]
    fn only_models_that_use_nvfp4_name_it() {
        assert_eq!(numeric_route(Digits::Two, &model(GgmlType::Q4_0)), "exact-1/kv16");
        assert_eq!(numeric_route(Digits::Two, &model(GgmlType::NVFP4)), "exact-1/kv16+nvfp4-2");
        assert_eq!(numeric_route(Digits::One, &model(GgmlType::NVFP4)), "exact-1/kv8+nvfp4-2");
        // One matrix is enough, and so is a factor on the table, which the first revision left out.
        let mut one = model(GgmlType::Q8_0);
        one.layers[1].ffn_up.ty = GgmlType::NVFP4;
        assert_eq!(numeric_route(Digits::Two, &one), "exact-1/kv16+nvfp4-2");
        let mut table = model(GgmlType::Q8_0);
        table.token_embd.scale = 0.5;
        assert_eq!(numeric_route(Digits::Two, &table), "exact-1/kv16+nvfp4-2");
    }
}
