//! Image files that a user names.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;

use crate::output::HintExt as _;

/// Reads a file and checks its header, so that a wrong one is named before a model is loaded for it.
pub fn read(path: &Path) -> anyhow::Result<Arc<[u8]>> {
    let bytes = std::fs::read(path).with_context(|| path.display().to_string())?;
    muser_image::probe(&bytes)
        .with_context(|| path.display().to_string())
        .hint("PNG, JPEG, WebP and GIF images can be shown to a model")?;
    Ok(bytes.into())
}
