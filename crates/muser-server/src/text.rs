//! The text side of the loaded model: prompts to ids, ids to pieces.

use std::sync::{Arc, OnceLock};

use muser_engine::ShiftPlan;
use muser_gguf::GgufFile;
use muser_text::grammar::GrammarEngine;
use muser_text::{
    ChatInput, ChatTemplate, Markers, OutputDecoder, OutputMode, OutputOptions, PromptIds, Specials,
    StopMatcher, TextError, Tokenizer,
};
use serde_json::Value;

use crate::conversation::{text_fault, without_pictures};
use crate::error::{ApiError, ServerError};
use crate::generation_params::{Conversation, Prompt, PromptPart};
use crate::pictures::{Picture, Pictures};

/// Role of the messages that begin a turn.
const USER: &str = "user";

/// Vocabulary, template and parsers of the loaded model.
#[derive(Debug)]
pub struct TextPipeline {
    tokenizer: Arc<Tokenizer>,
    template: Option<ChatTemplate>,
    template_source: String,
    grammars: OnceLock<Arc<GrammarEngine>>,
    pictures: Pictures,
}

impl TextPipeline {
    /// From the model's file.
    pub fn from_gguf(file: &GgufFile) -> Result<Self, ServerError> {
        let fault = |error: TextError| ServerError::Text(error.to_string());
        let template_source = file.opt_str("tokenizer.chat_template").ok().flatten().unwrap_or_default();
        Ok(Self {
            tokenizer: Arc::new(Tokenizer::from_gguf(file).map_err(fault)?),
            template: ChatTemplate::from_gguf(file).map_err(fault)?,
            template_source: template_source.to_owned(),
            grammars: OnceLock::new(),
            pictures: Pictures::default(),
        })
    }

    /// The vocabulary.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// Says what becomes of images; without a word they are refused.
    pub fn show_pictures(&mut self, pictures: Pictures) {
        self.pictures = pictures;
    }

    /// Are images shown to the model?
    pub fn sees(&self) -> bool {
        matches!(self.pictures, Pictures::Shown(_))
    }

    /// Tokens in the vocabulary.
    pub fn vocabulary(&self) -> usize {
        self.tokenizer.vocab_size()
    }

    /// The template as the file has it.
    pub fn template_source(&self) -> &str {
        &self.template_source
    }

    /// The ids of a prompt. Text from a request never becomes a control token.
    pub fn prompt_ids(&self, prompt: &Prompt) -> Result<Vec<u32>, ApiError> {
        Ok(self.places(prompt)?.ids)
    }

    /// A prompt as the engine takes it: ids, and its images decoded.
    pub fn engine_prompt(&self, prompt: &Prompt) -> Result<muser_engine::Prompt, ApiError> {
        let found = self.places(prompt)?;
        self.with_pictures(prompt, found)
    }

    /// Decodes the images whose places are known.
    pub(crate) fn with_pictures(
        &self,
        prompt: &Prompt,
        found: PromptIds,
    ) -> Result<muser_engine::Prompt, ApiError> {
        let mut images = Vec::with_capacity(found.images.len());
        if let Pictures::Shown(reader) = &self.pictures {
            let pictures = pictures_of(prompt);
            for (number, at) in found.images {
                let picture =
                    pictures.get(number).ok_or_else(|| ApiError::internal("An image has no number"))?;
                images.push(reader.placed(picture, at)?);
            }
        }
        Ok(muser_engine::Prompt { tokens: found.ids, images })
    }

    /// The rows of each image of a prompt, from the headers alone.
    fn rows(&self, prompt: &Prompt) -> Result<Vec<usize>, ApiError> {
        let pictures = pictures_of(prompt);
        match &self.pictures {
            Pictures::Shown(reader) => pictures.into_iter().map(|picture| reader.rows(picture)).collect(),
            Pictures::Absent(reason) => match pictures.first() {
                Some(picture) => Err(ApiError::unsupported(&picture.place, reason)),
                None => Ok(Vec::new()),
            },
        }
    }

