//! A model of the standard library's atomics, locks and threads (loom's) in which every order of what threads do is tried, and
//! every value that a load may see. A file of the product names its `crate::sync`; a test crate that includes the same file
//! by its path gives it this module instead.
//!
//! Fences stand around operations with `SeqCst`, whose total order loom does not know. That is a little more than the language
//! promises where an object is used with `SeqCst` here and with less there; a protocol should not rest on that.
//!
//! A model that finds nothing is worth something only if it would: [`finds`] weakens all operations ([`Seed`]) and says whether
//! anything was found.

use std::cell::{Cell as StdCell, RefCell};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{LockResult, PoisonError};
use std::time::Duration;

mod queues;

pub use loom::cell::UnsafeCell;
pub use loom::sync::{Mutex, MutexGuard};
// A model that has found something is taken down with its counts where they are.
pub use std::sync::Arc;
pub use std::sync::atomic::Ordering;

pub use queues::{ArrayQueue, AtomicWaker, OnceLock, SegQueue};

/// What is wrong with all atomic operations, or with all condition variables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seed {
    /// Nothing.
    Right,
    /// There is no total order of operations with `SeqCst`: a store may be seen after a later load of its thread.
    NoTotalOrder,
    /// Every order is `Relaxed`: what one thread wrote before an operation another need not see after it.
    Relaxed,
    /// Nobody who waits at a condition variable is woken.
    LostWakes,
}

std::thread_local! {
    // The threads of a model take turns on the thread of its test.
    static SEED: StdCell<Seed> = const { StdCell::new(Seed::Right) };
}

/// Tries every order of `run`, but for those with more than `preemptions` switches away from a thread that could go on.
pub fn check(preemptions: usize, run: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(run);
}

/// Is something found once all atomic operations have this fault?
pub fn finds(seed: Seed, preemptions: usize, run: impl Fn() + Send + Sync + 'static) -> bool {
    SEED.set(seed);
    let found = catch_unwind(AssertUnwindSafe(|| check(preemptions, run))).is_err();
    SEED.set(Seed::Right);
    found
}

fn weakened(order: Ordering) -> Ordering {
    if SEED.get() == Seed::Relaxed { Ordering::Relaxed } else { order }
}

fn total_order(order: Ordering) {
    if order == Ordering::SeqCst && SEED.get() == Seed::Right {
        loom::sync::atomic::fence(Ordering::SeqCst);
    }
}

macro_rules! atomic {
    ($($name:ident: $value:ty { $($method:ident),* })*) => {$(
        /// The standard library's of this name.
        #[derive(Debug)]
        pub struct $name(loom::sync::atomic::$name);

        impl $name {
            /// See there.
            pub fn new(value: $value) -> Self {
                Self(loom::sync::atomic::$name::new(value))
            }

            /// See there.
            pub fn load(&self, order: Ordering) -> $value {
                total_order(order);
                let value = self.0.load(weakened(order));
                total_order(order);
                value
            }

            /// See there.
            pub fn store(&self, value: $value, order: Ordering) {
                total_order(order);
                self.0.store(value, weakened(order));
                total_order(order);
            }

            $(
                /// See there.
                pub fn $method(&self, value: $value, order: Ordering) -> $value {
                    total_order(order);
                    let before = self.0.$method(value, weakened(order));
                    total_order(order);
                    before
                }
            )*
        }
    )*};
}

atomic! {
    AtomicBool: bool { swap }
    AtomicU32: u32 { swap, fetch_add, fetch_sub }
    AtomicUsize: usize { swap, fetch_add, fetch_sub }
    AtomicIsize: isize { swap, fetch_add, fetch_sub }
}

/// The standard library's of this name. No wait ends by the clock: whoever counts on that stands still here, and is found.
#[derive(Debug)]
pub struct Condvar(loom::sync::Condvar);

/// What a wait with a limit says of it.
#[derive(Clone, Copy, Debug)]
pub struct InTime;

impl InTime {
    /// It is not.
    pub fn timed_out(self) -> bool {
        false
    }
}

impl Condvar {
    /// See there.
    #[expect(clippy::new_without_default, reason = "as the one it stands for is made here")]
    pub fn new() -> Self {
        Self(loom::sync::Condvar::new())
    }

    /// See there.
    ///
    /// # Errors
    /// As the standard library's, if a thread panicked.
    pub fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> LockResult<MutexGuard<'a, T>> {
        self.0.wait(guard)
    }

    /// See there.
    ///
    /// # Errors
    /// As the standard library's, if a thread panicked.
    pub fn wait_timeout<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        _: Duration,
    ) -> LockResult<(MutexGuard<'a, T>, InTime)> {
        match self.0.wait(guard) {
            Ok(guard) => Ok((guard, InTime)),
            Err(poisoned) => Err(PoisonError::new((poisoned.into_inner(), InTime))),
        }
    }

    /// See there.
    ///
    /// # Errors
    /// As the standard library's, if a thread panicked.
    pub fn wait_timeout_while<'a, T>(
        &self,
        mut guard: MutexGuard<'a, T>,
        limit: Duration,
        mut waits: impl FnMut(&mut T) -> bool,
    ) -> LockResult<(MutexGuard<'a, T>, InTime)> {
        while waits(&mut guard) {
            guard = self.wait_timeout(guard, limit)?.0;
        }
        Ok((guard, InTime))
    }

    /// See there.
    pub fn notify_all(&self) {
        if SEED.get() != Seed::LostWakes {
            self.0.notify_all();
        }
    }
}

