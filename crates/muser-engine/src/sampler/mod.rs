//! From a row of logits to a token.
//!
//! The order, always the same:
//!
//! 1. If asked for: log-probabilities of the model's own distribution, taken before anything below.
//! 2. Logit bias, then repetition penalty (tokens of prompt and output), then presence and frequency penalties (tokens of
//!    the output).
//! 3. The constraint's mask. From here on a forbidden token does not exist.
//! 4. Greedy (temperature at most [`SamplingParams::GREEDY_BELOW`] or top-k 1): the highest logit, lowest id among equals.
//! 5. Otherwise top-k, then top-p over what it left, then min-p, all on the distribution at temperature 1.
//! 6. Temperature last, over what the filters left: however high it is, a token that the filters took out never comes
//!    back, and an infinite temperature would be uniform over the rest.
//! 7. One number of the counter-based generator ([`rng`]) picks from the weights, in one order.
//!
//! Sums are taken in one order in f64, so the same logits give the same token everywhere.

mod candidates;
mod counts;
mod exp;
mod params;
pub mod rng;
mod speculate;

use crate::{RequestError, TokenMask, TopLogprobs};

pub use candidates::Candidate;
use candidates::{argmax, by_rank, top_k};
pub use counts::TokenCounts;
use exp::exp_nonpositive;
pub use params::SamplingParams;
pub use speculate::{DraftSampling, Verdict};

/// Scratch memory for sampling; one per engine. Allocates nothing once it has seen the largest request.
#[derive(Debug, Default)]
pub struct Sampler {
    candidates: Vec<Candidate>,
    /// Candidates of the bin in which top-p draws its line.
    line: Vec<Candidate>,
    /// Mass by bins of logits.
    bins: Vec<f64>,
    /// The model's own logits of a row that is about to be shaped.
    kept: Vec<f32>,
    /// What a draft's distribution has left, and its weights by token id (zero between calls).
    draft: Vec<Candidate>,
    draft_weights: Vec<f32>,
}

/// What drawing a token needs besides its row: scratch memory, shared by everything of a turn that draws.
#[derive(Debug)]
pub(crate) struct Tools {
    pub(crate) sampler: Sampler,
    pub(crate) mask: TokenMask,
}

impl Tools {
    pub(crate) fn new(vocab: usize) -> Self {
        Self { sampler: Sampler::new(), mask: TokenMask::new(vocab) }
    }
}

/// Which random number draws the token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DrawKey {
    /// Seed of the request.
    pub seed: u64,
    /// Choice of the request.
    pub index: u32,
    /// Position of the token to draw, shifts not counted.
    pub position: u64,
}

impl Sampler {
    /// A sampler.
    pub fn new() -> Self {
        Self::default()
    }

    /// Log of the sum of exponentials (a logit less that is a log-probability), and the `k` most probable tokens.
    pub fn logprobs(&mut self, logits: &[f32], k: usize) -> (f64, TopLogprobs) {
        let log_sum = log_sum_exp(logits);
        let mut top = TopLogprobs::default();
        top_k(logits, k, &mut self.candidates);
        for candidate in &self.candidates {
            top.push(candidate.id, (f64::from(candidate.value) - log_sum) as f32);
        }
        (log_sum, top)
    }

    /// Keeps a copy of a row.
    pub(crate) fn keep(&mut self, logits: &[f32]) {
        self.kept.clear();
        self.kept.extend_from_slice(logits);
    }

    /// A value of the row kept last.
    pub(crate) fn kept(&self, id: u32) -> f32 {
        self.kept[id as usize]
    }

    /// Applies steps 2 and 3 to the logits.
    pub fn apply_processors(
        params: &SamplingParams,
        counts: Option<&TokenCounts>,
        mask: Option<&TokenMask>,
        logits: &mut [f32],
    ) {
        for &(id, bias) in &params.logit_bias {
            if let Some(logit) = logits.get_mut(id as usize) {
                *logit += bias;
            }
        }
        if let Some(counts) = counts {
            counts.penalise(params, logits);
        }
        if let Some(mask) = mask {
            for (chunk, &word) in logits.chunks_mut(32).zip(mask.words()) {
                match word {
                    u32::MAX => {}
                    0 => chunk.fill(f32::NEG_INFINITY),
                    _ => {
                        for (i, logit) in chunk.iter_mut().enumerate() {
                            if word >> i & 1 == 0 {
                                *logit = f32::NEG_INFINITY;
                            }
                        }
                    }
                }
            }
        }
    }

