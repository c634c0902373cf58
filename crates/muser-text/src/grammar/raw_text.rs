//! What a schema says about a string that is written raw, as a terminal of Lark.
//!
//! The model writes string parameters without quotes, so the compiler's own rules for JSON strings do not serve. The
//! schema is a [cleaned](super::clean) one.

use super::patterns;
use crate::schema::{Resolver, list};
use serde_json::{Map, Value};

/// What ends a parameter.
pub(super) const PARAMETER_CLOSE: &str = "</atem:parameter>";

/// A literal of Lark.
pub(super) fn literal(text: &str) -> String {
    // JSON may hold this one as it is, Lark may not.
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

/// Which strings a schema allows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum RawText {
    /// All of them.
    Any,
    /// None: the value is no string.
    Never,
    /// Those that a terminal matches.
    Terminal(String),
}

/// Deepest nesting that is followed; below it any string is allowed.
const MAX_DEPTH: usize = 16;

/// Most steps of a walk.
const MAX_STEPS: usize = 2048;

/// The strings that a document allows.
pub(super) fn raw_text(document: &Value) -> RawText {
    let resolver = Resolver::new(document);
    Walk { resolver: &resolver, steps: MAX_STEPS }.schema(document, 0)
}

struct Walk<'r, 'a> {
    resolver: &'r Resolver<'a>,
    steps: usize,
}

impl<'a> Walk<'_, 'a> {
    fn schema(&mut self, schema: &'a Value, depth: usize) -> RawText {
        let fields = match schema {
            Value::Bool(false) => return RawText::Never,
            Value::Object(fields) if depth < MAX_DEPTH && self.steps > 0 => fields,
            _ => return RawText::Any,
        };
        self.steps -= 1;
        let mut text = own(fields);
        let reference = fields.get("$ref").and_then(Value::as_str);
        if let Some(target) = reference.and_then(|reference| self.resolver.target(reference)) {
            text = text.and(self.schema(target, depth + 1));
        }
        for part in list(fields, "allOf") {
            text = text.and(self.schema(part, depth + 1));
        }
        for key in ["anyOf", "oneOf"] {
            let choices = list(fields, key).iter().map(|choice| self.schema(choice, depth + 1));
            if let Some(either) = choices.reduce(RawText::or) {
                text = text.and(either);
            }
        }
        text
    }
}

/// What the keywords of one schema say.
fn own(fields: &Map<String, Value>) -> RawText {
    let is_string = |name: &Value| name == "string";
    let allows_strings = match fields.get("type") {
        Some(Value::Array(names)) => names.iter().any(is_string),
        Some(name) => is_string(name),
        None => true,
    };
    if !allows_strings {
        return RawText::Never;
    }
    let mut text = RawText::Any;
    if let Some(values) = fields.get("enum").and_then(Value::as_array) {
        text = text.and(one_of(values));
    }
    if let Some(value) = fields.get("const") {
        text = text.and(one_of(std::slice::from_ref(value)));
    }
    let pattern =
        fields.get("pattern").and_then(Value::as_str).and_then(|pattern| patterns::whole(pattern).ok());
    let format = fields.get("format").and_then(Value::as_str).and_then(patterns::format);
    let count = |key: &str| fields.get(key).and_then(Value::as_u64);
    let length = match (count("minLength").unwrap_or(0), count("maxLength")) {
        (0, None) => None,
        (least, None) => Some(format!("(?s:.{{{least},}})")),
        (least, Some(most)) if least > most => return RawText::Never,
        (least, Some(most)) => Some(format!("(?s:.{{{least},{most}}})")),
    };
    for expression in [pattern, format, length].into_iter().flatten() {
        text = text.and(RawText::Terminal(patterns::lark_regex(&expression)));
    }
    text
}

/// The strings among some values. One that holds the closing tag cannot be written.
fn one_of(values: &[Value]) -> RawText {
    let strings = values.iter().filter_map(Value::as_str).filter(|text| !text.contains(PARAMETER_CLOSE));
    let literals: Vec<String> = strings.map(literal).collect();
    if literals.is_empty() { RawText::Never } else { RawText::Terminal(literals.join(" | ")) }
}

impl RawText {
    fn and(self, other: RawText) -> RawText {
        match (self, other) {
            (RawText::Never, _) | (_, RawText::Never) => RawText::Never,
            (RawText::Any, text) | (text, RawText::Any) => text,
            (RawText::Terminal(one), RawText::Terminal(two)) => {
                RawText::Terminal(format!("({one}) & ({two})"))
            }
        }
    }

    fn or(self, other: RawText) -> RawText {
        match (self, other) {
            (RawText::Any, _) | (_, RawText::Any) => RawText::Any,
            (RawText::Never, text) | (text, RawText::Never) => text,
            (RawText::Terminal(one), RawText::Terminal(two)) => {
                RawText::Terminal(format!("({one}) | ({two})"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_schemas_say_of_strings() {
        let check = |schema: Value, expected: RawText| assert_eq!(raw_text(&schema), expected, "{schema}");
        let terminal = |text: &str| RawText::Terminal(text.to_owned());
        check(json!({}), RawText::Any);
        check(json!({"type": "string"}), RawText::Any);
        check(json!({"type": ["null", "integer"]}), RawText::Never);
        check(json!({"enum": [1, null]}), RawText::Never);
        check(json!({"enum": ["a", 1, "b\""]}), terminal(r#""a" | "b\"""#));
        check(json!({"const": "z"}), terminal(r#""z""#));
        check(json!({"enum": ["x</atem:parameter>y"]}), RawText::Never);
        check(json!({"minLength": 2, "maxLength": 1}), RawText::Never);
        check(
            json!({"anyOf": [{"type": "null"}, {"const": "a"}, {"const": "b"}]}),
            terminal(r#"("a") | ("b")"#),
        );
        check(json!({"anyOf": [{"type": "string"}, {"const": "b"}]}), RawText::Any);
        check(
            json!({"$ref": "#/$defs/d0", "$defs": {"d0": {"maxLength": 3}}, "pattern": "^a"}),
            terminal("(/(?:a)(?s:.*)/) & (/(?s:.{0,3})/)"),
        );
        check(json!({"$ref": "#/$defs/d0", "$defs": {"d0": {"$ref": "#/$defs/d0"}}}), RawText::Any);
    }
}
