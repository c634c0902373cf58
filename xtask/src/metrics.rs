//! The server's metrics, read from where it registers them.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};

/// Where the registrations are.
const SOURCES: [&str; 2] = ["crates/muser-server/src/metrics.rs", "crates/muser-server/src/node_metrics.rs"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Counter,
    Gauge,
    Histogram,
}

/// One registration.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Metric {
    pub(crate) name: String,
    pub(crate) help: String,
    pub(crate) kind: Kind,
}

impl Metric {
    /// The names under which a scraper sees it.
    pub(crate) fn series(&self) -> Vec<String> {
        let endings: &[&str] = match self.kind {
            Kind::Counter => &["_total"],
            Kind::Gauge => &[""],
            Kind::Histogram => &["_bucket", "_sum", "_count"],
        };
        endings.iter().map(|ending| format!("{}{ending}", self.name)).collect()
    }
}

pub(crate) fn read(root: &Path) -> Result<Vec<Metric>> {
    let mut all = Vec::new();
    for name in SOURCES {
        let source = std::fs::read_to_string(root.join(name)).context(name)?;
        let found = parse(&source).with_context(|| format!("{name}: a registration is not understood"))?;
        ensure!(!found.is_empty(), "{name}: no registrations are found");
        all.extend(found);
    }
    Ok(all)
}

/// Calls of `counter(&mut all, NAME, HELP)`, `gauge(…)` and `register(…, HELP, METRIC)`, also with `all` alone.
fn parse(source: &str) -> Result<Vec<Metric>> {
    let mut found = Vec::new();
    for (at, _) in source.match_indices("all,") {
        let before = source[..at].trim_end();
        let before = before.strip_suffix("&mut").unwrap_or(before);
        let Some(function) = before.trim_end().strip_suffix('(') else { continue };
        let function = function.rsplit(|c: char| !c.is_alphanumeric()).next().unwrap_or_default();
        let (name, rest) = literal(&source[at..]).context("a call without a name")?;
        let (help, rest) = literal(rest).with_context(|| format!("{name} has no help"))?;
        let value = rest.trim_start_matches([',', ' ', '\n']);
        let kind = match function {
            "counter" => Kind::Counter,
            "gauge" => Kind::Gauge,
            "register" if value.starts_with("Family::<Labels, Gauge>") => Kind::Gauge,
            "register" if value.starts_with("Family::") || value.starts_with("Counter::") => Kind::Counter,
            "register" if value.starts_with("FloatGauge::") => Kind::Gauge,
            "register" if ["long()", "short()", "Totals::"].iter().any(|of| value.starts_with(of)) => {
                Kind::Histogram
            }
            _ => anyhow::bail!("{name}: what kind of metric is registered by {function}?"),
        };
        found.push(Metric { name: name.to_owned(), help: help.to_owned(), kind });
    }
    Ok(found)
}

/// The next string and what follows it. Names and helps have no escapes.
fn literal(text: &str) -> Option<(&str, &str)> {
    text.split_once('"')?.1.split_once('"')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registrations_are_read() {
        let source = "a: gauge(&mut all, \"x:a\", \"A\"),\nb: register(\n  &mut all,\n  \"x:b\",\n  \"B\",\n  long(),\n),\n\
                      c: register(&mut all, \"x:c\", \"C\", Family::default()), d: counter(all, \"x:d\", \"D\"),\n\
                      e: register(all, \"x:e\", \"E\", Family::<Labels, Gauge>::default()),";
        let found = parse(source).unwrap();
        let found: Vec<_> = found.iter().map(|m| (m.name.as_str(), m.help.as_str(), m.kind)).collect();
        let wanted = [
            ("x:a", "A", Kind::Gauge),
            ("x:b", "B", Kind::Histogram),
            ("x:c", "C", Kind::Counter),
            ("x:d", "D", Kind::Counter),
            ("x:e", "E", Kind::Gauge),
        ];
        assert_eq!(found, wanted);
        assert!(parse("summary(&mut all, \"x:a\", \"A\")").is_err());
    }
}
