//! The contract of a model file, from both sides: what is wrong is refused with its name, what is merely odd is told.
//!
//! The files are synthetic ones in which one key or one tensor is changed.

use std::sync::Arc;

use muser_gguf::{GgmlType, GgufFile, GgufWriter, Value, dequantize_row};
use muser_model::synth::{self, Mix, Preset, SynthOptions};
use muser_model::{Geometry, Model, remarks};

/// An ordinary small file.
fn tiny(mix: Mix) -> GgufFile {
    let bytes = synth::to_bytes(&SynthOptions::new(Preset::Tiny, mix)).expect("possible");
    GgufFile::from_bytes(bytes).expect("valid")
}

fn tiny_q8_0() -> GgufFile {
    tiny(Mix::Uniform(GgmlType::Q8_0))
}

/// What becomes of a tensor in [`rewrite`].
struct Tensor {
    name: String,
    dims: Vec<u64>,
    ty: GgmlType,
    data: Vec<u8>,
}

/// Copies a file, with changes: `key` may write something else in place of a key (and return true), `tensor` may change
/// or drop a tensor (and return false).
fn rewrite(
    file: &GgufFile,
    key: impl Fn(&mut GgufWriter, &str) -> bool,
    tensor: impl Fn(&mut Tensor) -> bool,
) -> Arc<GgufFile> {
    let mut writer = GgufWriter::new();
    for (name, value) in file.metadata() {
        if !key(&mut writer, name) {
            writer.put(name, value).expect("unique");
        }
    }
    let mut tensors: Vec<Tensor> = file
        .tensors()
        .iter()
        .map(|info| Tensor {
            name: info.name.clone(),
            dims: info.dims.clone(),
            ty: info.ty,
            data: file.tensor_data(info).to_vec(),
        })
        .collect();
    tensors.retain_mut(tensor);
    for t in &tensors {
        writer.tensor(&t.name, &t.dims, t.ty).expect("valid");
    }
    let header = writer.finish();
    let mut sink = header.stream(Vec::new()).expect("written");
    for t in &mut tensors {
        let bytes = (t.dims.iter().product::<u64>() as usize / t.ty.block_len()) * t.ty.block_bytes();
        t.data.resize(bytes, 0);
        sink.write(&t.data).expect("written");
    }
    Arc::new(GgufFile::from_bytes(sink.finish().expect("complete")).expect("valid"))
}

fn with_key(key: &str, value: Option<Value<'_>>) -> Arc<GgufFile> {
    let found = std::cell::Cell::new(false);
    let file = rewrite(
        &tiny_q8_0(),
        |writer, name| {
            // The key goes first, in case the file has none.
            if !found.replace(true)
                && let Some(value) = value
            {
                writer.put(key, value).expect("unique");
            }
            name == key
        },
        |_| true,
    );
    assert!(found.get());
    file
}

fn refusal(file: Arc<GgufFile>) -> String {
    Model::from_gguf(file).map(|_| ()).expect_err("refused").to_string()
}

