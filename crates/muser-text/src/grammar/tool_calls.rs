//! The grammar of one tool call: the block that the model writes, with arguments typed by the tool's schema.
//!
//! Parameters come in the order of the schema, each once, the optional ones or not. A string is written raw up to the
//! closing tag, so what the schema says of it becomes a terminal ([`super::raw_text`]); everything else is JSON that
//! follows its schema. A value that may be both is one or the other.

use super::clean::{Cleaner, Remark, widest};
use super::far_limits::without_far_limits;
use super::raw_text::{PARAMETER_CLOSE, RawText, literal, raw_text};
use super::{MAX_GRAMMAR_BYTES, MAX_WIDTH};
use crate::schema::{Resolver, Shape, Types, shapes};
use serde_json::{Value, json};
use std::fmt::Write as _;

/// Keys that a schema allows without naming them.
const OTHER_KEY: &str = "/[0-9A-Za-z_$@.:\\/ -]{1,64}/";

/// Schemas of all values together, in bytes.
const MAX_VALUE_BYTES: usize = 4 * MAX_GRAMMAR_BYTES;

/// What the arguments of one tool may be.
#[derive(Clone, Debug)]
pub(super) struct CallPlan {
    pub(super) shapes: Vec<CallShape>,
    /// What of the schema is not kept.
    pub(super) left_out: Vec<Remark>,
}

#[derive(Clone, Debug)]
pub(super) struct CallShape {
    pub(super) parameters: Vec<Parameter>,
    /// The value of keys that are not named; none: no such keys.
    others: Option<Parameter>,
}

/// A parameter, and its value with and without far limits.
#[derive(Clone, Debug)]
pub(super) struct Parameter {
    key: String,
    required: bool,
    types: Types,
    pub(super) rule: ValueRule,
    relaxed: Option<(ValueRule, usize)>,
}

/// How a value is written.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum ValueRule {
    /// Any text.
    Text,
    /// Text that this terminal matches.
    Terminal(String),
    /// JSON that follows this schema.
    Json(Value),
    /// Either.
    Both(String, Value),
}

impl CallPlan {
    /// The plan for calls with these parameters. Strictly, what cannot be kept is an error; else it is left out.
    pub(super) fn new(parameters: &Value, strict: bool) -> Result<CallPlan, Remark> {
        let resolver = Resolver::new(parameters);
        let mut planner = Planner { resolver: &resolver, strict, bytes: 0, left_out: Vec::new() };
        let shapes = shapes(&resolver, parameters);
        let shapes = shapes.iter().map(|shape| planner.shape(shape)).collect::<Result<_, _>>()?;
        let mut left_out = planner.left_out;
        // Of several shapes the same may be said.
        let mut seen = std::collections::HashSet::new();
        left_out.retain(|remark| seen.insert(format!("{} {}", remark.path, remark.what)));
        Ok(CallPlan { shapes, left_out })
    }

    /// The Lark grammar for a call of `name`.
    pub(super) fn lark(&self, name: &str) -> String {
        self.written(name, |parameter| &parameter.rule)
    }

    /// The same without far limits, and the smallest of those left out; `None` if there are none.
    pub(super) fn relaxed_lark(&self, name: &str) -> Option<(String, usize)> {
        let relaxed = |parameter: &Parameter| parameter.relaxed.as_ref().map(|(_, limit)| *limit);
        let smallest = self.all_parameters().filter_map(relaxed).min()?;
        let lark = self.written(name, |parameter| match &parameter.relaxed {
            Some((rule, _)) => rule,
            None => &parameter.rule,
        });
        Some((lark, smallest))
    }

    pub(super) fn all_parameters(&self) -> impl Iterator<Item = &Parameter> {
        self.shapes.iter().flat_map(|shape| shape.parameters.iter().chain(&shape.others))
    }

    /// Leaves the schemas of values out for which `is_bad` says so; notes it.
    pub(super) fn give_up(&mut self, is_bad: impl Fn(&Parameter) -> bool) {
        for shape in &mut self.shapes {
            for parameter in shape.parameters.iter_mut().chain(&mut shape.others) {
                if parameter.rule != ValueRule::Text && is_bad(parameter) {
                    parameter.give_up();
                    let what = "the schema of this value cannot be enforced".to_owned();
                    let remark = Remark { path: parameter.path(), what };
                    if !self.left_out.contains(&remark) {
                        self.left_out.push(remark);
                    }
                }
            }
        }
    }

