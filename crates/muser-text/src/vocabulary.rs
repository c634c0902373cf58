//! The vocabulary: what every id stands for, and the way back from bytes to an id.
//!
//! Bytes of all tokens lie in one arena, so that 200,000 tokens are three allocations and a lookup touches one cache
//! line of slots and one of bytes. Loading fails closed: after it, every ordinary token has unique bytes, every byte
//! has a token of its own, and every merge joins two known tokens into a third. Encoding therefore cannot fail.

use crate::byte_alphabet;
use crate::error::{TextError, shown};
use crate::merges::Merges;
use hashbrown::{DefaultHashBuilder, HashTable};
use std::hash::BuildHasher;

/// What kind of token an id is, as the file says in `tokenizer.ggml.token_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenKind {
    /// Bytes of ordinary text.
    Normal,
    /// A marker that never comes from ordinary text and is hidden in plain output.
    Control,
    /// A marker that the vocabulary's author wants to be seen in output.
    UserDefined,
    /// An id without a use.
    Unused,
}

/// Tokenizer metadata as plain data, before it is checked.
///
/// Texts are bytes since array strings of a file need not be UTF-8. `tokens` are in the byte alphabet for ordinary
/// tokens and literal for the other kinds.
#[derive(Clone, Debug, Default)]
pub struct VocabSource<'a> {
    /// Name of the pre-split rule, `tokenizer.ggml.pre`.
    pub pre: String,
    /// Text of every id, `tokenizer.ggml.tokens`.
    pub tokens: Vec<&'a [u8]>,
    /// Kind of every id, `tokenizer.ggml.token_type`: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
    pub token_types: Vec<i64>,
    /// Merges in the order of their priority, `tokenizer.ggml.merges`: two texts with one space between.
    pub merges: Vec<&'a [u8]>,
    /// `tokenizer.ggml.bos_token_id`.
    pub bos: Option<u64>,
    /// `tokenizer.ggml.eos_token_id`.
    pub eos: Option<u64>,
    /// `tokenizer.ggml.eot_token_id`.
    pub eot: Option<u64>,
    /// `tokenizer.ggml.padding_token_id`.
    pub padding: Option<u64>,
    /// `tokenizer.ggml.add_bos_token`.
    pub add_bos: bool,
}

pub(crate) const TOKENS_KEY: &str = "tokenizer.ggml.tokens";
pub(crate) const MERGES_KEY: &str = "tokenizer.ggml.merges";
pub(crate) const TYPES_KEY: &str = "tokenizer.ggml.token_type";

/// Longest token accepted, in bytes.
const MAX_TOKEN_BYTES: usize = 4096;

/// Checked vocabulary.
#[derive(Debug)]
pub(crate) struct Vocabulary {
    /// Bytes of all tokens, one after the other.
    bytes: Vec<u8>,
    /// Token `id` is `bytes[starts[id]..starts[id + 1]]`.
    starts: Vec<u32>,
    kinds: Vec<TokenKind>,
    /// Ordinary tokens by their bytes.
    by_bytes: HashTable<u32>,
    hasher: DefaultHashBuilder,
    /// Ids of the 256 single bytes.
    pub(crate) byte_ids: [u32; 256],
    pub(crate) merges: Merges,
}

