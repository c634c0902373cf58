//! The fields of request bodies, as tables.
//!
//! One table per route says what each field is and what becomes of it. The same table checks bodies at the door
//! (so that a wrong type is a 400 that names the field), finds the unknown fields that are worth a line in the
//! log, and is printed into `docs/api.md` and `/openapi.json` ([`crate::describe`]). The invariant: after
//! [`check`] the typed getters of [`Body`] cannot disagree with the table.

use serde_json::{Map, Value};

use crate::error::ApiError;

/// What becomes of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Support {
    /// Acted upon, and must be there.
    Required,
    /// Acted upon.
    Supported,
    /// Accepted in any form and without effect.
    Ignored,
    /// A 400 unless absent, null, false or empty.
    Refused,
}

/// What values a field takes.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    /// `true` or `false`.
    Bool,
    /// A string.
    Text,
    /// A whole number; `3.0` counts.
    Integer {
        /// Smallest value.
        min: i64,
        /// Largest value.
        max: i64,
    },
    /// A whole number of 64 bits, with or without sign.
    Seed,
    /// A finite number.
    Number {
        /// Smallest value.
        min: f64,
        /// Largest value.
        max: f64,
    },
    /// One of a few words.
    OneOf(&'static [&'static str]),
    /// A list.
    List(&'static Kind),
    /// An object with a table of its own.
    Object(&'static [Field]),
    /// An object with free keys.
    Map,
    /// Any of these.
    Either(&'static [Kind]),
    /// Anything; the route looks at it itself.
    Any,
}

/// One field of a body.
#[derive(Debug, Clone, Copy)]
pub struct Field {
    /// The key.
    pub name: &'static str,
    /// Its values.
    pub kind: Kind,
    /// What becomes of it.
    pub support: Support,
    /// For the documentation.
    pub note: &'static str,
}

impl Field {
    /// A field that must be there.
    pub const fn required(name: &'static str, kind: Kind, note: &'static str) -> Self {
        Self { name, kind, support: Support::Required, note }
    }

    /// A field that may be there.
    pub const fn optional(name: &'static str, kind: Kind, note: &'static str) -> Self {
        Self { name, kind, support: Support::Supported, note }
    }

    /// A field without effect.
    pub const fn ignored(name: &'static str, note: &'static str) -> Self {
        Self { name, kind: Kind::Any, support: Support::Ignored, note }
    }

    /// A field that is refused.
    pub const fn refused(name: &'static str, note: &'static str) -> Self {
        Self { name, kind: Kind::Any, support: Support::Refused, note }
    }
}

/// Any whole number from zero.
pub const COUNT: Kind = Kind::Integer { min: 0, max: u32::MAX as i64 };
/// Any whole number.
pub const INTEGER: Kind = Kind::Integer { min: i64::MIN, max: i64::MAX };

/// Checks a body against its table. Unknown keys are not a fault; they are returned.
pub fn check(table: &[Field], body: &Map<String, Value>) -> Result<Vec<String>, ApiError> {
    let mut unknown = Vec::new();
    check_object(table, body, "", &mut unknown)?;
    Ok(unknown)
}

fn check_object(
    table: &[Field],
    body: &Map<String, Value>,
    path: &str,
    unknown: &mut Vec<String>,
) -> Result<(), ApiError> {
    for field in table {
        let value = body.get(field.name).filter(|value| !value.is_null());
        let here = join(path, field.name);
        match (value, field.support) {
            (None, Support::Required) => {
                let mut fault = ApiError::field(&here, format!("Missing required field '{here}'"));
                fault.code = Some("missing_required_parameter");
                return Err(fault);
            }
            (None, _) | (Some(_), Support::Ignored) => {}
            (Some(value), Support::Refused) => {
                if !is_blank(value) {
                    return Err(ApiError::unsupported(
                        &here,
                        format!("'{here}' is not supported: {}", field.note),
                    ));
                }
            }
            (Some(value), _) => check_value(field.kind, value, &here, unknown)?,
        }
    }
    for key in body.keys() {
        if unknown.len() < 32 && !table.iter().any(|field| field.name == key) {
            unknown.push(join(path, key));
        }
    }
    Ok(())
}

fn check_value(kind: Kind, value: &Value, path: &str, unknown: &mut Vec<String>) -> Result<(), ApiError> {
    let wrong = || {
        let found = describe_value(value);
        Err(ApiError::field(
            path,
            format!("Invalid value for '{path}': expected {}, found {found}", kind.describe()),
        ))
    };
    match kind {
        Kind::Any => Ok(()),
        Kind::Bool => value.as_bool().map_or_else(wrong, |_| Ok(())),
        Kind::Text => value.as_str().map_or_else(wrong, |_| Ok(())),
        Kind::Map => value.as_object().map_or_else(wrong, |_| Ok(())),
        Kind::Integer { min, max } => match whole(value) {
            Some(number) if (min..=max).contains(&number) => Ok(()),
            _ => wrong(),
        },
        Kind::Seed => seed(value).map_or_else(wrong, |_| Ok(())),
        Kind::Number { min, max } => match value.as_f64() {
            Some(number) if number.is_finite() && (min..=max).contains(&number) => Ok(()),
            _ => wrong(),
        },
        Kind::OneOf(words) => match value.as_str() {
            Some(word) if words.contains(&word) => Ok(()),
            _ => wrong(),
        },
        Kind::List(item) => match value.as_array() {
            Some(items) => items.iter().enumerate().try_for_each(|(index, value)| {
                check_value(*item, value, &format!("{path}[{index}]"), unknown)
            }),
            None => wrong(),
        },
        Kind::Object(table) => match value.as_object() {
            Some(object) => check_object(table, object, path, unknown),
            None => wrong(),
        },
        Kind::Either(kinds) => {
            let mut deepest: Option<ApiError> = None;
            for kind in kinds {
                match check_value(*kind, value, path, unknown) {
                    Ok(()) => return Ok(()),
                    // The alternative that got furthest into the value says best what is wrong with it.
                    Err(fault) if fault.param.as_deref() != Some(path) => deepest = Some(fault),
                    Err(_) => {}
                }
            }
            deepest.map_or_else(wrong, Err)
        }
    }
}

fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

fn is_blank(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(object) => object.is_empty(),
        _ => false,
    }
}

/// The value as a whole number, `3.0` included.
pub fn whole(value: &Value) -> Option<i64> {
    value.as_i64().or_else(|| {
        let number = value.as_f64()?;
        // Beyond 2^53 a float no longer says which whole number was meant.
        (number.fract() == 0.0 && number.abs() <= 9_007_199_254_740_992.0).then_some(number as i64)
    })
}

/// The value as a seed. A negative number is the one of the same 64 bits, under which it is reported.
pub fn seed(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| whole(value).map(|number| number as u64))
}

