//! The bytes of one file: a read-only memory map.
//!
//! The only unsafe code of this crate. A map is sound as long as nobody changes the file under it; like every program
//! that maps model files we assume that, and the rest of the crate never relies on bytes staying what they were checked
//! to be for memory safety: all accesses are bounds-checked slices, strings are checked as UTF-8 when handed out.
#![allow(unsafe_code)] // mapping a file is unsafe by nature

use std::fs::File;
use std::path::Path;

#[cfg(target_os = "linux")]
use memmap2::{Advice, UncheckedAdvice};
use memmap2::{Mmap, MmapMut};

use crate::GgufError;

/// Maps a whole regular file; the file itself tells later whether it has changed, whatever its name is by then.
pub(crate) fn map_file(path: &Path) -> Result<(Mmap, File), GgufError> {
    let io = |source| GgufError::Io { path: path.display().to_string(), source };
    let invalid = |what: &str| GgufError::Invalid { path: path.display().to_string(), what: what.to_owned() };
    // Asked before opening, which would wait for a writer if this is a pipe.
    let metadata = std::fs::metadata(path).map_err(io)?;
    if metadata.is_dir() {
        return Err(invalid("expected a GGUF file, found a directory"));
    }
    if !metadata.is_file() {
        return Err(invalid("expected a regular file, which can be mapped"));
    }
    if metadata.len() == 0 {
        return Err(invalid("the file is empty"));
    }
    let file = File::open(path).map_err(io)?;
    // SAFETY: the map is read-only and private to `GgufFile`; the assumption about the file is in the module's text.
    let map = unsafe { Mmap::map(&file) }.map_err(io)?;
    Ok((map, file))
}

/// A page-aligned copy of `bytes`, so that files in memory look like mapped ones to the kernels.
pub(crate) fn map_copy(bytes: &[u8]) -> Result<Mmap, GgufError> {
    let io = |source| GgufError::Io { path: IN_MEMORY.to_owned(), source };
    if bytes.is_empty() {
        return Err(GgufError::Invalid { path: IN_MEMORY.to_owned(), what: "the file is empty".to_owned() });
    }
    let mut map = MmapMut::map_anon(bytes.len()).map_err(io)?;
    map.copy_from_slice(bytes);
    map.make_read_only().map_err(io)
}

/// How far ahead of the pages that are brought in the disk is asked for more.
#[cfg(target_os = "linux")]
const AHEAD: usize = 64 << 20;

/// Brings pages of a map into the process now, in one call instead of a fault for every few of them. Only advice: nothing is
/// different for the reader if the system refuses.
#[cfg(target_os = "linux")]
pub(crate) fn bring(map: &Mmap, offset: usize, len: usize) {
    let _ = map.advise_range(Advice::PopulateRead, offset, len);
    // Reading from the disk goes on while the caller works on these.
    let ahead = (offset + AHEAD).min(map.len());
    let _ = map.advise_range(Advice::WillNeed, ahead, len.min(map.len() - ahead));
}

/// Gives pages of a mapped file back: they leave the process, so that only the system's cache has them, which may let
/// them go when memory is short. A later access brings them again.
///
/// `map` must be that of a file: pages of memory that is not a file's would lose what is in them.
#[cfg(target_os = "linux")]
pub(crate) fn give_back(map: &Mmap, offset: usize, len: usize) {
    // SAFETY: the pages are those of a file that nobody writes through this map; they come back as they were.
    let _ = unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, offset, len) };
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn bring(_map: &Mmap, _offset: usize, _len: usize) {}

#[cfg(not(target_os = "linux"))]
pub(crate) fn give_back(_map: &Mmap, _offset: usize, _len: usize) {}

/// What error messages call a file without a path.
pub(crate) const IN_MEMORY: &str = "(in memory)";
