//! Checkpoints that are broken, hostile or of another kind are refused by name; what is written does not depend on how it came about.

#![expect(clippy::unwrap_used, reason = "a test may fail that way")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use muser_convert::synth::{self, SynthKind};
use muser_convert::{Choices, ConvertError, MatrixType, Types, convert};
use muser_gguf::GgufFile;
use muser_model::synth::Preset;
use serde_json::{Value, json};
use tempfile::TempDir;

const NORM: &str = "model.language_model.norm.weight";
const LAYER: &str = "model.language_model.layers.0.";

/// A copy of a checkpoint of a public library, to be changed.
struct Folder {
    dir: TempDir,
    table: Value,
    data: Vec<u8>,
    config: Value,
}

impl Folder {
    fn new(name: &str) -> Folder {
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
        let dir = tempfile::tempdir().unwrap();
        std::fs::copy(from.join("tokenizer.json"), dir.path().join("tokenizer.json")).unwrap();
        let bytes = std::fs::read(from.join("model.safetensors")).unwrap();
        let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        Folder {
            dir,
            table: serde_json::from_slice(&bytes[8..8 + len]).unwrap(),
            data: bytes[8 + len..].to_vec(),
            config: serde_json::from_slice(&std::fs::read(from.join("config.json")).unwrap()).unwrap(),
        }
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    fn text(&mut self) -> &mut Value {
        &mut self.config["text_config"]
    }

    /// Bytes of a tensor.
    fn bytes(&mut self, name: &str) -> &mut [u8] {
        let at = |i: usize| self.table[name]["data_offsets"][i].as_u64().unwrap() as usize;
        let range = at(0)..at(1);
        &mut self.data[range]
    }

    /// One tensor more.
    fn add(&mut self, name: &str, dtype: &str, shape: &[u64], bytes: &[u8]) {
        let at = self.data.len();
        self.data.extend_from_slice(bytes);
        self.table[name] = json!({ "dtype": dtype, "shape": shape, "data_offsets": [at, at + bytes.len()] });
    }

    fn rename(&mut self, from: &str, to: &str) {
        let row = self.table.as_object_mut().unwrap().remove(from).unwrap();
        self.table[to] = row;
    }

    /// The file's own bytes, with a table of any text.
    fn raw(&self, table: &str) -> Vec<u8> {
        let mut bytes = (table.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(table.as_bytes());
        bytes.extend_from_slice(&self.data);
        bytes
    }

    fn save(&self) {
        std::fs::write(self.path().join("config.json"), self.config.to_string()).unwrap();
        std::fs::write(self.path().join("model.safetensors"), self.raw(&self.table.to_string())).unwrap();
    }

    fn convert_as_it_is(&self) -> Result<Vec<u8>, ConvertError> {
        let out = self.path().join("out.gguf");
        let result = convert(self.path(), &out, &Choices::default(), &mut |_, _| {});
        let left: Vec<_> = std::fs::read_dir(self.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left.contains(&"out.gguf".into()), result.is_ok());
        assert!(!left.contains(&"out.gguf.part".into()), "nothing is left");
        result.map(|_| {
            let bytes = std::fs::read(&out).unwrap();
            std::fs::remove_file(&out).unwrap();
            bytes
        })
    }

    fn convert(&self) -> Result<Vec<u8>, ConvertError> {
        self.save();
        self.convert_as_it_is()
    }

    fn refusal(&self) -> String {
        self.convert().map(|_| ()).unwrap_err().to_string()
    }
}

#[track_caller]
fn check(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "expected {part:?} in {message:?}");
    }
}

