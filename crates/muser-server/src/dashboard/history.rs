//! The past hour as a ring of totals.
//!
//! Each place holds everything that has been counted until then, so what happened in any span is one subtraction and quantiles
//! of a span are exact to a bucket. A place has a fixed size and the ring a fixed length; a server that idles copies some hundred
//! counters every ten seconds, and nothing else.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::clocks::Clocks;
use super::digest::Counts;
use crate::backend::Snapshot;

/// Time between two places.
pub const INTERVAL: Duration = Duration::from_secs(10);
/// Spans that are remembered: an hour.
pub const LENGTH: usize = 360;

/// Computed prompt tokens from which on their own rate is believed.
const ENOUGH_READ: u64 = 512;

/// What has been counted until one moment, and how things stood then.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Totals {
    /// Tokens given to clients.
    pub written: u64,
    /// Rows of prompts computed.
    pub read_rows: u64,
    /// Prompt tokens of requests.
    pub prompt: u64,
    /// Of these, not computed.
    pub reused: u64,
    /// Of the reused ones, brought from packs.
    pub restored: u64,
    /// Of the reused ones, read by other nodes.
    pub handed: u64,
    /// Seconds that computing the reused ones would have taken.
    pub saved_s: f64,
    /// Of these, for what packs and nodes brought.
    pub saved_brought_s: f64,
    /// Seconds that bringing them took.
    pub restore_s: f64,
    /// Times that bringing came to nothing.
    pub restores_failed: u64,
    /// Choices that ended.
    pub finished: u64,
    /// Answers that ended in an error.
    pub failed: u64,
    /// Refused requests.
    pub errors: u64,
    /// Of these, the server's fault.
    pub own_errors: u64,
    /// Requests whose client went away.
    pub cancelled: u64,
    /// Requests set aside for want of memory.
    pub preempted: u64,
    /// Drafts verified.
    pub drafts: u64,
    /// Tokens proposed.
    pub drafted: u64,
    /// Tokens of them accepted.
    pub accepted: u64,
    /// Steps.
    pub steps: u64,
    /// Seconds that they took.
    pub step_s: f64,
    /// Times to the first token.
    pub first: Counts,
    /// Times between tokens.
    pub between: Counts,
    /// Requests that run.
    pub running: u64,
    /// Requests that wait.
    pub waiting: u64,
    /// Bytes of KV blocks in use.
    pub kv_used: u64,
    /// Bytes of KV blocks kept for reuse.
    pub kv_kept: u64,
    /// Bytes of all KV blocks.
    pub kv_total: u64,
}

impl Totals {
    /// What stands now; `before` is the place before, which the seconds saved go on from.
    pub fn of(now: &Snapshot, clocks: &Clocks, cancelled: u64, before: &Self) -> Self {
        let counted = clocks.counted();
        let (errors, own_errors) = clocks.errors.totals();
        let rate = read_rate(now.prefill_rate, counted.read, counted.read_us);
        // A rate that nobody knows yet saves nothing, rather than anything.
        let seconds =
            |tokens: u64, before: u64| rate.map_or(0.0, |rate| tokens.saturating_sub(before) as f64 / rate);
        let handed = now.handed_tokens.min(now.external_hits);
        Self {
            written: counted.written,
            read_rows: now.prefill_rows,
            prompt: now.prefix_queries,
            reused: now.prefix_hits,
            restored: now.external_hits - handed,
            handed,
            saved_s: before.saved_s + seconds(now.prefix_hits, before.reused),
            saved_brought_s: before.saved_brought_s
                + seconds(now.external_hits, before.restored + before.handed),
            restore_s: now.restores.sum_s,
            restores_failed: now.restore_failures.iter().map(|(_, count)| count).sum(),
            finished: counted.finished,
            failed: counted.failed,
            errors,
            own_errors,
            cancelled,
            preempted: now.preemptions,
            drafts: now.drafts,
            drafted: now.drafted,
            accepted: now.drafted_accepted,
            steps: now.steps.count(),
            step_s: now.steps.sum_s,
            first: clocks.first_token.counts(),
            between: clocks.between.counts(),
            running: now.running,
            waiting: now.waiting,
            kv_used: now.kv_bytes_used,
            kv_kept: now.kv_bytes_kept,
            kv_total: now.kv_bytes_total,
        }
    }
}

