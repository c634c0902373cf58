//! What a pull tells while it runs: bytes, rate, time left.

use std::time::{Duration, Instant};

/// What a pull is doing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Hashing what an earlier pull left.
    Checking,
    /// Waiting for the server's answer.
    Connecting,
    /// Bytes are coming.
    Downloading,
    /// Waiting before another attempt, for this reason.
    Waiting {
        /// What the last attempt said.
        reason: String,
        /// How long.
        wait: Duration,
    },
}

/// A state of a pull.
#[derive(Clone, Debug)]
pub struct Progress {
    /// What it is doing.
    pub phase: Phase,
    /// Bytes that are there (while [`Phase::Checking`]: bytes hashed).
    pub bytes: u64,
    /// Size of the file, once known.
    pub total: Option<u64>,
    /// Bytes per second over the last few seconds; 0 before the first were seen.
    pub rate_bytes_s: f64,
    /// Time left at that rate.
    pub left: Option<Duration>,
}

/// Rate over a sliding window of a few seconds.
pub(crate) struct Meter {
    window: Duration,
    /// Times and byte counts, oldest first, at most one every tenth of a second.
    marks: std::collections::VecDeque<(Instant, u64)>,
}

impl Meter {
    pub(crate) fn new() -> Self {
        Self { window: Duration::from_secs(5), marks: std::collections::VecDeque::new() }
    }

    /// Forgets everything, when bytes went backwards or a pause lies between.
    pub(crate) fn reset(&mut self) {
        self.marks.clear();
    }

    /// Notes a byte count; returns bytes per second.
    pub(crate) fn rate(&mut self, now: Instant, bytes: u64) -> f64 {
        while self.marks.len() > 2
            && self.marks.front().is_some_and(|m| now.duration_since(m.0) > self.window)
        {
            self.marks.pop_front();
        }
        let rate = match self.marks.front() {
            Some(&(then, before)) if now > then => {
                bytes.saturating_sub(before) as f64 / now.duration_since(then).as_secs_f64()
            }
            _ => 0.0,
        };
        if self.marks.back().is_none_or(|m| now.duration_since(m.0) >= Duration::from_millis(100)) {
            self.marks.push_back((now, bytes));
        }
        rate
    }
}

impl Progress {
    pub(crate) fn new(phase: Phase, bytes: u64, total: Option<u64>, rate_bytes_s: f64) -> Self {
        let left = match total {
            Some(total) if rate_bytes_s >= 1.0 => {
                Duration::try_from_secs_f64(total.saturating_sub(bytes) as f64 / rate_bytes_s).ok()
            }
            _ => None,
        };
        Self { phase, bytes, total, rate_bytes_s, left }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_steady_stream_shows_its_rate_and_time_left() {
        let mut meter = Meter::new();
        let start = Instant::now();
        let mut rate = 0.0;
        for tick in 0..=400_u64 {
            rate = meter.rate(start + Duration::from_millis(50 * tick), 1_000 * tick);
        }
        assert!((rate - 20_000.0).abs() < 1.0, "{rate}");
        let progress = Progress::new(Phase::Downloading, 400_000, Some(600_000), rate);
        assert!((progress.left.unwrap().as_secs_f64() - 10.0).abs() < 0.01);
        // A change of pace shows within the window.
        for tick in 1..=120_u64 {
            rate = meter.rate(start + Duration::from_millis(20_000 + 50 * tick), 400_000 + 4_000 * tick);
        }
        assert!((rate - 80_000.0).abs() < 2_000.0, "{rate}");
        assert_eq!(Progress::new(Phase::Connecting, 0, Some(5), 0.0).left, None);
    }
}
