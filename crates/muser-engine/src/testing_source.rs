//! A prefix source without threads: the test says when it answers, what it delivers and what goes wrong.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard},
};

use muser_kv::{BLOCK_LEN, KvGroup, PositionKey};

use crate::{
    BlockReceiver, KvConnector, PrefixExport, PrefixQuery, RestoreFailure, StoredPrefix, testing::Rng,
};

type Key = ([u8; 32], KvGroup);

/// What survives an engine.
#[derive(Default)]
pub(crate) struct State {
    /// In order, so that a schedule is the same in every run.
    pub(crate) blocks: BTreeMap<Key, Vec<u8>>,
    pub(crate) queries: Vec<PrefixQuery>,
    pub(crate) fetches: Vec<Fetch>,
    pub(crate) offers: Vec<PrefixExport>,
    /// Blocks delivered.
    pub(crate) delivered: usize,
    /// Where fetches are to end on the way.
    pub(crate) stages: Vec<usize>,
    /// What it says that it could bring alone.
    pub(crate) alone: usize,
    /// It brings what a peer computes.
    pub(crate) hands: bool,
}

/// A fetch that waits to be served.
pub(crate) struct Fetch {
    pub(crate) units: Arc<[PositionKey]>,
    pub(crate) wanted: Vec<(KvGroup, usize)>,
    pub(crate) delivery: BlockReceiver,
}

/// Handle of the state; the engine gets a clone.
#[derive(Clone, Default)]
pub(crate) struct ScriptedSource(Arc<Mutex<State>>);

struct Prefix {
    state: ScriptedSource,
    units: Arc<[PositionKey]>,
}

/// Content of block `index`: everything up to its end.
pub(crate) fn key(units: &[PositionKey], group: KvGroup, index: usize) -> Option<Key> {
    let mut hasher = blake3::Hasher::new();
    for unit in units.get(..(index + 1) * BLOCK_LEN)? {
        hasher.update(&unit.to_le_bytes());
    }
    Some((*hasher.finalize().as_bytes(), group))
}

impl KvConnector for ScriptedSource {
    fn look_up(&mut self, query: PrefixQuery) {
        self.lock().queries.push(query);
    }

    fn offer(&mut self, offer: PrefixExport) {
        self.lock().offers.push(offer);
    }
}

impl StoredPrefix for Prefix {
    fn has(&self, group: KvGroup, index: usize) -> bool {
        key(&self.units, group, index).is_some_and(|key| self.state.lock().blocks.contains_key(&key))
    }

    fn stop_after(&self, known: usize) -> Option<usize> {
        self.state.lock().stages.iter().copied().find(|&stage| stage > known)
    }

    fn alone(&self) -> usize {
        self.state.lock().alone
    }

    fn fetch(&self, wanted: Vec<(KvGroup, usize)>, delivery: BlockReceiver) {
        if self.state.lock().hands {
            delivery.note_handed();
        }
        let units = Arc::clone(&self.units);
        self.state.lock().fetches.push(Fetch { units, wanted, delivery });
    }
}

impl ScriptedSource {
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Answers every question.
    pub(crate) fn answer_all(&self) {
        let queries = std::mem::take(&mut self.lock().queries);
        queries.into_iter().for_each(|query| self.answer(query));
    }

    pub(crate) fn answer(&self, query: PrefixQuery) {
        let units = Arc::clone(query.units());
        query.answer(Some(Arc::new(Prefix { state: self.clone(), units })));
    }

    /// Delivers the next block of a fetch; `false` when it is complete or a block is not there any more.
    pub(crate) fn deliver_one(&self, fetch: &mut Fetch) -> bool {
        let Some((group, index)) = fetch.wanted.pop() else { return false };
        let bytes = key(&fetch.units, group, index).and_then(|key| self.lock().blocks.get(&key).cloned());
        let Some(bytes) = bytes else {
            fetch.delivery.fail(RestoreFailure::Missing, Some((group, index)));
            return false;
        };
        self.lock().delivered += 1;
        match fetch.delivery.place(group, index) {
            Some(place) => {
                // In two pieces, as a file would come.
                let half = bytes.len() / 2;
                let whole = place.write(0..half, &mut |out| out.copy_from_slice(&bytes[..half]))
                    && place.write(half..bytes.len(), &mut |out| out.copy_from_slice(&bytes[half..]));
                if whole {
                    fetch.delivery.filled(place);
                }
            }
            None => fetch.delivery.give(group, index, Box::new(bytes)),
        }
        true
    }

    /// Delivers everything that is wanted.
    pub(crate) fn deliver_all(&self) {
        let fetches = std::mem::take(&mut self.lock().fetches);
        for mut fetch in fetches {
            while self.deliver_one(&mut fetch) {}
        }
    }

    /// Asks for everything that is offered; it arrives with the engine's next turns.
    pub(crate) fn take_all(&self) {
        let offers = std::mem::take(&mut self.lock().offers);
        for offer in offers {
            for index in 0..offer.blocks() {
                self.take(&offer, KvGroup::Full, index);
                self.take(&offer, KvGroup::Sliding, index);
            }
        }
    }

    fn take(&self, offer: &PrefixExport, group: KvGroup, index: usize) {
        let Some(key) = key(offer.units(), group, index) else { return };
        if !offer.has(group, index) || self.lock().blocks.contains_key(&key) {
            return;
        }
        let state = self.clone();
        offer.copy_out(group, index, Vec::new(), move |bytes, result| {
            if result.is_ok() {
                state.lock().blocks.insert(key, bytes);
            }
        });
    }

    /// A bit of everything, at random; with `faults` things go wrong too.
    pub(crate) fn tick(&self, rng: &mut Rng, faults: bool) {
        let goes_wrong = |rng: &mut Rng| faults && rng.one_in(6);
        let queries = std::mem::take(&mut self.lock().queries);
        for query in queries {
            if goes_wrong(rng) {
                drop(query);
            } else if rng.one_in(2) {
                self.answer(query);
            } else {
                self.lock().queries.push(query);
            }
        }
        let fetches = std::mem::take(&mut self.lock().fetches);
        for mut fetch in fetches {
            if fetch.delivery.is_cancelled() {
                continue;
            }
            if goes_wrong(rng) {
                match rng.below(4) {
                    0 => fetch.delivery.fail(RestoreFailure::Invalid, fetch.wanted.last().copied()),
                    1 => fetch.delivery.fail(RestoreFailure::Store, None),
                    2 => drop(fetch),
                    _ => {
                        // A block that is too short, as if it were of another model.
                        if let Some((group, index)) = fetch.wanted.pop() {
                            fetch.delivery.give(group, index, Box::new(vec![1; 100]));
                        }
                    }
                }
                continue;
            }
            let n = fetch.wanted.len();
            if n > 1 {
                fetch.wanted.swap(rng.below(n), n - 1);
            }
            let more = (0..rng.below(4)).all(|_| self.deliver_one(&mut fetch));
            if more && !fetch.wanted.is_empty() {
                self.lock().fetches.push(fetch);
            }
        }
        if rng.one_in(3) {
            self.take_all();
        }
        if rng.one_in(20) {
            // Some prefixes come in stages, at good places and at others.
            let mut stages: Vec<usize> = (0..rng.below(4)).map(|_| rng.below(1300)).collect();
            stages.sort_unstable();
            self.lock().stages = stages;
        }
        if faults && rng.one_in(50) {
            // The store drops something.
            let mut state = self.lock();
            let any = state.blocks.keys().next().copied();
            any.and_then(|key| state.blocks.remove(&key));
        }
    }
}
