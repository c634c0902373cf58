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
        .with_writer(std::io::stderr)
        .with_ansi(console.color());
    if json {
        let _ = subscriber.json().try_init();
        return;
    }
    let subscriber = subscriber.without_time().with_target(false);
    // Only a second subscriber in one process can fail here, and then the first one does the work.
    let _ = subscriber.try_init();
}
