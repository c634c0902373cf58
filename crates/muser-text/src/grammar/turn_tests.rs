//! The order of channels, text and calls in a turn.

use super::tests::{allows, engine};
use super::*;
use crate::test_support::tiny_tokenizer;
use crate::{Markers, OutputDecoder, OutputEvent, OutputOptions, Specials, normalise_tools};
use serde_json::json;
use std::sync::Arc;

pub(super) fn tools() -> Vec<Value> {
    normalise_tools(&[
        json!({"name": "get_weather", "parameters": {"type": "object", "required": ["city", "unit"], "properties": {
            "city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]},
            "places": {"type": "array", "items": {"type": "string"}}}}}),
        json!({"name": "get", "parameters": {"type": "object", "properties": {}}}),
    ])
    .expect("valid")
}

/// How far output with markers follows the rules: `Ok(has the turn ended?)`, or what was written until then.
pub(super) fn follow_turn(rules: &TurnRules, output: &str) -> Result<bool, String> {
    let tokenizer = tiny_tokenizer();
    let mut constraint = TurnConstraint::new(engine(), rules).expect("usable rules");
    let ids = tokenizer.encode(output, Specials::Parse);
    for (index, &id) in ids.iter().enumerate() {
        let allowed = allows(&constraint.mask().expect("a mask"), id);
        let committed = constraint.commit(id);
        // Tokens of grammars are only checked by the mask; the structure by both.
        if !allowed {
            return Err(tokenizer.decode(&ids[..index], Markers::Show));
        }
        committed.expect("what the mask allows can be committed");
    }
    Ok(constraint.is_done())
}

pub(super) const THOUGHT: &str = " to=self<|message|>Hm, {\"not\": json}.<|eom|><|start|>assistant";
pub(super) const CALL: &str = concat!(
    " to=get_weather<|message|><atem:function_calls>\n<atem:invoke name=\"get_weather\">\n",
    "<atem:parameter name=\"city\">Paris <b></atem:parameter>\n<atem:parameter name=\"days\">2</atem:parameter>\n",
    "<atem:parameter name=\"unit\">C</atem:parameter>\n<atem:parameter name=\"places\">[\"a\", \"b\"]</atem:parameter>\n",
    "</atem:invoke>\n</atem:function_calls>"
);

#[test]
fn the_answer_follows_the_schema_and_reasoning_is_free() {
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]});
    let rules =
        TurnRules { answer: AnswerRule::Grammar(Grammar::JsonSchema(schema)), ..TurnRules::default() };
    assert_eq!(follow_turn(&rules, &format!("{THOUGHT} to=user<|message|>{{\"a\": 1}}<|eot|>")), Ok(true));
    assert_eq!(follow_turn(&rules, " to=user<|message|>{\"a\": 1}<|eot|>"), Ok(true));
    let wrong = format!("{THOUGHT} to=user<|message|>Sure");
    assert_eq!(follow_turn(&rules, &wrong), Err(format!("{THOUGHT} to=user<|message|>")));
    // Neither reasoning nor an unfinished answer may end the turn, and there is nobody else to write to.
    assert_eq!(follow_turn(&rules, " to=self<|message|>x<|eot|>"), Err(" to=self<|message|>x".into()));
    assert_eq!(
        follow_turn(&rules, " to=user<|message|>{\"a\"<|eot|>"),
        Err(" to=user<|message|>{\"a\"".into())
    );
    assert!(follow_turn(&rules, " to=get<|message|>").is_err());
    assert!(follow_turn(&rules, "Hello").is_err());
    let direct = TurnRules { start: TurnStart::Answer, ..rules };
    assert_eq!(follow_turn(&direct, "{\"a\": 1}<|eot|>"), Ok(true));
    assert!(follow_turn(&direct, " to=user<|message|>").is_err());
}

