//! Where the rows of a prefix land: in the engine's memory, written in place where that can be.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use muser_handoff::{Component, Place, Planes};
use muser_kv::{BLOCK_LEN, KvGroup};

use crate::sync::{Arc, BlockPlace, BlockReceiver, Condvar, Mutex, MutexGuard, PoisonError};

/// Rows that have come before the engine has reserved memory for them, at most so many bytes.
const MOST_EARLY: usize = 64 << 20;
/// How long a stream may wait for that.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// A block by group and index.
pub(crate) type Block = (KvGroup, usize);

enum Memory {
    Lent(BlockPlace),
    /// The executor's memory cannot be written from outside.
    Copied(Vec<u8>),
}

impl Memory {
    /// Writes into a layer of it; `false` if the engine has taken it back.
    fn write(&mut self, layer: std::ops::Range<usize>, write: &mut dyn FnMut(&mut [u8])) -> bool {
        match self {
            Self::Lent(place) => place.write(layer, write),
            Self::Copied(bytes) => bytes.get_mut(layer).map(write).is_some(),
        }
    }
}

#[derive(Default)]
struct State {
    /// `None` once it has been handed to the engine.
    blocks: HashMap<Block, Arc<Mutex<Option<Memory>>>>,
    early: Vec<(Place, Box<[u8]>)>,
    early_bytes: usize,
    delivery: Option<BlockReceiver>,
    closed: bool,
}

/// The memory of a hand-off, stage by stage.
pub(crate) struct Landing {
    planes: Planes,
    most_early: usize,
    state: Mutex<State>,
    changed: Condvar,
}

impl Landing {
    /// For an engine whose blocks are made of these planes.
    pub(crate) fn new(planes: Planes) -> Self {
        Self::with_early(planes, MOST_EARLY)
    }

    /// The same with room for so many bytes before there is memory for them.
    pub(crate) fn with_early(planes: Planes, most_early: usize) -> Self {
        Self { planes, most_early, state: Mutex::new(State::default()), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Memory for the blocks of a stage that are to come, of which those of `unfinished` index end inside. `with_draft`: the
    /// draft's rows come too; else they are zeros, which says that a position has no context there.
    pub(crate) fn open(
        &self,
        wanted: &[Block],
        unfinished: Option<usize>,
        with_draft: bool,
        delivery: &BlockReceiver,
    ) {
        let mut state = self.lock();
        for &(group, index) in wanted {
            if state.blocks.contains_key(&(group, index)) {
                // The same stage, asked for anew.
                continue;
            }
            let size = self.planes.block_bytes(group);
            let mut memory = match delivery.place(group, index) {
                Some(place) => Memory::Lent(place),
                None => Memory::Copied(vec![0; size]),
            };
            let draft = self.draft_from(group);
            let stale = if unfinished == Some(index) {
                0..size
            } else if with_draft {
                size..size
            } else {
                draft..size
            };
            // What another sequence left there is not for this one.
            let _ = memory.write(stale, &mut |bytes| bytes.fill(0));
            state.blocks.insert((group, index), Arc::new(Mutex::new(Some(memory))));
        }
        state.delivery = Some(delivery.clone());
        let (early, later) = std::mem::take(&mut state.early)
            .into_iter()
            .partition::<Vec<_>, _>(|(place, _)| state.blocks.contains_key(&block_of(place)));
        state.early_bytes = later.iter().map(|(_, rows)| rows.len()).sum();
        state.early = later;
        drop(state);
        for (place, rows) in early {
            self.take(&place, &rows);
        }
        self.changed.notify_all();
    }

    fn draft_from(&self, group: KvGroup) -> usize {
        let of = self.planes.of_group(group).filter(|plane| plane.component == Component::Target);
        of.map(|plane| usize::from(plane.layers) * plane.layer_bytes()).sum()
    }

    /// Takes rows in. `false`: nobody wants them any more.
    pub(crate) fn take(&self, place: &Place, rows: &[u8]) -> bool {
        let until = Instant::now() + LONGEST_WAIT;
        let mut state = self.lock();
        loop {
            if state.closed {
                return false;
            }
            if let Some(memory) = state.blocks.get(&block_of(place)).map(Arc::clone) {
                if let Some(delivery) = &state.delivery {
                    delivery.note_alive();
                }
                drop(state);
                return self.write(&memory, place, rows);
            }
            if state.early_bytes + rows.len() <= self.most_early {
                state.early_bytes += rows.len();
                state.early.push((*place, rows.into()));
                return true;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn write(&self, memory: &Mutex<Option<Memory>>, place: &Place, rows: &[u8]) -> bool {
        let (Some(layer), Some(plane)) = (
            self.planes.layer_at(place.group, place.component, place.layer),
            self.planes.plane(place.group, place.component),
        ) else {
            return false;
        };
        let mut memory = memory.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(memory) = &mut *memory else { return false };
        memory.write(layer, &mut |bytes| {
            if usize::from(place.rows) == BLOCK_LEN {
                bytes.copy_from_slice(rows);
            } else {
                plane.scatter(rows, bytes, place.row_range());
            }
        })
    }

    /// It is alive, although nothing comes.
    pub(crate) fn note_alive(&self) {
        if let Some(delivery) = &self.lock().delivery {
            delivery.note_alive();
        }
    }

    /// All blocks that are open are written and vouched for: they are the engine's.
    pub(crate) fn deliver(&self) {
        let mut state = self.lock();
        let blocks = std::mem::take(&mut state.blocks);
        let Some(delivery) = state.delivery.take() else { return };
        drop(state);
        delivery.note_handed();
        for ((group, index), memory) in blocks {
            match memory.lock().unwrap_or_else(PoisonError::into_inner).take() {
                Some(Memory::Lent(place)) => delivery.filled(place),
                Some(Memory::Copied(bytes)) => delivery.give(group, index, Box::new(bytes)),
                None => {}
            }
        }
    }

    /// Nothing more is taken; what was open is given back.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        *state = State { closed: true, ..State::default() };
        drop(state);
        self.changed.notify_all();
    }

    /// Drops what has come for later stages, where they are asked for anew.
    pub(crate) fn forget_early(&self) {
        let mut state = self.lock();
        state.early.clear();
        state.early_bytes = 0;
        drop(state);
        self.changed.notify_all();
    }
}

fn block_of(place: &Place) -> Block {
    (place.group, place.block as usize)
}
