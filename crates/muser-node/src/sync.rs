//! What a hand-off's memory is made of. `tests/models.rs` compiles its file once more, over a model that tries every order of what
//! threads do.

pub(crate) use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

pub(crate) use muser_engine::{BlockPlace, BlockReceiver};
