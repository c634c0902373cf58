//! What a step and a draft cost by their number of rows, learnt from the engine's own timings.
//!
//! A curve has two parts. The *shape*, relative costs by row count, belongs to kernels and model and hardly changes; each
//! row count that was seen keeps its last few figures, and their median counts. The *scale* follows everything that makes
//! all steps slower or faster together: a longer context, a busy machine, a hot processor. Figures are taken relative to
//! the scale, so a row count that was last seen long ago is still comparable. One figure, however wild, moves neither.

use std::time::Duration;

/// Row counts beyond this are taken for it.
const MOST_ROWS: usize = 512;
/// Figures kept per row count.
const KEPT: usize = 7;
/// Cost of one more row as a share of the step's, where nothing better is known.
const UNKNOWN_ROW: f64 = 0.08;
/// How fast the scale follows.
const FOLLOW: f64 = 0.2;
/// A figure further off than this (natural logarithm) is a surprise: an accident, unless more of them come in a row.
const SURPRISE: f64 = 0.18;
const NO_ACCIDENT: i8 = 3;
/// Another row count was as expected within so many figures: then a lasting surprise is this row count's own.
const LATELY: u64 = 8;

#[derive(Clone, Copy, Debug, Default)]
struct Point {
    /// Logarithms of costs relative to the scale.
    figures: [f32; KEPT],
    len: u8,
    next: u8,
    /// Value of the clock of figures when the last one came.
    seen_at: u64,
    /// What `figures` say, kept because it is asked for often.
    middle: f32,
}

impl Point {
    fn push(&mut self, figure: f64, at: u64) {
        self.figures[usize::from(self.next)] = figure as f32;
        self.next = (self.next + 1) % KEPT as u8;
        self.len = (self.len + 1).min(KEPT as u8);
        self.seen_at = at;
        let mut sorted = self.figures;
        let sorted = &mut sorted[..usize::from(self.len)];
        sorted.sort_unstable_by(f32::total_cmp);
        // Disturbances only ever make things slower, so of few figures the lowest is nearest to the truth.
        self.middle = if sorted.len() < 3 { sorted[0] } else { sorted[sorted.len() / 2] };
    }
}

/// Cost by number of rows.
#[derive(Clone, Debug)]
pub(crate) struct CostCurve {
    points: Vec<Point>,
    /// Logarithm of seconds.
    scale: f64,
    /// Surprises in a row, in one direction.
    surprises: i8,
    /// Row count and number of the last figure that was none.
    expected: (usize, u64),
    /// Row count of the last figure, and the number of the last one that differed in it from the one before.
    last: (usize, u64),
    figures: u64,
    /// Largest row count seen.
    largest: usize,
}

impl CostCurve {
    pub(crate) fn new() -> Self {
        Self {
            points: vec![Point::default(); MOST_ROWS + 1],
            scale: 0.0,
            surprises: 0,
            expected: (0, 0),
            last: (0, 0),
            figures: 0,
            largest: 0,
        }
    }

    /// `rows` rows took this long. Times that the clock cannot tell from nothing are left out.
    pub(crate) fn note(&mut self, rows: usize, took: Duration) {
        let rows = rows.min(MOST_ROWS);
        if rows == 0 || took.is_zero() {
            return;
        }
        let cost = took.as_secs_f64().ln();
        if self.figures == 0 {
            self.scale = cost - self.shape(rows).ln();
        }
        self.figures += 1;
        self.largest = self.largest.max(rows);
        if self.last.0 != rows {
            self.last = (rows, self.figures);
        }
        let known = usize::from(self.points[rows].len);
        // A new row count says nothing about the scale, only about the shape.
        if known > 0 {
            let error = cost - self.scale - self.shape(rows).ln();
            if error.abs() <= SURPRISE {
                self.surprises = 0;
                self.expected = (rows, self.figures);
                self.scale += FOLLOW * error;
            } else if known >= 3 {
                let same = if error > 0.0 { self.surprises.max(0) } else { self.surprises.min(0) };
                self.surprises = same + if error > 0.0 { 1 } else { -1 };
                if self.surprises.abs() < NO_ACCIDENT {
                    return;
                }
                self.surprises = 0;
                let (other, at) = self.expected;
                if other != rows && self.figures - at <= LATELY {
                    self.points[rows].len = 0;
                    self.points[rows].next = 0;
                } else {
                    self.scale += error;
                }
            }
        }
        // While nothing else runs, there is nothing to compare with: what changes then is the scale.
        if known < KEPT || self.figures - self.last.1 <= LATELY {
            self.points[rows].push(cost - self.scale, self.figures);
        } else {
            self.points[rows].seen_at = self.figures;
        }
    }

