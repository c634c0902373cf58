//! The figures of a model. Source: the metadata of the GGUF file.

use muser_gguf::{GgufFile, Value};

use crate::ModelError;

/// Shape and constants of a Muse Glimmer model; every figure has been checked against the others.
#[derive(Clone, Debug, PartialEq)]
pub struct Geometry {
    /// Values of the residual stream.
    pub hidden: usize,
    /// Width of the feed-forward layer.
    pub ffn: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Values per head; even.
    pub head_dim: usize,
    /// Tokens in the vocabulary.
    pub vocab: usize,
    /// Most positions of a sequence.
    pub context: usize,
    /// Keys that a sliding layer sees, the query's own included.
    pub window: usize,
    /// For each layer: does it attend to a window (with RoPE) or to everything (without)?
    pub sliding: Vec<bool>,
    /// RoPE base.
    pub rope_theta: f32,
    /// Epsilon of all norms but the two post-norms.
    pub rms_eps: f32,
    /// Epsilon of the two post-norms: 1e-8, not in any file.
    pub post_norm_eps: f32,
    /// Factor on the logits, before the soft cap.
    pub logit_scale: f32,
    /// `logits = cap * tanh(z / cap)`; `None` when the file has none.
    pub softcap: Option<f32>,
}

/// Architecture name of the text model in a GGUF file.
pub const ARCHITECTURE: &str = "muse-glimmer";

/// Epsilon of the two post-norms; no key carries it.
const POST_NORM_EPS: f32 = 1e-8;

/// Most layers of a file: twenty times the released model, and far below what would cost memory.
const MAX_LAYERS: u64 = 1024;
/// Most query heads.
const MAX_HEADS: u64 = 65_536;
/// Most values of any one width, tokens or positions; keeps every product of two widths far from overflow.
pub(crate) const MAX_WIDTH: u64 = 1 << 24;

impl Geometry {
    /// Reads and checks the figures of a muse-glimmer file.
    pub fn from_gguf(file: &GgufFile) -> Result<Geometry, ModelError> {
        let keys = Keys { file, prefix: ARCHITECTURE };
        keys.check_architecture()?;
        let layers = keys.size("block_count", MAX_LAYERS)?;
        let (heads, kv_heads) = keys.heads()?;
        let geometry = Geometry {
            hidden: keys.size("embedding_length", MAX_WIDTH)?,
            ffn: keys.size("feed_forward_length", MAX_WIDTH)?,
            heads,
            kv_heads,
            head_dim: keys.head_dim()?,
            vocab: keys.vocab()?,
            context: keys.size("context_length", MAX_WIDTH)?,
            window: keys.window()?,
            sliding: keys.sliding(layers)?,
            rope_theta: keys.rope_theta()?,
            rms_eps: keys.positive("attention.layer_norm_rms_epsilon")?,
            post_norm_eps: POST_NORM_EPS,
            logit_scale: keys.positive("logit_scale")?,
            softcap: keys.softcap()?,
        };
        keys.refuse_unknown_features()?;
        Ok(geometry)
    }

    /// The released model, "Muse Glimmer 30B".
    pub fn released() -> Geometry {
        Geometry {
            hidden: 6656,
            ffn: 19968,
            heads: 32,
            kv_heads: 2,
            head_dim: 128,
            vocab: 202_048,
            context: 131_072,
            window: 2048,
            sliding: Geometry::period_of_four(52),
            rope_theta: 500_000.0,
            rms_eps: 1e-5,
            post_norm_eps: POST_NORM_EPS,
            logit_scale: 0.196_116_13,
            softcap: Some(20.0),
        }
    }

    /// Name of a released model that has exactly this shape.
    pub fn known_name(&self) -> Option<&'static str> {
        (*self == Geometry::released()).then_some("Muse Glimmer 30B")
    }

    /// The usual window pattern: the last layer and every fourth before it see everything.
    pub fn period_of_four(layers: usize) -> Vec<bool> {
        (0..layers).map(|layer| !(layers - 1 - layer).is_multiple_of(4)).collect()
    }

    /// Number of layers.
    pub fn layers(&self) -> usize {
        self.sliding.len()
    }

    /// Values of all query heads together.
    pub fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Values of all key heads together (values have as many).
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// First position that a sliding layer's query at `pos` sees.
    pub fn first_visible(&self, pos: usize) -> usize {
        (pos + 1).saturating_sub(self.window)
    }
}

/// Reads keys below an architecture's prefix; every error names the whole key.
pub(crate) struct Keys<'a> {
    pub(crate) file: &'a GgufFile,
    pub(crate) prefix: &'static str,
}