fn describe_value(value: &Value) -> String {
    match value {
        Value::Null => "null".into(),
        Value::Bool(_) | Value::Number(_) => value.to_string(),
        Value::String(text) if text.chars().count() <= 40 => {
            format!("the string {}", Value::from(text.as_str()))
        }
        Value::String(_) => "a long string".into(),
        Value::Array(_) => "a list".into(),
        Value::Object(_) => "an object".into(),
    }
}

impl Kind {
    /// The kind in words.
    pub fn describe(&self) -> String {
        match self {
            Self::Bool => "true or false".into(),
            Self::Text => "a string".into(),
            Self::Integer { min: i64::MIN, .. } => "an integer".into(),
            Self::Integer { min, max } if *max >= u32::MAX as i64 => format!("an integer from {min}"),
            Self::Integer { min, max } => format!("an integer from {min} to {max}"),
            Self::Seed => "an integer from -2^63 to 2^64 - 1".into(),
            Self::Number { min, max } if *max >= f64::from(f32::MAX) => {
                if *min <= f64::from(f32::MIN) {
                    "a number".into()
                } else {
                    format!("a number from {min}")
                }
            }
            Self::Number { min, max } => format!("a number from {min} to {max}"),
            Self::OneOf(words) => format!("one of {}", words.join(", ")),
            Self::List(item) => format!("a list of ({})", item.describe()),
            Self::Object(_) | Self::Map => "an object".into(),
            Self::Either(kinds) => kinds.iter().map(Self::describe).collect::<Vec<_>>().join(" or "),
            Self::Any => "any value".into(),
        }
    }
}

