//! Synthetic projectors: the tensors and keys of an `mmproj` file with random weights, which cost what real ones cost.

use muser_gguf::{GgmlType, GgufHeader, GgufWriter, Value};

use super::fill::Fill;
use super::plan::{Mix, Planned, with_tensors};
use crate::vision::contract;
use crate::{ModelError, VISION_ARCHITECTURE, VisionConfig};

/// The inner width of the adapter: the released one's is eight thirds of the tower's; cards want whole super-blocks.
pub(super) fn adapter_of(config: &VisionConfig) -> usize {
    (config.hidden * 8 / 3).next_multiple_of(256)
}

pub(super) fn lay_out(
    config: &VisionConfig,
    adapter: usize,
    mix: Mix,
    seed: u64,
) -> Result<(GgufHeader, Vec<Planned>), ModelError> {
    let mut writer = GgufWriter::new();
    metadata(&mut writer, config, mix, seed)?;
    with_tensors(writer, tensors(config, adapter, mix))
}

fn metadata(writer: &mut GgufWriter, c: &VisionConfig, mix: Mix, seed: u64) -> Result<(), ModelError> {
    let key = |name: &str| format!("{VISION_ARCHITECTURE}.{name}");
    writer.put("general.architecture", Value::String(VISION_ARCHITECTURE))?;
    writer.put("general.type", Value::String("mmproj"))?;
    writer.put("general.name", Value::String(&format!("synthetic projector {} seed {seed}", mix.name())))?;
    writer.put("general.file_type", Value::U32(mix.file_type()))?;
    writer.put("general.quantization_version", Value::U32(2))?;
    writer.put(&key("has_vision_encoder"), Value::Bool(true))?;
    writer.put(&key("projector_type"), Value::String("muse-glimmer"))?;
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
        let value =
            u32::try_from(value).map_err(|_| ModelError::Synth(format!("{name} of {value} is too large")))?;
        writer.put(&key(&format!("vision.{name}")), Value::U32(value))?;
    }
    writer.put(&key("vision.attention.layer_norm_epsilon"), Value::F32(c.norm_eps))?;
    writer.put_f32s(&key("vision.image_mean"), c.mean)?;
    writer.put_f32s(&key("vision.image_std"), c.std)?;
    Ok(())
}

pub(super) fn tensors(c: &VisionConfig, adapter: usize, mix: Mix) -> Vec<Planned> {
    let planned = |(name, shape): (String, Vec<usize>)| {
        let inputs: usize = shape[..shape.len() - 1].iter().product();
        let unit = (inputs as f64).powf(-0.5);
        let (ty, fill) = match name.as_str() {
            "v.patch_embd.weight" => (GgmlType::F32, Fill::Random { mean: 0.0, sigma: unit }),
            "v.position_embd.weight" => (GgmlType::F32, Fill::Random { mean: 0.0, sigma: 0.5 }),
            // Without a bias a norm or a product has nothing to be confused with its neighbour.
            name if name.strip_suffix(".bias").is_some() => {
                (GgmlType::F32, Fill::Random { mean: 0.0, sigma: 0.1 })
            }
            _ if shape.len() == 1 => (GgmlType::F32, Fill::Random { mean: 1.0, sigma: 0.1 }),
            name if name.starts_with("mm.") => (adapter_type(mix), Fill::Random { mean: 0.0, sigma: unit }),
            name => (pick_type(name, mix), Fill::Random { mean: 0.0, sigma: unit }),
        };
        Planned { name, dims: shape.iter().map(|dim| *dim as u64).collect(), ty, fill }
    };
    contract(c, adapter).into_iter().map(planned).collect()
}

/// As in the official file: more bits for `attn_v` and `ffn_down` of every layer.
fn pick_type(name: &str, mix: Mix) -> GgmlType {
    let more_bits = name.ends_with("attn_v.weight") || name.ends_with("ffn_down.weight");
    match mix {
        Mix::Medium(_) if more_bits => GgmlType::Q6_K,
        Mix::Uniform(ty) | Mix::Small(ty) | Mix::Medium(ty) => ty,
    }
}

fn adapter_type(mix: Mix) -> GgmlType {
    match mix {
        Mix::Uniform(GgmlType::F32) => GgmlType::F32,
        _ => GgmlType::BF16,
    }
}
