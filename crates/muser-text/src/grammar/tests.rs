use super::*;
use crate::test_support::tiny_tokenizer;
use crate::{Specials, normalise_tools};
use serde_json::json;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

pub(super) fn engine() -> Arc<GrammarEngine> {
    static ENGINE: LazyLock<Arc<GrammarEngine>> =
        LazyLock::new(|| Arc::new(GrammarEngine::new(tiny_tokenizer().clone()).expect("builds")));
    ENGINE.clone()
}

pub(super) fn allows(mask: &[u32], id: u32) -> bool {
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

/// Grammars from strangers, as large as they may be: translated in one pass, refused at the door or quick at each token.
#[test]
fn large_grammars_are_refused_or_quick() {
    let object = |keys: usize| {
        let properties: serde_json::Map<String, Value> =
            (0..keys).map(|key| (format!("key_{key}"), json!({"type": "integer"}))).collect();
        json!({"type": "object", "properties": properties, "additionalProperties": false})
    };
    let branches = |count: usize| {
        let branch = |index: usize| {
            json!({"type": "object", "properties": {(format!("k{index}")): {"const": index}},
            "required": [format!("k{index}")], "additionalProperties": false})
        };
        json!({"anyOf": (0..count).map(branch).collect::<Vec<_>>()})
    };
    let words = |count: usize| (0..count).map(|index| format!("word number {index}")).collect::<Vec<_>>();
    let chain = |rules: usize| {
        let lines: Vec<String> = (0..rules).map(|rule| format!("r{rule} ::= \"a\" r{}", rule + 1)).collect();
        format!("root ::= r0\n{}\nr{rules} ::= \"b\"", lines.join("\n"))
    };
    let cases = [
        ("an object of 255 optional properties", Grammar::JsonSchema(object(255)), true, "{\"key_200\": 5}"),
        ("an object of 2,000 optional properties", Grammar::JsonSchema(object(2000)), false, ""),
        ("128 branches", Grammar::JsonSchema(branches(100)), true, "{\"k7\": 7}"),
        ("3,000 branches", Grammar::JsonSchema(branches(3000)), false, ""),
        ("an enum of 5,000", Grammar::JsonSchema(json!({"enum": words(5000)})), true, "\"word number 4321\""),
        ("5,000 choices", Grammar::Choice(words(5000)), true, "word number 4321"),
        (
            "500,000 references",
            Grammar::Gbnf(format!("root ::= {}\nr ::= \"a\"", "r ".repeat(500_000))),
            false,
            "",
        ),
        ("60,000 rules", Grammar::Gbnf(chain(60_000)), false, ""),
        ("9,900 rules", Grammar::Gbnf(chain(9_900)), true, "aaa"),
        (
            "9,900 rules of Lark",
            Grammar::Lark(chain(9_900).replace(" ::=", ":").replace("root:", "start:")),
            true,
            "aaa",
        ),
    ];
    for (name, grammar, usable, text) in cases {
        let start = Instant::now();
        let made = engine().constraint(&grammar);
        println!("{name}: compiled in {:?}", start.elapsed());
        // Far less than what a stranger could cost with a quadratic pass; the bound is for a busy machine.
        assert!(start.elapsed() < Duration::from_secs(20), "{name}: {:?}", start.elapsed());
        let Ok(mut constraint) = made else {
            assert!(!usable, "{name}");
            continue;
        };
        assert!(usable, "{name}");
        let mut longest = Duration::ZERO;
        for id in tiny_tokenizer().encode(text, Specials::Plain) {
            let start = Instant::now();
            let mask = constraint.mask().expect("a mask");
            longest = longest.max(start.elapsed());
            assert!(allows(&mask, id), "{name}");
            constraint.commit(id).expect("allowed");
        }
        println!("{name}: longest mask {longest:?}");
        assert!(longest < Duration::from_secs(1), "{name}: {longest:?}");
    }
}

/// Follows `text` and checks at each token that the constraint says what the schema itself says. Where it stops.
fn follow_exactly(schema: &Value, text: &str) -> usize {
    let tokenizer = tiny_tokenizer();
    let grammar = Grammar::JsonSchema(schema.clone());
    let mut document = compile::answer_document(schema).expect("usable");
    document["x-guidance"] = compiler_settings(false);
    let compiled = llguidance::api::TopLevelGrammar::from_json_schema(document);
    let (mut exact, _) = engine().matcher(compile::JSON_SCHEMA, compiled, &|| true).expect("usable");
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

/// The limit that decides is the only one, and each byte is a character: near it, where long tokens go beyond it and short
/// ones do not, masks are still those of the schema.
#[test]
fn a_far_limit_keeps_away_as_far_as_the_longest_token() {
    let schema = json!({"type": "string", "maxLength": 1024});
    for text in ["word and ".repeat(200), "the ".repeat(400), "a".repeat(1200)] {
        let reached = follow_exactly(&schema, &format!("\"{text}\""));
        assert!((1010..=1025).contains(&reached), "{reached}");
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
    let mut constraint = TurnConstraint::new(engine(), &rules).expect("usable");
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
