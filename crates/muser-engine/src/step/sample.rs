//! From logits to a token.

use crate::{
    RequestError, Token, TopLogprobs,
    sampler::{DraftSampling, DrawKey, Sampler, Tools, Verdict, check_finite},
    sequence::Sequence,
};

/// Takes in the logits of consecutive rows of a prompt, the first one at position `first`: each tells of the token after it.
pub(super) fn note_prompt(
    sequence: &mut Sequence,
    sampler: &mut Sampler,
    rows: std::slice::ChunksExact<'_, f32>,
    first: usize,
) -> Result<(), RequestError> {
    let prompt = &sequence.text.tokens()[..(sequence.task.prompt_tokens as usize).min(sequence.text.len())];
    let Some(known) = &mut sequence.known.logprobs else { return Ok(()) };
    for (position, logits) in (first..).zip(rows) {
        let Some(&id) = prompt.get(position + 1) else { break };
        check_finite(logits, position as u32)?;
        let (log_sum, top) = sampler.logprobs(logits, known.top_each);
        let value = logits[id as usize];
        let rank = 1 + logits.iter().filter(|&&other| other > value).count() as u32;
        known.tokens.push(((f64::from(value) - log_sum) as f32, rank));
        known.top.extend_from_slice(top.as_slice());
    }
    Ok(())
}

/// A token of which nothing else is known.
pub(super) fn bare_token(sequence: &Sequence, id: u32) -> Token {
    Token { index: sequence.index, id, logprob: None, top: TopLogprobs::default(), logit_hash: None }
}

/// A token from the highest logits of a row.
pub(super) fn draw_among(
    sequence: &Sequence,
    sampler: &mut Sampler,
    highest: &[(u32, f32)],
    position: u32,
) -> Result<u32, RequestError> {
    let finite = highest.first().is_some_and(|best| best.1.is_finite());
    let token = sampler.draw_among(&sequence.task.sampling, highest, draw_key(sequence));
    token.filter(|_| finite).ok_or(RequestError::NotFinite { position })
}

/// Which random number draws a sequence's next token.
fn draw_key(sequence: &Sequence) -> DrawKey {
    let task = &sequence.task;
    DrawKey {
        seed: task.seed,
        index: sequence.index,
        position: u64::from(task.prompt_tokens) + u64::from(sequence.progress.generated()),
    }
}

/// One token from one row of logits, and whether it is the proposal that was made for it. A proposal comes with the shaped
/// logits that it was drawn from.
pub(super) fn sample(
    sequence: &mut Sequence,
    tools: &mut Tools,
    logits: &mut [f32],
    position: u32,
    proposal: Option<(u32, &[f32])>,
    how: DraftSampling,
) -> Result<(Token, bool), RequestError> {
    let Tools { sampler, mask } = tools;
    check_finite(logits, position)?;
    let task = &sequence.task;
    let logit_hash = task.hash_logits.then(|| hash_logits(logits));
    // The token's own log-probability needs its logit from before the filters, and the token from after them.
    let logprobs = task.logprobs.map(|k| sampler.logprobs(logits, usize::from(k)));
    let masked = match &mut sequence.rules.constraint {
        Some(constraint) => {
            mask.clear();
            constraint.mask(mask)
        }
        None => false,
    };
    let key = draw_key(sequence);
    let shapes = masked || sequence.rules.counts.is_some() || !task.sampling.logit_bias.is_empty();
    if shapes {
        if logprobs.is_some() {
            sampler.keep(logits);
        }
        Sampler::apply_processors(
            &task.sampling,
            sequence.rules.counts.as_ref(),
            masked.then_some(&*mask),
            logits,
        );
    }
    let verdict = match proposal {
        Some((id, draft_logits)) => sampler.verify(how, &task.sampling, logits, draft_logits, id, key),
        None => sampler.draw(&task.sampling, logits, key).map(|token| Verdict { token, accepted: false }),
    };
    let Verdict { token: id, accepted } =
        verdict.ok_or_else(|| RequestError::Constraint("no token is allowed".into()))?;
    let (logprob, top) = match logprobs {
        None => (None, TopLogprobs::default()),
        Some((log_sum, top)) => {
            let value = if shapes { sampler.kept(id) } else { logits[id as usize] };
            (Some((f64::from(value) - log_sum) as f32), top)
        }
    };
    if let Some(constraint) = &mut sequence.rules.constraint {
        constraint.commit(id).map_err(RequestError::Constraint)?;
    }
    Ok((Token { index: sequence.index, id, logprob, top, logit_hash }, accepted))
}

/// First 8 bytes of BLAKE3 over the logits.
pub(crate) fn hash_logits(logits: &[f32]) -> u64 {
    let mut hasher = blake3::Hasher::new();
    let mut bytes = [0; 1024];
    for chunk in logits.chunks(256) {
        for (to, value) in bytes.chunks_exact_mut(4).zip(chunk) {
            to.copy_from_slice(&value.to_le_bytes());
        }
        hasher.update(&bytes[..chunk.len() * 4]);
    }
    let mut first = [0; 8];
    first.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
    u64::from_le_bytes(first)
}
