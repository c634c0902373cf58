//! The model files that come with the repository open, fit the contract and decode to sane numbers.

use std::path::PathBuf;

use muser_gguf::{GgmlType, dequantize_row};
use muser_model::{Draft, Model};

fn models() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../models")
}

#[test]
fn the_bundled_model_loads() {
    let model = Model::load(models().join("muse-tiny-Q4_K_M.gguf")).expect("the bundled model loads");
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

#[test]
fn the_bundled_draft_fits_the_bundled_model() {
    let model = Model::load(models().join("muse-tiny-Q4_K_M.gguf")).expect("the bundled model loads");
    let draft = Draft::load(muser_testkit::muse_tiny_draft()).expect("the bundled draft loads");
    draft.check_target(&model).expect("they fit");
    let c = &draft.config;
    assert_eq!((c.block_size, c.max_draft(), c.target_layers.as_slice()), (8, 7, &[2, 4, 7][..]));
    assert_eq!((draft.layers.len(), draft.fc.cols, c.mask_token), (2, 3 * 512, 4094));

    let mut other = model.clone();
    other.geometry.sliding.truncate(4);
    let error = draft.check_target(&other).expect_err("too few layers").to_string();
    assert_eq!(error, "metadata key dflash.target_layers: expected layers below 4, found 7");
    other = model.clone();
    other.geometry.vocab += 1;
    let error = draft.check_target(&other).expect_err("another vocabulary").to_string();
    assert_eq!(
        error,
        "metadata key tokenizer.ggml.tokens: expected 4097 tokens, as the target has, found 4096"
    );
    let error = Model::from_gguf(draft.file).map(|_| ()).expect_err("a draft is no model").to_string();
    assert_eq!(
        error,
        "metadata key general.architecture: expected \"muse-glimmer\", found \"dflash\" (a draft model, which works only beside its \
         target)"
    );
}