#[test]
fn a_fork_goes_its_own_way() {
    let engine = engine();
    let rules = TurnRules {
        start: TurnStart::Answer,
        answer: AnswerRule::Grammar(Grammar::Regex("ab*c|xyz".into())),
        ..TurnRules::default()
    };
    let id = |text: &str| engine.tokenizer.vocabulary().find(text.as_bytes()).expect("one byte");
    let mut turn = TurnConstraint::new(Arc::clone(&engine), &rules).expect("good");
    let mut fork = turn.fork();
    assert_eq!(fork.mask().expect("a mask"), turn.mask().expect("a mask"));
    for byte in ["x", "y", "z"] {
        assert!(allows(&fork.mask().expect("a mask"), id(byte)));
        fork.commit(id(byte)).expect("allowed");
    }
    // The first one is where it was, and so is a fork of it after that.
    assert!(allows(&turn.mask().expect("a mask"), id("a")));
    turn.commit(id("a")).expect("allowed");
    let mut fork = turn.fork();
    assert!(
        allows(&fork.mask().expect("a mask"), id("b")) && !allows(&fork.mask().expect("a mask"), id("y"))
    );
    fork.commit(id("c")).expect("allowed");
    assert!(!allows(&fork.mask().expect("a mask"), id("b")));
    assert!(allows(&turn.mask().expect("a mask"), id("b")));
}

#[test]
fn calls_follow_their_schemas() {
    let rules = TurnRules { tools: tools(), ..TurnRules::default() };
    assert_eq!(follow_turn(&rules, &format!("{CALL}<|eot|>")), Ok(true));
    assert_eq!(follow_turn(&rules, &format!("{THOUGHT}{CALL}<|eot|>")), Ok(true));
    let less = CALL.replace("<atem:parameter name=\"days\">2</atem:parameter>\n", "");
    assert_eq!(follow_turn(&rules, &format!("{less}<|eot|>")), Ok(true));
    let empty = " to=get<|message|><atem:function_calls>\n<atem:invoke name=\"get\">\n</atem:invoke>\n</atem:function_calls>";
    assert_eq!(follow_turn(&rules, &format!("{empty}<|eot|>")), Ok(true));
    for wrong in [
        CALL.replace(">2<", ">two<"),
        CALL.replace(">C<", ">K<"),
        CALL.replace("name=\"city\"", "name=\"town\""),
        CALL.replace("name=\"get_weather\"", "name=\"get\""),
        CALL.replace("<atem:parameter name=\"unit\">C</atem:parameter>\n", ""),
        empty.replace("</atem:invoke>", "<atem:parameter name=\"x\">1</atem:parameter></atem:invoke>"),
        CALL.replace("</atem:function_calls>", ""),
    ] {
        assert!(follow_turn(&rules, &format!("{wrong}<|eot|>")).is_err(), "{wrong}");
    }
    // A free answer is free.
    assert_eq!(follow_turn(&rules, " to=user<|message|>Hi<|eot|>"), Ok(true));
}

#[test]
fn what_the_grammar_allows_is_parsed_as_the_call() {
    let tokenizer = tiny_tokenizer();
    let options = OutputOptions { tools: tools(), ..OutputOptions::default() };
    let mut decoder = OutputDecoder::new(tokenizer.clone(), &options).expect("valid");
    let mut events = Vec::new();
    for id in tokenizer.encode(CALL, Specials::Parse) {
        events.extend(decoder.push(id));
    }
    let arguments = events.into_iter().find_map(|event| match event {
        OutputEvent::ToolCallEnd { arguments, .. } => Some(arguments),
        _ => None,
    });
    let expected = r#"{"city":"Paris <b>","days":2,"unit":"C","places":["a", "b"]}"#;
    assert_eq!(arguments.as_deref(), Some(expected));
}

