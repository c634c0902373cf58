//! The tokenizer: text to ids and ids to bytes.
//!
//! Encoding is: cut at markers (only if asked), cut plain stretches into pieces ([`crate::pre_split`]), encode each piece
//! ([`crate::bpe`]). It never fails and takes time near linear in the text, whatever the text is.

use crate::bpe::{Scratch, encode_piece};
use crate::error::{TextError, shown};
use crate::pre_split::Pieces;
use crate::special_tokens::{Segment, SpecialTokens};
use crate::utf8::Utf8Joiner;
use crate::vocabulary::{MERGES_KEY, TOKENS_KEY, TYPES_KEY, TokenKind, VocabSource, Vocabulary};
use muser_gguf::{GgufError, GgufFile};

/// Whether markers such as `<|eot|>` in the text become control tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Specials {
    /// Everything is ordinary text. For anything a user or a tool wrote.
    Plain,
    /// Markers become their ids. For text whose author may steer the model.
    Parse,
}

/// Whether markers such as `<|eot|>` show in the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Markers {
    /// Control tokens vanish; user-defined ones show.
    Hide,
    /// All show as their literal text.
    Show,
}

/// Ids that structure the model's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChannelTokens {
    /// `<|start|>` opens a message header.
    pub start: u32,
    /// `<|message|>` ends the header.
    pub message: u32,
    /// `<|eom|>` ends a message; the turn goes on.
    pub end_of_message: u32,
    /// `<|eot|>` ends the turn.
    pub end_of_turn: u32,
}

/// A model's tokenizer.
#[derive(Debug)]
pub struct Tokenizer {
    vocabulary: Vocabulary,
    specials: SpecialTokens,
    bos: Option<u32>,
    eos: Option<u32>,
    padding: Option<u32>,
    add_bos: bool,
    stop_ids: Vec<u32>,
    channels: Option<ChannelTokens>,
    longest_token: usize,
}

/// Names of the pre-split rule in `tokenizer.ggml.pre` that mean the o200k pattern.
const KNOWN_PRE_SPLITS: [&str; 2] = ["llama4", "gpt-4o"];

impl Tokenizer {
    /// Reads the tokenizer of a model file.
    pub fn from_gguf(file: &GgufFile) -> Result<Tokenizer, TextError> {
        let model = file.str("tokenizer.ggml.model").map_err(from_gguf_error)?;
        if model != "gpt2" {
            return Err(TextError::vocabulary(
                "tokenizer.ggml.model",
                "\"gpt2\" (byte-level BPE)",
                shown(model),
            ));
        }
        let id = |key: &str| file.opt_u64(key).map_err(from_gguf_error);
        let strings = |key: &str| Ok(file.byte_strings(key).map_err(from_gguf_error)?.collect());
        Tokenizer::from_source(&VocabSource {
            pre: file.str("tokenizer.ggml.pre").map_err(from_gguf_error)?.to_owned(),
            tokens: strings(TOKENS_KEY)?,
            token_types: file.integers(TYPES_KEY).map_err(from_gguf_error)?,
            merges: strings(MERGES_KEY)?,
            bos: id("tokenizer.ggml.bos_token_id")?,
            eos: id("tokenizer.ggml.eos_token_id")?,
            eot: id("tokenizer.ggml.eot_token_id")?,
            padding: id("tokenizer.ggml.padding_token_id")?,
            add_bos: file.opt_bool("tokenizer.ggml.add_bos_token").map_err(from_gguf_error)?.unwrap_or(false),
        })
    }

    /// Checks a vocabulary and builds the tables.
    pub fn from_source(source: &VocabSource<'_>) -> Result<Tokenizer, TextError> {
        if !KNOWN_PRE_SPLITS.contains(&source.pre.as_str()) {
            return Err(TextError::vocabulary(
                "tokenizer.ggml.pre",
                format!("one of {KNOWN_PRE_SPLITS:?}"),
                shown(&source.pre),
            ));
        }
        let vocabulary = Vocabulary::load(source)?;
        let specials = SpecialTokens::collect(&vocabulary)?;
        let check_id = |key: &str, id: Option<u64>| match id {
            None => Ok(None),
            Some(id) if id < vocabulary.len() as u64 => Ok(Some(id as u32)),
            Some(id) => Err(TextError::vocabulary(
                format!("tokenizer.ggml.{key}"),
                format!("an id below {}", vocabulary.len()),
                id.to_string(),
            )),
        };
        let bos = check_id("bos_token_id", source.bos)?;
        let eos = check_id("eos_token_id", source.eos)?;
        let eot = check_id("eot_token_id", source.eot)?;
        let padding = check_id("padding_token_id", source.padding)?;
        if source.add_bos && bos.is_none() {
            return Err(TextError::vocabulary(
                "tokenizer.ggml.bos_token_id",
                "a token id, since add_bos_token is true",
                "no such key",
            ));
        }
        let channels = (|| {
            Some(ChannelTokens {
                start: specials.find("<|start|>")?,
                message: specials.find("<|message|>")?,
                end_of_message: specials.find("<|eom|>")?,
                end_of_turn: specials.find("<|eot|>")?,
            })
        })();
        let mut stop_ids: Vec<u32> =
            [eos, eot, channels.map(|channels| channels.end_of_turn)].into_iter().flatten().collect();
        stop_ids.sort_unstable();
        stop_ids.dedup();
        // The end of a message is not the end of the turn, whatever a file's keys say.
        stop_ids.retain(|id| channels.is_none_or(|channels| channels.end_of_message != *id));
        let ids = 0..vocabulary.len() as u32;
        let longest_token =
            ids.filter_map(|id| vocabulary.token_bytes(id)).map(<[u8]>::len).max().unwrap_or(0);
        let add_bos = source.add_bos;
        Ok(Tokenizer { vocabulary, specials, bos, eos, padding, add_bos, stop_ids, channels, longest_token })
    }

