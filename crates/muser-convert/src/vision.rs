//! The vision projector: the tower of a checkpoint and what maps its rows to the text model's.

use muser_gguf::{GgufWriter, Value as Put};
use serde_json::Value;

use crate::checkpoint::Checkpoint;
use crate::error::wrong;
use crate::figures::Figures;
use crate::plan::{Order, Plan};
use crate::scheme::Scheme;
use crate::source::{Source, TOWER};
use crate::text::vector;
use crate::{Choices, ConvertError, Laid};
const CHANNELS: usize = 3;

/// Plans a projector.
pub(crate) fn lay_out(
    checkpoint: &Checkpoint,
    scheme: &Scheme,
    choices: &Choices,
    name: &str,
) -> Result<Laid, ConvertError> {
    let root = &checkpoint.config;
    let Some(vision) = root.get("vision_config") else {
        return Err(wrong("config.json", "a vision_config", "none: this checkpoint has no tower"));
    };
    let f = Figures { value: vision, place: "config.json: vision_config" };
    let top = Figures { value: root, place: "config.json" };
    let text = Figures { value: root.get("text_config").unwrap_or(root), place: "config.json: text_config" };
    f.only("hidden_act", &Value::from("gelu"))?;
    f.only("patch_temporal", &Value::from(2))?;
    top.only("projector_hidden_act", &Value::from("gelu"))?;
    let (hidden, ffn, layers) =
        (f.size("hidden_size")?, f.size("intermediate_size")?, f.size("num_hidden_layers")?);
    let (heads, patch, merge) =
        (f.size("num_attention_heads")?, f.size("patch_size")?, f.size("merge_size")?);
    let grid = f.size("pos_emb_height")?;
    f.only("pos_emb_width", &Value::from(grid))?;
    let (projection, adapter) = (text.size("hidden_size")?, top.size("projector_hidden_size")?);
    check_layers(&f, layers)?;
    if !hidden.is_multiple_of(2 * heads) || patch > 256 || grid > 4096 || merge > 64 {
        return Err(wrong(
            f.place,
            "a tower of this model's kind",
            format!("{hidden} values in {heads} heads"),
        ));
    }

    let mut plan = Plan::new(choices.types);
    patches(checkpoint, &mut plan, hidden, patch)?;
    let table = floats(checkpoint, "patch_embedder.position_embedding_table.weight", &[grid * grid, hidden])?;
    plan.values("v.position_embd.weight".to_owned(), vec![hidden as u64, (grid * grid) as u64], table);
    for (theirs, ours) in [("ln_pre", "v.pre_ln"), ("ln_post", "v.post_ln")] {
        norm(checkpoint, &mut plan, &format!("{TOWER}{theirs}"), ours, hidden)?;
    }
    let pairs = Order::Pairs { head: hidden / heads };
    for layer in 0..layers {
        let module = |part: &str| format!("{TOWER}layers.{layer}.{part}");
        let stem = |part: &str| format!("v.blk.{layer}.{part}");
        for (theirs, ours) in [("norm1", "ln1"), ("norm2", "ln2")] {
            norm(checkpoint, &mut plan, &module(theirs), &stem(ours), hidden)?;
        }
        for (theirs, ours, rows, cols, order) in [
            ("attn.q_proj", "attn_q", hidden, hidden, pairs),
            ("attn.k_proj", "attn_k", hidden, hidden, pairs),
            ("attn.v_proj", "attn_v", hidden, hidden, Order::AsTheyAre),
            ("attn.proj", "attn_out", hidden, hidden, Order::AsTheyAre),
            ("mlp.fc1", "ffn_up", ffn, hidden, Order::AsTheyAre),
            ("mlp.fc2", "ffn_down", hidden, ffn, Order::AsTheyAre),
        ] {
            let source = Source::of(checkpoint, scheme, &module(theirs), rows, cols)?;
            plan.layer_matrix(&stem(ours), source, order)?;
            let bias = vector(checkpoint, &format!("{}.bias", module(theirs)), rows)?;
            plan.values(format!("{}.bias", stem(ours)), vec![rows as u64], order.apply(&bias));
        }
    }
    let merged = merge * merge * hidden;
    for (i, (theirs, rows, cols)) in [
        ("vision_adapter.fc1", adapter, merged),
        ("vision_adapter.fc2", adapter, adapter),
        ("vision_projection", projection, adapter),
    ]
    .into_iter()
    .enumerate()
    {
        let source = Source::of(checkpoint, scheme, &format!("model.{theirs}"), rows, cols)?;
        plan.rest_matrix(&format!("mm.{i}"), source)?;
    }

    let mut writer = GgufWriter::new();
    writer.put("general.architecture", Put::String("clip"))?;
    writer.put("general.type", Put::String("mmproj"))?;
    writer.put("general.name", Put::String(name))?;
    writer.put("general.size_label", Put::String(&plan.size_label()))?;
    writer.put("general.file_type", Put::U32(plan.file_type()))?;
    writer.put("general.quantization_version", Put::U32(2))?;
    writer.put("clip.has_vision_encoder", Put::Bool(true))?;
    writer.put("clip.projector_type", Put::String("muse-glimmer"))?;
    for (name, value) in [
        ("projection_dim", projection),
        ("image_size", grid * patch * merge),
        ("patch_size", patch),
        ("embedding_length", hidden),
        ("feed_forward_length", ffn),
        ("block_count", layers),
        ("attention.head_count", heads),
        ("spatial_merge_size", merge),
    ] {
        writer.put(&format!("clip.vision.{name}"), Put::U32(value as u32))?;
    }
    let eps = f.number("layer_norm_eps", Some(1e-5))?;
    writer.put("clip.vision.attention.layer_norm_epsilon", Put::F32(eps as f32))?;
    for (name, setting) in [("image_mean", "image_mean"), ("image_std", "image_std")] {
        writer.put_f32s(&format!("clip.vision.{name}"), colours(checkpoint, setting)?)?;
    }
    let header = plan.lay_out(writer)?;
    Ok(Laid { plan, header })
}

