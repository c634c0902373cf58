//! Text model, draft and projector, out of a GGUF file into a checkpoint (by this test's own hand) and back: every tensor is the same.

#![expect(clippy::unwrap_used, reason = "a test may fail that way")]

use std::path::Path;

use muser_convert::{Choices, Part, convert};
use muser_gguf::{GgmlType, GgufFile, TensorInfo, Value as Meta, dequantize_row};
use muser_model::DflashConfig;
use muser_model::synth::{self, Mix, Preset, SynthOptions};
use serde_json::{Value, json};

/// Floats of a checkpoint in the making.
#[derive(Default)]
struct Tensors {
    table: serde_json::Map<String, Value>,
    data: Vec<u8>,
}

impl Tensors {
    fn put(&mut self, name: &str, shape: &[usize], values: &[f32]) {
        let at = self.data.len();
        values.iter().for_each(|value| self.data.extend_from_slice(&value.to_le_bytes()));
        let row = json!({ "dtype": "F32", "shape": shape, "data_offsets": [at, self.data.len()] });
        assert!(self.table.insert(name.to_owned(), row).is_none());
    }

    fn write(self, folder: &Path, config: &Value) {
        let table = Value::Object(self.table).to_string();
        let bytes = [(table.len() as u64).to_le_bytes().as_slice(), table.as_bytes(), &self.data].concat();
        std::fs::write(folder.join("model.safetensors"), bytes).unwrap();
        std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
        let tokens: serde_json::Map<_, _> = (0..512).map(|id| (format!("t{id}"), Value::from(id))).collect();
        let tokenizer = json!({ "model": { "type": "BPE", "vocab": tokens, "merges": [] } });
        std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    }
}

fn values(file: &GgufFile, info: &TensorInfo) -> Vec<f32> {
    let mut values = vec![0.0; info.values() as usize];
    dequantize_row(info.ty, file.tensor_data(info), &mut values).unwrap();
    values
}

/// Pairs of rows to halves, in heads of `head` rows of `cols` values.
fn to_halves(values: &[f32], head: usize, cols: usize) -> Vec<f32> {
    let rows = values.len() / cols;
    let from = |row: usize| {
        let (base, i) = (row / head * head, row % head);
        if i < head / 2 { base + 2 * i } else { base + 2 * (i - head / 2) + 1 }
    };
    (0..rows).flat_map(|row| values[from(row) * cols..][..cols].iter().copied()).collect()
}

/// Converts, and compares with the file that the checkpoint came from.
fn compare(folder: &Path, part: Part, original: &GgufFile, near: &[&str]) {
    let out = folder.join("out.gguf");
    convert(folder, &out, &Choices { part, ..Choices::default() }, &mut |_, _| {}).unwrap();
    let file = GgufFile::open(&out).unwrap();
    let mut names: [Vec<&str>; 2] =
        [original, &file].map(|file| file.tensors().iter().map(|t| t.name.as_str()).collect());
    names.iter_mut().for_each(|names| names.sort_unstable());
    assert_eq!(names[0], names[1]);
    for info in original.tensors() {
        let found = file.tensor(&info.name).unwrap();
        assert_eq!((&found.dims, found.ty), (&info.dims, info.ty), "{}", info.name);
        let (expected, values) = (values(original, info), values(&file, found));
        if near.iter().any(|part| info.name.contains(part)) {
            // The 1 of a norm was taken off and put on again.
            assert!(expected.iter().zip(&values).all(|(a, b)| (a - b).abs() < 2e-7), "{}", info.name);
        } else {
            assert!(expected == values, "{}", info.name);
        }
    }
    let prefix = ["muse-glimmer.", "dflash.", "clip."];
    for (key, value) in original.metadata().filter(|(key, _)| prefix.iter().any(|p| key.starts_with(p))) {
        if key != "muse-glimmer.vocab_size" {
            let found = file.get(key).map(Meta::describe);
            assert_eq!(found, Some(value.describe()), "{key}");
        }
    }
}

fn number(file: &GgufFile, key: &str) -> usize {
    file.u32(key).unwrap() as usize
}