/// A thread, which can be unparked. (Loom's own would also wake one that waits for something else.)
#[derive(Clone, Debug)]
pub struct Thread(Arc<(Mutex<bool>, loom::sync::Condvar)>);

loom::thread_local! {
    static OWN: RefCell<Option<Thread>> = RefCell::new(None);
}

/// The thread that calls.
pub fn current() -> Thread {
    OWN.with(|own| own.borrow_mut().get_or_insert_with(Thread::new).clone())
}

/// Waits to be unparked, unless that has been done since the last time.
pub fn park() {
    let Thread(own) = current();
    let mut token = own.0.lock().expect("no panic");
    while !*token {
        token = own.1.wait(token).expect("no panic");
    }
    *token = false;
}

impl Thread {
    fn new() -> Self {
        Self(Arc::new((Mutex::new(false), loom::sync::Condvar::new())))
    }

    /// See [`park`].
    pub fn unpark(&self) {
        *self.0.0.lock().expect("no panic") = true;
        self.0.1.notify_one();
    }

    /// Tells threads apart.
    pub fn id(&self) -> usize {
        Arc::as_ptr(&self.0) as usize
    }
}

/// A thread that was started.
#[derive(Debug)]
pub struct JoinHandle<T>(loom::thread::JoinHandle<T>, Thread);

impl<T> JoinHandle<T> {
    /// See there.
    pub fn join(self) -> std::thread::Result<T> {
        self.0.join()
    }

    /// See there.
    pub fn thread(&self) -> &Thread {
        &self.1
    }
}

/// Starts a thread.
pub fn spawn<T: 'static>(run: impl FnOnce() -> T + 'static) -> JoinHandle<T> {
    let thread = Thread::new();
    let own = thread.clone();
    let handle = loom::thread::spawn(move || {
        OWN.with(|slot| *slot.borrow_mut() = Some(own));
        run()
    });
    JoinHandle(handle, thread)
}

/// As the standard library's.
#[derive(Debug, Default)]
pub struct Builder;

impl Builder {
    /// See there.
    pub fn new() -> Self {
        Self
    }

    /// See there.
    #[must_use]
    pub fn name(self, _: String) -> Self {
        self
    }

    /// See there.
    pub fn spawn<T: 'static>(self, run: impl FnOnce() -> T + 'static) -> io::Result<JoinHandle<T>> {
        Ok(spawn(run))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use loom::sync::Arc;

    /// Each of two threads says that it is there and looks for the other: one at least sees the other.
    fn both_look() {
        let flags = Arc::new([AtomicBool::new(false), AtomicBool::new(false)]);
        let other = Arc::clone(&flags);
        let thread = spawn(move || {
            other[0].store(true, Ordering::SeqCst);
            other[1].load(Ordering::SeqCst)
        });
        flags[1].store(true, Ordering::SeqCst);
        let seen = flags[0].load(Ordering::SeqCst);
        assert!(thread.join().expect("ends") || seen);
    }

    /// A value is written, then a flag.
    fn message() {
        let (cell, flag) = (Arc::new(UnsafeCell::new(0)), Arc::new(AtomicBool::new(false)));
        let (to, ready) = (Arc::clone(&cell), Arc::clone(&flag));
        let thread = spawn(move || {
            to.with_mut(|_| ());
            ready.store(true, Ordering::Release);
        });
        if flag.load(Ordering::Acquire) {
            cell.with(|_| ());
        }
        thread.join().expect("ends");
    }

    /// One waits until the other calls.
    fn call() {
        let called = Arc::new((Mutex::new(false), Condvar::new()));
        let caller = Arc::clone(&called);
        let thread = spawn(move || {
            *caller.0.lock().expect("no panic") = true;
            caller.1.notify_all();
        });
        let waits = |called: &mut bool| !*called;
        let guard = called.0.lock().expect("no panic");
        let (guard, time) = called.1.wait_timeout_while(guard, Duration::ZERO, waits).expect("no panic");
        assert!(*guard && !time.timed_out());
        drop(guard);
        thread.join().expect("ends");
    }

    #[test]
    fn each_fault_is_found_where_it_matters() {
        check(2, both_look);
        check(2, message);
        assert!(finds(Seed::NoTotalOrder, 2, both_look));
        assert!(finds(Seed::Relaxed, 2, message));
        assert!(!finds(Seed::NoTotalOrder, 2, message));
        check(2, call);
        assert!(finds(Seed::LostWakes, 2, call));
        assert!(!finds(Seed::Relaxed, 2, call));
    }
}