impl Keys<'_> {
    pub(crate) fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.prefix)
    }

    #[expect(
        clippy::needless_pass_by_value,
        reason = "callers pass formatted strings and plain numbers alike"
    )]
    pub(crate) fn wrong(&self, name: &str, expected: impl ToString, found: impl ToString) -> ModelError {
        ModelError::Metadata { key: self.key(name), expected: expected.to_string(), found: found.to_string() }
    }

    pub(crate) fn check_architecture(&self) -> Result<(), ModelError> {
        let key = "general.architecture";
        let found = self.file.str(key)?;
        if found == self.prefix {
            return Ok(());
        }
        let hint = match found {
            "dflash" => " (a draft model, which works only beside its target)",
            "clip" => " (a vision projector, which works only beside its text model)",
            _ => "",
        };
        Err(ModelError::Metadata {
            key: key.to_owned(),
            expected: format!("{:?}", self.prefix),
            found: format!("{found:?}{hint}"),
        })
    }

    /// A count or width from 1 to `most`.
    pub(crate) fn size(&self, name: &str, most: u64) -> Result<usize, ModelError> {
        let found = self.file.u64(&self.key(name))?;
        if found == 0 || found > most {
            return Err(self.wrong(name, format!("1 to {most}"), found));
        }
        Ok(found as usize)
    }

    /// A finite float above zero.
    pub(crate) fn positive(&self, name: &str) -> Result<f32, ModelError> {
        let found = self.file.f32(&self.key(name))?;
        if !found.is_finite() || found <= 0.0 {
            return Err(self.wrong(name, "a finite number above zero", found));
        }
        Ok(found)
    }

    /// Query heads, and key and value heads.
    pub(crate) fn heads(&self) -> Result<(usize, usize), ModelError> {
        let heads = self.size("attention.head_count", MAX_HEADS)?;
        let kv_heads = self.size("attention.head_count_kv", heads as u64)?;
        if !heads.is_multiple_of(kv_heads) {
            return Err(self.wrong(
                "attention.head_count_kv",
                format!("a divisor of the {heads} query heads"),
                kv_heads,
            ));
        }
        Ok((heads, kv_heads))
    }

    /// Width of a head: keys, values and rotated dimensions must be the same.
    pub(crate) fn head_dim(&self) -> Result<usize, ModelError> {
        let head_dim = self.size("attention.key_length", 1024)?;
        if head_dim % 2 != 0 {
            return Err(self.wrong("attention.key_length", "an even number", head_dim));
        }
        for name in ["attention.value_length", "rope.dimension_count"] {
            if let Some(found) = self.file.opt_u64(&self.key(name))?
                && found != head_dim as u64
            {
                return Err(self.wrong(name, format!("{head_dim}, the key length"), found));
            }
        }
        Ok(head_dim)
    }

    /// Tokens: the tokenizer's list, the `vocab_size` key and the embedding table must agree where present.
    fn vocab(&self) -> Result<usize, ModelError> {
        let tokens = match self.file.get("tokenizer.ggml.tokens") {
            Some(_) => Some(self.file.array("tokenizer.ggml.tokens")?.len() as u64),
            None => None,
        };
        let stated = self.file.opt_u64(&self.key("vocab_size"))?;
        let rows = self.file.tensor("token_embd.weight").and_then(|tensor| tensor.dims.get(1).copied());
        let found = tokens.or(stated).or(rows).unwrap_or(0);
        if let (Some(tokens), Some(stated)) = (tokens, stated)
            && tokens != stated
        {
            return Err(self.wrong("vocab_size", format!("{tokens}, the tokens of the tokenizer"), stated));
        }
        if found == 0 || found > MAX_WIDTH {
            return Err(ModelError::Metadata {
                key: "tokenizer.ggml.tokens".to_owned(),
                expected: format!("1 to {MAX_WIDTH} tokens"),
                found: found.to_string(),
            });
        }
        Ok(found as usize)
    }

    /// Without the key a sliding layer sees everything (and still rotates): the window is the context.
    pub(crate) fn window(&self) -> Result<usize, ModelError> {
        match self.file.opt_u64(&self.key("attention.sliding_window"))? {
            Some(_) => self.size("attention.sliding_window", MAX_WIDTH),
            None => self.size("context_length", MAX_WIDTH),
        }
    }

    /// The pattern has two forms: one bool for each layer, or a period `n` with full attention in every n-th layer.
    pub(crate) fn sliding(&self, layers: usize) -> Result<Vec<bool>, ModelError> {
        let name = "attention.sliding_window_pattern";
        let key = self.key(name);
        if let Some(Value::Array(array)) = self.file.get(&key) {
            // Checked before anything is unpacked: the array may be as long as the file.
            if array.len() != layers {
                return Err(self.wrong(name, format!("{layers} entries, one for each layer"), array.len()));
            }
            return Ok(self.file.bools(&key)?);
        }
        let period = self.size(name, layers as u64)?;
        if !layers.is_multiple_of(period) {
            // Files do not say whether such a pattern is counted from the first layer or from the last.
            return Err(self.wrong(
                name,
                format!("a divisor of the {layers} layers, or one bool for each layer"),
                period,
            ));
        }
        Ok((0..layers).map(|layer| layer % period != period - 1).collect())
    }

    /// Only sliding layers rotate, so that a base of their own replaces the general one.
    pub(crate) fn rope_theta(&self) -> Result<f32, ModelError> {
        match self.file.get(&self.key("rope.freq_base_swa")) {
            Some(_) => self.positive("rope.freq_base_swa"),
            None => self.positive("rope.freq_base"),
        }
    }

    fn softcap(&self) -> Result<Option<f32>, ModelError> {
        let name = "final_logit_softcapping";
        match self.file.opt_f32(&self.key(name))? {
            None | Some(0.0) => Ok(None),
            Some(_) => self.positive(name).map(Some),
        }
    }

    /// Keys that would change the computation, and that this architecture does not have.
    pub(crate) fn refuse_unknown_features(&self) -> Result<(), ModelError> {
        if let Some(kind) = self.file.opt_str(&self.key("rope.scaling.type"))?
            && kind != "none"
        {
            return Err(self.wrong("rope.scaling.type", "no scaling of positions", format!("{kind:?}")));
        }
        for name in
            ["attn_logit_softcapping", "expert_count", "attention.max_alibi_bias", "attention.clamp_kqv"]
        {
            if let Some(value) = self.file.get(&self.key(name))
                && value.as_integer() != Some(0)
                && value.as_float() != Some(0.0)
            {
                return Err(self.wrong(name, "no such feature", value.describe()));
            }
        }
        Ok(())
    }
}
