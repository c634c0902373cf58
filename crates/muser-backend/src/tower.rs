//! A vision tower beside a model: pictures in, rows for [`crate::RowInput::Embedding`] out.
//!
//! Rows are a pure function of the picture's bytes, the projector, the position rule and the tower's route; which other
//! pictures there are, and how the work was cut into slices, never shows.

use std::sync::Arc;

use muser_model::{Geometry, Projector};

use crate::ExecError;
use crate::arith::vision::{PatchGrid, PositionRule};

/// A picture as a tower takes it: resampled to whole tokens.
#[derive(Clone, PartialEq, Eq)]
pub struct TowerImage {
    /// Rows of tokens.
    pub rows: usize,
    /// Columns of tokens.
    pub cols: usize,
    /// RGB bytes in the order [row, column, colour].
    pub rgb: Arc<[u8]>,
}

impl std::fmt::Debug for TowerImage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TowerImage({}x{} tokens)", self.rows, self.cols)
    }
}

impl TowerImage {
    /// Rows that come out.
    pub fn tokens(&self) -> usize {
        self.rows * self.cols
    }

    /// Has it as many bytes as its tokens need?
    pub fn validate(&self, projector: &Projector) -> Result<PatchGrid, ExecError> {
        let c = &projector.config;
        let expected = self.tokens() * c.unit() * c.unit() * 3;
        if self.tokens() == 0 || self.rgb.len() != expected {
            let (rows, cols, found) = (self.rows, self.cols, self.rgb.len());
            let what = format!("an image of {rows}x{cols} tokens with {found} bytes, expected {expected}");
            return Err(ExecError::InvalidBatch(what));
        }
        Ok(PatchGrid { rows: self.rows * c.merge, cols: self.cols * c.merge })
    }
}

/// What a picture goes through, one after the other; what is cut into slices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TowerStage {
    /// Patches, positions, the first norm.
    Embed,
    /// Of a layer: norm, q, k, v and rotation, which every patch must have been through before any can go on.
    Keys(usize),
    /// Of a layer: attention and everything after it.
    Mix(usize),
    /// Tokens: the last norm, pixel shuffle, adapter.
    Adapt,
}

impl TowerStage {
    /// The stage after this one in a tower of so many layers.
    pub fn next(self, layers: usize) -> Option<Self> {
        match self {
            Self::Embed => Some(Self::Keys(0)),
            Self::Keys(layer) => Some(Self::Mix(layer)),
            Self::Mix(layer) if layer + 1 < layers => Some(Self::Keys(layer + 1)),
            Self::Mix(_) => Some(Self::Adapt),
            Self::Adapt => None,
        }
    }
}

/// What an attached tower is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TowerInfo {
    /// Arithmetic, position rule and projector: equal routes and equal bytes give equal rows.
    pub route: String,
    /// Pixels of a token's side.
    pub unit: u32,
    /// Values of a row.
    pub width: usize,
}

impl TowerInfo {
    /// Of a projector under some arithmetic.
    pub fn new(arithmetic: &str, projector: &Projector, rule: PositionRule) -> Self {
        let route = format!("{arithmetic}/{}/{}", rule.name(), projector_mark(projector));
        Self { route, unit: projector.config.unit() as u32, width: projector.config.projection }
    }
}

/// What every executor asks of a projector before it takes it in.
pub fn check_projector(
    projector: &Projector,
    target: &Geometry,
    backend: &'static str,
) -> Result<(), ExecError> {
    projector.check_target(target).map_err(|misfit| {
        let what = format!("the projector does not fit the model: {misfit}");
        ExecError::Unsupported { backend, what }
    })
}

/// A name of a projector that covers all of it: rows of one must never be taken for those of another.
pub fn projector_mark(projector: &Projector) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update(format!("{:?}", projector.config).as_bytes());
    for tensor in projector.file.tensors() {
        hasher.update(format!("{} {:?} {:?}", tensor.name, tensor.ty, tensor.dims).as_bytes());
        hasher.update(projector.file.tensor_data(tensor));
    }
    hasher.finalize().to_hex()[..32].to_owned()
}

/// What a picture's rows depend on, as 32 bytes: the tower (its route names arithmetic, position rule and projector), the
/// preprocessing, the cap on tokens, and the decoded picture with its sides (width, height).
pub fn picture_digest(route: &str, preprocessing: &str, cap: u32, sides: (u32, u32), rgb: &[u8]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key("muser picture v1");
    for text in [route, preprocessing] {
        hasher.update(&(text.len() as u64).to_le_bytes()).update(text.as_bytes());
    }
    for figure in [cap, sides.0, sides.1] {
        hasher.update(&figure.to_le_bytes());
    }
    hasher.update(rgb);
    *hasher.finalize().as_bytes()
}

/// A call about pictures without a projector.
pub fn no_tower() -> ExecError {
    ExecError::InvalidBatch("no projector is attached".into())
}

/// A call to go on with a picture while none is in work.
pub fn no_image() -> ExecError {
    ExecError::InvalidBatch("no image is in work".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_covers_everything_that_rows_depend_on() {
        let base = picture_digest("route", "pre", 4096, (2, 3), &[0; 18]);
        let mut pixel = [0; 18];
        pixel[17] = 1;
        let others = [
            picture_digest("route2", "pre", 4096, (2, 3), &[0; 18]),
            picture_digest("route", "pre2", 4096, (2, 3), &[0; 18]),
            picture_digest("routep", "re", 4096, (2, 3), &[0; 18]),
            picture_digest("route", "pre", 256, (2, 3), &[0; 18]),
            picture_digest("route", "pre", 4096, (3, 2), &[0; 18]),
            picture_digest("route", "pre", 4096, (2, 3), &pixel),
        ];
        for (i, other) in others.iter().enumerate() {
            assert_ne!(*other, base, "{i}");
            assert!(others[..i].iter().all(|before| before != other), "{i}");
        }
    }
}