#[test]
fn wrong_figures_name_key_expected_and_found() {
    let arch = |name: &str| format!("muse-glimmer.{name}");
    let rows: &[(&str, Option<Value<'_>>, &str)] = &[
        ("block_count", Some(Value::U32(100_000)), "expected 1 to 1024, found 100000"),
        ("block_count", Some(Value::U32(0)), "expected 1 to 1024, found 0"),
        ("block_count", None, "expected an unsigned integer, found no such key"),
        ("block_count", Some(Value::I32(-4)), "expected an unsigned integer, found i32 -4"),
        ("block_count", Some(Value::F32(4.0)), "expected an unsigned integer, found f32 4.0"),
        ("embedding_length", Some(Value::U64(1 << 60)), "expected 1 to 16777216, found 1152921504606846976"),
        ("feed_forward_length", Some(Value::U32(0)), "expected 1 to 16777216, found 0"),
        ("context_length", Some(Value::U32(0)), "expected 1 to 16777216, found 0"),
        ("attention.head_count", Some(Value::U32(0)), "expected 1 to 65536, found 0"),
        ("attention.head_count_kv", Some(Value::U32(3)), "expected a divisor of the 4 query heads, found 3"),
        ("attention.head_count_kv", Some(Value::U32(8)), "expected 1 to 4, found 8"),
        ("attention.key_length", Some(Value::U32(63)), "expected an even number, found 63"),
        ("attention.key_length", Some(Value::U32(4096)), "expected 1 to 1024, found 4096"),
        ("attention.value_length", Some(Value::U32(128)), "expected 64, the key length, found 128"),
        ("rope.dimension_count", Some(Value::U32(32)), "expected 64, the key length, found 32"),
        (
            "attention.layer_norm_rms_epsilon",
            Some(Value::F32(0.0)),
            "expected a finite number above zero, found 0",
        ),
        (
            "attention.layer_norm_rms_epsilon",
            Some(Value::F32(f32::NAN)),
            "expected a finite number above zero, found NaN",
        ),
        ("rope.freq_base", Some(Value::F32(-1.0)), "expected a finite number above zero, found -1"),
        ("rope.freq_base", None, "expected a float, found no such key"),
        ("rope.freq_base_swa", Some(Value::F32(0.0)), "expected a finite number above zero, found 0"),
        ("logit_scale", None, "expected a float, found no such key"),
        ("logit_scale", Some(Value::F32(f32::INFINITY)), "expected a finite number above zero, found inf"),
        (
            "final_logit_softcapping",
            Some(Value::F32(-20.0)),
            "expected a finite number above zero, found -20",
        ),
        ("attention.sliding_window", Some(Value::U32(0)), "expected 1 to 16777216, found 0"),
        ("attention.sliding_window_pattern", None, "expected an unsigned integer, found no such key"),
        ("attention.sliding_window_pattern", Some(Value::U32(0)), "expected 1 to 4, found 0"),
        (
            "attention.sliding_window_pattern",
            Some(Value::U32(3)),
            "expected a divisor of the 4 layers, or one bool for each layer, found 3",
        ),
        ("vocab_size", Some(Value::U32(511)), "expected 512, the tokens of the tokenizer, found 511"),
        (
            "rope.scaling.type",
            Some(Value::String("yarn")),
            r#"expected no scaling of positions, found "yarn""#,
        ),
        ("attn_logit_softcapping", Some(Value::F32(50.0)), "expected no such feature, found 50.0"),
        ("expert_count", Some(Value::U32(8)), "expected no such feature, found 8"),
    ];
    for (name, value, expected) in rows {
        let found = refusal(with_key(&arch(name), *value));
        assert_eq!(found, format!("metadata key {}: {expected}", arch(name)));
    }
    assert_eq!(
        refusal(with_key("general.architecture", Some(Value::String("llama")))),
        r#"metadata key general.architecture: expected "muse-glimmer", found "llama""#
    );
    assert_eq!(
        refusal(with_key("general.architecture", None)),
        "metadata key general.architecture: expected a string, found no such key"
    );
}

#[test]
fn a_window_pattern_of_another_length_is_refused() {
    let key = "muse-glimmer.attention.sliding_window_pattern";
    let file = rewrite(
        &tiny_q8_0(),
        |writer, name| name == key && writer.put_bools(key, [true; 5]).is_ok(),
        |_| true,
    );
    assert_eq!(refusal(file), format!("metadata key {key}: expected 4 entries, one for each layer, found 5"));
    let file =
        rewrite(&tiny_q8_0(), |writer, name| name == key && writer.put_i32s(key, [1; 4]).is_ok(), |_| true);
    assert_eq!(
        refusal(file),
        format!("metadata key {key}: expected an array of bools, found array an array of 4 i32")
    );
}

#[test]
fn what_may_be_missing() {
    let geometry = |key: &str, value| Geometry::from_gguf(&with_key(key, value)).expect("tolerated");
    let tiny = Preset::Tiny.geometry();
    assert_eq!(geometry("muse-glimmer.final_logit_softcapping", None).softcap, None);
    assert_eq!(geometry("muse-glimmer.final_logit_softcapping", Some(Value::F32(0.0))).softcap, None);
    assert_eq!(geometry("muse-glimmer.attention.sliding_window", None).window, tiny.context);
    assert_eq!(geometry("muse-glimmer.attention.value_length", None), tiny);
    assert_eq!(geometry("muse-glimmer.vocab_size", None), tiny);
    assert_eq!(geometry("tokenizer.ggml.tokens", None), tiny);
    assert_eq!(geometry("muse-glimmer.rope.freq_base_swa", Some(Value::F32(1e4))).rope_theta, 1e4);
    assert_eq!(geometry("muse-glimmer.block_count", Some(Value::U8(4))), tiny);
}

#[test]
fn every_tensor_is_needed_in_its_shape() {
    let file = tiny_q8_0();
    for info in file
        .tensors()
        .iter()
        .filter(|info| !info.name.starts_with("blk.1") && !info.name.starts_with("blk.2"))
    {
        let name = &info.name;
        let shape: Vec<usize> = info.dims.iter().map(|dim| *dim as usize).collect();
        let missing = rewrite(&file, |_, _| false, |tensor| tensor.name != *name);
        assert_eq!(
            refusal(missing),
            format!("tensor {name}: expected a tensor of shape {shape:?}, found no such tensor")
        );
        let longer = rewrite(
            &file,
            |_, _| false,
            |tensor| {
                if tensor.name == *name {
                    *tensor.dims.last_mut().expect("dimensions") += 1;
                }
                true
            },
        );
        let mut found = shape.clone();
        *found.last_mut().expect("dimensions") += 1;
        assert_eq!(refusal(longer), format!("tensor {name}: expected shape {shape:?}, found {found:?}"));
    }
}

#[test]
fn a_header_without_tensors_names_the_first_missing_one() {
    let file = rewrite(&tiny_q8_0(), |_, _| false, |_| false);
    assert_eq!(
        refusal(file),
        "tensor token_embd.weight: expected a tensor of shape [256, 512], found no such tensor"
    );
}

#[test]
fn tensor_types_and_values_are_checked() {
    let change = |name: &'static str, change: fn(&mut Tensor)| {
        rewrite(
            &tiny_q8_0(),
            |_, _| false,
            |tensor| {
                if tensor.name == name {
                    change(tensor);
                }
                true
            },
        )
    };
    assert_eq!(
        refusal(change("blk.1.attn_v.weight", |tensor| tensor.ty = GgmlType::IQ2_S)),
        "tensor blk.1.attn_v.weight: expected a type that muser can multiply with, found IQ2_S; take a file quantised \
         to Q2_K, Q3_K, IQ4_XS or more bits"
    );
    assert_eq!(
        refusal(change("output_norm.weight", |tensor| tensor.ty = GgmlType::Q8_0)),
        "tensor output_norm.weight: expected type F32, F16 or BF16, found Q8_0"
    );
    assert_eq!(
        refusal(change("blk.2.ffn_norm.weight", |tensor| tensor.data[28..32]
            .copy_from_slice(&[0, 0, 0x80, 0x7F]))),
        "tensor blk.2.ffn_norm.weight: expected finite numbers, found inf at index 7"
    );
    // Trailing dimensions of 1 mean nothing, so they are tolerated.
    Model::from_gguf(change("output.weight", |tensor| tensor.dims.extend([1, 1]))).expect("tolerated");
}

