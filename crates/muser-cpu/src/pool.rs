//! Threads that walk through a step together.
//!
//! A job is one closure that all threads run side by side; inside it they share out items by an atomic counter
//! ([`Worker::share`]) and meet at barriers ([`Worker::barrier`]). Threads are pinned, one to a core; the calling thread
//! takes part as worker 0 and is pinned only while the job runs (else the scheduler may leave it on the core of a worker
//! that spins, and the two take turns). A hand-off is one store that spinning threads
//! see. A thread that waits spins for a while and then parks, at barriers as between jobs: whoever it waits for may have
//! lost its processor to another program, which then moves to the one that the waiting thread leaves.
//!
//! How many of the threads take part is chosen from job to job ([`Pool::run_rows`], [`ThreadCount`]): beside programs that never rest,
//! fewer threads are faster than more that wait for each other.
//!
//! Who gets which item is a race and must never change a result. A panic in a job breaks the barrier for the others
//! and comes back to the caller as an error; the pool stays usable.
#![allow(unsafe_code, reason = "hands a borrowed closure to other threads and waits for them")]

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::PoisonError;
use std::time::Duration;

use crossbeam_utils::CachePadded;

use crate::sync::{
    Arc, AtomicBool, AtomicU32, AtomicUsize, Builder, JoinHandle, Mutex, MutexGuard, Ordering, Thread,
    UnsafeCell, current, now, park, spin, spin_for,
};
use crate::thread_count::ThreadCount;
use crate::topology::{Topology, pin_to};

/// How long a thread without a job spins before it parks.
pub(crate) const SPIN: Duration = Duration::from_micros(300);

/// Another thread of the job panicked; the job must end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Broken;

type Job<'a> = dyn Fn(&Worker<'_>) -> Result<(), Broken> + Sync + 'a;

struct Shared {
    threads: usize,
    /// Turns to spin in a job before parking (2,000 are some 50 µs): few when threads have to take turns on processors.
    spins: u32,
    /// The newest job, see [`epoch_of`]; [`Self::job`] is valid from then until all who take part are done.
    epoch: CachePadded<AtomicUsize>,
    job: UnsafeCell<Option<*const Job<'static>>>,
    /// Workers that have not finished the current job.
    running: CachePadded<AtomicUsize>,
    arrived: CachePadded<AtomicUsize>,
    phase: CachePadded<AtomicU32>,
    next: CachePadded<AtomicUsize>,
    /// Microseconds that threads were parked in the current job, of all together.
    parked_us: AtomicUsize,
    broken: AtomicBool,
    stop: AtomicBool,
    /// Is this thread about to park, or parked? Set before the thread looks a last time at what it waits for; looked at by
    /// others after they have changed that.
    parked: Vec<CachePadded<AtomicBool>>,
    /// The threads, to unpark them: the caller of the current job, then the workers.
    threads_known: Mutex<Vec<Thread>>,
    message: Mutex<Option<String>>,
}

// SAFETY: `job` is written only while no worker runs and read only after the epoch that publishes it.
unsafe impl Sync for Shared {}
// SAFETY: the raw pointer inside is used under the same rule.
unsafe impl Send for Shared {}

/// The pool. Dropping it ends its threads.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    handles: Vec<JoinHandle<()>>,
    /// Processor of worker 0.
    caller: Option<usize>,
    jobs: usize,
    count: ThreadCount,
}

/// Bits of an epoch that say how many threads take part.
const COUNT_BITS: u32 = 11;

/// A job's number and how many threads take part in it: the first so many. In one word, so that whoever is left out knows it, however
/// late he looks.
fn epoch_of(job: usize, threads: usize) -> usize {
    job << COUNT_BITS | threads
}

/// How many threads take part in an epoch's job.
fn threads_of(epoch: usize) -> usize {
    epoch & ((1 << COUNT_BITS) - 1)
}

/// One thread's view of a job.
pub(crate) struct Worker<'a> {
    shared: &'a Shared,
    threads: usize,
    /// 0 to `threads - 1`.
    pub(crate) index: usize,
}

