//! The few parts of a URL that an HTTP/1.1 client needs: scheme, host, port and request target.
//!
//! By hand, although `url` and `http::Uri` exist: `url` would bring 26 crates into the default build (the tables of
//! internationalised names) and repairs what it reads (tabs, backslashes, spaces), where a mistyped address should be refused by the
//! character; `http::Uri` knows no `Location` relative to another address and does not say which character it minds.
//!
//! Credentials in the authority are refused rather than forwarded. [`std::fmt::Display`] leaves the query out: storage
//! hosts sign it.

use std::fmt::{self, Write as _};

/// An absolute `http` or `https` URL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Url {
    https: bool,
    host: String,
    port: u16,
    /// Path and query, beginning with `/`.
    target: String,
}

impl Url {
    /// Parses an absolute URL; the error says in words what is wrong.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (https, rest) = match text.split_once("://") {
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case("https") => (true, rest),
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case("http") => (false, rest),
            _ => return Err("expected http:// or https://".to_owned()),
        };
        let rest = rest.split('#').next().unwrap_or_default();
        let end = rest.find(['/', '?']).unwrap_or(rest.len());
        let (authority, target) = rest.split_at(end);
        if authority.contains('@') {
            return Err("credentials in a URL are not supported".to_owned());
        }
        let default_port = if https { 443 } else { 80 };
        let (host, port) = match authority.rsplit_once(':') {
            Some((host, port)) if !port.contains(']') => {
                (host, port.parse().map_err(|_| format!("port \"{port}\" is not a number up to 65535"))?)
            }
            _ => (authority, default_port),
        };
        let bare = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
        if bare.is_empty() || !bare.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._:".contains(&b)) {
            return Err(format!("host \"{host}\" is not a host name"));
        }
        let target = if target.starts_with('/') { target.to_owned() } else { format!("/{target}") };
        if let Some(bad) = target.chars().find(|c| !c.is_ascii_graphic()) {
            return Err(format!("character {bad:?} must be percent-encoded"));
        }
        Ok(Self { https, host: host.to_ascii_lowercase(), port, target })
    }

    /// The address that a `Location` header found at `self` means.
    pub fn join(&self, location: &str) -> Result<Self, String> {
        let scheme = if self.https { "https" } else { "http" };
        let origin = format!("{scheme}://{}:{}", self.host, self.port);
        if location.contains("://") && !location.starts_with(['/', '?']) {
            Self::parse(location)
        } else if location.starts_with("//") {
            Self::parse(&format!("{scheme}:{location}"))
        } else if location.starts_with('/') {
            Self::parse(&format!("{origin}{location}"))
        } else if location.starts_with('?') {
            Self::parse(&format!("{origin}{}{location}", self.path()))
        } else {
            let folder = &self.path()[..=self.path().rfind('/').unwrap_or(0)];
            Self::parse(&format!("{origin}{folder}{location}"))
        }
    }

    /// Adds already encoded path segments.
    pub(crate) fn with_path(&self, path: &str) -> Self {
        let base = self.path().trim_end_matches('/');
        Self { target: format!("{base}/{path}"), ..self.clone() }
    }

    /// Is it `https`?
    pub fn is_https(&self) -> bool {
        self.https
    }

    /// Host to connect to, without the brackets of an IPv6 address.
    pub fn host(&self) -> &str {
        self.host.trim_start_matches('[').trim_end_matches(']')
    }

    /// Port to connect to.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Path and query, as a request line has them.
    pub fn target(&self) -> &str {
        &self.target
    }

    /// Path alone.
    pub fn path(&self) -> &str {
        self.target.split('?').next().unwrap_or_default()
    }

    /// Value of the `Host` header, also used to name the host in messages.
    pub fn authority(&self) -> String {
        if self.port == if self.https { 443 } else { 80 } {
            self.host.clone()
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }

    /// Same scheme, host and port: a credential for one may go to the other.
    pub fn same_origin(&self, other: &Self) -> bool {
        (self.https, &self.host, self.port) == (other.https, &other.host, other.port)
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.https { "https" } else { "http" };
        write!(f, "{scheme}://{}{}", self.authority(), self.path())?;
        if self.target.contains('?') { f.write_str("?…") } else { Ok(()) }
    }
}

/// The address of a header with everything escaped that may not stand in one: some servers send names as they are.
pub(crate) fn printable(bytes: &[u8]) -> String {
    let mut out = String::with_capacity(bytes.len());
    for byte in bytes.trim_ascii() {
        if byte.is_ascii_graphic() {
            out.push(*byte as char);
        } else {
            let _ = write!(out, "%{byte:02X}"); // writing to a string cannot fail
        }
    }
    out
}

/// Percent-encodes one path segment.
pub(crate) fn encode_segment(segment: &str) -> String {
    let mut out = String::with_capacity(segment.len());
    for byte in segment.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            out.push(byte as char);
        } else {
            let _ = write!(out, "%{byte:02X}"); // writing to a string cannot fail
        }
    }
    out
}

/// Undoes percent-encoding; `None` for a broken escape or bytes that are not UTF-8.
pub(crate) fn decode_segment(segment: &str) -> Option<String> {
    let bytes = segment.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        if bytes[at] == b'%' {
            let pair = bytes.get(at + 1..at + 3)?;
            let digit = |c: u8| (c as char).to_digit(16);
            out.push((digit(pair[0])? * 16 + digit(pair[1])?) as u8);
            at += 3;
        } else {
            out.push(bytes[at]);
            at += 1;
        }
    }
    String::from_utf8(out).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, host: &str, port: u16, target: &str) {
        let url = Url::parse(text).unwrap();
        assert_eq!((url.host(), url.port(), url.target()), (host, port, target), "{text}");
    }

    #[test]
    fn parses_what_clients_write() {
        check("https://example.com", "example.com", 443, "/");
        check("HTTP://Example.com:8080/a/b?c=d#e", "example.com", 8080, "/a/b?c=d");
        check("http://[::1]:99/x", "::1", 99, "/x");
        check("http://[::1]/x", "::1", 80, "/x");
        check("https://h?q", "h", 443, "/?q");
    }

    #[test]
    fn refuses_the_rest() {
        for bad in [
            "",
            "ftp://x/y",
            "https://",
            "https://u:p@h/",
            "http://h:99999/",
            "http://h/ä",
            "http://h/a b",
            "http://h\r\nX: y/",
        ] {
            assert!(Url::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn joins_every_form_of_location() {
        let base = Url::parse("https://h:1/a/b?q").unwrap();
        for (location, expected) in [
            ("http://other/z", "http://other/z"),
            ("//other/z", "https://other/z"),
            ("/z?k", "https://h:1/z?…"),
            ("?k", "https://h:1/a/b?…"),
            ("z", "https://h:1/a/z"),
            ("/r?to=http://elsewhere/", "https://h:1/r?…"),
        ] {
            assert_eq!(base.join(location).unwrap().to_string(), expected);
        }
    }

    #[test]
    fn names_as_they_are_become_addresses() {
        assert_eq!(printable(" /müser file.gguf ".as_bytes()), "/m%C3%BCser%20file.gguf");
        assert_eq!(printable(b"https://h/a%20b?c=d"), "https://h/a%20b?c=d");
    }

    #[test]
    fn segments_round_trip() {
        for text in ["plain.gguf", "a b%/ü", ""] {
            assert_eq!(decode_segment(&encode_segment(text)).as_deref(), Some(text));
        }
        assert_eq!(decode_segment("%zz"), None);
        assert_eq!(decode_segment("%f"), None);
        assert_eq!(decode_segment("%ff"), None);
    }
}
