//! How many proposals each sequence gets in the next round: a pure function of measured costs and measured acceptance.
//!
//! A round of `r` rows costs `step(r) + draft(rows drafted)` and brings a token per sequence and one more for each proposal
//! that is likely to be right. Proposals are added one by one, always the likeliest to count among all sequences, and the
//! number with the most tokens per second wins, none at all included. Since a sequence's later proposals are never likelier
//! than its earlier ones, this order finds the best choice for every total.
//!
//! Costs are only known by trying. Now and then a round is not the best by what is known but one whose cost or acceptance
//! has not been seen lately. What such a round loses by the present estimate comes out of a small allowance, a share of all
//! time spent. Where nothing pays and nothing is to be tried, drafting sleeps ([`Backoff`]), for longer each time.

use super::{
    acceptance::{MOST_PROPOSALS, Rates},
    backoff::{Backoff, CLASSES, class_of},
    cost::CostCurve,
};

/// A choice must be better than plain decoding by this much to be taken: estimates are not exact.
const LEAST_GAIN: f64 = 1.02;
/// Share of all time that may go into trying.
const ALLOWANCE: f64 = 0.007;
/// Allowance at the start, in plain steps.
const FIRST_ALLOWANCE: f64 = 0.3;
/// Plain steps measured before anything is drafted.
const WARM_UP: u64 = 3;
/// Figures that a row count should have.
const WANTED_FIGURES: usize = 3;
/// Figures of other row counts after which one's own are old.
const OLD: u64 = 256;

/// A sequence that decodes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Drafting {
    /// Most proposals that it can use; 0 when it cannot draft.
    pub(crate) most: usize,
    /// How likely they are right, by place.
    pub(crate) rates: Rates,
}

/// What a round is expected to cost and to bring.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Forecast {
    pub(crate) seconds: f64,
    /// Tokens per second against plain decoding.
    pub(crate) gain: f64,
    /// Is it a try, and not the best by what is known?
    pub(crate) tried: bool,
    /// Proposals of all sequences.
    pub(crate) proposals: usize,
}

/// Chooses lengths round after round.
#[derive(Clone, Debug)]
pub(crate) struct Lengths {
    /// One step of all rows, verification included.
    pub(crate) step: CostCurve,
    /// One draft of all sequences, by anchors and proposals together.
    pub(crate) draft: CostCurve,
    /// Seconds that may be lost by trying.
    allowance: Option<f64>,
    /// By class of batch size.
    rests: [Backoff; CLASSES],
}

/// A total of proposals on the way from none to all.
#[derive(Clone, Copy, Default)]
struct Stop {
    proposals: usize,
    draft_rows: usize,
    tokens: f64,
    seconds: f64,
}

impl Lengths {
    pub(crate) fn new() -> Self {
        Self {
            step: CostCurve::new(),
            draft: CostCurve::new(),
            allowance: None,
            rests: [Backoff::default(); CLASSES],
        }
    }

    /// Is drafting asleep for batches of `count` sequences, with no need for the draft's context?
    pub(crate) fn is_deep_asleep(&self, count: usize) -> bool {
        self.rests[class_of(count)].skips_context()
    }

    /// A round of `count` sequences begins: is it slept through?
    pub(crate) fn skips_round(&mut self, count: usize) -> bool {
        let sleeps = self.rests[class_of(count)].skips_round();
        if sleeps && let Some(plain) = self.step.estimate(count) {
            self.save(ALLOWANCE * plain, plain);
        }
        sleeps
    }

