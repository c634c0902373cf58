//! Programs that checks ask where they are installed.

use std::path::{Path, PathBuf};

/// A program of `PATH`, or of the environment that `.ci/run` makes.
pub(crate) fn find(root: &Path, name: &str) -> Option<PathBuf> {
    let name = format!("{name}{}", std::env::consts::EXE_SUFFIX);
    let path = std::env::var_os("PATH").unwrap_or_default();
    // Absolute: the program may be started in another folder.
    let own = root.canonicalize().ok()?.join(".venv/bin");
    std::env::split_paths(&path).chain([own]).map(|folder| folder.join(&name)).find(|file| file.is_file())
}
