//! The vision projector file (`mmproj`): configuration and tensor contract.
//!
//! The file holds a vision tower and an adapter to the width of the text model. What is here makes a wrong or damaged
//! projector an error when it is loaded, and not when the first image comes.

mod bind;

use muser_gguf::{GgufFile, Value};

use crate::ModelError;
use crate::geometry::Keys;

pub use bind::{LayerNorm, Linear, Projector, TowerLayer};

/// Architecture name of a projector in a GGUF file.
pub const VISION_ARCHITECTURE: &str = "clip";

/// The kind of projector that belongs to Muse Glimmer.
const PROJECTOR_TYPE: &str = "muse-glimmer";

const MAX_LAYERS: u64 = 512;
const MAX_SIDE: u64 = 65_536;
const MAX_WIDTH: u64 = 1 << 20;

/// Shape and constants of a vision tower and its adapter.
#[derive(Clone, Debug, PartialEq)]
pub struct VisionConfig {
    /// Layers of the tower.
    pub layers: usize,
    /// Values of the tower's residual stream.
    pub hidden: usize,
    /// Width of the feed-forward layer.
    pub ffn: usize,
    /// Heads; divides `hidden`.
    pub heads: usize,
    /// Pixels of a side of a patch.
    pub patch: usize,
    /// Patches of a side of the square that becomes one token.
    pub merge: usize,
    /// Pixels of a side of the nominal image; a whole number of tokens.
    pub image: usize,
    /// Width of the rows that come out; the text model's.
    pub projection: usize,
    /// Epsilon of the layer norms.
    pub norm_eps: f32,
    /// Subtracted from each colour channel, of values from 0 to 1.
    pub mean: [f32; 3],
    /// Divides each colour channel then.
    pub std: [f32; 3],
}

