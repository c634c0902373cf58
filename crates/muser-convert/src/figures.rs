//! Numbers of a `config.json`, each checked to be one.

use serde_json::Value;

use crate::ConvertError;
use crate::error::wrong;

/// An object of settings.
pub(crate) struct Figures<'a> {
    pub(crate) value: &'a Value,
    pub(crate) place: &'a str,
}

impl Figures<'_> {
    fn get(&self, name: &str) -> Option<&Value> {
        self.value.get(name).filter(|value| !value.is_null())
    }

    pub(crate) fn fault(&self, name: &str, expected: &str, found: Option<&Value>) -> ConvertError {
        let found = found.map_or("no such setting".to_owned(), |value| {
            let text = value.to_string();
            // A list of thousands helps nobody.
            text.chars().take(80).collect()
        });
        wrong(format!("{}: {name}", self.place), expected, found)
    }

    /// A count above zero.
    pub(crate) fn size(&self, name: &str) -> Result<usize, ConvertError> {
        let found = self.get(name);
        match found.and_then(Value::as_u64).and_then(|value| u32::try_from(value).ok()) {
            Some(value @ 1..) => Ok(value as usize),
            _ => Err(self.fault(name, "a count above zero", found)),
        }
    }

    /// A number above zero.
    pub(crate) fn number(&self, name: &str, default: Option<f64>) -> Result<f64, ConvertError> {
        let found = self.get(name);
        match (found, default) {
            (None, Some(default)) => Ok(default),
            _ => match found.and_then(Value::as_f64) {
                Some(value) if value > 0.0 && value.is_finite() => Ok(value),
                _ => Err(self.fault(name, "a number above zero", found)),
            },
        }
    }

    /// A setting that can only have one value; missing is that one.
    pub(crate) fn only(&self, name: &str, value: &Value) -> Result<(), ConvertError> {
        let found = self.get(name);
        let same = match (found, value) {
            (None, _) => true,
            (Some(found), value) if value.is_number() => found.as_f64() == value.as_f64(),
            (Some(found), value) => found == value,
        };
        if same { Ok(()) } else { Err(self.fault(name, &format!("{value}, or no such setting"), found)) }
    }

    /// An id of a token, or the first of some.
    pub(crate) fn id(&self, name: &str) -> Option<u32> {
        let value = self.get(name)?;
        let value = value.as_array().map_or(Some(value), |list| list.first())?;
        value.as_u64().and_then(|id| u32::try_from(id).ok())
    }

    /// Which layers have a window.
    pub(crate) fn sliding(&self, layers: usize) -> Result<Vec<bool>, ConvertError> {
        let name = "layer_types";
        let Some(found) = self.get(name) else {
            return Err(self.fault(name, "a type for each layer", None));
        };
        let expected = format!("{layers} of sliding_attention and full_attention");
        let list = found.as_array().filter(|list| list.len() == layers);
        let list = list.ok_or_else(|| self.fault(name, &expected, Some(found)))?;
        let types = list.iter().map(|layer| match layer.as_str() {
            Some("sliding_attention") => Ok(true),
            Some("full_attention") => Ok(false),
            _ => Err(self.fault(name, &expected, Some(layer))),
        });
        types.collect()
    }

    /// The base of plain rotation.
    pub(crate) fn rope_theta(&self) -> Result<f64, ConvertError> {
        let Some(inner) = self.get("rope_parameters") else { return self.number("rope_theta", None) };
        let inner = Figures { value: inner, place: self.place };
        inner.only("rope_type", &Value::from("default"))?;
        inner.number("rope_theta", None)
    }
}
