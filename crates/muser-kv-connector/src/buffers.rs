//! Memory between store and engine: bounded, and used again, since fresh pages cost as much as the copy into them.

use std::time::Duration;

use crate::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// How often a thread that waits for memory looks whether it is still wanted.
const LOOK: Duration = Duration::from_millis(10);
/// Buffers that are kept when none is in use.
pub(crate) const MOST_SPARE: usize = 4;

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
        Arc::new(Self { state: Mutex::new(State::default()), returned: Condvar::new(), limit_bytes })
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

    /// Bytes in use, and buffers that wait to be used again.
    #[cfg(test)]
    pub(crate) fn census(&self) -> (usize, usize) {
        let state = self.lock();
        (state.bytes_out, state.spare.len())
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
