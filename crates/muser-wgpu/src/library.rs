//! Kernels by name, compiled once for a device.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::WgpuError;
use crate::device::{Device, Kernel};
use crate::text::{Operations, Source};

/// The kernels of a device, and the operations that they are made with.
pub(crate) struct Library {
    pub(crate) operations: Operations,
    /// Are the kernels that are made for speed left out?
    pub(crate) plain: bool,
    kernels: Mutex<HashMap<String, Arc<Kernel>>>,
}

impl Library {
    pub(crate) fn new(operations: Operations) -> Self {
        Self { operations, plain: false, kernels: Mutex::new(HashMap::new()) }
    }

    /// A kernel, which [`Self::compile`] has still to compile if it is new.
    pub(crate) fn get(&self, device: &Device, source: &Source) -> Result<Arc<Kernel>, WgpuError> {
        if let Some(kernel) = self.lock().get(&source.name) {
            return Ok(Arc::clone(kernel));
        }
        let kernel = Arc::new(device.kernel(&source.name, source.text(self.operations), &source.slots)?);
        self.lock().insert(source.name.clone(), Arc::clone(&kernel));
        Ok(kernel)
    }

    /// Compiles what is not compiled yet, on several threads.
    pub(crate) fn compile(&self, device: &Device) -> Result<(), WgpuError> {
        let kernels: Vec<Arc<Kernel>> = self.lock().values().cloned().collect();
        let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(16);
        let next = AtomicUsize::new(0);
        let work = || loop {
            match kernels.get(next.fetch_add(1, Ordering::Relaxed)) {
                Some(kernel) => device.compile(kernel)?,
                None => return Ok(()),
            }
        };
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            let broken =
                |_| WgpuError::Call { call: "compiling kernels".into(), what: "a thread panicked".into() };
            workers.into_iter().try_for_each(|worker| worker.join().map_err(broken)?)
        })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, Arc<Kernel>>> {
        self.kernels.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