    /// Seconds that `rows` rows will take; `None` before anything was measured.
    pub(crate) fn estimate(&self, rows: usize) -> Option<f64> {
        (self.figures > 0).then(|| self.scale.exp() * self.shape(rows.min(MOST_ROWS)))
    }

    /// Figures taken so far, of any row count.
    pub(crate) fn figures(&self) -> u64 {
        self.figures
    }

    /// Largest row count of which there are figures.
    pub(crate) fn largest(&self) -> usize {
        self.largest
    }

    /// Figures kept of this row count, and how many figures of others have come since.
    pub(crate) fn known(&self, rows: usize) -> (usize, u64) {
        let point = &self.points[rows.min(MOST_ROWS)];
        (usize::from(point.len), self.figures - point.seen_at)
    }

    /// Cost relative to the scale: measured, or by a straight line through what was measured.
    fn shape(&self, rows: usize) -> f64 {
        let value = |rows: usize| f64::from(self.points[rows].middle).exp();
        if self.points[rows].len > 0 {
            return value(rows);
        }
        let mut below = (1..rows).rev().filter(|&rows| self.points[rows].len > 0);
        let (low, lower) = (below.next(), below.next());
        let high = (rows + 1..=MOST_ROWS).find(|&rows| self.points[rows].len > 0);
        let line = |a: usize, b: usize, slope: f64| value(a) + (b as f64 - a as f64) * slope;
        match (lower, low, high) {
            (_, Some(a), Some(b)) => line(a, rows, (value(b) - value(a)) / (b - a) as f64),
            (Some(a), Some(b), None) => {
                let slope = (value(b) - value(a)) / (b - a) as f64;
                line(b, rows, slope.max(value(b) * UNKNOWN_ROW / 8.0))
            }
            (None, Some(a), None) => line(a, rows, value(a) * UNKNOWN_ROW),
            (_, None, Some(b)) => value(b) / (1.0 + (b - rows) as f64 * UNKNOWN_ROW),
            (_, None, None) => 1.0 + (rows.max(1) - 1) as f64 * UNKNOWN_ROW,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(found: Option<f64>, expected: f64, share: f64) {
        let found = found.expect("something was measured");
        assert!((found / expected - 1.0).abs() < share, "{found}, expected {expected}");
    }

    fn milliseconds(x: f64) -> Duration {
        Duration::from_secs_f64(x * 1e-3)
    }

    #[test]
    fn lines_lie_between_and_beyond_what_was_measured() {
        let mut curve = CostCurve::new();
        assert_eq!(curve.estimate(1), None);
        curve.note(1, milliseconds(10.0));
        near(curve.estimate(1), 0.010, 1e-6);
        near(curve.estimate(3), 0.010 * (1.0 + 2.0 * UNKNOWN_ROW), 1e-6);
        curve.note(5, milliseconds(14.0));
        near(curve.estimate(5), 0.014, 1e-4);
        near(curve.estimate(3), 0.012, 1e-4);
        near(curve.estimate(7), 0.016, 1e-4);
        assert_eq!((curve.known(5), curve.known(1), curve.known(2).0), ((1, 0), (1, 1), 0));
        curve.note(4, Duration::ZERO);
        assert_eq!(curve.known(4).0, 0, "the clock did not move");
    }

    #[test]
    fn wild_figures_move_nothing_and_a_change_of_everything_moves_everything() {
        let mut curve = CostCurve::new();
        let mut random = crate::testing::Rng(3);
        let mut noisy = |value: f64| milliseconds(value * (0.97 + 0.06 * random.below(1000) as f64 / 1000.0));
        for i in 0..200 {
            let rows = [1, 4, 4, 4][i % 4];
            let cost = noisy(if rows == 1 { 10.0 } else { 13.0 });
            curve.note(rows, if i % 9 == 8 { cost * 4 } else { cost });
        }
        near(curve.estimate(1), 0.010, 0.08);
        near(curve.estimate(4), 0.013, 0.08);
        // From now on everything takes half as long again, and only four rows are seen: one row follows.
        for _ in 0..40 {
            curve.note(4, noisy(19.5));
        }
        near(curve.estimate(4), 0.0195, 0.05);
        near(curve.estimate(1), 0.015, 0.1);
        // Slow drift, too.
        for i in 0..400 {
            curve.note(4, noisy(19.5 * (1.0 + f64::from(i) / 400.0)));
        }
        near(curve.estimate(1), 0.030, 0.12);
    }
}
