//! Running another program's benchmark in turn with ours, and the ratios.
//!
//! The other program prints one JSON object with the shape of our own report; only `tests`, and in it `test` and
//! `tok_s`, are looked at. The whole object goes into the report as it came.

use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};
use serde::Serialize;
use serde_json::Value;

use crate::results::TestResult;
use crate::stats::{median, round};

/// The other side of a comparison.
#[derive(Debug, Serialize)]
pub struct Comparison {
    /// The command, as it was run.
    pub command: String,
    /// One line for each test that both sides have.
    pub ratios: Vec<Ratio>,
    /// What the other program printed, round by round.
    pub rounds: Vec<Value>,
}

/// Both sides of one test.
#[derive(Debug, Serialize)]
pub struct Ratio {
    /// Name of the test.
    pub test: String,
    /// Our median.
    pub ours_tok_s: f64,
    /// Their median over the rounds.
    pub theirs_tok_s: f64,
    /// Median over the rounds of ours divided by theirs of the same round.
    pub ratio: f64,
    /// Smallest and largest of these.
    pub range: (f64, f64),
}

/// Fills the places of a command.
pub fn command_line(
    template: &str,
    model: &str,
    tests: &[String],
    threads: usize,
    gen_tokens: u32,
) -> String {
    template
        .replace("{model}", &quoted(model))
        .replace("{tests}", &tests.join(","))
        .replace("{threads}", &threads.to_string())
        .replace("{gen}", &gen_tokens.to_string())
}

/// One argument for the shell, whatever is in it.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

/// Runs the command once and reads its report.
pub fn run_once(command: &str) -> Result<Value> {
    let out = Command::new("sh")
        .args(["-c", command])
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .context("the program to compare with cannot be started")?;
    if !out.status.success() {
        bail!("the program to compare with ended with {}", out.status);
    }
    let text = String::from_utf8_lossy(&out.stdout);
    // Programs may print something before their report.
    let last = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
    let report: Value = serde_json::from_str(&text)
        .or_else(|_| serde_json::from_str(last))
        .context("the program to compare with printed no JSON object")?;
    if speeds(&report).is_empty() {
        bail!(
            "the program to compare with printed no tests: expected {{\"tests\": [{{\"test\": ..., \"tok_s\": ...}}]}}"
        );
    }
    Ok(report)
}

/// Test names and speeds of a report.
fn speeds(report: &Value) -> Vec<(&str, f64)> {
    let tests = report.get("tests").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let named =
        tests.iter().filter_map(|test| Some((test.get("test")?.as_str()?, test.get("tok_s")?.as_f64()?)));
    named.filter(|(_, speed)| *speed > 0.0).collect()
}

impl Comparison {
    /// Ratios from our results and their rounds; round `i` of theirs followed repetition `i` of ours.
    pub fn new(command: String, ours: &[TestResult], rounds: Vec<Value>) -> Self {
        let mut ratios = Vec::new();
        for ours in ours {
            let theirs: Vec<Option<f64>> = rounds
                .iter()
                .map(|round| {
                    speeds(round).iter().find(|(test, _)| *test == ours.test).map(|(_, speed)| *speed)
                })
                .collect();
            let pairs: Vec<f64> = ours
                .reps
                .iter()
                .zip(&theirs)
                .filter_map(|(ours, theirs)| Some(ours.tok_s / (*theirs)?))
                .collect();
            let theirs: Vec<f64> = theirs.into_iter().flatten().collect();
            let (Some(ratio), Some(theirs_tok_s)) = (median(&pairs), median(&theirs)) else { continue };
            let range = pairs.iter().fold((f64::MAX, f64::MIN), |(low, high), r| (low.min(*r), high.max(*r)));
            ratios.push(Ratio {
                test: ours.test.clone(),
                ours_tok_s: ours.tok_s,
                theirs_tok_s: round(theirs_tok_s, 3),
                ratio: round(ratio, 3),
                range: (round(range.0, 3), round(range.1, 3)),
            });
        }
        Self { command, ratios, rounds }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::Rep;

    #[test]
    fn places_of_the_command_are_filled_and_quoted() {
        let line = command_line(
            "x {model} -t {threads} --tests {tests} -n {gen}",
            "it's here",
            &["pp1".into(), "tg@0".into()],
            2,
            9,
        );
        assert_eq!(line, "x 'it'\\''s here' -t 2 --tests pp1,tg@0 -n 9");
    }

    #[test]
    fn ratios_pair_the_rounds() {
        let rep = |tok_s| Rep { tok_s, ..Rep::default() };
        let ours = TestResult {
            test: "tg@0".into(),
            tok_s: 20.0,
            reps: vec![rep(10.0), rep(20.0), rep(30.0)],
            ..TestResult::default()
        };
        let theirs = |tok_s: f64| serde_json::json!({"tests": [{"test": "pp9", "tok_s": 1.0}, {"test": "tg@0", "tok_s": tok_s}]});
        let comparison = Comparison::new("c".into(), &[ours], vec![theirs(5.0), theirs(20.0), theirs(10.0)]);
        let ratio = &comparison.ratios[0];
        assert_eq!((ratio.ratio, ratio.range, ratio.theirs_tok_s), (2.0, (1.0, 3.0), 10.0));
    }

    #[test]
    fn a_program_without_a_report_is_named() {
        assert!(run_once("echo hello").unwrap_err().to_string().contains("no JSON"));
        assert!(run_once("echo '{\"tests\": []}'").unwrap_err().to_string().contains("no tests"));
        assert!(run_once("exit 3").unwrap_err().to_string().contains("exit status: 3"));
        assert!(run_once("echo loading; echo '{\"tests\": [{\"test\": \"pp1\", \"tok_s\": 2}]}'").is_ok());
    }
}
