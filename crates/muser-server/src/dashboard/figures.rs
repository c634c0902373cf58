//! The figures: what each is, where it comes from, and the arithmetic.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::history::{History, Totals, Window};
use super::machine::{Machine, process_bytes};
use crate::backend::Snapshot;

/// Where a figure comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mark {
    /// Counted or timed by this server; rates and quantiles of such counts too.
    Measured,
    /// Arithmetic on measured figures and facts of the model's file.
    Derived,
    /// Rests on an assumption, which the description names.
    Estimated,
}

impl Mark {
    /// The word.
    pub fn word(self) -> &'static str {
        match self {
            Self::Measured => "measured",
            Self::Derived => "derived",
            Self::Estimated => "estimated",
        }
    }
}

use Mark::{Derived, Estimated, Measured};

/// A figure of now or of a span until now.
pub struct Figure {
    /// Its name in the answer.
    pub id: &'static str,
    /// What it is shown with.
    pub group: &'static str,
    /// Its name on a screen.
    pub label: &'static str,
    /// `tokens/s`, `tokens`, `s`, `bytes`, `bytes/s`, `share` (0 to 1), or what is counted.
    pub unit: &'static str,
    /// Where it comes from.
    pub mark: Mark,
    /// The span: `now`, `1 min`, `5 min`, `1 h` or `start`.
    pub over: &'static str,
    /// One sentence.
    pub what: &'static str,
    value: fn(&View<'_>) -> Option<f64>,
}

/// A column of the history.
pub struct Column {
    /// Its name in the answer.
    pub id: &'static str,
    /// Its name on a screen.
    pub label: &'static str,
    /// As for figures.
    pub unit: &'static str,
    /// Where it comes from.
    pub mark: Mark,
    value: fn(&Window<'_>, Option<&Machine>) -> Option<f64>,
}

/// What figures are computed from.
pub struct View<'a> {
    now: &'a Snapshot,
    totals: &'a Totals,
    minute: Window<'a>,
    five: Window<'a>,
    hour: Window<'a>,
    slots: usize,
    connections: i64,
    machine: Option<&'a Machine>,
}

impl<'a> View<'a> {
    /// How things stand `at` a time since the start.
    pub fn new(
        now: &'a Snapshot,
        (slots, connections): (usize, i64),
        machine: Option<&'a Machine>,
        (at, totals): (Duration, &'a Totals),
        history: &'a History,
    ) -> Self {
        let back = |minutes: u64| history.window(Duration::from_secs(60 * minutes), at, totals);
        let (minute, five, hour) = (back(1), back(5), back(60));
        Self { now, totals, minute, five, hour, slots, connections, machine }
    }
}

impl Figure {
    /// The value, if there is one: nothing is a quantile of no times.
    pub fn value(&self, view: &View<'_>) -> Option<f64> {
        (self.value)(view).filter(|value| value.is_finite()).map(rounded)
    }
}

impl Column {
    /// The value of one span.
    pub fn value(&self, span: &Window<'_>, machine: Option<&Machine>) -> Option<f64> {
        (self.value)(span, machine).filter(|value| value.is_finite()).map(rounded)
    }
}

/// Five significant digits of what is no whole number: more would be neither read nor true.
fn rounded(value: f64) -> f64 {
    if value == 0.0 || value.fract() == 0.0 {
        return value;
    }
    let scale = 10_f64.powi(4 - value.abs().log10().floor() as i32);
    (value * scale).round() / scale
}

const fn figure(
    (id, group, label): (&'static str, &'static str, &'static str),
    (unit, mark, over): (&'static str, Mark, &'static str),
    what: &'static str,
    value: fn(&View<'_>) -> Option<f64>,
) -> Figure {
    Figure { id, group, label, unit, mark, over, what, value }
}

const fn column(
    (id, label): (&'static str, &'static str),
    (unit, mark): (&'static str, Mark),
    value: fn(&Window<'_>, Option<&Machine>) -> Option<f64>,
) -> Column {
    Column { id, label, unit, mark, value }
}

/// Share of the memory's rate at which weights were read while steps ran.
fn bandwidth_share(span: &Window<'_>, machine: Option<&Machine>) -> Option<f64> {
    let (machine, busy) = (machine?, span.spent(|totals| totals.step_s));
    let bytes = span.grew(|totals| totals.steps) as f64 * machine.weight_bytes() as f64;
    (busy > 0.0).then_some(bytes / (busy * machine.bandwidth()?))
}

/// Seconds that packs and nodes saved, less what bringing took.
fn saved_brought(span: &Window<'_>) -> f64 {
    span.spent(|totals| totals.saved_brought_s) - span.spent(|totals| totals.restore_s)
}

/// All figures, in the order in which they are shown.
pub const FIGURES: &[Figure] = &[
    figure(
        ("written_per_s", "throughput", "Written"),
        ("tokens/s", Measured, "1 min"),
        "Tokens given to clients.",
        |v| v.minute.per_second(|t| t.written),
    ),
    figure(
        ("read_per_s", "throughput", "Read"),
        ("tokens/s", Measured, "1 min"),
        "Rows of prompts computed.",
        |v| v.minute.per_second(|t| t.read_rows),
    ),
    figure(
        ("written_tokens", "throughput", "Written"),
        ("tokens", Measured, "1 h"),
        "Tokens given to clients.",
        |v| Some(v.hour.grew(|t| t.written) as f64),
    ),
    figure(
        ("answers", "throughput", "Answers"),
        ("answers", Measured, "1 h"),
        "Answers that came to their end, each choice of a request by itself.",
        |v| Some(v.hour.grew(|t| t.finished) as f64),
    ),
    figure(
        ("first_token_p50", "latency", "First token, half"),
        ("s", Measured, "5 min"),
        "Half of the first tokens came within this time of the request, queue included. All quantiles are of buckets 26 % apart.",
        |v| v.five.quantile_s(|t| &t.first, 0.5),
    ),
    figure(
        ("first_token_p95", "latency", "First token, 95 %"),
        ("s", Measured, "5 min"),
        "19 of 20 first tokens came within this time.",
        |v| v.five.quantile_s(|t| &t.first, 0.95),
    ),
    figure(
        ("first_token_p95_hour", "latency", "First token, 95 %"),
        ("s", Measured, "1 h"),
        "The same for the hour.",
        |v| v.hour.quantile_s(|t| &t.first, 0.95),
    ),
    figure(
        ("next_token_p50", "latency", "Next token, half"),
        ("s", Measured, "5 min"),
        "Half of the tokens came within this time of the one before.",
        |v| v.five.quantile_s(|t| &t.between, 0.5),
    ),
    figure(
        ("next_token_p95", "latency", "Next token, 95 %"),
        ("s", Measured, "5 min"),
        "19 of 20 did.",
        |v| v.five.quantile_s(|t| &t.between, 0.95),
    ),
    figure(
        ("next_token_p95_hour", "latency", "Next token, 95 %"),
        ("s", Measured, "1 h"),
        "The same for the hour.",
        |v| v.hour.quantile_s(|t| &t.between, 0.95),
    ),
    figure(
        ("running", "queue", "Running"),
        ("requests", Measured, "now"),
        "Answers that are computed.",
        |v| Some(v.now.running as f64),
    ),
    figure(
        ("slots", "queue", "Slots"),
        ("slots", Measured, "now"),
        "Answers that can be computed together.",
        |v| Some(v.slots as f64),
    ),
    figure(("waiting", "queue", "Waiting"), ("requests", Measured, "now"), "Requests in the queue.", |v| {
        Some(v.now.waiting as f64)
    }),
    figure(
        ("expected_wait", "queue", "Wait for a slot"),
        ("s", Estimated, "now"),
        "For a request that comes now, if slots become free at the pace of late.",
        |v| {
            if v.now.running < v.slots as u64 && v.now.waiting == 0 {
                Some(0.0)
            } else {
                v.now.expected_wait(v.slots).map(|wait| wait.as_secs_f64())
            }
        },
    ),
    figure(
        ("preempted", "queue", "Set aside"),
        ("requests", Measured, "1 h"),
        "Requests whose memory others needed, to be computed again.",
        |v| Some(v.hour.grew(|t| t.preempted) as f64),
    ),
    figure(
        ("connections", "queue", "Connections"),
        ("connections", Measured, "now"),
        "Open connections, this one included.",
        |v| Some(v.connections.max(0) as f64),
    ),
    figure(
        ("kv_share", "memory", "KV cache used"),
        ("share", Measured, "now"),
        "Share of the KV cache that running requests use.",
        |v| (v.totals.kv_total > 0).then(|| v.totals.kv_used as f64 / v.totals.kv_total as f64),
    ),
    figure(
        ("kv_used", "memory", "KV used"),
        ("bytes", Measured, "now"),
        "KV blocks that running requests use.",
        |v| Some(v.totals.kv_used as f64),
    ),
    figure(
        ("kv_kept", "memory", "KV kept"),
        ("bytes", Measured, "now"),
        "KV blocks kept for reuse; they make room when it is needed.",
        |v| Some(v.totals.kv_kept as f64),
    ),
    figure(("kv_total", "memory", "KV in all"), ("bytes", Measured, "now"), "All KV blocks.", |v| {
        Some(v.totals.kv_total as f64)
    }),
    figure(
        ("kv_host", "memory", "KV on the host"),
        ("bytes", Measured, "now"),
        "KV blocks that a card had no room for.",
        |v| (v.now.host_bytes > 0).then_some(v.now.host_bytes as f64),
    ),
    figure(
        ("process", "memory", "Process"),
        ("bytes", Measured, "now"),
        "Memory of the process that is resident, with the pages of the model's file that are; Linux only.",
        |_| process_bytes().map(|bytes| bytes as f64),
    ),
    figure(("packs", "memory", "Packs"), ("packs", Measured, "now"), "Packs in the store.", |v| {
        (v.now.pack_bytes > 0).then_some(v.now.packs as f64)
    }),
    figure(
        ("pack_bytes", "memory", "Pack store"),
        ("bytes", Measured, "now"),
        "Bytes of the pack store.",
        |v| (v.now.pack_bytes > 0).then_some(v.now.pack_bytes as f64),
    ),
    figure(
        ("reused_share", "reuse", "Prompt reused"),
        ("share", Measured, "1 h"),
        "Share of the prompt tokens that was not computed.",
        |v| v.hour.share(|t| t.reused, |t| t.prompt),
    ),
    figure(
        ("reused_tokens", "reuse", "Reused"),
        ("tokens", Measured, "1 h"),
        "Prompt tokens that were not computed, whatever they came from.",
        |v| Some(v.hour.grew(|t| t.reused) as f64),
    ),
    figure(
        ("restored_tokens", "reuse", "From packs"),
        ("tokens", Measured, "1 h"),
        "Prompt tokens brought from packs.",
        |v| Some(v.hour.grew(|t| t.restored) as f64),
    ),
    figure(
        ("handed_tokens", "reuse", "From nodes"),
        ("tokens", Measured, "1 h"),
        "Prompt tokens that other nodes read.",
        |v| Some(v.hour.grew(|t| t.handed) as f64),
    ),
    figure(
        ("saved", "reuse", "Saved"),
        ("s", Estimated, "1 h"),
        "Time that computing the reused tokens would have taken, at the rate of the beginning of a prompt, less the time of bringing \
         them; further down a prompt the rate is lower, so it is rather more.",
        |v| Some(v.hour.spent(|t| t.saved_s) - v.hour.spent(|t| t.restore_s)),
    ),
    figure(
        ("saved_brought", "reuse", "By packs, nodes"),
        ("s", Estimated, "1 h"),
        "The part of it for tokens that packs or nodes brought; below zero where bringing took longer than computing.",
        |v| Some(saved_brought(&v.hour)),
    ),
    figure(("saved_start", "reuse", "Saved"), ("s", Estimated, "start"), "The same since the start.", |v| {
        Some(v.totals.saved_s - v.totals.restore_s)
    }),
    figure(
        ("restores_failed", "reuse", "Not brought"),
        ("times", Measured, "1 h"),
        "Times that a prefix was known to be in a store or at a node and did not come, so that it was computed.",
        |v| Some(v.hour.grew(|t| t.restores_failed) as f64),
    ),
    figure(
        ("accepted_share", "draft", "Accepted"),
        ("share", Measured, "1 h"),
        "Share of the draft's proposals that the model accepted.",
        |v| v.hour.share(|t| t.accepted, |t| t.drafted),
    ),
    figure(
        ("tokens_a_draft", "draft", "Accepted a draft"),
        ("tokens", Measured, "1 h"),
        "Tokens that a verified draft brought beside the model's own.",
        |v| v.hour.share(|t| t.accepted, |t| t.drafts),
    ),
    figure(
        ("busy_share", "roofline", "Device busy"),
        ("share", Measured, "5 min"),
        "Share of the time in which a step ran.",
        |v| (v.five.seconds > 0.0).then(|| (v.five.spent(|t| t.step_s) / v.five.seconds).min(1.0)),
    ),
    figure(
        ("step_bytes", "roofline", "Bytes a step"),
        ("bytes", Derived, "now"),
        "Weights that every step reads, by the model's file, and the KV blocks in use.",
        |v| Some(v.machine?.weight_bytes() as f64 + v.totals.kv_used as f64),
    ),
    figure(
        ("token_bytes", "roofline", "Bytes a token"),
        ("bytes", Derived, "5 min"),
        "Weights read in all steps, those that only read prompts included, by tokens written.",
        |v| {
            let (bytes, written) = (v.machine?.weight_bytes() as f64, v.five.grew(|t| t.written));
            (written > 0).then(|| bytes * v.five.grew(|t| t.steps) as f64 / written as f64)
        },
    ),
    figure(
        ("bandwidth", "roofline", "Memory reads"),
        ("bytes/s", Measured, "start"),
        "A plain read of the memory that holds the weights: a card's at the start, the host's when somebody first looks here and \
         nothing runs.",
        |v| v.machine?.bandwidth(),
    ),
    figure(
        ("bandwidth_share", "roofline", "Of that, used"),
        ("share", Derived, "5 min"),
        "Rate at which steps read weights, as a share of the plain read. Low while prompts are read: that is arithmetic.",
        |v| bandwidth_share(&v.five, v.machine),
    ),
    figure(
        ("most_per_s", "roofline", "One answer, at most"),
        ("tokens/s", Derived, "now"),
        "Plain read by weights: what one short answer cannot exceed without a draft.",
        |v| Some(v.machine?.bandwidth()? / (v.machine?.weight_bytes() as f64)),
    ),
    figure(
        ("errors", "errors", "Refused"),
        ("requests", Measured, "1 h"),
        "Requests answered with a status of 400 or more.",
        |v| Some(v.hour.grew(|t| t.errors) as f64),
    ),
    figure(
        ("own_errors", "errors", "Server's fault"),
        ("requests", Measured, "1 h"),
        "Of these, with 500 or more.",
        |v| Some(v.hour.grew(|t| t.own_errors) as f64),
    ),
    figure(
        ("failed", "errors", "Broken answers"),
        ("answers", Measured, "1 h"),
        "Answers that ended in an error after they had been taken, streams too.",
        |v| Some(v.hour.grew(|t| t.failed) as f64),
    ),
    figure(
        ("cancelled", "errors", "Clients gone"),
        ("requests", Measured, "1 h"),
        "Requests whose client went away before the end.",
        |v| Some(v.hour.grew(|t| t.cancelled) as f64),
    ),
];

/// The columns of the history.
pub const COLUMNS: &[Column] = &[
    column(("written", "Written"), ("tokens/s", Measured), |s, _| s.per_second(|t| t.written)),
    column(("read", "Read"), ("tokens/s", Measured), |s, _| s.per_second(|t| t.read_rows)),
    column(("reused", "Reused"), ("tokens/s", Measured), |s, _| s.per_second(|t| t.reused)),
    column(("first_p50", "First token, half"), ("s", Measured), |s, _| s.quantile_s(|t| &t.first, 0.5)),
    column(("first_p95", "First token, 95 %"), ("s", Measured), |s, _| s.quantile_s(|t| &t.first, 0.95)),
    column(("next_p50", "Next token, half"), ("s", Measured), |s, _| s.quantile_s(|t| &t.between, 0.5)),
    column(("next_p95", "Next token, 95 %"), ("s", Measured), |s, _| s.quantile_s(|t| &t.between, 0.95)),
    column(("running", "Running"), ("requests", Measured), |s, _| Some(s.to.running as f64)),
    column(("waiting", "Waiting"), ("requests", Measured), |s, _| Some(s.to.waiting as f64)),
    column(("kv_used", "KV in use"), ("bytes", Measured), |s, _| Some(s.to.kv_used as f64)),
    column(("kv_kept", "KV kept"), ("bytes", Measured), |s, _| Some(s.to.kv_kept as f64)),
    column(("accepted", "Accepted"), ("share", Measured), |s, _| s.share(|t| t.accepted, |t| t.drafted)),
    column(("bandwidth", "Memory rate used"), ("share", Derived), bandwidth_share),
    column(("errors", "Refused"), ("requests", Measured), |s, _| Some(s.grew(|t| t.errors) as f64)),
];

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::dashboard::machine::Bandwidth;

    const S: fn(u64) -> Duration = Duration::from_secs;

    #[test]
    fn names_are_unique_and_every_figure_says_what_it_is() {
        let ids: HashSet<_> = FIGURES.iter().map(|figure| figure.id).collect();
        assert_eq!(ids.len(), FIGURES.len());
        let columns: HashSet<_> = COLUMNS.iter().map(|column| column.id).collect();
        assert_eq!(columns.len(), COLUMNS.len());
        for figure in FIGURES {
            assert!(figure.what.ends_with('.') && !figure.label.is_empty(), "{}", figure.id);
            assert!(["now", "1 min", "5 min", "1 h", "start"].contains(&figure.over), "{}", figure.id);
        }
    }

    #[test]
    fn an_hour_of_work_in_figures() {
        let mut history = History::default();
        // Ten steps and five tokens a second, of which half an hour with errors.
        let totals = |s: u64| Totals {
            written: 5 * s,
            read_rows: 100 * s,
            prompt: 200 * s,
            reused: 100 * s,
            restored: 50 * s,
            saved_s: 0.5 * s as f64,
            saved_brought_s: 0.25 * s as f64,
            restore_s: 0.125 * s as f64,
            steps: 10 * s,
            step_s: 0.5 * s as f64,
            drafted: 4 * s,
            accepted: 3 * s,
            drafts: s,
            errors: s.min(1800),
            kv_used: 256,
            kv_total: 1024,
            ..Totals::default()
        };
        for place in 1..=720 {
            history.push(S(10 * place), totals(10 * place));
        }
        let (now, totals) = (Snapshot { running: 2, ..Snapshot::default() }, totals(7200));
        let machine = Machine::new(1000, Bandwidth::Known(Some(40_000.0)));
        let value = |machine: Option<&Machine>, id: &str| {
            let view = View::new(&now, (4, 1), machine, (S(7200), &totals), &history);
            let figure = FIGURES.iter().find(|figure| figure.id == id).expect(id);
            figure.value(&view)
        };
        for (id, expected) in [
            ("written_per_s", Some(5.0)),
            ("read_per_s", Some(100.0)),
            ("written_tokens", Some(18_000.0)),
            ("first_token_p50", None),
            ("running", Some(2.0)),
            ("expected_wait", Some(0.0)),
            ("kv_share", Some(0.25)),
            ("kv_host", None),
            ("reused_share", Some(0.5)),
            ("restored_tokens", Some(180_000.0)),
            // 1,800 s for all of it and 450 s of bringing.
            ("saved", Some(1350.0)),
            ("saved_brought", Some(450.0)),
            ("saved_start", Some(2700.0)),
            ("accepted_share", Some(0.75)),
            ("tokens_a_draft", Some(3.0)),
            ("busy_share", Some(0.5)),
            ("step_bytes", Some(1256.0)),
            ("token_bytes", Some(2000.0)),
            // 10,000 bytes a second in half of the time.
            ("bandwidth_share", Some(0.5)),
            ("most_per_s", Some(40.0)),
            ("errors", Some(0.0)),
        ] {
            assert_eq!(value(Some(&machine), id), expected, "{id}");
        }
        for id in ["step_bytes", "token_bytes", "bandwidth", "bandwidth_share", "most_per_s"] {
            assert_eq!(value(None, id), None, "{id} without a machine");
        }
        let (_, spans) = history.spans(719);
        let last: Vec<Option<f64>> =
            spans.flat_map(|span| COLUMNS.iter().map(move |column| column.value(&span, None))).collect();
        assert_eq!(last[..4], [Some(5.0), Some(100.0), Some(100.0), None]);
        assert_eq!(last.len(), COLUMNS.len());
    }

    #[test]
    fn five_digits() {
        for (value, expected) in
            [(0.0, 0.0), (123_456.0, 123_456.0), (1.0 / 3.0, 0.333_33), (1234.567, 1234.6), (-2.000_04, -2.0)]
        {
            assert!((rounded(value) - expected).abs() < 1e-12, "{value}: {}", rounded(value));
        }
    }
}
