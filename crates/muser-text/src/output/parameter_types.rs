//! How the text of a tool parameter becomes JSON: by the tool's schema.
//!
//! The model writes strings raw and everything else as JSON. So `123` is a number or the string "123", and only the
//! schema knows. A parameter that can only be a string stays as it is; one that cannot is parsed; one that can be both
//! is parsed and stays a string if what comes out has a type that the schema does not allow.

use serde_json::{Map, Value};
use std::collections::HashMap;

/// The tools of a request, by name, with the types of their parameters.
#[derive(Clone, Debug, Default)]
pub(crate) struct ToolTypes {
    tools: Vec<(String, HashMap<String, Types>)>,
}

/// Set of JSON types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Types(u8);

const STRING: u8 = 1;
const INTEGER: u8 = 2;
const NUMBER: u8 = 4;
const BOOL: u8 = 8;
const NULL: u8 = 16;
const ARRAY: u8 = 32;
const OBJECT: u8 = 64;

impl Types {
    /// The schema says nothing.
    pub(crate) const UNKNOWN: Types = Types(0);

    /// Is it text whatever it looks like?
    pub(crate) fn is_text(self) -> bool {
        self.0 == STRING
    }

    /// The JSON of a parameter's raw text. Always valid JSON.
    pub(crate) fn to_json(self, raw: &str) -> String {
        let text = raw.trim();
        if !self.is_text()
            && let Ok(value) = serde_json::from_str::<Value>(text)
            && self.accepts(&value)
        {
            return text.to_owned();
        }
        Value::from(raw).to_string()
    }

    fn accepts(self, value: &Value) -> bool {
        if self.0 & STRING == 0 {
            return true;
        }
        let of_value = match value {
            Value::Null => NULL,
            Value::Bool(_) => BOOL,
            Value::Number(number) if number.is_f64() => NUMBER,
            Value::Number(_) => INTEGER | NUMBER,
            Value::String(_) => 0,
            Value::Array(_) => ARRAY,
            Value::Object(_) => OBJECT,
        };
        self.0 & of_value != 0
    }
}

impl ToolTypes {
    /// Of tools as [`crate::normalise_tools`] gives them.
    pub(crate) fn new(tools: &[Value]) -> ToolTypes {
        let tools = tools.iter().filter_map(|tool| {
            let function = tool.get("function").unwrap_or(tool);
            let name = function.get("name")?.as_str()?.to_owned();
            let schema = function.get("parameters").unwrap_or(&Value::Null);
            let properties = schema.get("properties").and_then(Value::as_object);
            let types = properties
                .into_iter()
                .flatten()
                .map(|(key, property)| (key.clone(), types_of(property, schema, 0)))
                .collect();
            Some((name, types))
        });
        ToolTypes { tools: tools.collect() }
    }

    /// The tool that a name in the model's output means: exactly, by its last component, or doubled
    /// (`get_weather.get_weather`).
    pub(crate) fn resolve(&self, name: &str) -> Option<&str> {
        let known =
            |name: &str| self.tools.iter().map(|(known, _)| known.as_str()).find(|known| *known == name);
        let halves = name.len() / 2;
        let doubled = (name.len() % 2 == 1 && name.is_char_boundary(halves))
            .then(|| (&name[..halves], &name[halves..]))
            .and_then(|(left, right)| (right.strip_prefix('.') == Some(left)).then_some(left));
        known(name).or_else(|| known(doubled?)).or_else(|| known(name.rsplit_once('.')?.1))
    }

    /// Types of a parameter.
    pub(crate) fn parameter(&self, tool: &str, key: &str) -> Types {
        let tool = self.tools.iter().find(|(name, _)| name == tool);
        tool.and_then(|(_, types)| types.get(key)).copied().unwrap_or(Types::UNKNOWN)
    }
}

/// Nested schemas and references are followed this deep.
const MAX_DEPTH: usize = 16;

fn types_of(schema: &Value, root: &Value, depth: usize) -> Types {
    let Some(fields) = schema.as_object() else { return Types::UNKNOWN };
    if depth > MAX_DEPTH {
        return Types::UNKNOWN;
    }
    if let Some(types) = declared(fields) {
        return types;
    }
    if let Some(target) = fields.get("$ref").and_then(Value::as_str) {
        let target = target.strip_prefix('#').and_then(|pointer| root.pointer(pointer));
        return target.map_or(Types::UNKNOWN, |target| types_of(target, root, depth + 1));
    }
    for key in ["anyOf", "oneOf"] {
        if let Some(choices) = fields.get(key).and_then(Value::as_array) {
            let mut union = 0;
            for choice in choices {
                let Types(types) = types_of(choice, root, depth + 1);
                if types == 0 {
                    return Types::UNKNOWN;
                }
                union |= types;
            }
            return Types(union);
        }
    }
    if let Some(parts) = fields.get("allOf").and_then(Value::as_array) {
        let known =
            parts.iter().map(|part| types_of(part, root, depth + 1)).find(|types| *types != Types::UNKNOWN);
        return known.unwrap_or(Types::UNKNOWN);
    }
    Types::UNKNOWN
}

