//! An open device with the arithmetic that was found right on it: what executors share.

use std::sync::Arc;

use crate::device::Device;
use crate::library::Library;
use crate::probe::{self, Probe};
use crate::{AdapterFacts, Operations, WgpuError};

/// Choices of [`Gpu::open`].
#[derive(Clone, Debug, Default)]
pub struct GpuOptions {
    /// Part of an adapter's name, or its number; the best one that is no software where nothing is said.
    pub adapter: Option<String>,
    /// Most bytes of a binding, where fewer than the adapter's are wanted.
    pub binding_limit: Option<u64>,
    /// Operations in place of those that the probe chooses.
    pub operations: Option<Operations>,
}

/// An open device whose arithmetic has been tried.
pub struct Gpu {
    pub(crate) device: Device,
    pub(crate) library: Library,
    probe: Probe,
}

impl Gpu {
    /// Opens a device and tries its arithmetic.
    ///
    /// # Errors
    /// No device, one that lacks what the kernels need, or one whose arithmetic cannot be mended.
    pub fn open(options: &GpuOptions) -> Result<Arc<Self>, WgpuError> {
        let device = Device::open(options.adapter.as_deref(), options.binding_limit)?;
        let probe = match options.operations {
            Some(operations) => Probe { operations, tried: Vec::new() },
            None => probe::cached(&device)?,
        };
        let library = Library::new(probe.operations);
        Ok(Arc::new(Self { device, library, probe }))
    }

    /// What was found out about its arithmetic.
    pub fn probe(&self) -> &Probe {
        &self.probe
    }

    /// What the device is.
    pub fn facts(&self) -> &AdapterFacts {
        &self.device.facts
    }

    /// Bytes per second of a plain read of the device's memory; `None` where there is no memory left for it.
    ///
    /// # Errors
    /// The device failed.
    pub fn read_bandwidth(&self) -> Result<Option<f64>, WgpuError> {
        crate::bandwidth::measure(&self.device, &self.library)
    }

    /// Ends the device as a fault would, for tests of what follows.
    #[doc(hidden)]
    pub fn lose(&self) {
        self.device.destroy();
    }
}
