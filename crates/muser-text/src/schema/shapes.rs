//! Which parameters a tool has.
//!
//! A tool's schema is an object, but where it says so differs: at the root, behind a reference, in parts (`allOf`), or as
//! one of several (`anyOf`). A [`Shape`] is one object that it allows.

use super::{MAX_DEPTH, Resolver, list};
use serde_json::{Map, Value};
use std::collections::{BTreeSet, HashMap};

/// The parameters of one object that a tool takes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shape<'a> {
    /// Keys in the order of the schema, each with all schemas that its value must follow; none: any value.
    pub(crate) properties: Vec<(&'a str, Vec<&'a Value>)>,
    /// Where each key is.
    places: HashMap<&'a str, usize>,
    /// Keys that must be there; each is among the properties.
    pub(crate) required: BTreeSet<&'a str>,
    /// Schemas of which one holds for the value of a key that is not named; `None`: no other keys.
    pub(crate) others: Option<Vec<&'a Value>>,
}

/// More shapes than this are merged into one that takes what any of them takes.
const MAX_SHAPES: usize = 16;

/// Steps of one walk: a schema of references that branch is endless otherwise.
const MAX_STEPS: usize = 512;

/// The objects that a schema allows, at least one.
pub(crate) fn shapes<'a>(resolver: &Resolver<'a>, schema: &'a Value) -> Vec<Shape<'a>> {
    let mut shapes = shapes_at(resolver, schema, 0, &mut MAX_STEPS.clone());
    for shape in &mut shapes {
        for key in shape.required.clone() {
            shape.add(key, &[]);
        }
    }
    shapes
}

fn shapes_at<'a>(
    resolver: &Resolver<'a>,
    schema: &'a Value,
    depth: usize,
    steps: &mut usize,
) -> Vec<Shape<'a>> {
    let Some(fields) = schema.as_object().filter(|_| depth <= MAX_DEPTH && *steps > 0) else {
        return vec![Shape::default()];
    };
    *steps -= 1;
    let mut shapes = vec![own(fields)];
    let target = fields.get("$ref").and_then(Value::as_str).and_then(|reference| resolver.target(reference));
    for part in target.into_iter().chain(list(fields, "allOf")) {
        shapes = both(&shapes, &shapes_at(resolver, part, depth + 1, steps));
    }
    for key in ["anyOf", "oneOf"] {
        let mut choices = Vec::new();
        // Branches that are no object at all say nothing about arguments.
        for choice in list(fields, key).iter().filter(|choice| resolver.types_of(choice).allows_object()) {
            choices.extend(shapes_at(resolver, choice, depth + 1, steps));
        }
        if !choices.is_empty() {
            shapes = both(&shapes, &few(choices));
        }
    }
    few(shapes)
}

/// What the schema says itself.
fn own(fields: &Map<String, Value>) -> Shape<'_> {
    let properties = fields.get("properties").and_then(Value::as_object);
    let patterns = fields.get("patternProperties").and_then(Value::as_object);
    let mut others: Vec<&Value> = patterns.into_iter().flat_map(Map::values).collect();
    // Many schemas leave it out and mean no others.
    if let Some(schema @ (Value::Object(_) | Value::Bool(true))) = fields.get("additionalProperties") {
        others.push(schema);
    }
    let mut shape = Shape {
        required: list(fields, "required").iter().filter_map(Value::as_str).collect(),
        others: (!others.is_empty()).then_some(others),
        ..Shape::default()
    };
    for (key, schema) in properties.into_iter().flatten() {
        shape.add(key, &[schema]);
    }
    shape
}

/// Objects that are of one shape of each list.
fn both<'a>(left: &[Shape<'a>], right: &[Shape<'a>]) -> Vec<Shape<'a>> {
    let pairs = left.iter().flat_map(|one| right.iter().map(move |other| one.with(other)));
    few(pairs.collect())
}

impl<'a> Shape<'a> {
    /// Adds schemas to those of a key.
    fn add(&mut self, key: &'a str, schemas: &[&'a Value]) {
        let place = *self.places.entry(key).or_insert(self.properties.len());
        if place == self.properties.len() {
            self.properties.push((key, Vec::new()));
        }
        self.properties[place].1.extend(schemas);
    }

    fn with(&self, other: &Shape<'a>) -> Shape<'a> {
        let mut merged = self.clone();
        for (key, schemas) in &other.properties {
            merged.add(key, schemas);
        }
        merged.required.extend(&other.required);
        if let Some(others) = &other.others {
            merged.others.get_or_insert_default().extend(others);
        }
        merged
    }

    /// An object of either shape; of a key that both know nothing is known for certain.
    fn or(mut self, other: &Shape<'a>) -> Shape<'a> {
        self.required.retain(|key| other.required.contains(key));
        for (key, schemas) in &other.properties {
            match self.places.get(key) {
                Some(place) => {
                    let known = &mut self.properties[*place].1;
                    if known != schemas {
                        known.clear();
                    }
                }
                None => self.add(key, schemas),
            }
        }
        if let Some(others) = &other.others {
            self.others.get_or_insert_default().extend(others);
        }
        self
    }
}

fn few(shapes: Vec<Shape<'_>>) -> Vec<Shape<'_>> {
    if shapes.len() <= MAX_SHAPES {
        return shapes;
    }
    shapes.into_iter().reduce(|one, other| one.or(&other)).into_iter().collect()
}
