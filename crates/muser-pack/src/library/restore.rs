//! Restore: segments into the caller's memory, checked chunk by chunk as they arrive.
//!
//! A chunk goes from the store into scratch memory that a core's second-level cache holds, and from there, decrypted, into
//! its place: slow memory is read once and written once. The place is borrowed for no longer than that, so whoever owns it
//! can take it back between two chunks, whatever a disk or a network does meanwhile.

use std::ops::Range;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

use muser_kv::KvGroup;

use super::{Library, Scope, Segment, Shared};
use crate::counters::{add, add_time};
use crate::kind::Kind;
use crate::{PackError, Refusal};

/// Scratch buffers kept for the next restore.
const MOST_SPARE: usize = 8;

/// Where the bytes of a segment go.
pub trait Place {
    /// Bytes that there is room for.
    fn bytes(&self) -> usize;

    /// Lends the bytes of `range` to `fill`, once; `false`, without a call, when the place is wanted for something else by
    /// now. What `fill` is given need not be zeroed.
    fn lend(&mut self, range: Range<usize>, fill: &mut dyn FnMut(&mut [u8])) -> bool;
}

impl Place for &mut [u8] {
    fn bytes(&self) -> usize {
        self.len()
    }

    fn lend(&mut self, range: Range<usize>, fill: &mut dyn FnMut(&mut [u8])) -> bool {
        self.get_mut(range).map(fill).is_some()
    }
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
        mut out: &mut [u8],
        cancel: &AtomicBool,
    ) -> Result<(), PackError> {
        self.fetch_into(scope, segment, &mut out, cancel)
    }

    /// [`Library::fetch_unless`] into a place that is lent a chunk at a time. That the place is not lent any more counts as
    /// cancelling.
    pub fn fetch_into(
        &self,
        scope: &Scope,
        segment: &Segment,
        place: &mut dyn Place,
        cancel: &AtomicBool,
    ) -> Result<(), PackError> {
        let started = Instant::now();
        let outcome = self.read_segment(scope, segment, place, cancel);
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

    fn read_segment(
        &self,
        scope: &Scope,
        segment: &Segment,
        place: &mut dyn Place,
        cancel: &AtomicBool,
    ) -> Result<(), PackError> {
        go_on(cancel)?;
        if place.bytes() != segment.bytes {
            return Err(PackError::Caller {
                what: "buffer for a segment",
                expected: format!("{} bytes", segment.bytes),
                found: format!("{}", place.bytes()),
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
        let mut scratch = Scratch::of(&self.shared);
        for index in 0..opened.header.chunks {
            go_on(cancel)?;
            opened.read_stored(index, &mut scratch.bytes)?;
            let (start, len) = opened.header.chunk_range(index);
            let mut outcome = Ok(());
            let lent = place.lend(start as usize..start as usize + len, &mut |out| {
                outcome = opened.open_stored(index, &scratch.bytes, out);
            });
            outcome?;
            if !lent {
                return Err(PackError::Cancelled);
            }
        }
        Ok(())
    }

    /// A refused segment is not looked at again.
    fn put_aside(&self, segment: &Segment, error: &PackError) {
        let Some(reason) = error.refusal() else { return };
        self.shared.index().set_bad(segment.id);
        let damaged = reason.is_of_the_bytes();
        if damaged && let Err(error) = self.shared.store.quarantine(&segment.id.object()) {
            self.shared.counters.failed(error);
        }
    }
}

fn go_on(cancel: &AtomicBool) -> Result<(), PackError> {
    if cancel.load(Relaxed) { Err(PackError::Cancelled) } else { Ok(()) }
}

/// A buffer that goes back when it is dropped: a fresh one would cost page faults, and would not be in any cache.
struct Scratch<'a> {
    bytes: Vec<u8>,
    shared: &'a Shared,
}

impl<'a> Scratch<'a> {
    fn of(shared: &'a Shared) -> Self {
        let spare = shared.scratch.lock().unwrap_or_else(PoisonError::into_inner).pop();
        Self { bytes: spare.unwrap_or_default(), shared }
    }
}

impl Drop for Scratch<'_> {
    fn drop(&mut self) {
        let mut spare = self.shared.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        if spare.len() < MOST_SPARE && self.bytes.capacity() <= 2 * crate::object::USUAL_CHUNK_BYTES as usize
        {
            spare.push(std::mem::take(&mut self.bytes));
        }
    }
}
