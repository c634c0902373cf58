//! JSON schemas of tools, read in one way by all who need them: the grammar of calls, the parser of calls and the checks
//! at the door.
//!
//! [`Resolver`] follows references, [`types_of`](Resolver::types_of) says which JSON types a schema allows, and
//! [`shapes`] which parameters a tool has, wherever the schema says so. Schemas come from strangers: all walks are
//! bounded, and what is not understood means "anything".

mod shapes;
mod types;

pub(crate) use shapes::{Shape, shapes};
pub(crate) use types::Types;

use serde_json::{Map, Value};
use std::cell::OnceCell;
use std::collections::HashMap;

/// Nested schemas and references are followed this deep.
const MAX_DEPTH: usize = 16;

/// Follows references inside one schema.
pub(crate) struct Resolver<'a> {
    root: &'a Value,
    /// Schemas by `$id` and `#$anchor`.
    named: OnceCell<HashMap<String, &'a Value>>,
}

impl<'a> Resolver<'a> {
    pub(crate) fn new(root: &'a Value) -> Resolver<'a> {
        Resolver { root, named: OnceCell::new() }
    }

    /// What a `$ref` means: a pointer into the schema, an anchor, or the `$id` of a part of it. Nothing is fetched.
    pub(crate) fn target(&self, reference: &str) -> Option<&'a Value> {
        let (base, fragment) = reference.split_once('#').unwrap_or((reference, ""));
        let document = if base.is_empty() { self.root } else { self.named(base)? };
        let fragment = percent_decoded(fragment)?;
        if fragment.is_empty() {
            return Some(document);
        }
        if fragment.starts_with('/') {
            let target = document.pointer(&fragment);
            // A lone slash is how some tools write the root.
            return if fragment == "/" { target.or(Some(document)) } else { target };
        }
        self.named(&format!("#{fragment}"))
    }

    fn named(&self, name: &str) -> Option<&'a Value> {
        let named = self.named.get_or_init(|| {
            let mut named = HashMap::new();
            collect_names(self.root, &mut named);
            named
        });
        named.get(name).copied()
    }

    /// The end of a chain of schemas that are nothing but references; `None` if one leads nowhere or round in a circle.
    pub(crate) fn end_of_chain(&self, schema: &'a Value) -> Option<&'a Value> {
        let mut here = schema;
        for _ in 0..MAX_DEPTH {
            let Some(fields) = here.as_object() else { return Some(here) };
            let Some(reference) = fields.get("$ref").and_then(Value::as_str) else { return Some(here) };
            if fields.keys().any(|key| key != "$ref" && !is_annotation(key)) {
                return Some(here);
            }
            here = self.target(reference)?;
        }
        None
    }
}

fn collect_names<'a>(value: &'a Value, named: &mut HashMap<String, &'a Value>) {
    match value {
        Value::Object(fields) => {
            for (key, prefix) in [("$anchor", "#"), ("$dynamicAnchor", "#"), ("$id", ""), ("id", "")] {
                if let Some(name) = fields.get(key).and_then(Value::as_str) {
                    let name = format!("{prefix}{}", name.trim_end_matches('#'));
                    named.entry(name).or_insert(value);
                }
            }
            fields.values().for_each(|value| collect_names(value, named));
        }
        Value::Array(items) => items.iter().for_each(|item| collect_names(item, named)),
        _ => {}
    }
}

fn percent_decoded(text: &str) -> Option<String> {
    if !text.contains('%') {
        return Some(text.to_owned());
    }
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        if let (b'%', [high, low, after @ ..]) = (byte, after) {
            let digits = [*high, *low];
            bytes.push(u8::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()?);
            rest = after;
        } else {
            bytes.push(byte);
            rest = after;
        }
    }
    String::from_utf8(bytes).ok()
}

/// Does the keyword say nothing about the value?
pub(crate) fn is_annotation(key: &str) -> bool {
    const ANNOTATIONS: [&str; 19] = [
        "$anchor",
        "$comment",
        "$defs",
        "$id",
        "$schema",
        "$vocabulary",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "default",
        "definitions",
        "deprecated",
        "description",
        "example",
        "examples",
        "id",
        "readOnly",
        "title",
        "writeOnly",
    ];
    ANNOTATIONS.contains(&key)
}

/// The schemas that a keyword with a list of them holds.
pub(crate) fn list<'a>(fields: &'a Map<String, Value>, key: &str) -> &'a [Value] {
    fields.get(key).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default()
}

#[cfg(test)]
mod tests;
