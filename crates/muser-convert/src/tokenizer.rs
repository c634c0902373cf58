//! `tokenizer.json` and what stands beside it, as keys of a GGUF file.

use std::collections::HashMap;

use muser_gguf::{GgufWriter, Value as Put};
use serde::Deserialize;
use serde_json::Value;

use crate::ConvertError;
use crate::checkpoint::{Checkpoint, read_json, read_limited};
use crate::error::wrong;
use crate::figures::Figures;

/// Most bytes of a `tokenizer.json`; that of the 30B model has about 30 MB.
const MAX_TOKENIZER: u64 = 256 << 20;
/// Most bytes of a chat template.
const MAX_TEMPLATE: u64 = 4 << 20;
const TOKENIZER: &str = "tokenizer.json";
/// Ends a turn.
const END_OF_TURN: &str = "<|eot|>";

#[derive(Deserialize)]
struct File {
    model: Model,
    #[serde(default)]
    added_tokens: Vec<Added>,
    #[serde(default)]
    pre_tokenizer: Value,
}

#[derive(Deserialize)]
struct Model {
    #[serde(rename = "type")]
    kind: Option<String>,
    vocab: HashMap<String, u32>,
    merges: Vec<Merge>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Joined(String),
    Pair(String, String),
}

#[derive(Deserialize)]
struct Added {
    id: u32,
    content: String,
    #[serde(default)]
    special: bool,
}

/// What becomes of a `tokenizer.json`.
pub(crate) struct Tokenizer {
    tokens: Vec<String>,
    types: Vec<i32>,
    merges: Vec<String>,
    ids: HashMap<String, u32>,
}

const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;

impl Tokenizer {
    /// Reads the one of a checkpoint, `None` if it has none. There are `vocab` ids.
    pub(crate) fn of(checkpoint: &Checkpoint, vocab: usize) -> Result<Option<Tokenizer>, ConvertError> {
        let file: Option<File> = read_json(&checkpoint.folder.join(TOKENIZER), MAX_TOKENIZER)?;
        file.map(|file| Tokenizer::new(file, vocab)).transpose()
    }

    fn new(file: File, vocab: usize) -> Result<Tokenizer, ConvertError> {
        if file.model.kind.as_deref().is_some_and(|kind| kind != "BPE") {
            return Err(wrong(TOKENIZER, "a model of type BPE", file.model.kind.unwrap_or_default()));
        }
        check_split(&file.pre_tokenizer)?;
        let mut tokens: Vec<Option<(String, i32)>> = vec![None; vocab];
        let mut put = |id: u32, text: String, ty: i32| match tokens.get_mut(id as usize) {
            None => Err(wrong(TOKENIZER, format!("ids below {vocab}"), format!("{text:?} with id {id}"))),
            Some(Some((other, _))) if *other != text => {
                Err(wrong(TOKENIZER, "ids of one token each", format!("{other:?} and {text:?} with id {id}")))
            }
            Some(place) => {
                *place = Some((text, ty));
                Ok(())
            }
        };
        for (text, id) in file.model.vocab {
            put(id, text, NORMAL)?;
        }
        for token in file.added_tokens {
            put(token.id, token.content, if token.special { CONTROL } else { USER_DEFINED })?;
        }
        let (mut texts, mut types, mut ids) = (Vec::new(), Vec::new(), HashMap::new());
        for (id, token) in tokens.into_iter().enumerate() {
            let (text, ty) = token.unwrap_or_else(|| (format!("[PAD{id}]"), UNUSED));
            ids.insert(text.clone(), id as u32);
            texts.push(text);
            types.push(ty);
        }
        let merges = file.model.merges.into_iter().map(|merge| match merge {
            Merge::Joined(text) => text,
            Merge::Pair(left, right) => format!("{left} {right}"),
        });
        Ok(Tokenizer { tokens: texts, types, merges: merges.collect(), ids })
    }

    /// Tokens, merges, special ids, chat template.
    pub(crate) fn put(
        &self,
        checkpoint: &Checkpoint,
        config: &Figures<'_>,
        writer: &mut GgufWriter,
    ) -> Result<(), ConvertError> {
        let key = |name: &str| format!("tokenizer.ggml.{name}");
        writer.put(&key("model"), Put::String("gpt2"))?;
        writer.put(&key("pre"), Put::String("llama4"))?;
        writer.put_strings(&key("tokens"), &self.tokens)?;
        writer.put_i32s(&key("token_type"), self.types.iter().copied())?;
        writer.put_strings(&key("merges"), &self.merges)?;
        let settings = checkpoint.settings("tokenizer_config.json")?.unwrap_or(Value::Null);
        for (name, named, setting) in [
            ("bos_token_id", "bos_token", "bos_token_id"),
            ("eos_token_id", "eos_token", "eos_token_id"),
            ("padding_token_id", "pad_token", "pad_token_id"),
        ] {
            let text = settings.get(named).map(|token| token.get("content").unwrap_or(token));
            let id = text.and_then(Value::as_str).and_then(|text| self.ids.get(text).copied());
            if let Some(id) = id.or_else(|| config.id(setting)) {
                self.check_id(setting, id)?;
                writer.put(&key(name), Put::U32(id))?;
            }
        }
        if let Some(&id) = self.ids.get(END_OF_TURN) {
            writer.put(&key("eot_token_id"), Put::U32(id))?;
        }
        let adds = settings.get("add_bos_token").and_then(Value::as_bool).unwrap_or(true);
        writer.put(&key("add_bos_token"), Put::Bool(adds))?;
        writer.put(&key("add_sep_token"), Put::Bool(false))?;
        if let Some(template) = template(checkpoint, &settings)? {
            writer.put("tokenizer.chat_template", Put::String(&template))?;
        }
        Ok(())
    }

    fn check_id(&self, setting: &str, id: u32) -> Result<(), ConvertError> {
        if (id as usize) < self.tokens.len() {
            return Ok(());
        }
        Err(wrong(setting, format!("an id of the {} tokens", self.tokens.len()), id.to_string()))
    }
}

/// The file's pre-tokenizer has to be the one that is meant by `llama4`: bytes, split so that numbers have up to three digits.
fn check_split(pre_tokenizer: &Value) -> Result<(), ConvertError> {
    let text = pre_tokenizer.to_string();
    if pre_tokenizer.is_null() || (text.contains("ByteLevel") && text.contains("\\\\p{N}{1,3}")) {
        return Ok(());
    }
    let expected = "the splitting of this model's tokenizer (bytes, numbers of up to three digits)";
    Err(wrong(format!("{TOKENIZER}: pre_tokenizer"), expected, text.chars().take(200).collect::<String>()))
}

/// The template in a file of its own, or in the settings.
fn template(checkpoint: &Checkpoint, settings: &Value) -> Result<Option<String>, ConvertError> {
    const FILE: &str = "chat_template.jinja";
    if let Some(bytes) = read_limited(&checkpoint.folder.join(FILE), MAX_TEMPLATE)? {
        let text = String::from_utf8(bytes).map_err(|error| wrong(FILE, "UTF-8", error.to_string()))?;
        return Ok(Some(text));
    }
    let found = settings.get("chat_template");
    let named = found.and_then(Value::as_array).into_iter().flatten();
    let default = named
        .filter(|one| one.get("name").and_then(Value::as_str) == Some("default"))
        .find_map(|one| one.get("template"));
    Ok(default.or(found).and_then(Value::as_str).map(str::to_owned))
}
