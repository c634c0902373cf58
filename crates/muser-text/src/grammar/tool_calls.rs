//! The grammar of one tool call: the block that the model writes, with arguments typed by the tool's schema.
//!
//! Parameters come in the order of the schema, each once, the optional ones or not. A string is free text up to the
//! closing tag (the model writes strings raw), a string with given values is one of them, everything else is JSON that
//! follows its schema.

use serde_json::{Map, Value, json};
use std::fmt::Write as _;

/// Lark grammar for a call of `name` with these parameters.
pub(crate) fn grammar(name: &str, parameters: &Value) -> String {
    let empty = Map::new();
    let properties = parameters.get("properties").and_then(Value::as_object).unwrap_or(&empty);
    let required: Vec<&str> = parameters
        .get("required")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    let mut start = literal(&format!("<atem:function_calls>\n<atem:invoke name=\"{name}\">\n"));
    let mut rules = String::new();
    for (index, (key, schema)) in properties.iter().enumerate() {
        let optional = if required.contains(&key.as_str()) { "" } else { "?" };
        // Writing to a string cannot fail.
        let _ = write!(start, " parameter{index}{optional}");
        let open = literal(&format!("<atem:parameter name=\"{key}\">"));
        let _ = match value(schema, parameters) {
            ValueRule::Text => writeln!(
                rules,
                "parameter{index}: {open} text{index} \"\\n\"\ntext{index}[suffix=\"</atem:parameter>\"]: /(?s:.*)/"
            ),
            ValueRule::Choice(choices) => {
                let choices: Vec<String> = choices.iter().map(|choice| literal(choice)).collect();
                writeln!(rules, "parameter{index}: {open} ({}) \"</atem:parameter>\\n\"", choices.join(" | "))
            }
            ValueRule::Json(schema) => writeln!(
                rules,
                "parameter{index}: {open} value{index} \"</atem:parameter>\\n\"\nvalue{index}: %json {schema}"
            ),
        };
    }
    format!("start: {start} {}\n{rules}", literal("</atem:invoke>\n</atem:function_calls>"))
}

enum ValueRule {
    Text,
    Choice(Vec<String>),
    Json(Value),
}

fn value(schema: &Value, root: &Value) -> ValueRule {
    if let Some(values) = schema.get("enum").and_then(Value::as_array) {
        let strings: Option<Vec<String>> =
            values.iter().map(|value| value.as_str().map(str::to_owned)).collect();
        if let Some(strings) = strings.filter(|strings| !strings.is_empty()) {
            return ValueRule::Choice(strings);
        }
    }
    let is_json = match schema.get("type") {
        Some(Value::String(name)) => name != "string",
        Some(Value::Array(names)) => !names.iter().any(|name| name == "string"),
        _ => false,
    };
    match schema {
        Value::Object(fields) if is_json => {
            let mut fields = fields.clone();
            for key in ["$defs", "definitions"] {
                if let Some(definitions) = root.get(key) {
                    fields.insert(key.to_owned(), definitions.clone());
                }
            }
            fields.insert(
                "x-guidance".to_owned(),
                json!({"whitespace_pattern": super::JSON_SPACE, "coerce_one_of": true}),
            );
            ValueRule::Json(Value::Object(fields))
        }
        // A string, or what could be one: the model writes it raw.
        _ => ValueRule::Text,
    }
}

/// A literal of Lark.
fn literal(text: &str) -> String {
    Value::from(text).to_string()
}