    /// The ids of a prompt and the places of its images.
    pub(crate) fn places(&self, prompt: &Prompt) -> Result<PromptIds, ApiError> {
        if let (Prompt::Chat(conversation), Pictures::Absent(reason)) = (prompt, &self.pictures)
            && !conversation.pictures.is_empty()
        {
            return self.places(&Prompt::Chat(Box::new(without_pictures(conversation, reason)?)));
        }
        let rows = self.rows(prompt)?;
        let ids = match prompt {
            Prompt::Chat(conversation) => {
                let template = self.chat_template()?;
                return template
                    .encode_with_images(&self.tokenizer, &chat_input(conversation), &rows)
                    .map_err(|fault| text_fault(&fault));
            }
            Prompt::Text(text) => Ok(self.tokenizer.encode_prompt(text, Specials::Plain)),
            Prompt::Tokens(ids) => {
                let vocabulary = self.vocabulary();
                match ids.iter().find(|id| **id as usize >= vocabulary) {
                    Some(id) => Err(ApiError::field(
                        "prompt",
                        format!("Token id {id} is outside the model's vocabulary of {vocabulary}"),
                    )),
                    None => Ok(ids.clone()),
                }
            }
            Prompt::Mixed(parts) => {
                let mut out = PromptIds::default();
                // The token that begins a text comes first, so that the places of images are known.
                self.tokenizer.ensure_bos(&mut out.ids);
                let begun = out.ids.len();
                for part in parts {
                    match part {
                        PromptPart::Text(text) => {
                            self.tokenizer.encode_into(text, Specials::Plain, &mut out.ids);
                        }
                        PromptPart::Token(id) => out.ids.push(*id),
                        PromptPart::Picture(_) => {
                            let number = out.images.len();
                            out.push_image(&self.tokenizer, number, &rows)
                                .map_err(|fault| text_fault(&fault))?;
                        }
                    }
                }
                if begun == 1 && out.ids.get(1) == out.ids.first() {
                    // Somebody wrote it already.
                    out.ids.remove(0);
                    out.images.iter_mut().for_each(|(_, at)| *at -= 1);
                }
                self.prompt_ids(&Prompt::Tokens(out.ids.clone()))?;
                return Ok(out);
            }
        };
        ids.map(|ids| PromptIds { ids, images: Vec::new() })
    }

    /// A prompt as text, for people and for `echo`.
    pub fn prompt_text(&self, prompt: &Prompt) -> Result<String, ApiError> {
        match prompt {
            Prompt::Chat(conversation) => {
                let template = self.chat_template()?;
                template
                    .render(&self.tokenizer, &chat_input(conversation))
                    .map_err(|fault| text_fault(&fault))
            }
            Prompt::Text(text) => Ok(text.clone()),
            Prompt::Tokens(ids) => Ok(self.tokenizer.decode(ids, Markers::Show)),
            Prompt::Mixed(parts) => Ok(parts
                .iter()
                .map(|part| match part {
                    PromptPart::Text(text) => text.clone(),
                    PromptPart::Token(id) => self.tokenizer.decode(&[*id], Markers::Show),
                    PromptPart::Picture(_) => "<__media__>".to_owned(),
                })
                .collect()),
        }
    }

    /// How the output after `prompt` is read.
    pub fn output_options(&self, prompt: &Prompt, stops: &[String]) -> OutputOptions {
        let (mode, tools): (_, &[Value]) = match prompt {
            Prompt::Chat(conversation) if answers_directly(conversation) => {
                (OutputMode::ChatAnswer, &conversation.tools)
            }
            Prompt::Chat(conversation) => (OutputMode::Chat, &conversation.tools),
            _ => (OutputMode::Raw(Markers::Hide), &[]),
        };
        OutputOptions { mode, tools: tools.to_vec(), stop: stops.to_vec() }
    }

    /// The ids that end an answer. One that the prompt opened ends with its message, whatever would follow.
    pub(crate) fn ending_ids(&self, options: &OutputOptions) -> Vec<u32> {
        let mut ids = self.tokenizer.stop_ids().to_vec();
        if options.mode == OutputMode::ChatAnswer {
            ids.extend(self.tokenizer.channels().map(|channels| channels.end_of_message));
        }
        ids
    }

