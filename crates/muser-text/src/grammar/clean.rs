//! Schemas as the compiler takes them.
//!
//! What comes from clients has annotations, references of all kinds, keywords of several drafts and keywords that no
//! grammar can keep. What comes out is a document of its own with the keywords that are kept, its references pointing into
//! its own `$defs`. A keyword that cannot be kept is a fault of a schema that must be kept, and left out of one that
//! need not; then it is noted.

use super::patterns;
use crate::error::shown;
use crate::schema::{Resolver, is_annotation, list};
use serde_json::{Map, Value, json};
use std::collections::HashMap;

/// Something that is not kept, or cannot be: where in the schema, and what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Remark {
    /// As in `properties.a.items`; empty at the root.
    pub(crate) path: String,
    pub(crate) what: String,
}

/// A document for the compiler, and what it does not keep.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cleaned {
    pub(crate) schema: Value,
    pub(crate) left_out: Vec<Remark>,
}

/// Limits beyond this are no limits: no text gets that long.
const NO_LIMIT: u64 = 1_000_000;

/// More remarks than this are not kept.
const MAX_REMARKS: usize = 20;

pub(crate) struct Cleaner<'r, 'a> {
    resolver: &'r Resolver<'a>,
    /// Leave out what cannot be kept.
    lenient: bool,
    /// Names of the definitions by the address of what they define.
    names: HashMap<usize, String>,
    pending: Vec<(String, &'a Value, String)>,
    left_out: Vec<Remark>,
}

impl<'r, 'a> Cleaner<'r, 'a> {
    pub(crate) fn new(resolver: &'r Resolver<'a>, lenient: bool) -> Cleaner<'r, 'a> {
        Cleaner { resolver, lenient, names: HashMap::new(), pending: Vec::new(), left_out: Vec::new() }
    }

