//! What cards this machine has and whether they can run the kernels, for `doctor` and for choosing a backend.

use crate::CudaError;
use crate::driver::{self, Context};
use crate::nvrtc;

/// Facts about a card.
#[derive(Clone, Debug)]
pub struct DeviceReport {
    /// Name as the driver gives it.
    pub name: String,
    /// Compute capability times ten, such as 90.
    pub arch: u32,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Free device memory in bytes.
    pub free_bytes: u64,
    /// Device memory in bytes.
    pub total_bytes: u64,
    /// CUDA version that the driver supports, such as 13000.
    pub driver: i32,
    /// Version of the run-time compiler, or why there is none.
    pub compiler: Result<(i32, i32), String>,
    /// The file that the compiler was loaded from.
    pub compiler_path: Option<std::path::PathBuf>,
}

/// Looks at device `index`; an error says what is missing.
pub fn probe(index: usize) -> Result<DeviceReport, CudaError> {
    let context = Context::open(index)?;
    let (free_bytes, total_bytes) = context.memory()?;
    Ok(DeviceReport {
        name: context.name.clone(),
        arch: context.arch,
        multiprocessors: context.multiprocessors,
        free_bytes,
        total_bytes,
        driver: driver::driver_version()?,
        compiler: nvrtc::version().map_err(|e| e.to_string()),
        compiler_path: nvrtc::path().ok().map(std::path::Path::to_owned),
    })
}
