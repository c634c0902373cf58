//! Constrained output: which tokens may come next so that the text follows a JSON schema or a grammar.
//!
//! The work is done by `llguidance` over a trie of the vocabulary's bytes; here are the limits around it (grammars come
//! from strangers), the translation of GBNF, and the part that knows messages: a grammar applies to the answer, or to the
//! arguments of tool calls, and never to reasoning ([`TurnConstraint`]).

mod far_limits;
mod gbnf;
mod token_constraint;
mod tool_calls;
mod turn;

pub use token_constraint::TokenConstraint;
pub use turn::{AnswerRule, TurnConstraint, TurnRules, TurnStart};

use crate::error::{TextError, shown};
use crate::{Specials, TokenKind, Tokenizer};
use far_limits::QuoteDistance;
use llguidance::api::TopLevelGrammar;
use llguidance::{Matcher, ParserFactory};
use regex_syntax::hir::{Hir, HirKind};
use serde_json::Value;
use std::sync::Arc;
use token_constraint::Relaxed;
use toktrie::{InferenceCapabilities, SimpleVob, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};

/// What the text must follow.
#[derive(Clone, Debug, PartialEq)]
pub enum Grammar {
    /// A JSON schema.
    JsonSchema(Value),
    /// Any JSON object.
    JsonObject,
    /// A grammar in Lark's notation.
    Lark(String),
    /// A grammar in the notation of llama.cpp: rules, literals, character classes, groups, repetitions, comments.
    Gbnf(String),
    /// A regular expression for the whole text.
    Regex(String),
}

/// Largest grammar or schema accepted, in bytes.
const MAX_GRAMMAR_BYTES: usize = 1 << 20;

/// Deepest nesting of brackets accepted: parsers and compilers of grammars recurse.
const MAX_NESTING: usize = 100;

const JSON_SCHEMA: &str = "the JSON schema";

/// Largest regular expression accepted, in characters and classes once repetitions are written out.
const MAX_EXPANDED: u64 = 200_000;

/// White space between the parts of JSON: bounded, so that a model cannot dwell in it.
const JSON_SPACE: &str = "[ \\n\\t]{1,40}";

/// Makes constraints for one vocabulary. Building it takes a fraction of a second for a large vocabulary: keep it.
pub struct GrammarEngine {
    tokenizer: Arc<Tokenizer>,
    factory: ParserFactory,
    longest_token_bytes: usize,
    /// Ordinary text and the end of a message: what reasoning may contain.
    reasoning: Vec<u32>,
    /// Ordinary text and the end of the turn.
    answer: Vec<u32>,
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

        let mut text = SimpleVob::alloc(tokenizer.vocab_size());
        for id in 0..tokenizer.vocab_size() as u32 {
            if matches!(tokenizer.token_kind(id), Some(TokenKind::Normal)) {
                text.allow_token(id);
            }
        }
        let with = |extra: Option<u32>| {
            let mut mask = text.clone();
            if let Some(id) = extra {
                mask.allow_token(id);
            }
            mask.as_slice().to_vec()
        };
        let reasoning = with(tokenizer.channels().map(|channels| channels.end_of_message));
        let answer = with(Some(end));
        let lengths =
            (0..tokenizer.vocab_size() as u32).filter_map(|id| tokenizer.token_bytes(id)).map(<[u8]>::len);
        let longest_token_bytes = lengths.max().unwrap_or(0);
        Ok(GrammarEngine { tokenizer, factory, longest_token_bytes, reasoning, answer })
    }

    /// A constraint for a text that follows `grammar` from its first character on. A grammar that cannot be used is the
    /// caller's fault, whatever is wrong with it.
    pub fn constraint(&self, grammar: &Grammar) -> Result<TokenConstraint, TextError> {
        let (kind, compiled) = compile(grammar)?;
        let matcher = self.matcher(kind, compiled)?;
        let relaxed = match grammar {
            Grammar::JsonSchema(schema) => self.relaxed(kind, schema, |schema| {
                json_schema(schema).ok().map(TopLevelGrammar::from_json_schema)
            }),
            _ => None,
        };
        Ok(TokenConstraint::new(kind, matcher, relaxed))
    }

    /// The matcher of a schema without its far limits, if it has such limits.
    fn relaxed(
        &self,
        kind: &'static str,
        schema: &Value,
        compile: impl FnOnce(&Value) -> Option<TopLevelGrammar>,
    ) -> Option<Relaxed> {
        let (relaxed, limit_chars) = far_limits::without_far_limits(schema)?;
        let matcher = self.matcher(kind, compile(&relaxed)?).ok()?;
        Some(Relaxed {
            matcher,
            limit_chars,
            tokenizer: Arc::clone(&self.tokenizer),
            longest_token_bytes: self.longest_token_bytes,
            distance: QuoteDistance::default(),
        })
    }

    fn matcher(&self, kind: &'static str, grammar: TopLevelGrammar) -> Result<Matcher, TextError> {
        let unusable = |what: String| TextError::Grammar { kind, what };
        // The compiler is meant to return errors; a panic in it must not take the server down either.
        let parser =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.factory.create_parser(grammar)));
        let parser = match parser {
            Ok(Ok(parser)) => parser,
            Ok(Err(error)) => return Err(unusable(first_line(&error))),
            Err(_) => return Err(unusable("it cannot be compiled".to_owned())),
        };
        let mut matcher = Matcher::new(Ok(parser));
        // A grammar that allows no text at all shows now and not in the middle of an answer.
        matcher.compute_mask_or_eos().map_err(|error| unusable(first_line(&error)))?;
        Ok(matcher)
    }
}