    /// A document for values that follow all of `schemas`, at this path.
    pub(crate) fn all_of(mut self, schemas: &[&'a Value], path: &str) -> Result<Cleaned, Remark> {
        let mut parts: Vec<Value> =
            schemas.iter().map(|schema| self.schema(schema, path)).collect::<Result<_, _>>()?;
        let root = if parts.len() == 1 { parts.remove(0) } else { json!({"allOf": parts}) };
        self.document(if schemas.is_empty() { json!({}) } else { root })
    }

    /// A document for values that follow one of `schemas`.
    pub(crate) fn any_of(mut self, schemas: &[&'a Value], path: &str) -> Result<Cleaned, Remark> {
        let parts: Vec<Value> =
            schemas.iter().map(|schema| self.schema(schema, path)).collect::<Result<_, _>>()?;
        self.document(json!({"anyOf": parts}))
    }

    fn document(mut self, root: Value) -> Result<Cleaned, Remark> {
        let mut definitions = Map::new();
        while let Some((name, target, path)) = self.pending.pop() {
            let cleaned = self.schema(target, &path)?;
            definitions.insert(name, cleaned);
        }
        let mut document = match root {
            Value::Object(fields) => fields,
            Value::Bool(true) => Map::new(),
            // Nothing fits; as an object, so that settings can be added.
            other => Map::from_iter([("allOf".to_owned(), json!([other]))]),
        };
        if !definitions.is_empty() {
            document.insert("$defs".to_owned(), definitions.into());
        }
        Ok(Cleaned { schema: Value::Object(document), left_out: self.left_out })
    }

    fn schema(&mut self, schema: &'a Value, path: &str) -> Result<Value, Remark> {
        let fields = match schema {
            Value::Object(fields) => fields,
            Value::Bool(value) => return Ok(Value::Bool(*value)),
            _ => {
                self.unkept(path, || "a schema must be an object, true or false".to_owned())?;
                return Ok(json!({}));
            }
        };
        let mut out = Map::new();
        for (key, value) in fields {
            self.keyword(fields, key, value, path, &mut out)?;
        }
        let cleaned = Value::Object(out);
        Ok(match fields.get("nullable") {
            Some(Value::Bool(true)) => json!({"anyOf": [cleaned, {"type": "null"}]}),
            _ => cleaned,
        })
    }

    fn keyword(
        &mut self,
        fields: &'a Map<String, Value>,
        key: &'a str,
        value: &'a Value,
        path: &str,
        out: &mut Map<String, Value>,
    ) -> Result<(), Remark> {
        let mut keep = |value: Value| {
            out.insert(key.to_owned(), value);
        };
        match key {
            "const" => keep(value.clone()),
            // A keyword without a value is one that is not there.
            _ if value.is_null() || is_annotation(key) => {}
            "enum" => match value.as_array() {
                Some(values) if !values.is_empty() => keep(value.clone()),
                _ => self.wrong(path, key, "a list of values")?,
            },
            "$ref" => {
                if let Some(name) = self.reference(value, path)? {
                    keep(format!("#/$defs/{name}").into());
                }
            }
            "type" => {
                if let Some(types) = self.types(value, path)? {
                    keep(types);
                }
            }
            "properties" | "patternProperties" => keep(self.map(key, value, path)?),
            "items" | "prefixItems" if value.is_array() => keep(self.list(value, &at(path, key))?.into()),
            "allOf" | "anyOf" | "oneOf" => match value.as_array() {
                Some(parts) if !parts.is_empty() => keep(self.list(value, &at(path, key))?.into()),
                _ => self.wrong(path, key, "a list of schemas")?,
            },
            "items" | "additionalItems" | "additionalProperties" => keep(self.schema(value, &at(path, key))?),
            "unevaluatedProperties" if *value == Value::Bool(false) && stands_alone(fields) => {
                out.entry("additionalProperties").or_insert(Value::Bool(false));
            }
            "required" => {
                let names = value.as_array().into_iter().flatten().filter(|name| name.is_string());
                keep(names.cloned().collect());
            }
            "pattern" => match value.as_str().map(patterns::whole) {
                Some(Ok(_)) => keep(value.clone()),
                Some(Err(what)) => self.unkept(&at(path, key), || what)?,
                None => self.wrong(path, key, "a string")?,
            },
            "format" => {
                if value.as_str().is_some_and(|name| patterns::format(name).is_some()) {
                    keep(value.clone());
                }
            }
            "minLength" | "maxLength" | "minItems" | "maxItems" | "minProperties" | "maxProperties" => {
                match count(value) {
                    Some(count) if count > NO_LIMIT && key.starts_with("max") => {}
                    Some(count) if count > NO_LIMIT => self.unkept(path, || not_kept(key))?,
                    Some(_)
                        if self.lenient
                            && key.ends_with("Properties")
                            && fields.contains_key("properties") =>
                    {
                        self.unkept(path, || not_kept(key))?;
                    }
                    Some(count) => keep(count.into()),
                    None => self.wrong(path, key, "a whole number from 0")?,
                }
            }
            "exclusiveMinimum" | "exclusiveMaximum" if value.is_boolean() => keep(value.clone()),
            "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" | "multipleOf" => {
                if value.is_number() { keep(value.clone()) } else { self.wrong(path, key, "a number")? }
            }
            _ if says_nothing(fields, key, value) => {}
            _ => self.unkept(path, || not_kept(key))?,
        }
        Ok(())
    }

    fn map(&mut self, key: &str, value: &'a Value, path: &str) -> Result<Value, Remark> {
        let mut out = Map::new();
        let Some(schemas) = value.as_object() else {
            self.wrong(path, key, "an object of schemas")?;
            return Ok(json!({}));
        };
        for (name, schema) in schemas {
            let here = format!("{}.{name}", at(path, key));
            if key == "patternProperties"
                && let Err(what) = patterns::whole(name)
            {
                self.unkept(&here, || what)?;
                continue;
            }
            let cleaned = self.schema(schema, &here)?;
            out.insert(name.clone(), cleaned);
        }
        Ok(Value::Object(out))
    }

    fn list(&mut self, value: &'a Value, path: &str) -> Result<Vec<Value>, Remark> {
        let parts = value.as_array().into_iter().flatten().enumerate();
        parts.map(|(index, part)| self.schema(part, &format!("{path}[{index}]"))).collect()
    }

    /// The name of the definition that a reference means.
    fn reference(&mut self, value: &'a Value, path: &str) -> Result<Option<String>, Remark> {
        let path = at(path, "$ref");
        let reference = value.as_str().unwrap_or_default();
        let Some(target) = self.resolver.target(reference) else {
            self.unkept(&path, || {
                format!("{} is not in the schema, and nothing is fetched", shown(reference))
            })?;
            return Ok(None);
        };
        if self.resolver.end_of_chain(target).is_none() {
            self.unkept(&path, || format!("{} refers to nothing but itself", shown(reference)))?;
            return Ok(None);
        }
        let address = std::ptr::from_ref(target) as usize;
        if let Some(name) = self.names.get(&address) {
            return Ok(Some(name.clone()));
        }
        let name = format!("d{}", self.names.len());
        self.names.insert(address, name.clone());
        let target_path = reference.trim_start_matches("#/").replace('/', ".");
        self.pending.push((name.clone(), target, target_path));
        Ok(Some(name))
    }

    fn types(&mut self, value: &'a Value, path: &str) -> Result<Option<Value>, Remark> {
        const TYPES: [&str; 7] = ["null", "boolean", "integer", "number", "string", "array", "object"];
        let known = |name: &Value| name.as_str().is_some_and(|name| TYPES.contains(&name));
        let right = match value {
            Value::Array(names) => !names.is_empty() && names.iter().all(known),
            name => known(name),
        };
        if !right {
            let found = value.as_str().map_or_else(|| shown(&value.to_string()), shown);
            self.unkept(&at(path, "type"), || format!("{found} is no type of JSON"))?;
        }
        Ok(right.then(|| value.clone()))
    }

    fn wrong(&mut self, path: &str, key: &str, expected: &str) -> Result<(), Remark> {
        self.unkept(&at(path, key), || format!("expected {expected}"))
    }

    fn unkept(&mut self, path: &str, what: impl FnOnce() -> String) -> Result<(), Remark> {
        let remark = Remark { path: path.to_owned(), what: what() };
        if !self.lenient {
            return Err(remark);
        }
        if self.left_out.len() < MAX_REMARKS {
            self.left_out.push(remark);
        }
        Ok(())
    }
}

fn at(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

fn not_kept(key: &str) -> String {
    format!("'{key}' cannot be enforced")
}

/// Whole numbers, also those written as `5.0`.
fn count(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| {
        let number = value.as_f64()?;
        (number >= 0.0 && number.fract() == 0.0).then_some(number as u64)
    })
}

/// Is no other schema combined with this one?
fn stands_alone(fields: &Map<String, Value>) -> bool {
    !["$ref", "allOf", "anyOf", "oneOf", "if"].iter().any(|key| fields.contains_key(*key))
}

/// Keywords that the standard knows but that do not narrow anything as they stand, and those that it does not know.
fn says_nothing(fields: &Map<String, Value>, key: &str, value: &Value) -> bool {
    const NARROW: [&str; 16] = [
        "$dynamicRef",
        "$recursiveRef",
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "maxContains",
        "minContains",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    ];
    match key {
        "uniqueItems" => *value == Value::Bool(false),
        "unevaluatedProperties" | "unevaluatedItems" => *value == Value::Bool(true),
        "if" => !fields.contains_key("then") && !fields.contains_key("else"),
        "then" | "else" | "minContains" | "maxContains" => true,
        "dependencies" | "dependentRequired" | "dependentSchemas" => {
            value.as_object().is_some_and(Map::is_empty)
        }
        "propertyNames" => match value {
            Value::Bool(true) => true,
            // A name is a string anyway.
            Value::Object(names) => names.iter().all(|(key, value)| {
                is_annotation(key)
                    || (key == "type" && *value == "string")
                    || (key == "minLength" && *value == 0)
            }),
            _ => false,
        },
        _ => !NARROW.contains(&key),
    }
}

/// How many alternatives the compiler has to keep apart at once: properties that may come next, over all branches.
pub(crate) fn widest(document: &Value) -> usize {
    let mut widest = 0;
    let mut open = vec![document];
    while let Some(schema) = open.pop() {
        match schema {
            Value::Object(fields) => {
                widest = widest.max(width(document, schema, 0, &mut 4096));
                open.extend(
                    fields
                        .iter()
                        .filter(|(key, _)| !matches!(key.as_str(), "enum" | "const"))
                        .map(|(_, value)| value),
                );
            }
            Value::Array(items) => open.extend(items),
            _ => {}
        }
    }
    widest
}

fn width(document: &Value, schema: &Value, depth: usize, steps: &mut usize) -> usize {
    let Some(fields) = schema.as_object().filter(|_| depth < 8 && *steps > 0) else { return 1 };
    *steps -= 1;
    let properties = fields.get("properties").and_then(Value::as_object).map_or(0, Map::len);
    let required = list(fields, "required").len().min(properties);
    let own = 1 + properties - required;
    let choices: usize = ["anyOf", "oneOf"]
        .iter()
        .flat_map(|key| list(fields, key))
        .map(|choice| width(document, choice, depth + 1, steps))
        .sum();
    let mut parts = own;
    for part in list(fields, "allOf") {
        parts = parts.max(width(document, part, depth + 1, steps));
    }
    let target =
        fields.get("$ref").and_then(Value::as_str).and_then(|reference| document.pointer(&reference[1..]));
    let target = target.map_or(0, |target| width(document, target, depth + 1, steps));
    parts.max(target) * choices.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[expect(clippy::needless_pass_by_value, reason = "JSON literals read better by value")]
    fn check(schema: Value, expected: Value, left_out: &[(&str, &str)]) {
        let resolver = Resolver::new(&schema);
        let cleaned = Cleaner::new(&resolver, true).all_of(&[&schema], "").expect("lenient");
        assert_eq!(cleaned.schema, expected, "{schema}");
        let seen: Vec<(&str, &str)> =
            cleaned.left_out.iter().map(|remark| (remark.path.as_str(), remark.what.as_str())).collect();
        assert_eq!(seen, left_out, "{schema}");
        let strict = Cleaner::new(&resolver, false).all_of(&[&schema], "");
        match left_out.first() {
            None => assert_eq!(strict.expect("nothing is left out").schema, expected),
            Some((path, _)) => assert_eq!(strict.expect_err("refused").path, *path),
        }
    }

    #[test]
    fn what_cannot_be_kept_is_left_out_and_noted() {
        let unkept = |key: &str, value: Value| {
            let what = format!("'{key}' cannot be enforced");
            check(json!({"type": "object", (key): value}), json!({"type": "object"}), &[("", &what)]);
        };
        unkept("propertyNames", json!({"pattern": "^a"}));
        unkept("not", json!({"type": "null"}));
        unkept("contains", json!({"type": "null"}));
        unkept("dependentRequired", json!({"a": ["b"]}));
        unkept("dependentSchemas", json!({"a": {}}));
        unkept("dependencies", json!({"a": ["b"]}));
        unkept("unevaluatedProperties", json!({"type": "string"}));
        unkept("unevaluatedItems", json!(false));
        unkept("uniqueItems", json!(true));
        unkept("$dynamicRef", json!("#x"));
        check(
            json!({"if": {"type": "null"}, "then": {}, "else": {}}),
            json!({}),
            &[("", "'if' cannot be enforced")],
        );
        check(
            json!({"properties": {"a": {"pattern": "(?=x)", "type": "string"}}}),
            json!({"properties": {"a": {"type": "string"}}}),
            &[(
                "properties.a.pattern",
                "the pattern is none that can be kept (look-around and back-references cannot)",
            )],
        );
        check(
            json!({"items": {"type": "any"}}),
            json!({"items": {}}),
            &[("items.type", "\"any\" is no type of JSON")],
        );
        check(
            json!({"$ref": "https://x.example/y"}),
            json!({}),
            &[("$ref", "\"https://x.example/y\" is not in the schema, and nothing is fetched")],
        );
        check(
            json!({"$defs": {"l": {"$ref": "#/$defs/l"}}, "$ref": "#/$defs/l"}),
            json!({}),
            &[("$ref", "\"#/$defs/l\" refers to nothing but itself")],
        );
        check(json!({"minLength": "a"}), json!({}), &[("minLength", "expected a whole number from 0")]);
        check(json!({"anyOf": []}), json!({}), &[("anyOf", "expected a list of schemas")]);
    }

    #[test]
    fn what_says_nothing_goes_without_a_word() {
        let nothing = json!({
            "$schema": "x", "title": "t", "description": "d", "default": 1, "examples": [1], "discriminator": {},
            "format": "path", "uniqueItems": false, "propertyNames": {"type": "string"}, "properties": null,
            "required": null, "if": {}, "maxLength": 1_000_000_000_000_u64, "x-order": 3, "nullable": false,
        });
        check(nothing, json!({}), &[]);
        check(
            json!({"properties": {}, "unevaluatedProperties": false, "minItems": 2.0}),
            json!({"properties": {}, "additionalProperties": false, "minItems": 2}),
            &[],
        );
    }

    #[test]
    fn references_and_nullable_are_written_in_one_way() {
        check(
            json!({"$defs": {"a/b": {"type": "array", "items": {"$ref": "#/$defs/a~1b"}}}, "$ref": "#/$defs/a~1b"}),
            json!({"$ref": "#/$defs/d0", "$defs": {"d0": {"type": "array", "items": {"$ref": "#/$defs/d0"}}}}),
            &[],
        );
        check(
            json!({"type": "string", "enum": ["a"], "nullable": true}),
            json!({"anyOf": [{"type": "string", "enum": ["a"]}, {"type": "null"}]}),
            &[],
        );
    }

    #[test]
    fn width_is_what_is_open_at_once() {
        let object = |keys: usize| {
            let properties: Map<String, Value> =
                (0..keys).map(|key| (format!("k{key}"), json!({}))).collect();
            json!({"properties": properties})
        };
        assert_eq!(widest(&json!({"items": object(5)})), 6);
        assert_eq!(widest(&json!({"anyOf": [object(5), object(7), {"type": "null"}]})), 15);
        assert_eq!(widest(&json!({"$ref": "#/$defs/d0", "$defs": {"d0": object(3)}})), 4);
        assert_eq!(widest(&json!({"enum": [object(9)]})), 1);
    }
}