impl Vocabulary {
    pub(crate) fn load(source: &VocabSource<'_>) -> Result<Vocabulary, TextError> {
        let count = source.tokens.len();
        if count == 0 || count > u32::MAX as usize / 2 {
            return Err(TextError::vocabulary(TOKENS_KEY, "at least 256 tokens", format!("{count}")));
        }
        if source.token_types.len() != count {
            return Err(TextError::vocabulary(
                TYPES_KEY,
                format!("{count} entries, one for each token"),
                format!("{}", source.token_types.len()),
            ));
        }
        let total: usize = source.tokens.iter().map(|text| text.len()).sum();
        if total > u32::MAX as usize {
            return Err(TextError::vocabulary(
                TOKENS_KEY,
                "less than 4 GiB of text",
                format!("{total} bytes"),
            ));
        }
        let mut vocabulary = Vocabulary {
            bytes: Vec::with_capacity(total),
            starts: Vec::with_capacity(count + 1),
            kinds: Vec::with_capacity(count),
            by_bytes: HashTable::with_capacity(count),
            hasher: DefaultHashBuilder::default(),
            byte_ids: [u32::MAX; 256],
            merges: Merges::default(),
        };
        vocabulary.starts.push(0);
        for (id, (text, ty)) in source.tokens.iter().zip(&source.token_types).enumerate() {
            vocabulary.add_token(id as u32, text, *ty)?;
        }
        for byte in 0..=255_u8 {
            vocabulary.byte_ids[usize::from(byte)] = vocabulary.find(&[byte]).ok_or_else(|| {
                TextError::vocabulary(
                    TOKENS_KEY,
                    "a token for every single byte",
                    format!("none for byte {byte:#04x}"),
                )
            })?;
        }
        vocabulary.merges = vocabulary.load_merges(&source.merges)?;
        Ok(vocabulary)
    }

    /// Number of ids.
    pub(crate) fn len(&self) -> usize {
        self.kinds.len()
    }