/// A checked body with typed getters. A getter returns `None` for an absent or null field.
#[derive(Debug, Clone, Copy)]
pub struct Body<'a>(pub &'a Map<String, Value>);

impl<'a> Body<'a> {
    /// The field, unless absent or null.
    pub fn get(self, name: &str) -> Option<&'a Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    /// A string field.
    pub fn text(self, name: &str) -> Option<&'a str> {
        self.get(name)?.as_str()
    }

    /// A boolean field.
    pub fn flag(self, name: &str) -> Option<bool> {
        self.get(name)?.as_bool()
    }

    /// A number field.
    pub fn number(self, name: &str) -> Option<f64> {
        self.get(name)?.as_f64()
    }

    /// A whole-number field.
    pub fn integer(self, name: &str) -> Option<i64> {
        whole(self.get(name)?)
    }

    /// A whole-number field of the [`COUNT`] kind.
    pub fn count(self, name: &str) -> Option<u32> {
        self.integer(name).and_then(|number| u32::try_from(number).ok())
    }

    /// A list field.
    pub fn list(self, name: &str) -> Option<&'a [Value]> {
        self.get(name)?.as_array().map(Vec::as_slice)
    }

    /// An object field.
    pub fn object(self, name: &str) -> Option<Body<'a>> {
        self.get(name)?.as_object().map(Body)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const INNER: &[Field] = &[Field::required("text", Kind::Text, "")];
    const TABLE: &[Field] = &[
        Field::required("model", Kind::Text, ""),
        Field::optional("n", Kind::Integer { min: 1, max: 8 }, ""),
        Field::optional("parts", Kind::Either(&[Kind::Text, Kind::List(&Kind::Object(INNER))]), ""),
        Field::ignored("user", ""),
        Field::refused("audio", "no sound here"),
    ];

    fn run(body: Value) -> Result<Vec<String>, String> {
        let Value::Object(body) = body else { panic!("object") };
        check(TABLE, &body).map_err(|fault| fault.param.unwrap_or_default())
    }

    #[test]
    fn a_wrong_type_names_its_field() {
        assert_eq!(run(json!({"model": 3})), Err("model".into()));
        assert_eq!(run(json!({})), Err("model".into()));
        assert_eq!(run(json!({"model": "m", "n": 9})), Err("n".into()));
        assert_eq!(run(json!({"model": "m", "n": 1.5})), Err("n".into()));
        assert_eq!(run(json!({"model": "m", "parts": 1})), Err("parts".into()));
        assert_eq!(
            run(json!({"model": "m", "parts": [{"text": "a"}, {"text": 1}]})),
            Err("parts[1].text".into())
        );
        assert_eq!(run(json!({"model": "m", "audio": {"voice": "x"}})), Err("audio".into()));
    }

    #[test]
    fn null_is_absent_and_whole_floats_are_integers() {
        assert_eq!(run(json!({"model": "m", "n": null, "audio": null, "user": 7})), Ok(vec![]));
        assert_eq!(run(json!({"model": "m", "n": 3.0, "audio": []})), Ok(vec![]));
    }

    #[test]
    fn seeds_have_64_bits() {
        for (value, expected) in [
            (json!(0), Some(0)),
            (json!(u64::MAX), Some(u64::MAX)),
            (json!(1_u64 << 63), Some(1 << 63)),
            (json!(-5), Some(u64::MAX - 4)),
            (json!(i64::MIN), Some(1 << 63)),
            (json!(7.0), Some(7)),
            (json!(7.5), None),
            (json!(1e300), None),
            (json!("7"), None),
        ] {
            assert_eq!(seed(&value), expected, "{value}");
        }
    }

    #[test]
    fn unknown_fields_are_reported_not_refused() {
        assert_eq!(run(json!({"model": "m", "zeal": 1})), Ok(vec!["zeal".into()]));
    }
}
