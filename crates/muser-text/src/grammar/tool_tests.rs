//! What a tool's schema becomes in the grammar of its calls.

use super::tests::engine;
use super::turn_tests::follow_turn;
use super::*;
use crate::test_support::tiny_tokenizer;
use crate::{OutputDecoder, OutputEvent, OutputOptions, Specials, normalise_tools};
use serde_json::json;

fn rules(parameters: Value, strict: bool) -> TurnRules {
    let tools = normalise_tools(&[json!({"name": "f", "parameters": parameters})]).expect("valid");
    let strict_tools = if strict { vec!["f".to_owned()] } else { Vec::new() };
    TurnRules { tools, strict_tools, answer: AnswerRule::Forbidden, ..TurnRules::default() }
}

/// A call with these parameters.
fn call(parameters: &[(&str, &str)]) -> String {
    let write =
        |(key, value): &(&str, &str)| format!("<atem:parameter name=\"{key}\">{value}</atem:parameter>\n");
    let written = parameters.iter().map(write).collect::<Vec<_>>().concat();
    format!(
        " to=f<|message|><atem:function_calls>\n<atem:invoke name=\"f\">\n{written}</atem:invoke>\n</atem:function_calls><|eot|>"
    )
}

fn allowed(rules: &TurnRules, parameters: &[(&str, &str)]) -> bool {
    follow_turn(rules, &call(parameters)) == Ok(true)
}

/// Values of the parameter `p` that calls may and may not have; strictly and not, since nothing is left out.
fn check(schema: Value, yes: &[&str], no: &[&str]) {
    let parameters = json!({
        "type": "object", "properties": {"p": schema}, "required": ["p"],
        "$defs": {
            "N": {"type": "integer"}, "C": {"enum": ["red", "green"]},
            "O": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            "T": {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/T"}},
                  "required": ["v"], "additionalProperties": false},
        },
    });
    for strict in [false, true] {
        let rules = rules(parameters.clone(), strict);
        for value in yes {
            assert!(allowed(&rules, &[("p", value)]), "{schema} should take {value}, strict {strict}");
        }
        for value in no {
            assert!(!allowed(&rules, &[("p", value)]), "{schema} should not take {value}, strict {strict}");
        }
        assert!(!allowed(&rules, &[]), "{schema}: the parameter is required");
    }
}

#[test]
fn arguments_follow_references_and_combinations() {
    check(json!({"$ref": "#/$defs/N"}), &["5", "-12"], &["Aegean", "1.5"]);
    check(json!({"$ref": "#/$defs/O"}), &["{\"a\": 1}"], &["rankul", "{}", "[1]"]);
    check(json!({"$ref": "#/$defs/C"}), &["red", "green"], &["blue", "\"red\"", "redd"]);
    check(json!({"$ref": "#/$defs/T"}), &["{\"v\": 1, \"next\": {\"v\": 2}}"], &["{\"v\": 1, \"next\": 2}"]);
    check(json!({"anyOf": [{"type": "integer"}, {"type": "null"}]}), &["5", "null"], &["allgo\">", "five"]);
    check(
        json!({"oneOf": [{"$ref": "#/$defs/N"}, {"$ref": "#/$defs/O"}]}),
        &["5", "{\"a\":2}"],
        &["x", "[]"],
    );
    check(json!({"allOf": [{"$ref": "#/$defs/N"}, {"minimum": 3}]}), &["3", "10"], &["2", "x"]);
    check(json!({"const": "zed"}), &["zed"], &["milk", "zedd"]);
    check(json!({"const": 7}), &["7"], &["8", "seven"]);
    check(json!({"enum": [1, 2, 3]}), &["1", "3"], &["4", "one"]);
    check(json!({"enum": ["a", null]}), &["a", "null"], &["b", "1"]);
    check(json!({"type": "integer", "nullable": true}), &["5", "null"], &["x"]);
    check(json!({"type": ["integer", "string"], "maxLength": 2}), &["5", "12345", "ab"], &["abc"]);
    check(
        json!({"properties": {"a": {"type": "integer"}}, "required": ["a"]}),
        &["{\"a\": 1}"],
        &["a", "{}"],
    );
}