    /// Bytes of a token: of the text it stands for, or the literal text of a marker.
    pub(crate) fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        let start = *self.starts.get(id as usize)? as usize;
        let end = *self.starts.get(id as usize + 1)? as usize;
        self.bytes.get(start..end)
    }

    pub(crate) fn kind(&self, id: u32) -> Option<TokenKind> {
        self.kinds.get(id as usize).copied()
    }

    /// The ordinary token that is exactly these bytes.
    #[inline]
    pub(crate) fn find(&self, bytes: &[u8]) -> Option<u32> {
        let hash = self.hasher.hash_one(bytes);
        self.by_bytes.find(hash, |&id| slice_of(&self.bytes, &self.starts, id) == bytes).copied()
    }

    fn add_token(&mut self, id: u32, text: &[u8], ty: i64) -> Result<(), TextError> {
        let at = || format!("{TOKENS_KEY}[{id}]");
        let text = std::str::from_utf8(text).map_err(|e| {
            TextError::vocabulary(at(), "UTF-8 text", format!("an invalid byte at {}", e.valid_up_to()))
        })?;
        if text.is_empty() || text.len() > MAX_TOKEN_BYTES {
            return Err(TextError::vocabulary(
                at(),
                format!("1 to {MAX_TOKEN_BYTES} bytes"),
                format!("{}", text.len()),
            ));
        }
        let kind = match ty {
            1 => TokenKind::Normal,
            3 => TokenKind::Control,
            4 => TokenKind::UserDefined,
            2 | 5 => TokenKind::Unused,
            other => {
                return Err(TextError::vocabulary(
                    format!("{TYPES_KEY}[{id}]"),
                    "1 (normal), 2 (unknown), 3 (control), 4 (user-defined) or 5 (unused)",
                    format!("{other}"),
                ));
            }
        };
        let start = self.bytes.len();
        if kind == TokenKind::Normal {
            byte_alphabet::decode_into(text, &mut self.bytes).map_err(|c| {
                TextError::vocabulary(
                    at(),
                    "characters of the byte alphabet",
                    format!("{c:?} in {}", shown(text)),
                )
            })?;
        } else {
            self.bytes.extend_from_slice(text.as_bytes());
        }
        self.starts.push(self.bytes.len() as u32);
        self.kinds.push(kind);
        if kind == TokenKind::Normal {
            let (bytes, starts, hasher) = (&self.bytes, &self.starts, &self.hasher);
            let own = &bytes[start..];
            let entry = self.by_bytes.entry(
                hasher.hash_one(own),
                |&other| slice_of(bytes, starts, other) == own,
                |&other| hasher.hash_one(slice_of(bytes, starts, other)),
            );
            match entry {
                hashbrown::hash_table::Entry::Occupied(first) => {
                    return Err(TextError::vocabulary(
                        at(),
                        "a token that is not there yet",
                        format!("{}, the same as token {}", shown(text), first.get()),
                    ));
                }
                hashbrown::hash_table::Entry::Vacant(slot) => {
                    slot.insert(id);
                }
            }
        }
        Ok(())
    }

    /// Looks up all merges, on several threads: it is most of the time of loading, and it is waiting for memory.
    fn load_merges(&self, lines: &[&[u8]]) -> Result<Merges, TextError> {
        let threads =
            std::thread::available_parallelism().map_or(1, |count| count.get().min(MAX_LOAD_THREADS));
        let chunk = lines.len().div_ceil(threads).max(MIN_MERGES_PER_THREAD);
        let resolved = std::thread::scope(|scope| {
            let workers: Vec<_> = lines
                .chunks(chunk)
                .enumerate()
                .map(|(index, lines)| scope.spawn(move || self.resolve_merges(lines, index * chunk)))
                .collect();
            workers
                .into_iter()
                .map(|worker| worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .collect::<Result<Vec<_>, _>>()
        })?;
        let mut merges = Merges::with_capacity(lines.len());
        for (rank, &(left, right, result)) in resolved.iter().flatten().enumerate() {
            if !merges.insert(left, right, rank as u32, result) {
                return Err(wrong_merge(rank, lines[rank], "a merge that is not there yet"));
            }
        }
        for (left, id) in self.byte_ids.iter().enumerate() {
            for (right, next) in self.byte_ids.iter().enumerate() {
                merges.set_byte_pair(left as u8, right as u8, merges.get(*id, *next));
            }
        }
        Ok(merges)
    }

    /// Left, right and result of each merge of a part of the list that starts at `first_rank`.
    fn resolve_merges(&self, lines: &[&[u8]], first_rank: usize) -> Result<Vec<(u32, u32, u32)>, TextError> {
        let mut out = Vec::with_capacity(lines.len());
        let mut joined = Vec::with_capacity(256);
        let mut result = 0;
        for (index, line) in lines.iter().enumerate() {
            let wrong = |expected: &str| wrong_merge(first_rank + index, line, expected);
            let text = std::str::from_utf8(line).map_err(|_| wrong("UTF-8 text"))?;
            let (left, right) =
                text.split_once(' ').ok_or_else(|| wrong("two texts with one space between"))?;
            joined.clear();
            byte_alphabet::decode_into(left, &mut joined)
                .map_err(|_| wrong("characters of the byte alphabet"))?;
            let middle = joined.len();
            byte_alphabet::decode_into(right, &mut joined)
                .map_err(|_| wrong("characters of the byte alphabet"))?;
            let left = self.find(&joined[..middle]).ok_or_else(|| wrong("a left side that is a token"))?;
            let right = self.find(&joined[middle..]).ok_or_else(|| wrong("a right side that is a token"))?;
            // In the usual order of merges the result is that of the merge before or the next token.
            result = [result, result + 1]
                .into_iter()
                .find(|&id| self.kind(id) == Some(TokenKind::Normal) && self.token_bytes(id) == Some(&joined))
                .or_else(|| self.find(&joined))
                .ok_or_else(|| wrong("two texts that join to a token"))?;
            out.push((left, right, result));
        }
        Ok(out)
    }
}

/// More threads than this do not make loading faster.
const MAX_LOAD_THREADS: usize = 4;

/// Fewer merges than this are not worth a thread.
const MIN_MERGES_PER_THREAD: usize = 20_000;

fn wrong_merge(rank: usize, line: &[u8], expected: &str) -> TextError {
    TextError::vocabulary(format!("{MERGES_KEY}[{rank}]"), expected, shown(&String::from_utf8_lossy(line)))
}

/// Bytes of an id that is known to be in range.
#[inline]
fn slice_of<'a>(bytes: &'a [u8], starts: &[u32], id: u32) -> &'a [u8] {
    &bytes[starts[id as usize] as usize..starts[id as usize + 1] as usize]
}
