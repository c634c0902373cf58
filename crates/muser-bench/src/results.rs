//! What a test comes to, repetition by repetition.

use serde::Serialize;

/// One test over all repetitions.
#[derive(Clone, Debug, Default, Serialize)]
pub struct TestResult {
    /// Name.
    pub test: String,
    /// Tokens per second by the median step of the median repetition.
    pub tok_s: f64,
    /// Milliseconds of a step (of the whole prompt), median.
    pub median_ms: f64,
    /// Width of the repetitions as a share of the median.
    pub spread: f64,
    /// Bytes per second that a step reads, GB/s: weights, and KV of every row. Not for prompts, which arithmetic bounds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gb_s: Option<f64>,
    /// The same as a share of the read bandwidth probed right before and after each repetition, median.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub of_bandwidth: Option<f64>,
    /// Repetitions during which the machine was quiet.
    pub quiet_reps: usize,
    /// All repetitions.
    pub reps: Vec<Rep>,
}

/// One repetition of one test.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Rep {
    /// Tokens per second by the median step.
    pub tok_s: f64,
    /// Milliseconds of a step, median.
    pub median_ms: f64,
    /// Fastest step, milliseconds.
    pub best_ms: f64,
    /// Timed steps.
    pub steps: usize,
    /// Mean of the bandwidth probes right before and after, GB/s.
    pub bandwidth: f64,
    /// Share of the machine's CPU time that other processes used.
    pub others: Option<f64>,
    /// Share that the host took away.
    pub steal: Option<f64>,
    /// Load average after it.
    pub load_average: Option<f64>,
}
