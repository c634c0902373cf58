//! Speculative sampling of one position: a proposal from the draft's logits (q), a verdict from the target's (p).
//!
//! Both sets of logits have gone through the same steps 2 and 3 of the sampler, and all methods apply the same filters to
//! both. Two methods, both lossless:
//!
//! - [`DraftSampling::Exact`]: the draft's most probable token is proposed; the target's token is drawn as if there were no
//!   draft, and the proposal counts if it is that token. So the text is that of plain sampling, bit for bit, whatever was
//!   proposed and however much. The rate is the target's probability of the proposal.
//! - [`DraftSampling::Rejection`]: the proposal is drawn from `q` and accepted with probability `min(1, p/q)`; otherwise the
//!   token is drawn from what `p` has more than `q`. The three draws have random streams of their own. The distribution is
//!   exactly `p`, but which token comes depends on where rounds begin: the same seed gives the same text only with the
//!   same draft lengths. The rate is the overlap of `p` and `q`, the higher of the two where the draft knows not only what is
//!   likely but how likely.

use super::{Candidate, DrawKey, Sampler, SamplingParams, argmax, pick, rng};

/// How proposals for a sampled (not greedy) sequence are drawn and verified.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DraftSampling {
    /// The target draws by itself: the text of plain sampling.
    #[default]
    Exact,
    /// Rejection sampling: the distribution of plain sampling.
    Rejection,
}

/// What became of a proposal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// The token of this position.
    pub token: u32,
    /// Is it the proposal? If not, what was proposed after it is void.
    pub accepted: bool,
}

impl Sampler {
    /// Draws a proposal from the draft's shaped logits. `None` when no token is left.
    pub fn propose(
        &mut self,
        how: DraftSampling,
        params: &SamplingParams,
        draft_logits: &[f32],
        key: DrawKey,
    ) -> Option<u32> {
        if how == DraftSampling::Exact || params.is_greedy() {
            return argmax(draft_logits);
        }
        self.distribution(params, draft_logits)?;
        pick(&self.candidates, rng::uniform(key.seed, key.index, key.position, rng::Stream::Draft))
    }

    /// The token of a position for which `proposal` was drawn with [`Sampler::propose`] from `draft_logits`, by the target's
    /// shaped logits. `None` when the target has no token left.
    pub fn verify(
        &mut self,
        how: DraftSampling,
        params: &SamplingParams,
        logits: &[f32],
        draft_logits: &[f32],
        proposal: u32,
        key: DrawKey,
    ) -> Option<Verdict> {
        if how == DraftSampling::Exact || params.is_greedy() {
            let token = self.draw(params, logits, key)?;
            return Some(Verdict { token, accepted: token == proposal });
        }
        self.distribution(params, draft_logits)?;
        std::mem::swap(&mut self.candidates, &mut self.draft);
        self.draft_weights.resize(logits.len().max(draft_logits.len()), 0.0);
        for candidate in &self.draft {
            self.draft_weights[candidate.id as usize] = candidate.value;
        }
        let left = self.distribution(params, logits).is_some();
        let verdict = if left { self.judge(proposal, key) } else { None };
        for candidate in &self.draft {
            self.draft_weights[candidate.id as usize] = 0.0;
        }
        verdict
    }

    /// Accepts the proposal or draws from the residual. The target's weights are in `candidates`, the draft's in
    /// `draft_weights` by id, both relative.
    fn judge(&mut self, proposal: u32, key: DrawKey) -> Option<Verdict> {
        let uniform = |stream| rng::uniform(key.seed, key.index, key.position, stream);
        let (p_total, q_total) = (total(&self.candidates), total(&self.draft));
        let q = |id: u32| f64::from(self.draft_weights[id as usize]) / q_total;
        let p_of_proposal = self
            .candidates
            .iter()
            .find(|candidate| candidate.id == proposal)
            .map_or(0.0, |candidate| f64::from(candidate.value) / p_total);
        if uniform(rng::Stream::Accept) * q(proposal) < p_of_proposal {
            return Some(Verdict { token: proposal, accepted: true });
        }
        let u = uniform(rng::Stream::Residual);
        let residual =
            |candidate: &Candidate| (f64::from(candidate.value) / p_total - q(candidate.id)).max(0.0);
        let mut left = u * self.candidates.iter().map(residual).sum::<f64>();
        for candidate in &self.candidates {
            let weight = residual(candidate);
            left -= weight;
            if weight > 0.0 && left < 0.0 {
                return Some(Verdict { token: candidate.id, accepted: false });
            }
        }
        // Rounding may leave a remainder above the last weight, or nothing at all where p and q are equal.
        let last = self.candidates.iter().rev().find(|candidate| residual(candidate) > 0.0);
        let token = last.map(|candidate| candidate.id).or_else(|| pick(&self.candidates, u))?;
        Some(Verdict { token, accepted: false })
    }
}

fn total(candidates: &[Candidate]) -> f64 {
    candidates.iter().map(|candidate| f64::from(candidate.value)).sum()
}