#[test]
fn tables_are_believed_only_where_they_fit() {
    let folder = Folder::new("modelopt");
    folder.save();
    let whole = folder.table.to_string();
    let path = folder.path().join("model.safetensors");
    let with = |change: &dyn Fn(&mut Value)| {
        let mut table = folder.table.clone();
        change(&mut table);
        folder.raw(&table.to_string())
    };
    let rows: Vec<(Vec<u8>, &[&str])> = vec![
        (Vec::new(), &["a safetensors file, found 0 bytes"]),
        (vec![0; 7], &["found 7 bytes"]),
        (
            (1u64 << 60).to_le_bytes().to_vec(),
            &["a table of at most 16777216 bytes, found 1152921504606846976"],
        ),
        ((1u64 << 20).to_le_bytes().to_vec(), &["a table inside the 8 bytes of the file, found 1048576"]),
        (folder.raw("[1, 2]"), &["a table in JSON", "an object of tensors"]),
        (folder.raw(&whole[..whole.len() - 1]), &["a table in JSON", "EOF"]),
        (folder.raw(&"[".repeat(100_000)), &["a table in JSON"]),
        (
            folder.raw(&whole.replacen('{', &format!("{{\"{NORM}\":{},", folder.table[NORM]), 1)),
            &[NORM, "twice"],
        ),
        (with(&|t| t[NORM]["data_offsets"] = json!([0, u64::MAX])), &[NORM, "bytes inside"]),
        (with(&|t| t[NORM]["data_offsets"] = json!([200, 72])), &[NORM, "bytes inside"]),
        (with(&|t| t[NORM]["data_offsets"] = json!([0, 128])), &["data from byte"]),
        (with(&|t| t[NORM]["shape"] = json!([65])), &[NORM, "as many bytes as BF16 [65] takes, found 128"]),
        (with(&|t| t[NORM]["shape"] = json!([u64::MAX, u64::MAX, 3])), &[NORM, "as many bytes as"]),
        (with(&|t| t[NORM]["shape"] = json!(vec![1; 9])), &[NORM, "at most 8 dimensions, found 9"]),
        (with(&|t| t[NORM]["shape"] = json!([-1])), &["a table in JSON"]),
        (with(&|t| t[NORM]["more"] = json!(1)), &["unknown field"]),
        (with(&|t| t.as_object_mut().unwrap().retain(|name, _| name != NORM)), &["data"]),
        ([folder.raw(&whole), vec![0; 3]].concat(), &["no data beside that of tensors, found 3 bytes more"]),
    ];
    for (bytes, parts) in rows {
        std::fs::write(&path, bytes).unwrap();
        check(&folder.convert_as_it_is().map(|_| ()).unwrap_err().to_string(), parts);
    }
    // As much as is taken, and not more: spaces behind the table, eight dimensions.
    let most = 16 << 20;
    let limits = with(&|t| t[NORM]["shape"] = json!([1, 1, 1, 1, 1, 1, 1, 64]));
    let len = u64::from_le_bytes(limits[..8].try_into().unwrap()) as usize;
    let table = std::str::from_utf8(&limits[8..8 + len]).unwrap();
    for (bytes, sign) in [
        (most, "expected 64 floats, found BF16 [1, 1, 1, 1, 1, 1, 1, 64]"),
        (most + 1, "a table of at most 16777216 bytes, found 16777217"),
    ] {
        std::fs::write(&path, folder.raw(&(table.to_owned() + &" ".repeat(bytes - table.len())))).unwrap();
        check(&folder.convert_as_it_is().map(|_| ()).unwrap_err().to_string(), &[sign]);
    }
    // A hundred megabytes of JSON are not even read.
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(101 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &(100u64 << 20).to_le_bytes(), 0).unwrap();
    check(&folder.convert_as_it_is().map(|_| ()).unwrap_err().to_string(), &["a table of at most"]);
}

/// Splits a checkpoint in two and gives it an index.
fn shard(folder: &Folder, names: [&str; 2]) -> Value {
    let (mut map, mut tables, mut data) = (json!({}), [json!({}), json!({})], [Vec::new(), Vec::new()]);
    for (i, (name, row)) in folder.table.as_object().unwrap().iter().enumerate() {
        if name == "__metadata__" {
            continue;
        }
        let at = |i: usize| row["data_offsets"][i].as_u64().unwrap() as usize;
        let to = data[i % 2].len();
        data[i % 2].extend_from_slice(&folder.data[at(0)..at(1)]);
        let mut row = row.clone();
        row["data_offsets"] = json!([to, data[i % 2].len()]);
        tables[i % 2][name] = row;
        map[name] = json!(names[i % 2]);
    }
    for (i, name) in names.iter().enumerate() {
        let text = tables[i].to_string();
        let bytes = [(text.len() as u64).to_le_bytes().as_slice(), text.as_bytes(), &data[i]].concat();
        std::fs::write(folder.path().join(name), bytes).unwrap();
    }
    json!({ "metadata": {}, "weight_map": map })
}

