//! What all constraints over one vocabulary share: the trie of its bytes, masks, and what was compiled lately.

use super::cache::Cache;
use super::first_line;
use crate::error::TextError;
use crate::{Specials, TokenKind, Tokenizer};
use llguidance::ParserFactory;
use std::sync::Arc;
use toktrie::{InferenceCapabilities, SimpleVob, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};

/// Most states of a lexer, of 1 to 2 KiB each: what a text makes of its grammar's tables stays within some 50 MiB, and a text
/// that would need more ends with an error.
const MAX_LEXER_STATES: usize = 30_000;

/// Makes constraints for one vocabulary. Building it takes a fraction of a second for a large vocabulary: keep it.
pub struct GrammarEngine {
    pub(super) tokenizer: Arc<Tokenizer>,
    pub(super) factory: ParserFactory,
    pub(super) longest_token_bytes: usize,
    /// Ordinary text and the end of a message: what reasoning may contain.
    pub(super) reasoning: Vec<u32>,
    /// Ordinary text, the end of a message and the end of the turn.
    pub(super) answer: Vec<u32>,
    /// What was compiled lately.
    pub(super) cache: Cache,
}

impl std::fmt::Debug for GrammarEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GrammarEngine").finish_non_exhaustive()
    }
}

impl GrammarEngine {
    /// Builds the trie.
    pub fn new(tokenizer: Arc<Tokenizer>) -> Result<GrammarEngine, TextError> {
        let Some(end) = tokenizer.channels().map(|channels| channels.end_of_turn).or(tokenizer.eos()) else {
            return Err(TextError::vocabulary(
                "tokenizer.ggml.eos_token_id",
                "a token that ends the text",
                "no such key",
            ));
        };
        let env: TokEnv =
            Arc::new(VocabularyEnv { trie: trie(&tokenizer, end), tokenizer: tokenizer.clone() });
        let slices = llguidance::earley::SlicedBiasComputer::general_slices();
        let mut factory =
            ParserFactory::new(&env, InferenceCapabilities::default(), &slices).map_err(|e| {
                TextError::vocabulary("tokenizer.ggml.tokens", "tokens that fit a trie", first_line(&e))
            })?;
        factory.quiet();
        factory.limits_mut().verbose_errors = false;
        factory.limits_mut().max_lexer_states = MAX_LEXER_STATES;

        let mut text = SimpleVob::alloc(tokenizer.vocab_size());
        for id in 0..tokenizer.vocab_size() as u32 {
            if matches!(tokenizer.token_kind(id), Some(TokenKind::Normal)) {
                text.allow_token(id);
            }
        }
        let end_of_message = tokenizer.channels().map(|channels| channels.end_of_message);
        let with = |extra: &[Option<u32>]| {
            let mut mask = text.clone();
            extra.iter().flatten().for_each(|id| mask.allow_token(*id));
            mask.as_slice().to_vec()
        };
        let reasoning = with(&[end_of_message]);
        let answer = with(&[end_of_message, Some(end)]);
        let longest_token_bytes = tokenizer.longest_token();
        let cache = Cache::default();
        Ok(GrammarEngine { tokenizer, factory, longest_token_bytes, reasoning, answer, cache })
    }
}

/// The trie of a vocabulary. Markers are prefixed with a byte that no text contains, so that no grammar for text lets
/// them through.
fn trie(tokenizer: &Tokenizer, end: u32) -> TokTrie {
    let words: Vec<Vec<u8>> = (0..tokenizer.vocab_size() as u32)
        .map(|id| {
            let bytes = tokenizer.token_bytes(id).unwrap_or_default();
            match tokenizer.token_kind(id) {
                Some(TokenKind::Normal) => bytes.to_vec(),
                Some(TokenKind::Control | TokenKind::UserDefined) => {
                    [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat()
                }
                Some(TokenKind::Unused) | None => Vec::new(),
            }
        })
        .collect();
    TokTrie::from(&TokRxInfo::new(words.len() as u32, end), &words)
}

struct VocabularyEnv {
    trie: TokTrie,
    tokenizer: Arc<Tokenizer>,
}

impl TokenizerEnv for VocabularyEnv {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        match std::str::from_utf8(bytes) {
            Ok(text) => self.tokenizer.encode(text, Specials::Plain),
            Err(_) => self.trie.greedy_tokenize(bytes),
        }
    }
}
