//! The tensors of a projector, bound to the mapped file.

use std::path::Path;
use std::sync::Arc;

use muser_gguf::GgufFile;

use super::{VISION_ARCHITECTURE, VisionConfig, contract};
use crate::geometry::Keys;
use crate::weights::{Binder, check_factors, owner_of_factor, wrong};
use crate::{Geometry, Matrix, ModelError};

/// Weight and bias of a layer norm.
#[derive(Clone, Debug)]
pub struct LayerNorm {
    /// Factors.
    pub weight: Vec<f32>,
    /// Added then.
    pub bias: Vec<f32>,
}

/// A matrix with a bias.
#[derive(Clone, Debug)]
pub struct Linear {
    /// The matrix.
    pub matrix: Matrix,
    /// Added to its product.
    pub bias: Vec<f32>,
}

/// Weights of one layer of the tower.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "the names are those of the file; the formula is muser_backend::reference")]
pub struct TowerLayer {
    pub ln1: LayerNorm,
    pub attn_q: Linear,
    pub attn_k: Linear,
    pub attn_v: Linear,
    pub attn_out: Linear,
    pub ln2: LayerNorm,
    pub ffn_up: Linear,
    pub ffn_down: Linear,
}

/// A checked projector over a mapped file. Matrices stay in the map.
#[derive(Clone)]
pub struct Projector {
    /// The file.
    pub file: Arc<GgufFile>,
    /// Shape and constants.
    pub config: VisionConfig,
    /// Width between the layers of the adapter.
    pub adapter: usize,
    /// From the values of a patch, ordered colour, row, column, to the tower.
    pub patches: Matrix,
    /// The learned position table, row by row; `hidden` values a place.
    pub positions: Vec<f32>,
    /// Norm below the first layer.
    pub pre_norm: LayerNorm,
    /// Layers in order.
    pub layers: Vec<TowerLayer>,
    /// Norm above the last layer.
    pub post_norm: LayerNorm,
    /// The three matrices of the adapter.
    pub adapters: [Matrix; 3],
}

impl std::fmt::Debug for Projector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Projector({:?})", self.config)
    }
}

impl Projector {
    /// Opens a file and checks it.
    pub fn load(path: impl AsRef<Path>) -> Result<Projector, ModelError> {
        Projector::from_gguf(Arc::new(GgufFile::open(path)?))
    }

    /// Checks an open file against the contract of the architecture and binds its weights.
    pub fn from_gguf(file: Arc<GgufFile>) -> Result<Projector, ModelError> {
        let config = VisionConfig::from_gguf(&file)?;
        let binder = Binder { file: &file };
        // No key has the adapter's inner width.
        let adapter =
            file.tensor("mm.0.weight").and_then(|tensor| tensor.dims.get(1)).map_or(1, |dim| *dim as usize);
        let contract = contract(&config, adapter);
        for (name, shape) in &contract {
            binder.tensor(name, shape)?;
        }
        refuse_others(&file, &contract)?;
        let c = &config;
        let layers = (0..c.layers).map(|layer| tower_layer(&binder, c, layer)).collect::<Result<_, _>>()?;
        let shape = [c.patch, c.patch, 3, c.hidden];
        let patches = binder.shaped_matrix("v.patch_embd", &shape, c.patch_values(), c.hidden)?;
        let positions = binder.table("v.position_embd", c.hidden, c.grid() * c.grid())?;
        let adapters = [
            binder.matrix("mm.0", c.merged(), adapter)?,
            binder.matrix("mm.1", adapter, adapter)?,
            binder.matrix("mm.2", adapter, c.projection)?,
        ];
        let (pre_norm, post_norm) =
            (norm(&binder, "v.pre_ln", c.hidden)?, norm(&binder, "v.post_ln", c.hidden)?);
        let projector =
            Projector { file, config, adapter, patches, positions, pre_norm, layers, post_norm, adapters };
        check_factors(&projector.file, projector.matrices())?;
        Ok(projector)
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

    /// All matrices that products read.
    pub fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        let layers = self.layers.iter().flat_map(|l| {
            [&l.attn_q, &l.attn_k, &l.attn_v, &l.attn_out, &l.ffn_up, &l.ffn_down]
                .map(|linear| &linear.matrix)
        });
        std::iter::once(&self.patches).chain(layers).chain(&self.adapters)
    }
}

fn tower_layer(binder: &Binder<'_>, c: &VisionConfig, layer: usize) -> Result<TowerLayer, ModelError> {
    let name = |part: &str| format!("v.blk.{layer}.{part}");
    let linear = |part: &str, cols, rows| -> Result<Linear, ModelError> {
        let stem = name(part);
        Ok(Linear { matrix: binder.matrix(&stem, cols, rows)?, bias: binder.bias(&stem, rows)? })
    };
    Ok(TowerLayer {
        ln1: norm(binder, &name("ln1"), c.hidden)?,
        attn_q: linear("attn_q", c.hidden, c.hidden)?,
        attn_k: linear("attn_k", c.hidden, c.hidden)?,
        attn_v: linear("attn_v", c.hidden, c.hidden)?,
        attn_out: linear("attn_out", c.hidden, c.hidden)?,
        ln2: norm(binder, &name("ln2"), c.hidden)?,
        ffn_up: linear("ffn_up", c.hidden, c.ffn)?,
        ffn_down: linear("ffn_down", c.ffn, c.hidden)?,
    })
}

fn norm(binder: &Binder<'_>, stem: &str, len: usize) -> Result<LayerNorm, ModelError> {
    Ok(LayerNorm { weight: binder.vector(stem, len)?, bias: binder.bias(stem, len)? })
}

/// A tensor of the tower or the adapter that nothing would be done with changes the result of whoever does something with it: a
/// second temporal slab, a bias of the patches, a layer more. (A matrix may have its factor beside it.)
fn refuse_others(file: &GgufFile, contract: &[(String, Vec<usize>)]) -> Result<(), ModelError> {
    let ours = |name: &str| {
        let owner = owner_of_factor(name);
        let wanted = owner.as_deref().unwrap_or(name);
        contract.iter().any(|(known, _)| known == wanted)
    };
    let theirs =
        |name: &str| ["v.", "mm.", "a."].iter().any(|prefix| name.starts_with(prefix)) && !ours(name);
    let Some(tensor) = file.tensors().iter().find(|tensor| theirs(&tensor.name)) else { return Ok(()) };
    let expected = match tensor.name.as_str() {
        "v.patch_embd.weight.1" => {
            "no second temporal slab: a still image needs the sum of both in v.patch_embd.weight"
        }
        "v.patch_embd.bias" => "no such tensor: the patches of this tower have no bias",
        _ => "no such tensor in this tower",
    };
    Err(wrong(&tensor.name, expected, format!("{:?}", tensor.dims)))
}
