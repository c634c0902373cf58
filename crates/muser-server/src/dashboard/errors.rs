//! Refused requests by status and code, of the last hour and in all.
//!
//! Codes are words of this crate and not of clients, so there are a few dozen pairs at most.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Minutes that are remembered one by one.
const MINUTES: u64 = 60;

/// The counters.
#[derive(Debug)]
pub struct Errors {
    begun: Instant,
    by_code: Mutex<BTreeMap<(u16, &'static str), OfCode>>,
}

#[derive(Debug, Clone, Copy)]
struct OfCode {
    total: u64,
    last: Instant,
    /// The minute that `minutes` was last written for.
    minute: u64,
    minutes: [u32; MINUTES as usize],
}

/// One status and code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ErrorCount {
    /// The status.
    pub status: u16,
    /// The code.
    pub code: &'static str,
    /// In the last hour, to the minute.
    pub last_hour: u64,
    /// Since the start.
    pub total: u64,
    /// Seconds since the last one.
    pub seconds_ago: u64,
}

impl Default for Errors {
    fn default() -> Self {
        Self { begun: Instant::now(), by_code: Mutex::default() }
    }
}

impl Errors {
    /// Counts one.
    pub fn count(&self, status: u16, code: &'static str, now: Instant) {
        let minute = self.minute(now);
        let mut by_code = self.lock();
        let of_code = by_code.entry((status, code)).or_insert(OfCode {
            total: 0,
            last: now,
            minute,
            minutes: [0; MINUTES as usize],
        });
        of_code.roll(minute);
        of_code.minutes[(minute % MINUTES) as usize] += 1;
        of_code.total += 1;
        of_code.last = now;
    }

    /// All of them, the most of the last hour first.
    pub fn list(&self, now: Instant) -> Vec<ErrorCount> {
        let minute = self.minute(now);
        let mut list: Vec<ErrorCount> = self
            .lock()
            .iter_mut()
            .map(|((status, code), of_code)| {
                of_code.roll(minute);
                ErrorCount {
                    status: *status,
                    code,
                    last_hour: of_code.minutes.iter().map(|count| u64::from(*count)).sum(),
                    total: of_code.total,
                    seconds_ago: now.saturating_duration_since(of_code.last).as_secs(),
                }
            })
            .collect();
        list.sort_by_key(|error| (std::cmp::Reverse((error.last_hour, error.total)), error.status));
        list
    }

    /// All, and those that were the server's fault.
    pub fn totals(&self) -> (u64, u64) {
        self.lock().iter().fold((0, 0), |(all, own), ((status, _), of_code)| {
            (all + of_code.total, own + if *status >= 500 { of_code.total } else { 0 })
        })
    }

    fn minute(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.begun).as_secs() / 60
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<(u16, &'static str), OfCode>> {
        self.by_code.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OfCode {
    /// Forgets what is an hour old.
    fn roll(&mut self, minute: u64) {
        let gone = minute.saturating_sub(self.minute).min(MINUTES);
        for passed in 1..=gone {
            self.minutes[((self.minute + passed) % MINUTES) as usize] = 0;
        }
        self.minute = self.minute.max(minute);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn an_hour_forgets_and_the_total_does_not() {
        let errors = Errors::default();
        let at = |minutes: u64| errors.begun + Duration::from_secs(60 * minutes);
        let hour = |now| {
            let list = errors.list(now);
            list.iter().map(|error| (error.status, error.last_hour, error.total)).collect::<Vec<_>>()
        };
        assert_eq!(hour(at(0)), []);
        errors.count(400, "invalid_value", at(0));
        errors.count(400, "invalid_value", at(0));
        errors.count(503, "unavailable", at(30));
        errors.count(400, "invalid_value", at(59));
        assert_eq!(hour(at(59)), [(400, 3, 3), (503, 1, 1)]);
        // The first two are an hour old.
        assert_eq!(hour(at(60)), [(400, 1, 3), (503, 1, 1)]);
        assert_eq!(hour(at(95)), [(400, 1, 3), (503, 0, 1)]);
        assert_eq!(hour(at(100_000)), [(400, 0, 3), (503, 0, 1)]);
        errors.count(503, "unavailable", at(100_001));
        assert_eq!(hour(at(100_002)), [(503, 1, 2), (400, 0, 3)]);
        assert_eq!(errors.totals(), (5, 2));
        assert_eq!(errors.list(at(100_003))[0].seconds_ago, 120);
    }
}