#[test]
fn shards_are_the_same_as_one_file() {
    let folder = Folder::new("compressed-tensors");
    let whole = folder.convert().unwrap();
    assert_eq!(folder.convert().unwrap(), whole, "nothing but the checkpoint shows");
    std::fs::remove_file(folder.path().join("model.safetensors")).unwrap();
    let index = shard(&folder, ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]);
    std::fs::write(folder.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    assert_eq!(folder.convert_as_it_is().unwrap(), whole);
}

#[test]
fn shards_stay_in_their_folder() {
    let folder = Folder::new("modelopt");
    folder.save();
    let index = folder.path().join("model.safetensors.index.json");
    let outside = folder.path().join("inner");
    std::fs::create_dir(&outside).unwrap();
    std::fs::copy(folder.path().join("model.safetensors"), outside.join("model.safetensors")).unwrap();
    for name in [
        "../model.safetensors",
        "inner/model.safetensors",
        "/etc/passwd",
        "/model.safetensors",
        "..\\model.safetensors",
        "./model.safetensors",
        "..",
        "",
        "model.bin",
        ".safetensors",
    ] {
        let map: Value = json!({ "weight_map": { "lm_head.weight": name } });
        std::fs::write(&index, map.to_string()).unwrap();
        let message = folder.convert_as_it_is().map(|_| ()).unwrap_err().to_string();
        check(&message, &["shards that are files of this folder", &format!("{name:?}")]);
    }
    // As many shards as are taken: the first is looked for.
    for (count, sign) in [(4096, "0.safetensors"), (4097, "at most 4096 shards, found 4097")] {
        let map: Value =
            (0..count).map(|at| (format!("t{at}"), json!(format!("{at}.safetensors")))).collect();
        std::fs::write(&index, json!({ "weight_map": map }).to_string()).unwrap();
        check(&folder.convert_as_it_is().map(|_| ()).unwrap_err().to_string(), &[sign]);
    }
    let missing = json!({ "weight_map": { "lm_head.weight": "other.safetensors" } });
    std::fs::write(&index, missing.to_string()).unwrap();
    check(&folder.convert_as_it_is().map(|_| ()).unwrap_err().to_string(), &["other.safetensors"]);

    // An index that says something else than the shards do.
    let mut index_of = shard(&folder, ["a.safetensors", "b.safetensors"]);
    index_of["weight_map"]["no_such.weight"] = json!("a.safetensors");
    std::fs::write(&index, index_of.to_string()).unwrap();
    check(
        &folder.convert_as_it_is().map(|_| ()).unwrap_err().to_string(),
        &["tensor no_such.weight", "it in a.safetensors, as the index says, found no such tensor"],
    );
    std::fs::copy(folder.path().join("a.safetensors"), folder.path().join("c.safetensors")).unwrap();
    index_of["weight_map"].as_object_mut().unwrap().remove("no_such.weight");
    index_of["weight_map"]["lm_head.weight"] = json!("c.safetensors");
    std::fs::write(&index, index_of.to_string()).unwrap();
    check(
        &folder.convert_as_it_is().map(|_| ()).unwrap_err().to_string(),
        &["a tensor that no other shard has"],
    );
}

