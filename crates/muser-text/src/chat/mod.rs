//! Conversations to prompts, through the chat template that the model file carries.
//!
//! The template comes from a downloaded file and the conversation from strangers, so neither is trusted: templates run
//! with a budget and without access to anything ([`environment`]), and nothing that a conversation says can become a
//! control token ([`shield`]), although the rendered prompt is tokenised with markers on.

mod bounded;
mod clock;
mod cut_json;
mod environment;
mod normalise;
mod python_json;
mod shield;

pub use clock::{Clock, utc, utc_now};
pub use normalise::{PARTIAL_JSON, normalise_messages, normalise_tools};

use crate::error::TextError;
use crate::special_tokens::Segment;
use crate::{Specials, Tokenizer};
use minijinja::value::{Serde, Value as TemplateValue};
use minijinja::{Environment, ErrorKind};
use muser_gguf::GgufFile;
use serde_json::{Map, Value};
use shield::Shield;

/// A conversation, as the template sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatInput {
    /// Messages as [`normalise_messages`] gives them.
    pub messages: Vec<Value>,
    /// Tools as [`normalise_tools`] gives them; none is an empty list.
    pub tools: Vec<Value>,
    /// Further variables of the template: `reasoning_strength`, `current_date`, `knowledge_cutoff`, ...
    pub variables: Map<String, Value>,
    /// End with the opening of an assistant message.
    pub add_generation_prompt: bool,
    /// After the generation prompt, open the answer channel, so that the model answers without reasoning. The
    /// [`crate::OutputDecoder`] must be told so too.
    pub answer_directly: bool,
    /// What the answer begins with, when it is opened directly: the model goes on from there.
    pub answer_prefix: String,
}

impl Default for ChatInput {
    fn default() -> ChatInput {
        ChatInput {
            messages: Vec::new(),
            tools: Vec::new(),
            variables: Map::new(),
            add_generation_prompt: true,
            answer_directly: false,
            answer_prefix: String::new(),
        }
    }
}

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// The template shows a system message only at the front and drops others in silence.
    drops_late_systems: bool,
    /// The template shows the calls of a message and drops its text in silence.
    drops_text_beside_calls: bool,
}

const TEMPLATE_KEY: &str = "tokenizer.chat_template";

/// What opens the rows of an image, stands for one of them, and closes them.
const IMAGE_START: &str = "<|image_start|>";
const IMAGE_ROW: &str = "<|patch|>";
const IMAGE_END: &str = "<|image_end|>";

/// Name of the one template of an environment.
const NAME: &str = "chat_template";

/// Text of a system message that stands late, to see whether a template shows it.
const LATE: &str = "a late system message";

/// Text beside a call, likewise.
const BESIDE_CALLS: &str = "a text beside a call";

/// What opens the answer channel after the generation prompt.
const ANSWER_HEADER: &str = " to=user<|message|>";

impl ChatTemplate {
    /// The template of a model file; `None` if the file has none.
    pub fn from_gguf(file: &GgufFile) -> Result<Option<ChatTemplate>, TextError> {
        let source = file
            .opt_str(TEMPLATE_KEY)
            .map_err(|e| TextError::vocabulary(TEMPLATE_KEY, "a string", e.to_string()))?;
        source.map(ChatTemplate::compile).transpose()
    }

    /// Compiles a template. `strftime_now` tells the system's time in UTC.
    pub fn compile(source: &str) -> Result<ChatTemplate, TextError> {
        ChatTemplate::compile_with_clock(source, Clock::system())
    }

