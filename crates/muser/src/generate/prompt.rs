//! What the user wants said, and how it becomes token ids.

use std::sync::Arc;

use anyhow::Context as _;
use muser_backend::TowerImage;
use muser_engine::{ImageRows, ImageSource};
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
    /// Encoded images, in the order of the parts that stand for them.
    pub images: Vec<Arc<[u8]>>,
}

impl ChatPrompt {
    /// A first turn.
    pub fn new(system: Option<&str>, user: &str) -> Self {
        let system = system.map(|text| json!({ "role": "system", "content": text }));
        let user = json!({ "role": "user", "content": user });
        Self { messages: system.into_iter().chain([user]).collect(), ..Self::default() }
    }

    /// Puts images before the text of the last message.
    pub fn show(&mut self, images: Vec<Arc<[u8]>>) {
        let Some(last) = self.messages.last_mut().filter(|_| !images.is_empty()) else { return };
        let text = last["content"].as_str().unwrap_or_default().to_owned();
        let parts = images.iter().map(|_| json!({ "type": "image" }));
        last["content"] = parts.chain([json!({ "type": "text", "text": text })]).collect();
        self.images.extend(images);
    }
}

impl Prompt {
    /// The ids that the model reads.
    pub fn encode(&self, session: &Session) -> anyhow::Result<muser_engine::Prompt> {
        match self {
            Self::Raw(text) => Ok(encode_raw(&session.tokenizer, text)?.into()),
            Self::Chat(chat) => {
                let template = session
                    .template
                    .as_ref()
                    .with_context(|| format!("{}: the model has no chat template", session.label))
                    .hint("--raw continues a text without one")?;
                let pictures = chat.images.iter().map(|bytes| picture(session, bytes));
                let pictures: Vec<(TowerImage, [u8; 32])> = pictures.collect::<anyhow::Result<_>>()?;
                let rows: Vec<usize> = pictures.iter().map(|(image, _)| image.tokens()).collect();
                let found = template.encode_with_images(&session.tokenizer, &chat.input()?, &rows)?;
                let placed = found.images.iter().map(|(number, at)| {
                    let (image, digest) = pictures[*number].clone();
                    ImageRows { at: *at, source: ImageSource::Picture(image), digest }
                });
                Ok(muser_engine::Prompt { images: placed.collect(), tokens: found.ids })
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

fn picture(session: &Session, bytes: &[u8]) -> anyhow::Result<(TowerImage, [u8; 32])> {
    let reader = session
        .sight
        .as_ref()
        .map_err(|reason| anyhow::anyhow!("{reason}"))
        .hint("--mmproj names the projector (mmproj, GGUF) that was made for the model")?;
    Ok(reader.read(bytes, false)?)
}

/// Markers in a raw prompt are what the user typed for the model, so they count.
fn encode_raw(tokenizer: &Tokenizer, text: &str) -> anyhow::Result<Vec<u32>> {
    let ids = tokenizer.encode_prompt(text, Specials::Parse);
    anyhow::ensure!(!ids.is_empty(), "the prompt is empty, and this model begins no text by itself");
    Ok(ids)
}
