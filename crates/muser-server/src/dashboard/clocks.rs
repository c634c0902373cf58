//! What the server counts for the dashboard beside the metrics: those can be written and not read again.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::digest::Digest;
use super::errors::Errors;

/// The counters of one loaded model.
#[derive(Debug, Default)]
pub struct Clocks {
    /// From arrival to the first token.
    pub first_token: Digest,
    /// Between two tokens.
    pub between: Digest,
    /// Refused requests.
    pub errors: Errors,
    written: AtomicU64,
    finished: AtomicU64,
    failed: AtomicU64,
    read: AtomicU64,
    read_us: AtomicU64,
}

/// The plain counters at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// Tokens given to clients.
    pub written: u64,
    /// Choices that came to their end.
    pub finished: u64,
    /// Answers that ended in an error after the engine had taken them.
    pub failed: u64,
    /// Prompt tokens that were computed for requests whose prompt has been read.
    pub read: u64,
    /// Time that these requests were read, in microseconds.
    pub read_us: u64,
}

fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

impl Clocks {
    /// A prompt has been read, of which so many tokens were computed.
    pub fn started(&self, computed_tokens: u32, took: Duration) {
        add(&self.read, u64::from(computed_tokens));
        add(&self.read_us, took.as_micros().min(u128::from(u64::MAX)) as u64);
    }

    /// The first token of a choice came so long after the request.
    pub fn first(&self, after: Duration) {
        add(&self.written, 1);
        self.first_token.record(after);
    }

    /// A further token came so long after the one before.
    pub fn further(&self, after: Duration) {
        add(&self.written, 1);
        self.between.record(after);
    }

    /// A choice ended.
    pub fn finished(&self) {
        add(&self.finished, 1);
    }

    /// An answer ended in an error.
    pub fn failed(&self) {
        add(&self.failed, 1);
    }

    /// The counters now.
    pub fn counted(&self) -> Counted {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counted {
            written: read(&self.written),
            finished: read(&self.finished),
            failed: read(&self.failed),
            read: read(&self.read),
            read_us: read(&self.read_us),
        }
    }
}
