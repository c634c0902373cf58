//! Times counted in buckets that grow by a fixed ratio, so that a quantile of any span is known within that ratio.
//!
//! One counter a bucket and no lock: many connections record, one reader copies. Two copies subtracted are what came between.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Buckets; the last one has no upper bound.
const BUCKETS: usize = 65;
/// Upper bound of the first bucket in seconds.
const FIRST_S: f64 = 0.000_25;
/// Buckets for each doubling: bounds are 26 % apart.
const PER_DOUBLING: f64 = 3.0;

/// Counters of times that anybody writes.
#[derive(Debug)]
pub struct Digest([AtomicU32; BUCKETS]);

impl Default for Digest {
    fn default() -> Self {
        Self(std::array::from_fn(|_| AtomicU32::new(0)))
    }
}

impl Digest {
    /// Counts a time.
    pub fn record(&self, time: Duration) {
        self.0[bucket(time.as_secs_f64())].fetch_add(1, Ordering::Relaxed);
    }

    /// The counters now.
    pub fn counts(&self) -> Counts {
        Counts(std::array::from_fn(|at| self.0[at].load(Ordering::Relaxed)))
    }
}

fn bucket(seconds: f64) -> usize {
    let place = (seconds.max(f64::MIN_POSITIVE) / FIRST_S).log2() * PER_DOUBLING;
    (place.ceil().max(0.0) as usize).min(BUCKETS - 1)
}

fn upper_s(bucket: usize) -> f64 {
    FIRST_S * (bucket as f64 / PER_DOUBLING).exp2()
}

/// The counters at one moment, or those of a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts([u32; BUCKETS]);

impl Default for Counts {
    fn default() -> Self {
        Self([0; BUCKETS])
    }
}

impl Counts {
    /// What came since `earlier`. Counters go round after four thousand million times, which no hour has.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self(std::array::from_fn(|at| self.0[at].wrapping_sub(earlier.0[at])))
    }

    /// How many times.
    pub fn count(&self) -> u64 {
        self.0.iter().map(|count| u64::from(*count)).sum()
    }

    /// The time in seconds that a share `q` of all times does not exceed; within its bucket by the share of the bucket that it
    /// takes. Nothing where nothing was counted.
    pub fn quantile_s(&self, q: f64) -> Option<f64> {
        let total = self.count();
        let rank = (q.clamp(0.0, 1.0) * total as f64).max(f64::MIN_POSITIVE);
        let mut below = 0.0;
        for (at, count) in self.0.iter().enumerate().filter(|(_, count)| **count > 0) {
            let here = f64::from(*count);
            if below + here >= rank {
                // Longer than the last bound: all that is known.
                let inside = if at == BUCKETS - 1 { 0.0 } else { (rank - below) / here };
                return Some(upper_s(at) * ((inside - 1.0) / PER_DOUBLING).exp2());
            }
            below += here;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(times_ms: impl IntoIterator<Item = u64>) -> Counts {
        let digest = Digest::default();
        times_ms.into_iter().for_each(|ms| digest.record(Duration::from_millis(ms)));
        digest.counts()
    }

    #[test]
    fn quantiles_are_right_within_a_bucket() {
        let check = |times: Vec<u64>, q: f64, exact_ms: f64| {
            let found = 1e3 * of(times).quantile_s(q).expect("times were counted");
            assert!(
                (found / exact_ms).ln().abs() <= 2_f64.ln() / PER_DOUBLING,
                "{q}: {found} for {exact_ms}"
            );
        };
        check((1..=1000).collect(), 0.5, 500.0);
        check((1..=1000).collect(), 0.95, 950.0);
        check(vec![20; 99].into_iter().chain([4000]).collect(), 0.5, 20.0);
        check(vec![20; 99].into_iter().chain([4000]).collect(), 1.0, 4000.0);
        check(vec![7], 0.95, 7.0);
    }

    #[test]
    fn the_ends_have_buckets_too() {
        assert_eq!(of([]).quantile_s(0.5), None);
        assert!(of([0]).quantile_s(0.5).is_some_and(|found| found <= FIRST_S));
        let hours = of([10_000_000]).quantile_s(0.5).expect("counted");
        assert!((400.0..1000.0).contains(&hours), "{hours}");
    }

    #[test]
    fn a_span_is_a_difference() {
        let digest = Digest::default();
        digest.record(Duration::from_secs(5));
        let before = digest.counts();
        digest.record(Duration::from_millis(10));
        let span = digest.counts().since(&before);
        assert_eq!(span.count(), 1);
        assert!(span.quantile_s(0.95).is_some_and(|found| found < 0.02));
    }
}
