//! wgpu executor: any GPU with Vulkan or Metal, with the CPU's bits.
//!
//! Kernels are WGSL (`shaders/`), put together by `text` and translated for the device by wgpu at run time; nothing is linked.
//! Floats are rounded in one place, `shaders/prelude.wgsl`, in forms that a probe of the device chooses (`probe`), so that every
//! accepted adapter computes what `muser_backend::arith` says, bit for bit.

mod activations;
mod bandwidth;
mod call;
mod device;
mod draft;
mod eight;
mod error;
mod executor;
mod gpu;
mod library;
mod probe;
mod products;
mod program;
mod scratch;
mod selftest;
mod step_data;
mod taps;
mod text;
#[cfg(test)]
mod translate;
mod weights;

pub use device::{AdapterFacts, AdapterKind, adapters};
pub use error::WgpuError;
pub use executor::{WgpuExecutor, WgpuOptions};
pub use gpu::{Gpu, GpuOptions};
pub use probe::Probe;
pub use text::{Dot, Form, Operations};
