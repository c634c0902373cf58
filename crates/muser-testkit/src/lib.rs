//! What tests share. A dev-dependency only: no crate of the product may name it, and it knows none of them, so that unit tests
//! and integration tests can both use it.
//!
//! - A test that lacks something ([`Need`]) says so with [`skip`] and returns. `cargo xtask test` prints all of these at its end,
//!   and where `MUSER_TEST_REQUIRE` names the need the test fails instead.
//! - [`is_long`] is what `MUSER_TEST_LONG` means.
//! - [`CountingAllocator`] counts allocations, [`resident_bytes`] memory.
//! - `model`, a feature, tries every order of what threads do.
//! - [`Rng`] are numbers from a seed, so that a run can be repeated; [`models`] the files of the tree.

mod alloc;
mod memory;
#[cfg(feature = "model")]
pub mod model;
mod need;
mod rng;

use std::path::PathBuf;

pub use alloc::{CountingAllocator, allocations, allocations_in_all, bytes_allocated, most_held, uncounted};
pub use memory::{peak_resident_bytes, reset_peak, resident_bytes};
pub use need::{Need, skip};
pub use rng::Rng;

/// Are the long forms of tests wanted? `MUSER_TEST_LONG` is set, and neither empty nor `0`.
pub fn is_long() -> bool {
    std::env::var_os("MUSER_TEST_LONG").is_some_and(|value| means_yes(&value.to_string_lossy()))
}

fn means_yes(value: &str) -> bool {
    !matches!(value.trim(), "" | "0")
}

/// `long` where the long forms of tests are wanted, else `short`.
pub fn long_or<T>(long: T, short: T) -> T {
    if is_long() { long } else { short }
}

/// The folder of models that are part of the tree.
pub fn models() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../models")
}

/// The bundled model.
pub fn muse_tiny() -> PathBuf {
    models().join("muse-tiny-Q4_K_M.gguf")
}

/// The draft that belongs to it.
pub fn muse_tiny_draft() -> PathBuf {
    unpacked("muse-tiny-dflash-Q8_0.gguf", 5_998_048)
}

/// The projector that belongs to it.
pub fn muse_tiny_projector() -> PathBuf {
    unpacked("mmproj-muse-tiny-Q8_0.gguf", 5_608_192)
}

/// A compressed file of the tree as it was, below `target/`, where the first test that asks for it puts it.
fn unpacked(name: &str, len: u64) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../target/test-cache");
    let path = folder.join(name);
    if path.metadata().is_ok_and(|found| found.len() == len) {
        return path;
    }
    let packed = std::fs::File::open(models().join(format!("{name}.zst"))).expect("a file of the tree");
    let mut decoder = ruzstd::decoding::StreamingDecoder::new(packed).expect("zstd");
    // Tests run beside each other in processes of their own: each writes its own copy, and the last rename stands.
    std::fs::create_dir_all(&folder).expect("a folder");
    let own = folder.join(format!("{name}.{}", std::process::id()));
    let mut file = std::fs::File::create(&own).expect("a file");
    assert_eq!(std::io::copy(&mut decoder, &mut file).expect("is whole"), len, "{name}");
    std::fs::rename(&own, &path).expect("a name");
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_are_there() {
        for path in [muse_tiny(), muse_tiny_draft(), muse_tiny_projector()] {
            assert!(path.is_file(), "{}", path.display());
        }
    }

    #[test]
    fn what_long_means() {
        assert!(means_yes("1") && means_yes("yes"));
        assert!(!means_yes("0") && !means_yes("") && !means_yes(" 0 "));
    }
}
