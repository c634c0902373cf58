//! Restore: segments into the caller's memory, checked chunk by chunk as they arrive.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use muser_kv::KvGroup;

use super::{Library, Scope, Segment};
use crate::counters::{add, add_time};
use crate::object::Kind;
use crate::{PackError, Refusal};

/// A segment to fetch and where to put it.
#[derive(Debug)]
pub struct Fetch<'a> {
    /// Which one.
    pub segment: Segment,
    /// As many bytes as the segment has.
    pub out: &'a mut [u8],
}

impl Library {
    /// Reads a segment of a [`super::Plan`] into `out`. Every byte is authenticated before this returns `Ok`; after an
    /// error `out` holds nothing of the segment that was not.
    ///
    /// A segment that is refused is put aside and not found again until it is published anew.
    pub fn fetch(&self, scope: &Scope, segment: &Segment, out: &mut [u8]) -> Result<(), PackError> {
        self.fetch_unless(scope, segment, out, &AtomicBool::new(false))
    }

    /// [`Library::fetch`] that gives up within a chunk (256 KiB) once `cancel` is set.
    pub fn fetch_unless(
        &self,
        scope: &Scope,
        segment: &Segment,
        out: &mut [u8],
        cancel: &AtomicBool,
    ) -> Result<(), PackError> {
        let started = Instant::now();
        let outcome = self.read_segment(scope, segment, out, cancel);
        let counters = &self.shared.counters;
        match outcome {
            Ok(()) => {
                add(&counters.fetched_segments, 1);
                add(&counters.fetched_bytes, segment.bytes as u64);
                add_time(&counters.fetch_ns, started.elapsed());
                Ok(())
            }
            Err(error) => {
                self.put_aside(segment, &error);
                Err(counters.failed(error))
            }
        }
    }

    /// Fetches several segments with `threads` threads; gives up at the first failure or once `cancel` is set.
    pub fn fetch_all(
        &self,
        scope: &Scope,
        jobs: Vec<Fetch<'_>>,
        threads: usize,
        cancel: &AtomicBool,
    ) -> Result<(), PackError> {
        let threads = threads.clamp(1, jobs.len().max(1));
        let jobs = Mutex::new(jobs.into_iter());
        let failed = Mutex::new(None);
        let stop = AtomicBool::new(false);
        let next = || jobs.lock().unwrap_or_else(PoisonError::into_inner).next();
        let work = || {
            while let Some(job) = next() {
                if stop.load(Relaxed) || cancel.load(Relaxed) {
                    break;
                }
                if let Err(error) = self.fetch_unless(scope, &job.segment, job.out, cancel) {
                    stop.store(true, Relaxed);
                    failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..threads {
                scope.spawn(work);
            }
            work();
        });
        match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error),
            None if cancel.load(Relaxed) => Err(PackError::Cancelled),
            None => Ok(()),
        }
    }

    fn read_segment(
        &self,
        scope: &Scope,
        segment: &Segment,
        out: &mut [u8],
        cancel: &AtomicBool,
    ) -> Result<(), PackError> {
        if out.len() != segment.bytes {
            return Err(PackError::Caller {
                what: "buffer for a segment",
                expected: format!("{} bytes", segment.bytes),
                found: format!("{}", out.len()),
            });
        }
        let keys = self.keys();
        let name = segment.id.object();
        let opened = self.shared.open_object(&keys, name)?;
        let spec = &opened.header.spec;
        let kind = match segment.group {
            KvGroup::Full => Kind::Full,
            KvGroup::Sliding => Kind::Sliding,
        };
        // The name binds all of this; a writer with the key that breaks it is a bug, not an accident.
        let fits = spec.kind == kind
            && opened.header.payload_bytes == segment.bytes as u64
            && spec.positions as usize == segment.positions
            && spec.row_bytes == scope.identity.representation.row_bytes.max(1);
        if !fits {
            return Err(PackError::refused(name, Refusal::Swapped));
        }
        for (index, chunk) in out.chunks_mut(spec.chunk_bytes as usize).enumerate() {
            if cancel.load(Relaxed) {
                return Err(PackError::Cancelled);
            }
            opened.read_chunk(&keys, index as u32, chunk)?;
        }
        Ok(())
    }

    /// A refused segment is not looked at again.
    fn put_aside(&self, segment: &Segment, error: &PackError) {
        let Some(reason) = error.refusal() else { return };
        self.shared.index().set_bad(segment.id);
        // A revoked or foreign key is no fault of the file.
        let damaged = !matches!(
            reason,
            Refusal::ForeignKey { .. }
                | Refusal::RevokedKey { .. }
                | Refusal::EpochTooOld { .. }
                | Refusal::UnknownEpoch { .. }
                | Refusal::MissingSegment
                | Refusal::NotEncrypted
        );
        if damaged && let Err(error) = self.shared.store.quarantine(&segment.id.object()) {
            self.shared.counters.failed(error);
        }
    }
}
