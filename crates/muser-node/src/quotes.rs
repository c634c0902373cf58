//! Questions to several nodes at once, how soon they would have read a prompt.

use std::sync::Arc;
use std::time::{Duration, Instant};

use muser_engine::PrefixQuery;
use muser_handoff::{Digest, PeerState, Quoted};
use muser_kv::BLOCK_LEN;

use crate::choose::Offer;

/// What is taken for a link's rate before anything came over it: a gigabit.
const RATE: f64 = 118e6;
/// What is taken for a round trip before one was measured.
const ROUND_TRIP: Duration = Duration::from_millis(2);
/// Rows of a step whose bytes are final only at its end.
const LAST_ROWS: f64 = 2048.0;

/// A prompt that nodes have been asked about.
pub(crate) struct Question {
    pub(crate) query: PrefixQuery,
    pub(crate) ids: Arc<[u32]>,
    pub(crate) began: Instant,
    /// Nothing is waited for after this.
    pub(crate) until: Instant,
    /// Nodes that have not answered.
    pub(crate) waiting: Vec<Arc<str>>,
    pub(crate) answers: Vec<(Arc<str>, Quoted)>,
}

/// Chain hashes of the whole blocks of a tenant's prompt, keyed by what computes it, so that they tell nothing to whoever does not
/// have the same prompt.
pub(crate) fn block_hashes(identity: &Digest, tenant: &Digest, ids: &[u32]) -> Vec<Digest> {
    let mut hashes: Vec<Digest> = Vec::with_capacity(ids.len() / BLOCK_LEN);
    for block in ids.chunks_exact(BLOCK_LEN) {
        let mut hasher = blake3::Hasher::new_keyed(identity);
        hasher.update(hashes.last().unwrap_or(tenant));
        block.iter().for_each(|id| {
            hasher.update(&id.to_le_bytes());
        });
        hashes.push(*hasher.finalize().as_bytes());
    }
    hashes
}

/// What a prompt comes to on the wire.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bytes {
    /// Of a position of the full group, and of one of the sliding group.
    pub(crate) full_row: usize,
    pub(crate) sliding_row: usize,
    pub(crate) window: usize,
}

impl Bytes {
    /// Of the rows from `held` to `cut`, and of the window at the end.
    fn of(&self, held: usize, cut: usize) -> f64 {
        let window = self.window.min(cut);
        ((cut - held) * self.full_row + window * self.sliding_row) as f64
    }

    /// Of these, those that the last step makes final.
    fn last(&self, held: usize, cut: usize) -> f64 {
        let rows = (cut - held).min(LAST_ROWS as usize);
        (rows * self.full_row + rows.min(self.window) * self.sliding_row) as f64
    }
}

/// What a node's answer comes to.
pub(crate) fn offer(
    quoted: &Quoted,
    peer: Option<&PeerState>,
    bytes: Bytes,
    held: usize,
    cut: usize,
) -> Offer {
    let rate = peer.and_then(|peer| peer.link_rate).filter(|&rate| rate > 0.0).unwrap_or(RATE);
    let time = |bytes: f64| Duration::try_from_secs_f64(bytes / rate).unwrap_or(Duration::MAX / 4);
    let known = (quoted.known as usize).clamp(held, cut);
    let last = if known == cut { 0.0 } else { bytes.last(known.min(cut), cut) };
    Offer {
        wait: Duration::from_millis(u64::from(quoted.wait_ms)),
        compute: Duration::from_millis(u64::from(quoted.compute_ms)),
        transfer: time(bytes.of(held, cut)),
        last: time(last),
        round_trip: peer.and_then(|peer| peer.round_trip).unwrap_or(ROUND_TRIP),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_of_whole_blocks_in_their_chain_and_of_the_model() {
        let ids: Vec<u32> = (0..700).collect();
        let hashes = block_hashes(&[1; 32], &[0; 32], &ids);
        assert_eq!(hashes.len(), 2);
        assert_eq!(block_hashes(&[1; 32], &[0; 32], &ids[..513]), hashes);
        assert_ne!(block_hashes(&[2; 32], &[0; 32], &ids), hashes);
        assert!(
            block_hashes(&[1; 32], &[3; 32], &ids).iter().all(|hash| !hashes.contains(hash)),
            "another tenant's"
        );
        let mut other = ids.clone();
        other[3] += 1;
        let changed = block_hashes(&[1; 32], &[0; 32], &other);
        assert!(changed[0] != hashes[0] && changed[1] != hashes[1], "what follows differs too");
        other[3] -= 1;
        other[300] += 1;
        assert_eq!(block_hashes(&[1; 32], &[0; 32], &other)[0], hashes[0]);
    }

    #[test]
    fn bytes_of_the_30b_model() {
        // 13 full layers and 39 sliding ones of 1,040 bytes a position.
        let bytes = Bytes { full_row: 13 * 1040, sliding_row: 39 * 1040, window: 2048 };
        let whole = Quoted { question: 1, known: 0, wait_ms: 70, compute_ms: 1000, refused: None };
        let cold = offer(&whole, None, bytes, 0, 32_768);
        assert_eq!((cold.wait.as_millis(), cold.compute.as_millis()), (70, 1000));
        assert_eq!(cold.transfer.as_millis(), ((32_768 * 13 + 2048 * 39) * 1040 / 118_000) as u128);
        // The last step's rows of all layers hide behind nothing.
        assert_eq!(cold.last.as_millis(), 2048 * 52 * 1040 / 118_000);
        let known = Quoted { known: 32_768, ..whole };
        assert_eq!(offer(&known, None, bytes, 0, 32_768).last, Duration::ZERO);
        let half = offer(&whole, None, bytes, 16_384, 32_768);
        assert!(half.transfer.as_secs_f64() < 0.6 * cold.transfer.as_secs_f64());
    }
}
