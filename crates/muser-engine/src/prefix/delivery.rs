//! Blocks on their way in.
//!
//! Where the executor can lend its memory a block is written in its place by the source's threads ([`BlockPlace`]), and the
//! engine only hears of it. Elsewhere the source hands over bytes, and the engine's thread copies them. A place is lent a
//! piece at a time: when the engine loses interest it takes the place back at once, whatever a source is waiting for.

use std::{
    ops::Range,
    sync::{Arc, PoisonError},
};

use muser_backend::LentBlock;
use muser_kv::KvGroup;

use crate::prefix::RestoreFailure;
use crate::sync::{
    AtomicBool, AtomicIsize, Mutex, MutexGuard, OnceLock, Ordering, SegQueue, Thread, current,
};

/// The bytes of a block, in the layout of [`muser_backend::Executor::export_block`]. Dropped by the engine as soon as they
/// have been copied: a source that bounds its memory counts on that.
pub type BlockBytes = Box<dyn AsRef<[u8]> + Send>;

/// A block that has arrived.
pub(crate) struct Delivered {
    pub(crate) group: KvGroup,
    pub(crate) index: usize,
    /// `None`: they are in their place.
    pub(crate) bytes: Option<BlockBytes>,
}

/// A block's memory until it is filled or taken back.
type Loan = Mutex<Option<Box<dyn LentBlock>>>;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A source that panicked while it wrote has not called the block filled.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The engine's memory for one block, to be filled by the source. Nobody sees the block before it is handed back with
/// [`BlockReceiver::filled`].
pub struct BlockPlace {
    group: KvGroup,
    index: usize,
    loan: Arc<Loan>,
}

impl BlockPlace {
    /// Bytes of the block; 0 once the engine has taken it back.
    pub fn bytes(&self) -> usize {
        lock(&self.loan).as_mut().map_or(0, |block| block.bytes().len())
    }

    /// Lends the bytes of `range` to `write`, whose call must not wait for anything: the engine may be waiting for it.
    /// `false`, without a call, if the engine wants the block for something else by now or it is shorter.
    pub fn write(&self, range: Range<usize>, write: &mut dyn FnMut(&mut [u8])) -> bool {
        let mut loan = lock(&self.loan);
        loan.as_mut().and_then(|block| block.bytes().get_mut(range)).map(write).is_some()
    }
}

impl std::fmt::Debug for BlockPlace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BlockPlace")
            .field("group", &self.group)
            .field("index", &self.index)
            .finish_non_exhaustive()
    }
}

/// What went wrong and, if it was about one block, with which.
pub(crate) type Failed = (RestoreFailure, Option<(KvGroup, usize)>);

pub(crate) struct DeliveryCell {
    pub(crate) arrived: SegQueue<Delivered>,
    /// Places of blocks that nobody has asked for yet, and of all others.
    places: Mutex<(Vec<BlockPlace>, Vec<Arc<Loan>>)>,
    /// Blocks that have not arrived.
    to_come: AtomicIsize,
    failed: OnceLock<Failed>,
    closed: AtomicBool,
    cancelled: AtomicBool,
    /// The source has said that it gets on, since that was last asked.
    alive: AtomicBool,
    /// What it brings a peer computed.
    handed: AtomicBool,
    /// Who is told how it ended.
    told: Mutex<Option<Told>>,
    engine: Thread,
}

/// Hears whether what was delivered is known now.
type Told = Box<dyn FnOnce(bool) + Send>;

impl DeliveryCell {
    /// Has the source said that it gets on? Asked once.
    pub(crate) fn take_alive(&self) -> bool {
        self.alive.swap(false, Ordering::Relaxed)
    }

    /// Did a peer compute what it brings?
    pub(crate) fn is_handed(&self) -> bool {
        self.handed.load(Ordering::Relaxed)
    }

    /// The failure, once there is nothing left to take.
    pub(crate) fn failure(&self) -> Option<Failed> {
        // The order matters: whoever closes has given everything before.
        let closed = self.closed.load(Ordering::SeqCst);
        match self.failed.get() {
            Some(failed) => Some(*failed),
            None if closed && self.arrived.is_empty() => Some((RestoreFailure::Store, None)),
            None => None,
        }
    }

    /// Nothing is written into any block when this returns, nor later.
    pub(crate) fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
        while self.arrived.pop().is_some() {}
        let (waiting, lent) = std::mem::take(&mut *lock(&self.places));
        drop(waiting);
        for loan in lent {
            drop(lock(&loan).take());
        }
    }

    /// It is over: what was delivered is known, or nobody wants it any more.
    pub(crate) fn end(&self, imported: bool) {
        self.cancel();
        if let Some(tell) = lock(&self.told).take() {
            tell(imported);
        }
    }

    fn note_arrival(&self) -> bool {
        self.to_come.fetch_sub(1, Ordering::Relaxed) <= 1
    }
}

