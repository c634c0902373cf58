//! What a step costs, measured, and how many rows of prompts it may therefore have.
//!
//! A step cannot be interrupted: while it runs nobody decodes and no cancellation takes effect. So its length is bounded in
//! time, not in rows: hundreds of rows are milliseconds on a card and a minute on a small processor. Two things make a step
//! long: its rows (with few of them the weights' bytes, then arithmetic; no straight line), and what they attend to. The
//! first is a table by number of rows, the second a factor. Sizes never change a bit of any result, so they may follow the clock.

use std::time::Duration;

/// Rows of the first step, before anything was measured, and the fewest that a bound in time leaves where nobody decodes.
const FEWEST_ROWS: usize = 64;
/// The fewest where somebody does: a prompt goes on, however slow the machine.
const FEWEST_BESIDE: usize = 16;
/// Entries of the table: 1, 2 to 3, 4 to 7, ... rows.
const SIZES: usize = 14;
/// A shorter step must be so much faster a row to be preferred.
const CLEARLY_FASTER: f64 = 1.03;

/// What a step computes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Load {
    pub(crate) rows: usize,
    /// Positions that each row attends to, added up.
    pub(crate) attended: f64,
}

impl Load {
    /// `rows` rows of one sequence behind `depth` positions.
    pub(crate) fn of(rows: usize, depth: usize) -> Self {
        Self { rows, attended: rows as f64 * (depth as f64 + rows as f64 / 2.0) }
    }

    /// Both in one step.
    pub(crate) fn and(self, other: Self) -> Self {
        Self { rows: self.rows + other.rows, attended: self.attended + other.attended }
    }
}

/// Steps of about so many rows, without what attention takes: means that forget.
#[derive(Clone, Copy, Debug, Default)]
struct Point {
    rows: f64,
    seconds: f64,
}

/// The measured cost of steps.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CostModel {
    points: [Option<Point>; SIZES],
    /// Seconds for each position that a row attends to.
    attention: f64,
}

impl CostModel {
    /// A step took this long.
    pub(crate) fn note(&mut self, load: Load, took: Duration) {
        if load.rows == 0 {
            return;
        }
        let took = took.as_secs_f64();
        let size = (load.rows.ilog2() as usize).min(SIZES - 1);
        // Attention is what a step takes beyond others of its size, where its rows lie far deeper than such rows usually do.
        let deep = load.attended > 2048.0 * load.rows as f64;
        if let Some(base) = self.without_attention(load.rows as f64)
            && deep
            && self.points[size].is_some()
        {
            let measured = (took - base).max(0.0) / load.attended;
            self.attention =
                if self.attention > 0.0 { f64::midpoint(self.attention, measured) } else { measured };
            return;
        }
        let new = Point { rows: load.rows as f64, seconds: (took - self.attention * load.attended).max(0.0) };
        let before = self.points[size].unwrap_or(new);
        self.points[size] = Some(Point {
            rows: f64::midpoint(before.rows, new.rows),
            seconds: f64::midpoint(before.seconds, new.seconds),
        });
    }

    /// Seconds of a step of `rows` rows: a line between what was measured below and above; below all of it the smallest,
    /// above all of it as many times the largest.
    fn without_attention(&self, rows: f64) -> Option<f64> {
        let mut below: Option<Point> = None;
        for point in self.points.iter().flatten() {
            if point.rows >= rows {
                return Some(match below {
                    Some(low) if point.rows > low.rows => {
                        let part = (rows - low.rows) / (point.rows - low.rows);
                        low.seconds + (point.seconds - low.seconds) * part
                    }
                    _ => point.seconds,
                });
            }
            below = Some(*point);
        }
        below.map(|point| point.seconds * rows / point.rows)
    }

    /// Have steps of many rows been measured? Those of few say nothing about the cost of many.
    pub(crate) fn knows_many(&self) -> bool {
        self.points[FEWEST_ROWS.ilog2() as usize - 1..].iter().any(Option::is_some)
    }

    /// What a step is expected to take; `None` before anything was measured.
    pub(crate) fn expected(&self, load: Load) -> Option<f64> {
        Some(self.without_attention(load.rows as f64)? + self.attention * load.attended)
    }

    /// Rows of prompts, behind `depth` positions, that fit into a step of `target` beside `beside`; at most `most`.
    pub(crate) fn rows_within(&self, target: Duration, beside: Load, depth: usize, most: usize) -> usize {
        let fewest = if beside.rows > 0 { FEWEST_BESIDE } else { FEWEST_ROWS };
        let fit = if self.knows_many() {
            let fits = |rows: usize| {
                let load = beside.and(Load::of(rows, depth));
                self.expected(load).is_none_or(|seconds| seconds <= target.as_secs_f64())
            };
            let (mut fits_up_to, mut too_many) = (0, most + 1);
            while too_many - fits_up_to > 1 {
                let rows = usize::midpoint(fits_up_to, too_many);
                if fits(rows) {
                    fits_up_to = rows;
                } else {
                    too_many = rows;
                }
            }
            fits_up_to
        } else {
            FEWEST_ROWS
        };
        fit.max(fewest).min(most)
    }

