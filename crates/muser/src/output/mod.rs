//! What a person sees: where messages go, in which voice, and what a process says when it ends.
//!
//! Voice: one sentence, no final full stop, the fault named first, a `hint:` line below when there is something to do.
//! Text that comes from files or from a model never reaches a terminal with its control characters.

mod console;
mod failure;
mod progress;

pub use console::{Console, sanitize};
pub use failure::{EXIT_INTERRUPTED, HintExt, abandon, exit_code, interrupted, usage_error};
pub use progress::Progress;

use std::io::{self, Write, stderr};

use crate::cli::GlobalArgs;
use crate::env_vars;

/// Sends the libraries' logs to standard error: `MUSER_LOG` decides, else `-v` (info) and `-vv` (debug). With `json`
/// each line is an object with its time, for programs.
pub fn start_logging(global: &GlobalArgs, console: &Console, json: bool) {
    let level = match (global.quiet, global.verbose) {
        (true, _) => "error",
        (false, 0) => "warn",
        (false, 1) => "info",
        (false, _) => "debug",
    };
    let filter = tracing_subscriber::EnvFilter::try_from_env(env_vars::MUSER_LOG)
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(level));
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| Unfailing(stderr()))
        // Else a line that cannot be written is said on standard error, by a macro that panics when that cannot be written.
        .log_internal_errors(false)
        .with_ansi(console.color());
    if json {
        let _ = subscriber.json().try_init();
        return;
    }
    let subscriber = subscriber.without_time().with_target(false);
    // Only a second subscriber in one process can fail here, and then the first one does the work.
    let _ = subscriber.try_init();
}

/// Writes what can be written: a log whose reader has gone, or whose disk is full, must not fail what it tells of.
struct Unfailing<W>(W);

impl<W: Write> Write for Unfailing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.0.write(bytes) {
            Ok(0) | Err(_) => Ok(bytes.len()),
            written => written,
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        let _ = self.0.flush();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Broken(io::ErrorKind);

    impl Write for Broken {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(self.0.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Err(self.0.into())
        }
    }

    #[test]
    fn what_cannot_be_written_is_dropped() {
        for kind in [io::ErrorKind::BrokenPipe, io::ErrorKind::StorageFull, io::ErrorKind::WouldBlock] {
            let mut log = Unfailing(Broken(kind));
            assert!(log.write_all(b"a line").is_ok() && log.flush().is_ok(), "{kind}");
        }
        let mut kept = Unfailing(Vec::new());
        assert!(kept.write_all(b"a line").is_ok());
        assert_eq!(kept.0, b"a line");
    }
}
