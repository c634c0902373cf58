//! A narrow door for fuzzers: the registry's text without its file.

use std::path::Path;

use crate::{NodeError, Registry};

/// What `nodes.toml` says if it has this text.
pub fn registry(text: &str) -> Result<Registry, NodeError> {
    Registry::parse(Path::new("nodes.toml"), text)
}

/// The text that is written.
pub fn text(registry: &Registry) -> String {
    registry.text()
}
