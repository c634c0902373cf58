//! A draft's matrices as kernels see them, and the row buffers of a step's part for the draft.

use muser_gguf::GgmlType;
use muser_model::Draft;

use crate::executor::panels::PanelBuffers;
use crate::kernels::matmul::MatrixView;
use crate::kernels::unpack::Class;

/// Matrices of one draft layer.
#[derive(Clone, Copy)]
pub(super) struct DraftLayerViews {
    pub(super) attn_q: MatrixView,
    pub(super) attn_k: MatrixView,
    pub(super) attn_v: MatrixView,
    pub(super) attn_output: MatrixView,
    pub(super) ffn_gate: MatrixView,
    pub(super) ffn_up: MatrixView,
    pub(super) ffn_down: MatrixView,
}

/// Row buffers are `[max_rows][width]`.
pub(super) struct ExtendBuffers {
    pub(super) max_rows: usize,
    /// Concatenated features; empty where they are quantised as they are tapped.
    pub(super) features: Vec<f32>,
    pub(super) feature_panels: PanelBuffers,
    pub(super) context: Vec<f32>,
    pub(super) context_panels: PanelBuffers,
    /// `[layer][max_rows][kv_width]`; `products` points into it.
    pub(super) k: Vec<f32>,
    pub(super) v: Vec<f32>,
    /// cos, then sin, per row; empty where the target's angles are the same.
    pub(super) rope: Vec<f32>,
    /// By sliding block: rows from this one on are zeros, as rows whose context was left out must be.
    pub(super) zero_from: Vec<u16>,
    /// K and V of all layers, which read the same input.
    pub(super) products: Vec<(MatrixView, *mut f32, usize)>,
}

impl ExtendBuffers {
    pub(super) fn new(
        model: &Draft,
        fc: MatrixView,
        layers: &[DraftLayerViews],
        max_rows: usize,
        own_angles: bool,
    ) -> Self {
        let c = &model.config;
        let concatenated = c.target_layers.len() * c.hidden;
        // Quantisation blocks that do not straddle two taps can be made tap by tap.
        let keep = is_float(fc.ty) || !c.hidden.is_multiple_of(256);
        let of = |width: usize| vec![0.0f32; max_rows * width];
        let class = |m: &MatrixView| Class::of(m.ty);
        let panels = |width: usize, classes: &[Class]| {
            let has = |wanted: bool| classes.iter().any(|class| class.is_super() == wanted);
            PanelBuffers::new(max_rows, width, has(true), has(false))
        };
        let kv_classes: Vec<Class> =
            layers.iter().flat_map(|l| [class(&l.attn_k), class(&l.attn_v)]).flatten().collect();
        let mut buffers = Self {
            max_rows,
            features: if keep { of(concatenated) } else { Vec::new() },
            feature_panels: panels(concatenated, &class(&fc).into_iter().collect::<Vec<_>>()),
            context: of(c.hidden),
            context_panels: panels(c.hidden, &kv_classes),
            k: of(layers.len() * c.kv_width()),
            v: of(layers.len() * c.kv_width()),
            rope: if own_angles { of(c.head_dim) } else { Vec::new() },
            zero_from: Vec::new(),
            products: Vec::with_capacity(2 * layers.len()),
        };
        let width = c.kv_width();
        for (layer, views) in layers.iter().enumerate() {
            let at = layer * max_rows * width;
            buffers.products.push((views.attn_k, buffers.k.as_mut_ptr().wrapping_add(at), width));
            buffers.products.push((views.attn_v, buffers.v.as_mut_ptr().wrapping_add(at), width));
        }
        buffers
    }
}

/// Is this a type whose products read activations as f32?
fn is_float(ty: GgmlType) -> bool {
    matches!(ty, GgmlType::F32 | GgmlType::F16 | GgmlType::BF16)
}