impl VisionConfig {
    /// The released shape.
    pub fn released() -> VisionConfig {
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

    /// Values per head.
    pub fn head_dim(&self) -> usize {
        self.hidden / self.heads
    }

    /// Places of a side of the learned position table: the tokens of a side of the nominal image.
    pub fn grid(&self) -> usize {
        self.image / (self.patch * self.merge)
    }

    /// Pixels of a side of a token.
    pub fn unit(&self) -> usize {
        self.patch * self.merge
    }

    /// Values of a patch: its pixels' colours.
    pub fn patch_values(&self) -> usize {
        3 * self.patch * self.patch
    }

    /// Values that the patches of a token have together.
    pub fn merged(&self) -> usize {
        self.hidden * self.merge * self.merge
    }

    /// Does the layer see the whole image? The others see windows.
    pub fn is_full(&self, layer: usize) -> bool {
        (layer + 1).is_multiple_of(4) || layer + 1 == self.layers
    }

    /// Reads and checks the figures of a projector file.
    pub fn from_gguf(file: &GgufFile) -> Result<VisionConfig, ModelError> {
        let keys = Keys { file, prefix: VISION_ARCHITECTURE };
        keys.check_architecture()?;
        if !file.bool(&keys.key("has_vision_encoder"))? {
            return Err(keys.wrong("has_vision_encoder", true, false));
        }
        let kind = file.str(&keys.key("projector_type"))?;
        if kind != PROJECTOR_TYPE {
            return Err(keys.wrong("projector_type", format!("{PROJECTOR_TYPE:?}"), format!("{kind:?}")));
        }
        refuse_contradictions(&keys)?;
        let config = VisionConfig {
            layers: keys.size("vision.block_count", MAX_LAYERS)?,
            hidden: keys.size("vision.embedding_length", MAX_WIDTH)?,
            ffn: keys.size("vision.feed_forward_length", MAX_WIDTH)?,
            heads: keys.size("vision.attention.head_count", MAX_WIDTH)?,
            patch: keys.size("vision.patch_size", MAX_SIDE)?,
            merge: keys.size("vision.spatial_merge_size", 16)?,
            image: keys.size("vision.image_size", MAX_SIDE)?,
            projection: keys.size("vision.projection_dim", MAX_WIDTH)?,
            norm_eps: keys.positive("vision.attention.layer_norm_epsilon")?,
            mean: channels(&keys, "vision.image_mean")?,
            std: channels(&keys, "vision.image_std")?,
        };
        // Rotation turns pairs of values, half of them by the row and half by the column.
        if !config.hidden.is_multiple_of(config.heads) || !config.head_dim().is_multiple_of(4) {
            let expected = format!("heads that divide {} into multiples of 4", config.hidden);
            return Err(keys.wrong("vision.attention.head_count", expected, config.heads));
        }
        let unit = config.unit();
        if !config.image.is_multiple_of(unit) {
            return Err(keys.wrong("vision.image_size", format!("a multiple of {unit}"), config.image));
        }
        if config.std.iter().any(|std| *std <= 0.0) {
            return Err(keys.wrong("vision.image_std", "numbers above zero", format!("{:?}", config.std)));
        }
        Ok(config)
    }
}

/// All tensors: names and shapes.
pub(crate) fn contract(c: &VisionConfig, adapter: usize) -> Vec<(String, Vec<usize>)> {
    let mut all = vec![
        ("v.patch_embd.weight".to_owned(), vec![c.patch, c.patch, 3, c.hidden]),
        ("v.position_embd.weight".to_owned(), vec![c.hidden, c.grid() * c.grid()]),
        ("mm.0.weight".to_owned(), vec![c.merged(), adapter]),
        ("mm.1.weight".to_owned(), vec![adapter, adapter]),
        ("mm.2.weight".to_owned(), vec![adapter, c.projection]),
    ];
    let mut norm = |stem: String| {
        all.push((format!("{stem}.weight"), vec![c.hidden]));
        all.push((format!("{stem}.bias"), vec![c.hidden]));
    };
    norm("v.pre_ln".to_owned());
    norm("v.post_ln".to_owned());
    for layer in 0..c.layers {
        norm(format!("v.blk.{layer}.ln1"));
        norm(format!("v.blk.{layer}.ln2"));
    }
    for layer in 0..c.layers {
        for (part, cols, rows) in [
            ("attn_q", c.hidden, c.hidden),
            ("attn_k", c.hidden, c.hidden),
            ("attn_v", c.hidden, c.hidden),
            ("attn_out", c.hidden, c.hidden),
            ("ffn_up", c.hidden, c.ffn),
            ("ffn_down", c.ffn, c.hidden),
        ] {
            all.push((format!("v.blk.{layer}.{part}.weight"), vec![cols, rows]));
            all.push((format!("v.blk.{layer}.{part}.bias"), vec![rows]));
        }
    }
    all
}

/// Keys of the same architecture name that would have another tower computed than ours, with the value that ours has. A file need
/// not have them; one that says something else was made for other arithmetic.
const OURS: [(&str, Value<'static>); 8] = [
    ("has_audio_encoder", Value::Bool(false)),
    ("has_llava_projector", Value::Bool(false)),
    ("use_gelu", Value::Bool(true)),
    ("use_silu", Value::Bool(false)),
    ("vision.use_gelu", Value::Bool(true)),
    ("vision.use_silu", Value::Bool(false)),
    ("vision.projector_type", Value::String(PROJECTOR_TYPE)),
    ("vision.n_wa_pattern", Value::U32(4)),
];

/// Keys that no such tower has.
const NOBODYS: [&str; 7] = [
    "vision.feature_layer",
    "vision.wa_layer_indexes",
    "vision.is_deepstack_layers",
    "vision.projector.scale_factor",
    "vision.image_grid_pinpoints",
    "vision.attention.head_count_kv",
    "vision.rope.freq_base",
];

fn refuse_contradictions(keys: &Keys<'_>) -> Result<(), ModelError> {
    for (name, ours) in OURS {
        if let Some(found) = keys.file.get(&keys.key(name))
            && !same(&found, &ours)
        {
            return Err(keys.wrong(name, format!("{ours:?}, or no such key"), format!("{found:?}")));
        }
    }
    match NOBODYS.iter().find(|name| keys.file.get(&keys.key(name)).is_some()) {
        Some(name) => Err(keys.wrong(name, "no such key: this tower has nothing of the kind", "one")),
        None => Ok(()),
    }
}

fn same(found: &Value<'_>, ours: &Value<'_>) -> bool {
    match (found, ours) {
        (Value::Bool(found), Value::Bool(ours)) => found == ours,
        (Value::String(found), Value::String(ours)) => found == ours,
        (Value::U32(found), Value::U32(ours)) => found == ours,
        _ => false,
    }
}

fn channels(keys: &Keys<'_>, name: &str) -> Result<[f32; 3], ModelError> {
    let key = keys.key(name);
    let count = keys.file.array(&key)?.len();
    if count != 3 {
        return Err(keys.wrong(name, "3 numbers, one for each colour", count));
    }
    let values = keys.file.floats(&key)?;
    match <[f32; 3]>::try_from(values) {
        Ok(values) if values.iter().all(|value| value.is_finite()) => Ok(values),
        Ok(values) => Err(keys.wrong(name, "finite numbers", format!("{values:?}"))),
        Err(values) => Err(keys.wrong(name, "3 numbers, one for each colour", values.len())),
    }
}

#[cfg(test)]
mod tests;