    /// Ids of `text`, without a BOS in front.
    pub fn encode(&self, text: &str, specials: Specials) -> Vec<u32> {
        let mut ids = Vec::with_capacity(text.len() / 3 + 1);
        self.encode_into(text, specials, &mut ids);
        ids
    }

    /// Appends the ids of `text` to `ids`.
    pub fn encode_into(&self, text: &str, specials: Specials, ids: &mut Vec<u32>) {
        let mut scratch = Scratch::default();
        match specials {
            Specials::Plain => self.encode_plain(text, &mut scratch, ids),
            Specials::Parse => {
                for segment in self.specials.segments(text) {
                    match segment {
                        Segment::Plain(text) => self.encode_plain(text, &mut scratch, ids),
                        Segment::Special(id) => ids.push(id),
                    }
                }
            }
        }
    }

    /// Ids of a whole prompt: with the BOS in front exactly once, if the model wants one.
    pub fn encode_prompt(&self, text: &str, specials: Specials) -> Vec<u32> {
        let mut ids = self.encode(text, specials);
        self.ensure_bos(&mut ids);
        ids
    }

    /// Puts the BOS in front, if the model wants one and it is not there.
    pub fn ensure_bos(&self, ids: &mut Vec<u32>) {
        if let (true, Some(bos)) = (self.add_bos, self.bos)
            && ids.first() != Some(&bos)
        {
            ids.insert(0, bos);
        }
    }

    /// One id onto a joiner.
    pub(crate) fn join(&self, id: u32, markers: Markers, joiner: &mut Utf8Joiner, out: &mut String) {
        let (Some(bytes), Some(kind)) = (self.token_bytes(id), self.token_kind(id)) else { return };
        match kind {
            TokenKind::Normal => joiner.push(bytes, out),
            TokenKind::UserDefined => {
                joiner.flush(out);
                joiner.push(bytes, out);
            }
            TokenKind::Control | TokenKind::Unused => {
                joiner.flush(out);
                if markers == Markers::Show {
                    joiner.push(bytes, out);
                }
            }
        }
    }

    /// Text of ids, invalid bytes replaced by U+FFFD.
    pub fn decode(&self, ids: &[u32], markers: Markers) -> String {
        let mut out = String::new();
        let mut joiner = Utf8Joiner::default();
        for &id in ids {
            self.join(id, markers, &mut joiner, &mut out);
        }
        joiner.flush(&mut out);
        out
    }

    /// Number of ids.
    pub fn vocab_size(&self) -> usize {
        self.vocabulary.len()
    }

    /// Bytes that an id stands for (for a marker: its literal text); `None` for ids outside the vocabulary.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.vocabulary.token_bytes(id)
    }

    /// Kind of an id; `None` outside the vocabulary.
    pub fn token_kind(&self, id: u32) -> Option<TokenKind> {
        self.vocabulary.kind(id)
    }

    /// Id of a marker by its literal text, as in `<|eot|>`.
    pub fn special_id(&self, text: &str) -> Option<u32> {
        self.specials.find(text)
    }

    /// The token in front of every text.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The token after a text.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// The padding token.
    pub fn padding(&self) -> Option<u32> {
        self.padding
    }

    /// Does the model want a BOS in front of every prompt?
    pub fn add_bos(&self) -> bool {
        self.add_bos
    }

    /// Ids that end a generation, ascending.
    pub fn stop_ids(&self) -> &[u32] {
        &self.stop_ids
    }

    /// The ids of the channel markup, if the vocabulary has all of them.
    pub fn channels(&self) -> Option<ChannelTokens> {
        self.channels
    }

    pub(crate) fn specials(&self) -> &SpecialTokens {
        &self.specials
    }

    #[cfg(any(test, feature = "grammar"))]
    /// Bytes of the vocabulary's longest token.
    pub(crate) fn longest_token(&self) -> usize {
        self.longest_token
    }

    pub(crate) fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    fn encode_plain(&self, text: &str, scratch: &mut Scratch, ids: &mut Vec<u32>) {
        for piece in Pieces::new(text) {
            encode_piece(&self.vocabulary, piece.as_bytes(), scratch, ids);
        }
    }
}

fn from_gguf_error(error: GgufError) -> TextError {
    match error {
        GgufError::Key { key, expected, found } => TextError::Vocabulary { key, expected, found },
        other => TextError::vocabulary("tokenizer", "readable metadata", other.to_string()),
    }
}

#[cfg(test)]
mod tests;
