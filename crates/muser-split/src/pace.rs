//! How a step goes through the parts: in how many groups, and whether layers in host memory are computed by a card. Tried, measured,
//! and chosen by what took the least time. No choice changes a bit of a result.

use std::time::Duration;

/// How steps go through the parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grouping {
    /// What takes the least time, by steps of about as many rows.
    Measured,
    /// In so many groups (or as many as there are rows); for tests and measurements.
    Fixed(usize),
    /// In one group, layers in host memory by a device that they are streamed to, if there is one; for tests and measurements.
    Streamed,
}

/// A way for a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// Each part computes its layers, with the rows in so many groups.
    Groups(usize),
    /// Layers in host memory are computed by another part.
    Streamed,
}

/// What is tried, in this order.
const WAYS: [Way; 5] = [Way::Streamed, Way::Groups(1), Way::Groups(2), Way::Groups(4), Way::Groups(8)];
const STREAMED: usize = 0;
const ONE_GROUP: usize = 1;
/// Steps that a way is tried for; the first one, which sizes buffers, does not count.
const TRIALS: u32 = 4;
/// After two steps (groups: after one) a way that takes so many times as long as the best is not tried further.
const HOPELESS: f64 = 2.0;
/// Every so many steps another way than the best is tried again: contexts grow, other programs come and go.
const AGAIN: u32 = 256;
/// Weight of the newest time, unless the others are older than so many steps.
const NEWEST: f64 = 0.25;
const OLD: u32 = AGAIN / 2;
/// From about so many rows on streaming is tried without knowing anything. From how many on it is done is measured.
const FIRST_STREAMED: usize = 256;

/// What is known of steps of about the same size.
#[derive(Clone, Copy, Debug, Default)]
struct Class {
    steps: u32,
    tried: [u32; WAYS.len()],
    /// The step that it was last taken for.
    last: [u32; WAYS.len()],
    /// Seconds a row.
    cost: [f64; WAYS.len()],
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

    /// How the next step goes; `streams`: is there a device that layers can be streamed to?
    pub(crate) fn choose(&self, rows: usize, streams: bool) -> Way {
        match self.grouping {
            Grouping::Fixed(count) => Way::Groups(count.min(rows)),
            Grouping::Streamed if streams => Way::Streamed,
            Grouping::Streamed => Way::Groups(1),
            Grouping::Measured => {
                let class = class_of(rows);
                let allowed = WAYS.map(|way| match way {
                    Way::Groups(count) => count <= rows.max(1) && (!streams || self.may_stay(class)),
                    Way::Streamed => streams && self.may_stream(class),
                });
                WAYS[self.classes[class].choose(allowed)]
            }
        }
    }

    /// A step has taken so long.
    pub(crate) fn note(&mut self, rows: usize, way: Way, time: Duration) {
        let Some(choice) = WAYS.iter().position(|choice| *choice == way) else { return };
        self.classes[class_of(rows)].note(choice, time.as_secs_f64() / rows.max(1) as f64);
    }

    /// Where many rows may be streamed: is it worth a try to compute them where their layers are? A processor may take a minute for what a
    /// card does in half a second, and everybody waits: not if fewer rows took it far longer, a row, or nothing is known.
    fn may_stay(&self, class: usize) -> bool {
        if class < class_of(FIRST_STREAMED) {
            return true;
        }
        let streamed = &self.classes[class];
        let known = (0..=class).rev().find(|class| self.classes[*class].tried[ONE_GROUP] > 0);
        let staying = known.map(|class| self.classes[class].cost[ONE_GROUP]);
        streamed.tried[STREAMED] > 0
            && staying.is_some_and(|cost| cost < 2.0 * HOPELESS * streamed.cost[STREAMED])
    }

    /// Is it worth a try? Where there are few rows only if a step takes half as long by the parts themselves as one of more rows
    /// took that was streamed: weights take their time whatever the rows are.
    fn may_stream(&self, class: usize) -> bool {
        if class >= class_of(FIRST_STREAMED) {
            return true;
        }
        let more = (class + 1..self.classes.len()).find(|class| self.classes[*class].tried[STREAMED] > 1);
        let Some(more) = more else { return false };
        let step = |class: usize, choice: usize| self.classes[class].cost[choice] * (1_u64 << class) as f64;
        self.classes[class].tried[ONE_GROUP] > 0 && step(class, ONE_GROUP) > 0.5 * step(more, STREAMED)
    }
}

fn class_of(rows: usize) -> usize {
    (rows.max(1).ilog2() as usize).min(19)
}

impl Class {
    /// Among the ways that are allowed, of which there is one.
    fn choose(&self, allowed: [bool; WAYS.len()]) -> usize {
        let known = |choice: &usize| allowed[*choice] && self.tried[*choice] > 0;
        let best = (0..WAYS.len()).filter(known).min_by(|a, b| self.cost[*a].total_cmp(&self.cost[*b]));
        let is_new = |choice: &usize| {
            allowed[*choice]
                && self.tried[*choice] < TRIALS
                && best.is_none_or(|best| self.may_win(*choice, best))
        };
        // Each once, then each again: what is far behind is left early.
        if let Some(new) = (0..WAYS.len()).filter(is_new).min_by_key(|choice| self.tried[*choice]) {
            return new;
        }
        let first = (0..WAYS.len()).find(|choice| allowed[*choice]);
        let best = best.or(first).unwrap_or(ONE_GROUP);
        if self.steps.is_multiple_of(AGAIN) {
            // One of the others, each in its turn.
            let others: Vec<usize> = (0..WAYS.len()).filter(|way| allowed[*way] && *way != best).collect();
            if !others.is_empty() {
                return others[(self.steps / AGAIN) as usize % others.len()];
            }
        }
        best
    }

