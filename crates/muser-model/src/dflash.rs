//! The DFlash draft model: configuration, tensor contract, bound weights.
//!
//! A draft has no embedding table and no vocabulary matrix of its own, it uses those of its target; so it is checked
//! twice, alone when it is loaded and against the target by [`Draft::check_target`]. DFlash2 files look alike but compute
//! something else, and are refused by name.

use std::path::Path;
use std::sync::Arc;

use muser_gguf::GgufFile;

use crate::geometry::{Keys, MAX_WIDTH};
use crate::weights::{Binder, check_factors};
use crate::{Matrix, Model, ModelError};

/// Architecture name of a draft in a GGUF file.
pub const DFLASH_ARCHITECTURE: &str = "dflash";

const MASK_KEY: &str = "tokenizer.ggml.mask_token_id";
const TOKENS_KEY: &str = "tokenizer.ggml.tokens";

/// Most layers of a draft, and most target layers whose features it reads.
const MAX_DRAFT_LAYERS: u64 = 64;
/// Most rows of a draft block; the released drafts have 16.
const MAX_BLOCK: u64 = 256;

/// Shape and constants of a draft model.
#[derive(Clone, Debug, PartialEq)]
pub struct DflashConfig {
    /// Values of the residual stream; the target's.
    pub hidden: usize,
    /// Width of the feed-forward layer.
    pub ffn: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Values per head; even.
    pub head_dim: usize,
    /// Most positions of a sequence.
    pub context: usize,
    /// Keys that a sliding layer sees.
    pub window: usize,
    /// For each layer: does it attend to a window?
    pub sliding: Vec<bool>,
    /// RoPE base; all layers rotate, in the rotate-half layout.
    pub rope_theta: f32,
    /// Epsilon of all norms.
    pub rms_eps: f32,
    /// Rows of a draft block, the anchor's included.
    pub block_size: usize,
    /// Target layers whose *input* residual streams are the features, ascending.
    pub target_layers: Vec<usize>,
    /// Id of the token that stands in the places to be drafted.
    pub mask_token: u32,
    /// Tokens of the draft's own copy of the vocabulary, if it has one.
    pub vocab: Option<usize>,
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

/// A checked draft model over a mapped file.
#[derive(Clone, Debug)]
pub struct Draft {
    /// The file.
    pub file: Arc<GgufFile>,
    /// Shape and constants.
    pub config: DflashConfig,
    /// Maps the concatenated features of a position to one vector: `hidden` rows of `features * hidden`.
    pub fc: Matrix,
    /// Norm after `fc`.
    pub enc_output_norm: Vec<f32>,
    /// Norm before the target's vocabulary matrix.
    pub output_norm: Vec<f32>,
    /// Layers in order.
    pub layers: Vec<DraftLayer>,
}

impl DflashConfig {
    /// Values of all query heads together.
    pub fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Values of all key heads together (values have as many).
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// The draft of the released model.
    pub fn released() -> DflashConfig {
        DflashConfig {
            hidden: 6656,
            ffn: 19968,
            heads: 32,
            kv_heads: 8,
            head_dim: 128,
            context: 131_072,
            window: 2048,
            sliding: vec![true; 5],
            rope_theta: 500_000.0,
            rms_eps: 1e-5,
            block_size: 16,
            target_layers: vec![2, 14, 26, 38, 50],
            mask_token: 201_818,
            vocab: Some(202_048),
        }
    }

    /// Most tokens of one draft: all rows of a block but the anchor's.
    pub fn max_draft(&self) -> usize {
        self.block_size - 1
    }

    /// Reads and checks the figures of a draft file.
    pub fn from_gguf(file: &GgufFile) -> Result<DflashConfig, ModelError> {
        let keys = Keys { file, prefix: DFLASH_ARCHITECTURE };
        keys.check_architecture()?;
        refuse_dflash2(&keys)?;
        if file.opt_bool(&keys.key("attention.causal"))? == Some(true) {
            return Err(keys.wrong("attention.causal", "false: rows of a draft block see each other", true));
        }
        let layers = keys.size("block_count", MAX_DRAFT_LAYERS)?;
        let (heads, kv_heads) = keys.heads()?;
        let block_size = keys.size("block_size", MAX_BLOCK)?;
        if block_size < 2 {
            return Err(keys.wrong(
                "block_size",
                format!("2 to {MAX_BLOCK}, the anchor and drafts"),
                block_size,
            ));
        }
        let config = DflashConfig {
            hidden: keys.size("embedding_length", MAX_WIDTH)?,
            ffn: keys.size("feed_forward_length", MAX_WIDTH)?,
            heads,
            kv_heads,
            head_dim: keys.head_dim()?,
            context: keys.size("context_length", MAX_WIDTH)?,
            window: keys.window()?,
            sliding: keys.sliding(layers)?,
            rope_theta: keys.rope_theta()?,
            rms_eps: keys.positive("attention.layer_norm_rms_epsilon")?,
            block_size,
            target_layers: target_layers(&keys)?,
            mask_token: file.u32(MASK_KEY)?,
            vocab: match file.get(TOKENS_KEY) {
                Some(_) => Some(file.array(TOKENS_KEY)?.len()),
                None => None,
            },
        };
        keys.refuse_unknown_features()?;
        if config.vocab.is_some_and(|vocab| config.mask_token as usize >= vocab) {
            return Err(ModelError::Metadata {
                key: MASK_KEY.to_owned(),
                expected: format!("an id below the {} tokens of the vocabulary", config.vocab.unwrap_or(0)),
                found: config.mask_token.to_string(),
            });
        }
        Ok(config)
    }
}

impl Draft {
    /// Opens a file and binds its weights.
    pub fn load(path: impl AsRef<Path>) -> Result<Draft, ModelError> {
        Draft::from_gguf(Arc::new(GgufFile::open(path)?))
    }

