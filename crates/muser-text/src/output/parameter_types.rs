//! How the text of a tool parameter becomes JSON: by the tool's schema.
//!
//! The model writes strings raw and everything else as JSON. So `123` is a number or the string "123", and only the
//! schema knows. A parameter that can only be a string stays as it is; one that cannot is parsed; one that can be both
//! is parsed and stays a string if what comes out has a type that the schema does not allow.

use crate::schema::{Resolver, Types, shapes};
use serde_json::Value;
use std::collections::HashMap;

/// The tools of a request, by name, with the types of their parameters.
#[derive(Clone, Debug, Default)]
pub(crate) struct ToolTypes {
    tools: Vec<(String, Parameters)>,
}

#[derive(Clone, Debug)]
struct Parameters {
    named: HashMap<String, Types>,
    /// Of keys that the schema does not name.
    others: Types,
}

impl ToolTypes {
    /// Of tools as [`crate::normalise_tools`] gives them.
    pub(crate) fn new(tools: &[Value]) -> ToolTypes {
        let tools = tools.iter().filter_map(|tool| {
            let function = tool.get("function").unwrap_or(tool);
            let name = function.get("name")?.as_str()?.to_owned();
            let schema = function.get("parameters").unwrap_or(&Value::Null);
            Some((name, Parameters::of(schema)))
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
        tool.map_or(Types::UNKNOWN, |(_, types)| types.named.get(key).copied().unwrap_or(types.others))
    }
}

impl Parameters {
    fn of(schema: &Value) -> Parameters {
        let resolver = Resolver::new(schema);
        let mut named: HashMap<String, Types> = HashMap::new();
        let mut others: Option<Types> = None;
        for shape in shapes(&resolver, schema) {
            for (key, schemas) in &shape.properties {
                let types = resolver.types_of_all(schemas);
                named
                    .entry((*key).to_owned())
                    .and_modify(|known| *known = known.join(types))
                    .or_insert(types);
            }
            for schema in shape.others.iter().flatten() {
                let types = resolver.types_of(schema);
                others = Some(others.map_or(types, |known| known.join(types)));
            }
        }
        Parameters { named, others: others.unwrap_or(Types::UNKNOWN) }
    }
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
        // What only several parts of a schema say together.
        check(json!({"type": ["string", "integer"], "enum": ["1", "2"]}), "1", r#""1""#);
        check(json!({"allOf": [{"type": ["string", "null"]}, {"enum": [null, "a"]}]}), "null", "null");
        check(json!({"type": "string", "nullable": true}), "null", "null");
        check(json!({"type": "string", "nullable": true}), "1", r#""1""#);
        check(json!({"properties": {"a": {}}}), "{\"a\":1}", "{\"a\":1}");
        check(json!({"const": "1"}), "1", r#""1""#);
    }

    #[test]
    fn parameters_are_typed_wherever_the_schema_names_them() {
        let tool = |parameters: Value| ToolTypes::new(&[json!({"name": "f", "parameters": parameters})]);
        let text = json!({"properties": {"p": {"type": "string"}}});
        let root = tool(json!({"$ref": "#/definitions/r", "definitions": {"r": text}}));
        assert_eq!(root.parameter("f", "p").to_json("1"), r#""1""#);
        let branches = tool(json!({"anyOf": [text, {"properties": {"p": {"type": "integer"}}}]}));
        assert_eq!(branches.parameter("f", "p").to_json("1"), "1");
        assert_eq!(branches.parameter("f", "p").to_json("one"), r#""one""#);
        let open = tool(json!({"additionalProperties": {"type": "string"}}));
        assert_eq!(open.parameter("f", "any").to_json("1"), r#""1""#);
        assert_eq!(open.parameter("g", "any").to_json("1"), "1");
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