    /// Writes the number of proposals of each sequence into `lengths` and says what to expect; `None` while there is nothing
    /// to reckon with, and then nobody drafts. `most_rows` bounds the rows of a step. To be called once a round, if it is not
    /// slept through ([`Lengths::skips_round`]), and to be followed.
    pub(crate) fn choose(
        &mut self,
        sequences: &[Drafting],
        most_rows: usize,
        lengths: &mut [usize],
    ) -> Option<Forecast> {
        lengths.fill(0);
        let count = sequences.len();
        let plain = match self.step.estimate(count) {
            Some(plain) if count > 0 && self.step.figures() >= WARM_UP => plain,
            _ => return None,
        };
        let class = class_of(count);
        let first = Stop { tokens: count as f64, seconds: plain, ..Stop::default() };
        let plain_rate = first.tokens / first.seconds;
        let mut best = first;
        // Would anything pay if every proposal were right? Is the smallest step with proposals known?
        let (mut hopeless, mut known, mut possible) = (true, false, false);
        self.walk(sequences, most_rows, first, lengths, |curves, stop| {
            let rate = stop.tokens / stop.seconds;
            if rate > best.tokens / best.seconds && rate > plain_rate * LEAST_GAIN {
                best = stop;
            }
            possible = true;
            hopeless &= (count + stop.proposals) as f64 / stop.seconds <= plain_rate * LEAST_GAIN;
            known |= curves.step.known(count + stop.proposals).0 >= WANTED_FIGURES;
            true
        });
        let best_rate = best.tokens / best.seconds;

        // The cheapest of what should be looked at, if the allowance reaches.
        let woken = self.rests[class].was_woken();
        let mut tried: Option<(f64, Stop)> = None;
        let mut look_at = |curves: &Self, stop: Stop| -> bool {
            let loss = stop.seconds - stop.tokens / best_rate;
            let (figures, age) = curves.step.known(count + stop.proposals);
            // After a long time without proposals nobody knows any more how likely they are right.
            let forgotten = stop.proposals > 0 && woken;
            let fresh = figures >= WANTED_FIGURES && age < OLD && !forgotten;
            if stop.proposals != best.proposals && !fresh && tried.is_none_or(|(least, _)| loss < least) {
                tried = Some((loss, stop));
            }
            true
        };
        // What plain steps cost is seen while drafting sleeps.
        if best.proposals > 0 {
            look_at(self, first);
        }
        self.walk(sequences, most_rows, first, lengths, &mut look_at);
        let allowance = self.allowance.unwrap_or(FIRST_ALLOWANCE * plain);
        self.allowance = Some(allowance);
        let (chosen, is_try) = match tried {
            Some((loss, stop)) if loss <= allowance => {
                self.allowance = Some(allowance - loss.max(0.0));
                (stop, true)
            }
            _ => {
                self.save(ALLOWANCE * best.seconds, plain);
                (best, false)
            }
        };
        self.walk(sequences, most_rows, first, lengths, |_, stop| stop.proposals < chosen.proposals);
        if chosen.proposals == 0 {
            lengths.fill(0);
        }
        let rest = &mut self.rests[class];
        if chosen.proposals > 0 {
            rest.drafts(!is_try);
        } else if !is_try && possible {
            rest.go_to_sleep(known, hopeless && known);
        }
        let rate = chosen.tokens / chosen.seconds;
        Some(Forecast {
            seconds: chosen.seconds,
            gain: rate / plain_rate,
            tried: is_try,
            proposals: chosen.proposals,
        })
    }

    /// A long quiet time saves up for a few tries, not for many.
    fn save(&mut self, seconds: f64, plain: f64) {
        self.allowance = self.allowance.map(|allowance| (allowance + seconds).min(4.0 * plain).max(0.0));
    }

    /// Adds proposals one by one, the likeliest first, until `go_on` has had enough of it or there are no more.
    fn walk(
        &self,
        sequences: &[Drafting],
        most_rows: usize,
        first: Stop,
        lengths: &mut [usize],
        mut go_on: impl FnMut(&Self, Stop) -> bool,
    ) {
        lengths.fill(0);
        let mut chances: smallvec::SmallVec<[f32; 16]> = sequences.iter().map(|s| s.rates[0]).collect();
        let mut stop = first;
        // Beyond twice what was measured an estimate is a guess: large steps are approached, not jumped at.
        let most_rows = most_rows.min(2 * self.step.largest());
        while sequences.len() + stop.proposals < most_rows {
            let open = |&i: &usize| lengths[i] < sequences[i].most.min(MOST_PROPOSALS);
            let likeliest = (0..sequences.len()).filter(open).max_by(|&a, &b| {
                // The earlier of equals, so that the choice is one.
                chances[a].total_cmp(&chances[b]).then(b.cmp(&a))
            });
            let Some(i) = likeliest else { return };
            stop.draft_rows += if lengths[i] == 0 { 2 } else { 1 };
            stop.proposals += 1;
            stop.tokens += f64::from(chances[i]);
            lengths[i] += 1;
            chances[i] *= sequences[i].rates.get(lengths[i]).copied().unwrap_or(0.0);
            let step = self.step.estimate(sequences.len() + stop.proposals).unwrap_or(0.0);
            let plain = first.seconds;
            stop.seconds = step + self.draft.estimate(stop.draft_rows).unwrap_or(UNKNOWN_DRAFT * plain);
            if !go_on(self, stop) {
                return;
            }
        }
    }
}

/// What a draft is taken to cost before one was seen, in plain steps.
const UNKNOWN_DRAFT: f64 = 0.2;

#[cfg(test)]
mod tests;
