//! Prometheus metrics, under the names that operators' dashboards and load generators know from vLLM.
//!
//! Times of requests are measured here, from their arrival, so that queueing is part of the time to the first token.
//! Times of the engine's own work, and totals that only it knows, are copied in when the metrics are read. The struct's fields can be
//! read by tests; there is no global state.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use serde_json::{Map, Value};

use crate::backend::Snapshot;
use crate::dashboard::{Clocks, NodePart};
use crate::node_metrics::NodeMetrics;
use crate::nodes::NodeTotals;
use crate::registration::{FloatGauge, Labels, Totals, counter, gauge, register};

/// All metrics of one loaded model.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    running: Gauge,
    waiting: Gauge,
    kv_usage: FloatGauge,
    prompt_tokens: Counter,
    prompt_tokens_cached: Counter,
    generation_tokens: Counter,
    success: Family<Labels, Counter>,
    refused: Family<Labels, Counter>,
    first_token: Histogram,
    inter_token: Histogram,
    per_output_token: Histogram,
    end_to_end: Histogram,
    queue: Histogram,
    prefill: Histogram,
    decode: Histogram,
    prefix_queries: Counter,
    prefix_hits: Counter,
    external_queries: Counter,
    external_hits: Counter,
    restore_failures: Family<Labels, Counter>,
    pack_refusals: Family<Labels, Counter>,
    pack_unlike: Counter,
    packs: Gauge,
    pack_bytes: Gauge,
    host_bytes: Gauge,
    host_blocks_restored: Counter,
    steps: Totals,
    draft_rounds: Totals,
    restores: Totals,
    exports: Totals,
    nodes: NodeMetrics,
    images_encoded: Counter,
    image_rows_encoded: Counter,
    image_cache_hits: Counter,
    image_errors: Counter,
    image_cache_bytes: Gauge,
    tower_seconds: Counter<f64, std::sync::atomic::AtomicU64>,
    preemptions: Counter,
    drafts: Counter,
    drafted: Counter,
    drafted_accepted: Counter,
    accepted_by_place: Family<Labels, Counter>,
    transfer_params: Counter,
    /// Requests whose client went away before the end.
    pub cancelled: Counter,
    /// Times that old parts of a text went because the context was full.
    pub context_shifts: Counter,
    /// Connections open now.
    pub connections: Gauge,
    /// What the dashboard needs and cannot read from the metrics.
    pub clocks: Clocks,
}

const SHORT_S: [f64; 16] =
    [0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0];
const LONG_S: [f64; 18] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0,
    2560.0,
];

