//! What memory and queues between threads are made of. `tests/models.rs` compiles their files once more, over a model that tries every
//! order of what threads do.

pub(crate) use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