    /// Is it not yet known to be far behind?
    fn may_win(&self, choice: usize, best: usize) -> bool {
        let enough = u32::from(choice == STREAMED);
        let far = |choice: usize, factor: f64| self.cost[choice] > factor * self.cost[best];
        let is_hopeless = self.tried[choice] > enough && far(choice, HOPELESS);
        // Groups that follow each other save no more than the parts have among them.
        let is_more_of_it = choice > ONE_GROUP && self.tried[ONE_GROUP] > 0 && far(ONE_GROUP, 2.0 * HOPELESS);
        !is_hopeless && !is_more_of_it
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

    /// Steps of `rows` rows that take as long as `cost` says; how often each way was chosen.
    fn play(
        pace: &mut Pace,
        (rows, streams): (usize, bool),
        steps: usize,
        cost: impl Fn(Way) -> f64,
    ) -> [usize; WAYS.len()] {
        let mut chosen = [0; WAYS.len()];
        for _ in 0..steps {
            let way = pace.choose(rows, streams);
            chosen[WAYS.iter().position(|choice| *choice == way).expect("a way")] += 1;
            pace.note(rows, way, Duration::from_secs_f64(cost(way)));
        }
        chosen
    }

    /// Weights are read once a group: two groups cost half as much again.
    fn by_weights(way: Way) -> f64 {
        let Way::Groups(count) = way else { return 1.0 };
        0.01 * (1 + count) as f64 / 2.0
    }

    /// Time grows with rows: two groups overlap.
    fn by_rows(way: Way) -> f64 {
        let Way::Groups(count) = way else { return 1.0 };
        0.02 * (count + 1) as f64 / (2 * count) as f64
    }

    #[test]
    fn what_takes_the_least_time_is_what_is_done() {
        let mut pace = Pace::new(Grouping::Measured);
        let chosen = play(&mut pace, (8, false), 1000, by_weights);
        assert!(chosen[1] > 980, "{chosen:?}");
        let chosen = play(&mut pace, (512, false), 1000, by_rows);
        assert!(chosen[4] > 970 && chosen[0] == 0, "{chosen:?}");
        // What was learned of one size says nothing of another, and is found out anew when it changes.
        let chosen = play(&mut pace, (8, false), 4000, by_rows);
        assert!(chosen[4] > 2500, "{chosen:?}");
    }

    #[test]
    fn no_more_groups_than_rows() {
        let mut pace = Pace::new(Grouping::Measured);
        assert_eq!(play(&mut pace, (1, true), 600, |_| 1.0), [0, 600, 0, 0, 0]);
        assert_eq!(play(&mut pace, (3, true), 100, by_rows)[3..], [0, 0]);
        let fixed = Pace::new(Grouping::Fixed(3));
        assert_eq!([1, 2, 3, 4].map(|rows| fixed.choose(rows, true)), [1, 2, 3, 3].map(Way::Groups));
        let streamed = Pace::new(Grouping::Streamed);
        assert_eq!(streamed.choose(1, true), Way::Streamed);
        assert_eq!(streamed.choose(1, false), Way::Groups(1));
    }

    /// Parts that take 10 ms a row (two groups save a quarter), and a device that takes 300 ms and 0.1 ms a row.
    fn streamed(rows: usize) -> impl Fn(Way) -> f64 {
        move |way| match way {
            Way::Streamed => 0.3 + 1e-4 * rows as f64,
            Way::Groups(1) => 0.01 * rows as f64,
            Way::Groups(_) => 0.0075 * rows as f64,
        }
    }

    #[test]
    fn from_how_many_rows_on_layers_are_streamed_is_found_out() {
        let mut pace = Pace::new(Grouping::Measured);
        // Nothing is known: few rows are left where they are.
        assert_eq!(play(&mut pace, (1, true), 100, streamed(1))[0], 0);
        let chosen = play(&mut pace, (2048, true), 40, streamed(2048));
        assert_eq!(chosen[0], 40, "one row a step has told enough of the others: {chosen:?}");
        // 100 rows: 310 against 750 ms. Nobody would have tried it but for what 2,048 rows have shown.
        let chosen = play(&mut pace, (100, true), 100, streamed(100));
        assert!(chosen[0] > 80, "{chosen:?}");
        // 32 rows: 303 against 240 ms: tried, and left. 4 rows: not even tried.
        let chosen = play(&mut pace, (32, true), 250, streamed(32));
        assert!(chosen[0] <= TRIALS as usize, "{chosen:?}");
        assert_eq!(play(&mut pace, (4, true), 1000, streamed(4))[0], 0);
        // A bus that is slower than the processor.
        let mut pace = Pace::new(Grouping::Measured);
        let slow = |way| if way == Way::Streamed { 30.0 } else { by_rows(way) };
        play(&mut pace, (64, true), 10, by_rows);
        let chosen = play(&mut pace, (2048, true), 250, slow);
        assert!(chosen[0] <= 2, "{chosen:?}");
    }
}
