use super::*;
use crate::test_support::tiny_tokenizer;
use crate::{Markers, OutputDecoder, OutputEvent, OutputOptions, normalise_tools};
use serde_json::json;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

fn engine() -> Arc<GrammarEngine> {
    static ENGINE: LazyLock<Arc<GrammarEngine>> =
        LazyLock::new(|| Arc::new(GrammarEngine::new(tiny_tokenizer().clone()).expect("builds")));
    ENGINE.clone()
}

fn allows(mask: &[u32], id: u32) -> bool {
    mask[id as usize / 32] >> (id % 32) & 1 == 1
}

/// How far `text` follows the grammar: `Ok(may it end there?)`, or the byte where it does not.
fn follow(grammar: &Grammar, text: &str) -> Result<bool, usize> {
    let tokenizer = tiny_tokenizer();
    let mut constraint = engine().constraint(grammar).expect("a usable grammar");
    let mut at = 0;
    for id in tokenizer.encode(text, Specials::Plain) {
        if !allows(&constraint.mask().expect("a mask"), id) {
            return Err(at);
        }
        constraint.commit(id).expect("allowed");
        at += tokenizer.token_bytes(id).unwrap_or_default().len();
    }
    let end = tokenizer.special_id("<|eot|>").expect("a marker");
    let can_end = constraint.can_end();
    assert_eq!(allows(&constraint.mask().expect("a mask"), end), can_end, "the mask says so too");
    Ok(can_end)
}

fn accepts(grammar: &Grammar, text: &str) {
    assert_eq!(follow(grammar, text), Ok(true), "{text:?}");
}

fn rejects(grammar: &Grammar, text: &str) {
    assert_ne!(follow(grammar, text), Ok(true), "{text:?}");
}

