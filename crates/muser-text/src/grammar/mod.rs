//! Constrained output: which tokens may come next so that the text follows a JSON schema or a grammar.
//!
//! The work is done by `llguidance` over a trie of the vocabulary's bytes; here are the limits around it (grammars come
//! from strangers), the translation of GBNF, and the part that knows messages: a grammar applies to the answer, or to the
//! arguments of tool calls, and never to reasoning ([`TurnConstraint`]).

mod cache;
mod clean;
mod compile;
mod engine;
mod far_limits;
mod gbnf;
mod patterns;
mod plan;
mod raw_text;
mod token_constraint;
mod tool_calls;
mod turn;

pub use engine::GrammarEngine;
pub use plan::{AnswerRule, LeftOut, TurnPlan, TurnRules, TurnStart};
pub use token_constraint::TokenConstraint;
pub use turn::TurnConstraint;

use crate::error::TextError;
use regex_syntax::hir::{Hir, HirKind};
use serde_json::Value;

/// Whether somebody still waits for what is being compiled.
pub type Wanted<'a> = &'a dyn Fn() -> bool;

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
    /// One of these texts.
    Choice(Vec<String>),
}

/// Largest grammar or schema accepted, in bytes.
const MAX_GRAMMAR_BYTES: usize = 1 << 20;

/// Deepest nesting of brackets accepted: parsers and compilers of grammars recurse.
const MAX_NESTING: usize = 100;

/// Largest regular expression accepted, in characters and classes once repetitions are written out.
const MAX_EXPANDED: u64 = 200_000;

/// Most alternatives that a schema may leave open at one place: properties that may come next, over all branches. Each
/// costs time in every mask there.
const MAX_WIDTH: usize = 256;

/// White space between the parts of JSON: a space, or a line break with its indentation. More would only give a model
/// room to dwell in.
const JSON_SPACE: &str = " |\\n(?: {0,32}|\\t{0,8})";

/// Our settings for the compiler of JSON schemas.
fn compiler_settings(lenient: bool) -> Value {
    serde_json::json!({"whitespace_pattern": JSON_SPACE, "coerce_one_of": true, "lenient": lenient})
}

fn depth_of(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(depth_of).max().unwrap_or(0),
        Value::Object(fields) => 1 + fields.values().map(depth_of).max().unwrap_or(0),
        _ => 0,
    }
}

/// Are brackets nested too deep for a parser that recurses? Counts all of them, also those in literals.
fn nests_too_deep(text: &str) -> bool {
    let mut depth = 0_usize;
    text.bytes().any(|byte| {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        depth > MAX_NESTING
    })
}

/// Size and nesting of a grammar's text.
fn check_text(kind: &'static str, text: &str) -> Result<(), TextError> {
    let unusable = |what: String| Err(TextError::Grammar { kind, what });
    if text.len() > MAX_GRAMMAR_BYTES {
        return unusable(format!("it has {} bytes and may have {MAX_GRAMMAR_BYTES}", text.len()));
    }
    if nests_too_deep(text) {
        return unusable(format!("it nests brackets more than {MAX_NESTING} levels deep"));
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

#[cfg(test)]
mod tests;
#[cfg(test)]
#[expect(clippy::needless_pass_by_value, reason = "JSON literals read better by value")]
mod tool_tests;
#[cfg(test)]
mod turn_tests;
