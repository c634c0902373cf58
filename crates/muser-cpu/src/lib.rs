//! CPU executor: row-invariant kernels and a thread pool.
//!
//! Decode on a processor is bound by memory, prefill by integer arithmetic; `docs/kernels.md` tells how the kernels
//! meet both. Every kernel is written once over a small set of vector operations and compiled per instruction set, with
//! the same bits on all of them; which rows share a step, how many threads there are and how weights are laid out never
//! shows in a result.
//!
//! Attention tiles, row tiles and rows are the items that threads share out ([`CpuExecutor`]'s step); all arithmetic is
//! in `kernels`.

mod bounds;
mod executor;
mod isa;
mod kernel_probe;
mod kernels;
mod memory;
mod options;
mod pool;
#[cfg(test)]
mod pool_tests;
mod probe;
mod simd;
mod sync;
mod thread_count;
#[cfg(test)]
mod thread_count_tests;
mod topology;
mod weights;

pub use executor::{CpuDescription, CpuExecutor};
pub use isa::{ISA_VARIABLE, Isa};
pub use kernel_probe::KernelProbe;
pub use memory::available_bytes;
pub use options::{CpuOptions, Repack};
pub use probe::{BandwidthProbe, ReadBandwidth};
