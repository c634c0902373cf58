//! Vocabularies for synthetic files: the released one from its rank file, or a made-up byte-level one of any size.
//!
//! Both are valid byte-level BPE: all 256 bytes are tokens, every longer piece is the union of two earlier ones, and the
//! merges list has every split of every piece into two pieces, pieces in rank order.

use std::collections::HashMap;
use std::path::Path;

use base64::prelude::{BASE64_STANDARD, Engine as _};
use muser_gguf::{GgufError, GgufWriter, Value};

use crate::ModelError;

/// Special tokens of the released vocabulary that have names, by their place after the pieces.
const RELEASED: [(usize, &str); 15] = [
    (0, "<|begin_of_text|>"),
    (1, "<|end_of_text|>"),
    (7, "<|eom|>"),
    (8, "<|eot|>"),
    (18, "<|finetune_right_pad|>"),
    (22, "<|start|>"),
    (23, "<|message|>"),
    (80, "<|image_start|>"),
    (81, "<|image_end|>"),
    (82, "<|vid_start|>"),
    (83, "<|vid_end|>"),
    (87, "<|vid_frame_separator|>"),
    (90, "<|image|>"),
    (91, "<|video|>"),
    (92, "<|patch|>"),
];
const RELEASED_COUNT: usize = 2048;

/// Special tokens of small vocabularies.
const SMALL: [&str; 12] = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|eom|>",
    "<|eot|>",
    "<|finetune_right_pad|>",
    "<|start|>",
    "<|message|>",
    "<|image_start|>",
    "<|image_end|>",
    "<|patch|>",
    "<|mask|>",
    "<|reserved_special_token_0|>",
];

/// Bytes in the order of their ids in the released vocabulary, as ranges.
const BYTE_ORDER: [(u8, u8); 9] = [
    (0xC0, 0xC1),
    (0xF5, 0xFF),
    (0x21, 0x7E),
    (0xA1, 0xAC),
    (0xAE, 0xBF),
    (0xC2, 0xF4),
    (0x00, 0x20),
    (0x7F, 0xA0),
    (0xAD, 0xAD),
];

/// Just enough of a template to hold a conversation in the model's message grammar.
const CHAT_TEMPLATE: &str = "{{- bos_token -}}\
    {%- for m in messages -%}\
    {{- '<|start|>' + m['role'] + (' to=user' if m['role'] == 'assistant' else '') + '<|message|>' -}}\
    {{- m['content'] + '<|eot|>' -}}\
    {%- endfor -%}\
    {%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}";

pub(super) struct Vocabulary {
    tokens: Vec<String>,
    merges: Vec<String>,
    pieces: usize,
}

/// The first pieces of a tiktoken file, as many as fit before the special tokens.
pub(super) fn from_ranks(path: &Path, vocab: usize) -> Result<Vocabulary, ModelError> {
    let fault = |what: String| ModelError::Synth(format!("{}: {what}", path.display()));
    let text = std::fs::read_to_string(path)
        .map_err(|source| GgufError::Io { path: path.display().to_string(), source })?;
    let specials = special_tokens(vocab);
    let wanted = vocab.saturating_sub(specials.len());
    let mut pieces = Vec::with_capacity(wanted.min(text.len()));
    for (number, line) in text.lines().filter(|line| !line.is_empty()).take(wanted).enumerate() {
        let mut fields = line.split_ascii_whitespace();
        let piece = fields.next().and_then(|field| BASE64_STANDARD.decode(field).ok());
        let rank = fields.next().and_then(|field| field.parse::<usize>().ok());
        match (piece, rank) {
            (Some(piece), Some(rank)) if rank == number && !piece.is_empty() => pieces.push(piece),
            _ => {
                return Err(fault(format!(
                    "line {}: expected base64 and rank {number}, found {line:?}",
                    number + 1
                )));
            }
        }
    }
    if pieces.len() < wanted {
        return Err(fault(format!("expected at least {wanted} ranks, found {}", pieces.len())));
    }
    if (0..=255_u8).any(|byte| !pieces.iter().any(|piece| *piece == [byte])) {
        return Err(fault("expected all 256 single bytes among the ranks".to_owned()));
    }
    Ok(assemble(&pieces, specials))
}

/// Bytes, then combinations of letters in the order of how frequent their letters are in English.
pub(super) fn made_up(vocab: usize) -> Result<Vocabulary, ModelError> {
    let specials = special_tokens(vocab);
    let Some(wanted) = vocab.checked_sub(specials.len() + 256) else {
        let least = 256 + specials.len();
        return Err(ModelError::Synth(format!(
            "a vocabulary needs at least {least} tokens, {vocab} were asked for"
        )));
    };
    let mut pieces: Vec<Vec<u8>> =
        BYTE_ORDER.iter().flat_map(|(first, last)| (*first..=*last).map(|byte| vec![byte])).collect();
    for len in 2..=4 {
        if pieces.len() < 256 + wanted {
            pieces.extend(combinations(len));
        }
    }
    if pieces.len() < 256 + wanted {
        return Err(ModelError::Synth(format!(
            "a made-up vocabulary has at most {} tokens, {vocab} were asked for; give a tokenizer model",
            pieces.len() + specials.len()
        )));
    }
    pieces.truncate(256 + wanted);
    Ok(assemble(&pieces, specials))
}

