//! What a benchmark reports, as JSON and as a table.

use std::fmt::Write as _;

use serde::Serialize;

use crate::compare::Comparison;
use crate::receipt::ModelFacts;
use crate::results::TestResult;
use crate::stats::{median, round};

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
    /// What the planner expected, where several devices may share the layers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expected: Option<Expectation>,
    /// Another program in turn.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compare: Option<Comparison>,
    /// Decoding with a draft against decoding without.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drafting: Option<DraftingReport>,
}

/// What the planner expected before anything was measured.
#[derive(Debug, Serialize)]
pub struct Expectation {
    /// The parts in the order of their layers.
    pub parts: Vec<PartFacts>,
    /// Tokens a second that one sequence is written with.
    pub tok_s_one: f64,
    /// The same of eight together.
    pub tok_s_eight: f64,
    /// Tokens a second that a prompt is read with.
    pub prompt_tok_s: f64,
    /// Milliseconds in which the devices read the weights of their parts once, one after the other.
    pub read_ms: f64,
}

/// A device and its layers.
#[derive(Debug, Serialize)]
pub struct PartFacts {
    /// What `--devices` calls it.
    pub device: String,
    /// Layers.
    pub layers: usize,
    /// Bytes of weights that a token reads there.
    pub weight_bytes: u64,
    /// Gigabytes a second that the device reads.
    pub read_gb_s: f64,
}

impl Expectation {
    /// What was expected of a test by its name, if anything was.
    fn of(&self, test: &str) -> Option<f64> {
        match test.split_once('@') {
            Some(("tg", _)) => Some(self.tok_s_one),
            Some(("rows8", _)) => Some(self.tok_s_eight),
            None if test.starts_with("pp") => Some(self.prompt_tok_s),
            _ => None,
        }
    }
}

/// The comparison.
#[derive(Debug, Serialize)]
pub struct DraftingReport {
    /// True when proposals came from the known continuation: then the speedup is not that of any real draft.
    pub synthetic: bool,
    /// The probability with which a stand-in's proposals were right.
    pub stand_in_accept: Option<f64>,
    /// The draft.
    pub draft: String,
    /// Proposals per round, as asked.
    pub length: String,
    /// Tokens of each text.
    pub tokens: u32,
    /// Median over the texts of drafted over plain speed.
    pub speedup: f64,
    /// The lowest of them.
    pub lowest_speedup: f64,
    /// The same of a second engine without a draft, where there was one: lowest, median and highest text. An effect must
    /// be larger than this to be one.
    pub plain_against_plain: Option<[f64; 3]>,
    /// Tokens per step of the drafted texts.
    pub tokens_per_target_pass: f64,
    /// Proposals of a round, mean over all steps of the timed texts.
    pub proposals_per_step: f64,
    /// Proposals accepted, as a share of those made.
    pub accepted: f64,
    /// The same by place, the first place first.
    pub accepted_by_position: Vec<f64>,
    /// What rounds with proposals were expected to take over what they took; null where lengths were fixed or nothing was
    /// proposed.
    pub forecast_over_measured: Option<f64>,
    /// Each text.
    pub texts: Vec<TextResult>,
}

/// One text.
#[derive(Debug, Serialize)]
pub struct TextResult {
    /// Its beginning.
    pub begins: String,
    /// Tokens per second without a draft, median.
    pub plain_tok_s: f64,
    /// With the draft.
    pub drafted_tok_s: f64,
    /// Median of the ratios of the repetitions.
    pub speedup: f64,
    /// The same of the second engine without a draft.
    pub plain_again: Option<f64>,
    /// All of them.
    pub speedups: Vec<f64>,
}

impl TextResult {
    /// `speeds`: tokens per second of plain, drafted and perhaps plain again, by repetition.
    pub fn new(begins: &str, speeds: &[Vec<f64>]) -> Self {
        let ratios = |which: usize| -> Vec<f64> {
            speeds[which].iter().zip(&speeds[0]).map(|(other, plain)| round(other / plain, 4)).collect()
        };
        let middle = |values: &[f64], digits| round(median(values).unwrap_or(0.0), digits);
        let speedups = ratios(1);
        Self {
            begins: begins.to_owned(),
            plain_tok_s: middle(&speeds[0], 3),
            drafted_tok_s: middle(&speeds[1], 3),
            speedup: middle(&speedups, 4),
            plain_again: (speeds.len() > 2).then(|| middle(&ratios(2), 4)),
            speedups,
        }
    }
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
        if let Some(expected) = &self.expected {
            let part = |part: &PartFacts| {
                let gigabytes = part.weight_bytes as f64 / 1e9;
                format!(
                    "{} layers on {} ({gigabytes:.2} GB at {:.1} GB/s)",
                    part.layers, part.device, part.read_gb_s
                )
            };
            let parts: Vec<String> = expected.parts.iter().map(part).collect();
            line(format_args!("\n{}: weights read once take {:.2} ms", parts.join(", "), expected.read_ms));
            for test in &self.tests {
                if let Some(rate) = expected.of(&test.test) {
                    let (name, found) = (&test.test, test.tok_s);
                    line(format_args!(
                        "{name:<14} {found:>10.2} tok/s, {rate:.2} expected: {:.2}x",
                        found / rate
                    ));
                }
            }
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
