//! A generation as every route asks for it, after its own shape has been taken off.

use std::time::Duration;

use muser_engine::SamplingParams;
use serde_json::{Map, Value};

use crate::pictures::Picture;
use crate::places::Places;

/// Which tools the model may or must call.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// As it likes.
    #[default]
    Auto,
    /// None.
    None,
    /// At least one.
    Required,
    /// This one.
    Named(String),
}

/// A conversation and what the model may do in its turn.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Conversation {
    /// The messages, as `muser_text` normalises them.
    pub messages: Vec<Value>,
    /// The tools, likewise.
    pub tools: Vec<Value>,
    /// The names of the tools whose schemas must be kept as they are.
    pub strict_tools: Vec<String>,
    /// The choice among them.
    pub tool_choice: ToolChoice,
    /// Those that may be called, if not all: the others are shown all the same, so that the prompt does not change.
    pub allowed: Option<Vec<String>>,
    /// Whether one turn may hold several calls.
    pub parallel_calls: bool,
    /// Reasoning strength in the model's words; `none`: answer at once; absent: the template's default.
    pub strength: Option<String>,
    /// What the answer begins with: the model goes on from there, without reasoning.
    pub prefix: Option<String>,
    /// More variables for the template.
    pub variables: Map<String, Value>,
    /// Images, by the numbers that parts of messages have.
    pub pictures: Vec<Picture>,
}

impl Conversation {
    /// The tools' names.
    pub fn tool_names(&self) -> impl Iterator<Item = &str> {
        self.tools.iter().filter_map(|tool| tool["function"]["name"].as_str())
    }
}

/// What the model reads.
#[derive(Debug, Clone, PartialEq)]
pub enum Prompt {
    /// A conversation, through the chat template; the answer is read by channel.
    Chat(Box<Conversation>),
    /// Text as it is; the answer is text as it is.
    Text(String),
    /// Token ids.
    Tokens(Vec<u32>),
    /// Text and token ids mixed, as llama-server takes them.
    Mixed(Vec<PromptPart>),
}

/// A part of a mixed prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PromptPart {
    /// Text.
    Text(String),
    /// A token id.
    Token(u32),
    /// An image.
    Picture(Picture),
}

/// The form that the answer must have. Reasoning is always free.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum ResponseFormat {
    /// Any text.
    #[default]
    Free,
    /// A JSON object.
    JsonObject,
    /// JSON that this schema allows.
    JsonSchema(Value),
    /// Text that this grammar allows.
    Grammar(String),
    /// Text that this regular expression matches as a whole.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
}

/// A generation.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerationParams {
    /// What the model reads.
    pub prompt: Prompt,
    /// Most tokens to generate.
    pub max_tokens: Option<u32>,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Start of the random stream.
    pub seed: Option<u64>,
    /// Strings that end the text.
    pub stops: Vec<String>,
    /// Token ids that end the text besides the model's own.
    pub stop_ids: Vec<u32>,
    /// Tokens before which the model may not end its turn.
    pub min_tokens: u32,
    /// Whether the model may not end its turn at all.
    pub ignore_end: bool,
    /// Whether the one token after the prompt is told of whatever it is: tools that measure prompts drop the last entry.
    pub tells_last: bool,
    /// Answers wanted.
    pub choices: u32,
    /// Alternatives to report with each token.
    pub logprobs: Option<u8>,
    /// Alternatives to report with each token of the prompt.
    pub prompt_logprobs: Option<u8>,
    /// The answer's form.
    pub form: ResponseFormat,
    /// The slot that the client names, for saving it later.
    pub slot: Option<usize>,
    /// Whether cached prefixes may be used.
    pub use_cache: bool,
    /// Narrows whose cached prefixes those are: only requests with the same text share.
    pub cache_salt: Option<String>,
    /// Lower goes first, in vLLM's sense.
    pub priority: i32,
    /// Longest time from the request's arrival to the end of the text.
    pub timeout: Option<Duration>,
    /// Whether old parts of the text go when the context is full; otherwise the server's setting.
    pub context_shift: Option<bool>,
    /// Of plain text, the tokens that stay then; all of the prompt if negative.
    pub keep: i64,
    /// Where the parts of the prompt stood in the request.
    pub places: Places,
    /// Fields of the request that are left out, and why, for whoever sent them.
    pub left_out: Vec<(String, String)>,
}

impl GenerationParams {
    /// A generation with defaults.
    pub fn new(prompt: Prompt) -> Self {
        Self {
            prompt,
            max_tokens: None,
            sampling: SamplingParams::default(),
            seed: None,
            stops: Vec::new(),
            stop_ids: Vec::new(),
            min_tokens: 0,
            ignore_end: false,
            tells_last: false,
            choices: 1,
            logprobs: None,
            prompt_logprobs: None,
            form: ResponseFormat::Free,
            slot: None,
            use_cache: true,
            cache_salt: None,
            priority: 0,
            timeout: None,
            context_shift: None,
            keep: 0,
            places: Places::default(),
            left_out: Vec::new(),
        }
    }
}