#[test]
fn what_a_matrix_is_must_be_certain() {
    let refusal = |name: &str, change: &dyn Fn(&mut Folder)| {
        let mut folder = Folder::new(name);
        change(&mut folder);
        folder.refusal()
    };
    let (ct, mo) = ("compressed-tensors", "modelopt");
    let of = |part: &str| format!("{LAYER}{part}");
    type Change<'a> = Box<dyn Fn(&mut Folder) + 'a>;
    let rows: Vec<(&str, Change<'_>, Vec<&str>)> = vec![
        (
            mo,
            Box::new(|f| f.add(&of("self_attn.q_proj.pre_quant_scale"), "BF16", &[64], &[0; 128])),
            vec!["self_attn.q_proj", "pre_quant_scale"],
        ),
        (
            ct,
            Box::new(|f| f.add(&of("mlp.up_proj.weight_zero_point"), "U8", &[1], &[0])),
            vec!["mlp.up_proj", "weight_zero_point"],
        ),
        (
            ct,
            Box::new(|f| f.rename(&of("mlp.up_proj.weight_global_scale"), &of("mlp.up_proj.weight_scale_2"))),
            vec!["mlp.up_proj", "the tensors of a matrix in floats, NVFP4, FP8 or MXFP8"],
        ),
        (
            mo,
            Box::new(|f| f.rename(&of("mlp.up_proj.weight_scale_2"), &of("mlp.up_proj.weight_global_scale"))),
            vec!["mlp.up_proj", "weight U8 [64, 32]"],
        ),
        (
            mo,
            Box::new(|f| f.table[of("mlp.up_proj.weight_scale")]["shape"] = json!([4, 64])),
            vec!["mlp.up_proj.weight_scale", "shape [64, 4]", "[4, 64]"],
        ),
        (
            mo,
            Box::new(|f| f.table[of("mlp.up_proj.weight_scale")]["dtype"] = json!("U8")),
            vec!["mlp.up_proj.weight_scale", "type F8_E4M3"],
        ),
        (
            mo,
            Box::new(|f| f.table[of("self_attn.o_proj.weight_scale")]["shape"] = json!([128, 1])),
            vec!["self_attn.o_proj.weight_scale", "a power of two for each 32 inputs"],
        ),
        (
            mo,
            Box::new(|f| f.table[of("mlp.down_proj.weight")]["dtype"] = json!("F8_E5M2")),
            vec!["mlp.down_proj", "F8_E5M2"],
        ),
        (
            mo,
            Box::new(|f| f.bytes(&of("mlp.up_proj.weight_scale_2")).fill(0)),
            vec!["mlp.up_proj.weight_scale_2", "a number above zero"],
        ),
        (
            ct,
            Box::new(|f| {
                f.bytes(&of("mlp.up_proj.weight_global_scale")).copy_from_slice(&f32::INFINITY.to_le_bytes());
            }),
            vec!["mlp.up_proj.weight_global_scale", "finite numbers, found inf"],
        ),
        (
            ct,
            Box::new(|f| f.bytes(&of("self_attn.k_proj.weight_scale"))[6] = 0xBF),
            vec!["self_attn.k_proj.weight_scale", "byte 0xBF in row 1, group 2"],
        ),
        (
            mo,
            Box::new(|f| f.bytes(&of("self_attn.k_proj.weight_scale"))[0] = 0x7F),
            vec!["self_attn.k_proj.weight_scale", "byte 0x7F in row 0, group 0"],
        ),
        (
            mo,
            Box::new(|f| f.bytes(&of("self_attn.o_proj.weight_scale"))[3] = 0xFF),
            vec!["self_attn.o_proj.weight_scale", "powers of two, found a NaN in row 1"],
        ),
        (
            mo,
            Box::new(|f| f.bytes(&of("mlp.down_proj.weight"))[65] = 0x7F),
            vec!["mlp.down_proj", "finite numbers, found NaN at index 65"],
        ),
        (
            mo,
            Box::new(|f| f.bytes(&of("self_attn.gate_proj.weight"))[..2].copy_from_slice(&[0x80, 0x7F])),
            vec!["self_attn.gate_proj.weight", "an infinity or a NaN in rows 0"],
        ),
        (
            mo,
            Box::new(|f| f.bytes(&of("input_layernorm.weight"))[2..4].copy_from_slice(&[0xC0, 0x7F])),
            vec!["input_layernorm.weight", "finite numbers, found NaN at index 1"],
        ),
        (
            mo,
            Box::new(|f| f.rename(&of("post_feedforward_layernorm.weight"), &of("other_layernorm.weight"))),
            vec!["post_feedforward_layernorm.weight", "no such tensor"],
        ),
        (
            mo,
            Box::new(|f| f.add(&of("self_attn.q_norm.weight"), "BF16", &[32], &[0; 64])),
            vec!["self_attn.q_norm.weight", "only tensors of this model"],
        ),
        (
            mo,
            Box::new(|f| f.add("model.mtp.fc.weight", "BF16", &[32], &[0; 64])),
            vec!["model.mtp.fc.weight", "only tensors of this model"],
        ),
        (
            mo,
            Box::new(|f| f.add(&of("mlp.up_proj.bias"), "BF16", &[64], &[0; 128])),
            vec!["mlp.up_proj", "bias BF16 [64]"],
        ),
    ];
    for (name, change, parts) in &rows {
        check(&refusal(name, change), parts);
    }
}

