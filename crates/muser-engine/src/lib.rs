//! Requests, scheduler, step loop, sampler, events, metrics: the part between callers and executors.
//!
//! [`Engine::spawn`] starts one ordinary thread that drives an executor. Callers hand in a [`Request`] and read
//! [`Event`]s (token ids, not text) from a [`Submission`]. Only this crate knows what a request is; executors see rows,
//! and the scheduler is a pure function of its state, its inbox and the clock. A decode step allocates nothing and takes
//! no lock that a caller could hold.

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
pub use metrics::{HistogramSnapshot, LATENCY_BOUNDS_S, MOST_PROPOSALS, MetricsSnapshot};
pub use prefix::{
    BlockBytes, BlockPlace, Delivery, ExportError, Found, PrefixOffer, PrefixQuery, PrefixSource,
    RestoreFailure, StoredPrefix,
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