    /// Compiles a template that sees another clock.
    pub fn compile_with_clock(source: &str, clock: Clock) -> Result<ChatTemplate, TextError> {
        let mut environment = environment::sandbox(clock)?;
        let source = environment::without_generation_tags(source);
        bounded::without_constant_products(&source, environment::syntax()?)
            .and_then(|source| environment.add_template_owned(NAME, source))
            .map_err(|e| template_error(&e))?;
        let mut template =
            ChatTemplate { environment, drops_late_systems: false, drops_text_beside_calls: false };
        let probe = [("user", "a"), ("system", LATE), ("user", "b")]
            .map(|(role, content)| serde_json::json!({"role": role, "content": content}));
        let context = serde_json::json!({"messages": probe, "bos_token": "", "eos_token": ""});
        // A template that refuses such a conversation says so when one comes.
        template.drops_late_systems = template.run(&context).is_ok_and(|rendered| !rendered.contains(LATE));
        let calls = serde_json::json!([{"function": {"name": "f", "arguments": {}}, "type": "function"}]);
        let context = serde_json::json!({"bos_token": "", "eos_token": "", "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": BESIDE_CALLS, "tool_calls": calls},
        ]});
        template.drops_text_beside_calls =
            template.run(&context).is_ok_and(|rendered| !rendered.contains(BESIDE_CALLS));
        Ok(template)
    }

    /// The ids of the prompt, with the BOS exactly once if the model wants one.
    ///
    /// Markers become control tokens only where the template wrote them.
    pub fn encode(&self, tokenizer: &Tokenizer, input: &ChatInput) -> Result<Vec<u32>, TextError> {
        Ok(self.encode_with_images(tokenizer, input, &[])?.ids)
    }

    /// The same for a conversation with images, of which image `i` has `rows[i]` rows. The number of an image is its part's
    /// `number`, or its place in the order of messages and parts where there is none.
    ///
    /// Where an image is, is not left to the template: it sees a piece of text that no user can write, at the place of the image,
    /// and what it makes of that must hold each of them once.
    pub fn encode_with_images(
        &self,
        tokenizer: &Tokenizer,
        input: &ChatInput,
        rows: &[usize],
    ) -> Result<PromptIds, TextError> {
        let (rendered, numbers) = self.render_shielded(tokenizer, input)?;
        let shield = Shield::new(tokenizer.specials());
        let mut out = PromptIds { ids: Vec::with_capacity(rendered.len() / 3 + 8), images: Vec::new() };
        for segment in tokenizer.specials().segments(&rendered) {
            let mut text = match segment {
                Segment::Special(id) => {
                    out.ids.push(id);
                    continue;
                }
                Segment::Plain(text) => text,
            };
            while let Some((before, number, behind)) = Shield::split_image(text) {
                tokenizer.encode_into(&shield.lift(before), Specials::Plain, &mut out.ids);
                out.push_image(tokenizer, number, rows)?;
                text = behind;
            }
            tokenizer.encode_into(&shield.lift(text), Specials::Plain, &mut out.ids);
        }
        let before = out.ids.len();
        tokenizer.ensure_bos(&mut out.ids);
        let added = out.ids.len() - before;
        out.images.iter_mut().for_each(|(_, at)| *at += added);
        out.check_images(numbers)?;
        Ok(out)
    }

    /// The prompt as text, for people. Do not tokenise it: what a user wrote would become control tokens. That is what
    /// [`Self::encode`] is for.
    pub fn render(&self, tokenizer: &Tokenizer, input: &ChatInput) -> Result<String, TextError> {
        let (rendered, _) = self.render_shielded(tokenizer, input)?;
        let shield = Shield::new(tokenizer.specials());
        let (mut out, mut rest) = (String::with_capacity(rendered.len()), rendered.as_str());
        while let Some((before, _, behind)) = Shield::split_image(rest) {
            out.push_str(&shield.lift(before));
            out.push_str(&[IMAGE_START, IMAGE_ROW, IMAGE_END].concat());
            rest = behind;
        }
        out.push_str(&shield.lift(rest));
        Ok(out)
    }

    /// The prompt in covered text, and the numbers of the images that it should hold.
    fn render_shielded(
        &self,
        tokenizer: &Tokenizer,
        input: &ChatInput,
    ) -> Result<(String, Vec<usize>), TextError> {
        let shield = Shield::new(tokenizer.specials());
        let mut context = Map::new();
        for (name, value) in &input.variables {
            context.insert(name.clone(), shield.cover(value));
        }
        let mut images = Vec::new();
        let covered = input.messages.iter().map(|message| cover_message(&shield, message, &mut images));
        let messages: Vec<Value> = covered.collect();
        let messages = if self.drops_late_systems { systems_in_place(&messages) } else { messages };
        let messages = if self.drops_text_beside_calls { text_apart(messages) } else { messages };
        context.insert("messages".into(), messages.into());
        if !input.tools.is_empty() {
            context.insert("tools".into(), input.tools.iter().map(|tool| shield.cover(tool)).collect());
        }
        context.insert("add_generation_prompt".into(), input.add_generation_prompt.into());
        for (name, id) in [("bos_token", tokenizer.bos()), ("eos_token", tokenizer.eos())] {
            let text = id.and_then(|id| tokenizer.token_bytes(id)).map(String::from_utf8_lossy);
            context.insert(name.into(), text.unwrap_or_default().into());
        }
        let mut rendered = self.run(&Value::Object(context))?;
        if input.answer_directly {
            rendered.push_str(ANSWER_HEADER);
            let prefix = shield.cover(&Value::String(input.answer_prefix.clone()));
            rendered.push_str(prefix.as_str().unwrap_or_default());
        }
        Ok((rendered, images))
    }

    fn run(&self, context: &Value) -> Result<String, TextError> {
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(environment::fuel(bytes_of(context))));
        let template = self.environment.get_template(NAME).map_err(|e| template_error(&e))?;
        let context = TemplateValue::from(Serde(context));
        bounded::render(&environment, NAME, template.source(), environment::syntax()?, context)
            .map_err(|e| template_error(&e))
    }
}

/// Bytes of text in a value, and one for each part of it.
fn bytes_of(value: &Value) -> usize {
    1 + match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(bytes_of).sum(),
        Value::Object(fields) => fields.iter().map(|(name, value)| name.len() + bytes_of(value)).sum(),
        _ => 0,
    }
}

