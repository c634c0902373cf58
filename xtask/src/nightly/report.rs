//! The report: one JSON object, a line for each part.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use serde_json::{Map, Value, json};

use super::Context;

/// What became of a part.
pub(super) struct Line(Map<String, Value>);

impl Line {
    pub(super) fn new(part: &str, outcome: &str, seconds: u64, detail: Value) -> Self {
        let mut fields = Map::new();
        fields.insert("part".into(), part.into());
        fields.insert("outcome".into(), outcome.into());
        fields.insert("seconds".into(), seconds.into());
        fields.insert("detail".into(), detail);
        Self(fields)
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: {} after {} s {}",
            word(&self.0, "part"),
            word(&self.0, "outcome"),
            self.0["seconds"],
            self.0["detail"]
        )
    }
}

fn word<'a>(fields: &'a Map<String, Value>, name: &str) -> &'a str {
    fields.get(name).and_then(Value::as_str).unwrap_or_default()
}

pub(super) struct Report {
    path: PathBuf,
    head: Map<String, Value>,
    lines: Vec<Map<String, Value>>,
}

impl Report {
    /// Goes on with the report of this name, or begins it.
    pub(super) fn open(path: &Path, context: &Context) -> Result<Self> {
        let said = |program: &str, args: &[&str]| {
            let out = Command::new(program).args(args).current_dir(&context.root).output().ok()?;
            out.status.success().then(|| String::from_utf8_lossy(&out.stdout).trim().to_owned())
        };
        let mut head = Map::new();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let load: Vec<f64> = load.split(' ').take(3).filter_map(|word| word.parse().ok()).collect();
        head.insert("date".into(), said("date", &["-u", "+%Y-%m-%dT%H:%M:%SZ"]).into());
        head.insert("commit".into(), said("git", &["rev-parse", "HEAD"]).into());
        let clean = said("git", &["status", "--porcelain", "-uno"]).is_some_and(|text| text.is_empty());
        head.insert("tree".into(), if clean { "clean" } else { "modified" }.into());
        head.insert("machine".into(), json!({ "cores": cores, "load_average": load }));
        head.insert("profile".into(), context.profile.as_str().into());
        let before: Value = match std::fs::read_to_string(path) {
            Ok(text) => serde_json::from_str(&text).with_context(|| path.display().to_string())?,
            Err(_) => Value::Null,
        };
        let lines =
            before["parts"].as_array().into_iter().flatten().filter_map(|line| line.as_object().cloned());
        Ok(Self { path: path.to_owned(), head, lines: lines.collect() })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Puts a line in place of the part's last one, and writes everything.
    pub(super) fn add(&mut self, line: Line) -> Result<()> {
        let Line(mut line) = line;
        // A report may be put together on several days and commits.
        for name in ["date", "commit"] {
            line.insert(name.to_owned(), self.head[name].clone());
        }
        self.lines.retain(|before| before["part"] != line["part"]);
        self.lines.push(line);
        std::fs::write(&self.path, self.text()?).with_context(|| self.path.display().to_string())
    }

    fn text(&self) -> Result<String> {
        let mut text = serde_json::to_string(&self.head)?;
        text.pop();
        text.push_str(",\n\"parts\":[\n");
        let lines = self.lines.iter().map(serde_json::to_string).collect::<serde_json::Result<Vec<_>>>()?;
        text.push_str(&lines.join(",\n"));
        text.push_str("\n]}\n");
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_that_runs_again_replaces_its_line() {
        let path = std::env::temp_dir().join(format!("nightly-{}.json", std::process::id()));
        let head: Map<_, _> = [("date", "d"), ("commit", "c")]
            .map(|(name, value)| (name.to_owned(), value.into()))
            .into_iter()
            .collect();
        let mut report = Report { path: path.clone(), head, lines: Vec::new() };
        for (part, outcome) in [("a", "failed"), ("b", "skipped"), ("a", "passed")] {
            report.add(Line::new(part, outcome, 3, json!({}))).expect("written");
        }
        let text = std::fs::read_to_string(&path).expect("written");
        std::fs::remove_file(&path).expect("removed");
        let value: Value = serde_json::from_str(&text).expect("JSON");
        let found: Vec<_> = value["parts"]
            .as_array()
            .expect("a list")
            .iter()
            .map(|line| (&line["part"], &line["outcome"]))
            .collect();
        assert_eq!(found, [(&json!("b"), &json!("skipped")), (&json!("a"), &json!("passed"))]);
        assert_eq!(
            text.lines().filter(|line| line.contains("\"outcome\"")).count(),
            2,
            "a line each: {text}"
        );
    }
}
