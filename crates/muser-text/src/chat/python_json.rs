//! `tojson` as model templates expect it: Python's `json.dumps` with `ensure_ascii=False`.
//!
//! Separators `, ` and `: `, non-ASCII kept, keys in the order they came in, nothing escaped for HTML, floats as Python
//! prints them.

use minijinja::value::{Kwargs, Value};
use minijinja::{Error, ErrorKind, State};
use serde::Serialize;
use serde_json::ser::Formatter;
use std::fmt::Write as _;
use std::io;

/// Bytes that a unit of a template's budget pays for.
const BYTES_PER_UNIT: u64 = 64;

/// Text that may not become longer than what is left of the budget.
struct Bounded {
    text: Vec<u8>,
    left: u64,
}

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.left.checked_sub(bytes.len() as u64) {
            Some(left) => self.left = left,
            None => return Err(io::Error::other("it is longer than a template may make it")),
        }
        self.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The filter.
#[expect(clippy::needless_pass_by_value, reason = "the signature of filters")]
pub(crate) fn tojson(
    state: &State<'_, '_>,
    value: &Value,
    indent: Option<Value>,
    kwargs: Kwargs,
) -> Result<Value, Error> {
    let indent = match indent {
        Some(indent) => Some(indent),
        None => kwargs.get("indent")?,
    };
    let indent = match indent {
        None => None,
        Some(value) if value.is_none() => None,
        Some(value) => Some(usize::try_from(value)?.min(16)),
    };
    let ascii = kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    kwargs.assert_all_used()?;
    // A list may be there only as a promise to repeat another one: what is made of it is paid for while it is made.
    let left = state.fuel_levels().map_or(u64::MAX, |(_, left)| left.saturating_mul(BYTES_PER_UNIT));
    let mut text = Bounded { text: Vec::new(), left };
    let layout = PythonLayout { indent, depth: 0, has_value: false };
    let made = value.serialize(&mut serde_json::Serializer::with_formatter(&mut text, layout));
    state.consume_fuel(text.text.len() as u64 / BYTES_PER_UNIT)?;
    made.map_err(|e| Error::new(ErrorKind::InvalidOperation, "cannot serialize to JSON").with_source(e))?;
    let text = String::from_utf8_lossy(&text.text).into_owned();
    Ok(Value::from(if ascii { escape_non_ascii(&text) } else { text }))
}

fn escape_non_ascii(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_ascii() {
            out.push(c);
        } else {
            for unit in c.encode_utf16(&mut [0; 2]) {
                // Writing to a string cannot fail.
                let _ = write!(out, "\\u{unit:04x}");
            }
        }
    }
    out
}

/// A float as Python's `repr` writes it.
fn python_float(value: f64) -> String {
    let exponent = if value == 0.0 { 0 } else { value.abs().log10().floor() as i32 };
    if value != 0.0 && !(-4..16).contains(&exponent) {
        let text = format!("{value:e}");
        match text.split_once('e') {
            Some((digits, exponent)) => {
                let (sign, exponent) = match exponent.strip_prefix('-') {
                    Some(exponent) => ('-', exponent),
                    None => ('+', exponent),
                };
                format!("{digits}e{sign}{exponent:0>2}")
            }
            None => text,
        }
    } else {
        format!("{value:?}")
    }
}

struct PythonLayout {
    indent: Option<usize>,
    depth: usize,
    has_value: bool,
}

impl PythonLayout {
    fn line<W: ?Sized + io::Write>(&self, writer: &mut W) -> io::Result<()> {
        if let Some(indent) = self.indent {
            write!(writer, "\n{:1$}", "", indent * self.depth)?;
        }
        Ok(())
    }

    fn open<W: ?Sized + io::Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.has_value = false;
        writer.write_all(bracket)
    }

    fn close<W: ?Sized + io::Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if self.has_value {
            self.line(writer)?;
        }
        self.has_value = true;
        writer.write_all(bracket)
    }

    fn separate<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if !first {
            writer.write_all(if self.indent.is_some() { b"," } else { b", " })?;
        }
        self.line(writer)
    }
}

impl Formatter for PythonLayout {
    fn write_f64<W: ?Sized + io::Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        writer.write_all(python_float(value).as_bytes())
    }

    fn begin_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"[")
    }

    fn end_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"]")
    }

    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.separate(writer, first)
    }

    fn end_array_value<W: ?Sized + io::Write>(&mut self, _writer: &mut W) -> io::Result<()> {
        self.has_value = true;
        Ok(())
    }

    fn begin_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"{")
    }

    fn end_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"}")
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.separate(writer, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }

    fn end_object_value<W: ?Sized + io::Write>(&mut self, _writer: &mut W) -> io::Result<()> {
        self.has_value = true;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use minijinja::{Environment, context, value::Serde};

    fn check(json: &str, filter: &str, expected: &str) {
        let value: serde_json::Value = serde_json::from_str(json).expect("valid JSON");
        let mut environment = Environment::new();
        environment.add_filter("tojson", tojson);
        let source = format!("{{{{ value | {filter} }}}}");
        let rendered = environment.render_str(&source, context! { value => Value::from(Serde(&value)) });
        assert_eq!(rendered.expect("renders"), expected);
    }

    #[test]
    fn as_python_dumps_it() {
        // The expectations are the output of Python 3.11's json.dumps(value, ensure_ascii=False, ...).
        let value = r#"{"z":1,"a":[1.0,-0.5,1e16,1e-5,123456789.25],"t":"<é'&\"\n\u0001>","e":{},"l":[],"n":null,"b":true}"#;
        let flat = r#"{"z": 1, "a": [1.0, -0.5, 1e+16, 1e-05, 123456789.25], "t": "<é'&\"\n\u0001>", "e": {}, "l": [], "n": null, "b": true}"#;
        check(value, "tojson", flat);
        check(value, "tojson(ensure_ascii=True)", &flat.replace('é', "\\u00e9"));
        check(
            r#"{"a":[1,{}],"b":{"c":[]}}"#,
            "tojson(indent=2)",
            "{\n  \"a\": [\n    1,\n    {}\n  ],\n  \"b\": {\n    \"c\": []\n  }\n}",
        );
        check(r#""🙂""#, "tojson(ensure_ascii=True)", r#""\ud83d\ude42""#);
    }
}
