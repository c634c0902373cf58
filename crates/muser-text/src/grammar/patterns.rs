//! Regular expressions and formats of schemas.
//!
//! A schema's `pattern` is searched for, a grammar's expression matches the whole; here the one becomes the other.

use super::{MAX_EXPANDED, MAX_GRAMMAR_BYTES, expanded_size, nests_too_deep};
use regex_syntax::hir::{Hir, HirKind, Look};

/// Anything.
const ALL: &str = "(?s:.*)";

/// An expression for the whole of a text in which `pattern` is found; an error says why there is none.
pub(super) fn whole(pattern: &str) -> Result<String, String> {
    if pattern.len() > MAX_GRAMMAR_BYTES || nests_too_deep(pattern) {
        return Err("the pattern is too large".to_owned());
    }
    let parsed = regex_syntax::parse(&ascii_classes(pattern)).map_err(|_| {
        "the pattern is none that can be kept (look-around and back-references cannot)".to_owned()
    })?;
    if expanded_size(&parsed) > MAX_EXPANDED {
        return Err(format!("the pattern's repetitions written out have more than {MAX_EXPANDED} parts"));
    }
    found_in(&parsed).ok_or_else(|| "the pattern has anchors inside, which cannot be kept".to_owned())
}

/// `\d` and `\w` mean ASCII in schemas.
fn ascii_classes(pattern: &str) -> String {
    let mut out = String::with_capacity(pattern.len());
    let mut chars = pattern.chars();
    while let Some(c) = chars.next() {
        if c != '\\' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('d') => out.push_str("[0-9]"),
            Some('D') => out.push_str("[^0-9]"),
            Some('w') => out.push_str("[0-9A-Za-z_]"),
            Some('W') => out.push_str("[^0-9A-Za-z_]"),
            Some(other) => out.extend(['\\', other]),
            None => out.push('\\'),
        }
    }
    out
}

fn found_in(hir: &Hir) -> Option<String> {
    match hir.kind() {
        HirKind::Alternation(parts) => {
            let parts: Option<Vec<String>> = parts.iter().map(found_in).collect();
            Some(format!("(?:{})", parts?.join("|")))
        }
        HirKind::Capture(capture) => found_in(&capture.sub),
        HirKind::Empty | HirKind::Look(Look::Start | Look::End) => Some(ALL.to_owned()),
        HirKind::Concat(parts) => {
            let is =
                |part: Option<&Hir>, look: Look| part.is_some_and(|part| *part.kind() == HirKind::Look(look));
            let mut middle = parts.as_slice();
            let (from_start, to_end) = (is(middle.first(), Look::Start), is(middle.last(), Look::End));
            if from_start {
                middle = &middle[1..];
            }
            if to_end {
                middle = &middle[..middle.len().saturating_sub(1)];
            }
            let inside: Option<String> = middle.iter().map(plain).collect();
            let before = if from_start { "" } else { ALL };
            let after = if to_end { "" } else { ALL };
            Some(format!("{before}{}{after}", inside?))
        }
        _ => Some(format!("{ALL}{}{ALL}", plain(hir)?)),
    }
}

/// The expression itself, if no anchor is in it.
fn plain(hir: &Hir) -> Option<String> {
    hir.properties().look_set().is_empty().then(|| format!("(?:{hir})"))
}

/// An expression in Lark's notation.
pub(super) fn lark_regex(expression: &str) -> String {
    let mut out = String::from("/");
    let mut escaped = false;
    for c in expression.chars() {
        match c {
            '/' if !escaped => out.push_str("\\/"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c => out.push(c),
        }
        escaped = c == '\\' && !escaped;
    }
    out.push('/');
    out
}

/// An expression for a format that is enforced; others say something to readers only.
pub(super) fn format(name: &str) -> Option<String> {
    let date = "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|\
                02-(?:0[1-9]|[12][0-9])))";
    let clock = "(?:[01][0-9]|2[0-3]):[0-5][0-9]";
    let time = format!("{clock}:[0-5][0-9](?:\\.[0-9]{{1,9}})?(?:[Zz]|[+\\-]{clock})");
    let label = "[0-9A-Za-z](?:[0-9A-Za-z\\-]{0,61}[0-9A-Za-z])?";
    let host = format!("{label}(?:\\.{label}){{0,10}}");
    let byte = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])";
    Some(match name {
        "date" => date.to_owned(),
        "time" => time,
        "date-time" => format!("{date}[Tt]{time}"),
        "duration" => {
            let time = "T(?:[0-9]+H(?:[0-9]+M)?(?:[0-9]+S)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)";
            let days = "(?:[0-9]+Y(?:[0-9]+M)?(?:[0-9]+D)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)";
            format!("P(?:{days}(?:{time})?|{time}|[0-9]+W)")
        }
        "email" => {
            let atom = "[0-9A-Za-z!#$%&'*+=?^_`{|}~\\-]+";
            format!("{atom}(?:\\.{atom}){{0,10}}@{host}")
        }
        "hostname" => host,
        "ipv4" => format!("{byte}(?:\\.{byte}){{3}}"),
        "ipv6" => ipv6(),
        "uuid" => "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}".to_owned(),
        "uri" => "[A-Za-z][0-9A-Za-z+.\\-]*:[!#-;=?-\\[\\]_a-z~]+".to_owned(),
        _ => return None,
    })
}

