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
//! 7. One number of the counter-based generator ([`rng`]) picks from the weights in rank order.
//!
//! Sums are taken in one order in f64, so the same logits give the same token everywhere.

mod candidates;
mod counts;
mod params;
pub mod rng;

use crate::{RequestError, TokenMask, TopLogprobs};

pub use candidates::Candidate;
use candidates::{argmax, by_rank, top_k};
pub use counts::TokenCounts;
pub use params::SamplingParams;

/// Candidates looked at first when there is no top-k; more are fetched when they do not reach top-p.
const FIRST_CANDIDATES: usize = 256;

/// Scratch memory for sampling; one per engine. Allocates nothing once it has seen the largest request.
#[derive(Debug, Default)]
pub struct Sampler {
    candidates: Vec<Candidate>,
    /// The model's own logits of a row that is about to be shaped.
    kept: Vec<f32>,
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
    pub fn shape(
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
        let u = rng::uniform(key.seed, key.index, key.position, rng::Stream::Sample);
        pick(&self.candidates, u)
    }

    /// Steps 5 and 6: the candidates left, best first, with their weights (relative, the best has 1) as values. `None`
    /// when no token is left.
    pub fn distribution(&mut self, params: &SamplingParams, logits: &[f32]) -> Option<&[Candidate]> {
        self.filter(params, logits);
        let best = self.candidates.first()?.value;
        // In f64, so that neither a tiny nor a huge temperature overflows or loses the differences.
        let inverse = 1.0 / f64::from(params.temperature.max(SamplingParams::GREEDY_BELOW));
        for candidate in &mut self.candidates {
            candidate.value = (f64::from(candidate.value - best) * inverse).exp() as f32;
        }
        Some(&self.candidates)
    }

    /// Leaves in `candidates` what top-k, top-p and min-p let through, best first, values are logits.
    fn filter(&mut self, params: &SamplingParams, logits: &[f32]) {
        let top_p = f64::from(params.top_p);
        if params.top_k > 0 {
            top_k(logits, params.top_k as usize, &mut self.candidates);
            let total = self.mass();
            self.keep_nucleus(top_p, total);
        } else if params.top_p < 1.0 || params.min_p > 0.0 {
            let total = if params.top_p < 1.0 { sum_exp(logits) } else { 0.0 };
            let mut k = FIRST_CANDIDATES;
            loop {
                top_k(logits, k, &mut self.candidates);
                let all = self.candidates.len() < k || k >= logits.len();
                if all || self.is_enough(params, total) {
                    break;
                }
                k = (k * 8).min(logits.len());
            }
            self.keep_nucleus(top_p, total);
        } else {
            self.candidates.clear();
            let left = logits.iter().enumerate().filter(|(_, value)| **value > f32::NEG_INFINITY);
            self.candidates.extend(left.map(|(i, &value)| Candidate { id: i as u32, value }));
            // The order does not matter for what is left, but the best comes first for `distribution`.
            if let Some(best) =
                (0..self.candidates.len()).min_by(|&a, &b| by_rank(&self.candidates[a], &self.candidates[b]))
            {
                self.candidates.swap(0, best);
            }
        }
        if params.min_p > 0.0
            && let Some(best) = self.candidates.first().copied()
        {
            let lowest = f64::from(best.value) + f64::from(params.min_p).ln();
            let keep = self.candidates.partition_point(|c| f64::from(c.value) >= lowest);
            self.candidates.truncate(keep.max(1));
        }
    }

    /// Do the candidates reach as far as the filters look?
    fn is_enough(&self, params: &SamplingParams, total: f64) -> bool {
        let (Some(first), Some(last)) = (self.candidates.first(), self.candidates.last()) else {
            return true;
        };
        let below_min =
            params.min_p > 0.0 && f64::from(last.value - first.value) < f64::from(params.min_p).ln();
        below_min || (params.top_p < 1.0 && self.mass() >= f64::from(params.top_p) * total)
    }

    /// Sum of exponentials of the candidates relative to the best.
    fn mass(&self) -> f64 {
        let Some(best) = self.candidates.first() else { return 0.0 };
        self.candidates.iter().map(|c| f64::from(c.value - best.value).exp()).sum()
    }

    /// Cuts the sorted candidates where their mass reaches `top_p` of `total` (both relative to the best logit). The
    /// token that crosses the line stays.
    fn keep_nucleus(&mut self, top_p: f64, total: f64) {
        let Some(best) = self.candidates.first().map(|c| c.value) else { return };
        if top_p >= 1.0 {
            return;
        }
        let mut mass = 0.0;
        let keep = self.candidates.iter().position(|candidate| {
            mass += f64::from(candidate.value - best).exp();
            mass >= top_p * total
        });
        if let Some(last) = keep {
            self.candidates.truncate(last + 1);
        }
    }
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
    logits.iter().map(|&value| f64::from((value - max).exp())).sum()
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
mod tests;
