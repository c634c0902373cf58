//! How many prefill rows a step may have, by measured time.
//!
//! A step cannot be interrupted: while it runs nobody decodes and no cancellation takes effect. So its length is bounded
//! in time, not in rows: hundreds of rows are milliseconds on a card and a minute on a small processor. Chunk sizes never
//! change a bit of any result, so they may follow the clock.

use std::time::Duration;

/// Rows of the first step, before anything was measured, and the fewest that a bound in time leaves.
const FEWEST_ROWS: usize = 64;

/// The measured cost of a prefill row.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    seconds_per_row: Option<f64>,
}

impl Pace {
    /// A step with this many rows took this long. Steps of few rows say nothing about the cost of many.
    pub(crate) fn note(&mut self, rows: usize, took: Duration) {
        if rows >= FEWEST_ROWS / 2 {
            let measured = took.as_secs_f64() / rows as f64;
            let before = self.seconds_per_row.unwrap_or(measured);
            self.seconds_per_row = Some(f64::midpoint(before, measured));
        }
    }

    /// Rows that fit `target`, but at most `most`.
    pub(crate) fn rows_within(&self, target: Duration, most: usize) -> usize {
        let fit = match self.seconds_per_row {
            None => FEWEST_ROWS,
            Some(cost) if cost > 0.0 => (target.as_secs_f64() / cost) as usize,
            Some(_) => most,
        };
        fit.max(FEWEST_ROWS).min(most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_follow_the_measured_cost() {
        let second = Duration::from_secs(1);
        let mut pace = Pace::default();
        assert_eq!(pace.rows_within(second, 512), 64);
        assert_eq!(pace.rows_within(second, 10), 10);
        pace.note(64, Duration::from_millis(64));
        assert_eq!(pace.rows_within(second, 512), 512);
        assert_eq!(pace.rows_within(Duration::from_millis(200), 512), 200);
        // A decode step of 2 rows is slow per row and must not count.
        pace.note(2, second);
        assert_eq!(pace.rows_within(Duration::from_millis(200), 512), 200);
        for _ in 0..20 {
            pace.note(100, Duration::from_secs(10));
        }
        assert_eq!(pace.rows_within(second, 512), 64);
        for _ in 0..40 {
            pace.note(100, Duration::ZERO);
        }
        assert_eq!(pace.rows_within(second, 512), 512);
    }
}
