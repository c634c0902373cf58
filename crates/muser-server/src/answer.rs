//! What a generation gives, before any API's shape: pieces of text by channel, tool calls, and how it ended.

use muser_engine::FinishReason;
use muser_text::{OutputEvent, PARTIAL_JSON};
use serde_json::{Value, json};

use crate::error::ApiError;

/// One step of a generation with one or more choices.
#[derive(Debug, Clone, PartialEq)]
pub enum Update {
    /// The prompt has been read.
    Started {
        /// Prompt tokens.
        prompt_tokens: u32,
        /// Of these, reused from a cache.
        cached_tokens: u32,
    },
    /// What is known of the prompt's own tokens, when asked for; before everything else.
    Prompt(Vec<PromptToken>),
    /// A piece of a choice.
    Piece {
        /// Which choice.
        choice: u32,
        /// The piece.
        piece: OutputEvent,
        /// Log-probabilities of the tokens behind it, when asked for.
        logprobs: Vec<TokenLogprob>,
    },
    /// A choice has ended.
    Finished {
        /// Which choice.
        choice: u32,
        /// How.
        outcome: Outcome,
    },
    /// Everything went well and nothing follows.
    End,
    /// All has ended, by a fault that is not the client's; nothing follows.
    Failed(ApiError),
}

/// A token with its log-probability and alternatives, as bytes: a token need not be whole characters.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprob {
    /// The token id.
    pub id: u32,
    /// The token's bytes.
    pub bytes: Vec<u8>,
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// The most likely tokens: id, bytes, log-probability; most likely first.
    pub top: Vec<(u32, Vec<u8>, f32)>,
}

/// A token of the prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct PromptToken {
    /// The token id.
    pub id: u32,
    /// The token's bytes.
    pub bytes: Vec<u8>,
    /// Its log-probability after the tokens before it, and its rank among all; the first token has none.
    pub known: Option<(f32, u32)>,
    /// The most likely tokens in its place, as in [`TokenLogprob::top`].
    pub top: Vec<(u32, Vec<u8>, f32)>,
}

/// Why a choice ended, as APIs see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Finish {
    /// The model ended its turn.
    Stop,
    /// This stop string came up.
    StopString(String),
    /// Output limit or end of context.
    Length,
    /// The model calls tools.
    ToolCalls,
}

impl Finish {
    /// OpenAI's word.
    pub fn openai(&self) -> &'static str {
        match self {
            Self::Stop | Self::StopString(_) => "stop",
            Self::Length => "length",
            Self::ToolCalls => "tool_calls",
        }
    }

    /// Anthropic's word.
    pub fn anthropic(&self) -> &'static str {
        match self {
            Self::Stop => "end_turn",
            Self::StopString(_) => "stop_sequence",
            Self::Length => "max_tokens",
            Self::ToolCalls => "tool_use",
        }
    }

    /// The label in metrics.
    pub fn label(&self) -> &'static str {
        self.openai()
    }

    /// From the engine's reason, when the text itself does not say more. What the server cut off never comes here.
    pub fn of(reason: FinishReason) -> Self {
        match reason {
            FinishReason::Stop(_) | FinishReason::StopWatch => Self::Stop,
            FinishReason::Length
            | FinishReason::Context
            | FinishReason::Deadline
            | FinishReason::Cancelled
            | FinishReason::SlowReader => Self::Length,
        }
    }
}

/// Token counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Prompt tokens.
    pub prompt: u32,
    /// Of these, reused from a cache.
    pub cached: u32,
    /// Of the cached ones, brought by a pack.
    pub restored: u32,
    /// Of these, read by another node.
    pub handed: u32,
    /// Prompt tokens that are rows of images.
    pub images: u32,
    /// Generated tokens, those that end the text included.
    pub completion: u32,
    /// Of these, in the reasoning channel.
    pub reasoning: u32,
}

impl Usage {
    /// Adds another choice of the same prompt.
    pub fn add_choice(&mut self, other: Self) {
        self.prompt = other.prompt;
        self.cached = other.cached;
        self.restored = other.restored;
        self.handed = other.handed;
        self.images = other.images;
        self.completion += other.completion;
        self.reasoning += other.reasoning;
    }

    /// Adds a request with another prompt.
    pub fn add_prompt(&mut self, other: Self) {
        self.prompt += other.prompt;
        self.cached += other.cached;
        self.restored += other.restored;
        self.handed += other.handed;
        self.images += other.images;
        self.completion += other.completion;
        self.reasoning += other.reasoning;
    }

    /// OpenAI's object for chat and text completions.
    pub fn openai(&self) -> Value {
        let mut usage = json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {
                "cached_tokens": self.cached, "restored_tokens": self.restored, "handed_tokens": self.handed,
            },
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        });
        if self.images > 0 {
            usage["prompt_tokens_details"]["image_tokens"] = self.images.into();
        }
        usage
    }

    /// Anthropic's object: there, cached tokens are not part of the input tokens.
    pub fn anthropic(&self) -> Value {
        json!({
            "input_tokens": self.prompt - self.cached.min(self.prompt),
            "output_tokens": self.completion,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.cached,
        })
    }
}

/// Seconds that a choice took.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Seconds {
    /// In the queue.
    pub queue: f64,
    /// Reading the prompt.
    pub prefill: f64,
    /// Generating.
    pub decode: f64,
}

