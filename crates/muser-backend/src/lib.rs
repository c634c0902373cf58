//! What an inference backend is: the [`Executor`] trait, the [`StepBatch`] it executes, the arithmetic that every
//! backend shares ([`arith`]), the scalar reference executor and a conformance suite that other backends call.
//!
//! An executor sees rows (one token position of one sequence each) and block tables, never requests. Every operation
//! is a pure function of one row and the KV before it: which other rows are in the step never changes a bit.

pub mod arith;
mod batch;
pub mod conformance;
mod context_rows;
mod delegate;
mod draft;
mod error;
mod executor;
pub mod kv_layout;
mod kv_type;
mod part;
mod reference;
mod route;
mod streaming;
mod tower;

// What `model` reckons costs with is what sequences take.
const _: () = assert!(muser_model::cost::KV_BLOCK == muser_kv::BLOCK_LEN as u64);

pub use batch::{Row, RowInput, RowWants, SeqRows, StepBatch, StepOutput, argmax, candidates};
pub use context_rows::ContextRows;
#[doc(hidden)]
pub use delegate::{no_draft, types};
pub use draft::{DraftBatch, DraftInfo, DraftSeq, check_draft, draft_mark};
pub use error::ExecError;
pub use executor::{DraftExecutor, Executor, ExecutorInfo, LentBlock, TowerExecutor, largest_of_draft};
pub use kv_type::{KvCapacity, KvType};
pub use part::{Crossing, HostLayers, LayerRange, LayerStreamer, PartExecutor, only_a_part};
pub use reference::ReferenceExecutor;
pub use route::numeric_route;
pub use streaming::StreamedStep;
pub use tower::{
    TowerImage, TowerInfo, TowerStage, check_projector, no_image, no_tower, picture_digest, projector_mark,
};