#[test]
fn choices_of_tools_are_enforced() {
    let required = TurnRules {
        tools: tools(),
        answer: AnswerRule::Forbidden,
        parallel_calls: true,
        ..TurnRules::default()
    };
    assert!(follow_turn(&required, " to=user<|message|>").is_err());
    assert_eq!(follow_turn(&required, &format!("{CALL}<|eom|><|start|>assistant{CALL}<|eot|>")), Ok(true));
    assert!(follow_turn(&required, &format!("{CALL}<|eom|><|start|>assistant to=user<|message|>")).is_err());
    let single = TurnRules { parallel_calls: false, ..required.clone() };
    assert_eq!(follow_turn(&single, &format!("{CALL}<|eom|>")), Err(CALL.into()));
    let named = TurnRules { tools: tools()[1..].to_vec(), ..required };
    assert!(follow_turn(&named, CALL).is_err());
    let none = TurnRules { answer: AnswerRule::Forbidden, ..TurnRules::default() };
    assert!(TurnConstraint::new(engine(), &none).expect_err("nothing is left").is_request_fault());
}

#[test]
fn many_large_tools_are_accepted() {
    let many: Vec<Value> = (0..60)
        .map(|index| {
            let properties: serde_json::Map<String, Value> = (0..20)
                .map(|key| (format!("key_{key}"), json!({"type": "integer", "description": "x".repeat(100)})))
                .collect();
            json!({"name": format!("tool_{index}"), "parameters": {"type": "object", "properties": properties}})
        })
        .collect();
    let rules = TurnRules { tools: normalise_tools(&many).expect("valid"), ..TurnRules::default() };
    assert!(serde_json::to_string(&rules.tools).expect("JSON").len() > 100_000);
    assert!(TurnConstraint::new(engine(), &rules).is_ok());
}

#[test]
fn a_bad_tool_schema_names_the_tool() {
    let tool =
        json!({"name": "broken", "parameters": {"properties": {"x": {"type": "integer", "minimum": "a"}}}});
    let rules = TurnRules { tools: normalise_tools(&[tool]).expect("valid"), ..TurnRules::default() };
    let strict = TurnRules { strict_tools: vec!["broken".into()], ..rules.clone() };
    let error = TurnConstraint::new(engine(), &strict).expect_err("unusable");
    assert!(error.is_request_fault());
    assert_eq!(
        error.to_string(),
        "the schema of the tool \"broken\" is not usable at properties.x.minimum: expected a number"
    );
    // Not strictly, the rest of it is kept.
    let plan = TurnPlan::new(engine(), &rules).expect("lenient");
    assert_eq!(plan.left_out().len(), 1);
}

#[test]
fn text_may_come_before_between_and_after_calls() {
    let rules = TurnRules { tools: tools(), parallel_calls: true, ..TurnRules::default() };
    let text = " to=user<|message|>I'll look.<|eom|><|start|>assistant";
    let more = "<|eom|><|start|>assistant to=user<|message|>And again.<|eom|><|start|>assistant";
    for output in [
        format!("{text}{CALL}<|eot|>"),
        format!("{text}{CALL}{more}{CALL}<|eot|>"),
        format!("{CALL}<|eom|><|start|>assistant to=user<|message|>Done.<|eot|>"),
        format!("{text}{THOUGHT}{CALL}<|eot|>"),
        " to=user<|message|>a<|eom|><|start|>assistant to=user<|message|>b<|eot|>".to_owned(),
    ] {
        assert_eq!(follow_turn(&rules, &output), Ok(true), "{output}");
    }
    // One call only: nothing follows it.
    let single = TurnRules { parallel_calls: false, ..rules.clone() };
    assert_eq!(follow_turn(&single, &format!("{text}{CALL}<|eot|>")), Ok(true));
    assert_eq!(follow_turn(&single, &format!("{text}{CALL}<|eom|>")), Err(format!("{text}{CALL}")));
    // An answer with a form is one answer, and comes before calls or not at all.
    let form = TurnRules { answer: AnswerRule::Grammar(Grammar::Regex("[a-z]+".into())), ..rules };
    let word = " to=user<|message|>word<|eom|><|start|>assistant";
    assert_eq!(follow_turn(&form, &format!("{word}{CALL}<|eot|>")), Ok(true));
    assert!(follow_turn(&form, &format!("{word} to=user<|message|>")).is_err());
    assert!(follow_turn(&form, &format!("{CALL}<|eom|><|start|>assistant to=user<|message|>")).is_err());
    // Without tools an answer that would go on is over.
    let alone = TurnRules::default();
    assert_eq!(follow_turn(&alone, " to=user<|message|>a<|eom|><|eot|>"), Ok(true));
    assert!(follow_turn(&alone, " to=user<|message|>a<|eom|><|start|>").is_err());
}