#[test]
fn strings_follow_their_rules() {
    check(json!({"type": "string", "pattern": "^[0-9]{3}$"}), &["123"], &["pens", "1234", "12"]);
    check(json!({"type": "string", "pattern": "b+"}), &["abba", "b"], &["xyz"]);
    check(json!({"type": "string", "minLength": 2, "maxLength": 4}), &["ab", "é🙂xy"], &["a", "abcde"]);
    check(json!({"type": "string", "format": "date"}), &["2026-08-12"], &["tomorrow", "2026-13-01"]);
    check(json!({"type": "string", "format": "uuid"}), &["123e4567-e89b-12d3-a456-426614174000"], &["1"]);
    check(json!({"type": "string", "format": "path"}), &["/tmp/x", ""], &[]);
    check(json!({"anyOf": [{"type": "string", "pattern": "^a"}, {"type": "null"}]}), &["ab", "null"], &["b"]);
    check(json!({"anyOf": [{"const": "x"}, {"const": "y"}]}), &["x", "y"], &["z"]);
    check(json!({"type": "string", "enum": ["a/b", "c \"d\"\n"]}), &["a/b", "c \"d\"\n"], &["c"]);
    check(json!({"type": "string"}), &["", "two\nlines <b> </a>", "{\"a\": 1}"], &[]);
}

#[test]
fn far_limits_of_strings_are_kept() {
    let schema = json!({"type": "string", "maxLength": 1500});
    check(schema, &[&"say \"x\" ".repeat(187)], &[&"say \"x\" ".repeat(188), &"é".repeat(1501)]);
}

