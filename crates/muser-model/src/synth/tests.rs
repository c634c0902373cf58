//! Synthetic files are valid, deterministic and have the spread that they promise.

use std::sync::Arc;

use muser_gguf::{GgmlType, GgufFile, dequantize_row};

use super::*;
use crate::{Draft, Model};

fn model(options: &SynthOptions) -> Model {
    let bytes = to_bytes(options).expect("the options are possible");
    Model::from_gguf(Arc::new(GgufFile::from_bytes(bytes).expect("the file is valid")))
        .expect("the model fits")
}

fn matrix_types() -> impl Iterator<Item = GgmlType> {
    GgmlType::all().filter(|ty| ty.is_decodable() && *ty != GgmlType::Q8_K)
}

#[test]
fn every_type_has_zero_mean_and_unit_gain() {
    for ty in matrix_types() {
        let model = model(&SynthOptions::new(Preset::Tiny, Mix::Uniform(ty)));
        let matrix = &model.layers[1].ffn_down;
        assert_eq!(matrix.ty, ty);
        let mut values = vec![0.0; matrix.rows * matrix.cols];
        dequantize_row(ty, matrix.bytes(), &mut values).expect("whole blocks");
        let count = values.len() as f64;
        let sum: f64 = values.iter().map(|v| f64::from(*v)).sum();
        let squares: f64 = values.iter().map(|v| f64::from(*v).powi(2)).sum();
        let wanted = (matrix.cols as f64).powf(-0.5);
        let sigma = (squares / count).sqrt() * f64::from(matrix.scale);
        let mean = sum / count * f64::from(matrix.scale);
        assert!((sigma / wanted - 1.0).abs() < 0.02, "{}: spread {sigma}, wanted {wanted}", ty.name());
        assert!(mean.abs() < 0.02 * wanted, "{}: mean {mean}, spread {wanted}", ty.name());
    }
}

#[test]
fn all_presets_and_mixes_have_names() {
    for name in Preset::NAMES {
        assert!(Preset::from_name(name).is_some(), "{name}");
    }
    for name in [
        "f32", "f16", "bf16", "q8_0", "q4_0", "q4_k_s", "q4_k_m", "q5_k_m", "q6_k", "Q4_K_M", "nvfp4",
        "nvfp4_s",
    ] {
        let mix = Mix::from_name(name).expect(name);
        assert_eq!(mix.name(), name.to_lowercase());
    }
    for name in ["", "q4_0_m", "q8_k", "iq1_s", "i32", "q9"] {
        assert_eq!(Mix::from_name(name), None, "{name}");
    }
}

#[test]
fn a_file_is_a_function_of_its_options() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("a.gguf");
    let mut options = SynthOptions::new(Preset::Tiny, Mix::from_name("q4_k_m").expect("a mix"));
    let memory = to_bytes(&options).expect("possible");
    let (mut last, mut calls) = (0, 0);
    let written = write(&path, &options, &mut |done, total| {
        assert!(last <= done && done <= total);
        (last, calls) = (done, calls + 1);
    })
    .expect("written");
    assert_eq!((written, last), (memory.len() as u64, memory.len() as u64));
    assert!(calls > 2);
    assert_eq!(std::fs::read(&path).expect("read"), memory, "threads and memory agree");
    assert_eq!(std::fs::read_dir(folder.path()).expect("listed").count(), 1, "nothing else is left behind");

    options.seed = 2;
    let other = to_bytes(&options).expect("possible");
    assert_eq!(other.len(), memory.len());
    assert_ne!(other, memory);
}

#[test]
fn both_forms_of_the_window_pattern_mean_the_same() {
    let mut options = SynthOptions::new(Preset::Tiny, Mix::Uniform(GgmlType::Q8_0));
    let bools = model(&options);
    options.scalar_pattern = true;
    assert_eq!(model(&options).geometry, bools.geometry);
    assert_eq!(bools.geometry, Preset::Tiny.geometry());
}

#[test]
fn overrides_choose_types_by_name() {
    let mut options = SynthOptions::new(Preset::Tiny, Mix::Uniform(GgmlType::Q8_0));
    options.overrides = vec![("^output.".to_owned(), GgmlType::F16), ("attn_v".to_owned(), GgmlType::Q6_K)];
    let model = model(&options);
    assert_eq!(model.output.ty, GgmlType::F16);
    assert_eq!(model.layers[0].attn_output.ty, GgmlType::Q8_0);
    assert_eq!(model.layers[2].attn_v.ty, GgmlType::Q6_K);
}

