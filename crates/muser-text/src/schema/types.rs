//! Which JSON types a schema allows.

use super::{MAX_DEPTH, Resolver, list};
use serde_json::{Map, Value};

/// Set of JSON types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Types(u8);

const NAMES: [(&str, u8); 7] = [
    ("string", STRING),
    ("integer", INTEGER),
    ("number", NUMBER | INTEGER),
    ("boolean", BOOL),
    ("null", NULL),
    ("array", ARRAY),
    ("object", OBJECT),
];

const STRING: u8 = 1;
const INTEGER: u8 = 2;
const NUMBER: u8 = 4;
const BOOL: u8 = 8;
const NULL: u8 = 16;
const ARRAY: u8 = 32;
const OBJECT: u8 = 64;
const ALL: u8 = 127;

/// Steps of one walk: a schema of references that branch is endless otherwise.
const MAX_STEPS: usize = 4096;

impl Types {
    /// The schema says nothing.
    pub(crate) const UNKNOWN: Types = Types(0);

    /// Is it text whatever it looks like?
    pub(crate) fn is_text(self) -> bool {
        self.0 == STRING
    }

    /// May it be text? If nothing is known it may.
    pub(crate) fn allows_text(self) -> bool {
        self.0 == 0 || self.0 & STRING != 0
    }

    /// May it be an object? If nothing is known it may.
    pub(crate) fn allows_object(self) -> bool {
        self.0 == 0 || self.0 & OBJECT != 0
    }

    /// The names of the types besides text; if nothing is known, all of them.
    #[cfg(feature = "grammar")]
    pub(crate) fn names_besides_text(self) -> Vec<&'static str> {
        let set = if self.0 == 0 { ALL } else { self.0 };
        let mut names = Vec::new();
        for (name, bits) in &NAMES[1..] {
            // A number is an integer too, so one name is enough.
            let covered = *name == "integer" && set & NUMBER != 0;
            if set & bits == *bits && !covered {
                names.push(*name);
            }
        }
        names
    }

    /// The types of both.
    pub(crate) fn meet(self, other: Types) -> Types {
        match (self.0, other.0) {
            (0, other) => Types(other),
            (own, 0) => Types(own),
            // What contradicts itself says nothing that could be kept.
            (own, other) => Types(own & other),
        }
    }

    /// The types of either.
    pub(crate) fn join(self, other: Types) -> Types {
        if self.0 == 0 || other.0 == 0 { Types::UNKNOWN } else { Types(self.0 | other.0) }
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
            Value::Number(number) if number.is_f64() => NUMBER,
            Value::String(_) => 0,
            other => of_value(other),
        };
        self.0 & of_value != 0
    }
}

fn of_value(value: &Value) -> u8 {
    match value {
        Value::Null => NULL,
        Value::Bool(_) => BOOL,
        Value::Number(_) => NUMBER | INTEGER,
        Value::String(_) => STRING,
        Value::Array(_) => ARRAY,
        Value::Object(_) => OBJECT,
    }
}

impl Resolver<'_> {
    /// The types that a schema allows.
    pub(crate) fn types_of(&self, schema: &Value) -> Types {
        self.types_at(schema, 0, &mut MAX_STEPS.clone())
    }

    /// The types that all of some schemas allow.
    pub(crate) fn types_of_all(&self, schemas: &[&Value]) -> Types {
        schemas.iter().fold(Types::UNKNOWN, |types, schema| types.meet(self.types_of(schema)))
    }

    fn types_at(&self, schema: &Value, depth: usize, steps: &mut usize) -> Types {
        let Some(fields) = schema.as_object() else { return Types::UNKNOWN };
        if depth > MAX_DEPTH || *steps == 0 {
            return Types::UNKNOWN;
        }
        *steps -= 1;
        let mut types = declared(fields);
        if let Some(target) =
            fields.get("$ref").and_then(Value::as_str).and_then(|reference| self.target(reference))
        {
            types = types.meet(self.types_at(target, depth + 1, steps));
        }
        for part in list(fields, "allOf") {
            types = types.meet(self.types_at(part, depth + 1, steps));
        }
        for key in ["anyOf", "oneOf"] {
            let choices = list(fields, key).iter().map(|choice| self.types_at(choice, depth + 1, steps));
            if let Some(union) = choices.reduce(Types::join) {
                types = types.meet(union);
            }
        }
        if types == Types::UNKNOWN {
            types = implied(fields);
        }
        if fields.get("nullable") == Some(&Value::Bool(true)) && types != Types::UNKNOWN {
            types = Types(types.0 | NULL);
        }
        types
    }
}

/// What `type`, `enum` and `const` say.
fn declared(fields: &Map<String, Value>) -> Types {
    let by_name = |name: &Value| {
        let found = NAMES.iter().find(|(known, _)| name.as_str() == Some(known));
        Types(found.map_or(0, |(_, bits)| *bits))
    };
    let mut types = match fields.get("type") {
        Some(Value::Array(names)) => names.iter().map(by_name).reduce(Types::join).unwrap_or(Types::UNKNOWN),
        Some(name) => by_name(name),
        None => Types::UNKNOWN,
    };
    let union = |values: &[Value]| Types(values.iter().map(of_value).fold(0, |union, types| union | types));
    if let Some(values) = fields.get("enum").and_then(Value::as_array) {
        types = types.meet(union(values));
    }
    if let Some(value) = fields.get("const") {
        types = types.meet(union(std::slice::from_ref(value)));
    }
    types
}

/// What keywords for one type tell about a schema that says nothing else: whoever lists properties means an object.
fn implied(fields: &Map<String, Value>) -> Types {
    const IMPLIED: [(u8, &[&str]); 2] = [
        (OBJECT, &["properties", "patternProperties", "required"]),
        (ARRAY, &["items", "prefixItems", "minItems", "maxItems"]),
    ];
    if ["$ref", "allOf", "anyOf", "oneOf", "type"].iter().any(|key| fields.contains_key(*key)) {
        return Types::UNKNOWN;
    }
    let holds = |keys: &[&str]| {
        keys.iter().any(|key| fields.get(*key).is_some_and(|value| value.is_object() || value.is_array()))
    };
    let found = IMPLIED.iter().find(|(_, keys)| holds(keys));
    Types(found.map_or(0, |(types, _)| *types))
}
