//! The device of the tests.

use std::sync::{Arc, OnceLock};

use muser_wgpu::{Gpu, GpuOptions};

/// The device of all tests of a program; none is said once.
pub(crate) fn gpu() -> Option<&'static Arc<Gpu>> {
    static GPU: OnceLock<Option<Arc<Gpu>>> = OnceLock::new();
    let open = || {
        let adapter = std::env::var("MUSER_WGPU_ADAPTER").unwrap_or_else(|_| "llvmpipe".to_owned());
        match Gpu::open(&GpuOptions { adapter: Some(adapter), ..GpuOptions::default() }) {
            Ok(gpu) => Some(gpu),
            Err(error) => {
                muser_testkit::skip(muser_testkit::Need::Vulkan, error);
                None
            }
        }
    };
    GPU.get_or_init(open).as_ref()
}
