//! What the pool and the loans of blocks are made of: the standard library. `tests/models.rs` compiles their files once more, over
//! a model of it that tries every order.

use std::cell;
use std::time::{Duration, Instant};

pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
pub(crate) use std::sync::{Arc, Mutex, MutexGuard};
pub(crate) use std::thread::{Builder, JoinHandle, Thread, current, park};

/// The time.
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// A cell that the protocol around it keeps from being read and written at once.
pub(crate) struct UnsafeCell<T>(cell::UnsafeCell<T>);

impl<T> UnsafeCell<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(cell::UnsafeCell::new(value))
    }

    #[inline]
    pub(crate) fn with<R>(&self, read: impl FnOnce(*const T) -> R) -> R {
        read(self.0.get())
    }

    #[inline]
    pub(crate) fn with_mut<R>(&self, write: impl FnOnce(*mut T) -> R) -> R {
        write(self.0.get())
    }
}

/// Looks up to `turns` times whether it is done.
#[inline]
pub(crate) fn spin(turns: u32, done: impl Fn() -> bool) -> bool {
    for _ in 0..turns {
        if done() {
            return true;
        }
        std::hint::spin_loop();
    }
    false
}

/// Looks for some time whether it is done.
#[inline]
pub(crate) fn spin_for(time: Duration, done: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    while !spin(64, &done) {
        if start.elapsed() > time {
            return false;
        }
    }
    true
}
