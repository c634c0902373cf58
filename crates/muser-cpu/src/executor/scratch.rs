//! Working memory of the threads.

use muser_backend::KvType;

use crate::kernels::kv;
use crate::kernels::{attention, exact, product};

/// Working memory of one thread.
pub(crate) struct ThreadScratch {
    pub(crate) product: product::Scratch,
    pub(crate) attention: kv::Scratch,
}

pub(crate) fn thread_scratch(threads: usize, rows: usize, head_dim: usize, kv: KvType) -> Vec<ThreadScratch> {
    let one = || ThreadScratch {
        product: product::Scratch::new(rows),
        attention: match kv.digits() {
            None => kv::Scratch::Float(attention::Scratch::new(head_dim)),
            Some(_) => kv::Scratch::Digits(exact::Scratch::new(head_dim)),
        },
    };
    (0..threads).map(|_| one()).collect()
}
