//! Length limits of strings that are too far away to matter yet.
//!
//! A string with a `maxLength` costs a state of the lexer for every length it can have, so each mask walks the vocabulary
//! anew (0.1 ms with 200,000 tokens); without a limit all lengths share one state and the mask is a copy (1 µs). While a
//! string is further from its limit than the longest token reaches, the limit cannot change a mask. So a schema is
//! compiled twice, as it is and without its far limits, and [`Distance`] tells which of the two is to be asked.
//!
//! The invariant: a limit is left out only where nothing else is said about the string, so that there is never a text
//! that the schema could not be completed from although the relaxed one can.

use serde_json::{Map, Value};

/// Limits below this many characters stay: a string that short is soon over.
const FAR_CHARACTERS: u64 = 1024;

/// Keywords that say nothing about the value.
const SILENT: [&str; 13] = [
    "$anchor",
    "$defs",
    "definitions",
    "$schema",
    "$id",
    "id",
    "$comment",
    "title",
    "description",
    "default",
    "examples",
    "readOnly",
    "writeOnly",
];

/// The schema without its far limits and the smallest limit left out, in characters; `None` if there is none to leave out
/// or it cannot be seen that each stands alone.
pub(super) fn without_far_limits(schema: &Value) -> Option<(Value, usize)> {
    let mut relaxed = schema.clone();
    let mut smallest = u64::MAX;
    relax(&mut relaxed, &mut smallest)?;
    (smallest < u64::MAX).then(|| (relaxed, usize::try_from(smallest).unwrap_or(usize::MAX)))
}

/// `None`: schemas are combined in a way that may put other rules on a string with a limit.
fn relax(schema: &mut Value, smallest: &mut u64) -> Option<()> {
    let Value::Object(fields) = schema else { return Some(()) };
    if ["allOf", "patternProperties", "not", "if"].iter().any(|key| fields.contains_key(*key)) {
        return None;
    }
    let only = |fields: &Map<String, Value>, allowed: &[&str]| {
        fields.keys().all(|key| allowed.contains(&key.as_str()) || SILENT.contains(&key.as_str()))
    };
    if ["anyOf", "oneOf", "$ref"].iter().any(|key| fields.contains_key(*key))
        && !["anyOf", "oneOf", "$ref"].iter().any(|key| only(fields, &[key]))
    {
        return None;
    }
    if only(fields, &["type", "minLength", "maxLength"])
        && let Some(limit) = fields.get("maxLength").and_then(Value::as_u64)
        && limit >= FAR_CHARACTERS
        && fields.get("minLength").and_then(Value::as_u64).unwrap_or(0) <= limit
    {
        fields.remove("maxLength");
        *smallest = (*smallest).min(limit);
    }
    for (key, value) in fields {
        match (key.as_str(), value) {
            ("properties" | "$defs" | "definitions", Value::Object(schemas)) => {
                schemas.values_mut().try_for_each(|schema| relax(schema, smallest))?;
            }
            ("items" | "prefixItems" | "anyOf" | "oneOf", Value::Array(schemas)) => {
                schemas.iter_mut().try_for_each(|schema| relax(schema, smallest))?;
            }
            ("items" | "additionalItems" | "additionalProperties", schema) => relax(schema, smallest)?,
            _ => {}
        }
    }
    Some(())
}

/// At least the length of the string that is open, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Distance {
    bytes: usize,
    escaped: bool,
    /// A quotation mark begins or ends the string. Else strings are raw, and all of the text counts.
    quoted: bool,
}

impl Distance {
    /// In JSON: bytes since the last quotation mark that no backslash escapes.
    pub(super) fn of_quotes() -> Distance {
        Distance { bytes: 0, escaped: false, quoted: true }
    }

    /// In text whose strings have no quotation marks: all bytes so far.
    pub(super) fn of_text() -> Distance {
        Distance { bytes: 0, escaped: false, quoted: false }
    }

    /// Takes more of the text.
    pub(super) fn push(&mut self, text: &[u8]) {
        for byte in text {
            self.bytes += 1;
            match byte {
                b'\\' => self.escaped = !self.escaped,
                b'"' if self.quoted && !self.escaped => self.bytes = 0,
                _ => self.escaped = false,
            }
        }
    }

    /// The distance in bytes.
    pub(super) fn bytes(self) -> usize {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_limits_that_stand_alone_are_left_out() {
        let check = |schema: Value, expected: Option<(Value, usize)>| {
            assert_eq!(without_far_limits(&schema), expected, "{schema}");
        };
        let far = json!({"type": "string", "maxLength": 5000});
        let free = json!({"type": "string"});
        check(far.clone(), Some((free.clone(), 5000)));
        check(
            json!({"type": "object", "properties": {"pattern": far, "b": {"type": "string", "maxLength": 9}}}),
            Some((
                json!({"type": "object", "properties": {"pattern": free, "b": {"type": "string", "maxLength": 9}}}),
                5000,
            )),
        );
        check(
            json!({"items": {"anyOf": [far, {"maxLength": 2000}]}}),
            Some((json!({"items": {"anyOf": [free, {}]}}), 2000)),
        );
        check(json!({"type": "string", "maxLength": 1000}), None);
        check(json!({"maxLength": 5000, "pattern": "^a*b$"}), None);
        check(json!({"maxLength": 5000, "enum": ["a"]}), None);
        check(json!({"maxLength": 5000, "minLength": 6000}), None);
        check(json!({"allOf": [far, {"pattern": "b"}]}), None);
        check(json!({"maxLength": 5000, "anyOf": [{"pattern": "b"}, {"minLength": 3}]}), None);
        check(json!({"$ref": "#/$defs/a", "pattern": "b", "$defs": {"a": far}}), None);
        check(
            json!({"$ref": "#/$defs/a", "$defs": {"a": far}}),
            Some((json!({"$ref": "#/$defs/a", "$defs": {"a": free}}), 5000)),
        );
        check(json!(true), None);
    }

    #[test]
    fn the_distance_is_from_the_last_real_quotation_mark() {
        let check = |text: &str, expected: usize| {
            let mut distance = Distance::of_quotes();
            for byte in text.as_bytes() {
                distance.push(&[*byte]);
            }
            assert_eq!(distance.bytes(), expected, "{text}");
        };
        check("", 0);
        check("{\"a\": \"", 0);
        check("{\"a\": \"xyz", 3);
        check(r#"{"a": "x\"yz"#, 5);
        check(r#"{"a": "x\\"}"#, 1);
        check(r#"{"a": "\\\"z"#, 5);
        let mut raw = Distance::of_text();
        raw.push(b"say \"x\"");
        assert_eq!(raw.bytes(), 7);
    }
}