/// What `type`, `enum` and `const` say.
fn declared(fields: &Map<String, Value>) -> Option<Types> {
    let by_name = |name: &Value| match name.as_str() {
        Some("string") => STRING,
        Some("integer") => INTEGER,
        Some("number") => NUMBER | INTEGER,
        Some("boolean") => BOOL,
        Some("null") => NULL,
        Some("array") => ARRAY,
        Some("object") => OBJECT,
        _ => 0,
    };
    let by_value = |value: &Value| match value {
        Value::Null => NULL,
        Value::Bool(_) => BOOL,
        Value::Number(_) => NUMBER | INTEGER,
        Value::String(_) => STRING,
        Value::Array(_) => ARRAY,
        Value::Object(_) => OBJECT,
    };
    let types = match fields.get("type") {
        Some(Value::Array(names)) => names.iter().map(by_name).fold(0, |union, types| union | types),
        Some(name) => by_name(name),
        None => match (fields.get("enum").and_then(Value::as_array), fields.get("const")) {
            (Some(values), _) => values.iter().map(by_value).fold(0, |union, types| union | types),
            (None, Some(value)) => by_value(value),
            (None, None) => return None,
        },
    };
    Some(Types(types))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[expect(clippy::needless_pass_by_value, reason = "JSON literals read better by value")]
    fn check(property: Value, raw: &str, expected: &str) {
        let tools = ToolTypes::new(&[json!({"function": {"name": "f", "parameters": {
            "$defs": {"s": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}, "properties": {"p": property}}}})]);
        assert_eq!(tools.parameter("f", "p").to_json(raw), expected, "{property} {raw:?}");
    }

    #[test]
    fn the_schema_decides() {
        check(json!({"type": "string"}), "123", r#""123""#);
        check(json!({"type": "string"}), " {\"a\": 1}\n", r#"" {\"a\": 1}\n""#);
        check(json!({"enum": ["1", "2"]}), "1", r#""1""#);
        check(json!({"$ref": "#/$defs/s"}), "true", r#""true""#);
        check(json!({"allOf": [{"description": "x"}, {"type": "string"}]}), "1", r#""1""#);
        check(json!({"type": "integer"}), " 5\n", "5");
        check(json!({"type": "integer"}), "five", r#""five""#);
        check(json!({"type": "array"}), "[1, \"a\"]", "[1, \"a\"]");
        check(json!({"type": "number"}), "12345678901234567890.5", "12345678901234567890.5");
        check(json!({"type": ["string", "null"]}), "null", "null");
        check(json!({"type": ["string", "null"]}), "12", r#""12""#);
        check(json!({"type": ["string", "integer"]}), "1.5", r#""1.5""#);
        check(json!({"type": ["string", "null"]}), "\"quoted\"", r#""\"quoted\"""#);
        check(json!({"anyOf": [{"type": "integer"}, {"type": "string"}]}), "12", "12");
        check(json!({"anyOf": [{"type": "integer"}, {}]}), "x", r#""x""#);
        check(json!({"$ref": "#/$defs/loop"}), "1", "1");
        check(json!({}), "{\"a\":1}", "{\"a\":1}");
        check(json!({}), "NaN", "\"NaN\"");
        check(json!({"type": "object"}), &"[".repeat(5000), &format!("\"{}\"", "[".repeat(5000)));
        check(json!({"type": "string"}), "", "\"\"");
        check(json!({"type": "integer"}), "", "\"\"");
    }

    #[test]
    fn names_are_resolved_leniently() {
        let tools = ToolTypes::new(&["get_weather", "fs.read", "A-b.c_D"].map(|name| json!({"name": name})));
        assert_eq!(tools.resolve("get_weather"), Some("get_weather"));
        assert_eq!(tools.resolve("get_weather.get_weather"), Some("get_weather"));
        assert_eq!(tools.resolve("functions.get_weather"), Some("get_weather"));
        assert_eq!(tools.resolve("fs.read"), Some("fs.read"));
        assert_eq!(tools.resolve("fs.read.fs.read"), Some("fs.read"));
        assert_eq!(tools.resolve("A-b.c_D"), Some("A-b.c_D"));
        assert_eq!(tools.resolve("read"), None);
        assert_eq!(tools.resolve(""), None);
        assert_eq!(tools.resolve("é.é"), None);
    }
}