/// Eight groups, or fewer around one gap.
fn ipv6() -> String {
    let group = "[0-9A-Fa-f]{1,4}";
    let mut forms = vec![format!("(?:{group}:){{7}}{group}")];
    for before in 0..=7 {
        let head = match before {
            0 => ":".to_owned(),
            _ => format!("(?:{group}:){{{before}}}"),
        };
        let after = 7 - before;
        forms.push(match after {
            0 => format!("{head}:"),
            _ => format!("{head}(?::|(?::{group}){{1,{after}}})"),
        });
    }
    format!("(?:{})", forms.join("|"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(expression: &str, text: &str) -> bool {
        fancy_regex::Regex::new(&format!("^(?:{expression})\\z"))
            .expect("an expression")
            .is_match(text)
            .expect("an end")
    }

    #[test]
    fn a_searched_pattern_becomes_one_for_the_whole_text() {
        let check = |pattern: &str, yes: &[&str], no: &[&str]| {
            let whole = whole(pattern).expect(pattern);
            assert!(yes.iter().all(|text| matches(&whole, text)), "{pattern} {whole}");
            assert!(!no.iter().any(|text| matches(&whole, text)), "{pattern} {whole}");
        };
        check("^[0-9]{3}$", &["123"], &["12", "1234", "a123"]);
        check("b+", &["b", "abba", "\nb"], &["", "a"]);
        check("^a|b$", &["ax", "xb", "a"], &["xa", "bx"]);
        check("^(a|b)/c$", &["a/c", "b/c"], &["c", "a/cc"]);
        check("(^x$)", &["x"], &["xx"]);
        check("^\\d\\w\\W$", &["1_-", "0a "], &["٣a-", "1é-"]);
        check("", &["", "x"], &[]);
        check("^", &["", "x"], &[]);
        for bad in ["(?=a)b", "(?<!a)b", "(a)\\1", "a\\b", "a(^b)", "[a", "((a{900}){900}){900}"] {
            assert!(whole(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn formats() {
        let check = |name: &str, yes: &[&str], no: &[&str]| {
            let expression = format(name).expect(name);
            for text in yes {
                assert!(matches(&expression, text), "{name} {text}");
            }
            for text in no {
                assert!(!matches(&expression, text), "{name} {text}");
            }
        };
        check("date", &["2026-08-12", "2024-02-29"], &["2026-13-01", "2026-04-31", "26-01-01"]);
        check("time", &["09:30:00Z", "23:59:59.5+02:00"], &["24:00:00Z", "09:30:00"]);
        check("date-time", &["2026-08-12T09:30:00Z"], &["2026-08-12 09:30:00Z", "2026-08-12"]);
        check("duration", &["P3D", "PT5M", "P1Y2M3DT4H5M6S", "P2W"], &["P", "PT", "3D"]);
        check("email", &["a.b+c@example.org"], &["a@", "@b.c", "a b@c.d"]);
        check("hostname", &["a-b.example"], &["-a", "a..b", ""]);
        check("ipv4", &["127.0.0.1", "255.255.255.255"], &["256.1.1.1", "1.1.1"]);
        check("ipv6", &["::1", "::", "fe80::1:2", "1:2:3:4:5:6:7:8", "1::"], &["1:2:3", ":::", "1::2::3"]);
        check("uuid", &["123e4567-e89b-12d3-a456-426614174000"], &["123e4567e89b12d3a456426614174000"]);
        check("uri", &["https://a.example/b?c=d#e", "mailto:a@b.c"], &["/a", "a b:c"]);
        assert_eq!(format("path"), None);
    }

    #[test]
    fn slashes_are_escaped_once() {
        assert_eq!(lark_regex("a/b\\/c\n"), "/a\\/b\\/c\\n/");
    }
}
