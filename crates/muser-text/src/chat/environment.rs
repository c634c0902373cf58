//! The sandbox that templates run in: what Python's Jinja offers to model templates, and nothing else.
//!
//! No loader, no files, no autoescape; a budget of steps and bytes, so that a hostile template in a downloaded file ends
//! with an error and not with a hang; a limit on recursion.

use super::clock::Clock;
use super::python_json;
use crate::error::TextError;
use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, Error, ErrorKind};

/// Marks errors that the template raised itself.
pub(crate) const RAISED: &str = "raised: ";

/// Budget of one rendering: about one unit for an instruction and one for 64 bytes of data. What a template may take grows
/// with what it is given: a hostile one that doubles a string ends at 128 MiB of them, not when memory is full. What the
/// engine does not charge for, lists that share their parts, [`super::bounded`] does.
pub(crate) fn fuel(context_bytes: usize) -> u64 {
    (LEAST_FUEL + FUEL_PER_BYTE * context_bytes as u64).min(MOST_FUEL)
}

const LEAST_FUEL: u64 = 2 << 20;
const FUEL_PER_BYTE: u64 = 32;
const MOST_FUEL: u64 = 50_000_000;

const RECURSION_LIMIT: usize = 200;

/// The settings under which Hugging Face renders chat templates.
pub(crate) fn syntax() -> Result<SyntaxConfig, TextError> {
    SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()
        .map_err(|e| TextError::Template { line: None, what: e.to_string() })
}

/// An environment without templates.
pub(crate) fn sandbox(clock: Clock) -> Result<Environment<'static>, TextError> {
    let mut environment = Environment::new();
    environment.set_syntax(syntax()?);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_fuel(Some(fuel(0)));
    environment.set_recursion_limit(RECURSION_LIMIT);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    super::bounded::install(&mut environment);
    environment.add_filter("tojson", python_json::tojson);
    environment.add_function("raise_exception", |message: String| -> Result<(), Error> {
        Err(Error::new(ErrorKind::InvalidOperation, format!("{RAISED}{message}")))
    });
    environment.add_function("strftime_now", move |format: String| clock.format(&format));
    Ok(environment)
}

/// Replaces `{% generation %}` … `{% endgeneration %}`, which mark text for training and are unknown here, by a block
/// that is always rendered and treats white space the same.
pub(crate) fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        // Behind the opening: in `{%}` both would have the same sign.
        let Some(len) = rest[start + 2..].find("%}").map(|len| len + 2) else { break };
        let inner = &rest[start + 2..start + len];
        let name = inner.trim_matches(['-', '+']).trim();
        let replacement = match name {
            "generation" => "if true",
            "endgeneration" => "endif",
            _ => name,
        };
        out.push_str(&rest[..start + 2]);
        if replacement == name {
            // Copied only up to here: a string or comment may hold `{%` without being a tag.
            rest = &rest[start + 2..];
        } else {
            out.push_str(&inner.replace(name, replacement));
            out.push_str("%}");
            rest = &rest[start + len + 2..];
        }
    }
    out.push_str(rest);
    out
}
