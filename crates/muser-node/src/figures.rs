//! What is counted.

use muser_engine::{Histogram, HistogramSnapshot};
use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! figures {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counters.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: AtomicU64,)*
            pub(crate) quote_time: Histogram,
            pub(crate) transfer_time: Histogram,
        }

        /// The figures at one moment.
        #[derive(Clone, Copy, Debug, Default, PartialEq)]
        pub struct NodeFigures {
            $($(#[$doc])* pub $name: u64,)*
            /// From asking nodes about a prompt to the choice.
            pub quote_time: HistogramSnapshot,
            /// Of hand-offs that came to their end, from the first request on.
            pub transfer_time: HistogramSnapshot,
        }

        impl Counters {
            pub(crate) fn snapshot(&self) -> NodeFigures {
                NodeFigures {
                    $($name: self.$name.load(Ordering::Relaxed),)*
                    quote_time: self.quote_time.snapshot(),
                    transfer_time: self.transfer_time.snapshot(),
                }
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
    /// Of these, that differed.
    unequal,
    /// Bytes of rows that came.
    received_bytes,
    /// Requests of peers taken.
    served,
    /// Requests of peers refused for want of places.
    busy,
    /// Requests of peers that were given to their end.
    given,
    /// Positions of these.
    given_positions,
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
