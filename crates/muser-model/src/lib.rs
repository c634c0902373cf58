//! Muse Glimmer as data: geometry parsed fail-closed from GGUF metadata, the tensor contract, bound weights.
//!
//! Nothing here computes with weights. A figure that does not fit names its key, what was expected and what was found.

pub mod cost;
mod dflash;
mod error;
mod geometry;
pub mod remarks;
pub mod synth;
mod vision;
mod weights;

pub use dflash::{DFLASH_ARCHITECTURE, DflashConfig, Draft, DraftLayer};
pub use error::ModelError;
pub use geometry::{ARCHITECTURE, Geometry};
pub use vision::{LayerNorm, Linear, Projector, TowerLayer, VISION_ARCHITECTURE, VisionConfig};
pub use weights::{LayerWeights, Matrix, Model};