#[test]
fn no_reasoning_means_none() {
    let rules =
        TurnRules { tools: tools(), no_reasoning: true, parallel_calls: true, ..TurnRules::default() };
    assert_eq!(follow_turn(&rules, &format!("{CALL}<|eot|>")), Ok(true));
    assert_eq!(follow_turn(&rules, " to=user<|message|>Hi<|eot|>"), Ok(true));
    assert_eq!(follow_turn(&rules, " to=self"), Err(" to=".into()));
    let again = format!("{CALL}<|eom|><|start|>assistant to=self");
    assert!(follow_turn(&rules, &again).is_err());
    let required = TurnRules { answer: AnswerRule::Forbidden, ..rules };
    assert_eq!(follow_turn(&required, &format!("{CALL}<|eot|>")), Ok(true));
    assert!(follow_turn(&required, " to=self").is_err() && follow_turn(&required, " to=user").is_err());
}

/// Tokens until the model may no longer reason, if it reasons as long as it may and asks for more.
fn reasoning_tokens(rules: &TurnRules) -> usize {
    let tokenizer = tiny_tokenizer();
    let mut turn = TurnConstraint::new(engine(), rules).expect("usable");
    let channels = tokenizer.channels().expect("a chat vocabulary");
    let mut used = 0;
    for id in tokenizer.encode(" to=self<|message|>", Specials::Parse) {
        if !allows(&turn.mask().expect("a mask"), id) {
            return 0;
        }
        turn.commit(id).expect("allowed");
        used += 1;
    }
    let word = tokenizer.encode("a", Specials::Plain)[0];
    while allows(&turn.mask().expect("a mask"), word) {
        turn.commit(word).expect("allowed");
        used += 1;
        if used > 3000 {
            return used;
        }
    }
    let mask = turn.mask().expect("a mask");
    assert!(allows(&mask, channels.end_of_message) && !allows(&mask, channels.end_of_turn));
    turn.commit(channels.end_of_message).expect("allowed");
    turn.commit(channels.start).expect("allowed");
    let again = tokenizer.encode("assistant to=self", Specials::Plain);
    let refused =
        again.iter().any(|id| !allows(&turn.mask().expect("a mask"), *id) || turn.commit(*id).is_err());
    assert!(refused, "reasoning does not begin again");
    used
}

#[test]
fn a_turn_that_must_call_leaves_room_for_the_call() {
    let rules = |max_tokens: Option<usize>| TurnRules {
        tools: tools(),
        answer: AnswerRule::Forbidden,
        max_tokens,
        ..TurnRules::default()
    };
    let shortest = CALL
        .replace("<atem:parameter name=\"days\">2</atem:parameter>\n", "")
        .replace("<atem:parameter name=\"places\">[\"a\", \"b\"]</atem:parameter>\n", "");
    let least = tiny_tokenizer().encode(&format!("{shortest}<|eot|>"), Specials::Parse).len();
    for limit in [1, 20, 60, 100, 300, 2000] {
        let used = reasoning_tokens(&rules(Some(limit)));
        assert!(used == 0 || limit - used >= least, "{limit} {used} {least}");
        assert!(used <= limit / 2 && (used > 0 || limit <= 4 * least), "{limit} {used} {least}");
    }
    assert!(reasoning_tokens(&rules(None)) > 3000);
    // A turn that may answer reasons as long as it likes.
    let free = TurnRules { answer: AnswerRule::Free, ..rules(Some(100)) };
    assert!(reasoning_tokens(&free) > 3000);
}