/// Prompt tokens a second: by the engine's measured steps, or by the requests that have been read so far. Both are the rate at the
/// beginning of a prompt; further down it is lower, so what is saved is rather more.
fn read_rate(by_steps: u64, read: u64, read_us: u64) -> Option<f64> {
    match by_steps {
        0 => (read >= ENOUGH_READ && read_us > 0).then(|| 1e6 * read as f64 / read_us as f64),
        rate => Some(rate as f64),
    }
}

/// What happened between two moments.
#[derive(Clone, Copy, Debug)]
pub struct Window<'a> {
    /// How long it is.
    pub seconds: f64,
    from: &'a Totals,
    /// How things stood at its end.
    pub to: &'a Totals,
}

impl<'a> Window<'a> {
    fn between(from: (Duration, &'a Totals), to: (Duration, &'a Totals)) -> Self {
        Self { seconds: to.0.saturating_sub(from.0).as_secs_f64(), from: from.1, to: to.1 }
    }

    /// How much a counter grew.
    pub fn grew(&self, counter: fn(&Totals) -> u64) -> u64 {
        counter(self.to).saturating_sub(counter(self.from))
    }

    /// The same of seconds.
    pub fn spent(&self, clock: fn(&Totals) -> f64) -> f64 {
        (clock(self.to) - clock(self.from)).max(0.0)
    }

    /// How much it grew in a second.
    pub fn per_second(&self, counter: fn(&Totals) -> u64) -> Option<f64> {
        (self.seconds > 0.0).then(|| self.grew(counter) as f64 / self.seconds)
    }

    /// One counter's growth as a share of another's; nothing where that did not grow.
    pub fn share(&self, part: fn(&Totals) -> u64, whole: fn(&Totals) -> u64) -> Option<f64> {
        let whole = self.grew(whole);
        (whole > 0).then(|| self.grew(part) as f64 / whole as f64)
    }

    /// The time that a share of all times does not exceed.
    pub fn quantile_s(&self, times: fn(&Totals) -> &Counts, q: f64) -> Option<f64> {
        times(self.to).since(times(self.from)).quantile_s(q)
    }
}

/// The ring.
#[derive(Debug)]
pub struct History {
    places: VecDeque<(Duration, Totals)>,
    newest: u64,
}

impl Default for History {
    /// Nothing has happened yet.
    fn default() -> Self {
        let mut places = VecDeque::with_capacity(LENGTH + 1);
        places.push_back((Duration::ZERO, Totals::default()));
        Self { places, newest: 0 }
    }
}

impl History {
    /// Bytes that the ring takes, however long the server runs.
    pub const BYTES: usize = (LENGTH + 1) * size_of::<(Duration, Totals)>();

    /// Remembers how things stand `at` this time since the start.
    pub fn push(&mut self, at: Duration, totals: Totals) {
        if self.places.len() > LENGTH {
            self.places.pop_front();
        }
        self.places.push_back((at, totals));
        self.newest += 1;
    }

    /// The number of the newest span; they are numbered from 1.
    pub fn newest(&self) -> u64 {
        self.newest
    }

    /// The newest totals.
    pub fn last(&self) -> &Totals {
        // It is never empty.
        &self.places[self.places.len() - 1].1
    }

    /// The span from about `back` ago until now: from the last place that is at least so long ago, or from the oldest.
    pub fn window<'a>(&'a self, back: Duration, at: Duration, now: &'a Totals) -> Window<'a> {
        let old = self.places.iter().rev().find(|(then, _)| *then + back <= at);
        let (then, totals) = old.unwrap_or(&self.places[0]);
        Window::between((*then, totals), (at, now))
    }

    /// The spans with numbers above `since`, oldest first, and the number of the first of them.
    pub fn spans(&self, since: u64) -> (u64, impl Iterator<Item = Window<'_>>) {
        let oldest = self.newest + 1 - (self.places.len() as u64 - 1);
        let first = since.saturating_add(1).max(oldest);
        let skipped = usize::try_from(first - oldest).unwrap_or(usize::MAX);
        let pairs = self.places.iter().zip(self.places.iter().skip(1));
        let spans = pairs.map(|(from, to)| Window::between((from.0, &from.1), (to.0, &to.1)));
        (first, spans.skip(skipped))
    }
}

/// The history of one loaded model.
#[derive(Debug)]
pub struct Board {
    begun: Instant,
    history: Mutex<History>,
}