impl Metrics {
    /// Metrics labelled with the model's name.
    pub fn new(model_name: &str) -> Self {
        let labels = [("model_name".into(), model_name.to_owned().into())];
        let mut all = Registry::with_labels(labels.into_iter());
        let short = || Histogram::new(SHORT_S);
        let long = || Histogram::new(LONG_S);
        Self {
            running: gauge(&mut all, "vllm:num_requests_running", "Requests being computed"),
            waiting: gauge(&mut all, "vllm:num_requests_waiting", "Requests in the queue"),
            kv_usage: register(
                &mut all,
                "vllm:kv_cache_usage_perc",
                "Share of the KV cache in use, 0 to 1",
                FloatGauge::default(),
            ),
            prompt_tokens: counter(
                &mut all,
                "vllm:prompt_tokens",
                "Prompt tokens of requests that were read",
            ),
            prompt_tokens_cached: counter(
                &mut all,
                "vllm:prompt_tokens_cached",
                "Prompt tokens of them that were reused from a cache",
            ),
            generation_tokens: counter(&mut all, "vllm:generation_tokens", "Generated tokens"),
            success: register(
                &mut all,
                "vllm:request_success",
                "Finished requests by reason",
                Family::default(),
            ),
            refused: register(
                &mut all,
                "muser:requests_refused",
                "Refused requests by status and code",
                Family::default(),
            ),
            first_token: register(
                &mut all,
                "vllm:time_to_first_token_seconds",
                "From arrival to the first token, queue included",
                long(),
            ),
            inter_token: register(
                &mut all,
                "vllm:inter_token_latency_seconds",
                "Between two tokens",
                short(),
            ),
            per_output_token: register(
                &mut all,
                "vllm:request_time_per_output_token_seconds",
                "Mean time of a request's tokens after the first",
                short(),
            ),
            end_to_end: register(
                &mut all,
                "vllm:e2e_request_latency_seconds",
                "From arrival to the last token",
                long(),
            ),
            queue: register(&mut all, "vllm:request_queue_time_seconds", "Time in the queue", long()),
            prefill: register(
                &mut all,
                "vllm:request_prefill_time_seconds",
                "From leaving the queue until the prompt was read",
                long(),
            ),
            decode: register(
                &mut all,
                "vllm:request_decode_time_seconds",
                "From the first to the last token",
                long(),
            ),
            prefix_queries: counter(
                &mut all,
                "vllm:prefix_cache_queries",
                "Prompt tokens looked up in the cache",
            ),
            prefix_hits: counter(&mut all, "vllm:prefix_cache_hits", "Prompt tokens found in the cache"),
            external_queries: counter(
                &mut all,
                "vllm:external_prefix_cache_queries",
                "Prompt tokens looked up in packs",
            ),
            external_hits: counter(
                &mut all,
                "vllm:external_prefix_cache_hits",
                "Prompt tokens found in packs",
            ),
            restore_failures: register(
                &mut all,
                "muser:restores_failed",
                "Restores from packs that came to nothing, so that the prompt was computed, by reason",
                Family::default(),
            ),
            pack_refusals: register(
                &mut all,
                "muser:pack_refusals",
                "Objects of the pack store that were not believed, by reason",
                Family::default(),
            ),
            pack_unlike: counter(
                &mut all,
                "muser:pack_unlike",
                "Lookups of prompts that the store has under another KV type, numeric route or model",
            ),
            packs: gauge(&mut all, "muser:packs", "Packs in the store"),
            pack_bytes: gauge(&mut all, "muser:pack_store_bytes", "Bytes of the pack store"),
            host_bytes: gauge(&mut all, "muser:kv_host_bytes", "Bytes of the KV cache kept in host memory"),
            host_blocks_restored: counter(
                &mut all,
                "muser:kv_host_blocks_restored",
                "KV blocks that came back from host memory",
            ),
            steps: register(&mut all, "muser:step_seconds", "Steps of the device", Totals::default()),
            draft_rounds: register(
                &mut all,
                "muser:draft_round_seconds",
                "Drafts for all sequences of a step",
                Totals::default(),
            ),
            restores: register(
                &mut all,
                "muser:pack_restore_seconds",
                "Prefixes brought from packs",
                Totals::default(),
            ),
            exports: register(
                &mut all,
                "muser:pack_export_seconds",
                "KV blocks copied out for packs, between two steps",
                Totals::default(),
            ),
            nodes: NodeMetrics::new(&mut all),
            images_encoded: counter(
                &mut all,
                "muser:images_encoded",
                "Images that the vision tower worked on",
            ),
            image_rows_encoded: counter(
                &mut all,
                "muser:image_rows_encoded",
                "Rows of images that the vision tower made",
            ),
            image_cache_hits: counter(
                &mut all,
                "muser:image_cache_hits",
                "Images whose rows were still kept when they were wanted",
            ),
            image_errors: counter(&mut all, "muser:image_errors", "Images that the vision tower failed on"),
            image_cache_bytes: gauge(
                &mut all,
                "muser:image_cache_bytes",
                "Bytes of rows of images that are kept",
            ),
            tower_seconds: register(
                &mut all,
                "muser:tower_seconds",
                "Time that the vision tower worked",
                Counter::default(),
            ),
            preemptions: counter(&mut all, "vllm:num_preemptions", "Requests set aside for want of cache"),
            drafts: counter(&mut all, "vllm:spec_decode_num_drafts", "Drafts verified"),
            accepted_by_place: register(
                &mut all,
                "vllm:spec_decode_num_accepted_tokens_per_pos",
                "Proposed tokens that were accepted, by place in the draft",
                Family::default(),
            ),
            drafted: counter(&mut all, "vllm:spec_decode_num_draft_tokens", "Tokens proposed by the draft"),
            drafted_accepted: counter(
                &mut all,
                "vllm:spec_decode_num_accepted_tokens",
                "Proposed tokens that were accepted",
            ),
            cancelled: counter(&mut all, "muser:requests_cancelled", "Requests whose client went away"),
            context_shifts: counter(
                &mut all,
                "muser:context_shifts",
                "Times that old parts of a text went because the context was full",
            ),
            transfer_params: counter(
                &mut all,
                "muser:kv_transfer_params_ignored",
                "Requests that named a node in kv_transfer_params, which is not asked",
            ),
            connections: gauge(&mut all, "muser:connections", "Open connections"),
            clocks: Clocks::default(),
            registry: all,
        }
    }