impl Pool {
    /// As many threads as asked for, else as the machine allows; the caller is one of them.
    pub(crate) fn new(threads: Option<usize>) -> std::io::Result<Self> {
        let topology = Topology::detect();
        let threads = threads.unwrap_or(topology.threads).clamp(1, 1024);
        let shared = Arc::new(Shared {
            threads,
            spins: if threads <= topology.processors.len().max(topology.threads) { 4000 } else { 16 },
            epoch: CachePadded::new(AtomicUsize::new(0)),
            job: UnsafeCell::new(None),
            running: CachePadded::new(AtomicUsize::new(0)),
            arrived: CachePadded::new(AtomicUsize::new(0)),
            phase: CachePadded::new(AtomicU32::new(0)),
            next: CachePadded::new(AtomicUsize::new(0)),
            parked_us: AtomicUsize::new(0),
            broken: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            parked: (0..threads).map(|_| CachePadded::new(AtomicBool::new(false))).collect(),
            threads_known: Mutex::new(vec![current()]),
            message: Mutex::new(None),
        });
        // More threads than cores cannot be pinned one to a core.
        let cpus = if threads <= topology.processors.len() { topology.processors } else { Vec::new() };
        let caller = cpus.first().copied().filter(|_| threads > 1);
        let count = ThreadCount::new(threads);
        let mut pool = Self { shared, handles: Vec::new(), caller, jobs: 0, count };
        for index in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let cpu = cpus.get(index).copied();
            let handle = Builder::new().name(format!("muser-cpu-{index}")).spawn(move || {
                if let Some(cpu) = cpu {
                    pin_to(cpu);
                }
                work(&shared, index);
            })?;
            lock(&pool.shared.threads_known).push(handle.thread().clone());
            pool.handles.push(handle);
        }
        Ok(pool)
    }

    /// Number of threads, the caller's included.
    pub(crate) fn threads(&self) -> usize {
        self.shared.threads
    }

    /// Runs `job` on all threads and waits for them. `Err` has the message of a panic.
    pub(crate) fn run<'a>(&mut self, job: &'a Job<'a>) -> Result<(), String> {
        self.run_on(self.shared.threads, job)
    }

    /// Runs `job` on as many threads as are fastest just now. Jobs with equally many rows are taken for equally long; with 0 it is not
    /// looked at how long this one takes.
    pub(crate) fn run_rows<'a>(&mut self, rows: usize, job: &'a Job<'a>) -> Result<(), String> {
        let begun = now();
        let outcome = self.run_on(self.count.threads(), job);
        if rows > 0 && self.shared.threads > 1 {
            let parked = Duration::from_micros(self.shared.parked_us.load(Ordering::Relaxed) as u64);
            self.count.note(rows, begun.elapsed(), parked);
        }
        outcome
    }

    /// Runs `job` on the first so many threads.
    pub(crate) fn run_on<'a>(&mut self, threads: usize, job: &'a Job<'a>) -> Result<(), String> {
        let threads = threads.clamp(1, self.shared.threads);
        let shared = &*self.shared;
        if let Some(caller) = lock(&shared.threads_known).first_mut()
            && caller.id() != current().id()
        {
            *caller = current();
        }
        shared.arrived.store(0, Ordering::Relaxed);
        shared.next.store(0, Ordering::Relaxed);
        shared.broken.store(false, Ordering::Relaxed);
        shared.running.store(threads - 1, Ordering::Relaxed);
        shared.parked_us.store(0, Ordering::Relaxed);
        // SAFETY: the lifetime is only hidden: this function does not return before every worker is done with the job,
        // and no worker reads the cell now, because none is running.
        shared.job.with_mut(|cell| unsafe {
            *cell = Some(std::mem::transmute::<&'a Job<'a>, &'static Job<'static>>(job));
        });
        self.jobs += 1;
        shared.epoch.store(epoch_of(self.jobs, threads), Ordering::SeqCst);
        shared.wake(1..threads);
        // Alone it goes where there is room.
        let pinned = self.caller.filter(|_| threads > 1).map(pin_to);
        run_guarded(&Worker { shared, threads, index: 0 }, job);
        shared.wait(0, || shared.running.load(Ordering::SeqCst) == 0);
        if let Some(pinned) = pinned {
            pinned.undo();
        }
        if shared.broken.load(Ordering::Acquire) {
            let message = lock(&shared.message).take();
            return Err(message.unwrap_or_else(|| "a thread of the pool panicked".into()));
        }
        Ok(())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.epoch.store(epoch_of(self.jobs + 1, self.shared.threads), Ordering::SeqCst);
        self.shared.wake(1..self.shared.threads);
        for handle in self.handles.drain(..) {
            // A worker catches the panics of its jobs, so there is nothing to learn from the result.
            let _ = handle.join();
        }
    }
}

