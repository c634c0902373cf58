//! What constrained output costs with the real vocabulary:
//! `cargo run --release -p muser-text --example grammar_speed`
//!
//! Prints the time to build the engine (once per model), to compile constraints, and per token the time of a mask
//! and of taking the token.

#![allow(clippy::print_stdout, reason = "it is a report")]

#[path = "../tests/support/mod.rs"]
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
