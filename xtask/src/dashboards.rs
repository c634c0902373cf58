//! The Grafana dashboard, made from the server's registrations, and a check of every other file that names a metric.
//!
//! A panel names metrics and what is asked of them, never an expression: one that does not exist, or a rate of something
//! that is no counter, is an error here. A metric without a panel is one too, so that new ones are seen.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};

use crate::metrics::{self, Kind, Metric};
use crate::tree::{File, words};

const DASHBOARD: &str = "packaging/grafana/muser.json";
const PREFIXES: [&str; 2] = ["vllm:", "muser:"];
const FILTER: &str = "model_name=~\"$model\",instance=~\"$instance\"";

/// What is asked of a metric, and the legend.
enum Ask {
    /// A gauge as it is, by server.
    Now(&'static str),
    /// The same with a legend of its own.
    NowBy(&'static str, &'static str),
    /// A counter a second, all servers together.
    Rate(&'static str, &'static str),
    /// The same for each value of a label.
    RateBy(&'static str, &'static str),
    /// The growth of one counter as a share of another's.
    Share(&'static str, &'static str, &'static str),
    /// Median, 95th and 99th percentile of a histogram.
    Times(&'static str),
}

struct Panel {
    title: &'static str,
    unit: &'static str,
    asks: &'static [Ask],
}

use Ask::{Now, NowBy, Rate, RateBy, Share, Times};

const PANELS: &[Panel] = &[
    Panel {
        title: "Tokens a second",
        unit: "short",
        asks: &[
            Rate("vllm:generation_tokens", "written"),
            Rate("vllm:prompt_tokens", "prompts"),
            Rate("vllm:prompt_tokens_cached", "prompts, from a cache"),
        ],
    },
    Panel {
        title: "Requests",
        unit: "short",
        asks: &[Now("vllm:num_requests_running"), Now("vllm:num_requests_waiting")],
    },
    Panel { title: "Time to the first token", unit: "s", asks: &[Times("vllm:time_to_first_token_seconds")] },
    Panel { title: "Between two tokens", unit: "s", asks: &[Times("vllm:inter_token_latency_seconds")] },
    Panel {
        title: "Mean time of a request's tokens",
        unit: "s",
        asks: &[Times("vllm:request_time_per_output_token_seconds")],
    },
    Panel { title: "Whole requests", unit: "s", asks: &[Times("vllm:e2e_request_latency_seconds")] },
    Panel { title: "In the queue", unit: "s", asks: &[Times("vllm:request_queue_time_seconds")] },
    Panel {
        title: "Reading prompts (prefill)",
        unit: "s",
        asks: &[Times("vllm:request_prefill_time_seconds")],
    },
    Panel {
        title: "Writing answers (decode)",
        unit: "s",
        asks: &[Times("vllm:request_decode_time_seconds")],
    },
    Panel {
        title: "Finished requests a second, by reason",
        unit: "reqps",
        asks: &[
            RateBy("vllm:request_success", "finished_reason"),
            Rate("muser:requests_cancelled", "client went away"),
            Rate("muser:kv_transfer_params_ignored", "named a node"),
        ],
    },
    Panel {
        title: "Refused requests a second, by code",
        unit: "reqps",
        asks: &[RateBy("muser:requests_refused", "code")],
    },
    Panel { title: "KV cache in use", unit: "percentunit", asks: &[Now("vllm:kv_cache_usage_perc")] },
    Panel {
        title: "Requests set aside for want of cache, a second",
        unit: "reqps",
        asks: &[Rate("vllm:num_preemptions", "set aside")],
    },
    Panel {
        title: "Share of prompts that was not computed",
        unit: "percentunit",
        asks: &[
            Share("vllm:prefix_cache_hits", "vllm:prefix_cache_queries", "memory"),
            Share("vllm:external_prefix_cache_hits", "vllm:external_prefix_cache_queries", "packs"),
        ],
    },
    Panel { title: "Pack store", unit: "bytes", asks: &[Now("muser:pack_store_bytes")] },
    Panel { title: "Packs", unit: "short", asks: &[Now("muser:packs")] },
    Panel {
        title: "Packs not believed, restores that failed, prompts stored otherwise, a second",
        unit: "short",
        asks: &[
            RateBy("muser:pack_refusals", "reason"),
            RateBy("muser:restores_failed", "reason"),
            Rate("muser:pack_unlike", "of another KV type, route or model"),
        ],
    },
    Panel {
        title: "Accepted share of proposed tokens",
        unit: "percentunit",
        asks: &[Share(
            "vllm:spec_decode_num_accepted_tokens",
            "vllm:spec_decode_num_draft_tokens",
            "accepted",
        )],
    },
    Panel {
        title: "Drafts a second, accepted tokens by place",
        unit: "short",
        asks: &[
            Rate("vllm:spec_decode_num_drafts", "drafts"),
            RateBy("vllm:spec_decode_num_accepted_tokens_per_pos", "position"),
        ],
    },
    Panel { title: "A step of the device", unit: "s", asks: &[Times("muser:step_seconds")] },
    Panel { title: "A round of drafts", unit: "s", asks: &[Times("muser:draft_round_seconds")] },
    Panel { title: "KV cache in host memory", unit: "bytes", asks: &[Now("muser:kv_host_bytes")] },
    Panel {
        title: "Blocks from host memory, shifted contexts, a second",
        unit: "short",
        asks: &[
            Rate("muser:kv_host_blocks_restored", "blocks brought back"),
            Rate("muser:context_shifts", "contexts shifted"),
        ],
    },
    Panel {
        title: "Images a second: through the tower, rows still kept, failed",
        unit: "short",
        asks: &[
            Rate("muser:images_encoded", "through the tower"),
            Rate("muser:image_cache_hits", "rows still kept"),
            Rate("muser:image_errors", "failed"),
        ],
    },
    Panel {
        title: "Rows of images a second",
        unit: "short",
        asks: &[Rate("muser:image_rows_encoded", "rows")],
    },
    Panel {
        title: "Share of the time that the tower works",
        unit: "percentunit",
        asks: &[Rate("muser:tower_seconds", "tower")],
    },
    Panel { title: "Rows of images that are kept", unit: "bytes", asks: &[Now("muser:image_cache_bytes")] },
    Panel { title: "Restoring a prefix from packs", unit: "s", asks: &[Times("muser:pack_restore_seconds")] },
    Panel {
        title: "Copying blocks out for packs, between two steps",
        unit: "s",
        asks: &[Times("muser:pack_export_seconds")],
    },
    Panel {
        title: "Prompts that nodes were asked about, a second, by what became of them",
        unit: "reqps",
        asks: &[RateBy("muser:node_handoffs", "outcome"), RateBy("muser:node_resumptions", "on")],
    },
    Panel {
        title: "Prompts read for nodes, a second",
        unit: "reqps",
        asks: &[RateBy("muser:node_requests", "outcome")],
    },
    Panel {
        title: "Tokens read by nodes and for nodes, a second",
        unit: "short",
        asks: &[
            Rate("muser:node_prompt_tokens", "by nodes"),
            Rate("muser:node_prompt_tokens_given", "for nodes"),
        ],
    },
    Panel { title: "Rows of nodes", unit: "Bps", asks: &[RateBy("muser:node_bytes", "direction")] },
    Panel { title: "Asking nodes", unit: "s", asks: &[Times("muser:node_quote_seconds")] },
    Panel { title: "Hand-offs", unit: "s", asks: &[Times("muser:node_transfer_seconds")] },
    Panel {
        title: "Nodes not believed, a second: frames, connections, audits",
        unit: "short",
        asks: &[
            RateBy("muser:node_refusals", "refusal"),
            RateBy("muser:node_handshakes_failed", "reason"),
            RateBy("muser:node_audits", "outcome"),
        ],
    },
    Panel {
        title: "Nodes: state, hand-offs that go on",
        unit: "short",
        asks: &[
            NowBy("muser:node_state", "{{node}} {{state}}"),
            NowBy("muser:node_fetching", "from {{node}}"),
            NowBy("muser:node_giving", "to {{node}}"),
        ],
    },
    Panel { title: "Connections", unit: "short", asks: &[Now("muser:connections")] },
];

/// Writes the dashboard.
pub(crate) fn write(root: &Path) -> Result<()> {
    let path = root.join(DASHBOARD);
    std::fs::write(&path, make(&metrics::read(root)?)?).with_context(|| path.display().to_string())
}

/// The committed dashboard is the one that would be made, and no file names a series that the server does not have.
pub(crate) fn faults(root: &Path, files: &[File]) -> Result<Vec<String>> {
    let metrics = metrics::read(root)?;
    let mut faults = unknown_series(&metrics, files);
    let committed = files.iter().find(|file| file.name == DASHBOARD).map_or("", |file| &file.text);
    if committed != make(&metrics)? {
        faults.push(format!("{DASHBOARD} is stale: run cargo xtask dashboards"));
    }
    Ok(faults)
}

fn unknown_series(metrics: &[Metric], files: &[File]) -> Vec<String> {
    let known: BTreeSet<String> = metrics.iter().flat_map(Metric::series).collect();
    let naming = files.iter().filter(|file| {
        file.name.starts_with("packaging/") || file.has_extension(&["md"]) && file.name != "CHANGELOG.md"
    });
    let mut faults = Vec::new();
    for file in naming {
        for word in words(&file.text, &[':']) {
            let Some(rest) = PREFIXES.iter().find_map(|prefix| word.strip_prefix(prefix)) else { continue };
            // In documents `vllm:request_{queue,prefill}_…` is several; of histograms the plain name may be said.
            let said = rest.is_empty() || rest.ends_with('_') || known.contains(word);
            let plain = !file.name.starts_with("packaging/") && known.contains(&format!("{word}_sum"));
            if !said && !plain && rest.starts_with(|c: char| c.is_ascii_lowercase()) {
                faults.push(format!("{}: {word} is no series of the server's", file.name));
            }
        }
    }
    faults
}

fn make(metrics: &[Metric]) -> Result<String> {
    let mut shown = BTreeSet::new();
    let mut panels = Vec::new();
    for (number, panel) in PANELS.iter().enumerate() {
        panels.push(panel.json(number, metrics, &mut shown).with_context(|| panel.title)?);
    }
    let hidden: Vec<_> =
        metrics.iter().filter(|m| !shown.contains(m.name.as_str())).map(|m| &m.name).collect();
    ensure!(hidden.is_empty(), "no panel of xtask/src/dashboards.rs shows {hidden:?}");
    let choice = |name: &str| {
        json!({
            "name": name.split('_').next(), "label": name, "type": "query", "datasource": source(), "refresh": 2,
            "query": {"query": format!("label_values(vllm:num_requests_running, {name})"), "refId": name},
            "includeAll": true, "multi": true, "allValue": ".*", "sort": 1,
        })
    };
    let dashboard = json!({
        "uid": "muser", "title": "muser", "tags": ["muser"], "editable": true, "schemaVersion": 39, "version": 1,
        "description": "Made by `cargo xtask dashboards` from the server's registrations; changes belong there.",
        "time": {"from": "now-1h", "to": "now"}, "refresh": "15s", "timezone": "browser",
        "templating": {"list": [
            {"name": "source", "label": "data source", "type": "datasource", "query": "prometheus"},
            choice("model_name"), choice("instance"),
        ]},
        "panels": panels,
    });
    // A line for each panel, so that a change shows as one.
    let text = serde_json::to_string(&dashboard)?;
    Ok(text.replace("{\"id\":", "\n{\"id\":").replace("{\"datasource\":", "\n{\"datasource\":") + "\n")
}

fn source() -> Value {
    json!({"type": "prometheus", "uid": "${source}"})
}

impl Panel {
    fn json<'a>(&self, number: usize, metrics: &'a [Metric], shown: &mut BTreeSet<&'a str>) -> Result<Value> {
        let mut targets: Vec<Value> = Vec::new();
        let mut helps = Vec::new();
        let mut get = |name: &str, kind: Kind| {
            let found = metrics.iter().find(|metric| metric.name == name);
            let metric = found.with_context(|| format!("the server registers no {name}"))?;
            if metric.kind != kind {
                bail!("{name} is a {:?}, no {kind:?}", metric.kind);
            }
            shown.insert(&metric.name);
            helps.push(metric.help.as_str());
            Ok(())
        };
        let mut target = |expression: String, legend: String| {
            let id = char::from(b'A' + targets.len() as u8).to_string();
            // Where it comes from is said once, by the panel.
            targets.push(json!({"refId": id, "expr": expression, "legendFormat": legend}));
        };
        let rate = |name: &str| format!("rate({name}_total{{{FILTER}}}[$__rate_interval])");
        for ask in self.asks {
            match ask {
                Now(name) => {
                    get(name, Kind::Gauge)?;
                    let short = name.rsplit(':').next().unwrap_or(name);
                    target(format!("{name}{{{FILTER}}}"), format!("{short} {{{{instance}}}}"));
                }
                NowBy(name, legend) => {
                    get(name, Kind::Gauge)?;
                    target(format!("{name}{{{FILTER}}}"), (*legend).to_owned());
                }
                Rate(name, legend) => {
                    get(name, Kind::Counter)?;
                    target(format!("sum({})", rate(name)), (*legend).to_owned());
                }
                RateBy(name, label) => {
                    get(name, Kind::Counter)?;
                    target(format!("sum by ({label}) ({})", rate(name)), format!("{{{{{label}}}}}"));
                }
                Share(part, whole, legend) => {
                    get(part, Kind::Counter)?;
                    get(whole, Kind::Counter)?;
                    target(format!("sum({}) / sum({})", rate(part), rate(whole)), (*legend).to_owned());
                }
                Times(name) => {
                    get(name, Kind::Histogram)?;
                    for (share, legend) in [("0.5", "median"), ("0.95", "95 %"), ("0.99", "99 %")] {
                        let buckets = format!("rate({name}_bucket{{{FILTER}}}[$__rate_interval])");
                        target(
                            format!("histogram_quantile({share}, sum by (le) ({buckets}))"),
                            legend.to_owned(),
                        );
                    }
                }
            }
        }
        Ok(json!({
            "id": number + 1, "type": "timeseries", "title": self.title, "description": helps.join(". ") + ".",
            "datasource": source(), "gridPos": {"h": 8, "w": 8, "x": number % 3 * 8, "y": number / 3 * 8},
            "fieldConfig": {"defaults": {"unit": self.unit, "min": 0}},
            "options": {"tooltip": {"mode": "multi"}},
            "targets": targets,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root() -> std::path::PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
    }

    #[test]
    fn a_metric_that_is_gone_new_or_of_another_kind_is_an_error() {
        let whole = || metrics::read(&root()).unwrap();
        assert!(make(&whole()).is_ok());
        let mut gone = whole();
        gone.remove(0);
        assert!(make(&gone).is_err());
        let mut new = whole();
        new.push(Metric { name: "muser:new".to_owned(), help: String::new(), kind: Kind::Gauge });
        assert!(make(&new).is_err());
        let mut other = whole();
        let counter = other.iter_mut().find(|metric| metric.kind == Kind::Counter).unwrap();
        counter.kind = Kind::Gauge;
        assert!(make(&other).is_err());
    }

    #[test]
    fn files_that_name_unknown_series_are_found() {
        let metrics = [Metric { name: "vllm:a".to_owned(), help: String::new(), kind: Kind::Histogram }];
        let check = |name: &str, text: &str, faulty: usize| {
            let found = unknown_series(&metrics, &[File { name: name.to_owned(), text: text.to_owned() }]);
            assert_eq!(found.len(), faulty, "{text}: {found:?}");
        };
        check("packaging/x.yml", "expr: rate(vllm:a_bucket[5m]) > 1", 0);
        check("packaging/x.yml", "expr: vllm:a > 1", 1);
        check("packaging/x.yml", "expr: vllm:a_total", 1);
        check("docs/x.md", "`vllm:a` and `vllm:b`", 1);
        check("docs/x.md", "`vllm:request_{a,b}_total`, muser: text", 0);
        check("crates/x.rs", "vllm:b", 0);
    }
}
