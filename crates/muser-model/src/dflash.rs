//! The DFlash draft model: a small transformer that reads the target's residual stream and proposes a block of tokens.
//!
//! It has no embedding table and no vocabulary matrix; it uses the target's (the raw embedding rows, without their
//! norm). So a draft file means something only beside a target, and is checked against one when it is loaded.

use std::path::Path;
use std::sync::Arc;

use muser_gguf::GgufFile;

use crate::geometry::{Keys, MAX_WIDTH};
use crate::weights::{Binder, Matrix};
use crate::{Geometry, ModelError};

/// Architecture name of a draft in a GGUF file.
pub const DRAFT_ARCHITECTURE: &str = "dflash";

/// Most layers of a draft, and most target layers whose features it reads.
const MAX_LAYERS: u64 = 64;
/// Most rows of a block; the released drafts have 16.
const MAX_BLOCK: u64 = 256;

/// Figures of a draft model.
#[derive(Clone, Debug, PartialEq)]
pub struct DraftGeometry {
    /// Layers; all of them attend to a window, with RoPE of the rotate-half kind.
    pub layers: usize,
    /// Values of the residual stream; the target's.
    pub hidden: usize,
    /// Width of the feed-forward layer.
    pub ffn: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Values per head.
    pub head_dim: usize,
    /// Keys that a query sees at most, its own included, the block's rows ahead of it not counted.
    pub window: usize,
    /// RoPE base.
    pub rope_theta: f32,
    /// Epsilon of all norms.
    pub rms_eps: f32,
    /// Rows of a block: the anchor and up to `block_size - 1` proposals.
    pub block_size: usize,
    /// Target layers at whose *input* the residual stream is taken, ascending.
    pub target_layers: Vec<usize>,
    /// Token that stands for a position to be proposed.
    pub mask_token: u32,
}

impl DraftGeometry {
    /// Values of all query heads together.
    pub fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Values of all key heads together.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }
}

/// Weights of one draft layer. Norm vectors are copied out as f32.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "the names are those of the file")]
pub struct DraftLayer {
    pub attn_norm: Vec<f32>,
    pub attn_q: Matrix,
    pub attn_k: Matrix,
    pub attn_v: Matrix,
    pub attn_q_norm: Vec<f32>,
    pub attn_k_norm: Vec<f32>,
    pub attn_output: Matrix,
    pub ffn_norm: Vec<f32>,
    pub ffn_gate: Matrix,
    pub ffn_up: Matrix,
    pub ffn_down: Matrix,
}

/// A draft model checked against its target. Cheap to clone.
#[derive(Clone, Debug)]
pub struct DraftModel {
    /// The file.
    pub file: Arc<GgufFile>,
    /// Figures.
    pub geometry: DraftGeometry,
    /// Projects the concatenated features (`target_layers` times hidden size) to one hidden row.
    pub fc: Matrix,
    /// Norm after the projection.
    pub enc_norm: Vec<f32>,
    /// Norm before the target's vocabulary matrix.
    pub output_norm: Vec<f32>,
    /// Layers in order.
    pub layers: Vec<DraftLayer>,
}

impl DraftModel {
    /// Opens a draft file and checks it against the target it is to draft for.
    pub fn load(path: impl AsRef<Path>, target: &GgufFile, geometry: &Geometry) -> Result<Self, ModelError> {
        Self::from_gguf(Arc::new(GgufFile::open(path)?), target, geometry)
    }

    /// The same for an open file.
    pub fn from_gguf(
        file: Arc<GgufFile>,
        target: &GgufFile,
        geometry: &Geometry,
    ) -> Result<Self, ModelError> {
        let keys = Keys { file: &file, prefix: DRAFT_ARCHITECTURE };
        keys.check_architecture()?;
        refuse_dflash2(&keys)?;
        let g = draft_geometry(&keys, geometry)?;
        check_vocabulary(&file, target, &g, geometry)?;

        let binder = Binder { file: &file };
        let fc = binder.matrix("fc", g.hidden * g.target_layers.len(), g.hidden)?;
        let enc_norm = binder.vector("enc.output_norm", g.hidden)?;
        let output_norm = binder.vector("output_norm", g.hidden)?;
        let layers =
            (0..g.layers).map(|layer| bind_layer(&binder, &g, layer)).collect::<Result<Vec<_>, _>>()?;
        Ok(Self { geometry: g, fc, enc_norm, output_norm, layers, file })
    }
}

fn bind_layer(binder: &Binder<'_>, g: &DraftGeometry, layer: usize) -> Result<DraftLayer, ModelError> {
    let name = |part: &str| format!("blk.{layer}.{part}");
    let matrix = |part: &str, cols, rows| binder.matrix(&name(part), cols, rows);
    let vector = |part: &str, len| binder.vector(&name(part), len);
    Ok(DraftLayer {
        attn_norm: vector("attn_norm", g.hidden)?,
        attn_q: matrix("attn_q", g.hidden, g.q_width())?,
        attn_k: matrix("attn_k", g.hidden, g.kv_width())?,
        attn_v: matrix("attn_v", g.hidden, g.kv_width())?,
        attn_q_norm: vector("attn_q_norm", g.head_dim)?,
        attn_k_norm: vector("attn_k_norm", g.head_dim)?,
        attn_output: matrix("attn_output", g.q_width(), g.hidden)?,
        ffn_norm: vector("ffn_norm", g.hidden)?,
        ffn_gate: matrix("ffn_gate", g.hidden, g.ffn)?,
        ffn_up: matrix("ffn_up", g.hidden, g.ffn)?,
        ffn_down: matrix("ffn_down", g.ffn, g.hidden)?,
    })
}

