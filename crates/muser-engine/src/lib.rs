//! Requests, scheduler, step loop, sampler, events, metrics: the part between callers and executors.
//!
//! [`Engine::spawn`] starts one ordinary thread that drives an executor. Callers hand in a [`Request`] and read
//! [`Event`]s (token ids, not text) from a [`Submission`]. Only this crate knows what a request is; executors see rows,
//! and the scheduler is a pure function of its state, its inbox and the clock. A decode step allocates nothing and takes
//! no lock that a caller could hold.
//!
//! ```
//! use muser_backend::{KvType, ReferenceExecutor};
//! use muser_engine::{Engine, EngineConfig, Event, Request, SamplingParams};
//! use muser_model::Model;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let path = muser_testkit::muse_tiny();
//! let model = Model::load(path)?;
//! let geometry = model.geometry.clone();
//! let executor = ReferenceExecutor::new(model, KvType::F32)?;
//! let engine = Engine::spawn(Box::new(executor), geometry, EngineConfig::default())?;
//!
//! let prompt = vec![1, 2, 3];
//! let sampling = SamplingParams::greedy();
//! let mut submission =
//!     engine.submit(Request { max_tokens: Some(4), sampling, ..Request::new(prompt, Vec::new()) })?;
//! let mut tokens = Vec::new();
//! while let Some(event) = submission.recv() {
//!     if let Event::Token(token) = event {
//!         tokens.push(token.id);
//!     }
//! }
//! assert_eq!(tokens.len(), 4);
//! # Ok(())
//! # }
//! ```
//!
//! `examples/` has more: a program with text in and out (`embed`), an executor of one's own (`executor`), a place for prefixes
//! that outlives an engine (`prefix_store`).

mod admission;
mod capacity;
mod config;
mod constraint;
mod draft;
mod driver;
mod error;
mod events;
mod figures;
mod handle;
mod image;
mod memory;
mod metrics;
mod plan;
mod planner;
mod prefix;
mod request;
pub mod sampler;
mod scheduler;
mod sequence;
mod shared;
mod slot_view;
mod slots;
mod step;
mod submission;
mod sync;
mod task;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod testing_bench;
#[cfg(test)]
mod testing_source;

pub use admission::Limits;
pub use capacity::parallel_that_fits;
pub use config::{DraftLength, EngineConfig, MOST_PARALLEL};
pub use constraint::{Constraint, TokenMask};
pub use error::{EngineError, SubmitError};
pub use events::{
    Event, FinishReason, Finished, MAX_TOP_LOGPROBS, PromptLogprobs, RequestError, Started, Timings, Token,
    TopLogprobs, Usage,
};
pub use handle::{Engine, EngineHandle, Shutdown};
pub use metrics::{Histogram, HistogramSnapshot, LATENCY_BOUNDS_S, MOST_PROPOSALS, MetricsSnapshot};
pub use prefix::{
    BlockBytes, BlockPlace, BlockReceiver, ExportError, Found, KvConnector, LocalPace, PrefixExport,
    PrefixOutlet, PrefixQuery, RestoreFailure, Sources, StoredPrefix,
};
pub use request::{
    ConstraintFactory, ContextPolicy, ImageRows, ImageSource, Prompt, Request, RequestKind, ShiftPlan,
    StopWatch, StopWatchFactory,
};
pub use sampler::{DraftSampling, SamplingParams};
pub use slot_view::{SlotState, SlotView};
pub use submission::{Submission, TimedOut};

#[cfg(test)]
mod tests;
