//! From grammars and tools to constraints, compiled once for each content.

use super::cache::Compiled;
use super::clean::{Cleaner, Remark, widest};
use super::engine::GrammarEngine;
use super::far_limits::{self, Distance};
use super::raw_text::literal;
use super::token_constraint::{Relaxed, TokenConstraint};
use super::tool_calls::{CallPlan, ValueRule};
use super::{
    Grammar, MAX_GRAMMAR_BYTES, MAX_NESTING, MAX_WIDTH, Wanted, check_expanded, check_text,
    compiler_settings, depth_of, first_line, gbnf,
};
use crate::error::{TextError, shown};
use crate::schema::Resolver;
use crate::{TokenKind, Tokenizer};
use llguidance::Matcher;
use llguidance::api::TopLevelGrammar;
use serde_json::{Value, json};
use std::sync::Arc;

pub(super) const JSON_SCHEMA: &str = "the JSON schema";

/// Compilations spent on finding which part of a schema is at fault.
const MAX_TRIALS: usize = 64;

/// Stack of the thread that compiles; only what is used of it costs memory.
const COMPILER_STACK: usize = 512 << 20;

/// Most rules of a grammar: the compiler goes from rule to rule.
const MAX_RULES: usize = 10_000;

/// Tokens that a new constraint is led through, so that what fails at once fails at the door.
const TRIAL_TOKENS: usize = 2;

impl GrammarEngine {
    /// A constraint for a text that follows `grammar` from its first character on. A grammar that cannot be used is the
    /// caller's fault, whatever is wrong with it.
    pub fn constraint(&self, grammar: &Grammar) -> Result<TokenConstraint, TextError> {
        Ok(self.compiled(grammar, &|| true)?.fresh())
    }

    /// The same, shared by all who ask for this grammar.
    pub(super) fn compiled(&self, grammar: &Grammar, wanted: Wanted<'_>) -> Result<Arc<Compiled>, TextError> {
        let key = match grammar {
            Grammar::JsonSchema(schema) => format!("schema {schema}"),
            Grammar::JsonObject => "object".to_owned(),
            Grammar::Lark(text) => format!("lark {text}"),
            Grammar::Gbnf(text) => format!("gbnf {text}"),
            Grammar::Regex(text) => format!("regex {text}"),
            Grammar::Choice(choices) => format!("choice {}", json!(choices)),
        };
        self.cache.get(&key, wanted, || {
            let (constraint, bytes) = self.compile(grammar, wanted)?;
            Ok(Compiled::new(constraint, bytes, Vec::new(), 0))
        })
    }

    /// The constraint of calls of one tool. Strictly, what cannot be kept is an error; else it is left out.
    pub(super) fn compiled_call(
        &self,
        name: &str,
        parameters: &Value,
        strict: bool,
        wanted: Wanted<'_>,
    ) -> Result<Arc<Compiled>, TextError> {
        let key = format!("tool {strict} {name} {parameters}");
        self.cache.get(&key, wanted, || self.compile_call(name, parameters, strict, wanted))
    }

    fn compile(&self, grammar: &Grammar, wanted: Wanted<'_>) -> Result<(TokenConstraint, usize), TextError> {
        let (kind, text) = match grammar {
            Grammar::JsonSchema(schema) => return self.compile_schema(schema, wanted),
            Grammar::JsonObject => return self.compile_schema(&json!({"type": "object"}), wanted),
            Grammar::Lark(text) => ("the Lark grammar", text),
            Grammar::Gbnf(text) => ("the GBNF grammar", text),
            Grammar::Regex(text) => ("the regular expression", text),
            Grammar::Choice(choices) => return self.compile_choice(choices, wanted),
        };
        check_text(kind, text)?;
        let compiled = if matches!(grammar, Grammar::Regex(_)) {
            check_expanded(kind, text)?;
            TopLevelGrammar::from_regex(text)
        } else {
            let lark = if matches!(grammar, Grammar::Gbnf(_)) { gbnf::to_lark(text)? } else { text.clone() };
            let rules = lark.lines().filter(|line| line.contains(':')).count();
            if rules > MAX_RULES {
                let what = format!("it has {rules} rules and may have {MAX_RULES}");
                return Err(TextError::Grammar { kind, what });
            }
            TopLevelGrammar::from_lark(lark)
        };
        let (matcher, bytes) = self.matcher(kind, compiled, wanted)?;
        Ok((TokenConstraint::new(kind, matcher, None), bytes))
    }

    /// One terminal for all choices: as rules of their own they would be kept apart in every mask.
    fn compile_choice(
        &self,
        choices: &[String],
        wanted: Wanted<'_>,
    ) -> Result<(TokenConstraint, usize), TextError> {
        let kind = "the list of choices";
        let bytes: usize = choices.iter().map(String::len).sum();
        if bytes > MAX_GRAMMAR_BYTES {
            let what = format!("it has {bytes} bytes and may have {MAX_GRAMMAR_BYTES}");
            return Err(TextError::Grammar { kind, what });
        }
        let literals: Vec<String> = choices.iter().map(|choice| literal(choice)).collect();
        let lark = format!("start: CHOICE\nCHOICE: {}", literals.join(" | "));
        let (matcher, bytes) = self.matcher(kind, TopLevelGrammar::from_lark(lark), wanted)?;
        Ok((TokenConstraint::new(kind, matcher, None), bytes))
    }

