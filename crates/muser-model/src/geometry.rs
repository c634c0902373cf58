//! The figures of a model. Source: GGUF metadata, spec sections 1.1 and 2.2.

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

impl Geometry {
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