#[test]
fn a_factor_beside_a_matrix_is_bound() {
    let file =
        GgufFile::from_bytes(synth::tiny(&Preset::Tiny.geometry(), GgmlType::NVFP4, 3).expect("possible"))
            .expect("valid");
    let model = Model::from_gguf(Arc::new(file)).expect("fits");
    let spread = 0.732_87 * 5.852_35;
    assert!(
        (model.layers[0].attn_q.scale * spread * 16.0 - 1.0).abs() < 1e-3,
        "{}",
        model.layers[0].attn_q.scale
    );
    // A row of the table comes with its factor.
    let table = &model.token_embd;
    assert!(table.scale != 1.0);
    let (mut raw, mut row) = (vec![0.0; table.cols], vec![0.0; table.cols]);
    dequantize_row(table.ty, table.row(5), &mut raw).expect("decodes");
    table.look_up(5, &mut row).expect("decodes");
    assert!(raw.iter().any(|value| *value != 0.0));
    assert!(raw.iter().zip(&row).all(|(raw, row)| *row == *raw * table.scale));
}

/// A file with one more tensor, a number.
fn with_number(name: &'static str, number: f32) -> Arc<GgufFile> {
    // It goes to the place of a layer's norm, which moves to the end.
    let file = tiny_q8_0();
    let mut writer = GgufWriter::new();
    for (key, value) in file.metadata() {
        writer.put(key, value).expect("unique");
    }
    for t in file.tensors() {
        writer.tensor(&t.name, &t.dims, t.ty).expect("valid");
    }
    writer.tensor(name, &[1], GgmlType::F32).expect("valid");
    let header = writer.finish();
    let mut sink = header.stream(Vec::new()).expect("written");
    for t in file.tensors() {
        sink.write(file.tensor_data(t)).expect("written");
    }
    sink.write(&number.to_le_bytes()).expect("written");
    Arc::new(GgufFile::from_bytes(sink.finish().expect("complete")).expect("valid"))
}

