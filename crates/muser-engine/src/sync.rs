//! What the two ends of a request and of a fetch are made of: the standard library and its like. `tests/models.rs` compiles their
//! files once more, over a model that tries every order of what threads do.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicIsize, AtomicU32, Ordering};
pub(crate) use std::sync::{Mutex, MutexGuard, OnceLock};
pub(crate) use std::thread::{Thread, current, park};

pub(crate) use crossbeam_queue::{ArrayQueue, SegQueue};
pub(crate) use futures_util::task::AtomicWaker;
