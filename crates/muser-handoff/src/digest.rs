//! Keyed digests of chunks, and what binds them together.
//!
//! The key is that of a *series*: all requests for one prefix that a consumer makes until it has it, of whichever nodes. So
//! digests of what one node gave can be compared with the root of the next one, and a chunk recorded in another series
//! matches nothing.

use crate::encode::Writer;
use crate::ids::{Digest, Nonce};
use crate::plan::Place;
use crate::planes::encode_group;

/// The digest of a prefix's ids.
pub fn prefix_digest(ids: &[u32]) -> Digest {
    let mut hasher = blake3::Hasher::new_derive_key("muser hand-off v1 prefix");
    hasher.update(&(ids.len() as u64).to_le_bytes());
    let mut bytes = Vec::with_capacity(4096);
    for some in ids.chunks(1024) {
        bytes.clear();
        some.iter().for_each(|id| bytes.extend_from_slice(&id.to_le_bytes()));
        hasher.update(&bytes);
    }
    *hasher.finalize().as_bytes()
}

/// The key of a series.
#[derive(Clone)]
pub struct SeriesKey {
    chunk: [u8; 32],
    root: [u8; 32],
    seal: [u8; 32],
}

impl SeriesKey {
    /// The key for digests of what an identity computes of a prefix.
    pub fn new(series: Nonce, identity: &Digest, prefix: &Digest) -> Self {
        let key = |context: &str| {
            let mut hasher = blake3::Hasher::new_derive_key(context);
            hasher.update(&series.0).update(identity).update(prefix);
            *hasher.finalize().as_bytes()
        };
        Self {
            chunk: key("muser hand-off v1 chunk"),
            root: key("muser hand-off v1 root"),
            seal: key("muser hand-off v1 seal"),
        }
    }

    /// The digest of a chunk: its place and its rows.
    pub fn chunk(&self, place: &Place, payload: &[u8]) -> Digest {
        let mut head = Writer::default();
        encode_place(&mut head, place);
        let mut hasher = blake3::Hasher::new_keyed(&self.chunk);
        hasher.update(&head.into_bytes()).update(payload);
        *hasher.finalize().as_bytes()
    }

    /// The root over digests of chunks in canonical order.
    pub fn root<'a>(&self, digests: impl Iterator<Item = &'a Digest>) -> Digest {
        let mut hasher = blake3::Hasher::new_keyed(&self.root);
        let mut count = 0_u64;
        for digest in digests {
            hasher.update(digest);
            count += 1;
        }
        hasher.update(&count.to_le_bytes());
        *hasher.finalize().as_bytes()
    }

    /// What binds a BEGIN (its bytes) and the root.
    pub fn seal(&self, begin: &[u8], root: &Digest, chunks: u32, bytes: u64) -> Digest {
        let mut hasher = blake3::Hasher::new_keyed(&self.seal);
        hasher.update(&(begin.len() as u64).to_le_bytes()).update(begin).update(root);
        hasher.update(&chunks.to_le_bytes()).update(&bytes.to_le_bytes());
        *hasher.finalize().as_bytes()
    }
}

impl std::fmt::Debug for SeriesKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SeriesKey(..)")
    }
}

/// 12 bytes: group, component, layer, block, first row, rows.
pub(crate) fn encode_place(writer: &mut Writer, place: &Place) {
    encode_group(writer, place.group);
    writer.u8(place.component as u8);
    writer.u16(place.layer);
    writer.u32(place.block);
    writer.u16(place.first_row);
    writer.u16(place.rows);
}
