//! What an answer must follow: grammars, expressions and schemas of strangers.

use std::sync::{Arc, LazyLock};

use muser_text::grammar::{Grammar, GrammarEngine};
use muser_text::{Markers, TokenKind};
use serde_json::{Map, Value, json};

use crate::words::TINY;
use crate::{Input, Target, check_message};

static ENGINE: LazyLock<GrammarEngine> =
    LazyLock::new(|| GrammarEngine::new(Arc::clone(&TINY)).expect("a trie of the bundled vocabulary"));

/// Tokens that a text may have before it is given up.
const MOST_TOKENS: usize = 48;

/// A grammar in GBNF, in Lark's notation, a regular expression, a list of texts.
pub const GRAMMAR: Target = Target {
    name: "grammar",
    about: "GBNF, Lark, expressions, choices: refused with a reason, or a text can be written that another matcher accepts",
    run: grammar,
    seeds: grammar_seeds,
    words: &[
        "root ::=", "start:", "::=", "[a-z]", "[^\\\"]", "{2,5}", "{1,", "\\\"", "|", "(", ")", "*", "+",
        "?", "%ignore", "%regex", "%json", "TERM:", "/x/", "\\n", "\\\\d", "(?i)", "#", ".", "{99999}",
    ],
    max_len: 256,
    memory: (64 << 20, 65_536),
    millis: (6000, 8000),
};

fn grammar(data: &[u8]) {
    let Some(([kind, seed], text)) = data.split_first_chunk::<2>() else { return };
    let text = String::from_utf8_lossy(text).into_owned();
    let grammar = match kind % 4 {
        0 => Grammar::Gbnf(text),
        1 => Grammar::Lark(text),
        2 => Grammar::Regex(text),
        _ => Grammar::Choice(text.split('\n').map(str::to_owned).collect()),
    };
    let Some(written) = write(&grammar, u64::from(*seed)) else { return };
    match &grammar {
        Grammar::Choice(choices) => assert!(choices.contains(&written), "{written:?} of {choices:?}"),
        Grammar::Regex(pattern) if is_plain(pattern) => {
            // Another implementation.
            if let Ok(other) = fancy_regex::Regex::new(&format!("^(?:{pattern})$")) {
                assert!(other.is_match(&written).unwrap_or(true), "{pattern:?} and {written:?}");
            }
        }
        _ => {}
    }
}

/// Without anchors, options and comments, of which the two matchers have their own opinions.
fn is_plain(pattern: &str) -> bool {
    const OTHERWISE: [&str; 23] = [
        "^", "$", "#", "(?", "\\b", "\\B", "\\<", "\\>", "\\A", "\\z", "\\Z", "\\G", "\\K", "\\h", "\\H",
        "\\e", "}{", "*{", "+{", "?{", "}+", "*+", "++",
    ];
    pattern.is_ascii() && !OTHERWISE.iter().any(|part| pattern.contains(part)) && !pattern.contains("?+")
}

/// Writes a text that the grammar allows, token by token; `None` where it is refused or does not end soon.
fn write(grammar: &Grammar, seed: u64) -> Option<String> {
    let mut constraint = match ENGINE.constraint(grammar) {
        Ok(constraint) => constraint,
        Err(error) => {
            check_message(&error.to_string());
            return None;
        }
    };
    let end = TINY.channels().expect("the bundled vocabulary has channels").end_of_turn;
    let mut rng = muser_testkit::Rng(seed);
    let mut ids = Vec::new();
    for count in 0..MOST_TOKENS {
        let mask = match constraint.mask() {
            Ok(mask) => mask,
            Err(error) => {
                check_message(&error.to_string());
                return None;
            }
        };
        let allows = |id: u32| mask.get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1);
        let allowed: Vec<u32> = (0..TINY.vocab_size() as u32).filter(|id| allows(*id)).collect();
        assert!(!allowed.is_empty(), "nothing may come after {:?}", TINY.decode(&ids, Markers::Show));
        assert_eq!(allows(end), constraint.can_end(), "the text may end where its end may come");
        let controls = |id: &&u32| **id != end && TINY.token_kind(**id) != Some(TokenKind::Normal);
        assert_eq!(allowed.iter().find(controls), None, "no grammar for text lets a marker through");
        if constraint.can_end() && (count > 12 || rng.one_in(4)) {
            return Some(TINY.decode(&ids, Markers::Show));
        }
        if count == 0 {
            let refused = (0..TINY.vocab_size() as u32)
                .find(|id| !allows(*id) && TINY.token_kind(*id) == Some(TokenKind::Normal));
            if let (Some(id), Ok(mut other)) = (refused, ENGINE.constraint(grammar)) {
                assert!(
                    other.commit(id).is_err() || other.mask().is_err(),
                    "{:?} is not allowed and taken",
                    TINY.decode(&[id], Markers::Show)
                );
            }
        }
        let texts: Vec<u32> = allowed.into_iter().filter(|id| *id != end).collect();
        let Some(id) = (!texts.is_empty()).then(|| texts[rng.below(texts.len())]) else {
            return Some(TINY.decode(&ids, Markers::Show));
        };
        if let Err(error) = constraint.commit(id) {
            panic!("{:?} was allowed: {error}", TINY.decode(&[id], Markers::Show));
        }
        ids.push(id);
    }
    None
}