    /// Steps 4 to 7 on shaped logits. `None` when no token is left.
    pub fn draw(&mut self, params: &SamplingParams, logits: &[f32], key: DrawKey) -> Option<u32> {
        if params.is_greedy() {
            return argmax(logits);
        }
        self.distribution(params, logits)?;
        pick(&self.candidates, sample_number(key))
    }

    /// [`Sampler::draw`] for logits of which only the `top_k` highest are at hand, as top-k would sort them: the same token.
    pub(crate) fn draw_among(
        &mut self,
        params: &SamplingParams,
        highest: &[(u32, f32)],
        key: DrawKey,
    ) -> Option<u32> {
        self.candidates.clear();
        let allowed = highest.iter().filter(|(id, _)| !params.forbids(*id));
        let most = if params.is_greedy() { 1 } else { params.top_k as usize };
        self.candidates.extend(allowed.take(most).map(|&(id, value)| Candidate { id, value }));
        if params.is_greedy() {
            return self.candidates.first().map(|best| best.id);
        }
        self.cut_candidates(params);
        self.weigh_candidates(params)?;
        pick(&self.candidates, sample_number(key))
    }

    /// Steps 5 and 6: the candidates left, the best first, with their weights (relative, the best has 1) as values. `None`
    /// when no token is left.
    pub fn distribution(&mut self, params: &SamplingParams, logits: &[f32]) -> Option<&[Candidate]> {
        self.filter(params, logits);
        self.weigh_candidates(params)
    }

    /// Step 6.
    fn weigh_candidates(&mut self, params: &SamplingParams) -> Option<&[Candidate]> {
        let best = self.candidates.first()?.value;
        let inverse = 1.0 / params.temperature.max(SamplingParams::GREEDY_BELOW);
        for candidate in &mut self.candidates {
            candidate.value = exp_nonpositive((candidate.value - best) * inverse);
        }
        Some(&self.candidates)
    }

    /// Leaves in `candidates` what top-k, top-p and min-p let through, the best first, values are logits.
    fn filter(&mut self, params: &SamplingParams, logits: &[f32]) {
        if params.top_k > 0 {
            top_k(logits, params.top_k as usize, &mut self.candidates);
            self.cut_candidates(params);
        } else {
            self.filter_all(f64::from(params.top_p), logits);
            self.apply_min_p(params);
        }
    }

    /// Top-p and min-p over what top-k has left.
    fn cut_candidates(&mut self, params: &SamplingParams) {
        let top_p = f64::from(params.top_p);
        if top_p < 1.0 {
            let best = self.candidates.first().map_or(0.0, |c| c.value);
            let total: f64 = self.candidates.iter().map(|c| weight(c.value, best)).sum();
            cut_at_mass(&mut self.candidates, best, top_p * total);
        }
        self.apply_min_p(params);
    }

    fn apply_min_p(&mut self, params: &SamplingParams) {
        if params.min_p > 0.0
            && let Some(best) = self.candidates.first().copied()
        {
            let lowest = best.value + params.min_p.ln();
            self.candidates.retain(|c| c.value >= lowest || *c == best);
        }
    }