    /// The shortest call, as text: what every call costs at least.
    pub(super) fn skeleton(&self, name: &str) -> String {
        let of_shape = |shape: &CallShape| -> String {
            let mut written = String::new();
            for parameter in shape.parameters.iter().filter(|parameter| parameter.required) {
                written += &open(&parameter.key);
                written += PARAMETER_CLOSE;
                written.push('\n');
            }
            written
        };
        let longest = self.shapes.iter().map(of_shape).max_by_key(String::len).unwrap_or_default();
        format!("{}{longest}{END}", start(name))
    }

    /// Most required parameters of a shape.
    pub(super) fn required(&self) -> usize {
        let of_shape =
            |shape: &CallShape| shape.parameters.iter().filter(|parameter| parameter.required).count();
        self.shapes.iter().map(of_shape).max().unwrap_or(0)
    }

    fn written<'a>(&'a self, name: &str, rule_of: impl Fn(&'a Parameter) -> &'a ValueRule) -> String {
        let mut rules = String::new();
        let mut shapes = Vec::new();
        for (number, shape) in self.shapes.iter().enumerate() {
            let mut sequence = String::from("\"\"");
            for (index, parameter) in shape.parameters.iter().enumerate() {
                let id = format!("{number}x{index}");
                let optional = if parameter.required { "" } else { "?" };
                // Writing to a string cannot fail.
                let _ = write!(sequence, " parameter{id}{optional}");
                parameter_rule(&id, &literal(&open(&parameter.key)), rule_of(parameter), &mut rules);
            }
            if let Some(others) = &shape.others {
                let id = format!("{number}xo");
                let taken: Vec<String> =
                    shape.parameters.iter().map(|parameter| literal(&parameter.key)).collect();
                let but =
                    if taken.is_empty() { String::new() } else { format!(" & ~({})", taken.join(" | ")) };
                let _ = writeln!(rules, "KEY{number}: {OTHER_KEY}{but}");
                let _ = write!(sequence, " parameter{id}{{0,64}}");
                let opening =
                    format!("{} KEY{number} {}", literal("<atem:parameter name=\""), literal("\">"));
                parameter_rule(&id, &opening, rule_of(others), &mut rules);
            }
            shapes.push(format!("shape{number}"));
            let _ = writeln!(rules, "shape{number}: {sequence}");
        }
        format!("start: {} ({}) {}\n{rules}", literal(&start(name)), shapes.join(" | "), literal(END))
    }
}

fn parameter_rule(id: &str, opening: &str, rule: &ValueRule, rules: &mut String) {
    let (text, json) = match rule {
        ValueRule::Text => (Some("/(?s:.*)/"), None),
        ValueRule::Terminal(terminal) => (Some(terminal.as_str()), None),
        ValueRule::Json(schema) => (None, Some(schema)),
        ValueRule::Both(terminal, schema) => (Some(terminal.as_str()), Some(schema)),
    };
    let mut ways = Vec::new();
    if let Some(terminal) = text {
        ways.push(format!("text{id} \"\\n\""));
        let _ = writeln!(rules, "text{id}[suffix=\"{PARAMETER_CLOSE}\"]: {terminal}");
    }
    if let Some(schema) = json {
        ways.push(format!("value{id} \"{PARAMETER_CLOSE}\\n\""));
        let _ = writeln!(rules, "value{id}: %json {schema}");
    }
    let _ = writeln!(rules, "parameter{id}: {opening} ({})", ways.join(" | "));
}

const END: &str = "</atem:invoke>\n</atem:function_calls>";

fn start(name: &str) -> String {
    format!("<atem:function_calls>\n<atem:invoke name=\"{name}\">\n")
}

fn open(key: &str) -> String {
    format!("<atem:parameter name=\"{key}\">")
}

struct Planner<'r, 'a> {
    resolver: &'r Resolver<'a>,
    strict: bool,
    /// Bytes of all schemas so far.
    bytes: usize,
    left_out: Vec<Remark>,
}

