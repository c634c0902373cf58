//! Proof instead of promise: a node reads a prompt that this one reads too, and every byte is compared.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use muser_engine::EngineHandle;
use muser_handoff::{Facts, Fetch, FetchEnd, Nonce, Peers, Place, Series, Sink, Span, Wanted};
use muser_kv::{CacheScope, KvGroup};

use crate::state;

/// Positions of the canary: two whole blocks and an unfinished one.
const POSITIONS: u32 = 600;
/// Longest time for it.
const BUDGET: Duration = Duration::from_mins(2);

/// What a canary showed besides that all is equal.
#[derive(Clone, Copy, Debug)]
pub struct CanaryReport {
    /// Until all of it was here from the node.
    pub there: Duration,
    /// What reading it here took.
    pub here: Duration,
    /// Bytes of rows that came.
    pub bytes: u64,
}

/// What a canary found.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CanaryError {
    /// The node gives other bits: nothing that it computes may be used.
    #[error(
        "other bits than reading here: {group} block {block}, layer {layer}; the node's weights, device or program are at fault, or this one's"
    )]
    Unlike {
        /// `full` or `sliding`.
        group: &'static str,
        /// The block.
        block: u32,
        /// The layer inside its group.
        layer: u16,
    },
    /// The hand-off did not come to its end.
    #[error("the hand-off did not come to its end: {0}")]
    Fetch(FetchEnd),
    /// This engine could not read it.
    #[error("this engine could not read the canary")]
    Here,
}

enum Said {
    Ready(u32),
    Ended(FetchEnd),
}

struct Keeping {
    rows: Mutex<HashMap<Place, Vec<u8>>>,
    say: Mutex<Sender<Said>>,
}

impl Keeping {
    fn say(&self, said: Said) {
        let _ = self.say.lock().unwrap_or_else(PoisonError::into_inner).send(said);
    }
}

impl Sink for Keeping {
    fn begun(&self, _: &[u32]) {}

    fn chunk(&self, place: &Place, rows: &[u8]) -> bool {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner).insert(*place, rows.to_vec());
        true
    }

    fn ready(&self, boundary: u32) {
        self.say(Said::Ready(boundary));
    }

    fn progress(&self, _: u32, _: Option<Duration>) {}

    fn ended(&self, _: Series, end: FetchEnd) {
        self.say(Said::Ended(end));
    }
}

/// Has `node` read 600 fixed ids, reads them here, and compares every byte. Waits for both: a minute or two on slow machines.
///
/// # Errors
/// If anything differs, or either side did not come to its end.
pub fn canary(
    peers: &dyn Peers,
    node: &str,
    facts: &Facts,
    engine: &EngineHandle,
) -> Result<CanaryReport, CanaryError> {
    let vocab = engine.limits().vocab as u32;
    let ids: Arc<[u32]> = (0..POSITIONS).map(|i| (i * 7919 + 17) % vocab.max(1)).collect();
    let began = Instant::now();
    let theirs = fetch(peers, node, facts, &ids)?;
    let there = began.elapsed();
    let began = Instant::now();
    // A prefix of nobody's: neither side of the comparison may come from the other.
    let nonce = Nonce::fresh().ok_or(CanaryError::Here)?;
    let scope = CacheScope::of(&[b"canary", &nonce.0]);
    let wanted = state::Wanted { ids: &ids, scope, most_reused: 0, least_known: 0 };
    let ours = state::blocks(engine, &wanted).ok_or(CanaryError::Here)?;
    let here = began.elapsed();
    let rows = theirs.iter().map(|(place, rows)| (place, &**rows));
    if let Some(place) = state::first_difference(&facts.planes, rows, &ours) {
        let group = if place.group == KvGroup::Full { "full" } else { "sliding" };
        return Err(CanaryError::Unlike { group, block: place.block, layer: place.layer });
    }
    let bytes = theirs.values().map(|rows| rows.len() as u64).sum();
    Ok(CanaryReport { there, here, bytes })
}

fn fetch(
    peers: &dyn Peers,
    node: &str,
    facts: &Facts,
    ids: &Arc<[u32]>,
) -> Result<HashMap<Place, Vec<u8>>, CanaryError> {
    let wanted = Wanted {
        identity: facts.identity,
        draft: [0; 32],
        tenant: [0; 32],
        ids: Arc::clone(ids),
        planes: facts.planes.select(false),
        span: Span { cut: ids.len() as u32, stages: Vec::new(), window: facts.window },
    };
    let series = Nonce::fresh().and_then(|nonce| Series::new(nonce, wanted, |_, _| false).ok());
    let (say, hear): (Sender<Said>, Receiver<Said>) = channel();
    let sink = Arc::new(Keeping { rows: Mutex::default(), say: Mutex::new(say) });
    let fetch = Fetch { series: series.ok_or(CanaryError::Here)?, budget: BUDGET, priority: 200 };
    let fetching = peers.fetch(node, fetch, Arc::clone(&sink) as _);
    loop {
        match hear.recv_timeout(BUDGET) {
            Ok(Said::Ready(boundary)) => fetching.installed(boundary),
            Ok(Said::Ended(FetchEnd::Installed)) => break,
            Ok(Said::Ended(end)) => return Err(CanaryError::Fetch(end)),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                fetching.cancel();
                return Err(CanaryError::Fetch(FetchEnd::Late));
            }
        }
    }
    let rows = std::mem::take(&mut *sink.rows.lock().unwrap_or_else(PoisonError::into_inner));
    Ok(rows)
}
