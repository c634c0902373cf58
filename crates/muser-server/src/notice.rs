//! What of a request is not kept although it is answered: said in a header, and once in the log.
//!
//! A tool's schema may say what no grammar can keep, and agents send tools that only their vendor's servers run. That costs
//! nobody the request; who wants to know reads the header.

use std::collections::HashSet;
use std::sync::{LazyLock, Mutex};

use axum::http::{HeaderName, HeaderValue};
use axum::response::Response;

/// The header.
const NAME: HeaderName = HeaderName::from_static("x-muser-notice");

/// Longest text of the header, in bytes: proxies refuse answers with large headers.
const MAX_BYTES: usize = 1000;

/// What is not kept, if anything.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Notice(Option<HeaderValue>);

impl Notice {
    /// From pairs of a field and what of it is not kept. What follows from schemas has not been logged yet.
    pub(crate) fn new(fields: &[(String, String)], schemas: impl Iterator<Item = (String, String)>) -> Self {
        let mut text = String::new();
        let schemas = schemas.inspect(|(field, what)| log_once(field, what));
        for (field, what) in fields.iter().cloned().chain(schemas) {
            let entry = format!("{}{field}: {what}", if text.is_empty() { "" } else { "; " });
            if text.len() + entry.len() > MAX_BYTES {
                text.push_str("; and more");
                break;
            }
            text.push_str(&entry);
        }
        // Names come from the client: in a header only what is visible ASCII may stand.
        let visible: String =
            text.chars().map(|c| if c == ' ' || c.is_ascii_graphic() { c } else { '?' }).collect();
        Self(if visible.is_empty() { None } else { HeaderValue::from_str(&visible).ok() })
    }

    /// Adds the header to an answer.
    pub(crate) fn on(self, mut response: Response) -> Response {
        if let Some(value) = self.0 {
            response.headers_mut().insert(NAME, value);
        }
        response
    }
}

/// Each remark is worth one line in the log for the life of the process, and no more.
fn log_once(field: &str, what: &str) {
    const REMEMBERED: usize = 1000;
    static SEEN: LazyLock<Mutex<HashSet<String>>> = LazyLock::new(Mutex::default);
    let Ok(mut seen) = SEEN.lock() else { return };
    let key: String = format!("{field} {what}").chars().take(200).collect();
    if seen.len() < REMEMBERED && seen.insert(key) {
        tracing::warn!(field, what, "part of a tool's schema is not enforced (said once)");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(left_out: &[(&str, &str)]) -> Option<String> {
        let pairs = left_out.iter().map(|(field, what)| ((*field).to_owned(), (*what).to_owned()));
        let response = Notice::new(&[], pairs).on(Response::default());
        response.headers().get(NAME).map(|value| value.to_str().expect("visible").to_owned())
    }

    #[test]
    fn what_is_not_kept_is_in_the_header() {
        assert_eq!(header(&[]), None);
        let fields = [("tools[1]".to_owned(), "left out".to_owned())];
        let response =
            Notice::new(&fields, [("a".to_owned(), "x".to_owned())].into_iter()).on(Response::default());
        assert_eq!(response.headers()[NAME], "tools[1]: left out; a: x");
        assert_eq!(header(&[("tools[0].a", "x")]).as_deref(), Some("tools[0].a: x"));
        assert_eq!(header(&[("é\nb", "x"), ("c", "y")]).as_deref(), Some("??b: x; c: y"));
        let long = header(&[("a", &"x".repeat(900)), ("b", &"y".repeat(900))]).expect("said");
        assert!(long.len() < 1100 && long.ends_with("; and more"), "{long}");
        assert_eq!(header(&[("a", &"x".repeat(2000))]).as_deref(), Some("; and more"));
    }
}