#[test]
fn factors_have_two_names_and_no_other() {
    let factor =
        |name, number| Model::from_gguf(with_number(name, number)).expect("fits").layers[1].ffn_up.scale;
    assert_eq!(factor("blk.1.ffn_up.scale", 0.25), 0.25);
    assert_eq!(factor("blk.1.ffn_up.weight.scale", 0.25), 0.25);
    // What is kept for others does nothing here.
    assert_eq!(factor("blk.1.ffn_up.input_scale", 0.25), 1.0);

    let nvfp4 =
        GgufFile::from_bytes(synth::tiny(&Preset::Tiny.geometry(), GgmlType::NVFP4, 3).expect("possible"));
    let twice = rewrite(
        &nvfp4.expect("valid"),
        |_, _| false,
        |tensor| {
            if tensor.name == "output_norm.weight" {
                return true;
            }
            if tensor.name == "blk.0.ffn_up.scale" {
                tensor.name = "blk.0.ffn_down.weight.scale".to_owned();
            }
            true
        },
    );
    assert_eq!(
        refusal(twice),
        "tensor blk.0.ffn_down.weight.scale: expected one factor, blk.0.ffn_down.scale, found a second one for the same matrix"
    );
}

#[test]
fn a_factor_without_a_matrix_or_a_value_is_refused() {
    let rows = [
        (
            "blk.1.ffn_upp.scale",
            0.5,
            "no factor, since this model has no matrix blk.1.ffn_upp.weight, found shape [1]",
        ),
        (
            "blk.4.ffn_up.scale",
            0.5,
            "no factor, since this model has no matrix blk.4.ffn_up.weight, found shape [1]",
        ),
        (
            "blk.1.ffn_norm.scale",
            0.5,
            "no factor, since this model has no matrix blk.1.ffn_norm.weight, found shape [1]",
        ),
        (
            "model.layers.1.mlp.up_proj.weight.scale",
            0.5,
            "no factor, since this model has no matrix model.layers.1.mlp.up_proj.weight, found shape [1]",
        ),
        ("blk.1.ffn_up.scale", 0.0, "a factor above zero, found 0"),
        ("blk.1.ffn_up.weight.scale", -0.5, "a factor above zero, found -0.5"),
        ("token_embd.scale", f32::INFINITY, "finite numbers, found inf at index 0"),
        ("output.scale", f32::NAN, "finite numbers, found NaN at index 0"),
    ];
    for (name, number, why) in rows {
        assert_eq!(refusal(with_number(name, number)), format!("tensor {name}: expected {why}"));
    }
}