#[test]
fn settings_and_tensors_say_the_same() {
    let refusal = |name: &str, change: &dyn Fn(&mut Folder)| {
        let mut folder = Folder::new(name);
        change(&mut folder);
        folder.refusal()
    };
    let (ct, mo) = ("compressed-tensors", "modelopt");
    type Change = fn(&mut Folder);
    let rows: [(&str, Change, &[&str]); 14] = [
        (ct, |f| f.config["quantization_config"] = Value::Null, &["no quantised tensors", "found"]),
        (
            ct,
            |f| {
                f.config["quantization_config"]["ignore"] =
                    json!(["model.language_model.layers.0.mlp.up_proj"]);
            },
            &["mlp.up_proj", "leaves it out, found NVFP4"],
        ),
        (
            ct,
            |f| {
                f.config["quantization_config"]["config_groups"].as_object_mut().unwrap().remove("group_0");
            },
            &["self_attn.q_proj", "found NVFP4"],
        ),
        (
            ct,
            |f| f.config["quantization_config"]["transform_config"] = json!({ "R1": 1 }),
            &["transform_config", "nothing"],
        ),
        (
            ct,
            |f| f.config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = json!(6),
            &["config_groups.group_0", "num_bits"],
        ),
        (
            ct,
            |f| {
                f.config["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] =
                    json!(false);
            },
            &["config_groups.group_0", "symmetric"],
        ),
        (
            mo,
            |f| {
                f.config["quantization_config"]["quantized_layers"]["model.language_model.layers.0.mlp.up_proj"]
                    ["quant_algo"] = json!("FP8");
            },
            &["mlp.up_proj", "FP8 with one scale, as config.json: quantization_config says, found NVFP4"],
        ),
        (
            mo,
            |f| f.config["quantization_config"]["quant_algo"] = json!("W4A8_AWQ"),
            &["quant_algo", "W4A8_AWQ"],
        ),
        (mo, |f| f.config["model_type"] = json!("llama"), &["model_type", "muse_glimmer, found llama"]),
        (mo, |f| f.text()["tie_word_embeddings"] = json!(true), &["tie_word_embeddings", "false"]),
        (mo, |f| f.text()["post_norm_eps"] = json!(1e-6), &["post_norm_eps"]),
        (mo, |f| f.text()["layer_rope_theta"] = json!([20_000.0]), &["layer_rope_theta", "10000 for layers"]),
        (mo, |f| f.text()["num_hidden_layers"] = json!(2), &["layer_types", "2 of sliding_attention"]),
        (mo, |f| f.text()["rope_parameters"]["rope_type"] = json!("yarn"), &["rope_type", "default"]),
    ];
    for (name, change, parts) in rows {
        check(&refusal(name, &change), parts);
    }
}

/// All keys of the released files, in their types.
#[test]
fn keys_are_those_of_the_released_files() {
    let mut folder = Folder::new("modelopt");
    let tokens = json!({ "added_tokens": [
        { "id": 20, "content": "<|begin_of_text|>", "special": true },
        { "id": 21, "content": "<|end_of_text|>", "special": true },
        { "id": 22, "content": "<|eot|>", "special": true },
        { "id": 23, "content": "<|finetune_right_pad|>", "special": true },
    ], "model": { "type": "BPE", "vocab": { "a": 0, "b": 1, "ab": 2 }, "merges": [["a", "b"]] } });
    folder.text()["bos_token_id"] = json!(20);
    folder.text()["eos_token_id"] = json!([21, 22]);
    std::fs::write(folder.path().join("tokenizer.json"), tokens.to_string()).unwrap();
    let settings =
        json!({ "pad_token": "<|finetune_right_pad|>", "bos_token": { "content": "<|begin_of_text|>" } });
    std::fs::write(folder.path().join("tokenizer_config.json"), settings.to_string()).unwrap();
    std::fs::write(folder.path().join("chat_template.jinja"), "{{ messages }}").unwrap();
    let file = GgufFile::from_bytes(folder.convert().unwrap()).unwrap();
    let found: Vec<(String, String)> = file
        .metadata()
        .map(|(key, value)| (key.to_owned(), format!("{:?} {}", value.value_type(), value.describe())))
        .collect();
    let name = folder.path().file_name().unwrap().to_string_lossy().into_owned();
    let m = |name: &str| format!("muse-glimmer.{name}");
    let t = |name: &str| format!("tokenizer.ggml.{name}");
    let g = |name: &str| format!("general.{name}");
    let expected: Vec<(String, String)> = [
        (g("architecture"), "String \"muse-glimmer\""),
        (g("type"), "String \"model\""),
        (g("name"), &format!("String {name:?}")),
        (g("size_label"), "String \"32K\""),
        (g("file_type"), "U32 39"),
        (g("quantization_version"), "U32 2"),
        (m("block_count"), "U32 1"),
        (m("context_length"), "U32 64"),
        (m("embedding_length"), "U32 64"),
        (m("feed_forward_length"), "U32 64"),
        (m("attention.head_count"), "U32 2"),
        (m("attention.head_count_kv"), "U32 1"),
        (m("attention.key_length"), "U32 32"),
        (m("attention.value_length"), "U32 32"),
        (m("attention.layer_norm_rms_epsilon"), "F32 1e-5"),
        (m("attention.sliding_window"), "U32 16"),
        (m("attention.sliding_window_pattern"), "Array an array of 1 bool"),
        (m("rope.freq_base"), "F32 10000.0"),
        (m("final_logit_softcapping"), "F32 20.0"),
        (m("logit_scale"), "F32 2.0"),
        (t("model"), "String \"gpt2\""),
        (t("pre"), "String \"llama4\""),
        (t("tokens"), "Array an array of 24 string"),
        (t("token_type"), "Array an array of 24 i32"),
        (t("merges"), "Array an array of 1 string"),
        (t("bos_token_id"), "U32 20"),
        (t("eos_token_id"), "U32 21"),
        (t("padding_token_id"), "U32 23"),
        (t("eot_token_id"), "U32 22"),
        (t("add_bos_token"), "Bool true"),
        (t("add_sep_token"), "Bool false"),
        ("tokenizer.chat_template".to_owned(), "String \"{{ messages }}\""),
    ]
    .map(|(key, value)| (key, value.to_owned()))
    .into();
    assert_eq!(found, expected);
    assert_eq!(file.strings("tokenizer.ggml.merges").unwrap(), ["a b"]);
    assert_eq!(file.strings("tokenizer.ggml.tokens").unwrap()[2..4], ["ab", "[PAD3]"]);
    let types: Vec<i32> = file.integers("tokenizer.ggml.token_type").unwrap();
    assert_eq!([types[2], types[3], types[20]], [1, 5, 3]);
}

#[test]
fn tokenizers_that_cannot_be_are_refused() {
    let folder = Folder::new("modelopt");
    for (tokens, parts) in [
        (json!({ "model": { "type": "Unigram", "vocab": {}, "merges": [] } }), ["type BPE", "Unigram"]),
        (
            json!({ "model": { "type": "BPE", "vocab": { "a": 24 }, "merges": [] } }),
            ["ids below 24", "id 24"],
        ),
        (
            json!({ "model": { "type": "BPE", "vocab": { "a": 1, "b": 1 }, "merges": [] } }),
            ["ids of one token", "id 1"],
        ),
        (
            json!({ "pre_tokenizer": { "type": "Whitespace" }, "model": { "type": "BPE", "vocab": {}, "merges": [] } }),
            ["pre_tokenizer", "Whitespace"],
        ),
    ] {
        std::fs::write(folder.path().join("tokenizer.json"), tokens.to_string()).unwrap();
        check(&folder.refusal(), &parts);
    }
    std::fs::remove_file(folder.path().join("tokenizer.json")).unwrap();
    check(&folder.refusal(), &["a tokenizer.json, found no such file"]);
}

#[test]
fn a_file_that_is_there_stays_unless_it_is_forced() {
    let folder = Folder::new("modelopt");
    folder.save();
    let out = folder.path().join("out.gguf");
    std::fs::write(&out, "mine").unwrap();
    let choices = Choices::default();
    let error = convert(folder.path(), &out, &choices, &mut |_, _| {}).unwrap_err();
    assert!(matches!(error, ConvertError::Io { .. }), "{error}");
    assert_eq!(std::fs::read(&out).unwrap(), b"mine");
    // What a killed process left is taken over.
    std::fs::write(folder.path().join("out.gguf.part"), vec![1; 1 << 20]).unwrap();
    let summary =
        convert(folder.path(), &out, &Choices { force: true, ..choices.clone() }, &mut |_, _| {}).unwrap();
    assert_eq!(std::fs::metadata(&out).unwrap().len(), summary.bytes);
    assert!(!folder.path().join("out.gguf.part").exists());
    // Two at once: the second one is told.
    let mut second = None;
    let mut progress = |done, total| {
        if second.is_none() && done < total {
            second = Some(convert(
                folder.path(),
                &out,
                &Choices { force: true, ..choices.clone() },
                &mut |_, _| {},
            ));
        }
    };
    convert(folder.path(), &out, &Choices { force: true, ..choices.clone() }, &mut progress).unwrap();
    assert!(matches!(second, Some(Err(ConvertError::Busy(_)))), "{second:?}");
}

const KILLED: &str = "MUSER_TEST_CONVERT_FOLDER";

fn killed_folder() -> Option<PathBuf> {
    std::env::var_os(KILLED).map(PathBuf::from)
}

fn encode(folder: &Path) {
    let types = Types { layers: MatrixType::Nvfp4, rest: MatrixType::Q8_0 };
    let choices = Choices { types, force: true, ..Choices::default() };
    convert(folder, &folder.join("out.gguf"), &choices, &mut |_, _| {}).unwrap();
}

/// Not a test of its own: what the next one kills.
#[test]
fn the_one_that_is_killed() {
    if let Some(folder) = killed_folder() {
        encode(&folder);
    }
}

#[test]
fn a_kill_at_any_moment_leaves_no_file_under_the_name() {
    let dir = tempfile::tempdir().unwrap();
    synth::write(dir.path(), &Preset::Tiny.geometry(), SynthKind::Bf16, 3, &mut |_, _| {}).unwrap();
    let out = dir.path().join("out.gguf");
    let start = std::time::Instant::now();
    encode(dir.path());
    let whole = (std::fs::read(&out).unwrap(), start.elapsed() + Duration::from_millis(30));
    let mut killed = 0;
    for i in 0..40u32 {
        std::fs::remove_file(&out).unwrap_or(());
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["the_one_that_is_killed", "--exact"])
            .env(KILLED, dir.path())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(whole.1 * i / 40);
        child.kill().unwrap();
        child.wait().unwrap();
        match std::fs::read(&out) {
            Ok(bytes) => assert!(bytes == whole.0, "a file under the name is complete"),
            Err(_) => killed += 1,
        }
    }
    assert!(killed > 5, "only {killed} were killed in time");
    encode(dir.path());
    assert!(std::fs::read(&out).unwrap() == whole.0);
}