    fn compile_schema(
        &self,
        schema: &Value,
        wanted: Wanted<'_>,
    ) -> Result<(TokenConstraint, usize), TextError> {
        let document = answer_document(schema)?;
        let compile = |document: &Value| {
            self.matcher(JSON_SCHEMA, TopLevelGrammar::from_json_schema(with_settings(document)), wanted)
        };
        let (matcher, mut bytes) =
            compile(&document).map_err(|error| self.place_of_fault(&document, error, wanted))?;
        let relaxed = far_limits::without_far_limits(&document).and_then(|(document, limit_chars)| {
            let (matcher, more) = compile(&document).ok()?;
            bytes += more;
            Some(self.relaxed(matcher, limit_chars, Distance::of_quotes()))
        });
        Ok((TokenConstraint::new(JSON_SCHEMA, matcher, relaxed), bytes))
    }

    /// An error that says where in the schema it is, if that can be found out.
    fn place_of_fault(&self, document: &Value, error: TextError, wanted: Wanted<'_>) -> TextError {
        let TextError::Grammar { what, .. } = error else { return error };
        let (mut here, mut path, mut trials) = (document, String::new(), 0);
        while let Some((key, part)) = self.part_at_fault(document, here, &mut trials, wanted) {
            path = if path.is_empty() { key } else { format!("{path}.{key}") };
            here = part;
        }
        TextError::Schema { tool: None, path, what }
    }

    fn part_at_fault<'v>(
        &self,
        document: &'v Value,
        here: &'v Value,
        trials: &mut usize,
        wanted: Wanted<'_>,
    ) -> Option<(String, &'v Value)> {
        let properties = here.get("properties").and_then(Value::as_object).into_iter().flatten();
        let mut parts = properties.map(|(key, part)| (format!("properties.{key}"), part)).collect::<Vec<_>>();
        parts.extend(here.get("items").map(|part| ("items".to_owned(), part)));
        parts.into_iter().filter(|(_, part)| part.is_object()).find(|(_, part)| {
            *trials += 1;
            let mut alone = (*part).clone();
            alone["$defs"] = document.get("$defs").cloned().unwrap_or_else(|| json!({}));
            let grammar = TopLevelGrammar::from_json_schema(with_settings(&alone));
            *trials <= MAX_TRIALS && self.matcher(JSON_SCHEMA, grammar, wanted).is_err()
        })
    }

    fn compile_call(
        &self,
        name: &str,
        parameters: &Value,
        strict: bool,
        wanted: Wanted<'_>,
    ) -> Result<Compiled, TextError> {
        const KIND: &str = "the schema of a tool";
        let fault = |remark: Remark| TextError::Schema {
            tool: Some(name.to_owned()),
            path: remark.path,
            what: remark.what,
        };
        let mut plan = CallPlan::new(parameters, strict).map_err(fault)?;
        let matcher_of = |lark: String| self.matcher(KIND, TopLevelGrammar::from_lark(lark), wanted);
        let (matcher, mut bytes) = match matcher_of(plan.lark(name)) {
            Ok(made) => made,
            Err(error) => {
                let whys: Vec<(String, ValueRule, String)> = self.values_at_fault(&plan, wanted);
                if strict {
                    let (path, what) = whys
                        .into_iter()
                        .next()
                        .map_or_else(|| (String::new(), error.to_string()), |(path, _, what)| (path, what));
                    return Err(fault(Remark { path, what }));
                }
                plan.give_up(|parameter| whys.iter().any(|(_, rule, _)| *rule == parameter.rule));
                if let Ok(made) = matcher_of(plan.lark(name)) {
                    made
                } else {
                    plan.give_up(|_| true);
                    matcher_of(plan.lark(name))?
                }
            }
        };
        let relaxed = plan.relaxed_lark(name).and_then(|(lark, limit_chars)| {
            let (matcher, more) = matcher_of(lark).ok()?;
            bytes += more;
            Some(self.relaxed(matcher, limit_chars, Distance::of_text()))
        });
        let tokens = |text: &str| self.tokenizer.encode(text, crate::Specials::Plain).len();
        // The header, a dozen tokens for each value that must be there, and the end.
        let least = tokens(name) + 8 + tokens(&plan.skeleton(name)) + 12 * plan.required();
        Ok(Compiled::new(TokenConstraint::new(KIND, matcher, relaxed), bytes, plan.left_out, least))
    }

    /// The values whose schemas do not compile by themselves, with the reason.
    fn values_at_fault(&self, plan: &CallPlan, wanted: Wanted<'_>) -> Vec<(String, ValueRule, String)> {
        let mut found = Vec::new();
        for parameter in plan.all_parameters().take(4 * MAX_TRIALS) {
            let terminal = |text: &str| TopLevelGrammar::from_lark(format!("start: TEXT\nTEXT: {text}"));
            let schema = |schema: &Value| TopLevelGrammar::from_json_schema(schema.clone());
            let grammars = match &parameter.rule {
                ValueRule::Text => Vec::new(),
                ValueRule::Terminal(text) => vec![terminal(text)],
                ValueRule::Json(value) => vec![schema(value)],
                ValueRule::Both(text, value) => vec![terminal(text), schema(value)],
            };
            for grammar in grammars {
                if let Err(error) = self.matcher(JSON_SCHEMA, grammar, wanted) {
                    let what = match error {
                        TextError::Grammar { what, .. } => what,
                        other => other.to_string(),
                    };
                    found.push((parameter.path(), parameter.rule.clone(), what));
                    break;
                }
            }
        }
        found
    }

    fn relaxed(&self, matcher: Matcher, limit_chars: usize, distance: Distance) -> Relaxed {
        Relaxed {
            matcher,
            limit_chars,
            tokenizer: Arc::clone(&self.tokenizer),
            longest_token_bytes: self.longest_token_bytes,
            distance,
        }
    }

    /// A matcher, and the bytes of its tables. A step of the compiler cannot be stopped (its limits bound it to a second or
    /// so), so whether it is still wanted is asked before each.
    pub(super) fn matcher(
        &self,
        kind: &'static str,
        grammar: TopLevelGrammar,
        wanted: Wanted<'_>,
    ) -> Result<(Matcher, usize), TextError> {
        if !wanted() {
            return Err(TextError::Abandoned);
        }
        let unusable = |what: String| TextError::Grammar { kind, what };
        // The compiler recurses from rule to rule, so it gets a stack for as many as are accepted. It is meant to return
        // errors; a panic in it must not take the server down either.
        let compiling = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("grammar".to_owned()).stack_size(COMPILER_STACK);
            let compiling = thread.spawn_scoped(scope, || self.factory.create_parser(grammar));
            compiling.map(std::thread::ScopedJoinHandle::join)
        });
        let parser = match compiling {
            Ok(Ok(Ok(parser))) => parser,
            Ok(Ok(Err(error))) => return Err(unusable(first_line(&error))),
            Ok(Err(_)) | Err(_) => return Err(unusable("it cannot be compiled".to_owned())),
        };
        // Copies share the lexer: one tells how large it has become, the other has it meet what the first masks need.
        let lexer = parser.clone();
        let matcher = Matcher::new(Ok(parser));
        try_out(matcher.clone(), &self.tokenizer).map_err(|error| unusable(first_line(&error)))?;
        let tables = lexer.parser.lexer_stats().num_bytes;
        Ok((matcher, tables))
    }
}

