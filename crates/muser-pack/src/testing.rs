//! What the tests of this crate share: a small identity, blocks with known bytes, a library to try things on.

use std::sync::Arc;

use muser_kv::{BLOCK_LEN, KvGroup, PositionKey};

use crate::store::{MemoryStore, PackStore};
use crate::{Identity, KeyRing, Library, LibraryOptions, PackError, Plan, Published, Scope};

pub(crate) fn identity() -> Identity {
    Identity::example()
}

/// Pages as chunks, so that small blocks have several.
pub(crate) fn options() -> LibraryOptions {
    LibraryOptions { chunk_bytes: 4096, ..LibraryOptions::default() }
}

pub(crate) fn library(store: &MemoryStore, keys: &KeyRing) -> Library {
    open(Arc::new(store.clone()), keys)
}

pub(crate) fn open(store: Arc<dyn PackStore>, keys: &KeyRing) -> Library {
    Library::open(store, keys.clone(), options()).expect("an honest store opens")
}

/// Tokens that depend on `seed` from position `from` on.
pub(crate) fn prompt(len: usize, from: usize, seed: u64) -> Vec<PositionKey> {
    let token = |i: usize| {
        let seed = if i < from { 0 } else { seed };
        // Spread, so that tokens look like tokens of a large vocabulary.
        (mix(i as u64 ^ seed << 32) % 200_000) as u32
    };
    (0..len).map(|i| PositionKey::token(token(i))).collect()
}

/// The bytes that a deterministic model would have computed for a block: they depend on everything before its end.
pub(crate) fn rows(scope: &Scope, units: &[PositionKey], group: KvGroup, index: usize) -> Vec<u8> {
    let end = ((index + 1) * BLOCK_LEN).min(units.len());
    let mut hasher = blake3::Hasher::new();
    for unit in &units[..end] {
        hasher.update(&unit.to_le_bytes());
    }
    hasher.update(if group == KvGroup::Full { b"full" } else { b"sliding" });
    let mut bytes = vec![0; scope.block_bytes(group)];
    hasher.finalize_xof().fill(&mut bytes);
    bytes
}

/// Publishes a prefix with all its blocks.
pub(crate) fn publish(
    library: &Library,
    scope: &Scope,
    units: &[PositionKey],
) -> Result<Published, PackError> {
    publish_with(library, scope, units, false, |_| true)
}

/// Publishes a prefix with those sliding blocks that `keep` names.
pub(crate) fn publish_with(
    library: &Library,
    scope: &Scope,
    units: &[PositionKey],
    pinned: bool,
    keep: impl Fn(usize) -> bool,
) -> Result<Published, PackError> {
    let mut publication = library.begin_publish(scope, units)?;
    for wanted in publication.wanted() {
        if wanted.group == KvGroup::Full || keep(wanted.index) {
            publication.put(wanted.group, wanted.index, &rows(scope, units, wanted.group, wanted.index))?;
        }
    }
    publication.commit(pinned)
}

/// Fetches all of a plan and compares it with what was computed.
pub(crate) fn restore(
    library: &Library,
    scope: &Scope,
    units: &[PositionKey],
    plan: &Plan,
) -> Result<(), PackError> {
    for segment in &plan.segments {
        let mut bytes = vec![0xaa; segment.bytes];
        library.fetch(scope, segment, &mut bytes)?;
        if segment.positions == BLOCK_LEN {
            assert!(bytes == rows(scope, units, segment.group, segment.index), "wrong rows in {segment:?}");
        }
    }
    Ok(())
}

pub(crate) fn mix(value: u64) -> u64 {
    let value = (value ^ value >> 33).wrapping_mul(0xff51_afd7_ed55_8ccd);
    let value = (value ^ value >> 33).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    value ^ value >> 33
}
