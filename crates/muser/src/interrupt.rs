//! Ctrl-C as a flag that loops poll, instead of the end of the process.
//!
//! `run` and `chat` want to stop an answer cleanly: cancel the request, finish the line, keep the program (chat) or
//! leave with code 130 (run). Whoever keeps pressing Ctrl-C within one answer means it: the process ends at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Counts presses of Ctrl-C since the last [`Interrupt::reset`].
#[derive(Clone)]
pub struct Interrupt {
    presses: Arc<AtomicU32>,
}

impl Interrupt {
    /// Takes Ctrl-C over from the system for the rest of the process. Without a signal driver (a sandbox without
    /// pipes, say) the system's own behaviour stays: the process ends. Press number `last` always ends it.
    pub fn install(last: u32) -> Self {
        let presses = Arc::new(AtomicU32::new(0));
        let seen = Arc::clone(&presses);
        let listen = move || {
            let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_io().build() else {
                return;
            };
            runtime.block_on(async {
                while tokio::signal::ctrl_c().await.is_ok() {
                    if seen.fetch_add(1, Ordering::SeqCst) + 1 >= last {
                        crate::output::abandon(crate::output::EXIT_INTERRUPTED);
                    }
                }
            });
        };
        // A thread that cannot start leaves the system's behaviour in place, which is a fair fallback.
        let _ = std::thread::Builder::new().name("interrupt".into()).spawn(listen);
        Self { presses }
    }

    /// Was Ctrl-C pressed since the last reset?
    pub fn pressed(&self) -> bool {
        self.presses.load(Ordering::SeqCst) > 0
    }

    /// Forgets earlier presses, before the next answer begins.
    pub fn reset(&self) {
        self.presses.store(0, Ordering::SeqCst);
    }
}