impl Default for Board {
    fn default() -> Self {
        Self { begun: Instant::now(), history: Mutex::default() }
    }
}

impl Board {
    /// Since when there is a history.
    pub fn begun(&self) -> Instant {
        self.begun
    }

    /// The history.
    pub fn history(&self) -> MutexGuard<'_, History> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Remembers how things stand.
    pub fn sample(&self, now: &Snapshot, clocks: &Clocks, cancelled: u64) {
        let at = self.begun.elapsed();
        let mut history = self.history();
        let totals = Totals::of(now, clocks, cancelled, history.last());
        history.push(at, totals);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: fn(u64) -> Duration = Duration::from_secs;

    fn written(n: u64) -> Totals {
        Totals { written: n, ..Totals::default() }
    }

    fn rows(history: &History, since: u64) -> (u64, Vec<u64>) {
        let (first, spans) = history.spans(since);
        (first, spans.map(|span| span.grew(|totals| totals.written)).collect())
    }

    #[test]
    fn the_ring_is_bounded_and_numbers_go_on() {
        let mut history = History::default();
        assert_eq!((history.newest(), rows(&history, 0)), (0, (1, vec![])));
        for n in 1..=1000 {
            history.push(S(10 * n), written(n * n));
        }
        assert_eq!(history.places.len(), LENGTH + 1);
        assert_eq!(history.places.capacity(), LENGTH + 1, "it never grows");
        assert_eq!(history.newest(), 1000);
        let (first, all) = rows(&history, 0);
        assert_eq!((first, all.len()), (641, LENGTH));
        // (n + 1)² - n².
        assert_eq!((all[0], all[LENGTH - 1]), (641 * 2 - 1, 1999));
        assert_eq!(rows(&history, 998), (999, vec![1997, 1999]));
        assert_eq!(rows(&history, 1000), (1001, vec![]));
        assert_eq!(rows(&history, 5000).1, Vec::<u64>::new());
        assert_eq!(rows(&history, u64::MAX).1, Vec::<u64>::new());
        // What docs/operations.md says of it.
        assert_eq!(History::BYTES >> 10, 262);
    }

    #[test]
    fn a_window_goes_back_to_the_last_place_before_it() {
        let mut history = History::default();
        for n in 1..=20 {
            history.push(S(10 * n), written(100 * n));
        }
        let now = written(2050);
        let check = |back: u64, seconds: f64, grew: u64| {
            let window = history.window(S(back), S(205), &now);
            assert_eq!((window.seconds, window.grew(|totals| totals.written)), (seconds, grew), "{back}");
        };
        check(60, 65.0, 650);
        check(5, 5.0, 50);
        check(3600, 205.0, 2050);
        assert_eq!(history.window(S(5), S(205), &now).per_second(|totals| totals.written), Some(10.0));
        let empty = history.window(S(60), S(205), &now);
        assert_eq!(empty.share(|totals| totals.accepted, |totals| totals.drafted), None);
    }

    #[test]
    fn seconds_saved_are_tokens_over_the_rate_of_their_time() {
        let clocks = Clocks::default();
        let snapshot = |reused, brought, handed, rate| Snapshot {
            prefix_hits: reused,
            external_hits: brought,
            handed_tokens: handed,
            prefill_rate: rate,
            ..Snapshot::default()
        };
        let first = Totals::of(&snapshot(1000, 400, 100, 500), &clocks, 3, &Totals::default());
        assert_eq!((first.saved_s, first.saved_brought_s), (2.0, 0.8));
        assert_eq!((first.restored, first.handed, first.cancelled), (300, 100, 3));
        // The rate has changed; what was saved before stays.
        let second = Totals::of(&snapshot(2000, 400, 100, 250), &clocks, 3, &first);
        assert_eq!((second.saved_s, second.saved_brought_s), (6.0, 0.8));
        // Nobody knows the rate: by the requests that were read, and by nothing before those are enough.
        let unknown = Totals::of(&snapshot(2000, 0, 0, 0), &clocks, 0, &Totals::default());
        assert_eq!(unknown.saved_s, 0.0);
        clocks.started(1000, S(4));
        let by_requests = Totals::of(&snapshot(500, 0, 0, 0), &clocks, 0, &Totals::default());
        assert_eq!(by_requests.saved_s, 2.0);
    }
}