#[test]
fn a_text_model_comes_back() {
    // The key for the values of the norms is not in any file: 3.87 and 1 as in the released ones.
    let options = SynthOptions::new(Preset::Tiny, Mix::Uniform(GgmlType::F32));
    let original = GgufFile::from_bytes(synth::to_bytes(&options).unwrap()).unwrap();
    let g = Preset::Tiny.geometry();
    let mut tensors = Tensors::default();
    for info in original.tensors() {
        let shape: Vec<usize> = info.dims.iter().rev().map(|dim| *dim as usize).collect();
        let mut values = values(&original, info);
        let stem = info.name.strip_suffix(".weight").unwrap();
        let name = match stem.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
            None => match stem {
                "token_embd" => "model.language_model.embed_tokens.weight".to_owned(),
                "output_norm" => "model.language_model.norm.weight".to_owned(),
                _ => "lm_head.weight".to_owned(),
            },
            Some((layer, part)) => {
                let theirs = match part {
                    "attn_q_norm" | "attn_k_norm" => continue,
                    "attn_norm" => "input_layernorm",
                    "post_attention_norm" => "post_attention_layernorm",
                    "ffn_norm" => "pre_feedforward_layernorm",
                    "post_ffw_norm" => "post_feedforward_layernorm",
                    "attn_q" => "self_attn.q_proj",
                    "attn_k" => "self_attn.k_proj",
                    "attn_v" => "self_attn.v_proj",
                    "attn_gate" => "self_attn.gate_proj",
                    "attn_output" => "self_attn.o_proj",
                    "ffn_gate" => "mlp.gate_proj",
                    "ffn_up" => "mlp.up_proj",
                    "ffn_down" => "mlp.down_proj",
                    other => panic!("{other}"),
                };
                if theirs.ends_with("layernorm") {
                    values.iter_mut().for_each(|value| *value -= 1.0);
                }
                if ["attn_q", "attn_k"].contains(&part) {
                    values = to_halves(&values, g.head_dim, g.hidden);
                }
                format!("model.language_model.layers.{layer}.{theirs}.weight")
            }
        };
        tensors.put(&name, &shape, &values);
    }
    let dir = tempfile::tempdir().unwrap();
    let kinds = |sliding: &bool| if *sliding { "sliding_attention" } else { "full_attention" };
    let config = json!({ "model_type": "muse_glimmer_text", "vocab_size": g.vocab, "hidden_size": g.hidden,
        "intermediate_size": g.ffn, "num_hidden_layers": g.layers(), "num_attention_heads": g.heads,
        "num_key_value_heads": g.kv_heads, "head_dim": g.head_dim, "max_position_embeddings": g.context,
        "sliding_window": g.window, "layer_types": g.sliding.iter().map(kinds).collect::<Vec<_>>(),
        "rope_theta": g.rope_theta, "output_multiplier": g.logit_scale, "final_logit_softcapping": g.softcap });
    tensors.write(dir.path(), &config);
    compare(
        dir.path(),
        Part::Text,
        &original,
        &["attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"],
    );
}

#[test]
fn a_draft_comes_back() {
    let c = DflashConfig { target_layers: vec![1, 2, 3], ..Preset::Tiny.draft() };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("draft.gguf");
    synth::write_draft(&path, &c, Mix::Uniform(GgmlType::F32), 5, &mut |_, _| {}).unwrap();
    let original = GgufFile::open(&path).unwrap();
    let mut tensors = Tensors::default();
    for info in original.tensors() {
        let shape: Vec<usize> = info.dims.iter().rev().map(|dim| *dim as usize).collect();
        let stem = info.name.strip_suffix(".weight").unwrap();
        let name = match stem.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
            None => match stem {
                "fc" => "encoder.fc".to_owned(),
                "enc.output_norm" => "encoder.output_norm_enc".to_owned(),
                _ => "norm".to_owned(),
            },
            Some((layer, part)) => {
                let theirs = match part {
                    "attn_norm" => "input_layernorm",
                    "ffn_norm" => "post_attention_layernorm",
                    "attn_q_norm" => "self_attn.q_norm",
                    "attn_k_norm" => "self_attn.k_norm",
                    "attn_q" => "self_attn.q_proj",
                    "attn_k" => "self_attn.k_proj",
                    "attn_v" => "self_attn.v_proj",
                    "attn_output" => "self_attn.o_proj",
                    "ffn_gate" => "mlp.gate_proj",
                    "ffn_up" => "mlp.up_proj",
                    "ffn_down" => "mlp.down_proj",
                    other => panic!("{other}"),
                };
                format!("layers.{layer}.{theirs}")
            }
        };
        tensors.put(&format!("{name}.weight"), &shape, &values(&original, info));
    }
    // The checkpoint names the layers whose outputs are read, the file those whose inputs are.
    let taps: Vec<usize> = c.target_layers.iter().map(|layer| layer - 1).collect();
    let config = json!({ "model_type": "muse_glimmer_assistant", "hidden_size": c.hidden, "intermediate_size": c.ffn,
        "num_hidden_layers": c.sliding.len(), "num_attention_heads": c.heads, "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim, "max_position_embeddings": c.context, "sliding_window": c.window,
        "layer_types": vec!["sliding_attention"; c.sliding.len()], "block_size": c.block_size,
        "mask_token_id": c.mask_token, "target_layer_ids": taps,
        "rope_parameters": { "rope_type": "default", "rope_theta": c.rope_theta } });
    tensors.write(dir.path(), &config);
    compare(dir.path(), Part::Draft, &original, &[]);

    // A DFlash2 draft has more than that.
    let stranger = std::fs::read(dir.path().join("model.safetensors")).unwrap();
    let text = String::from_utf8_lossy(&stranger).into_owned();
    assert!(text.contains("encoder.fc.weight"));
    let renamed = stranger.windows(17).position(|w| w == b"encoder.fc.weight").unwrap();
    let mut bytes = stranger.clone();
    bytes[renamed..renamed + 17].copy_from_slice(b"selector_x.weight");
    std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
    let out = dir.path().join("other.gguf");
    let choices = Choices { part: Part::Draft, ..Choices::default() };
    let error = convert(dir.path(), &out, &choices, &mut |_, _| {}).unwrap_err().to_string();
    assert!(error.contains("encoder.fc"), "{error}");
}