fn grammar_seeds() -> Vec<Vec<u8>> {
    let texts: [(u8, &str); 12] = [
        (0, "root ::= item+ \"!\" # a comment\nitem ::= [a-z0-9_-] | \"x\" (\",\" item)? | [^\\n]{2,5}\n"),
        (0, "root ::= \"a\" | b\nb ::= \"(\" b \")\" | \"\"\n"),
        (0, "root ::= ws \"{\" ws \"}\"\nws ::= [ \\t\\n]*\n"),
        (1, "start: \"a\" b+ | C\nb: \"x\" | \"y\"\nC: /[0-9]{1,3}/\n"),
        (1, "%llguidance {}\nstart: NAME \"=\" %json {\"type\": \"integer\"}\nNAME: /[a-z]+/\n%ignore / /\n"),
        (2, "[a-c]{2,4}(x|yz)?\\d+"),
        (2, "(?i)hello|wor+ld"),
        (2, "\\w+@\\w+\\.(com|org)"),
        (2, "(a|b)*c{3}"),
        (3, "yes\nno\nmaybe"),
        (3, "é\n你好\n"),
        (0, "root ::= \"\\x41\" [\\u00e9-\\u00ff] .\n"),
    ];
    texts.iter().map(|(kind, text)| [&[*kind, 1][..], text.as_bytes()].concat()).collect()
}

/// A JSON schema.
pub const SCHEMA: Target = Target {
    name: "schema",
    about: "JSON schemas: refused with a reason, or a text is written that is JSON of the type, constants and choices asked for",
    run: schema,
    seeds: schema_seeds,
    words: &[],
    max_len: 192,
    memory: (64 << 20, 262_144),
    millis: (6000, 16_000),
};

fn schema(data: &[u8]) {
    let mut input = Input::new(data);
    let seed = u64::from(input.byte());
    let schema = if input.below(6) == 0 { input.json(4) } else { a_schema(&mut input, 3) };
    let Some(written) = write(&Grammar::JsonSchema(schema.clone()), seed) else { return };
    let value: Value = match serde_json::from_str(&written) {
        Ok(value) => value,
        // Numbers beyond what a float holds are JSON all the same.
        Err(error) if error.to_string().contains("out of range") => return,
        Err(error) => panic!("{written:?} is no JSON ({error}) for {schema}"),
    };
    assert!(fits(&schema, &value), "{value} for {schema}");
}

/// Equal as JSON Schema counts: 0 is 0.0, at any depth.
fn equal(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(x), Value::Number(y)) => x == y || x.as_f64() == y.as_f64(),
        (Value::Array(x), Value::Array(y)) => x.len() == y.len() && x.iter().zip(y).all(|(a, b)| equal(a, b)),
        (Value::Object(x), Value::Object(y)) => {
            x.len() == y.len() && x.iter().all(|(name, a)| y.get(name).is_some_and(|b| equal(a, b)))
        }
        _ => a == b,
    }
}