/// Three of four layers see windows, every fourth and the last one all: no key says anything else.
fn check_layers(f: &Figures<'_>, layers: usize) -> Result<(), ConvertError> {
    let Some(found) = f.value.get("layer_types").filter(|value| !value.is_null()) else { return Ok(()) };
    let expected: Vec<&str> = (0..layers)
        .map(|i| if (i + 1) % 4 == 0 || i + 1 == layers { "full_attention" } else { "window_attention" })
        .collect();
    let types: Vec<&str> = found.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    if types == expected {
        return Ok(());
    }
    Err(f.fault("layer_types", "windows, with every fourth layer and the last one full", Some(found)))
}

/// A still image is shown twice, so the two temporal slabs of a patch are one: their sum.
fn patches(
    checkpoint: &Checkpoint,
    plan: &mut Plan,
    hidden: usize,
    patch: usize,
) -> Result<(), ConvertError> {
    let area = CHANNELS * patch * patch;
    let both = floats(checkpoint, "patch_embedder.patch_embedding.weight", &[hidden, 2 * area])?;
    let sums = both.chunks_exact(2 * area).flat_map(|row| {
        let (first, second) = row.split_at(area);
        first.iter().zip(second).map(|(a, b)| a + b)
    });
    let side = patch as u64;
    let dims = vec![side, side, CHANNELS as u64, hidden as u64];
    plan.values("v.patch_embd.weight".to_owned(), dims, sums.collect());
    Ok(())
}

fn norm(
    checkpoint: &Checkpoint,
    plan: &mut Plan,
    module: &str,
    stem: &str,
    len: usize,
) -> Result<(), ConvertError> {
    for leaf in ["weight", "bias"] {
        let values = vector(checkpoint, &format!("{module}.{leaf}"), len)?;
        plan.values(format!("{stem}.{leaf}"), vec![len as u64], values);
    }
    Ok(())
}

fn floats(checkpoint: &Checkpoint, name: &str, shape: &[usize]) -> Result<Vec<f32>, ConvertError> {
    let entry = checkpoint.entry(&format!("{TOWER}{name}"))?;
    if !entry.shape.iter().eq(shape.iter().map(|dim| *dim as u64).collect::<Vec<_>>().iter())
        || !entry.dtype.is_float()
    {
        return Err(wrong(format!("tensor {}", entry.name), format!("floats {shape:?}"), entry.describe()));
    }
    checkpoint.floats(entry)
}

/// One number for each colour, from the settings of the preprocessor; the released model has 0.5 throughout.
fn colours(checkpoint: &Checkpoint, name: &str) -> Result<[f32; 3], ConvertError> {
    for file in ["preprocessor_config.json", "processor_config.json"] {
        let Some(settings) = checkpoint.settings(file)? else { continue };
        let found = settings.get(name).or_else(|| settings.pointer(&format!("/image_processor/{name}")));
        let Some(found) = found.filter(|value| !value.is_null()) else { continue };
        let numbers: Vec<f32> =
            found.as_array().into_iter().flatten().filter_map(Value::as_f64).map(|v| v as f32).collect();
        return <[f32; 3]>::try_from(numbers)
            .map_err(|_| wrong(format!("{file}: {name}"), "3 numbers", found.to_string()));
    }
    Ok([0.5; 3])
}