impl<'a> Planner<'_, 'a> {
    fn shape(&mut self, shape: &Shape<'a>) -> Result<CallShape, Remark> {
        let optional = shape.properties.len().saturating_sub(shape.required.len());
        if optional > MAX_WIDTH || shape.properties.len() > 4 * MAX_WIDTH {
            let what = format!("{optional} optional parameters cannot be enforced; {MAX_WIDTH} can");
            self.unkept(Remark { path: "properties".to_owned(), what })?;
            let others = Parameter::free("", Types::UNKNOWN);
            return Ok(CallShape { parameters: Vec::new(), others: Some(others) });
        }
        let mut parameters = Vec::with_capacity(shape.properties.len());
        for (key, schemas) in &shape.properties {
            let types = self.resolver.types_of_all(schemas);
            let path = path_of(key);
            let cleaned = Cleaner::new(self.resolver, !self.strict).all_of(schemas, &path)?;
            self.left_out.extend(cleaned.left_out);
            let mut parameter = self.parameter(key, types, &cleaned.schema)?;
            parameter.required = shape.required.contains(key);
            parameters.push(parameter);
        }
        let others = match &shape.others {
            None => None,
            Some(schemas) => {
                let types = schemas.iter().map(|schema| self.resolver.types_of(schema)).reduce(Types::join);
                let cleaned =
                    Cleaner::new(self.resolver, !self.strict).any_of(schemas, "additionalProperties")?;
                self.left_out.extend(cleaned.left_out);
                Some(self.parameter("", types.unwrap_or(Types::UNKNOWN), &cleaned.schema)?)
            }
        };
        Ok(CallShape { parameters, others })
    }

    fn parameter(&mut self, key: &str, types: Types, document: &Value) -> Result<Parameter, Remark> {
        let mut parameter = Parameter::free(key, types);
        self.bytes += document.to_string().len();
        if self.bytes > MAX_VALUE_BYTES {
            let what = format!("the schemas of all values have more than {MAX_VALUE_BYTES} bytes");
            self.unkept(Remark { path: parameter.path(), what })?;
            return Ok(parameter);
        }
        let width = widest(document);
        if width > MAX_WIDTH {
            let what = format!("{width} alternatives at one place cannot be enforced; {MAX_WIDTH} can");
            self.unkept(Remark { path: parameter.path(), what })?;
            return Ok(parameter);
        }
        if let Some(rule) = rule(types, document, self.strict) {
            parameter.rule = rule;
        } else {
            let what = "no value that could be written in a call follows the schema".to_owned();
            self.unkept(Remark { path: parameter.path(), what })?;
        }
        parameter.relaxed = without_far_limits(document)
            .and_then(|(relaxed, limit)| Some((rule(types, &relaxed, self.strict)?, limit)));
        Ok(parameter)
    }

    fn unkept(&mut self, remark: Remark) -> Result<(), Remark> {
        if self.strict {
            return Err(remark);
        }
        self.left_out.push(remark);
        Ok(())
    }
}

/// How a value of this document is written; `None`: it cannot be.
fn rule(types: Types, document: &Value, strict: bool) -> Option<ValueRule> {
    let names = types.names_besides_text();
    let json = || json_rule(&names, document, strict);
    if !types.allows_text() {
        return Some(ValueRule::Json(json()));
    }
    match raw_text(document) {
        RawText::Any => Some(ValueRule::Text),
        RawText::Terminal(terminal) if names.is_empty() => Some(ValueRule::Terminal(terminal)),
        RawText::Terminal(terminal) => Some(ValueRule::Both(terminal, json())),
        RawText::Never if names.is_empty() => None,
        RawText::Never => Some(ValueRule::Json(json())),
    }
}