#[test]
fn block_scales_are_numbers_of_zero_or_more() {
    let damaged = |ty: GgmlType, at: usize, byte: u8| {
        let bytes = synth::tiny(&Preset::Tiny.geometry(), ty, 3).expect("possible");
        let file = rewrite(
            &GgufFile::from_bytes(bytes).expect("valid"),
            |_, _| false,
            |tensor| {
                if tensor.name == "blk.2.attn_output.weight" {
                    tensor.data[at] = byte;
                }
                true
            },
        );
        let model = Model::from_gguf(file).expect("only the bytes of a matrix are wrong");
        let matrix = &model.layers[2].attn_output;
        let checked: Vec<_> = (0..matrix.rows).map(|row| matrix.check_scales(row..row + 1)).collect();
        let whole = matrix.check_scales(0..matrix.rows).map_err(|error| error.to_string());
        assert_eq!(checked.iter().filter(|row| row.is_err()).count(), usize::from(whole.is_err()));
        whole
    };
    let row = 256 / 64 * 36;
    let message = |bytes: &str, row, first, last| {
        Err(format!(
            "tensor blk.2.attn_output.weight: expected block scales that are numbers of zero or more, found bytes [{bytes}] \
             in row {row}, inputs {first} to {last}: a damaged file"
        ))
    };
    let first_bytes = |found: Result<(), String>| found.expect_err("refused");
    assert!(first_bytes(damaged(GgmlType::NVFP4, 0, 0x7F)).contains("found bytes [7F, "));
    assert!(
        first_bytes(damaged(GgmlType::NVFP4, 3 * row + 36 + 2, 0x80)).contains("in row 3, inputs 64 to 127")
    );
    assert!(first_bytes(damaged(GgmlType::NVFP4, 3 * row + 3, 0xFF)).contains("in row 3, inputs 0 to 63"));
    assert_eq!(damaged(GgmlType::NVFP4, 3, 0x7E), Ok(()));
    assert_eq!(damaged(GgmlType::NVFP4, 4, 0xFF), Ok(()), "codes may be anything");
    assert_eq!(damaged(GgmlType::MXFP4, 17, 0xFF), message("FF", 0, 32, 63));
    assert_eq!(damaged(GgmlType::MXFP4, 17, 0xFE), Ok(()));
    assert_eq!(damaged(GgmlType::Q8_0, 0, 0xFF), Ok(()));
}

fn findings(file: &Arc<GgufFile>) -> Vec<String> {
    let model = Model::from_gguf(Arc::clone(file)).ok();
    remarks::findings(file, model.as_ref().map(|model| &model.geometry), model.as_ref())
}

#[test]
fn an_ordinary_file_is_not_odd() {
    assert_eq!(findings(&Arc::new(tiny(Mix::Medium(GgmlType::Q4_K)))), [] as [String; 0]);
    assert_eq!(findings(&Arc::new(tiny(Mix::Uniform(GgmlType::NVFP4)))), [] as [String; 0]);
}

