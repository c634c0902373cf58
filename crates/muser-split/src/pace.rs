//! Into how many groups a step is cut: tried, measured, and chosen by what took the least time. No choice changes a bit of a result.

use std::time::Duration;

/// Into how many groups steps are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grouping {
    /// What takes the least time, by steps of about as many rows.
    Measured,
    /// So many (or as many as there are rows); for tests and measurements.
    Fixed(usize),
}

/// Numbers of groups that are tried.
const CHOICES: [usize; 4] = [1, 2, 4, 8];
/// Steps that a choice is tried for; the first one, which sizes buffers, does not count.
const TRIALS: u32 = 4;
/// Every so many steps another choice than the best is tried again: contexts grow, other programs come and go.
const AGAIN: u32 = 256;
/// Weight of the newest time, unless the others are older than so many steps.
const NEWEST: f64 = 0.25;
const OLD: u32 = AGAIN / 2;

/// What is known of steps of about the same size.
#[derive(Clone, Copy, Debug, Default)]
struct Class {
    steps: u32,
    tried: [u32; CHOICES.len()],
    /// The step that it was last taken for.
    last: [u32; CHOICES.len()],
    /// Seconds a row.
    cost: [f64; CHOICES.len()],
}

/// The choice, and what it is made by.
#[derive(Debug)]
pub(crate) struct Pace {
    grouping: Grouping,
    /// By the binary logarithm of the rows.
    classes: [Class; 20],
}

impl Pace {
    pub(crate) fn new(grouping: Grouping) -> Self {
        Self { grouping, classes: Default::default() }
    }

    /// Groups of the next step.
    pub(crate) fn choose(&self, rows: usize) -> usize {
        match self.grouping {
            Grouping::Fixed(count) => count.min(rows),
            Grouping::Measured => {
                let allowed = CHOICES.iter().take_while(|count| **count <= rows).count().max(1);
                CHOICES[self.classes[class_of(rows)].choose(allowed)]
            }
        }
    }

    /// A step has taken so long.
    pub(crate) fn note(&mut self, rows: usize, count: usize, time: Duration) {
        let Some(choice) = CHOICES.iter().position(|choice| *choice == count) else { return };
        self.classes[class_of(rows)].note(choice, time.as_secs_f64() / rows.max(1) as f64);
    }
}

fn class_of(rows: usize) -> usize {
    (rows.max(1).ilog2() as usize).min(19)
}

impl Class {
    /// Among the first `allowed` choices.
    fn choose(&self, allowed: usize) -> usize {
        if let Some(new) = (0..allowed).find(|choice| self.tried[*choice] < TRIALS) {
            return new;
        }
        let best = (0..allowed).min_by(|a, b| self.cost[*a].total_cmp(&self.cost[*b])).unwrap_or(0);
        if allowed > 1 && self.steps.is_multiple_of(AGAIN) {
            // One of the others, each in its turn.
            let turn = (self.steps / AGAIN) as usize % (allowed - 1);
            return (best + 1 + turn) % allowed;
        }
        best
    }

    fn note(&mut self, choice: usize, cost: f64) {
        self.steps = self.steps.wrapping_add(1);
        let tried = &mut self.tried[choice];
        let is_new = *tried < 2 || self.steps.wrapping_sub(self.last[choice]) > OLD;
        let known = &mut self.cost[choice];
        *known = if is_new { cost } else { *known + NEWEST * (cost - *known) };
        self.last[choice] = self.steps;
        *tried = tried.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps of `rows` rows on parts whose time `cost` gives for a number of groups; how often each number was chosen.
    fn play(pace: &mut Pace, rows: usize, steps: usize, cost: impl Fn(usize) -> f64) -> [usize; 4] {
        let mut chosen = [0; 4];
        for _ in 0..steps {
            let count = pace.choose(rows);
            chosen[CHOICES.iter().position(|choice| *choice == count).expect("a choice")] += 1;
            pace.note(rows, count, Duration::from_secs_f64(cost(count)));
        }
        chosen
    }

    #[test]
    fn what_takes_the_least_time_is_what_is_done() {
        let mut pace = Pace::new(Grouping::Measured);
        // Weights are read once a group: two groups cost half as much again.
        let by_weights = |count: usize| 0.01 * (1 + count) as f64 / 2.0;
        // Time grows with rows: two groups overlap.
        let by_rows = |count: usize| 0.02 * (count + 1) as f64 / (2 * count) as f64;
        let chosen = play(&mut pace, 8, 1000, by_weights);
        assert!(chosen[0] > 980, "{chosen:?}");
        let chosen = play(&mut pace, 512, 1000, by_rows);
        assert!(chosen[3] > 980, "{chosen:?}");
        // What was learned of one size says nothing of another, and is found out anew when it changes.
        let chosen = play(&mut pace, 8, 4000, by_rows);
        assert!(chosen[3] > 2500, "{chosen:?}");
    }

    #[test]
    fn no_more_groups_than_rows() {
        let mut pace = Pace::new(Grouping::Measured);
        assert_eq!(play(&mut pace, 1, 600, |_| 1.0), [600, 0, 0, 0]);
        assert_eq!(play(&mut pace, 3, 100, |count| 1.0 / count as f64)[2..], [0, 0]);
        let fixed = Pace::new(Grouping::Fixed(3));
        assert_eq!([1, 2, 3, 4].map(|rows| fixed.choose(rows)), [1, 2, 3, 3]);
    }
}
