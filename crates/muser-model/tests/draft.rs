//! Draft models: the contract alone, and against a target.

use std::sync::Arc;

use muser_gguf::{GgmlType, GgufFile, GgufWriter, Value};
use muser_model::synth::{self, Mix, Preset, SynthOptions};
use muser_model::{DflashConfig, Draft, Model};

fn config() -> DflashConfig {
    DflashConfig {
        hidden: 256,
        ffn: 512,
        heads: 4,
        kv_heads: 2,
        head_dim: 64,
        context: 4096,
        window: 64,
        sliding: vec![true; 2],
        rope_theta: 1e4,
        rms_eps: 1e-5,
        block_size: 8,
        target_layers: vec![1, 3],
        mask_token: 500,
        vocab: None,
    }
}

fn file(mix: Mix) -> GgufFile {
    GgufFile::from_bytes(synth::draft_to_bytes(&config(), mix, 1).expect("possible")).expect("valid")
}

/// The file with other keys, or more of them, and perhaps one tensor more; its data is zeros.
fn changed(keys: &[(&str, Value<'_>)], tensor: Option<&str>) -> Arc<GgufFile> {
    let file = file(Mix::Uniform(GgmlType::F32));
    let mut writer = GgufWriter::new();
    for (key, value) in keys {
        writer.put(key, *value).expect("unique");
    }
    for (key, value) in file.metadata().filter(|(key, _)| keys.iter().all(|(changed, _)| changed != key)) {
        writer.put(key, value).expect("unique");
    }
    for info in file.tensors() {
        writer.tensor(&info.name, &info.dims, info.ty).expect("valid");
    }
    if let Some(name) = tensor {
        writer.tensor(name, &[1], GgmlType::F32).expect("unique");
    }
    let header = writer.finish();
    let mut bytes = header.bytes().to_vec();
    bytes.resize(header.file_len() as usize, 0);
    Arc::new(GgufFile::from_bytes(bytes).expect("valid"))
}

fn refusal(file: Arc<GgufFile>) -> String {
    Draft::from_gguf(file).map(|_| ()).expect_err("refused").to_string()
}

fn target(vocab: usize) -> Model {
    let mut options = SynthOptions::new(Preset::Tiny, Mix::Uniform(GgmlType::Q8_0));
    let mut geometry = Preset::Tiny.geometry();
    geometry.vocab = vocab;
    options.geometry = Some(geometry);
    let bytes = synth::to_bytes(&options).expect("possible");
    Model::from_gguf(Arc::new(GgufFile::from_bytes(bytes).expect("valid"))).expect("fits")
}

#[test]
fn synthetic_drafts_load_and_fit() {
    for mix in ["f32", "q8_0", "q4_k_m", "nvfp4"] {
        let draft = Draft::from_gguf(Arc::new(file(Mix::from_name(mix).expect("a mix")))).expect("loads");
        assert_eq!(draft.config, config());
        assert_eq!((draft.fc.cols, draft.fc.rows, draft.config.max_draft()), (512, 256, 7));
        draft.check_target(&target(512)).expect("fits");
    }
}

#[test]
fn wrong_figures_are_refused() {
    let rows: &[(&str, Value<'_>, &str)] = &[
        ("dflash.block_count", Value::U32(65), "metadata key dflash.block_count: expected 1 to 64, found 65"),
        (
            "dflash.block_size",
            Value::U32(1),
            "metadata key dflash.block_size: expected 2 to 256, the anchor and drafts, found 1",
        ),
        (
            "dflash.attention.head_count_kv",
            Value::U32(3),
            "metadata key dflash.attention.head_count_kv: expected a divisor of the 4 query heads, found 3",
        ),
        (
            "dflash.attention.causal",
            Value::Bool(true),
            "metadata key dflash.attention.causal: expected false: rows of a draft block see each other, found true",
        ),
        (
            "dflash.target_layers",
            Value::U32(3),
            "metadata key dflash.target_layers: expected an array, found u32 3",
        ),
        (
            "dflash.feed_forward_length",
            Value::U32(128),
            "tensor blk.0.ffn_gate.weight: expected shape [256, 128], found [256, 512]",
        ),
        (
            "dflash.selector_top_k",
            Value::U32(16),
            "metadata key dflash.selector_top_k: expected nothing of this name: this is DFlash, not DFlash2, found a DFlash2 draft, \
             which muser cannot run",
        ),
    ];
    for (key, value, expected) in rows {
        assert_eq!(refusal(changed(&[(key, *value)], None)), *expected);
    }
    for name in ["selector_hidden.weight", "blk.0.attn_conv_k.weight", "blk.1.ffn_conv_in.weight"] {
        let found = refusal(changed(&[], Some(name)));
        assert!(found.starts_with(&format!("tensor {name}: expected nothing of this name")), "{found}");
    }
}

#[test]
fn a_draft_of_another_target_is_refused() {
    let draft = Draft::from_gguf(Arc::new(file(Mix::Uniform(GgmlType::F32)))).expect("loads");
    let misfit = |draft: &Draft, target: &Model| draft.check_target(target).expect_err("refused").to_string();
    assert_eq!(
        misfit(&draft, &target(500)),
        "metadata key tokenizer.ggml.mask_token_id: expected an id below the 500 tokens of the target, found 500"
    );
    let mut other = target(512);
    other.geometry.hidden = 512;
    assert_eq!(
        misfit(&draft, &other),
        "metadata key dflash.embedding_length: expected 512, the target's, found 256"
    );
    other = target(512);
    other.geometry.sliding.truncate(3);
    assert_eq!(misfit(&draft, &other), "metadata key dflash.target_layers: expected layers below 3, found 3");
}