impl Worker<'_> {
    /// Threads of the job.
    pub(crate) fn threads(&self) -> usize {
        self.threads
    }

    /// Calls `f` with items of `0..count` until all have been given out, to any thread. Once per barrier.
    #[inline]
    pub(crate) fn share(&self, count: usize, mut f: impl FnMut(usize)) {
        loop {
            let item = self.shared.next.fetch_add(1, Ordering::Relaxed);
            if item >= count {
                return;
            }
            f(item);
        }
    }

    /// Waits for all threads; what they wrote before is visible after.
    #[inline]
    pub(crate) fn barrier(&self) -> Result<(), Broken> {
        let shared = self.shared;
        let phase = shared.phase.load(Ordering::Relaxed);
        if shared.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.threads {
            shared.arrived.store(0, Ordering::Relaxed);
            shared.next.store(0, Ordering::Relaxed);
            shared.phase.store(phase.wrapping_add(1), Ordering::SeqCst);
            shared.wake(0..self.threads);
            return Ok(());
        }
        let passed = || shared.phase.load(Ordering::SeqCst) != phase;
        shared.wait(self.index, || passed() || shared.broken.load(Ordering::SeqCst));
        if passed() { Ok(()) } else { Err(Broken) }
    }
}

impl Shared {
    /// Waits in a job for what other threads do before they call [`Self::wake`]; `done` reads with `SeqCst`.
    #[inline]
    fn wait(&self, index: usize, done: impl Fn() -> bool) {
        if !spin(self.spins, &done) {
            let begun = now();
            self.park(index, done);
            self.parked_us.fetch_add(begun.elapsed().as_micros() as usize, Ordering::Relaxed);
        }
    }

    #[cold]
    fn park(&self, index: usize, done: impl Fn() -> bool) {
        let parked = &self.parked[index];
        parked.store(true, Ordering::SeqCst);
        let mut slept = false;
        while !done() {
            park();
            slept = true;
        }
        parked.store(false, Ordering::SeqCst);
        if slept && index == 0 {
            // The caller is a thread with a life of its own: it may have been woken for something else while it slept here, and that wish
            // must be there when it sleeps the next time.
            current().unpark();
        }
    }

    /// Unparks those of `threads` that are parked.
    #[inline]
    fn wake(&self, threads: Range<usize>) {
        for index in threads {
            if self.parked[index].load(Ordering::SeqCst) {
                // Unparking somebody who is just leaving does no harm: the next park returns at once and looks again.
                if let Some(thread) = lock(&self.threads_known).get(index) {
                    thread.unpark();
                }
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs one thread's part; a panic is recorded and breaks the barrier.
fn run_guarded(worker: &Worker<'_>, job: &Job<'_>) {
    let shared = worker.shared;
    if let Err(payload) = catch_unwind(AssertUnwindSafe(|| job(worker))) {
        let text = payload
            .downcast_ref::<&str>()
            .map(ToString::to_string)
            .or_else(|| payload.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "a thread of the pool panicked".into());
        lock(&shared.message).get_or_insert(text);
        shared.broken.store(true, Ordering::SeqCst);
        shared.wake(0..worker.threads);
    }
}

fn work(shared: &Shared, index: usize) {
    let mut seen = 0;
    loop {
        seen = wait_for_job(shared, index, seen);
        if shared.stop.load(Ordering::SeqCst) {
            return;
        }
        let threads = threads_of(seen);
        // SAFETY: the epoch that we just saw was published after the cell was written, and the caller keeps the
        // closure alive until `running` is 0.
        let job = shared.job.with(|cell| unsafe { (*cell).map(|job| &*job) });
        if let Some(job) = job {
            run_guarded(&Worker { shared, threads, index }, job);
        }
        if shared.running.fetch_sub(1, Ordering::SeqCst) == 1 {
            shared.wake(0..1);
        }
    }
}

/// Spins, then parks, until there is a job that this thread takes part in and has not seen; returns its epoch, which stays until the
/// thread is done.
fn wait_for_job(shared: &Shared, index: usize, seen: usize) -> usize {
    let is_next = |epoch: usize| epoch != seen && index < threads_of(epoch);
    if spin_for(SPIN, || is_next(shared.epoch.load(Ordering::Acquire))) {
        return shared.epoch.load(Ordering::Acquire);
    }
    shared.park(index, || is_next(shared.epoch.load(Ordering::SeqCst)));
    shared.epoch.load(Ordering::SeqCst)
}
