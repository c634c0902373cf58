//! The checks at the door: what fits the model, the context and the KV budget. Runs on the caller's thread.

use std::hash::{BuildHasher, Hasher, RandomState};

use muser_backend::TowerInfo;
use muser_kv::BLOCK_LEN;

use crate::{ContextPolicy, ImageSource, Request, SubmitError, events::MAX_TOP_LOGPROBS};

/// What a request may be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Sequences computed together.
    pub parallel: usize,
    /// Most positions of a sequence: prompt and output together.
    pub context: usize,
    /// Tokens in the vocabulary.
    pub vocab: usize,
    /// Values of an image row.
    pub hidden: usize,
    /// The tower that makes rows of pictures, if there is one.
    pub tower: Option<TowerInfo>,
    /// Blocks of the full group: `context` may need more of them than there are.
    pub full_blocks: usize,
    /// Blocks of the sliding group.
    pub sliding_blocks: usize,
    /// Bytes of all KV blocks.
    pub kv_bytes: u64,
    /// Most requests accepted and not ended.
    pub max_in_flight: usize,
    /// Events that a reader may be behind.
    pub event_ring: usize,
}

/// Checks everything about a request that does not depend on what else is running.
pub(crate) fn check(request: &Request, limits: &Limits) -> Result<(), SubmitError> {
    let invalid = |field: &'static str, expected: String, found: String| {
        Err(SubmitError::Invalid { field, expected, found })
    };
    let prompt = &request.prompt;
    if prompt.tokens.is_empty() {
        return invalid("prompt", "at least one token".into(), "no tokens".into());
    }
    let lists =
        [("prompt", &prompt.tokens), ("stop_token_ids", &request.stop_ids), ("written", &request.written)];
    for (field, ids) in lists {
        if let Some(id) = ids.iter().find(|&&id| id as usize >= limits.vocab) {
            return invalid(field, format!("token ids below {}", limits.vocab), id.to_string());
        }
    }
    if request.n == 0 || request.n > 128 {
        return invalid("n", "1 to 128".into(), request.n.to_string());
    }
    for (field, wanted) in [("logprobs", request.logprobs), ("prompt_logprobs", request.prompt_logprobs)] {
        if let Some(k) = wanted.filter(|&k| usize::from(k) > MAX_TOP_LOGPROBS) {
            return invalid(field, format!("0 to {MAX_TOP_LOGPROBS}"), k.to_string());
        }
    }
    let written = request.written.len();
    let goes_on = request.kind == crate::RequestKind::Generate && request.n == 1;
    if written > 0 && (!goes_on || request.max_tokens.is_some_and(|most| most as usize <= written)) {
        let expected = "an answer of one choice that has not reached max_tokens".into();
        return invalid("written", expected, format!("{written} ids, n {}", request.n));
    }
    request.sampling.validate(limits.vocab)?;
    let mut free_from = 0;
    for image in &prompt.images {
        let positions = image.positions(limits.hidden);
        let fits = match &image.source {
            ImageSource::Rows(rows) => rows.len() % limits.hidden == 0,
            ImageSource::Picture(picture) => {
                let Some(tower) = &limits.tower else {
                    return invalid("images", "none without a projector".into(), "a picture".into());
                };
                let side = tower.unit as usize;
                picture.rgb.len() == picture.tokens() * side * side * 3
            }
        };
        if !fits || positions == 0 || image.at < free_from || image.at + positions > prompt.tokens.len() {
            return invalid(
                "images",
                format!("whole rows of {} values inside the prompt, ascending", limits.hidden),
                format!("{positions} rows at position {}", image.at),
            );
        }
        free_from = image.at + positions;
    }
    let fits = check_length(request, limits);
    if let ContextPolicy::Shift(plan) = &request.context_policy {
        let ascending = plan.turns.windows(2).all(|pair| pair[0] < pair[1]);
        let cuts = |image: &crate::ImageRows| {
            let end = image.at + image.positions(limits.hidden);
            plan.turns.iter().any(|&turn| image.at < turn && turn < end)
        };
        let whole = !prompt.images.iter().any(cuts);
        let inside = plan.turns.first().is_none_or(|&first| first >= plan.keep)
            && plan.turns.last().unwrap_or(&plan.keep) <= &prompt.tokens.len();
        if !ascending || !inside || !whole {
            return invalid(
                "context_policy",
                "ascending turn offsets between keep and the end of the prompt, none inside an image".into(),
                format!("keep {} and turns {:?} of {} tokens", plan.keep, plan.turns, prompt.tokens.len()),
            );
        }
        // Too long as it is: it fits if what may never go (system and newest turn) fits.
        if fits.is_err()
            && let Some(&newest) = plan.turns.last()
        {
            return check_figures(plan.keep + prompt.tokens.len() - newest, request, limits);
        }
    }
    fits
}

fn check_length(request: &Request, limits: &Limits) -> Result<(), SubmitError> {
    check_figures(request.prompt.tokens.len(), request, limits)
}

fn check_figures(prompt_tokens: usize, request: &Request, limits: &Limits) -> Result<(), SubmitError> {
    // Embedding a prompt and reading one without sampling need no position for output.
    let reads_only = request.max_tokens == Some(0) || request.kind == crate::RequestKind::Embed;
    let max_prompt_tokens = limits.context - usize::from(!reads_only);
    if prompt_tokens > max_prompt_tokens {
        return Err(SubmitError::ContextLength { prompt_tokens, max_prompt_tokens, context: limits.context });
    }
    let wanted = if reads_only { 0 } else { request.max_tokens.unwrap_or(1) as usize };
    // The last sampled token is never read again, so it needs no position in a block.
    let positions = (prompt_tokens + wanted.saturating_sub(1)).min(limits.context);
    let needed_blocks = positions.div_ceil(BLOCK_LEN);
    if needed_blocks > limits.full_blocks {
        return Err(SubmitError::Capacity { needed_blocks, available_blocks: limits.full_blocks });
    }
    Ok(())
}

/// A seed from the operating system's randomness. 53 bits, so that it survives JSON readers that know only doubles.
pub(crate) fn random_seed() -> u64 {
    RandomState::new().build_hasher().finish() & ((1 << 53) - 1)
}
