//! Several sources as one: each is asked for what those before it do not have.

use std::sync::{Arc, Mutex, PoisonError};

use muser_kv::{BLOCK_LEN, KvGroup};

use super::{BlockReceiver, Found, KvConnector, PrefixExport, PrefixQuery, StoredPrefix};

/// Sources in the order in which they are asked: the nearest first, such as packs and then peers. What the first has is fetched
/// as a stage of its own, so that a failure of the second costs only what the second was to bring. Prefixes are offered to
/// the first alone.
pub struct Sources {
    first: Box<dyn KvConnector>,
    /// Asked on whatever thread the first one answers.
    second: Arc<Mutex<Box<dyn KvConnector>>>,
}

impl Sources {
    /// `first`, and `second` for what lies behind it.
    pub fn new(first: Box<dyn KvConnector>, second: Box<dyn KvConnector>) -> Self {
        Self { first, second: Arc::new(Mutex::new(second)) }
    }
}

impl KvConnector for Sources {
    fn look_up(&mut self, query: PrefixQuery) {
        let second = Arc::clone(&self.second);
        let query = query.before(move |query, first: Found| {
            let reach = first.as_ref().map_or(0, |first| first.alone());
            if reach >= query.units().len() || !query.is_wanted() {
                query.answer(first);
                return;
            }
            let query = match first {
                None => query,
                Some(first) => query.beyond(reach).before(move |query, second| {
                    query.answer(Some(match second {
                        None => first,
                        Some(second) => {
                            Arc::new(Both { first, reach: reach / BLOCK_LEN * BLOCK_LEN, second })
                        }
                    }));
                }),
            };
            second.lock().unwrap_or_else(PoisonError::into_inner).look_up(query);
        });
        self.first.look_up(query);
    }

    fn offer(&mut self, offer: PrefixExport) {
        self.first.offer(offer);
    }
}

/// What two sources have of a prompt.
struct Both {
    first: Arc<dyn StoredPrefix>,
    /// Positions that the first can bring by itself, in whole blocks.
    reach: usize,
    second: Arc<dyn StoredPrefix>,
}

impl StoredPrefix for Both {
    fn has(&self, group: KvGroup, index: usize) -> bool {
        self.first.has(group, index) || self.second.has(group, index)
    }

    fn tail(&self) -> Option<usize> {
        self.second.tail()
    }

    fn stop_after(&self, known: usize) -> Option<usize> {
        if known < self.reach { Some(self.reach) } else { self.second.stop_after(known) }
    }

    fn alone(&self) -> usize {
        self.reach.max(self.second.alone())
    }

    fn fetch(&self, wanted: Vec<(KvGroup, usize)>, delivery: BlockReceiver) {
        // An unfinished block is the second's. Of whole ones the nearer source's is taken where both have one.
        let unfinished = self.tail().map(|tail| tail / BLOCK_LEN);
        let is_first =
            |&(group, index): &(KvGroup, usize)| Some(index) != unfinished && self.first.has(group, index);
        let (first, second): (Vec<_>, Vec<_>) = wanted.into_iter().partition(is_first);
        if !first.is_empty() {
            self.first.fetch(first, delivery.clone());
        }
        if !second.is_empty() {
            self.second.fetch(second, delivery);
        }
    }
}