    /// Top-p over the whole vocabulary without sorting it: the mass is summed by bins of logits, whole bins are in or out,
    /// and only the bin in which the line is crossed is sorted.
    fn filter_all(&mut self, top_p: f64, logits: &[f32]) {
        self.candidates.clear();
        let Some(best) = argmax(logits) else { return };
        let best = Candidate { id: best, value: logits[best as usize] };
        // The last bin in and how much mass is still to come from it.
        let (last_bin, needed) =
            if top_p < 1.0 { self.find_line(top_p, best.value, logits) } else { (BINS, 0.0) };
        self.candidates.push(best);
        self.line.clear();
        for (id, &value) in logits.iter().enumerate() {
            let candidate = Candidate { id: id as u32, value };
            let bin = bin(value, best.value);
            if value == f32::NEG_INFINITY || candidate.id == best.id || bin > last_bin {
                continue;
            }
            let to = if bin < last_bin || top_p >= 1.0 { &mut self.candidates } else { &mut self.line };
            to.push(candidate);
        }
        if top_p < 1.0 {
            self.line.sort_unstable_by(by_rank);
            let mut line = std::mem::take(&mut self.line);
            // The best itself may be in the last bin.
            let needed = if last_bin == 0 { needed - 1.0 } else { needed };
            if needed <= 0.0 {
                line.clear();
            }
            cut_at_mass(&mut line, best.value, needed);
            self.candidates.extend_from_slice(&line);
            self.line = line;
        }
    }

    /// The bin in which the mass reaches `top_p` of the total, and the mass that must come from it.
    fn find_line(&mut self, top_p: f64, best: f32, logits: &[f32]) -> (usize, f64) {
        self.bins.clear();
        self.bins.resize(BINS + 1, 0.0);
        for &value in logits {
            self.bins[bin(value, best)] += weight(value, best);
        }
        let line = top_p * self.bins.iter().sum::<f64>();
        let mut mass = 0.0;
        for (bin, &of_bin) in self.bins.iter().enumerate() {
            if mass + of_bin >= line {
                return (bin, line - mass);
            }
            mass += of_bin;
        }
        (BINS, f64::INFINITY)
    }
}

/// Bins of logits, finest where mass is; the last one takes everything far below the best.
const BINS: usize = 1024;

/// Bin of a logit: how far it is below the best, 64 bins per unit.
fn bin(value: f32, best: f32) -> usize {
    // The conversion saturates, so that negative infinity comes to the last bin.
    (((best - value) * 64.0) as usize).min(BINS)
}

/// Probability relative to that of the best.
fn weight(value: f32, best: f32) -> f64 {
    f64::from(exp_nonpositive(value - best))
}

/// Cuts sorted candidates where their mass reaches `mass`. The one that crosses the line stays, and so does the first.
fn cut_at_mass(candidates: &mut Vec<Candidate>, best: f32, mass: f64) {
    let mut sum = 0.0;
    let last = candidates.iter().position(|candidate| {
        sum += weight(candidate.value, best);
        sum >= mass
    });
    if let Some(last) = last {
        candidates.truncate(last + 1);
    }
}

/// The number that draws a token.
fn sample_number(key: DrawKey) -> f64 {
    rng::uniform(key.seed, key.index, key.position, rng::Stream::Sample)
}

/// Picks from weighted candidates with a number in `[0, 1)`.
fn pick(candidates: &[Candidate], u: f64) -> Option<u32> {
    let total: f64 = candidates.iter().map(|c| f64::from(c.value)).sum();
    let mut left = u * total;
    for candidate in candidates {
        left -= f64::from(candidate.value);
        if left < 0.0 {
            return Some(candidate.id);
        }
    }
    // Rounding may leave a remainder above the last weight.
    candidates.iter().rev().find(|c| c.value > 0.0).map(|c| c.id)
}

/// Sum of exponentials relative to the highest logit.
fn sum_exp(logits: &[f32]) -> f64 {
    let max = argmax(logits).map_or(0.0, |id| logits[id as usize]);
    logits.iter().map(|&value| weight(value, max)).sum()
}

/// Log of the sum of exponentials.
fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = argmax(logits).map_or(0.0, |id| logits[id as usize]);
    f64::from(max) + sum_exp(logits).ln()
}

/// Are all logits numbers? Infinities that come from the model count as not.
pub(crate) fn check_finite(logits: &[f32], position: u32) -> Result<(), RequestError> {
    // An exponent of ones is an infinity or a NaN. Counting has no branch and vectorises.
    let bad: u32 =
        logits.iter().map(|x| u32::from(x.to_bits() & 0x7F80_0000 == 0x7F80_0000)).fold(0, u32::wrapping_add);
    if bad == 0 { Ok(()) } else { Err(RequestError::NotFinite { position }) }
}

#[cfg(test)]
mod speculate_tests;
#[cfg(test)]
mod tests;
