//! The driver's compiled pipelines, kept on disk: where the driver has a cache (Vulkan), a warm start compiles nothing.
//!
//! The driver checks the header of what it is given and drops what is not its own. Whatever was damaged besides has another hash
//! and is not given to it.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::{fs, io};

/// Environment variable with the folder of compiled pipelines (an absolute path); an empty value turns the cache off.
const CACHE_DIR_VAR: &str = "MUSER_WGPU_CACHE_DIR";

const HASH_BYTES: usize = 32;

pub(super) struct Cache {
    raw: wgpu::PipelineCache,
    path: PathBuf,
    /// Of what is on disk.
    kept: Mutex<usize>,
}

impl Cache {
    /// The cache of this adapter and driver, if it can have one.
    pub(super) fn open(adapter: &wgpu::Adapter, device: &wgpu::Device) -> Option<Self> {
        let name = wgpu::util::pipeline_cache_key(&adapter.get_info())?;
        if !device.features().contains(wgpu::Features::PIPELINE_CACHE) {
            return None;
        }
        let path = folder()?.join(name);
        let trusted = is_private(&path) && path.parent().is_some_and(is_private);
        let read = trusted.then(|| fs::read(&path).ok()).flatten();
        let data = read.and_then(|bytes| checked(&bytes).map(<[u8]>::to_vec));
        let descriptor = wgpu::PipelineCacheDescriptor { label: None, data: data.as_deref(), fallback: true };
        // SAFETY: the bytes are what `get_data` gave for an adapter of this key, as their hash says.
        let raw = unsafe { device.create_pipeline_cache(&descriptor) };
        Some(Self { raw, path, kept: Mutex::new(data.map_or(0, |data| data.len())) })
    }

    pub(super) fn raw(&self) -> &wgpu::PipelineCache {
        &self.raw
    }

    /// Writes what there is to disk, if it has grown. A cache that cannot be written costs time at the next start and nothing else.
    pub(super) fn keep(&self) {
        let Some(data) = self.raw.get_data() else { return };
        let mut kept = self.kept.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if data.len() <= *kept {
            return;
        }
        let partial = self.path.with_extension(format!("{}.part", std::process::id()));
        let mut bytes = blake3::hash(&data).as_bytes().to_vec();
        bytes.extend_from_slice(&data);
        let written = self
            .path
            .parent()
            .map_or(Ok(()), private_folder)
            .and_then(|()| fs::write(&partial, &bytes))
            .and_then(|()| fs::rename(&partial, &self.path));
        match written {
            Ok(()) => *kept = data.len(),
            Err(error) => tracing::debug!(%error, path = %self.path.display(), "pipelines are not kept"),
        }
    }
}

/// What follows the hash, if it is what was written.
fn checked(bytes: &[u8]) -> Option<&[u8]> {
    let (hash, data) = bytes.split_at_checked(HASH_BYTES)?;
    (blake3::hash(data).as_bytes() == hash).then_some(data)
}

fn folder() -> Option<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).map(PathBuf::from);
    // Relative paths would be below whatever folder the program is started in.
    let absolute = |path: PathBuf| path.is_absolute().then_some(path);
    if let Some(folder) = variable(CACHE_DIR_VAR) {
        return absolute(folder);
    }
    let base = variable("XDG_CACHE_HOME")
        .and_then(absolute)
        .or_else(|| variable("HOME").and_then(absolute).map(|home| home.join(".cache")))?;
    Some(base.join("muser").join("wgpu"))
}

/// Makes the folder for its owner alone. Whoever can write there supplies code to the driver, so one that others can write is
/// not used.
fn private_folder(folder: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.recursive(true).create(folder)?;
    if is_private(folder) { Ok(()) } else { Err(io::ErrorKind::PermissionDenied.into()) }
}

#[cfg(unix)]
fn is_private(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt as _;
    path.symlink_metadata().is_ok_and(|facts| facts.permissions().mode() & 0o022 == 0)
}

#[cfg(not(unix))]
fn is_private(_: &Path) -> bool {
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_written_is_read_again() {
        let data = b"pipelines of some driver";
        let mut bytes = blake3::hash(data).as_bytes().to_vec();
        bytes.extend_from_slice(data);
        assert_eq!(checked(&bytes), Some(&data[..]));
        for at in [0, 31, 32, bytes.len() - 1] {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            assert_eq!(checked(&damaged), None, "byte {at}");
        }
        assert_eq!(checked(&bytes[..bytes.len() - 1]), None, "cut off");
        assert_eq!(checked(&bytes[..20]), None);
        assert_eq!(checked(&[]), None);
    }
}
