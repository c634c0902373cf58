//! Leaving out old turns of a conversation that does not fit, for clients that ask for it.

use std::sync::Arc;

use serde_json::Value;

use crate::app::Loaded;
use crate::error::ApiError;
use crate::generation::run_blocking;
use crate::generation_params::{Conversation, GenerationParams, Prompt};
use crate::text::TextPipeline;

/// Output tokens that are kept free when the request names no limit.
const ROOM: usize = 1024;

/// The work with as many of its oldest turns left out as must be. The system message and the newest turn stay; if those
/// alone do not fit, it is for the engine to say so.
pub(crate) async fn to_fit(
    loaded: &Arc<Loaded>,
    mut work: GenerationParams,
) -> Result<GenerationParams, ApiError> {
    let loaded = Arc::clone(loaded);
    run_blocking(move || {
        let context = loaded.facts.context_tokens;
        let wanted = work.max_tokens.map_or(ROOM, |tokens| tokens as usize);
        let most = context.saturating_sub(wanted.clamp(1, (context / 4).max(1)));
        let Prompt::Chat(conversation) = &mut work.prompt else { return Ok(work) };
        let range = surplus(&loaded.text, conversation, most).map_err(|fault| work.places.locate(fault))?;
        conversation.messages.drain(range.clone());
        let known = work.places.messages.len();
        work.places.messages.drain(range.start.min(known)..range.end.min(known));
        Ok(work)
    })
    .await
}

/// The messages that must go so that the prompt has at most `most` tokens.
fn surplus(
    text: &TextPipeline,
    conversation: &Conversation,
    most: usize,
) -> Result<std::ops::Range<usize>, ApiError> {
    let messages = &conversation.messages;
    let first = messages.iter().take_while(|message| message["role"] == "system").count();
    let is_turn = |message: &Value| message["role"] == "user";
    let mut cuts = vec![first];
    cuts.extend((first + 1..messages.len()).filter(|&at| is_turn(&messages[at])));
    let fits = |cut: usize| {
        let mut shorter = conversation.clone();
        shorter.messages.drain(first..cut);
        text.prompt_ids(&Prompt::Chat(Box::new(shorter))).map(|ids| ids.len() <= most)
    };
    // The first cut that fits: the more is left out the shorter the prompt.
    let (mut low, mut high) = (0, cuts.len() - 1);
    if fits(cuts[low])? {
        return Ok(first..first);
    }
    while low + 1 < high {
        let middle = usize::midpoint(low, high);
        if fits(cuts[middle])? { high = middle } else { low = middle }
    }
    Ok(first..cuts[high])
}