/// Ids of a prompt with images.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PromptIds {
    /// The ids; at the places of an image's rows, the id that stands for one.
    pub ids: Vec<u32>,
    /// Number of each image and position of its first row, ascending.
    pub images: Vec<(usize, usize)>,
}

impl PromptIds {
    /// Appends an image: what opens it, as many places as it has rows, what closes it.
    pub fn push_image(
        &mut self,
        tokenizer: &Tokenizer,
        number: usize,
        rows: &[usize],
    ) -> Result<(), TextError> {
        let fault = |expected, found| Err(TextError::request("messages", expected, found));
        let Some(count) = rows.get(number).copied() else {
            return fault("no images for this model", "an image");
        };
        let token = |text: &str| tokenizer.special_id(text);
        let (Some(start), Some(row), Some(end)) = (token(IMAGE_START), token(IMAGE_ROW), token(IMAGE_END))
        else {
            return fault("a model whose vocabulary has the markers of images", "one without");
        };
        self.ids.push(start);
        self.images.push((number, self.ids.len()));
        self.ids.extend(std::iter::repeat_n(row, count));
        self.ids.push(end);
        Ok(())
    }

    /// Is each of these images there once?
    fn check_images(&self, mut wanted: Vec<usize>) -> Result<(), TextError> {
        let mut seen: Vec<usize> = self.images.iter().map(|(number, _)| *number).collect();
        seen.sort_unstable();
        wanted.sort_unstable();
        if seen == wanted {
            return Ok(());
        }
        let found = format!("{} of {} images in what it made", seen.len(), wanted.len());
        Err(TextError::request("messages", "a template that shows every image once", found))
    }
}

/// A message in which no string can start a marker; content in parts is one string, with what stands for its images.
fn cover_message(shield: &Shield<'_>, message: &Value, images: &mut Vec<usize>) -> Value {
    let mut covered = shield.cover(message);
    if let Some(parts) = message["content"].as_array() {
        let mut text = String::new();
        for part in parts {
            if part["type"] == "image" {
                let number = part["number"].as_u64().map_or(images.len(), |number| number as usize);
                text.push_str(&Shield::image(number));
                images.push(number);
            } else if let Value::String(said) = shield.cover(&part["text"]) {
                text.push_str(&said);
            }
        }
        covered["content"] = text.into();
    }
    covered
}

/// The conversation for a template that shows a system message only at the front. Those that lead are joined. A later one
/// stays where it is, so that the prompt before it does not change and the model reads it when it was said: as a user's
/// turn, marked for what it is.
fn systems_in_place(messages: &[Value]) -> Vec<Value> {
    let is_system = |message: &Value| message["role"] == "system";
    let leading = messages.iter().take_while(|message| is_system(message)).count();
    let (front, rest) = messages.split_at(leading);
    let mut out = Vec::with_capacity(messages.len());
    match front {
        [] | [_] => out.extend_from_slice(front),
        several => {
            let texts: Vec<&str> = several.iter().filter_map(|message| message["content"].as_str()).collect();
            out.push(serde_json::json!({"role": "system", "content": texts.join("\n\n")}));
        }
    }
    out.extend(rest.iter().map(|message| match message["content"].as_str() {
        Some(text) if is_system(message) => {
            let text = format!("<system-reminder>\n{text}\n</system-reminder>");
            serde_json::json!({"role": "user", "content": text})
        }
        _ => message.clone(),
    }));
    out
}

/// The conversation with the text of a message that also calls as a message of its own, before the calls.
fn text_apart(messages: Vec<Value>) -> Vec<Value> {
    let mut out = Vec::with_capacity(messages.len());
    for mut message in messages {
        let has_text = message["content"].as_str().is_some_and(|text| !text.trim().is_empty());
        let calls = message["tool_calls"].as_array().is_some_and(|calls| !calls.is_empty());
        if has_text
            && calls
            && let Value::Object(fields) = &mut message
            && let Some(calls) = fields.shift_remove("tool_calls")
        {
            out.push(message);
            message = serde_json::json!({"role": "assistant", "content": "", "tool_calls": calls});
        }
        out.push(message);
    }
    out
}

/// Our error for an engine's: what a template raises is about the conversation, all else about the template.
fn template_error(error: &minijinja::Error) -> TextError {
    let mut cause: &minijinja::Error = error;
    loop {
        if let Some(raised) = cause.detail().and_then(|detail| detail.strip_prefix(environment::RAISED)) {
            return TextError::request(
                "messages",
                "a conversation that the model's template accepts",
                raised,
            );
        }
        match std::error::Error::source(cause).and_then(|source| source.downcast_ref()) {
            Some(inner) => cause = inner,
            None => break,
        }
    }
    let what = match error.kind() {
        ErrorKind::OutOfFuel => "it ran longer than any template should".to_owned(),
        kind => match error.detail() {
            Some(detail) => format!("{kind}: {detail}"),
            None => kind.to_string(),
        },
    };
    TextError::Template { line: error.line(), what }
}

#[cfg(test)]
#[expect(clippy::needless_pass_by_value, reason = "JSON literals read better by value")]
mod tests;
