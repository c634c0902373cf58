//! How fast something is. Here are the parts of `muser bench` that know no command line: tests and their names, the subject that is
//! timed, the read bandwidth of memory, what else the machine did, another program in turn, the report, and receipts. Under
//! `benches/` are programs that measure (and on devices compare) single crates:
//!
//! ```text
//! cargo bench -p muser-bench --bench step_bench -- --help
//! ```
//!
//! Tests do not build them.

pub mod bandwidth;
pub mod compare;
pub mod noise;
pub mod plan;
pub mod receipt;
pub mod report;
pub mod results;
pub mod stats;
pub mod subject;

pub use stats::{median, middle};

/// The arguments of a bench: cargo adds one of its own.
pub fn arguments() -> impl Iterator<Item = String> {
    std::env::args().skip(1).filter(|argument| argument != "--bench")
}
