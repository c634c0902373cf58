//! What a benchmark reports, as JSON and as a table.

use std::fmt::Write as _;

use serde::Serialize;

use super::compare::Comparison;
use super::drafting::DraftingReport;
use super::results::TestResult;
use crate::receipt::ModelFacts;

/// The whole report.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Program and version.
    pub engine: String,
    /// Commit that the program was built from.
    pub commit: &'static str,
    /// The device in words.
    pub device: String,
    /// Backend.
    pub backend: String,
    /// Arithmetic, kernel revision and KV type.
    pub route: String,
    /// Threads that computed and probed.
    pub threads: usize,
    /// Were weights copied into another layout, as asked: `auto`, `on`, `off`.
    pub repack: String,
    /// Bytes of the copy.
    pub repacked_bytes: u64,
    /// The model.
    pub model: ModelFacts,
    /// Weight bytes that one token reads.
    pub weight_bytes_per_token: u64,
    /// When it began, UTC.
    pub date: String,
    /// Seconds from opening the file to a ready executor.
    pub load_s: f64,
    /// Seconds from opening the file to the logits of a first token.
    pub first_token_s: f64,
    /// Median of the read bandwidth probes, GB/s (1e9).
    pub bandwidth: f64,
    /// All probes in order: before the first measurement, between them, after the last.
    pub bandwidth_probes: Vec<f64>,
    /// Load average before and after.
    pub load_average: (Option<f64>, Option<f64>),
    /// Results.
    pub tests: Vec<TestResult>,
    /// Another program in turn.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compare: Option<Comparison>,
    /// Decoding with a draft against decoding without.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drafting: Option<DraftingReport>,
}

impl Report {
    /// The table for people.
    pub fn table(&self) -> String {
        let mut out = String::new();
        let mut line = |text: std::fmt::Arguments<'_>| {
            let _ = writeln!(out, "{text}"); // writing to a string cannot fail
        };
        line(format_args!("{}, {}", self.model.file, self.device));
        line(format_args!(
            "loaded in {:.2} s, first token after {:.2} s; {:.2} GB of weights per token; memory reads at {:.1} GB/s (probes {})",
            self.load_s,
            self.first_token_s,
            self.weight_bytes_per_token as f64 / 1e9,
            self.bandwidth,
            range(&self.bandwidth_probes),
        ));
        line(format_args!(
            "{:<14} {:>10} {:>10} {:>7} {:>8} {:>9}  {}",
            "test", "tok/s", "ms", "spread", "GB/s", "of memory", "quiet"
        ));
        for test in &self.tests {
            let optional = |value: Option<f64>, digits: usize| match value {
                Some(value) => format!("{value:.digits$}"),
                None => "-".to_owned(),
            };
            line(format_args!(
                "{:<14} {:>10.2} {:>10.3} {:>6.1}% {:>8} {:>9}  {}/{}",
                test.test,
                test.tok_s,
                test.median_ms,
                100.0 * test.spread,
                optional(test.gb_s, 2),
                test.of_bandwidth.map_or("-".to_owned(), |share| format!("{:.0}%", 100.0 * share)),
                test.quiet_reps,
                test.reps.len(),
            ));
        }
        if let Some(compare) = &self.compare {
            line(format_args!("\nin turn with: {}", compare.command));
            line(format_args!(
                "{:<14} {:>10} {:>10} {:>7}  range of rounds",
                "test", "ours", "theirs", "ratio"
            ));
            for ratio in &compare.ratios {
                line(format_args!(
                    "{:<14} {:>10.2} {:>10.2} {:>6.2}x  {:.2} to {:.2}",
                    ratio.test,
                    ratio.ours_tok_s,
                    ratio.theirs_tok_s,
                    ratio.ratio,
                    ratio.range.0,
                    ratio.range.1
                ));
            }
        }
        if let Some(drafting) = &self.drafting {
            let kind = if drafting.synthetic { " (synthetic: a stand-in proposes)" } else { "" };
            line(format_args!("\ndrafting with {}{kind}, length {}", drafting.draft, drafting.length));
            line(format_args!(
                "{:.2}x (lowest text {:.2}x), {:.2} tokens per pass, {:.2} proposals per step, {:.0}% accepted{}",
                drafting.speedup,
                drafting.lowest_speedup,
                drafting.tokens_per_target_pass,
                drafting.proposals_per_step,
                100.0 * drafting.accepted,
                drafting
                    .forecast_over_measured
                    .map_or(String::new(), |share| format!(", rounds forecast at {:.0}%", 100.0 * share)),
            ));
            if let Some([low, middle, high]) = drafting.plain_against_plain {
                line(format_args!(
                    "two engines without a draft: {middle:.3}x, texts {low:.3}x to {high:.3}x (what cannot be told from nothing)"
                ));
            }
        }
        out
    }
}

fn range(values: &[f64]) -> String {
    let low = values.iter().copied().fold(f64::MAX, f64::min);
    let high = values.iter().copied().fold(f64::MIN, f64::max);
    if values.is_empty() { "none".to_owned() } else { format!("{low:.1} to {high:.1}") }
}
