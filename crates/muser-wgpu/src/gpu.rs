//! An open device with the arithmetic that was found right on it: what executors share.

use std::sync::Arc;

use muser_backend::KvType;
use muser_model::Model;

use crate::device::Device;
use crate::library::Library;
use crate::probe::{self, Probe};
use crate::{AdapterFacts, Operations, WgpuError, selftest};

/// Choices of [`Gpu::open`].
#[derive(Clone, Debug, Default)]
pub struct GpuOptions {
    /// Part of an adapter's name, or its number; the best one that is no software where nothing is said.
    pub adapter: Option<String>,
    /// Most bytes of a binding, where fewer than the adapter's are wanted.
    pub binding_limit: Option<u64>,
    /// Operations in place of those that the probe chooses.
    pub operations: Option<Operations>,
    /// Texts of kernels to replace, by what: for tests of what finds a wrong one.
    #[doc(hidden)]
    pub mutations: Vec<(String, String)>,
}

/// An open device whose arithmetic has been tried.
pub struct Gpu {
    pub(crate) device: Device,
    pub(crate) library: Library,
    probe: Probe,
    tested: Option<usize>,
}

impl Gpu {
    /// Opens a device and tries its arithmetic.
    ///
    /// # Errors
    /// No device, one that lacks what the kernels need, or one whose arithmetic cannot be mended.
    pub fn open(options: &GpuOptions) -> Result<Arc<Self>, WgpuError> {
        let mut device = Device::open(options.adapter.as_deref(), options.binding_limit)?;
        device.mutations.clone_from(&options.mutations);
        let probe = match options.operations {
            Some(operations) => Probe { operations, tried: Vec::new() },
            None if options.mutations.is_empty() => probe::cached(&device)?,
            None => probe::probe(&device)?,
        };
        let library = Library::new(probe.operations);
        Ok(Arc::new(Self { device, library, probe, tested: None }))
    }

    /// The same for a model: every kernel that it uses is tried against scalar code. Where one is wrong, the device is opened again
    /// with the plain kernels and with integers for every float operation.
    ///
    /// # Errors
    /// As [`Self::open`], and a device on which even that is wrong.
    pub fn open_for(options: &GpuOptions, model: &Model, kv: KvType) -> Result<Arc<Self>, WgpuError> {
        let (types, dim) = (selftest::types(model), model.geometry.head_dim);
        let gpu = Self::open(options)?;
        let error = match selftest::run(&gpu, &types, dim, kv) {
            Ok(compared) => return Ok(Self::tested(gpu, compared)),
            Err(error @ WgpuError::SelfTest { .. }) => error,
            Err(other) => return Err(other),
        };
        tracing::warn!(%error, adapter = gpu.facts().name, "falling back to plain kernels and integers");
        drop(gpu);
        let plain = GpuOptions { operations: Some(Operations::INTEGERS), ..options.clone() };
        let mut gpu = Self::open(&plain)?;
        if let Some(gpu) = Arc::get_mut(&mut gpu) {
            gpu.library.plain = true;
            gpu.probe.tried.push((error.to_string(), 1));
        }
        let compared = selftest::run(&gpu, &types, dim, kv)?;
        Ok(Self::tested(gpu, compared))
    }

    fn tested(mut gpu: Arc<Self>, compared: usize) -> Arc<Self> {
        if let Some(gpu) = Arc::get_mut(&mut gpu) {
            gpu.tested = Some(compared);
        }
        gpu
    }

    /// Values that the self-test compared; `None` without one.
    pub fn compared(&self) -> Option<usize> {
        self.tested
    }

    /// Are only the plain kernels used, because another one was wrong?
    pub fn is_plain(&self) -> bool {
        self.library.plain
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
