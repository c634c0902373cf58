//! What the user wants said, and how it becomes token ids.

use anyhow::Context as _;
use muser_text::{
    ChatInput, Markers, OutputMode, OutputOptions, Specials, Tokenizer, normalise_messages, normalise_tools,
};
use serde_json::{Value, json};

use super::Session;
use crate::cli::ReasoningChoice;
use crate::output::HintExt as _;

/// A conversation or a text to be continued.
pub enum Prompt {
    /// Goes through the model's chat template.
    Chat(ChatPrompt),
    /// Is continued as it stands, after the model's BOS.
    Raw(String),
}

/// A conversation and what goes with it.
#[derive(Clone, Debug, Default)]
pub struct ChatPrompt {
    /// Messages in the API's shape.
    pub messages: Vec<Value>,
    /// Tool definitions in the API's shape.
    pub tools: Vec<Value>,
    /// How long to think; `None` leaves it to the template.
    pub reasoning: Option<ReasoningChoice>,
}

impl ChatPrompt {
    /// A first turn.
    pub fn new(system: Option<&str>, user: &str) -> Self {
        let system = system.map(|text| json!({ "role": "system", "content": text }));
        let user = json!({ "role": "user", "content": user });
        Self { messages: system.into_iter().chain([user]).collect(), ..Self::default() }
    }
}

impl Prompt {
    /// The ids that the model reads.
    pub fn encode(&self, session: &Session) -> anyhow::Result<Vec<u32>> {
        match self {
            Self::Raw(text) => encode_raw(&session.tokenizer, text),
            Self::Chat(chat) => {
                let template = session
                    .template
                    .as_ref()
                    .with_context(|| format!("{}: the model has no chat template", session.label))
                    .hint("--raw continues a text without one")?;
                Ok(template.encode(&session.tokenizer, &chat.input()?)?)
            }
        }
    }

    /// How the answer is to be read.
    pub fn output_options(&self) -> anyhow::Result<OutputOptions> {
        let Self::Chat(chat) = self else {
            return Ok(OutputOptions { mode: OutputMode::Raw(Markers::Show), ..OutputOptions::default() });
        };
        let direct = chat.reasoning == Some(ReasoningChoice::None);
        let mode = if direct { OutputMode::ChatAnswer } else { OutputMode::Chat };
        Ok(OutputOptions { mode, tools: normalise_tools(&chat.tools)?, stop: Vec::new() })
    }
}

impl ChatPrompt {
    fn input(&self) -> anyhow::Result<ChatInput> {
        let mut input = ChatInput {
            messages: normalise_messages(&self.messages)?,
            tools: normalise_tools(&self.tools)?,
            answer_directly: self.reasoning == Some(ReasoningChoice::None),
            ..ChatInput::default()
        };
        if let Some(strength) = self.reasoning {
            let strength = match strength {
                ReasoningChoice::None => "none",
                ReasoningChoice::Low => "low",
                ReasoningChoice::Medium => "medium",
                ReasoningChoice::High => "high",
            };
            input.variables.insert("reasoning_strength".into(), strength.into());
        }
        Ok(input)
    }
}

/// Markers in a raw prompt are what the user typed for the model, so they count.
fn encode_raw(tokenizer: &Tokenizer, text: &str) -> anyhow::Result<Vec<u32>> {
    let ids = tokenizer.encode_prompt(text, Specials::Parse);
    anyhow::ensure!(!ids.is_empty(), "the prompt is empty, and this model begins no text by itself");
    Ok(ids)
}