/// Closes when the last clone of a delivery goes.
struct Closing(Arc<DeliveryCell>);

impl Drop for Closing {
    fn drop(&mut self) {
        self.0.closed.store(true, Ordering::SeqCst);
        self.0.engine.unpark();
    }
}

/// The source's end of a fetch. Clones may be used on several threads.
#[derive(Clone)]
pub struct BlockReceiver(Arc<Closing>);

impl BlockReceiver {
    pub(crate) fn new(blocks: usize) -> (Self, Arc<DeliveryCell>) {
        let cell = Arc::new(DeliveryCell {
            arrived: SegQueue::new(),
            places: Mutex::new((Vec::new(), Vec::new())),
            to_come: AtomicIsize::new(blocks as isize),
            failed: OnceLock::new(),
            closed: AtomicBool::new(false),
            cancelled: AtomicBool::new(false),
            alive: AtomicBool::new(false),
            handed: AtomicBool::new(false),
            told: Mutex::new(None),
            engine: current(),
        });
        (Self(Arc::new(Closing(Arc::clone(&cell)))), cell)
    }

    /// Has the engine lost interest? Then whatever is given is dropped.
    pub fn is_cancelled(&self) -> bool {
        self.0.0.cancelled.load(Ordering::Relaxed)
    }

    /// The flag behind [`BlockReceiver::is_cancelled`], for readers that look at one.
    pub fn cancel_flag(&self) -> &AtomicBool {
        &self.0.0.cancelled
    }

    /// A sign of life other than a block: it takes its time, and gets on.
    pub fn note_alive(&self) {
        self.0.0.alive.store(true, Ordering::Relaxed);
    }

    /// What is brought here a peer has computed for this request; it counts as handed over.
    pub fn note_handed(&self) {
        self.0.0.handed.store(true, Ordering::Relaxed);
    }

    /// `told` is called once, on the engine's thread (or here, if it is over already): with `true` when all blocks are there and
    /// the prefix has become known, with `false` when the engine wants them no more. It returns at once.
    pub fn on_end(&self, told: impl FnOnce(bool) + Send + 'static) {
        let mut slot = lock(&self.0.0.told);
        if self.is_cancelled() {
            drop(slot);
            told(false);
        } else {
            *slot = Some(Box::new(told));
        }
    }

    pub(crate) fn add_place(&self, group: KvGroup, index: usize, block: Box<dyn LentBlock>) {
        let loan = Arc::new(Mutex::new(Some(block)));
        lock(&self.0.0.places).0.push(BlockPlace { group, index, loan });
    }

    /// The engine's memory for a block, if it can be written in place; to be asked for once. Without it the block is to be
    /// given as bytes.
    pub fn place(&self, group: KvGroup, index: usize) -> Option<BlockPlace> {
        let mut places = lock(&self.0.0.places);
        let at = places.0.iter().position(|place| place.group == group && place.index == index)?;
        let place = places.0.swap_remove(at);
        places.1.push(Arc::clone(&place.loan));
        Some(place)
    }

    /// Hands back a block whose every byte has been written. The caller vouches for the bytes as in [`BlockReceiver::give`].
    pub fn filled(&self, place: BlockPlace) {
        let BlockPlace { group, index, loan } = place;
        if lock(&loan).take().is_none() {
            return;
        }
        let cell = &self.0.0;
        cell.arrived.push(Delivered { group, index, bytes: None });
        // There is nothing for the engine to do but to count, before all is there.
        if cell.note_arrival() {
            cell.engine.unpark();
        }
    }

    /// Hands over a block. The caller vouches for the bytes: same model, same numeric route, same prefix.
    pub fn give(&self, group: KvGroup, index: usize, bytes: BlockBytes) {
        let cell = &self.0.0;
        cell.arrived.push(Delivered { group, index, bytes: Some(bytes) });
        cell.note_arrival();
        if self.is_cancelled() {
            cell.cancel();
        }
        cell.engine.unpark();
    }

    /// Gives up, naming the block that was to blame if there is one: the engine then asks for a prefix that does without.
    pub fn fail(&self, failure: RestoreFailure, block: Option<(KvGroup, usize)>) {
        let _ = self.0.0.failed.set((failure, block));
        self.0.0.engine.unpark();
    }
}

impl std::fmt::Debug for BlockReceiver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BlockReceiver").field("cancelled", &self.is_cancelled()).finish_non_exhaustive()
    }
}