#[test]
fn parameters_are_where_the_root_says_they_are() {
    let object = json!({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}},
                        "required": ["a"]});
    for root in [
        json!({"$ref": "#/$defs/R", "$defs": {"R": object}}),
        json!({"allOf": [object]}),
        json!({"anyOf": [object, {"type": "null"}]}),
    ] {
        for strict in [false, true] {
            let rules = rules(root.clone(), strict);
            assert!(
                allowed(&rules, &[("a", "1")]) && allowed(&rules, &[("a", "1"), ("b", "true")]),
                "{root}"
            );
            assert!(!allowed(&rules, &[]) && !allowed(&rules, &[("a", "x")]), "{root}");
            assert!(
                !allowed(&rules, &[("b", "true")]) && !allowed(&rules, &[("a", "1"), ("c", "1")]),
                "{root}"
            );
        }
    }
    let either = rules(
        json!({"oneOf": [
            {"properties": {"kind": {"const": "circle"}, "r": {"type": "integer"}}, "required": ["kind", "r"]},
            {"properties": {"kind": {"const": "point"}}, "required": ["kind"]},
        ]}),
        true,
    );
    assert!(allowed(&either, &[("kind", "circle"), ("r", "2")]) && allowed(&either, &[("kind", "point")]));
    assert!(!allowed(&either, &[("kind", "circle")]) && !allowed(&either, &[("kind", "point"), ("r", "2")]));
    let open = rules(
        json!({"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "boolean"}}),
        true,
    );
    assert!(allowed(&open, &[("a", "1"), ("x y", "true"), ("z", "false")]) && allowed(&open, &[]));
    assert!(!allowed(&open, &[("x", "1")]) && !allowed(&open, &[("a", "true")]));
}

/// Schemas that agents send and that no grammar can keep: the tool works, and what is left out is said once.
#[test]
fn no_keyword_costs_a_request_its_life() {
    let unkept = [
        json!({"type": "object", "propertyNames": {"pattern": "^a"}, "additionalProperties": {}}),
        json!({"type": "array", "items": {"type": "string"}, "uniqueItems": true}),
        json!({"type": "object", "not": {"required": ["a"]}}),
        json!({"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}}),
        json!({"type": "array", "contains": {"type": "integer"}, "minContains": 2}),
        json!({"type": "object", "dependencies": {"a": ["b"]}}),
        json!({"type": "object", "dependentRequired": {"a": ["b"]}}),
        json!({"type": "object", "dependentSchemas": {"a": {}}}),
        json!({"type": "object", "allOf": [{}], "unevaluatedProperties": false}),
        json!({"type": "array", "items": {"$dynamicRef": "#node"}}),
        json!({"type": "array", "items": {"type": "string", "pattern": "(?=a)b"}}),
        json!({"type": "array", "items": {"type": "string", "pattern": "\\bword\\b"}}),
        json!({"type": "array", "items": {"type": "string", "pattern": "(a)\\1"}}),
        json!({"type": "string", "pattern": "(?<!x)y"}),
        json!({"type": "array", "items": {"type": "any"}}),
        json!({"type": "any"}),
        json!({"type": "object", "properties": {"x": {"$ref": "https://x.example/schema"}}}),
        json!({"$ref": "#/$defs/nowhere"}),
        json!({"type": "object", "properties": {"x": "no schema"}}),
        json!({"type": "array", "items": {"type": "integer", "minimum": 5, "maximum": 1}, "minItems": 1}),
        json!({"type": "integer", "minimum": 5, "maximum": 1}),
        json!({"type": "string", "minLength": 5, "maxLength": 1}),
        json!({"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1}),
        json!({"type": "array", "items": {"anyOf": [{"type": "integer"}], "enum": []}}),
        json!({"type": "array", "minItems": 4_000_000_000_u64}),
        json!({"type": "string", "pattern": "((a{900}){900}){900}"}),
    ];
    let silent = [
        json!({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}}),
        json!({"type": "array", "uniqueItems": false, "items": {"type": "string", "format": "uri-reference"}}),
        json!({"type": "array", "items": {"type": "string", "format": "binary"}}),
        json!({"type": "array", "items": {"type": "string", "maxLength": 1_000_000_000_000_u64}}),
        json!({"type": "object", "properties": null, "required": null}),
        json!({"type": "array", "items": {"$ref": "#/properties/p/$defs/X"}, "$defs": {"X": {"type": "integer"}}}),
        json!({"type": "object", "properties": {"a": {"type": "integer", "exclusiveMinimum": true, "minimum": 1}}}),
        json!({"type": "string", "format": "regex"}),
        json!({"type": "object", "discriminator": {"propertyName": "x"}, "x-vendor": [1]}),
    ];
    let plan = |schema: &Value| {
        let rules = rules(json!({"type": "object", "properties": {"p": schema}, "required": ["p"]}), false);
        let plan = TurnPlan::new(engine(), &rules).unwrap_or_else(|error| panic!("{schema}: {error}"));
        plan.left_out()
    };
    for schema in unkept {
        let left_out = plan(&schema);
        assert!(!left_out.is_empty(), "{schema}: it is said");
        assert!(left_out.iter().all(|found| found.tool == "f" && found.path.starts_with("properties.p")));
    }
    for schema in silent {
        assert_eq!(plan(&schema), [], "{schema}: nothing is lost");
    }
}

#[test]
fn what_is_left_out_leaves_the_rest_in_force() {
    let rules = rules(
        json!({"type": "object", "required": ["p"], "properties": {
            "p": {"type": "array", "uniqueItems": true, "items": {"type": "integer"}},
            "q": {"type": "integer", "minimum": 5, "maximum": 1}}}),
        false,
    );
    assert!(allowed(&rules, &[("p", "[1, 1]")]) && !allowed(&rules, &[("p", "[\"a\"]")]));
    // Of a schema that nothing follows the type is left.
    assert!(allowed(&rules, &[("p", "[]"), ("q", "7")]) && !allowed(&rules, &[("p", "[]"), ("q", "x")]));
}

#[test]
fn strict_tools_are_kept_or_refused_by_name() {
    let refused = |schema: Value, expected: &str| {
        let rules = rules(json!({"properties": {"p": schema}}), true);
        let error = TurnPlan::new(engine(), &rules).expect_err(expected);
        assert!(error.is_request_fault());
        assert_eq!(error.to_string(), format!("the schema of the tool \"f\" is not usable at {expected}"));
    };
    refused(json!({"items": {"uniqueItems": true}}), "properties.p.items: 'uniqueItems' cannot be enforced");
    refused(
        json!({"type": "string", "pattern": "(?=a)"}),
        "properties.p.pattern: the pattern is none that can be kept (look-around and back-references cannot)",
    );
    refused(
        json!({"$ref": "#/x"}),
        "properties.p.$ref: \"#/x\" is not in the schema, and nothing is fetched",
    );
    let rules = rules(json!({"properties": {"p": {"type": "integer", "minimum": 5, "maximum": 1}}}), true);
    let error = TurnPlan::new(engine(), &rules).expect_err("nothing follows it");
    assert!(matches!(&error, TextError::Schema { path, .. } if path == "properties.p"), "{error}");
}

#[test]
fn answers_name_the_place_of_what_cannot_be_kept() {
    let path = |schema: Value| match engine().constraint(&Grammar::JsonSchema(schema)) {
        Err(TextError::Schema { tool: None, path, .. }) => path,
        other => panic!("{other:?}"),
    };
    assert_eq!(path(json!({"properties": {"a": {"items": {"not": {}}}}})), "properties.a.items");
    assert_eq!(
        path(json!({"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"contains": {}}}})),
        "$defs.A"
    );
    assert_eq!(
        path(
            json!({"type": "object", "required": ["a"], "properties": {"a": {"type": "object", "required": ["b"],
            "properties": {"b": {"type": "integer", "minimum": 2, "maximum": 1}}}}})
        ),
        "properties.a.properties.b"
    );
    assert_eq!(path(json!({"$defs": {"l": {"$ref": "#/$defs/l"}}, "$ref": "#/$defs/l"})), "$ref");
    // An unknown format says something to readers only.
    for format in ["path", "binary", "uri-reference", "password", "unknown"] {
        let schema = json!({"properties": {"a": {"type": "string", "format": format}}});
        assert!(engine().constraint(&Grammar::JsonSchema(schema)).is_ok(), "{format}");
    }
}

/// What the decoder makes of a call, as the client gets it.
fn arguments(rules: &TurnRules, output: &str) -> String {
    let options = OutputOptions { tools: rules.tools.clone(), ..OutputOptions::default() };
    let mut decoder = OutputDecoder::new(tiny_tokenizer().clone(), &options).expect("valid");
    let mut found = None;
    for id in tiny_tokenizer().encode(output, Specials::Parse) {
        for event in decoder.push(id) {
            if let OutputEvent::ToolCallEnd { arguments, .. } = event {
                found = Some(arguments);
            }
        }
    }
    found.expect("a call")
}

#[test]
fn what_the_grammar_allows_reads_back_as_it_was_meant() {
    let check = |schema: Value, written: &str, expected: &str| {
        let rules = rules(json!({"properties": {"p": schema}, "$defs": {"N": {"type": "integer"}}}), true);
        let output = call(&[("p", written)]);
        assert_eq!(follow_turn(&rules, &output), Ok(true), "{written}");
        assert_eq!(arguments(&rules, &output), format!("{{\"p\":{expected}}}"));
    };
    check(json!({"$ref": "#/$defs/N"}), "5", "5");
    check(json!({"enum": ["1", null]}), "1", "\"1\"");
    check(json!({"enum": ["1", null]}), "null", "null");
    check(json!({"const": "7"}), "7", "\"7\"");
    check(json!({"allOf": [{"type": "string"}, {"minLength": 1}]}), "true", "\"true\"");
    check(json!({"anyOf": [{"type": "boolean"}, {"type": "null"}]}), "true", "true");
    // A closing tag inside a JSON string is part of it.
    let tag = r#"["a</atem:parameter>\n</atem:invoke>", "\"</atem:parameter>"]"#;
    check(json!({"type": "array", "items": {"type": "string"}}), tag, tag);
}

#[test]
fn white_space_in_json_is_a_space_or_a_line_break() {
    let schema = json!({"type": "object", "properties": {"c": {"type": "integer"}, "d": {"type": "boolean"}},
                        "required": ["c", "d"], "additionalProperties": false});
    let follows = |text: &str| {
        let rules = TurnRules {
            answer: AnswerRule::Grammar(Grammar::JsonSchema(schema.clone())),
            start: TurnStart::Answer,
            ..TurnRules::default()
        };
        follow_turn(&rules, &format!("{text}<|eot|>")) == Ok(true)
    };
    assert!(follows("{\"c\": 1, \"d\": true}") && follows("{\"c\":1,\"d\":true}"));
    assert!(follows("{\n  \"c\": 1,\n  \"d\": true\n}") && follows("{\n\t\"c\": 1,\n\t\"d\": true\n}"));
    assert!(!follows("{  \"c\": 1, \"d\": true}") && !follows("{\n\n\"c\": 1, \"d\": true}"));
    assert!(!follows("{\t\"c\": 1, \"d\": true}") && !follows("{ \n\"c\": 1, \"d\": true}"));
}
