//! The model file that comes with the repository opens, fits the contract and decodes to sane numbers.

use std::path::PathBuf;

use muser_gguf::{GgmlType, dequantize_row};
use muser_model::Model;

fn bundled() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../models/muse-tiny-Q4_K_M.gguf")
}

#[test]
fn the_bundled_model_loads() {
    let model = Model::load(bundled()).expect("the bundled model loads");
    let g = &model.geometry;
    assert_eq!(model.layers.len(), g.layers());
    assert_eq!(g.post_norm_eps, 1e-8);
    assert!(g.sliding.iter().any(|sliding| *sliding) && g.sliding.iter().any(|sliding| !*sliding));
    assert!(model.file.strings("tokenizer.ggml.tokens").expect("tokens are text").len() == g.vocab);

    // Trained rows have a spread far from zero and far from one; garbage would not.
    let row = model.layers[0].ffn_up.row(3);
    let mut values = vec![0.0; g.hidden];
    dequantize_row(model.layers[0].ffn_up.ty, row, &mut values).expect("the row decodes");
    let rms = (values.iter().map(|v| v * v).sum::<f32>() / values.len() as f32).sqrt();
    assert!((1e-3..1.0).contains(&rms), "{rms}");
    assert!(model.token_embd.ty != GgmlType::F32);
}
