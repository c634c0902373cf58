//! What can go wrong between this crate and a device.

use muser_backend::ExecError;

/// Errors of the wgpu backend, grouped by whose fault they are.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WgpuError {
    /// There is no device that could be used.
    #[error("no device for wgpu: {0}")]
    NoAdapter(String),
    /// The device that was named is not there.
    #[error("no adapter {wanted:?} for wgpu, there are: {found}")]
    NoSuchAdapter {
        /// Name or number asked for.
        wanted: String,
        /// Numbers and names of those that there are.
        found: String,
    },
    /// The device lacks something that the kernels need.
    #[error("{device} cannot run the kernels: needs {needed}, has {found}")]
    Unsuitable {
        /// Name of the adapter.
        device: String,
        /// What is needed.
        needed: String,
        /// What it has.
        found: String,
    },
    /// The model has a shape or a type without a kernel.
    #[error("wgpu cannot run this model: {0}")]
    Unsupported(String),
    /// The device has not enough memory.
    #[error("out of device memory: {what} needs {needed} bytes, {available} are there")]
    OutOfMemory {
        /// What the memory was for.
        what: String,
        /// Bytes asked for.
        needed: u64,
        /// Bytes that there are.
        available: u64,
    },
    /// A call failed.
    #[error("{call} failed: {what}")]
    Call {
        /// What was asked for.
        call: String,
        /// What the device said.
        what: String,
    },
    /// The device is gone.
    #[error("the device is lost to this process ({call}: {what})")]
    Lost {
        /// What was asked for.
        call: String,
        /// What the device said.
        what: String,
    },
    /// A check at the start found something that computes something else than the scalar definition.
    #[error("{kernel} is wrong on this device: {what}")]
    SelfTest {
        /// Operation or kernel.
        kernel: String,
        /// First difference.
        what: String,
    },
}

impl WgpuError {
    /// The error as the engine sees it; `device` names the adapter.
    pub fn into_exec(self, device: &str) -> ExecError {
        let device = device.to_owned();
        match self {
            Self::Unsupported(what) => ExecError::Unsupported { backend: "wgpu", what },
            Self::OutOfMemory { what, needed, available } => {
                ExecError::OutOfMemory { device, what, needed, available }
            }
            Self::Lost { call, what } => ExecError::Lost { device, what: format!("{call}: {what}") },
            other => ExecError::Device { device, what: other.to_string() },
        }
    }
}