impl Vocabulary {
    pub(super) fn write(&self, writer: &mut GgufWriter) -> Result<(), ModelError> {
        let id = |name: &str| -> Result<Value<'_>, ModelError> {
            let index = self.tokens[self.pieces..].iter().position(|token| token == name);
            let index =
                index.ok_or_else(|| ModelError::Synth(format!("there is no special token {name}")))?;
            Ok(Value::U32((self.pieces + index) as u32))
        };
        let types = (0..self.tokens.len()).map(|id| if id < self.pieces { 1 } else { 3 });
        writer.put("tokenizer.ggml.model", Value::String("gpt2"))?;
        writer.put("tokenizer.ggml.pre", Value::String("llama4"))?;
        writer.put_strings("tokenizer.ggml.tokens", &self.tokens)?;
        writer.put_i32s("tokenizer.ggml.token_type", types)?;
        writer.put_strings("tokenizer.ggml.merges", &self.merges)?;
        writer.put("tokenizer.ggml.bos_token_id", id("<|begin_of_text|>")?)?;
        writer.put("tokenizer.ggml.eos_token_id", id("<|end_of_text|>")?)?;
        writer.put("tokenizer.ggml.padding_token_id", id("<|finetune_right_pad|>")?)?;
        writer.put("tokenizer.ggml.eot_token_id", id("<|eot|>")?)?;
        writer.put("tokenizer.ggml.add_bos_token", Value::Bool(true))?;
        writer.put("tokenizer.ggml.add_sep_token", Value::Bool(false))?;
        writer.put("tokenizer.chat_template", Value::String(CHAT_TEMPLATE))?;
        Ok(())
    }
}

fn special_tokens(vocab: usize) -> Vec<String> {
    if vocab < 100_000 {
        return SMALL.map(str::to_owned).to_vec();
    }
    let mut names: Vec<String> =
        (0..RELEASED_COUNT).map(|index| format!("<|reserved_special_token_{index}|>")).collect();
    for (index, name) in RELEASED {
        name.clone_into(&mut names[index]);
    }
    names
}

fn assemble(pieces: &[Vec<u8>], specials: Vec<String>) -> Vocabulary {
    let letters = byte_letters();
    let text = |piece: &[u8]| -> String { piece.iter().map(|byte| letters[usize::from(*byte)]).collect() };
    let ranks: HashMap<&[u8], usize> =
        pieces.iter().enumerate().map(|(rank, piece)| (piece.as_slice(), rank)).collect();
    let mut merges = Vec::new();
    let mut splits = Vec::new();
    for piece in pieces {
        splits.clear();
        for at in 1..piece.len() {
            if let (Some(left), Some(right)) = (ranks.get(&piece[..at]), ranks.get(&piece[at..])) {
                splits.push((*left, *right));
            }
        }
        splits.sort_unstable();
        merges.extend(
            splits.iter().map(|(left, right)| format!("{} {}", text(&pieces[*left]), text(&pieces[*right]))),
        );
    }
    let mut tokens: Vec<String> = pieces.iter().map(|piece| text(piece)).collect();
    tokens.extend(specials);
    Vocabulary { tokens, merges, pieces: pieces.len() }
}

/// The printable letter that stands for each byte in token texts.
fn byte_letters() -> [char; 256] {
    let mut letters = ['\0'; 256];
    let mut extra = 256;
    for byte in 0..=255_u8 {
        let printable = matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
        let code = if printable {
            u32::from(byte)
        } else {
            extra += 1;
            extra - 1
        };
        letters[usize::from(byte)] = char::from_u32(code).unwrap_or('\0');
    }
    letters
}

/// All words of `len` letters, the first of which may be a space; frequent letters first.
fn combinations(len: u32) -> Vec<Vec<u8>> {
    const LETTERS: &[u8; 27] = b" etaoinshrdlcumwfgypbvkjxqz";
    let count = 27_usize.pow(len);
    let digits = |mut code: usize| {
        (0..len).map(move |_| {
            let digit = code % 27;
            code /= 27;
            digit
        })
    };
    // The last digit is the first letter, the only place for a space (digit 0).
    let mut codes: Vec<usize> =
        (0..count).filter(|code| digits(*code).take(len as usize - 1).all(|digit| digit != 0)).collect();
    codes.sort_by_key(|code| digits(*code).sum::<usize>());
    codes
        .into_iter()
        .map(|code| {
            let mut word: Vec<u8> = digits(code).map(|digit| LETTERS[digit]).collect();
            word.reverse();
            word
        })
        .collect()
}