    /// A request may say by which node its prompt was read. No address that comes in a request is dialled, so that is counted
    /// and nothing else.
    pub fn note_transfer_params(&self, body: &Map<String, Value>) {
        let named = body.get("kv_transfer_params").and_then(Value::as_object);
        let is_some = |(key, value): (&String, &Value)| key.starts_with("remote_") && !value.is_null();
        if named.is_some_and(|named| named.iter().any(is_some)) {
            self.transfer_params.inc();
        }
    }

    /// Counts a request that was not taken.
    pub fn count_refused(&self, status: u16, code: &'static str) {
        let labels = vec![("status".into(), status.to_string()), ("code".into(), code.into())];
        self.refused.get_or_create(&labels).inc();
        self.clocks.errors.count(status, code, Instant::now());
    }

    /// Counts a prompt that has been read.
    pub fn count_started(&self, prompt_tokens: u32, cached_tokens: u32, queue: Duration, prefill: Duration) {
        self.prompt_tokens.inc_by(u64::from(prompt_tokens));
        self.prompt_tokens_cached.inc_by(u64::from(cached_tokens));
        self.queue.observe(queue.as_secs_f64());
        self.prefill.observe(prefill.as_secs_f64());
        self.clocks.started(prompt_tokens.saturating_sub(cached_tokens), prefill);
    }

