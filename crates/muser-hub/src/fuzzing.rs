//! A narrow door for fuzzers: what is read of answers, without a connection.

use hyper::header::{CONTENT_RANGE, HeaderMap, HeaderValue};

/// First and last byte, and bytes of the whole, as far as they are said.
pub type Range = (Option<(u64, u64)>, Option<u64>);

/// What a `Content-Range` says.
pub fn content_range(value: &[u8]) -> Option<Range> {
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_RANGE, HeaderValue::from_bytes(value).ok()?);
    crate::headers::content_range(&headers).map(|range| (range.bytes, range.total))
}

/// What the first bytes of a file are, if they begin no model. `all`: nothing comes after them.
pub fn head_fault(head: &[u8], all: bool) -> Option<String> {
    crate::head::fault(head, all)
}

/// A header's address with everything escaped that may not stand in one.
pub fn printable(bytes: &[u8]) -> String {
    crate::url::printable(bytes)
}

/// A path segment escaped, and what that is without escapes.
pub fn segment(text: &str) -> (String, Option<String>) {
    let escaped = crate::url::encode_segment(text);
    let back = crate::url::decode_segment(&escaped);
    (escaped, back)
}

/// A path segment without escapes.
pub fn decode_segment(text: &str) -> Option<String> {
    crate::url::decode_segment(text)
}
