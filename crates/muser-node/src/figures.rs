//! What is counted.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! figures {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counters.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: AtomicU64,)*
        }

        /// The figures at one moment.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct NodeFigures {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counters {
            pub(crate) fn snapshot(&self) -> NodeFigures {
                NodeFigures { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
    };
}

figures! {
    /// Prompts that nodes were asked about.
    asked,
    /// Of these, read here because no node could be asked or answered.
    no_node,
    /// Of these, read here because that was sooner.
    local_sooner,
    /// Hand-offs begun.
    begun,
    /// Hand-offs that came to their end.
    installed,
    /// Stages that became known, ends included.
    stages,
    /// Requests that went on with what was there: on the same node.
    resumed,
    /// The same, on another node.
    moved,
    /// Hand-offs that ended in computing here, from what had come.
    given_up,
    /// Of these, because computing here had become sooner.
    overtaken,
    /// Hand-offs of which rows were computed here, too, and compared.
    audited,
    /// Bytes of rows that came.
    received_bytes,
    /// Requests of peers taken.
    served,
    /// Requests of peers refused for want of places.
    busy,
    /// Requests of peers that were given to their end.
    given,
    /// Requests of peers that ended because the memory was needed.
    gone,
    /// Requests of peers that were cancelled, or whose connection was lost for too long.
    cancelled,
}

impl Counters {
    pub(crate) fn add(counter: &AtomicU64, n: u64) {
        counter.fetch_add(n, Ordering::Relaxed);
    }
}