fn compile(grammar: &Grammar) -> Result<(&'static str, TopLevelGrammar), TextError> {
    let (kind, text) = match grammar {
        Grammar::JsonSchema(_) | Grammar::JsonObject => (JSON_SCHEMA, None),
        Grammar::Lark(text) => ("the Lark grammar", Some(text)),
        Grammar::Gbnf(text) => ("the GBNF grammar", Some(text)),
        Grammar::Regex(text) => ("the regular expression", Some(text)),
    };
    if let Some(text) = text {
        check_text(kind, text)?;
        if matches!(grammar, Grammar::Regex(_)) {
            check_expanded(kind, text)?;
        }
    }
    let compiled = match grammar {
        Grammar::JsonObject => {
            TopLevelGrammar::from_json_schema(json_schema(&serde_json::json!({"type": "object"}))?)
        }
        Grammar::JsonSchema(schema) => TopLevelGrammar::from_json_schema(json_schema(schema)?),
        Grammar::Lark(text) => TopLevelGrammar::from_lark(text.clone()),
        Grammar::Gbnf(text) => TopLevelGrammar::from_lark(gbnf::to_lark(text)?),
        Grammar::Regex(text) => TopLevelGrammar::from_regex(text),
    };
    Ok((kind, compiled))
}

/// A schema with our settings for the compiler, once its size is checked.
fn json_schema(schema: &Value) -> Result<Value, TextError> {
    check_schema(schema)?;
    let mut schema = match schema {
        Value::Object(fields) => fields.clone(),
        // `true`: anything.
        Value::Bool(true) => serde_json::Map::new(),
        other => {
            let what = format!("expected an object, found {}", shown(&other.to_string()));
            return Err(TextError::Grammar { kind: JSON_SCHEMA, what });
        }
    };
    // Explicitly no properties means none, as users of tools expect, and not any.
    let no_properties =
        schema.get("properties").and_then(Value::as_object).is_some_and(serde_json::Map::is_empty);
    if no_properties && !schema.contains_key("patternProperties") {
        schema.entry("additionalProperties").or_insert(Value::Bool(false));
    }
    schema.insert(
        "x-guidance".to_owned(),
        serde_json::json!({"whitespace_pattern": JSON_SPACE, "coerce_one_of": true}),
    );
    Ok(Value::Object(schema))
}

/// Size and nesting of a schema, and the regular expressions in it.
fn check_schema(schema: &Value) -> Result<(), TextError> {
    let unusable = |what: String| Err(TextError::Grammar { kind: JSON_SCHEMA, what });
    let depth = depth_of(schema);
    if depth > MAX_NESTING {
        return unusable(format!("it is nested {depth} levels deep and may be {MAX_NESTING}"));
    }
    let len = schema.to_string().len();
    if len > MAX_GRAMMAR_BYTES {
        return unusable(format!("it has {len} bytes and may have {MAX_GRAMMAR_BYTES}"));
    }
    check_patterns(schema)
}

fn depth_of(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(depth_of).max().unwrap_or(0),
        Value::Object(fields) => 1 + fields.values().map(depth_of).max().unwrap_or(0),
        _ => 0,
    }
}

/// Regular expressions inside a schema have the limits of those outside.
fn check_patterns(schema: &Value) -> Result<(), TextError> {
    match schema {
        Value::Object(fields) => {
            if let Some(Value::String(pattern)) = fields.get("pattern") {
                check_text(JSON_SCHEMA, pattern)?;
                check_expanded(JSON_SCHEMA, pattern)?;
            }
            fields.values().try_for_each(check_patterns)
        }
        Value::Array(items) => items.iter().try_for_each(check_patterns),
        _ => Ok(()),
    }
}

/// Size and nesting of a grammar's text. Counts all brackets, also those in literals: the bound is generous.
fn check_text(kind: &'static str, text: &str) -> Result<(), TextError> {
    let unusable = |what: String| Err(TextError::Grammar { kind, what });
    if text.len() > MAX_GRAMMAR_BYTES {
        return unusable(format!("it has {} bytes and may have {MAX_GRAMMAR_BYTES}", text.len()));
    }
    let mut depth = 0_usize;
    for byte in text.bytes() {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > MAX_NESTING {
            return unusable(format!("it nests brackets more than {MAX_NESTING} levels deep"));
        }
    }
    Ok(())
}

/// Size of a regular expression with its counted repetitions written out: that is what the compiler works on.
fn check_expanded(kind: &'static str, pattern: &str) -> Result<(), TextError> {
    // What this parser refuses, the compiler refuses with a better message.
    let Ok(parsed) = regex_syntax::parse(pattern) else { return Ok(()) };
    let size = expanded_size(&parsed);
    if size > MAX_EXPANDED {
        let what = format!("its repetitions written out have {size} parts and may have {MAX_EXPANDED}");
        return Err(TextError::Grammar { kind, what });
    }
    Ok(())
}

fn expanded_size(hir: &Hir) -> u64 {
    match hir.kind() {
        HirKind::Empty | HirKind::Look(_) => 0,
        HirKind::Literal(literal) => literal.0.len() as u64,
        HirKind::Class(_) => 1,
        HirKind::Repetition(repetition) => {
            let times = repetition.max.unwrap_or(repetition.min).max(1);
            expanded_size(&repetition.sub).saturating_mul(u64::from(times))
        }
        HirKind::Capture(capture) => expanded_size(&capture.sub),
        HirKind::Concat(parts) | HirKind::Alternation(parts) => {
            parts.iter().map(expanded_size).fold(0, u64::saturating_add)
        }
    }
}

fn first_line(error: &anyhow::Error) -> String {
    let text = format!("{error:#}");
    let line = text.lines().next().unwrap_or_default();
    line.chars().take(300).collect()
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

#[cfg(test)]
mod tests;