#[test]
fn a_projector_comes_back() {
    let c = Preset::Tiny.projector();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("projector.gguf");
    synth::write_projector(&path, &c, Mix::Uniform(GgmlType::F32), 5, &mut |_, _| {}).unwrap();
    let original = GgufFile::open(&path).unwrap();
    let head = c.hidden / c.heads;
    let mut tensors = Tensors::default();
    for info in original.tensors() {
        let shape: Vec<usize> = info.dims.iter().rev().map(|dim| *dim as usize).collect();
        let mut values = values(&original, info);
        let (stem, leaf) = info.name.rsplit_once('.').unwrap();
        let tower = "model.vision_tower.";
        let name = match stem.strip_prefix("v.blk.").and_then(|rest| rest.split_once('.')) {
            None => match stem {
                "v.patch_embd" => {
                    // Two slabs whose sum is the patch's.
                    let area = values.len() / c.hidden;
                    let both: Vec<f32> = values
                        .chunks(area)
                        .flat_map(|row| {
                            [
                                row.iter().map(|v| v * 0.25).collect::<Vec<_>>(),
                                row.iter().map(|v| v * 0.75).collect(),
                            ]
                            .concat()
                        })
                        .collect();
                    assert!(
                        both.chunks(2 * area)
                            .zip(values.chunks(area))
                            .all(|(b, v)| (b[0] + b[area] - v[0]).abs() <= 1e-7)
                    );
                    tensors.put(
                        &format!("{tower}patch_embedder.patch_embedding.weight"),
                        &[c.hidden, 2 * area],
                        &both,
                    );
                    continue;
                }
                "v.position_embd" => {
                    tensors.put(
                        &format!("{tower}patch_embedder.position_embedding_table.weight"),
                        &shape,
                        &values,
                    );
                    continue;
                }
                "v.pre_ln" => format!("{tower}ln_pre"),
                "v.post_ln" => format!("{tower}ln_post"),
                "mm.0" => "model.vision_adapter.fc1".to_owned(),
                "mm.1" => "model.vision_adapter.fc2".to_owned(),
                _ => "model.vision_projection".to_owned(),
            },
            Some((layer, part)) => {
                let theirs = match part {
                    "ln1" => "norm1",
                    "ln2" => "norm2",
                    "attn_q" => "attn.q_proj",
                    "attn_k" => "attn.k_proj",
                    "attn_v" => "attn.v_proj",
                    "attn_out" => "attn.proj",
                    "ffn_up" => "mlp.fc1",
                    "ffn_down" => "mlp.fc2",
                    other => panic!("{other}"),
                };
                if ["attn_q", "attn_k"].contains(&part) {
                    values = to_halves(&values, head, if leaf == "bias" { 1 } else { c.hidden });
                }
                format!("{tower}layers.{layer}.{theirs}")
            }
        };
        tensors.put(&format!("{name}.{leaf}"), &shape, &values);
    }
    let adapter = number_of_rows(&original, "mm.0.weight");
    let grid = c.grid();
    let config = json!({ "model_type": "muse_glimmer", "projector_hidden_size": adapter,
        "text_config": { "hidden_size": c.projection },
        "vision_config": { "hidden_size": c.hidden, "intermediate_size": c.ffn, "num_hidden_layers": c.layers,
            "num_attention_heads": c.heads, "patch_size": c.patch, "merge_size": c.merge, "pos_emb_height": grid,
            "pos_emb_width": grid, "layer_norm_eps": c.norm_eps } });
    tensors.write(dir.path(), &config);
    compare(dir.path(), Part::Projector, &original, &["v.patch_embd"]);
    let found = GgufFile::open(dir.path().join("out.gguf")).unwrap();
    assert_eq!(number(&found, "clip.vision.block_count"), c.layers);
    assert!(matches!(found.get("clip.projector_type"), Some(Meta::String("muse-glimmer"))));
}

fn number_of_rows(file: &GgufFile, name: &str) -> usize {
    file.tensor(name).unwrap().dims[1] as usize
}
