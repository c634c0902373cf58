//! Which weights a file holds: the official files are known by size and SHA-256, everything else is unknown weights, which
//! is no fault.

use muser_gguf::GgufFile;
use muser_hub::{CATALOG, HubError, KnownFile, Sha256, by_content};

/// SHA-256 of every file of a set.
pub type Hashes = Vec<Sha256>;

/// Says what a file is. Without hashes only its size speaks.
pub fn identify(file: &GgufFile, hashes: Option<&[Sha256]>) -> String {
    let size = file.shard_bytes(0).len() as u64;
    let same_size: Vec<&KnownFile> = CATALOG.iter().filter(|known| known.size == size).collect();
    let known = match (file.shard_count(), hashes) {
        (1, Some([hash])) => by_content(size, hash),
        _ => None,
    };
    match (known, same_size.first(), hashes) {
        (Some(known), ..) => format!("{} (verified)", known.about),
        (None, Some(other), Some(_)) => {
            format!("unknown weights: as long as {}, but another content", other.about)
        }
        (None, Some(other), None) => format!("as long as {}; --verify compares the content", other.about),
        (None, None, _) => "unknown weights".into(),
    }
}

/// Hashes every file of a set; `seen` hears how many bytes are done.
pub fn hash(file: &GgufFile, on_disk: bool, seen: &mut dyn FnMut(u64)) -> Result<Hashes, HubError> {
    let mut before = 0;
    let mut hashes = Vec::with_capacity(file.shard_count());
    for shard in 0..file.shard_count() {
        hashes.push(if on_disk {
            // Reading is faster than walking a cold map, and leaves the pages of the weights alone.
            Sha256::of_file(file.shard_path(shard), &mut |done| seen(before + done))?
        } else {
            Sha256::of_bytes(file.shard_bytes(shard))
        });
        before += file.shard_bytes(shard).len() as u64;
        seen(before);
    }
    Ok(hashes)
}
