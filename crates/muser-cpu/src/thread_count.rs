//! How many threads of the pool take part in a job.
//!
//! On a quiet machine all of them. Beside programs that never rest a thread loses its processor for some milliseconds, again and again, and
//! the others wait for what it has in hand: then fewer are faster. Nobody can say beforehand how many, so it is tried, but only when
//! threads are seen waiting ([`STALLED`]): jobs of one size in turn with as many threads as now and with fewer. Whoever has fewer tries
//! now and then whether one more has become faster. On a quiet machine nothing is tried and nothing lost.
//!
//! All times are those of jobs, so an engine at rest learns and forgets nothing.

use std::time::Duration;

/// A stretch of jobs that is compared with others: some time slices of a busy processor.
const WINDOW: Duration = Duration::from_millis(12);
/// Stretches of a trial, half with each number.
const STRETCHES: usize = 6;
/// Part of their time that threads are parked in jobs when they have to wait for one without a processor. Without such a thread it is less
/// than a hundredth: short waits are spun away.
const STALLED: f64 = 0.05;
/// Who wins a trial is faster by this factor: less may be chance.
const FASTER: f64 = 1.03;
/// Who is slower by this factor has lost before the trial is over.
const HOPELESS: f64 = 1.3;
/// How long it takes from a trial to the next of the same direction at first; doubled when one fails.
const PATIENCE: Duration = Duration::from_millis(100);
/// At most so long, for fewer and for more: the other programs may end at any time, and a trial that is hopeless is short.
const LONGEST: [Duration; 2] = [Duration::from_secs(2), Duration::from_millis(400)];
/// And at least so many stretches, where one takes long: trials are a small part of all.
const STRETCHES_BETWEEN: u32 = 32;
/// Trials after each other go this part of the threads fewer or more, 0 being one: where a few are in the way, a quarter may not do.
const STEPS: [usize; 3] = [4, 2, 0];

/// Time of a stretch's jobs.
#[derive(Clone, Copy, Debug, Default)]
struct Stretch {
    rows: usize,
    jobs: u32,
    took: Duration,
    /// Of all threads together.
    parked: Duration,
    /// Time of jobs with other rows since it began.
    besides: Duration,
}

impl Stretch {
    /// Seconds of a job.
    fn mean(&self) -> f64 {
        self.took.as_secs_f64() / f64::from(self.jobs.max(1))
    }
}

#[derive(Debug)]
struct Trial {
    /// In place of the number that there is.
    other: usize,
    /// Seconds of a job in the stretches so far: every second one with the other number.
    means: [f64; STRETCHES],
    done: usize,
}

impl Trial {
    /// The stretch in the middle of those with the number that there is (0) or with the other (1): one may have met something else.
    fn median(&self, which: usize) -> f64 {
        let mut sorted = [f64::INFINITY; STRETCHES / 2];
        let mut count = 0;
        for &mean in self.means[..self.done].iter().skip(which).step_by(2) {
            sorted[count] = mean;
            count += 1;
        }
        sorted.sort_by(f64::total_cmp);
        sorted[count / 2]
    }
}

/// When the next trial may be.
#[derive(Debug)]
struct Patience {
    left: Duration,
    next: Duration,
    /// Trials that have failed.
    failed: usize,
}

impl Patience {
    fn new() -> Self {
        Self { left: Duration::ZERO, next: PATIENCE, failed: 0 }
    }

    /// How many of `threads` the next trial goes fewer or more.
    fn step(&self, threads: usize) -> usize {
        threads.checked_div(STEPS[self.failed % STEPS.len()]).unwrap_or(1).max(1)
    }

    /// A trial of this direction has failed; stretches take so long.
    fn failed(&mut self, longest: Duration, stretch: Duration) {
        self.left = self.next.max(stretch * STRETCHES_BETWEEN);
        self.next = (2 * self.next).min(longest);
        self.failed += 1;
    }
}

/// Chooses how many threads take part.
#[derive(Debug)]
pub(crate) struct ThreadCount {
    most: usize,
    now: usize,
    stretch: Stretch,
    trial: Option<Trial>,
    fewer: Patience,
    more: Patience,
}

impl ThreadCount {
    /// All of so many, at first.
    pub(crate) fn new(most: usize) -> Self {
        let (fewer, more) = (Patience::new(), Patience::new());
        Self { most, now: most, stretch: Stretch::default(), trial: None, fewer, more }
    }

    /// Threads of the next job.
    pub(crate) fn threads(&self) -> usize {
        match &self.trial {
            Some(trial) if trial.done % 2 == 1 => trial.other,
            _ => self.now,
        }
    }

    /// A job with [`Self::threads`] threads took so long; threads were parked so long in it, all together.
    pub(crate) fn note(&mut self, rows: usize, took: Duration, parked: Duration) {
        for patience in [&mut self.fewer, &mut self.more] {
            patience.left = patience.left.saturating_sub(took);
        }
        if self.stretch.rows != rows {
            // Jobs of another size between are left out, unless there are nothing but those any more.
            self.stretch.besides += took;
            if self.stretch.jobs > 0 && self.stretch.besides < 2 * WINDOW {
                return;
            }
            self.stretch = Stretch { rows, ..Stretch::default() };
            self.trial = None;
        }
        self.stretch.jobs += 1;
        self.stretch.took += took;
        self.stretch.parked += parked;
        if self.stretch.took >= WINDOW {
            let stretch = std::mem::replace(&mut self.stretch, Stretch { rows, ..Stretch::default() });
            self.look(&stretch);
        }
    }

    /// A stretch is over.
    fn look(&mut self, stretch: &Stretch) {
        let Some(trial) = &mut self.trial else {
            let all = stretch.took.as_secs_f64() * self.now as f64;
            let stalled = self.now > 1 && stretch.parked.as_secs_f64() > STALLED * all;
            if stalled && self.fewer.left.is_zero() {
                self.begin(self.now - self.fewer.step(self.now));
            } else if self.now < self.most && self.more.left.is_zero() {
                self.begin((self.now + self.more.step(self.now)).min(self.most));
            }
            return;
        };
        trial.means[trial.done] = stretch.mean();
        trial.done += 1;
        if trial.done < 2 {
            return;
        }
        let (now, other, tried) = (trial.median(0), trial.median(1), trial.other);
        if trial.done < STRETCHES && other <= now * HOPELESS {
            return;
        }
        let direction = if tried < self.now { &mut self.fewer } else { &mut self.more };
        let longest = LONGEST[usize::from(tried > self.now)];
        if other * FASTER < now {
            *direction = Patience::new();
            let back = if tried < self.now { &mut self.more } else { &mut self.fewer };
            // What was just found slower is tried again, but not at once.
            *back = Patience { left: PATIENCE, next: 2 * PATIENCE, failed: 0 };
            self.now = tried;
        } else {
            direction.failed(longest, stretch.took);
        }
        self.trial = None;
    }

    fn begin(&mut self, other: usize) {
        self.trial = Some(Trial { other, means: [0.0; STRETCHES], done: 0 });
    }
}
