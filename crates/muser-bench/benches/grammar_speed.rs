//! What constrained output costs with the real vocabulary:
//! `cargo bench -p muser-bench --bench grammar_speed`
//!
//! Prints the time to build the engine (once per model), to compile constraints, per token the time of a mask and of taking
//! the token, and the same of all sequences of a full step together.

#![allow(clippy::print_stdout, reason = "it is a report")]

#[path = "../../muser-text/tests/support/mod.rs"]
mod support;

use muser_text::grammar::{AnswerRule, Grammar, GrammarEngine, TokenConstraint, TurnConstraint, TurnRules};
use muser_text::{Specials, TextError, Tokenizer};
use serde_json::json;
use std::sync::Arc;
use std::time::{Duration, Instant};

fn main() -> Result<(), TextError> {
    let Some(vocabulary) = support::real_vocabulary() else { return Ok(()) };
    let tokenizer = Arc::new(Tokenizer::from_source(&vocabulary.source())?);
    let start = Instant::now();
    let engine = Arc::new(GrammarEngine::new(tokenizer.clone())?);
    println!("engine: {:.0?}", start.elapsed());

    let long = json!({"type": "object", "properties": {"text": {"type": "string", "maxLength": 100_000}},
                      "required": ["text"], "additionalProperties": false});
    let text = format!("{{\"text\": \"{}\"}}", "The harbour was quiet, and the boats came home. ".repeat(24));
    report("a string of up to 100,000 characters", &engine, &tokenizer, &Grammar::JsonSchema(long), &text)?;
    let rows = json!({"type": "array", "items": {"type": "object", "properties": {
        "id": {"type": "integer"}, "name": {"type": "string"}, "kind": {"enum": ["a", "b"]}},
        "required": ["id", "name", "kind"], "additionalProperties": false}});
    let text = format!("[{}]", vec![r#"{"id": 12, "name": "Zoë", "kind": "b"}"#; 20].join(", "));
    report("an array of objects", &engine, &tokenizer, &Grammar::JsonSchema(rows), &text)?;
    report(
        "any JSON object",
        &engine,
        &tokenizer,
        &Grammar::JsonObject,
        r#"{"a": [1, 2, {"b": "c", "d": null}]}"#,
    )?;

    a_full_step(&engine, &tokenizer)?;

    let start = Instant::now();
    let rules = TurnRules { answer: AnswerRule::Grammar(Grammar::JsonObject), ..TurnRules::default() };
    let mut turn = TurnConstraint::new(engine, &rules)?;
    println!("a turn with a constrained answer: compiled in {:.1?}", start.elapsed());
    let mut times = Vec::new();
    for id in tokenizer.encode(" to=self<|message|>Let me think about the question.", Specials::Parse) {
        let start = Instant::now();
        turn.mask()?;
        times.push(start.elapsed());
        turn.commit(id)?;
    }
    print_times("masks of header and reasoning", &mut times);
    Ok(())
}

/// Sequences of a step.
const SEQUENCES: usize = 16;

/// As many sequences as the engine takes, each inside a grammar and each somewhere else in its text: what all their masks of
/// one step cost on one thread. A server makes them on several, while the device computes, and waits at most 5 ms for them.
fn a_full_step(engine: &GrammarEngine, tokenizer: &Tokenizer) -> Result<(), TextError> {
    let record = json!({"type": "object", "required": ["name", "age", "tags", "home"], "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 80}, "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        "home": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}]}}});
    let one = r#"{"name": "Zoë of the northern harbour", "age": 41, "tags": ["red", "blue"], "home": {"city": "Bergen"}}"#;
    let grammars = [
        (
            Grammar::JsonSchema(json!({"type": "array", "items": record})),
            format!("[{}]", [one; 12].join(", ")),
        ),
        (Grammar::JsonObject, format!("{{\"list\": [{}]}}", [one; 12].join(", "))),
        (Grammar::Regex(r"([a-z]+ [0-9]{1,4}[,;] )*".into()), "boats 12, gulls 300; ".repeat(40)),
        (
            Grammar::Gbnf("root ::= line*\nline ::= [A-Za-z ,]+ \".\" \" \"?".into()),
            "The boats came home, late. ".repeat(60),
        ),
    ];
    let mut turns = Vec::new();
    for number in 0..SEQUENCES {
        let (grammar, text) = &grammars[number % grammars.len()];
        let mut ids = tokenizer.encode(text, Specials::Plain).into_iter();
        let mut constraint = engine.constraint(grammar)?;
        for id in ids.by_ref().take(7 * (number / grammars.len())) {
            constraint.mask()?;
            constraint.commit(id)?;
        }
        turns.push((constraint, ids));
    }
    let mut times = Vec::new();
    'steps: loop {
        let start = Instant::now();
        for (constraint, ids) in &mut turns {
            let Some(id) = ids.next() else { break 'steps };
            constraint.mask()?;
            constraint.commit(id)?;
        }
        times.push(start.elapsed());
    }
    print_times(&format!("steps of {SEQUENCES} sequences, one thread"), &mut times);
    Ok(())
}

fn report(
    name: &str,
    engine: &GrammarEngine,
    tokenizer: &Tokenizer,
    grammar: &Grammar,
    text: &str,
) -> Result<(), TextError> {
    let start = Instant::now();
    let mut constraint: TokenConstraint = engine.constraint(grammar)?;
    println!("{name}: compiled in {:.1?}", start.elapsed());
    let mut times = Vec::new();
    for id in tokenizer.encode(text, Specials::Plain) {
        let start = Instant::now();
        let mask = constraint.mask()?;
        let mut took = start.elapsed();
        let word = mask.get(id as usize / 32).copied().unwrap_or(0);
        if word >> (id % 32) & 1 == 0 {
            println!("  token {id} is not allowed");
            break;
        }
        let start = Instant::now();
        constraint.commit(id)?;
        took += start.elapsed();
        times.push(took);
    }
    print_times(name, &mut times);
    Ok(())
}

fn print_times(name: &str, times: &mut [Duration]) {
    times.sort();
    println!(
        "{name}: {} tokens, median {:.1?}, 95% {:.1?}, worst {:.1?}",
        times.len(),
        times[times.len() / 2],
        times[times.len() * 95 / 100],
        times[times.len() - 1]
    );
}
