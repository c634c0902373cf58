//! How metrics are registered, and kinds of them that the library does not have.

use std::sync::{Arc, Mutex, PoisonError};

use muser_engine::{HistogramSnapshot, LATENCY_BOUNDS_S};
use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

pub(crate) type Labels = Vec<(String, String)>;
pub(crate) type FloatGauge = Gauge<f64, std::sync::atomic::AtomicU64>;

/// A histogram that the engine keeps, as it was when the metrics were last read.
#[derive(Clone, Debug, Default)]
pub(crate) struct Totals(Arc<Mutex<HistogramSnapshot>>);

impl Totals {
    pub(crate) fn set(&self, now: &HistogramSnapshot) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = *now;
    }
}

impl EncodeMetric for Totals {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), std::fmt::Error> {
        let now = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let bounds = LATENCY_BOUNDS_S.into_iter().chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> = bounds.zip(now.counts).collect();
        encoder.encode_histogram::<NoLabelSet>(now.sum_s, now.count(), &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}

pub(crate) fn register<M>(registry: &mut Registry, name: &str, help: &str, metric: M) -> M
where
    M: prometheus_client::registry::Metric + Clone,
{
    registry.register(name, help, metric.clone());
    metric
}

pub(crate) fn counter(registry: &mut Registry, name: &str, help: &str) -> Counter {
    register(registry, name, help, Counter::default())
}

pub(crate) fn gauge(registry: &mut Registry, name: &str, help: &str) -> Gauge {
    register(registry, name, help, Gauge::default())
}
