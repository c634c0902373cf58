//! Why a backend could not do what it was asked.

/// Errors of an executor, grouped by whose fault they are.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExecError {
    /// The model cannot run on this backend (a type or a shape that it has no kernel for).
    #[error("{backend} cannot run this model: {what}")]
    Unsupported {
        /// Name of the backend.
        backend: &'static str,
        /// Tensor or figure, expected and found.
        what: String,
    },
    /// The device or the host has not enough memory.
    #[error("out of memory on {device}: {what} needs {needed} bytes, {available} are free")]
    OutOfMemory {
        /// Device that was asked.
        device: String,
        /// What the memory was for.
        what: String,
        /// Bytes asked for.
        needed: u64,
        /// Bytes that were free.
        available: u64,
    },
    /// The device failed or vanished.
    #[error("device {device} failed: {what}")]
    Device {
        /// Device that failed.
        device: String,
        /// What it said.
        what: String,
    },
    /// The device or this process's hold on it is gone: every later call would fail, too.
    #[error("device {device} is lost to this process, restart it to use the device again: {what}")]
    Lost {
        /// Device that was lost.
        device: String,
        /// What was noticed.
        what: String,
    },
    /// A device was lost and what it computed is computed by others from now on: the executor can be used, all blocks are empty.
    #[error("device {device} was lost, others have its layers now: {what}")]
    Renewed {
        /// Device that was lost.
        device: String,
        /// What was noticed.
        what: String,
    },
    /// The caller broke the contract of [`crate::StepBatch`]: a bug in the engine, not in the input.
    #[error("bug: invalid step: {0}")]
    InvalidBatch(String),
}