/// Leads a constraint through a few tokens. One that allows no text at all, or has too much open to go on with, shows now
/// and not in the middle of an answer.
fn try_out(mut matcher: Matcher, tokenizer: &Tokenizer) -> anyhow::Result<()> {
    for _ in 0..TRIAL_TOKENS {
        let mask = matcher.compute_mask_or_eos()?;
        let mut allowed = (0..tokenizer.vocab_size() as u32).filter(|id| mask.is_allowed(*id));
        let Some(id) = allowed.find(|id| tokenizer.token_kind(*id) == Some(TokenKind::Normal)) else { break };
        matcher.consume_token(id)?;
    }
    matcher.compute_mask_or_eos().map(|_| ())
}

fn with_settings(document: &Value) -> Value {
    let mut fields = document.as_object().cloned().unwrap_or_default();
    fields.insert("x-guidance".to_owned(), compiler_settings(false));
    Value::Object(fields)
}

/// The schema of an answer as a document for the compiler; all of it must be kept.
pub(super) fn answer_document(schema: &Value) -> Result<Value, TextError> {
    let unusable = |what: String| TextError::Grammar { kind: JSON_SCHEMA, what };
    if !matches!(schema, Value::Object(_) | Value::Bool(true)) {
        return Err(unusable(format!("expected an object, found {}", shown(&schema.to_string()))));
    }
    let depth = depth_of(schema);
    if depth > MAX_NESTING {
        return Err(unusable(format!("it is nested {depth} levels deep and may be {MAX_NESTING}")));
    }
    let len = schema.to_string().len();
    if len > MAX_GRAMMAR_BYTES {
        return Err(unusable(format!("it has {len} bytes and may have {MAX_GRAMMAR_BYTES}")));
    }
    let fault = |remark: Remark| TextError::Schema { tool: None, path: remark.path, what: remark.what };
    let resolver = Resolver::new(schema);
    let mut document = Cleaner::new(&resolver, false).all_of(&[schema], "").map_err(fault)?.schema;
    let width = widest(&document);
    if width > MAX_WIDTH {
        return Err(unusable(format!(
            "it leaves {width} alternatives open at one place (optional properties, branches) and may leave {MAX_WIDTH}"
        )));
    }
    // Explicitly no properties means none, as users of tools expect, and not any.
    if let Value::Object(fields) = &mut document {
        let none = fields.get("properties").and_then(Value::as_object).is_some_and(serde_json::Map::is_empty);
        if none && !fields.contains_key("patternProperties") {
            fields.entry("additionalProperties").or_insert(Value::Bool(false));
        }
    }
    Ok(document)
}