#[test]
fn tools_are_compiled_once_for_all_who_send_them() {
    let engine = Arc::new(GrammarEngine::new(tiny_tokenizer().clone()).expect("builds"));
    let rules = TurnRules {
        tools: tools(),
        answer: AnswerRule::Grammar(Grammar::Choice(vec!["a".into(), "b".into()])),
        ..TurnRules::default()
    };
    let first = TurnPlan::new(Arc::clone(&engine), &rules).expect("usable");
    let compiled = engine.cache.len();
    assert_eq!(compiled, 3);
    let second = TurnPlan::new(Arc::clone(&engine), &rules).expect("usable");
    assert_eq!(engine.cache.len(), compiled);
    let same = |index: usize| Arc::ptr_eq(&first.tools[index].call, &second.tools[index].call);
    assert!(same(0) && same(1));
    // What one turn does is no other's business.
    let (first, second) = (Arc::new(first), Arc::new(second));
    let (mut one, mut other) = (first.begin(), second.begin());
    for id in tiny_tokenizer().encode(" to=get<|message|><atem:function_calls>", Specials::Parse) {
        one.commit(id).expect("allowed");
    }
    assert_eq!(other.mask().expect("a mask"), first.begin().mask().expect("a mask"));
}

/// Nobody waits for the plan any more while its many tools are compiled: it ends with the step that runs, keeps what was
/// finished, and the next one who asks has all of it.
#[test]
fn compiling_ends_soon_after_nobody_waits() {
    use std::cell::Cell;
    let engine = Arc::new(GrammarEngine::new(tiny_tokenizer().clone()).expect("builds"));
    let tool = |index: usize| {
        let schema =
            json!({"type": "object", "properties": {"p": {"type": "string", "maxLength": 900 + index}}});
        json!({"name": format!("f{index}"), "parameters": schema})
    };
    let tools: Vec<Value> = (0..60).map(tool).collect();
    let rules = TurnRules { tools: normalise_tools(&tools).expect("valid"), ..TurnRules::default() };
    let asked = Cell::new(0);
    let wanted = || {
        asked.set(asked.get() + 1);
        asked.get() < 20
    };
    let outcome = TurnPlan::new_while(Arc::clone(&engine), &rules, &wanted);
    assert_eq!(outcome.err(), Some(TextError::Abandoned));
    assert!(asked.get() < 24, "{}", asked.get());
    let kept = engine.cache.len();
    assert!((4..20).contains(&kept), "{kept}");
    TurnPlan::new(Arc::clone(&engine), &rules).expect("usable");
    assert_eq!(engine.cache.len(), 60);
}

/// Grammars of a few kilobytes whose tables have megabytes: what is kept is bounded by the tables, not by the texts.
#[test]
fn tables_count_in_the_memory_for_grammars() {
    let engine = Arc::new(GrammarEngine::new(tiny_tokenizer().clone()).expect("builds"));
    let grammar = |number: usize| {
        let names: Vec<String> = (0..200).map(|rule| format!("T{rule}")).collect();
        let letter = |rule: usize| char::from(b'a' + (rule % 26) as u8);
        let rules: Vec<String> = (0..200)
            .map(|rule| format!("T{rule}: /[a-z]*{}[0-9a-z]{{1,{}}}/", letter(rule), 5 + rule + number))
            .collect();
        Grammar::Lark(format!("start: ({})+\n{}", names.join(" | "), rules.join("\n")))
    };
    let one = {
        engine.constraint(&grammar(0)).expect("usable");
        engine.cache.bytes()
    };
    // Measured with a counting allocator: 11 MiB.
    assert!((4 << 20..24 << 20).contains(&one), "{one}");
    for number in 1..40 {
        engine.constraint(&grammar(number)).expect("usable");
        assert!(engine.cache.bytes() <= 128 << 20, "{number}: {}", engine.cache.bytes());
    }
    assert!(engine.cache.len() < 40);
}