#[test]
fn impossible_requests_name_what_is_wrong() {
    let mut geometry = Preset::Tiny.geometry();
    geometry.vocab = 200;
    let error = tiny(&geometry, GgmlType::F32, 1).expect_err("too few tokens");
    assert!(error.to_string().contains("at least 268 tokens"), "{error}");
    geometry.vocab = 300;
    geometry.hidden = 128;
    let error = tiny(&geometry, GgmlType::Q4_K, 1).expect_err("rows are half a block");
    assert!(error.to_string().contains("multiple of 256"), "{error}");
}

#[test]
fn the_official_mix_has_the_official_sizes() {
    let options = SynthOptions::new(Preset::B30, Mix::Medium(GgmlType::Q4_K));
    let table = table(&options).expect("possible");
    let mut counts = std::collections::BTreeMap::new();
    let mut total = 0;
    for (_, dims, ty) in &table {
        *counts.entry(ty.name()).or_insert(0) += 1;
        total += dims.iter().product::<u64>() / ty.block_len() as u64 * ty.block_bytes() as u64;
    }
    assert_eq!(table.len(), 731);
    assert_eq!(
        counts.into_iter().collect::<Vec<_>>(),
        [("F32", 313), ("Q4_K", 365), ("Q5_K", 1), ("Q6_K", 52)]
    );
    assert_eq!(total, 16_743_567_360);
}

#[test]
fn the_released_draft_has_the_official_sizes() {
    let tensors = draft::tensors(&DflashConfig::released(), Mix::Medium(GgmlType::Q4_K));
    let count = |ty| tensors.iter().filter(|tensor| tensor.ty == ty).count();
    assert_eq!([GgmlType::F32, GgmlType::Q4_K, GgmlType::Q6_K].map(count), [22, 26, 10]);
    let parameters: u64 = tensors.iter().map(|tensor| tensor.dims.iter().product::<u64>()).sum();
    assert_eq!(parameters, 2_555_985_152);
    // The table of the released file; its data ends the file.
    let table: u64 = tensors
        .iter()
        .map(|tensor| 8 + tensor.name.len() as u64 + 4 + 8 * tensor.dims.len() as u64 + 4 + 8)
        .sum();
    let data: u64 = tensors
        .iter()
        .map(|tensor| {
            tensor.dims.iter().product::<u64>() / tensor.ty.block_len() as u64
                * tensor.ty.block_bytes() as u64
        })
        .sum();
    let metadata = 1_631_205_312 - data - table;
    // The vocabulary of the text model, whose metadata ends at byte 13,070,042, and almost the same other keys.
    assert!(metadata.abs_diff(13_070_042) < 1000, "{metadata}");
}

#[test]
fn a_preset_has_a_draft_that_fits_and_costs_a_tenth() {
    let mix = Mix::Medium(GgmlType::Q4_K);
    assert_eq!(Preset::B30.draft(), DflashConfig::released());
    for preset in [Preset::B0_1, Preset::B1, Preset::B30] {
        let parameters = |table: Vec<(String, Vec<u64>, GgmlType)>| -> u64 {
            table.iter().map(|(_, dims, _)| dims.iter().product::<u64>()).sum()
        };
        let own = parameters(draft_table(&preset.draft(), mix)) as f64;
        let share = own / parameters(table(&SynthOptions::new(preset, mix)).expect("possible")) as f64;
        assert!((0.08..0.14).contains(&share), "{preset:?}: {share}");
    }
    let target = model(&SynthOptions::new(Preset::Tiny, mix));
    let bytes = draft_to_bytes(&Preset::Tiny.draft(), mix, 1).expect("possible");
    let draft = Draft::from_gguf(Arc::new(GgufFile::from_bytes(bytes).expect("valid"))).expect("a draft");
    draft.check_target(&target).expect("fits");
}

#[test]
fn a_made_up_vocabulary_is_valid_bpe() {
    let model = model(&SynthOptions::new(Preset::Tiny, Mix::Uniform(GgmlType::Q8_0)));
    check_vocabulary(&model.file);
}

fn check_vocabulary(file: &GgufFile) {
    let tokens = file.strings("tokenizer.ggml.tokens").expect("tokens");
    let types = file.integers::<i32>("tokenizer.ggml.token_type").expect("types");
    let ids: std::collections::HashMap<&str, usize> =
        tokens.iter().enumerate().map(|(id, text)| (*text, id)).collect();
    assert_eq!(ids.len(), tokens.len(), "token texts are unique");
    assert_eq!(ids["Ċ"], 198, "a line break has the released id");
    let mut made = vec![false; tokens.len()];
    for merge in file.strings("tokenizer.ggml.merges").expect("merges") {
        let (left, right) = merge.split_once(' ').expect("two parts");
        let whole = ids[format!("{left}{right}").as_str()];
        assert!(ids[left] < whole && ids[right] < whole, "{merge}");
        made[whole] = true;
    }
    for (id, made) in made.iter().enumerate() {
        assert_eq!(*made, id >= 256 && types[id] == 1, "{}", tokens[id]);
    }
}
