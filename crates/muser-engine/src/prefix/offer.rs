//! Blocks on their way out.

use std::{
    sync::{
        Weak,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread::Thread,
};

use crossbeam_queue::SegQueue;
use muser_kv::{BLOCK_LEN, CacheScope, KvGroup, PositionKey};

/// A block could not be copied out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExportError {
    /// Sequences needed the memory, or the block was never there.
    #[error("the block is no longer in memory")]
    Gone,
    /// The device failed.
    #[error("the device failed to copy the block out")]
    Device,
    /// The engine has stopped.
    #[error("the engine has stopped")]
    Stopped,
}

/// Called on the engine's thread with the bytes or with the reason why not; the buffer comes back either way.
pub(crate) type Exported = Box<dyn FnOnce(Vec<u8>, Result<(), ExportError>) + Send>;

/// What the engine's thread is asked for.
pub(crate) enum ExportWork {
    /// Copy a block of a held prefix, of which `rows` rows belong to it.
    Copy { hold: u64, group: KvGroup, index: usize, rows: usize, buffer: Vec<u8>, done: Exported },
    /// Let a held prefix go.
    Release { hold: u64 },
}

/// The queue to the engine's thread.
pub(crate) struct ExportQueue {
    pub(crate) work: SegQueue<ExportWork>,
    stopped: AtomicBool,
    /// Sequences are being computed.
    pub(crate) computing: AtomicBool,
}

impl ExportQueue {
    pub(crate) fn new() -> Self {
        Self { work: SegQueue::new(), stopped: AtomicBool::new(false), computing: AtomicBool::new(false) }
    }

    /// Nobody will do what is asked from now on.
    pub(crate) fn close(&self) {
        self.stopped.store(true, Ordering::SeqCst);
        self.refuse();
    }

    fn refuse(&self) {
        while let Some(work) = self.work.pop() {
            if let ExportWork::Copy { buffer, done, .. } = work {
                done(buffer, Err(ExportError::Stopped));
            }
        }
    }

    fn push(&self, work: ExportWork, engine: &Thread) {
        self.work.push(work);
        if self.stopped.load(Ordering::SeqCst) {
            self.refuse();
        }
        engine.unpark();
    }
}

/// A computed prefix. Its rows never change again, and they are held in memory while the offer lives, unless
/// sequences need their place.
pub struct PrefixExport {
    scope: CacheScope,
    units: Vec<PositionKey>,
    sliding: Vec<bool>,
    hold: u64,
    exports: Weak<ExportQueue>,
    engine: Thread,
}

impl PrefixExport {
    pub(crate) fn new(
        scope: CacheScope,
        units: Vec<PositionKey>,
        sliding: Vec<bool>,
        hold: u64,
        exports: Weak<ExportQueue>,
    ) -> Self {
        Self { scope, units, sliding, hold, exports, engine: std::thread::current() }
    }

    /// Whose prefix it is.
    pub fn scope(&self) -> CacheScope {
        self.scope
    }

    /// The prefix. At the end of a request it may end inside a block; of that block only the rows so far mean anything.
    pub fn units(&self) -> &[PositionKey] {
        &self.units
    }

    /// Is the engine computing something? Whoever works in the background may want to go slowly then.
    pub fn engine_is_computing(&self) -> bool {
        self.exports.upgrade().is_some_and(|exports| exports.computing.load(Ordering::Relaxed))
    }

    /// Blocks in it, an unfinished one included.
    pub fn blocks(&self) -> usize {
        self.sliding.len()
    }

    /// Was the block in memory when the offer was made? Full blocks always were.
    pub fn has(&self, group: KvGroup, index: usize) -> bool {
        match group {
            KvGroup::Full => index < self.sliding.len(),
            KvGroup::Sliding => self.sliding.get(index).copied().unwrap_or(false),
        }
    }

    /// Asks for a copy of a block and returns at once; of an unfinished one, the rows behind its end are zeros where the
    /// backend can tell rows apart. `done` is called on the engine's thread, or here if the engine has
    /// stopped. `buffer` is resized to the block and comes back.
    pub fn copy_out(
        &self,
        group: KvGroup,
        index: usize,
        buffer: Vec<u8>,
        done: impl FnOnce(Vec<u8>, Result<(), ExportError>) + Send + 'static,
    ) {
        match self.exports.upgrade() {
            Some(exports) => {
                let done: Exported = Box::new(done);
                let rows = self.units.len().saturating_sub(index * BLOCK_LEN).min(BLOCK_LEN);
                let work = ExportWork::Copy { hold: self.hold, group, index, rows, buffer, done };
                exports.push(work, &self.engine);
            }
            None => done(buffer, Err(ExportError::Stopped)),
        }
    }

    /// [`PrefixExport::copy_out`] for a thread that may wait. Never call it on the engine's thread.
    pub fn copy_out_blocking(
        &self,
        group: KvGroup,
        index: usize,
        buffer: Vec<u8>,
    ) -> (Vec<u8>, Result<(), ExportError>) {
        let (give, take) = mpsc::sync_channel(1);
        self.copy_out(group, index, buffer, move |buffer, result| {
            let _ = give.try_send((buffer, result));
        });
        take.recv().unwrap_or((Vec::new(), Err(ExportError::Stopped)))
    }
}

impl Drop for PrefixExport {
    fn drop(&mut self) {
        if let Some(exports) = self.exports.upgrade() {
            exports.push(ExportWork::Release { hold: self.hold }, &self.engine);
        }
    }
}

impl std::fmt::Debug for PrefixExport {
    // No ids: offers end up in logs.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PrefixExport").field("blocks", &self.blocks()).finish_non_exhaustive()
    }
}