    /// The same where nobody decodes; fewer where steps of fewer rows are clearly faster a row.
    pub(crate) fn rows_alone(&self, target: Duration, depth: usize, most: usize) -> usize {
        let fit = self.rows_within(target, Load::default(), depth, most);
        let rate = |point: &Point| point.rows / point.seconds.max(1e-9);
        let measured =
            self.points.iter().flatten().filter(|p| p.rows >= FEWEST_ROWS as f64 && p.rows <= fit as f64);
        let Some(largest) = measured.clone().next_back() else { return fit };
        let best = measured.max_by(|a, b| rate(a).total_cmp(&rate(b)));
        // Only where the long step has been tried.
        match best.filter(|_| largest.rows > fit as f64 * 0.75) {
            Some(best) if rate(best) > rate(largest) * CLEARLY_FASTER => best.rows.round() as usize,
            _ => fit,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn ms(ms: f64) -> Duration {
        Duration::from_secs_f64(ms / 1e3)
    }

    #[test]
    fn rows_follow_the_measured_cost() {
        let mut cost = CostModel::default();
        let alone = |cost: &CostModel, target, most| cost.rows_within(target, Load::default(), 0, most);
        assert_eq!(alone(&cost, SECOND, 512), 64);
        assert_eq!(alone(&cost, SECOND, 10), 10);
        cost.note(Load::of(64, 0), ms(64.0));
        assert_eq!(alone(&cost, SECOND, 512), 512);
        assert_eq!(alone(&cost, ms(200.0), 512), 200);
        // A step of 2 rows is slow per row and says nothing about many.
        cost.note(Load::of(2, 0), ms(60.0));
        assert_eq!(alone(&cost, ms(200.0), 512), 200);
        for _ in 0..20 {
            cost.note(Load::of(100, 0), SECOND * 10);
        }
        assert_eq!(alone(&cost, SECOND, 512), 64);
        for _ in 0..60 {
            cost.note(Load::of(100, 0), Duration::ZERO);
        }
        assert_eq!(alone(&cost, SECOND, 512), 512);
    }

    /// A card: flat to 16 rows, then a step, then a slope. What stands in `docs/kernels-cuda.md`, rounded.
    fn card() -> CostModel {
        let mut cost = CostModel::default();
        for (rows, took) in
            [(1, 4.9), (16, 6.5), (32, 8.9), (64, 12.0), (128, 19.0), (256, 34.0), (512, 62.0), (2048, 250.0)]
        {
            cost.note(Load::of(rows, 0), ms(took));
        }
        cost
    }

    #[test]
    fn a_mixed_step_takes_what_the_target_leaves() {
        let cost = card();
        // 34 ms at 256 rows and 62 at 512: 50 ms lie at 402.
        assert_eq!(cost.rows_within(ms(50.0), Load::of(1, 0), 0, 2048), 401);
        assert_eq!(cost.rows_within(ms(50.0), Load { rows: 64, attended: 0.0 }, 0, 2048), 338);
        // A prompt goes on where even decoding takes longer than the target.
        assert_eq!(cost.rows_within(ms(3.0), Load::of(1, 0), 0, 2048), 16);
        assert_eq!(cost.rows_within(ms(3.0), Load::default(), 0, 2048), 64);
    }

    #[test]
    fn depth_costs_what_it_was_measured_to_cost() {
        let mut cost = card();
        let shallow = cost.rows_within(ms(100.0), Load::default(), 0, 2048);
        // 512 rows at a depth of 30,000 took twice as long.
        let deep = Load::of(512, 30_000);
        for _ in 0..10 {
            cost.note(deep, ms(124.0));
        }
        let expected = cost.expected(deep).expect("measured");
        assert!((expected - 0.124).abs() < 1e-3, "{expected}");
        let now = cost.rows_within(ms(100.0), Load::default(), 0, 2048);
        assert!(now < shallow && now > shallow - 20, "a prompt attends to itself a little: {shallow}, {now}");
        let rows = cost.rows_within(ms(100.0), Load::default(), 30_000, 2048);
        assert!((390..=420).contains(&rows), "{rows}");
    }

    #[test]
    fn an_idle_device_takes_the_size_that_is_fastest_a_row() {
        let mut cost = card();
        // 2,048 rows at 8.19 rows a ms, 512 at 8.26: not clearly faster.
        assert_eq!(cost.rows_alone(SECOND, 0, 2048), 2048);
        cost.note(Load::of(1024, 0), ms(119.0));
        assert_eq!(cost.rows_alone(SECOND, 0, 2048), 1024);
        // Nobody has tried the long step yet.
        let mut cost = CostModel::default();
        cost.note(Load::of(64, 0), ms(12.0));
        assert_eq!(cost.rows_alone(SECOND, 0, 2048), 2048);
    }
}