/// NVFP4 and BF16 synthetic checkpoints are converted whole.
#[test]
fn synthetic_checkpoints_convert() {
    for (kind, ty) in [(SynthKind::Bf16, 32), (SynthKind::Nvfp4, 39)] {
        let dir = tempfile::tempdir().unwrap();
        let bytes = synth::write(dir.path(), &Preset::Tiny.geometry(), kind, 3, &mut |_, _| {}).unwrap();
        let out = dir.path().join("out.gguf");
        let summary = convert(dir.path(), &out, &Choices::default(), &mut |_, _| {}).unwrap();
        assert_eq!(GgufFile::open(&out).unwrap().u32("general.file_type").unwrap(), ty);
        assert!(summary.bytes > bytes, "norms are wider, and there is a header");
    }
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(96))]

    /// Whatever the bytes of the table are, the answer is a file or an error.
    #[test]
    fn no_table_makes_it_panic(changes in proptest::collection::vec((0usize..6000, proptest::prelude::any::<u8>()), 1..4)) {
        let folder = Folder::new("modelopt");
        folder.save();
        let path = folder.path().join("model.safetensors");
        let mut bytes = std::fs::read(&path).unwrap();
        for (at, byte) in changes {
            bytes[at] = byte;
        }
        std::fs::write(&path, bytes).unwrap();
        let _ = folder.convert_as_it_is();
    }
}
