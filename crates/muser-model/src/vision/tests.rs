//! Files of the released shape and small ones in which one thing is wrong. The data of all tensors is a hole or zeros.

use muser_gguf::{GgmlType, GgufWriter, Value};

use super::*;

fn released() -> VisionConfig {
    VisionConfig {
        layers: 50,
        hidden: 1536,
        ffn: 8960,
        heads: 16,
        patch: 14,
        merge: 2,
        image: 896,
        projection: 6656,
        norm_eps: 1e-5,
        mean: [0.5; 3],
        std: [0.5; 3],
    }
}

fn small() -> VisionConfig {
    VisionConfig { layers: 2, hidden: 32, ffn: 64, heads: 4, image: 56, projection: 256, ..released() }
}

/// Writes a file of this shape, with other values for some keys and without the tensors that `keep` refuses.
fn file(c: &VisionConfig, changes: &[(&str, Value<'_>)], keep: impl Fn(&str) -> bool) -> Arc<GgufFile> {
    let mut writer = GgufWriter::new();
    let mut put = |key: &str, value: Value<'_>| {
        let changed = changes.iter().find(|(name, _)| *name == key).map_or(value, |(_, value)| *value);
        writer.put(key, changed).expect("unique");
    };
    put("general.architecture", Value::String("clip"));
    put("clip.has_vision_encoder", Value::Bool(true));
    put("clip.projector_type", Value::String("muse-glimmer"));
    put("clip.vision.attention.layer_norm_epsilon", Value::F32(c.norm_eps));
    for (name, value) in [
        ("block_count", c.layers),
        ("embedding_length", c.hidden),
        ("feed_forward_length", c.ffn),
        ("attention.head_count", c.heads),
        ("patch_size", c.patch),
        ("spatial_merge_size", c.merge),
        ("image_size", c.image),
        ("projection_dim", c.projection),
    ] {
        put(&format!("clip.vision.{name}"), Value::U32(value as u32));
    }
    writer.put_f32s("clip.vision.image_mean", c.mean).expect("unique");
    writer.put_f32s("clip.vision.image_std", c.std).expect("unique");
    for (name, shape) in contract(c, 48).into_iter().filter(|(name, _)| keep(name)) {
        let dims: Vec<u64> = shape.iter().map(|dim| *dim as u64).collect();
        writer.tensor(&name, &dims, GgmlType::F32).expect("valid");
    }
    let header = writer.finish();
    let mut bytes = header.bytes().to_vec();
    bytes.resize(header.file_len() as usize, 0);
    Arc::new(GgufFile::from_bytes(bytes).expect("valid"))
}

#[test]
fn the_released_projector_has_its_tensors() {
    let contract = contract(&released(), 4096);
    assert_eq!(contract.len(), 809);
    let parameters: usize = contract.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum();
    assert_eq!(parameters, 1_920_942_592);
    let full: Vec<usize> = (0..50).filter(|layer| released().is_full(*layer)).collect();
    assert_eq!((full.len(), full[0], full[12]), (13, 3, 49));
    assert_eq!((released().grid(), released().head_dim()), (32, 96));
}

#[test]
fn a_projector_loads_and_fits_its_target() {
    let projector = Projector::from_gguf(file(&small(), &[], |_| true)).expect("fits");
    assert_eq!((projector.config.clone(), projector.adapter), (small(), 48));
    let mut target = crate::synth::Preset::Tiny.geometry();
    projector.check_target(&target).expect("the same width");
    target.hidden = 512;
    let error = projector.check_target(&target).expect_err("another width").to_string();
    assert_eq!(
        error,
        "metadata key clip.vision.projection_dim: expected 512, the width of the text model, found 256"
    );
}

#[test]
fn wrong_figures_and_missing_tensors_are_refused_when_the_file_is_loaded() {
    let rows: &[(&str, Value<'_>, &str)] = &[
        ("patch_size", Value::U32(0), "expected 1 to 65536, found 0"),
        ("patch_size", Value::U32(13), "expected a multiple of 26, found 56"),
        ("spatial_merge_size", Value::U32(0), "expected 1 to 16, found 0"),
        ("block_count", Value::U32(100_000), "expected 1 to 512, found 100000"),
        ("attention.head_count", Value::U32(3), "expected heads that divide 32 into multiples of 4, found 3"),
        (
            "attention.head_count",
            Value::U32(16),
            "expected heads that divide 32 into multiples of 4, found 16",
        ),
        ("attention.layer_norm_epsilon", Value::F32(0.0), "expected a finite number above zero, found 0"),
    ];
    for (name, value, expected) in rows {
        let key = format!("clip.vision.{name}");
        let error = Projector::from_gguf(file(&small(), &[(&key, *value)], |_| true)).expect_err("refused");
        assert!(error.to_string().ends_with(expected), "{key}: {error}");
    }
    let error =
        Projector::from_gguf(file(&small(), &[("clip.projector_type", Value::String("qwen"))], |_| true));
    assert_eq!(
        error.expect_err("refused").to_string(),
        r#"metadata key clip.projector_type: expected "muse-glimmer", found "qwen""#
    );
    for (missing, _) in contract(&small(), 48) {
        let error = Projector::from_gguf(file(&small(), &[], |name| name != missing)).expect_err("refused");
        assert!(error.to_string().starts_with(&format!("tensor {missing}: expected")), "{error}");
    }
}
