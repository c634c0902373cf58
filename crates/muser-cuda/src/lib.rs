//! CUDA executor: row-invariant kernels, compiled at run time for the card that is found.
//!
//! Nothing is needed at build time and nothing is linked: the driver and NVRTC are looked for when an executor is made
//! ([`CudaExecutor::new`]); a machine without them gets a clear error and runs everything else. Kernels are the `.cu`
//! files under `kernels/`, compiled to cubins by [`nvrtc`] and cached on disk.
//!
//! The bits of a row never depend on the other rows of a step, on how many there are, on which kernel (few rows, many
//! rows) took them or on the number of multiprocessors; `kernels/*.cu` say how. Everything but [`Prefill::Fast`]
//! follows `muser_backend::arith` exactly, so it equals the CPU backend bit for bit ([`selftest`] checks it).

pub mod device;
mod draft;
mod driver;
mod error;
mod executor;
mod forward;
mod fused;
pub mod kernels;
mod loaded;
mod matrix;
pub mod nvrtc;
pub mod selftest;
mod step_data;
mod streaming;
mod taps;
mod tower;
mod uploader;
mod weights;

pub use error::CudaError;
pub use executor::{CudaExecutor, CudaOptions};
pub use matrix::Prefill;