/// What can be said of a value without resolving anything: types, constants, choices, required fields, lengths.
fn fits(schema: &Value, value: &Value) -> bool {
    let Value::Object(fields) = schema else { return true };
    if let Some(constant) = fields.get("const")
        && !equal(constant, value)
    {
        return false;
    }
    if let Some(Value::Array(choices)) = fields.get("enum")
        && !choices.iter().any(|choice| equal(choice, value))
    {
        return false;
    }
    let is = |name: &str| match name {
        "string" => value.is_string(),
        "integer" => value.as_f64().is_none_or(|number| number.fract() == 0.0) && value.is_number(),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        _ => true,
    };
    let types_fit = match fields.get("type") {
        Some(Value::String(name)) => is(name),
        Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).any(is) || names.is_empty(),
        _ => true,
    };
    let limit = |key: &str| fields.get(key).and_then(Value::as_u64);
    let inside = |len: usize, least: &str, most: &str| {
        limit(least).is_none_or(|least| len as u64 >= least)
            && limit(most).is_none_or(|most| len as u64 <= most)
    };
    types_fit
        && match value {
            Value::Object(found) => {
                let required = fields.get("required").and_then(Value::as_array).into_iter().flatten();
                let properties = fields.get("properties").and_then(Value::as_object);
                required.filter_map(Value::as_str).all(|name| found.contains_key(name))
                    && found.iter().all(|(name, value)| {
                        properties
                            .and_then(|properties| properties.get(name))
                            .is_none_or(|schema| fits(schema, value))
                    })
            }
            Value::Array(items) => {
                inside(items.len(), "minItems", "maxItems")
                    && fields.get("items").is_none_or(|schema| {
                        fields.contains_key("prefixItems") || items.iter().all(|item| fits(schema, item))
                    })
            }
            Value::String(text) => inside(text.chars().count(), "minLength", "maxLength"),
            _ => true,
        }
}

fn a_schema(input: &mut Input<'_>, depth: usize) -> Value {
    let mut fields = Map::new();
    let kind = input.pick(&["string", "integer", "number", "boolean", "null", "array", "object", "object"]);
    fields.insert("type".into(), if input.below(6) == 0 { json!([kind, "null"]) } else { kind.into() });
    match kind {
        "string" if input.flag() => {
            let (key, value) = match input.below(5) {
                0 => ("minLength", json!(input.below(5))),
                1 => ("maxLength", json!(input.below(9))),
                2 => ("pattern", json!(input.pick(&["^[a-c]+$", "x|y", "^\\d{3}$", "(", "^(ab)*c?$"]))),
                3 => ("format", json!(input.pick(&["date", "uuid", "email", "ipv4", "other", "date-time"]))),
                _ => ("enum", json!(["a", input.text(6), "c"])),
            };
            fields.insert(key.into(), value);
        }
        "integer" | "number" if input.flag() => {
            let key =
                input.pick(&["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]);
            fields.insert(key.into(), input.number().into());
        }
        "array" => {
            if depth > 0 {
                fields.insert("items".into(), a_schema(input, depth - 1));
            }
            if input.flag() {
                fields.insert(input.pick(&["minItems", "maxItems"]).into(), input.below(4).into());
            }
        }
        "object" if depth > 0 => {
            let names = ["a", "b", "longer name", "é\"\\", "<|eot|>"];
            let count = input.below(4);
            let properties: Map<_, _> =
                (0..count).map(|at| (names[at].to_owned(), a_schema(input, depth - 1))).collect();
            let required: Vec<_> = names[..count].iter().filter(|_| input.flag()).collect();
            fields.insert("required".into(), json!(required));
            fields.insert("properties".into(), properties.into());
            if input.flag() {
                fields.insert(
                    "additionalProperties".into(),
                    if input.flag() { false.into() } else { a_schema(input, depth - 1) },
                );
            }
        }
        _ => {}
    }
    if input.below(5) == 0 {
        let key = input.pick(&[
            "$ref",
            "anyOf",
            "oneOf",
            "allOf",
            "const",
            "enum",
            "$defs",
            "patternProperties",
            "not",
            "description",
            "default",
            "prefixItems",
            "uniqueItems",
        ]);
        let value = match key {
            "$ref" => json!(input.pick(&["#", "#/$defs/a", "other", "#/properties/a"])),
            "anyOf" | "oneOf" | "allOf" | "prefixItems" if depth > 0 => {
                json!([a_schema(input, depth - 1), a_schema(input, depth - 1)])
            }
            "$defs" | "patternProperties" if depth > 0 => json!({"a": a_schema(input, depth - 1)}),
            "enum" => json!([1, "b", null, input.json(1)]),
            _ => input.json(1),
        };
        fields.insert(key.into(), value);
    }
    fields.into()
}

fn schema_seeds() -> Vec<Vec<u8>> {
    (0..24_u8)
        .map(|at| (0..36).map(|i: u8| at.wrapping_mul(53).wrapping_add(i.wrapping_mul(at | 1))).collect())
        .collect()
}
