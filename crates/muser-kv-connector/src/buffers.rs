//! Memory between store and engine: bounded, and used again, since fresh pages cost as much as the copy into them.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How often a thread that waits for memory looks whether it is still wanted.
const LOOK: Duration = Duration::from_millis(10);
/// Buffers that are kept when none is in use.
const MOST_SPARE: usize = 4;

#[derive(Debug, Default)]
struct State {
    bytes_out: usize,
    spare: Vec<Vec<u8>>,
}

/// The buffers.
#[derive(Debug)]
pub(crate) struct Buffers {
    state: Mutex<State>,
    returned: Condvar,
    limit_bytes: usize,
}

/// One buffer; goes back when it is dropped.
#[derive(Debug)]
pub(crate) struct Buffer {
    pub(crate) bytes: Vec<u8>,
    home: Arc<Buffers>,
}

impl Buffers {
    pub(crate) fn new(limit_bytes: usize) -> Arc<Self> {
        Arc::new(Self { state: Mutex::default(), returned: Condvar::new(), limit_bytes })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for `len` bytes; `None` when `given_up` says so first. One buffer is to be had whatever its size.
    pub(crate) fn take(self: &Arc<Self>, len: usize, given_up: impl Fn() -> bool) -> Option<Buffer> {
        let mut state = self.lock();
        loop {
            if given_up() {
                return None;
            }
            if state.bytes_out == 0 || state.bytes_out + len <= self.limit_bytes {
                break;
            }
            let waited = self.returned.wait_timeout(state, LOOK);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        state.bytes_out += len;
        // Of the same size if there is one: the groups differ.
        let at = state.spare.iter().position(|spare| spare.capacity() >= len);
        let mut bytes = at.map(|at| state.spare.swap_remove(at)).unwrap_or_default();
        drop(state);
        bytes.resize(len, 0);
        Some(Buffer { bytes, home: Arc::clone(self) })
    }

    /// Bytes in use.
    #[cfg(test)]
    pub(crate) fn bytes_out(&self) -> usize {
        self.lock().bytes_out
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        let mut state = self.home.lock();
        state.bytes_out -= bytes.len();
        state.spare.push(bytes);
        if state.bytes_out == 0 {
            // Between restores a few will do.
            state.spare.truncate(MOST_SPARE);
        }
        drop(state);
        self.home.returned.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    use super::*;

    #[test]
    fn many_threads_together_stay_within_the_limit() {
        let buffers = Buffers::new(1000);
        let most = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (buffers, most) = (&buffers, &most);
                scope.spawn(move || {
                    for i in 0..200 {
                        let buffer = buffers.take(100 + (i * 37 + thread) % 300, || false).expect("wanted");
                        assert!(buffer.as_ref().len() >= 100);
                        most.fetch_max(buffers.bytes_out(), SeqCst);
                    }
                });
            }
        });
        assert!((100..=1000).contains(&most.into_inner()));
        assert_eq!(buffers.bytes_out(), 0);
        assert!(buffers.lock().spare.len() <= MOST_SPARE);
    }

    #[test]
    fn one_that_is_larger_than_all_is_had_alone_and_who_gives_up_waits_no_longer() {
        let buffers = Buffers::new(10);
        let large = buffers.take(5000, || false).expect("alone");
        assert!(buffers.take(1, || true).is_none());
        let looks = AtomicUsize::new(0);
        assert!(
            buffers.take(1, || looks.fetch_add(1, SeqCst) > 2).is_none(),
            "no room while the large one is out"
        );
        drop(large);
        assert!(buffers.take(1, || false).is_some());
    }
}
