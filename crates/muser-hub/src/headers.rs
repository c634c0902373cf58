//! Response headers that carry numbers.

use hyper::header::{self, HeaderMap};

/// `Content-Range`, understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ContentRange {
    /// First and last byte.
    pub(crate) bytes: Option<(u64, u64)>,
    /// Bytes of the whole.
    pub(crate) total: Option<u64>,
}

/// `bytes 5-9/10`, `bytes 5-9/*`, `bytes */10`.
pub(crate) fn content_range(headers: &HeaderMap) -> Option<ContentRange> {
    let text = headers.get(header::CONTENT_RANGE)?.to_str().ok()?;
    let (range, total) = text.trim().strip_prefix("bytes")?.trim().split_once('/')?;
    let total = match total.trim() {
        "*" => None,
        total => Some(total.parse().ok()?),
    };
    let bytes = match range.trim() {
        "*" => None,
        range => {
            let (first, last) = range.split_once('-')?;
            Some((first.parse().ok()?, last.parse().ok()?))
        }
    };
    Some(ContentRange { bytes, total })
}

pub(crate) fn content_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_every_form() {
        let parse = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::CONTENT_RANGE, text.parse().unwrap());
            content_range(&headers).map(|range| (range.bytes, range.total))
        };
        assert_eq!(parse("bytes 5-9/10"), Some((Some((5, 9)), Some(10))));
        assert_eq!(parse("bytes 5-9/*"), Some((Some((5, 9)), None)));
        assert_eq!(parse("bytes */10"), Some((None, Some(10))));
        for bad in [
            "",
            "bytes",
            "bytes 5-9",
            "lines 5-9/10",
            "bytes 5/10",
            "bytes -9/10",
            "bytes 5-9/x",
            "bytes 5-99999999999999999999/*",
        ] {
            assert_eq!(parse(bad), None, "{bad}");
        }
        assert_eq!(content_range(&HeaderMap::new()), None);
    }
}