/// How a choice ended and what it took.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// Tokens that went because the context was full.
    pub shifted: u32,
    /// Why.
    pub finish: Finish,
    /// Tokens.
    pub usage: Usage,
    /// Time.
    pub seconds: Seconds,
}

impl Outcome {
    /// llama-server's `timings` object, which several tools read.
    pub fn timings(&self) -> Value {
        let computed = self.usage.prompt - self.usage.cached.min(self.usage.prompt);
        let rate = |tokens: u32, seconds: f64| if seconds > 0.0 { f64::from(tokens) / seconds } else { 0.0 };
        let each =
            |tokens: u32, seconds: f64| if tokens > 0 { seconds * 1e3 / f64::from(tokens) } else { 0.0 };
        // The first token belongs to the prefill.
        let decoded = self.usage.completion.saturating_sub(1);
        json!({
            "cache_n": self.usage.cached,
            "prompt_n": computed,
            "prompt_ms": self.seconds.prefill * 1e3,
            "prompt_per_token_ms": each(computed, self.seconds.prefill),
            "prompt_per_second": rate(computed, self.seconds.prefill),
            "predicted_n": self.usage.completion,
            "predicted_ms": self.seconds.decode * 1e3,
            "predicted_per_token_ms": each(decoded, self.seconds.decode),
            "predicted_per_second": rate(decoded, self.seconds.decode),
            "queue_ms": self.seconds.queue * 1e3,
        })
    }
}

/// A finished tool call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolCall {
    /// Its id.
    pub id: String,
    /// The tool's name.
    pub name: String,
    /// The arguments as JSON text.
    pub arguments: String,
}

/// The arguments of a call as an object. A call that was cut off has none: what there is of its text stands under a key
/// of its own, so that nobody takes it for a call that can be made. It can be sent back as it is.
pub fn call_input(arguments: &str) -> Value {
    match serde_json::from_str(arguments) {
        Ok(whole @ Value::Object(_)) => whole,
        _ => json!({PARTIAL_JSON: arguments}),
    }
}

/// Whether a call's arguments are all there: their last bracket comes with the end of the call.
pub fn is_whole(arguments: &str) -> bool {
    serde_json::from_str::<serde_json::Map<String, Value>>(arguments).is_ok()
}

/// One finished choice.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// The reasoning channel.
    pub reasoning: String,
    /// The answer's text.
    pub content: String,
    /// Tool calls.
    pub tool_calls: Vec<ToolCall>,
    /// Log-probabilities of the answer's tokens, when asked for.
    pub logprobs: Vec<TokenLogprob>,
    /// The prompt's own tokens, when asked for; with the first choice.
    pub prompt: Option<Vec<PromptToken>>,
    /// How it ended.
    pub outcome: Outcome,
}

impl Default for Answer {
    fn default() -> Self {
        let outcome = Outcome {
            shifted: 0,
            finish: Finish::Stop,
            usage: Usage::default(),
            seconds: Seconds::default(),
        };
        Self {
            reasoning: String::new(),
            content: String::new(),
            tool_calls: Vec::new(),
            logprobs: Vec::new(),
            prompt: None,
            outcome,
        }
    }
}

impl Answer {
    /// Takes in a piece.
    pub fn push(&mut self, piece: OutputEvent, logprobs: Vec<TokenLogprob>) {
        self.logprobs.extend(logprobs);
        match piece {
            OutputEvent::Reasoning(text) => self.reasoning.push_str(&text),
            OutputEvent::Content(text) => self.content.push_str(&text),
            OutputEvent::ToolCallStart { id, name, .. } => {
                self.tool_calls.push(ToolCall { id, name, arguments: String::new() });
            }
            OutputEvent::ToolCallArguments { index, json_delta: fragment } => {
                if let Some(call) = self.tool_calls.get_mut(index) {
                    call.arguments.push_str(&fragment);
                }
            }
            OutputEvent::ToolCallEnd { .. } => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cached_tokens_are_counted_as_each_api_counts_them() {
        let usage = Usage { prompt: 100, cached: 60, completion: 7, reasoning: 3, ..Usage::default() };
        assert_eq!(usage.openai()["prompt_tokens"], 100);
        assert_eq!(usage.openai()["prompt_tokens_details"]["cached_tokens"], 60);
        assert_eq!(usage.openai()["total_tokens"], 107);
        assert_eq!(usage.anthropic()["input_tokens"], 40);
        assert_eq!(usage.anthropic()["cache_read_input_tokens"], 60);
    }

    #[test]
    fn choices_share_a_prompt_and_lists_of_prompts_do_not() {
        let one =
            Usage { prompt: 10, cached: 4, restored: 2, handed: 1, images: 5, completion: 3, reasoning: 1 };
        let mut choices = Usage::default();
        choices.add_choice(one);
        choices.add_choice(one);
        assert_eq!(
            choices,
            Usage { prompt: 10, cached: 4, restored: 2, handed: 1, images: 5, completion: 6, reasoning: 2 }
        );
        let mut prompts = Usage::default();
        prompts.add_prompt(one);
        prompts.add_prompt(one);
        assert_eq!(
            prompts,
            Usage { prompt: 20, cached: 8, restored: 4, handed: 2, images: 10, completion: 6, reasoning: 2 }
        );
    }

    #[test]
    fn rates_never_divide_by_zero() {
        let outcome = Answer::default().outcome;
        assert_eq!(outcome.timings()["predicted_per_second"], 0.0);
    }
}