    /// The text for a scraper.
    pub fn encode(&self, now: &Snapshot, totals: &NodeTotals, nodes: &[NodePart]) -> String {
        self.running.set(now.running as i64);
        self.waiting.set(now.waiting as i64);
        self.kv_usage.set(now.kv_blocks_used as f64 / now.kv_blocks_total.max(1) as f64);
        self.pack_unlike.inner().store(now.pack_unlike, Ordering::Relaxed);
        self.packs.set(now.packs as i64);
        self.pack_bytes.set(now.pack_bytes as i64);
        self.host_bytes.set(now.host_bytes as i64);
        self.image_cache_bytes.set(now.image_cache_bytes as i64);
        self.tower_seconds.inner().store(now.tower_time.as_secs_f64().to_bits(), Ordering::Relaxed);
        self.steps.set(&now.steps);
        self.draft_rounds.set(&now.draft_rounds);
        self.restores.set(&now.restores);
        self.exports.set(&now.exports);
        self.nodes.set(totals, now.handed_tokens, nodes);
        for (family, totals) in
            [(&self.restore_failures, &now.restore_failures), (&self.pack_refusals, &now.pack_refusals)]
        {
            for (reason, total) in totals {
                let labels = vec![("reason".into(), (*reason).to_owned())];
                family.get_or_create(&labels).inner().store(*total, Ordering::Relaxed);
            }
        }
        let totals = [
            (&self.prefix_queries, now.prefix_queries),
            (&self.prefix_hits, now.prefix_hits),
            (&self.external_queries, now.external_queries),
            (&self.external_hits, now.external_hits),
            (&self.images_encoded, now.images_encoded),
            (&self.image_rows_encoded, now.image_rows_encoded),
            (&self.image_cache_hits, now.image_cache_hits),
            (&self.image_errors, now.image_errors),
            (&self.preemptions, now.preemptions),
            (&self.host_blocks_restored, now.host_blocks_restored),
            (&self.drafts, now.drafts),
            (&self.drafted, now.drafted),
            (&self.drafted_accepted, now.drafted_accepted),
        ];
        for (counter, total) in totals {
            counter.inner().store(total, Ordering::Relaxed);
        }
        for (place, &total) in now.drafted_accepted_by_place.iter().enumerate() {
            let labels = vec![("position".into(), place.to_string())];
            self.accepted_by_place.get_or_create(&labels).inner().store(total, Ordering::Relaxed);
        }
        let mut text = String::new();
        // Writing into a string cannot fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

/// The clock of one choice of a request.
#[derive(Debug, Clone)]
pub struct ChoiceClock {
    arrived: Instant,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    tokens: u32,
}

impl ChoiceClock {
    /// A clock for a request that arrived at `arrived`.
    pub fn new(arrived: Instant) -> Self {
        Self { arrived, first_token: None, last_token: None, tokens: 0 }
    }

    /// A token came.
    pub fn token(&mut self, metrics: &Metrics) {
        let now = Instant::now();
        self.tokens += 1;
        metrics.generation_tokens.inc();
        if let Some(before) = self.last_token.replace(now) {
            metrics.inter_token.observe((now - before).as_secs_f64());
            metrics.clocks.further(now - before);
        } else {
            self.first_token = Some(now);
            metrics.first_token.observe((now - self.arrived).as_secs_f64());
            metrics.clocks.first(now - self.arrived);
        }
    }

    /// The choice ended for `reason`.
    pub fn finish(&self, metrics: &Metrics, reason: &str) {
        metrics.success.get_or_create(&vec![("finished_reason".into(), reason.into())]).inc();
        metrics.end_to_end.observe(self.arrived.elapsed().as_secs_f64());
        // What was cut off is counted where that is decided.
        if reason != "abort" {
            metrics.clocks.finished();
        }
        if let (Some(first), Some(last)) = (self.first_token, self.last_token) {
            let decode = (last - first).as_secs_f64();
            metrics.decode.observe(decode);
            if self.tokens > 1 {
                metrics.per_output_token.observe(decode / f64::from(self.tokens - 1));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_that_dashboards_know() {
        let metrics = Metrics::new("tiny \"quoted\"");
        metrics.count_started(10, 4, Duration::from_millis(1), Duration::from_millis(2));
        let mut clock = ChoiceClock::new(Instant::now());
        clock.token(&metrics);
        clock.token(&metrics);
        clock.finish(&metrics, "stop");
        let now = Snapshot {
            running: 2,
            waiting: 3,
            kv_blocks_used: 1,
            kv_blocks_total: 4,
            prefix_hits: 5,
            drafts: 3,
            drafted: 9,
            drafted_accepted_by_place: vec![3, 1],
            host_bytes: 77,
            image_rows_encoded: 50,
            tower_time: Duration::from_millis(1500),
            ..Snapshot::default()
        };
        let mut now = now;
        now.steps.counts[2] = 2;
        now.steps.counts[22] = 1;
        now.steps.sum_s = 200.5;
        let handed = NodeTotals {
            outcomes: vec![("handed", 2), ("local_sooner", 1)],
            refusals: vec![("nonce", 3)],
            ..NodeTotals::default()
        };
        let box_ = |state: &str| {
            vec![NodePart { name: "box".into(), state: state.into(), fetching: 1, ..NodePart::default() }]
        };
        now.handed_tokens = 899;
        metrics.encode(&now, &handed, &box_("unproven"));
        let text = metrics.encode(&now, &handed, &box_("ready"));
        for line in [
            "vllm:num_requests_running{model_name=\"tiny \\\"quoted\\\"\"} 2",
            "vllm:num_requests_waiting{model_name=\"tiny \\\"quoted\\\"\"} 3",
            "vllm:generation_tokens_total{model_name=\"tiny \\\"quoted\\\"\"} 2",
            "vllm:spec_decode_num_drafts_total{model_name=\"tiny \\\"quoted\\\"\"} 3",
            "vllm:prefix_cache_hits_total{model_name=\"tiny \\\"quoted\\\"\"} 5",
            "vllm:prompt_tokens_total{model_name=\"tiny \\\"quoted\\\"\"} 10",
            "vllm:prompt_tokens_cached_total{model_name=\"tiny \\\"quoted\\\"\"} 4",
            "vllm:request_queue_time_seconds_sum{model_name=\"tiny \\\"quoted\\\"\"} 0.001",
            "vllm:request_prefill_time_seconds_sum{model_name=\"tiny \\\"quoted\\\"\"} 0.002",
            "vllm:request_queue_time_seconds_count{model_name=\"tiny \\\"quoted\\\"\"} 1",
            "vllm:kv_cache_usage_perc{model_name=\"tiny \\\"quoted\\\"\"} 0.25",
            "vllm:spec_decode_num_draft_tokens_total{model_name=\"tiny \\\"quoted\\\"\"} 9",
            "muser:kv_host_bytes{model_name=\"tiny \\\"quoted\\\"\"} 77",
            "muser:image_rows_encoded_total{model_name=\"tiny \\\"quoted\\\"\"} 50",
            "muser:tower_seconds_total{model_name=\"tiny \\\"quoted\\\"\"} 1.5",
            "muser:step_seconds_sum{model_name=\"tiny \\\"quoted\\\"\"} 200.5",
            "muser:step_seconds_count{model_name=\"tiny \\\"quoted\\\"\"} 3",
            "muser:step_seconds_bucket{model_name=\"tiny \\\"quoted\\\"\",le=\"0.0025\"} 0",
            "muser:step_seconds_bucket{model_name=\"tiny \\\"quoted\\\"\",le=\"0.005\"} 2",
            "muser:step_seconds_bucket{model_name=\"tiny \\\"quoted\\\"\",le=\"160.0\"} 2",
            "muser:step_seconds_bucket{model_name=\"tiny \\\"quoted\\\"\",le=\"+Inf\"} 3",
            "muser:node_handoffs_total{model_name=\"tiny \\\"quoted\\\"\",outcome=\"handed\"} 2",
            "muser:node_refusals_total{model_name=\"tiny \\\"quoted\\\"\",refusal=\"nonce\"} 3",
            "muser:node_prompt_tokens_total{model_name=\"tiny \\\"quoted\\\"\"} 899",
            "muser:node_state{model_name=\"tiny \\\"quoted\\\"\",node=\"box\",state=\"ready\"} 1",
            "muser:node_fetching{model_name=\"tiny \\\"quoted\\\"\",node=\"box\"} 1",
            "# EOF",
        ] {
            assert!(text.contains(line), "{line} is missing in:\n{text}");
        }
        for name in [
            "kv_cache_usage_perc",
            "prompt_tokens_total",
            "prompt_tokens_cached_total",
            "request_success_total",
            "time_to_first_token_seconds_bucket",
            "inter_token_latency_seconds_bucket",
            "request_time_per_output_token_seconds_bucket",
            "e2e_request_latency_seconds_bucket",
            "request_queue_time_seconds_bucket",
            "request_prefill_time_seconds_bucket",
            "request_decode_time_seconds_bucket",
            "prefix_cache_queries_total",
            "external_prefix_cache_hits_total",
            "num_preemptions_total",
            "spec_decode_num_draft_tokens_total",
            "spec_decode_num_accepted_tokens_total",
            "spec_decode_num_accepted_tokens_per_pos_total",
        ] {
            assert!(text.contains(&format!("vllm:{name}")), "{name} is missing");
        }
        // Reading twice gives the same totals.
        assert_eq!(text, metrics.encode(&now, &handed, &box_("ready")));
        assert!(!text.contains("unproven"), "one state at a time");
    }
}