#[test]
fn what_is_odd_is_told() {
    let key = |name: &str| format!("muse-glimmer.{name}");
    let of_layer = |change: fn(&mut Tensor)| {
        rewrite(
            &tiny_q8_0(),
            |_, _| false,
            |tensor| {
                change(tensor);
                true
            },
        )
    };
    let mut longer =
        synth::to_bytes(&SynthOptions::new(Preset::Tiny, Mix::Uniform(GgmlType::F32))).expect("possible");
    longer.extend([0; 100]);
    let rows: &[(Arc<GgufFile>, &str)] = &[
        (Arc::new(tiny_q8_0()), "types that the released files do not have: Q8_0"),
        (
            Arc::new(GgufFile::from_bytes(longer).expect("valid")),
            "100 bytes follow the last tensor of (in memory)",
        ),
        (
            with_key(&key("attention.magic"), Some(Value::U8(1))),
            "keys that muser does not know: muse-glimmer.attention.magic",
        ),
        (with_key("general.alignment", Some(Value::U32(64))), "tensors are aligned to 64 bytes, usual is 32"),
        (
            with_key(&key("attention.sliding_window_pattern"), Some(Value::U32(4))),
            "the window pattern is a period (4), not one bool for each layer",
        ),
        (
            with_key(&key("attention.sliding_window_pattern"), Some(Value::U32(2))),
            "the window pattern is not three sliding layers and a full one",
        ),
        (
            with_key(&key("attention.sliding_window"), None),
            "no window is given: sliding layers see the whole context",
        ),
        (
            with_key(&key("final_logit_softcapping"), None),
            "there is no soft cap on the logits, the released model has 20",
        ),
        (
            with_key(&key("logit_scale"), Some(Value::F32(0.5))),
            "the logit scale is 0.5, usual for this width is 1.000000",
        ),
        (
            with_key("quantize.imatrix.file", Some(Value::String("x"))),
            "it was quantised with an importance matrix (1 keys)",
        ),
        (
            with_key("tokenizer.ggml.pre", Some(Value::String("gpt-4o"))),
            r#"tokenizer.ggml.pre is "gpt-4o", usual is "llama4""#,
        ),
        (with_key("tokenizer.ggml.tokens", None), "there is no tokenizer: only token ids go in and out"),
        (with_key("tokenizer.ggml.merges", None), "there is no tokenizer.ggml.merges"),
        (
            with_key("tokenizer.ggml.eot_token_id", Some(Value::U32(512))),
            "tokenizer.ggml.eot_token_id is 512, there are 512 tokens",
        ),
        (
            with_key("tokenizer.ggml.eot_token_id", None),
            "there is no tokenizer.ggml.eot_token_id; it is looked up by its name",
        ),
        (
            with_key("tokenizer.ggml.eom_token_id", Some(Value::U32(7))),
            "an end-of-message id (7) is given; it never stops an answer",
        ),
        (with_key("tokenizer.chat_template", None), "there is no chat template: only plain completion works"),
        (
            of_layer(|tensor| {
                if tensor.name == "blk.0.attn_q_norm.weight" {
                    tensor.data[..4].copy_from_slice(&1.0_f32.to_le_bytes());
                }
            }),
            "the q-norm of 1 layers is not the constant 3.87",
        ),
        (
            of_layer(|tensor| {
                if tensor.name.ends_with("attn_k_norm.weight") {
                    tensor.data[..4].copy_from_slice(&2.0_f32.to_le_bytes());
                }
            }),
            "the k-norm of 4 layers is not the constant 1",
        ),
        (
            with_number("blk.1.ffn_up.scale", 0.5),
            "1 matrices that are not NVFP4 have a factor of their own (.scale)",
        ),
    ];
    for (file, expected) in rows {
        let found = findings(file);
        assert!(found.iter().any(|odd| odd == expected), "expected {expected:?} in {found:?}");
    }
}

#[test]
fn a_file_that_is_no_model_is_still_described() {
    let file = with_key("general.architecture", Some(Value::String("clip")));
    assert!(
        refusal(Arc::clone(&file)).contains("a vision projector, which works only beside its text model")
    );
    assert_eq!(findings(&file), ["types that the released files do not have: Q8_0"]);
}
