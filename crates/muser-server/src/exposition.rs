//! The two text formats of metrics: OpenMetrics, and the older one that many collectors still ask for.

use axum::http::{HeaderMap, header};

/// The content type of OpenMetrics.
pub(crate) const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// The content type of the older format.
pub(crate) const CLASSIC: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Whether a reader asks for the older format: it takes plain text, and OpenMetrics less or not at all.
pub(crate) fn wants_classic(headers: &HeaderMap) -> bool {
    let (mut open, mut classic, mut any) = (None, None, None);
    for value in headers.get_all(header::ACCEPT) {
        for range in value.to_str().unwrap_or_default().split(',') {
            let mut parts = range.split(';').map(str::trim);
            let kind = parts.next().unwrap_or_default().to_ascii_lowercase();
            let quality =
                parts.find_map(|part| part.strip_prefix("q=")?.trim().parse::<f32>().ok()).unwrap_or(1.0);
            let place = match kind.as_str() {
                "application/openmetrics-text" => &mut open,
                "text/plain" | "text/*" => &mut classic,
                "*/*" => &mut any,
                _ => continue,
            };
            *place = Some(place.unwrap_or(0.0_f32).max(quality));
        }
    }
    // Who takes anything and names neither gets what says more.
    classic.is_some_and(|classic| {
        classic > open.or(any.map(|any| any.min(classic - f32::EPSILON))).unwrap_or(0.0)
    })
}

/// OpenMetrics text in the older format: there a counter's name has its ending everywhere, and units and the end are not
/// marked.
pub(crate) fn classic(open: &str) -> String {
    let mut out = String::with_capacity(open.len());
    let mut help: Option<(&str, &str)> = None;
    let mut say = |words: [&str; 3], rest: &str| {
        for word in words {
            out.push_str(word);
        }
        out.push_str(rest);
        out.push('\n');
    };
    for line in open.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            help = rest.split_once(' ');
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' '))
        {
            let ending = if kind == "counter" { "_total " } else { " " };
            if let Some((_, text)) = help.take().filter(|(of, _)| *of == name) {
                say(["# HELP ", name, ending], text);
            }
            say(["# TYPE ", name, ending], if kind == "unknown" { "untyped" } else { kind });
        } else if !line.starts_with('#') {
            say(["", "", ""], line);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_readers_wish_decides() {
        let check = |accept: Option<&'static str>, expected: bool| {
            let mut headers = HeaderMap::new();
            if let Some(accept) = accept {
                headers.insert(header::ACCEPT, accept.parse().expect("a value"));
            }
            assert_eq!(wants_classic(&headers), expected, "{accept:?}");
        };
        check(None, false);
        check(Some("*/*"), false);
        check(Some("application/json"), false);
        check(Some("text/plain"), true);
        check(Some("text/plain, */*"), true);
        check(Some("text/plain;version=0.0.4;q=1,*/*;q=0.1"), true);
        let scraper = "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,\
                       text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
        check(Some(scraper), false);
        check(Some("application/openmetrics-text;q=0.2, text/plain;q=0.9"), true);
        check(Some("text/plain;q=0"), false);
    }

    #[test]
    fn counters_keep_their_ending_and_marks_go() {
        let open = "# HELP a:b Some text.\n# TYPE a:b counter\n# UNIT a:b seconds\na:b_total{x=\"# y\"} 2\n# HELP c Gauge.\n\
                    # TYPE c gauge\nc 1\n# EOF\n";
        let expected = "# HELP a:b_total Some text.\n# TYPE a:b_total counter\na:b_total{x=\"# y\"} 2\n# HELP c Gauge.\n\
                        # TYPE c gauge\nc 1\n";
        assert_eq!(classic(open), expected);
    }
}
