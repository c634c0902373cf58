//! An allocator that counts.
#![allow(unsafe_code, reason = "a global allocator cannot be written without; it forwards to the system's")]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    sync::atomic::{AtomicU64, Ordering},
};

/// Counts what it hands out, for each thread and for all. A test program installs it:
///
/// ```
/// use muser_testkit::{CountingAllocator, allocations};
///
/// #[global_allocator]
/// static ALLOCATOR: CountingAllocator = CountingAllocator;
///
/// assert_eq!(allocations(|| drop(std::hint::black_box(vec![1_u8; 100]))), 1);
/// ```
#[derive(Debug)]
pub struct CountingAllocator;

static CALLS: AtomicU64 = AtomicU64::new(0);
static BYTES: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static CALLS_HERE: Cell<u64> = const { Cell::new(0) };
    /// Bytes that this thread has allocated and not given back, and the most of them at once.
    static HELD_HERE: Cell<(i64, i64)> = const { Cell::new((0, 0)) };
}

/// Allocations of this thread while `work` runs.
pub fn allocations(work: impl FnOnce()) -> u64 {
    let before = CALLS_HERE.get();
    work();
    CALLS_HERE.get() - before
}

/// What `work` gives; its allocations count for none of this thread's.
pub fn uncounted<T>(work: impl FnOnce() -> T) -> T {
    let before = CALLS_HERE.get();
    let result = work();
    CALLS_HERE.set(before);
    result
}

/// What `work` gives, and the most bytes that this thread held meanwhile beyond those before.
pub fn most_held<T>(work: impl FnOnce() -> T) -> (T, u64) {
    let (before, most_before) = HELD_HERE.get();
    HELD_HERE.set((before, before));
    let result = work();
    let (now, most) = HELD_HERE.get();
    HELD_HERE.set((now, most.max(most_before)));
    (result, most.saturating_sub(before).unsigned_abs())
}

/// Allocations of all threads so far.
pub fn allocations_in_all() -> u64 {
    CALLS.load(Ordering::SeqCst)
}

/// Bytes handed out to all threads so far, whatever was given back.
pub fn bytes_allocated() -> u64 {
    BYTES.load(Ordering::SeqCst)
}

fn count(bytes: usize) {
    hold(bytes as i64);
    CALLS.fetch_add(1, Ordering::SeqCst);
    BYTES.fetch_add(bytes as u64, Ordering::SeqCst);
    // A thread that is ending has no counter any more, and nobody asks for it.
    let _ = CALLS_HERE.try_with(|calls| calls.set(calls.get() + 1));
}

fn hold(bytes: i64) {
    let _ = HELD_HERE.try_with(|held| {
        let (now, most) = held.get();
        held.set((now + bytes, most.max(now + bytes)));
    });
}

// SAFETY: every method forwards its arguments unchanged to the system allocator, whose contract is the same.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's promises are those that `System` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        hold(-(layout.size() as i64));
        // SAFETY: as above; `pointer` came from `System` because all of ours do.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count(new_size);
        hold(-(layout.size() as i64));
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, new_size) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[global_allocator]
    static ALLOCATOR: CountingAllocator = CountingAllocator;

    #[test]
    fn every_way_to_memory_counts() {
        let (calls, bytes) = (allocations_in_all(), bytes_allocated());
        let mut grown = Vec::with_capacity(1000);
        assert_eq!(allocations(|| drop(std::hint::black_box(vec![0_u8; 100]))), 1, "zeroed");
        assert_eq!(allocations(|| drop(std::hint::black_box(vec![1_u8; 100]))), 1);
        assert_eq!(allocations(|| grown.resize(5000, 7_u8)), 1, "grown");
        assert_eq!(allocations(|| grown.truncate(0)), 0);
        assert!(allocations_in_all() >= calls + 4 && bytes_allocated() >= bytes + 6200);
        let ((), most) = most_held(|| {
            for size in [100_000, 300_000, 200_000] {
                drop(std::hint::black_box(vec![1_u8; size]));
            }
        });
        assert_eq!(most, 300_000);
        let elsewhere = allocations(|| {
            std::thread::scope(|scope| {
                let thread = scope.spawn(|| allocations(|| drop(std::hint::black_box(vec![1_u8; 9]))));
                assert_eq!(thread.join().expect("it ends"), 1);
            });
        });
        assert!(elsewhere >= 1, "starting a thread allocates");
    }
}