    /// A decoder for one choice.
    pub fn decoder(&self, options: &OutputOptions) -> Result<OutputDecoder, ApiError> {
        OutputDecoder::new(Arc::clone(&self.tokenizer), options).map_err(|fault| text_fault(&fault))
    }

    /// What of a prompt may go when the context is full: of a chat whole turns from one user message to the next, oldest
    /// first, and never the system message or the newest turn; of plain text anything but its first `keep` tokens.
    pub(crate) fn shift_plan(&self, prompt: &Prompt, ids: &[u32], keep: i64) -> ShiftPlan {
        let Some(channels) = self.tokenizer.channels().filter(|_| matches!(prompt, Prompt::Chat(_))) else {
            let begins = ids.first().is_some_and(|id| Some(*id) == self.tokenizer.bos());
            let kept = usize::try_from(keep).map_or(ids.len(), |keep| keep + usize::from(begins));
            return ShiftPlan { keep: kept.min(ids.len()), turns: Vec::new(), plain: true };
        };
        let is_user = |at: &usize| {
            let name = ids[at + 1..].iter().take_while(|id| **id != channels.message).take(USER.len());
            let name: Vec<u8> =
                name.filter_map(|id| self.tokenizer.token_bytes(*id)).flatten().copied().collect();
            name.starts_with(USER.as_bytes())
        };
        let starts = (0..ids.len()).filter(|at| ids[*at] == channels.start);
        let turns: Vec<usize> = starts.filter(is_user).collect();
        ShiftPlan { keep: turns.first().copied().unwrap_or(ids.len()), turns, plain: false }
    }

    /// What tells the engine where a text ends, if more than the stop ids can.
    pub fn stop_matcher(
        &self,
        options: &OutputOptions,
        one_call: bool,
    ) -> Result<Option<StopMatcher>, ApiError> {
        let matcher = StopMatcher::new(Arc::clone(&self.tokenizer), options, one_call);
        matcher.map_err(|fault| text_fault(&fault))
    }

    /// The maker of grammars; built at the first request that needs it.
    pub fn grammars(&self) -> Result<Arc<GrammarEngine>, ApiError> {
        if let Some(engine) = self.grammars.get() {
            return Ok(Arc::clone(engine));
        }
        let engine = GrammarEngine::new(Arc::clone(&self.tokenizer)).map_err(|fault| text_fault(&fault))?;
        Ok(Arc::clone(self.grammars.get_or_init(|| Arc::new(engine))))
    }

    /// A token's bytes; none for an id that has none.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        self.tokenizer.token_bytes(id).unwrap_or_default().to_vec()
    }

    fn chat_template(&self) -> Result<&ChatTemplate, ApiError> {
        self.template.as_ref().ok_or_else(|| {
            ApiError::bad("The loaded model has no chat template; use /v1/completions with a prompt")
        })
    }
}

/// The images of a prompt by number.
fn pictures_of(prompt: &Prompt) -> Vec<&Picture> {
    match prompt {
        Prompt::Chat(conversation) => conversation.pictures.iter().collect(),
        Prompt::Mixed(parts) => {
            let mut pictures = Vec::new();
            for part in parts {
                if let PromptPart::Picture(picture) = part {
                    pictures.push(picture);
                }
            }
            pictures
        }
        Prompt::Text(_) | Prompt::Tokens(_) => Vec::new(),
    }
}

/// An answer with a beginning is open already, and with strength `none` the answer is opened in the prompt already. Not with tools: the model must be free to call one.
fn answers_directly(conversation: &Conversation) -> bool {
    conversation.prefix.is_some()
        || (conversation.strength.as_deref() == Some("none") && conversation.tools.is_empty())
}

fn chat_input(conversation: &Conversation) -> ChatInput {
    let mut variables = conversation.variables.clone();
    if let Some(strength) = &conversation.strength {
        variables.insert("reasoning_strength".into(), strength.as_str().into());
    }
    ChatInput {
        messages: conversation.messages.clone(),
        tools: conversation.tools.clone(),
        variables,
        add_generation_prompt: true,
        answer_directly: answers_directly(conversation),
        answer_prefix: conversation.prefix.clone().unwrap_or_default(),
    }
}