    /// Checks an open file against the contract of the architecture and binds its weights.
    pub fn from_gguf(file: Arc<GgufFile>) -> Result<Draft, ModelError> {
        let config = DflashConfig::from_gguf(&file)?;
        let c = &config;
        let binder = Binder { file: &file };
        let fc = binder.matrix("fc", c.target_layers.len() * c.hidden, c.hidden)?;
        let enc_output_norm = binder.vector("enc.output_norm", c.hidden)?;
        let output_norm = binder.vector("output_norm", c.hidden)?;
        let layers =
            (0..c.sliding.len()).map(|layer| bind_layer(&binder, c, layer)).collect::<Result<Vec<_>, _>>()?;
        let draft = Draft { file, config, fc, enc_output_norm, output_norm, layers };
        check_factors(&draft.file, draft.matrices())?;
        Ok(draft)
    }

    /// All matrices.
    pub fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        let of_layers = self.layers.iter().flat_map(|l| {
            [&l.attn_q, &l.attn_k, &l.attn_v, &l.attn_output, &l.ffn_gate, &l.ffn_up, &l.ffn_down]
        });
        std::iter::once(&self.fc).chain(of_layers)
    }

    /// Does this draft fit the target whose embedding table, features and tokens it will use?
    pub fn check_target(&self, target: &Model) -> Result<(), ModelError> {
        let keys = Keys { file: &self.file, prefix: DFLASH_ARCHITECTURE };
        let (c, g) = (&self.config, &target.geometry);
        if c.hidden != g.hidden {
            return Err(keys.wrong("embedding_length", format!("{}, the target's", g.hidden), c.hidden));
        }
        if let Some(last) = c.target_layers.last()
            && *last >= g.layers()
        {
            return Err(keys.wrong("target_layers", format!("layers below {}", g.layers()), last));
        }
        if c.mask_token as usize >= g.vocab {
            return Err(ModelError::Metadata {
                key: MASK_KEY.to_owned(),
                expected: format!("an id below the {} tokens of the target", g.vocab),
                found: c.mask_token.to_string(),
            });
        }
        self.check_vocabulary(target)
    }

    /// Drafts are ids, so both files must mean the same by them, where both say what they mean.
    fn check_vocabulary(&self, target: &Model) -> Result<(), ModelError> {
        let wrong = |expected: String, found: String| {
            Err(ModelError::Metadata { key: TOKENS_KEY.to_owned(), expected, found })
        };
        let Some(vocab) = self.config.vocab else { return Ok(()) };
        if vocab != target.geometry.vocab {
            let expected = format!("{} tokens, as the target has", target.geometry.vocab);
            return wrong(expected, vocab.to_string());
        }
        if target.file.get(TOKENS_KEY).is_none() {
            return Ok(());
        }
        let (ours, theirs) = (self.file.byte_strings(TOKENS_KEY)?, target.file.byte_strings(TOKENS_KEY)?);
        // The mask may have a name of its own: a target knows it only as one of its reserved tokens.
        let mask = self.config.mask_token as usize;
        match ours.zip(theirs).enumerate().find(|(id, (ours, theirs))| ours != theirs && *id != mask) {
            Some((id, _)) => {
                wrong("the tokens of the target".to_owned(), format!("another text for token {id}"))
            }
            None => Ok(()),
        }
    }
}

/// A DFlash2 file has convolutions and a selector, which DFlash code would silently leave out.
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

fn target_layers(keys: &Keys<'_>) -> Result<Vec<usize>, ModelError> {
    let name = "target_layers";
    let key = keys.key(name);
    // Checked before anything is unpacked: the array may be as long as the file.
    let count = keys.file.array(&key)?.len();
    if count == 0 || count > MAX_DRAFT_LAYERS as usize {
        return Err(keys.wrong(name, format!("1 to {MAX_DRAFT_LAYERS} layers"), count));
    }
    let layers: Vec<u16> = keys.file.integers(&key)?;
    if layers.windows(2).any(|pair| pair[0] >= pair[1]) {
        return Err(keys.wrong(name, "ascending layers", format!("{layers:?}")));
    }
    Ok(layers.into_iter().map(usize::from).collect())
}

fn bind_layer(binder: &Binder<'_>, c: &DflashConfig, layer: usize) -> Result<DraftLayer, ModelError> {
    let name = |part: &str| format!("blk.{layer}.{part}");
    let matrix = |part: &str, cols, rows| binder.matrix(&name(part), cols, rows);
    let vector = |part: &str, len| binder.vector(&name(part), len);
    Ok(DraftLayer {
        attn_norm: vector("attn_norm", c.hidden)?,
        attn_q: matrix("attn_q", c.hidden, c.q_width())?,
        attn_k: matrix("attn_k", c.hidden, c.kv_width())?,
        attn_v: matrix("attn_v", c.hidden, c.kv_width())?,
        attn_q_norm: vector("attn_q_norm", c.head_dim)?,
        attn_k_norm: vector("attn_k_norm", c.head_dim)?,
        attn_output: matrix("attn_output", c.q_width(), c.hidden)?,
        ffn_norm: vector("ffn_norm", c.hidden)?,
        ffn_gate: matrix("ffn_gate", c.hidden, c.ffn)?,
        ffn_up: matrix("ffn_up", c.hidden, c.ffn)?,
        ffn_down: matrix("ffn_down", c.ffn, c.hidden)?,
    })
}
