//! What can go wrong between this crate and a card.

use muser_backend::ExecError;

/// Errors of the CUDA backend, grouped by whose fault they are.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// A library that comes with the driver or the toolkit is not installed.
    #[error("no {library} on this machine: {hint}")]
    LibraryMissing {
        /// Which one.
        library: &'static str,
        /// What to install, or where it was looked for.
        hint: String,
    },
    /// The driver sees no card, or not the one asked for.
    #[error("no CUDA device {wanted}: the driver sees {found}")]
    NoDevice {
        /// Index asked for.
        wanted: usize,
        /// Number of devices.
        found: usize,
    },
    /// The card is too old or lacks something the kernels need.
    #[error("{device} cannot run the kernels: needs {needed}, has {found}")]
    DeviceUnsuitable {
        /// Name of the card.
        device: String,
        /// What is needed.
        needed: String,
        /// What it has.
        found: String,
    },
    /// The model has a shape or a type without a kernel.
    #[error("cuda cannot run this model: {0}")]
    Unsupported(String),
    /// The card has not enough memory.
    #[error("out of device memory: {what} needs {needed} bytes, {available} are free")]
    OutOfMemory {
        /// What the memory was for.
        what: String,
        /// Bytes asked for.
        needed: u64,
        /// Bytes that were free.
        available: u64,
    },
    /// A kernel file does not compile: a bug in this crate or an incompatible compiler.
    #[error("bug: kernels/{file} does not compile for {arch}: {log}")]
    Compile {
        /// The file.
        file: String,
        /// Target.
        arch: String,
        /// The compiler's words.
        log: String,
    },
    /// A call into the driver or the compiler failed.
    #[error("{call} failed: {what}")]
    Call {
        /// Function.
        call: &'static str,
        /// What it said.
        what: String,
    },
    /// The card or its context is gone; nothing can be computed on it any more by this process.
    #[error("the card is lost to this process ({call}: {what}): restart it to use the card again")]
    Lost {
        /// Function that found out.
        call: &'static str,
        /// What it said.
        what: String,
    },
    /// A start-up check found a kernel that computes something else than the scalar definition.
    #[error("kernel {kernel} is wrong on this device: {what}")]
    SelfTest {
        /// Kernel.
        kernel: String,
        /// First difference.
        what: String,
    },
}

impl CudaError {
    /// The error as the engine sees it; `device` names the card.
    pub(crate) fn into_exec(self, device: &str) -> ExecError {
        match self {
            Self::Unsupported(what) => ExecError::Unsupported { backend: "cuda", what },
            Self::OutOfMemory { what, needed, available } => {
                ExecError::OutOfMemory { device: device.to_owned(), what, needed, available }
            }
            Self::Lost { call, what } => {
                ExecError::Lost { device: device.to_owned(), what: format!("{call}: {what}") }
            }
            other => ExecError::Device { device: device.to_owned(), what: other.to_string() },
        }
    }
}