/// A document for JSON of these types only.
fn json_rule(types: &[&str], document: &Value, strict: bool) -> Value {
    let own = document.get("type");
    let narrow = match own {
        Some(Value::String(name)) => types == [name.as_str()],
        Some(Value::Array(names)) => {
            names.iter().all(|name| name.as_str().is_some_and(|name| types.contains(&name)))
        }
        _ => false,
    };
    let mut fields = match document {
        Value::Object(fields) if narrow => fields.clone(),
        Value::Object(fields) => {
            let mut inner = fields.clone();
            let definitions = inner.shift_remove("$defs");
            let mut outer = serde_json::Map::new();
            outer.insert("type".to_owned(), types.into());
            outer.insert("allOf".to_owned(), json!([inner]));
            outer.extend(definitions.map(|definitions| ("$defs".to_owned(), definitions)));
            outer
        }
        _ => serde_json::Map::new(),
    };
    fields.insert("x-guidance".to_owned(), super::compiler_settings(!strict));
    Value::Object(fields)
}

impl Parameter {
    /// A parameter of which only the types are known.
    fn free(key: &str, types: Types) -> Parameter {
        let mut parameter =
            Parameter { key: key.to_owned(), required: false, types, rule: ValueRule::Text, relaxed: None };
        parameter.give_up();
        parameter
    }

    fn give_up(&mut self) {
        self.relaxed = None;
        self.rule = if self.types.allows_text() {
            ValueRule::Text
        } else {
            ValueRule::Json(json_rule(&self.types.names_besides_text(), &json!({}), false))
        };
    }

    /// Where the schema of the value is.
    pub(super) fn path(&self) -> String {
        if self.key.is_empty() { "additionalProperties".to_owned() } else { path_of(&self.key) }
    }
}

fn path_of(key: &str) -> String {
    format!("properties.{key}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[expect(clippy::needless_pass_by_value, reason = "JSON literals read better by value")]
    fn check(schema: Value, expected: ValueRule) {
        let tool = json!({"properties": {"p": schema}, "$defs": {"C": {"enum": ["a", "b"]}, "N": {"type": "integer"}}});
        let plan = CallPlan::new(&tool, true).expect("can be kept");
        let rule = match plan.shapes[0].parameters[0].rule.clone() {
            ValueRule::Json(schema) => ValueRule::Json(without_settings(schema)),
            ValueRule::Both(terminal, schema) => ValueRule::Both(terminal, without_settings(schema)),
            rule => rule,
        };
        assert_eq!(rule, expected, "{schema}");
    }

    fn without_settings(mut schema: Value) -> Value {
        schema.as_object_mut().expect("a document").shift_remove("x-guidance").expect("settings");
        schema
    }

    #[test]
    fn values_are_written_raw_or_as_json() {
        let terminal = |text: &str| ValueRule::Terminal(text.to_owned());
        check(json!({}), ValueRule::Text);
        check(json!({"type": "string"}), ValueRule::Text);
        check(json!({"type": ["string", "null"]}), ValueRule::Text);
        check(json!({"$ref": "#/$defs/C"}), terminal(r#""a" | "b""#));
        check(json!({"const": "zed"}), terminal(r#""zed""#));
        check(
            json!({"type": "integer", "minimum": 1}),
            ValueRule::Json(json!({"type": "integer", "minimum": 1})),
        );
        check(
            json!({"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]}),
            ValueRule::Json(json!({
                "type": ["integer", "null"],
                "allOf": [{"anyOf": [{"$ref": "#/$defs/d0"}, {"type": "null"}]}],
                "$defs": {"d0": {"type": "integer"}},
            })),
        );
        check(
            json!({"enum": ["a", null]}),
            ValueRule::Both(r#""a""#.into(), json!({"type": ["null"], "allOf": [{"enum": ["a", null]}]})),
        );
    }

    #[test]
    fn strictly_what_cannot_be_written_is_refused() {
        let refused =
            |schema: Value| CallPlan::new(&json!({"properties": {"p": schema}}), true).expect_err("refused");
        assert_eq!(refused(json!({"enum": ["x</atem:parameter>"]})).path, "properties.p");
        assert_eq!(refused(json!({"items": {"not": {}}})).path, "properties.p.items");
        let many: serde_json::Map<String, Value> =
            (0..2000).map(|key| (format!("k{key}"), json!({}))).collect();
        assert!(refused(json!({"type": "object", "properties": many})).what.contains("2001 alternatives"));
        let lenient = CallPlan::new(&json!({"properties": many}), false).expect("lenient");
        assert_eq!(lenient.left_out.len(), 1);
        assert!(lenient.shapes[0].others.is_some());
    }
}
