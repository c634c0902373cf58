//! The vision projector file (`mmproj`): configuration and tensor contract.
//!
//! The file holds a vision tower and an adapter to the width of the text model. Nothing computes with it yet; what is
//! here makes a wrong or damaged projector an error when it is loaded, and not when the first image comes.

use std::path::Path;
use std::sync::Arc;

use muser_gguf::GgufFile;

use crate::geometry::Keys;
use crate::weights::Binder;
use crate::{Geometry, ModelError};

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
    /// Values per head.
    pub fn head_dim(&self) -> usize {
        self.hidden / self.heads
    }

    /// Places of a side of the learned position table: the tokens of a side of the nominal image.
    pub fn grid(&self) -> usize {
        self.image / (self.patch * self.merge)
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
        let unit = config.patch * config.merge;
        if !config.image.is_multiple_of(unit) {
            return Err(keys.wrong("vision.image_size", format!("a multiple of {unit}"), config.image));
        }
        if config.std.iter().any(|std| *std <= 0.0) {
            return Err(keys.wrong("vision.image_std", "numbers above zero", format!("{:?}", config.std)));
        }
        Ok(config)
    }
}

/// A projector whose tensors have been checked.
#[derive(Clone, Debug)]
pub struct Projector {
    /// The file.
    pub file: Arc<GgufFile>,
    /// Shape and constants.
    pub config: VisionConfig,
    /// Width between the two layers of the adapter.
    pub adapter: usize,
}

impl Projector {
    /// Opens a file and checks it.
    pub fn load(path: impl AsRef<Path>) -> Result<Projector, ModelError> {
        Projector::from_gguf(Arc::new(GgufFile::open(path)?))
    }

    /// Checks an open file against the contract of the architecture.
    pub fn from_gguf(file: Arc<GgufFile>) -> Result<Projector, ModelError> {
        let config = VisionConfig::from_gguf(&file)?;
        let binder = Binder { file: &file };
        // No key has the adapter's inner width.
        let adapter =
            file.tensor("mm.0.weight").and_then(|tensor| tensor.dims.get(1)).map_or(1, |dim| *dim as usize);
        for (name, shape) in contract(&config, adapter) {
            binder.tensor(&name, &shape)?;
        }
        Ok(Projector { file, config, adapter })
    }

    /// Do the rows that come out fit the text model?
    pub fn check_target(&self, target: &Geometry) -> Result<(), ModelError> {
        if self.config.projection == target.hidden {
            return Ok(());
        }
        let keys = Keys { file: &self.file, prefix: VISION_ARCHITECTURE };
        let expected = format!("{}, the width of the text model", target.hidden);
        Err(keys.wrong("vision.projection_dim", expected, self.config.projection))
    }
}

/// All tensors: names and shapes.
fn contract(c: &VisionConfig, adapter: usize) -> Vec<(String, Vec<usize>)> {
    let mut all = vec![
        ("v.patch_embd.weight".to_owned(), vec![c.patch, c.patch, 3, c.hidden]),
        ("v.position_embd.weight".to_owned(), vec![c.hidden, c.grid() * c.grid()]),
        ("mm.0.weight".to_owned(), vec![c.hidden * c.merge * c.merge, adapter]),
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