#[test]
fn json_schemas() {
    let person = Grammar::JsonSchema(json!({
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": false,
    }));
    accepts(&person, r#"{"name": "Ann", "age": 5}"#);
    accepts(&person, r#"{"name":"A🙂","age":5}"#);
    rejects(&person, r#"{"name": "Ann"}"#);
    rejects(&person, r#"{"name": 5"#);
    rejects(&person, "Sure: {");
    assert_eq!(follow(&person, r#"{"name": "An"#), Ok(false));

    let one_of = Grammar::JsonSchema(json!({"oneOf": [{"type": "integer"}, {"type": "null"}]}));
    accepts(&one_of, "12");
    accepts(&one_of, "null");
    let referring = Grammar::JsonSchema(json!({"$defs": {"node": {"type": "object", "properties": {
        "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}, "required": ["next"],
        "additionalProperties": false}}, "$ref": "#/$defs/node"}));
    accepts(&referring, r#"{"next": {"next": null}}"#);
}

#[test]
fn json_objects() {
    accepts(&Grammar::JsonObject, r#"{"a": [1, {"b": null}]}"#);
    rejects(&Grammar::JsonObject, "[1]");
    let empty = Grammar::JsonSchema(json!({"type": "object", "properties": {}}));
    accepts(&empty, "{}");
    rejects(&empty, r#"{"a": 1}"#);
}

#[test]
fn other_notations() {
    let lark = Grammar::Lark("start: \"yes\" | \"no\" NUMBER\nNUMBER: /[0-9]+/".into());
    accepts(&lark, "yes");
    accepts(&lark, "no12");
    rejects(&lark, "maybe");
    let regex = Grammar::Regex("[a-c]{2,3}".into());
    accepts(&regex, "abc");
    rejects(&regex, "a");
    rejects(&regex, "abcd");
    let gbnf = Grammar::Gbnf(
        "# moves\nroot ::= (\"1. \" move \" \" move \"\\n\")+ | last-word\nmove ::= [a-h] [1-8] [+#]?\n\
         last-word ::= \"end\" [^a-z\\n]{2,3} .\n  | \"\\x41\\u00e9\""
            .into(),
    );
    accepts(&gbnf, "1. e4 e5\n");
    accepts(&gbnf, "1. e4+ e5#\n1. a1 h8\n");
    accepts(&gbnf, "end12z");
    accepts(&gbnf, "Aé");
    rejects(&gbnf, "1. e9");
    rejects(&gbnf, "endab");
}

#[test]
fn unusable_grammars_are_the_callers_fault() {
    let deep = |bracket: &str| bracket.repeat(50_000);
    let mut nested = json!({"type": "integer"});
    for _ in 0..200 {
        nested = json!({"type": "array", "items": nested});
    }
    let bad = [
        Grammar::JsonSchema(json!({"type": "string", "pattern": "(?<=x)*"})),
        Grammar::JsonSchema(json!({"type": "string", "pattern": deep("(")})),
        Grammar::JsonSchema(json!({"properties": {"a": {"pattern": deep("(")}}})),
        Grammar::JsonSchema(nested),
        Grammar::JsonSchema(json!({"type": "nonsense"})),
        Grammar::JsonSchema(json!(["no", "schema"])),
        Grammar::JsonSchema(json!({"$ref": "#/nowhere"})),
        Grammar::JsonSchema(json!({"description": "x".repeat(2 << 20)})),
        Grammar::Lark(String::new()),
        Grammar::Lark("start: nothing".into()),
        Grammar::Lark("start: \"a".into()),
        Grammar::Lark(format!("start: {}", deep("("))),
        Grammar::Regex("[a".into()),
        Grammar::Regex("(?<=x)*".into()),
        Grammar::Regex(deep("(")),
        Grammar::Regex("((a{1000}){1000}){1000}".into()),
        Grammar::JsonSchema(json!({"items": {"type": "string", "pattern": "^(x{0,900}){900}$"}})),
        Grammar::Regex(deep("[")),
        Grammar::Gbnf(String::new()),
        Grammar::Gbnf("root ::= other".into()),
        Grammar::Gbnf("other ::= \"a\"".into()),
        Grammar::Gbnf("root ::= \"a\nb".into()),
        Grammar::Gbnf("root ::= [a".into()),
        Grammar::Gbnf("root ::= (\"a\"".into()),
        Grammar::Gbnf("root ::= \"a\"{1,2,3}".into()),
        Grammar::Gbnf("root ::= \"a\" )".into()),
        Grammar::Gbnf("root ::= \"a\"\nroot ::= \"b\"".into()),
        Grammar::Gbnf(format!("root ::= {}", deep("("))),
    ];
    for grammar in bad {
        let start = Instant::now();
        let error = engine()
            .constraint(&grammar)
            .expect_err(&format!("{grammar:?}").chars().take(80).collect::<String>());
        assert!(error.is_request_fault(), "{error}");
        assert!(error.to_string().len() < 500, "{error}");
        assert!(start.elapsed() < Duration::from_secs(5));
    }
    let error = engine().constraint(&Grammar::Gbnf("root ::= a\n\na ::= ?".into())).expect_err("bad");
    assert!(error.to_string().contains("line 3"), "{error}");
}

#[test]
fn hostile_grammars_end_soon() {
    let mut nested = json!({"type": "integer"});
    for _ in 0..48 {
        nested = json!({"type": "array", "items": nested});
    }
    let many: serde_json::Map<String, Value> = (0..2000)
        .map(|key| (format!("k{key}"), json!({"type": "string", "pattern": "^[a-z]+[0-9]{3,9}$"})))
        .collect();
    let hostile = [
        Grammar::JsonSchema(nested),
        Grammar::JsonSchema(json!({"type": "object", "properties": many})),
        Grammar::JsonSchema(
            json!({"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000_000}),
        ),
        Grammar::JsonSchema(json!({"type": "string", "minLength": 4_000_000_000_u64})),
        Grammar::JsonSchema(json!({"type": "string", "pattern": "((a{1000}){1000}){1000}"})),
        Grammar::Regex("(a{400}){400}".into()),
        Grammar::JsonSchema(json!({"type": "string", "maxLength": 100_000, "pattern": "^[a-z]{1,30000}$"})),
        Grammar::Regex("(a|b|ab)*(c|d|cd)*.*.*.*.*.*x".into()),
        Grammar::Lark("start: ((\"a\"{1000}){1000}){1000}".into()),
        Grammar::Gbnf("root ::= ((\"a\"{65535}){65535}){65535}".into()),
        Grammar::Lark("start: start start | \"a\"".into()),
        Grammar::Gbnf("root ::= root".into()),
    ];
    for grammar in hostile {
        let name = format!("{grammar:?}").chars().take(80).collect::<String>();
        let start = Instant::now();
        if let Ok(mut constraint) = engine().constraint(&grammar) {
            let _ = constraint.mask();
        }
        println!("{name}: {:?}", start.elapsed());
        assert!(start.elapsed() < Duration::from_secs(20), "{name}: {:?}", start.elapsed());
    }
}

/// Follows `text` and checks at each token that the constraint says what the schema itself says. Where it stops.
fn follow_exactly(schema: &Value, text: &str) -> usize {
    let tokenizer = tiny_tokenizer();
    let grammar = Grammar::JsonSchema(schema.clone());
    let (kind, compiled) = compile(&grammar).expect("usable");
    let mut exact = engine().matcher(kind, compiled).expect("usable");
    let mut constraint = engine().constraint(&grammar).expect("usable");
    let mut at = 0;
    for id in tokenizer.encode(text, Specials::Plain) {
        let mask = constraint.mask().expect("a mask");
        assert_eq!(mask, exact.compute_mask_or_eos().expect("a mask").as_slice(), "at byte {at}");
        if !allows(&mask, id) {
            break;
        }
        constraint.commit(id).expect("allowed");
        exact.consume_token(id).expect("allowed");
        at += tokenizer.token_bytes(id).unwrap_or_default().len();
    }
    assert_eq!(constraint.can_end(), exact.is_stopped() || exact.is_accepting().expect("no fault"));
    at
}

/// J5, the right half: masks without far limits are those of the schema, also when a limit is reached.
#[test]
fn a_far_limit_is_kept_when_it_comes_near() {
    let schema = json!({"type": "object", "required": ["text", "list"], "additionalProperties": false, "properties": {
        "text": {"type": "string", "maxLength": 1100, "minLength": 3},
        "list": {"type": "array", "items": {"type": ["string", "null"], "maxLength": 1024}},
        "short": {"type": "string", "maxLength": 5}}});
    let whole = format!(
        "{{\"text\": \"{}\", \"list\": [\"{}\", null, \"\\\"é🙂\"], \"short\": \"abc\"}}",
        "word, ".repeat(183),
        "é".repeat(1023)
    );
    assert_eq!(follow_exactly(&schema, &whole), whole.len());
    for (string, chars) in
        [("word, ".repeat(300), 1100), (r#"\""#.repeat(1200), 1100), ("é".repeat(1300), 1100)]
    {
        let reached = follow_exactly(&schema, &format!("{{\"text\": \"{string}\", \"list\": []}}")) - 10;
        let escape_bytes = string.len() / string.replace('\\', "").chars().count();
        assert!(
            reached / escape_bytes <= chars && reached / escape_bytes + 8 > chars,
            "{reached} of {chars}"
        );
    }
}

/// J5 with a small vocabulary; with the real one it is a test of `real_vocabulary`.
#[test]
fn long_strings_cost_little() {
    let parameters = json!({"type": "object", "properties": {
        "texts": {"type": "array", "items": {"type": "string", "maxLength": 100_000}}}, "required": ["texts"]});
    let tool = json!({"name": "f", "parameters": parameters});
    let rules = TurnRules { tools: normalise_tools(&[tool]).expect("valid"), ..TurnRules::default() };
    let text = format!(
        " to=f<|message|><atem:function_calls>\n<atem:invoke name=\"f\">\n<atem:parameter name=\"texts\">[\"{}",
        "word and ".repeat(100)
    );
    let mut constraint = TurnConstraint::new(engine(), rules).expect("usable");
    let mut times = Vec::new();
    for id in tiny_tokenizer().encode(&text, Specials::Parse) {
        let start = Instant::now();
        let mask = constraint.mask().expect("a mask");
        times.push(start.elapsed());
        assert!(allows(&mask, id));
        constraint.commit(id).expect("allowed");
    }
    times.sort();
    // Typically a microsecond; the bound is for a busy machine.
    assert!(times[times.len() / 2] < Duration::from_micros(100), "{:?}", times[times.len() / 2]);
}

fn tools() -> Vec<Value> {
    normalise_tools(&[
        json!({"name": "get_weather", "parameters": {"type": "object", "required": ["city", "unit"], "properties": {
            "city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]},
            "places": {"type": "array", "items": {"type": "string"}}}}}),
        json!({"name": "get", "parameters": {"type": "object", "properties": {}}}),
    ])
    .expect("valid")
}

/// How far output with markers follows the rules: `Ok(has the turn ended?)`, or what was written until then.
fn follow_turn(rules: &TurnRules, output: &str) -> Result<bool, String> {
    let tokenizer = tiny_tokenizer();
    let mut constraint = TurnConstraint::new(engine(), rules.clone()).expect("usable rules");
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

const THOUGHT: &str = " to=self<|message|>Hm, {\"not\": json}.<|eom|><|start|>assistant";
const CALL: &str = concat!(
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
    let mut turn = TurnConstraint::new(Arc::clone(&engine), rules).expect("good");
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
    assert!(TurnConstraint::new(engine(), none).expect_err("nothing is left").is_request_fault());
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
    assert!(TurnConstraint::new(engine(), rules).is_ok());
}

#[test]
fn a_bad_tool_schema_names_the_tool() {
    let tool =
        json!({"name": "broken", "parameters": {"properties": {"x": {"type": "integer", "minimum": "a"}}}});
    let rules = TurnRules { tools: normalise_tools(&[tool]).expect("valid"), ..TurnRules::default() };
    let error = TurnConstraint::new(engine(), rules).expect_err("unusable");
    assert!(error.is_request_fault() && error.to_string().contains("broken"), "{error}");
}
