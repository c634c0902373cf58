//! Files of the released shape and small ones in which one thing is wrong. The data of all tensors is a hole or zeros.

use std::sync::Arc;

use muser_gguf::{GgmlType, GgufWriter};

use super::*;

fn released() -> VisionConfig {
    VisionConfig::released()
}

fn small() -> VisionConfig {
    VisionConfig { layers: 2, hidden: 32, ffn: 64, heads: 4, image: 56, projection: 256, ..released() }
}

/// Writes a file of this shape, with other values for some keys and without the tensors that `keep` refuses.
fn file(c: &VisionConfig, changes: &[(&str, Value<'_>)], keep: impl Fn(&str) -> bool) -> Arc<GgufFile> {
    with_tensors(c, changes, keep, &[])
}

/// The same with further keys and tensors.
fn with_tensors(
    c: &VisionConfig,
    changes: &[(&str, Value<'_>)],
    keep: impl Fn(&str) -> bool,
    more: &[(&str, &[u64], GgmlType)],
) -> Arc<GgufFile> {
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
    for (name, value) in changes {
        // Those that stand already have been changed.
        let _ = writer.put(name, *value);
    }
    writer.put_f32s("clip.vision.image_mean", c.mean).expect("unique");
    writer.put_f32s("clip.vision.image_std", c.std).expect("unique");
    for (name, shape) in contract(c, 48).into_iter().filter(|(name, _)| keep(name)) {
        let dims: Vec<u64> = shape.iter().map(|dim| *dim as u64).collect();
        writer.tensor(&name, &dims, GgmlType::F32).expect("valid");
    }
    for (name, dims, ty) in more {
        writer.tensor(name, dims, *ty).expect("valid");
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

#[test]
fn a_file_made_for_other_arithmetic_is_refused() {
    let rows: &[(&str, Value<'_>, &str)] = &[
        ("use_gelu", Value::Bool(false), "expected Bool(true), or no such key, found Bool(false)"),
        ("use_silu", Value::Bool(true), "expected Bool(false), or no such key, found Bool(true)"),
        ("has_audio_encoder", Value::Bool(true), "expected Bool(false), or no such key, found Bool(true)"),
        ("vision.n_wa_pattern", Value::U32(8), "expected U32(4), or no such key, found U32(8)"),
        (
            "vision.projector_type",
            Value::String("ldp"),
            r#"expected String("muse-glimmer"), or no such key, found String("ldp")"#,
        ),
        ("vision.use_gelu", Value::U32(1), "expected Bool(true), or no such key, found U32(1)"),
        (
            "vision.feature_layer",
            Value::U32(3),
            "expected no such key: this tower has nothing of the kind, found one",
        ),
    ];
    for (name, value, expected) in rows {
        let key = format!("clip.{name}");
        let error = Projector::from_gguf(file(&small(), &[(&key, *value)], |_| true)).expect_err("refused");
        assert_eq!(error.to_string(), format!("metadata key {key}: {expected}"));
    }
    // What says the same as the tower does is fine.
    let agreeing = [("clip.use_gelu", Value::Bool(true)), ("clip.use_silu", Value::Bool(false))];
    Projector::from_gguf(file(&small(), &agreeing, |_| true)).expect("nothing contradicts");
}

#[test]
fn tensors_that_nothing_would_be_done_with_are_refused() {
    let slab = [14, 14, 3, 32].as_slice();
    let rows: &[(&str, &[u64], &str)] = &[
        ("v.patch_embd.weight.1", slab, "no second temporal slab: a still image needs the sum of both"),
        ("v.patch_embd.bias", &[32], "no such tensor: the patches of this tower have no bias"),
        ("v.blk.2.ln1.weight", &[32], "no such tensor in this tower"),
        ("v.class_embd", &[32], "no such tensor in this tower"),
        ("mm.0.bias", &[48], "no such tensor in this tower"),
        ("mm.3.weight", &[48, 48], "no such tensor in this tower"),
        ("a.conv1d.1.weight", &[4], "no such tensor in this tower"),
    ];
    for (name, dims, expected) in rows {
        let built =
            Projector::from_gguf(with_tensors(&small(), &[], |_| true, &[(name, dims, GgmlType::F32)]));
        let error = built.expect_err("refused").to_string();
        assert!(error.starts_with(&format!("tensor {name}: expected {expected}")), "{error}");
    }
    // What belongs to no tower is nobody's business.
    Projector::from_gguf(with_tensors(&small(), &[], |_| true, &[("note", &[4], GgmlType::F32)]))
        .expect("fine");
}

#[test]
fn every_matrix_is_bound_with_its_type_and_factor() {
    let mut keep = contract(&small(), 48);
    keep.retain(|(name, _)| name != "v.blk.1.ffn_up.weight" && name != "mm.2.weight");
    let kept = |name: &str| keep.iter().any(|(known, _)| known == name);
    let more: [(&str, &[u64], GgmlType); 2] =
        [("v.blk.1.ffn_up.weight", &[32, 64], GgmlType::Q8_0), ("mm.2.weight", &[48, 256], GgmlType::BF16)];
    let projector = Projector::from_gguf(with_tensors(&small(), &[], kept, &more)).expect("fits");
    assert_eq!(projector.layers[1].ffn_up.matrix.ty, GgmlType::Q8_0);
    assert_eq!(
        (projector.layers[0].ffn_up.matrix.ty, projector.adapters[2].ty),
        (GgmlType::F32, GgmlType::BF16)
    );
    assert_eq!((projector.patches.cols, projector.patches.rows), (588, 32));
    assert_eq!(projector.patches.row(31).len(), 4 * 588);
    assert_eq!(projector.positions.len(), 32 * 4);
    assert_eq!(projector.matrices().count(), 1 + 2 * 6 + 3);
    // A type that nobody can multiply with is named; so is a norm that is not finite or not in floats.
    let strange = [("mm.2.weight", [48, 256].as_slice(), GgmlType::I32)];
    let error = Projector::from_gguf(with_tensors(&small(), &[], |name| name != "mm.2.weight", &strange));
    assert!(
        error
            .expect_err("refused")
            .to_string()
            .contains("mm.2.weight: expected a type that muser can multiply")
    );
    let table = [("v.position_embd.weight", [32, 4].as_slice(), GgmlType::Q8_0)];
    let error = Projector::from_gguf(with_tensors(&small(), &[], |name| name != table[0].0, &table));
    assert!(error.expect_err("refused").to_string().contains("expected type F32, F16 or BF16, found Q8_0"));
}

#[test]
fn a_synthetic_projector_of_the_released_shape_has_the_released_types() {
    use crate::synth::{Mix, projector_table};
    let table = projector_table(&released(), Mix::Medium(GgmlType::Q4_K));
    let count = |ty: GgmlType| table.iter().filter(|(_, _, found)| *found == ty).count();
    let counts = [GgmlType::F32, GgmlType::Q4_K, GgmlType::Q6_K, GgmlType::BF16].map(count);
    assert_eq!(counts, [506, 200, 100, 3]);
    let bytes: u64 = table
        .iter()
        .map(|(_, dims, ty)| dims.iter().product::<u64>() / ty.block_len() as u64 * ty.block_bytes() as u64)
        .sum();
    // The released file but for its header.
    assert!((1_400_000_000..1_400_328_928).contains(&bytes), "{bytes}");
}

#[test]
fn a_synthetic_projector_loads() {
    use crate::synth::{Mix, Preset, projector_to_bytes};
    for preset in [Preset::Tiny, Preset::B0_1] {
        let bytes = projector_to_bytes(&preset.projector(), Mix::Uniform(GgmlType::Q8_0), 1).expect("made");
        let projector =
            Projector::from_gguf(Arc::new(GgufFile::from_bytes(bytes).expect("whole"))).expect("fits");
        projector.check_target(&preset.geometry()).expect("as wide as its model");
        assert_eq!(projector.config, preset.projector());
    }
}