/// DFlash2 has convolutions and a selector that plain DFlash code would silently leave out.
fn refuse_dflash2(keys: &Keys<'_>) -> Result<(), ModelError> {
    const EXPECTED: &str = "nothing of this name: this is DFlash, not DFlash2";
    const FOUND: &str = "a DFlash2 draft, which muser cannot run";
    for name in ["selector_top_k", "selector_rank", "conv_kernel_size", "conv_group_size"] {
        if keys.file.get(&keys.key(name)).is_some() {
            return Err(keys.wrong(name, EXPECTED, FOUND));
        }
    }
    let marks = |name: &str| {
        name.starts_with("selector_") || name.contains(".attn_conv_") || name.contains(".ffn_conv_")
    };
    match keys.file.tensors().iter().find(|tensor| marks(&tensor.name)) {
        Some(tensor) => Err(ModelError::Tensor {
            name: tensor.name.clone(),
            expected: EXPECTED.to_owned(),
            found: FOUND.to_owned(),
        }),
        None => Ok(()),
    }
}

fn draft_geometry(keys: &Keys<'_>, target: &Geometry) -> Result<DraftGeometry, ModelError> {
    let layers = keys.size("block_count", MAX_LAYERS)?;
    let hidden = keys.size("embedding_length", MAX_WIDTH)?;
    if hidden != target.hidden {
        return Err(keys.wrong("embedding_length", format!("{}, the target's", target.hidden), hidden));
    }
    let (heads, kv_heads) = keys.heads()?;
    if keys.sliding(layers)?.contains(&false) {
        return Err(keys.wrong(
            "attention.sliding_window_pattern",
            "sliding attention in every layer",
            "a full layer",
        ));
    }
    if keys.file.opt_bool(&keys.key("attention.causal"))? == Some(true) {
        return Err(keys.wrong("attention.causal", "false: rows of a block see each other", true));
    }
    let block_size = keys.size("block_size", MAX_BLOCK)?;
    if block_size < 2 {
        return Err(keys.wrong("block_size", "2 or more: the anchor and a proposal", block_size));
    }
    keys.refuse_unknown_features()?;
    let target_layers = target_layers(keys, target)?;
    let mask_key = "tokenizer.ggml.mask_token_id";
    let mask = keys.file.u64(mask_key)?;
    if mask >= target.vocab as u64 {
        return Err(ModelError::Metadata {
            key: mask_key.into(),
            expected: format!("an id below the vocabulary size {}", target.vocab),
            found: mask.to_string(),
        });
    }
    Ok(DraftGeometry {
        layers,
        hidden,
        ffn: keys.size("feed_forward_length", MAX_WIDTH)?,
        heads,
        kv_heads,
        head_dim: keys.head_dim()?,
        window: keys.window()?,
        rope_theta: keys.rope_theta()?,
        rms_eps: keys.positive("attention.layer_norm_rms_epsilon")?,
        block_size,
        target_layers,
        mask_token: mask as u32,
    })
}

fn target_layers(keys: &Keys<'_>, target: &Geometry) -> Result<Vec<usize>, ModelError> {
    let name = "target_layers";
    // Checked before anything is unpacked: the array may be as long as the file.
    let count = keys.file.array(&keys.key(name))?.len();
    if count > MAX_LAYERS as usize {
        return Err(keys.wrong(name, format!("at most {MAX_LAYERS} layers"), count));
    }
    let found: Vec<u64> = keys.file.integers(&keys.key(name))?;
    let ascending = found.windows(2).all(|pair| pair[0] < pair[1]);
    let inside = found.iter().all(|layer| *layer < target.layers() as u64);
    if found.is_empty() || !ascending || !inside {
        let expected = format!("ascending layers of the target, below {}", target.layers());
        return Err(keys.wrong(name, expected, format!("{found:?}")));
    }
    Ok(found.into_iter().map(|layer| layer as usize).collect())
}

/// Proposals are ids of the target's vocabulary, so both files must mean the same by them.
fn check_vocabulary(
    draft: &GgufFile,
    target: &GgufFile,
    g: &DraftGeometry,
    geometry: &Geometry,
) -> Result<(), ModelError> {
    let key = "tokenizer.ggml.tokens";
    let (Some(_), Some(_)) = (draft.get(key), target.get(key)) else { return Ok(()) };
    let (ours, theirs) = (draft.byte_strings(key)?, target.byte_strings(key)?);
    let wrong =
        |expected: String, found: String| Err(ModelError::Metadata { key: key.into(), expected, found });
    let count = draft.array(key)?.len();
    if count != geometry.vocab {
        return wrong(format!("the target's {} tokens", geometry.vocab), count.to_string());
    }
    // The mask may have a name of its own: a target knows it only as one of its reserved tokens.
    let differs =
        |(at, (a, b)): (usize, (&[u8], &[u8]))| (a != b && at != g.mask_token as usize).then_some(at);
    if let Some(at) = ours.zip(theirs).enumerate().find_map(differs) {
        return wrong("the target's vocabulary".into(), format!("another text for token {at}"));
    }
    Ok(())
}
