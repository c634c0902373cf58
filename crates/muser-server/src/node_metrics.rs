//! Metrics of hand-off between nodes. Labels are names of the registry, reasons and states: no keys, ids or text.

use std::sync::atomic::Ordering;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::dashboard::NodePart;
use crate::nodes::NodeTotals;
use crate::registration::{Labels, Totals, counter, register};

/// How many of the totals are kept by label.
const FAMILIES: usize = 7;

#[derive(Debug)]
pub(crate) struct NodeMetrics {
    by_label: [(&'static str, Family<Labels, Counter>); FAMILIES],
    tokens: Counter,
    given: Counter,
    quotes: Totals,
    transfers: Totals,
    state: Family<Labels, Gauge>,
    fetching: Family<Labels, Gauge>,
    giving: Family<Labels, Gauge>,
}

impl NodeMetrics {
    pub(crate) fn new(all: &mut Registry) -> Self {
        Self {
            by_label: [
                (
                    "outcome",
                    register(
                        all,
                        "muser:node_handoffs",
                        "Prompts that nodes were asked about, by what became of them",
                        Family::default(),
                    ),
                ),
                (
                    "on",
                    register(
                        all,
                        "muser:node_resumptions",
                        "Hand-offs that went on after a fault, on the same node or on another one",
                        Family::default(),
                    ),
                ),
                (
                    "outcome",
                    register(
                        all,
                        "muser:node_audits",
                        "Hand-offs of which rows were computed here, too, by what was found",
                        Family::default(),
                    ),
                ),
                (
                    "outcome",
                    register(
                        all,
                        "muser:node_requests",
                        "Prompts that other nodes asked this one to read, by what became of them",
                        Family::default(),
                    ),
                ),
                (
                    "direction",
                    register(
                        all,
                        "muser:node_bytes",
                        "Bytes of rows that came from nodes and went to them",
                        Family::default(),
                    ),
                ),
                (
                    "refusal",
                    register(
                        all,
                        "muser:node_refusals",
                        "Frames of nodes that were refused, by name",
                        Family::default(),
                    ),
                ),
                (
                    "reason",
                    register(
                        all,
                        "muser:node_handshakes_failed",
                        "Connections to and from nodes that came to nothing, by reason",
                        Family::default(),
                    ),
                ),
            ],
            tokens: counter(all, "muser:node_prompt_tokens", "Prompt tokens that nodes read for this server"),
            given: counter(
                all,
                "muser:node_prompt_tokens_given",
                "Prompt tokens that this server read for nodes",
            ),
            quotes: register(
                all,
                "muser:node_quote_seconds",
                "From asking nodes about a prompt to the choice",
                Totals::default(),
            ),
            transfers: register(
                all,
                "muser:node_transfer_seconds",
                "Hand-offs that came to their end, from the first request on",
                Totals::default(),
            ),
            state: register(
                all,
                "muser:node_state",
                "1 for the state that a node is in",
                Family::<Labels, Gauge>::default(),
            ),
            fetching: register(
                all,
                "muser:node_fetching",
                "Prompts that come from a node now",
                Family::<Labels, Gauge>::default(),
            ),
            giving: register(
                all,
                "muser:node_giving",
                "Prompts that go to a node now",
                Family::<Labels, Gauge>::default(),
            ),
        }
    }

    /// Takes in how things stand.
    pub(crate) fn set(&self, now: &NodeTotals, tokens: u64, nodes: &[NodePart]) {
        let totals = [
            &now.outcomes,
            &now.continued,
            &now.audits,
            &now.served,
            &now.bytes,
            &now.refusals,
            &now.handshakes_failed,
        ];
        for ((label, family), totals) in self.by_label.iter().zip(totals) {
            for (value, total) in totals {
                let labels = vec![((*label).to_owned(), (*value).to_owned())];
                family.get_or_create(&labels).inner().store(*total, Ordering::Relaxed);
            }
        }
        self.tokens.inner().store(tokens, Ordering::Relaxed);
        self.given.inner().store(now.positions_given, Ordering::Relaxed);
        self.quotes.set(&now.quotes);
        self.transfers.set(&now.transfers);
        // A node that was removed is no longer there, nor a state that it was in.
        [&self.state, &self.fetching, &self.giving].into_iter().for_each(Family::clear);
        for node in nodes {
            let name = ("node".to_owned(), node.name.clone());
            let state = vec![name.clone(), ("state".to_owned(), node.state.clone())];
            self.state.get_or_create(&state).set(1);
            self.fetching.get_or_create(&vec![name.clone()]).set(node.fetching as i64);
            self.giving.get_or_create(&vec![name]).set(node.giving as i64);
        }
    }
}
