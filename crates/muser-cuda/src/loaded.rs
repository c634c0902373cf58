//! The kernels of a device, compiled and loaded.

use std::collections::HashMap;
use std::sync::Arc;

use muser_backend::arith::attention::Digits;

use crate::CudaError;
use crate::driver::{Context, Function, Module};
use crate::kernels::FILES;
use crate::matrix::{ProductKernels, Tile};
use crate::nvrtc;
use crate::uploader::Repack;

/// Loaded kernels of a device.
pub(crate) struct Kernels {
    _modules: Vec<Module>,
    functions: HashMap<&'static str, Function>,
}

impl Kernels {
    /// Compiles (or takes from the cache) and loads every kernel file.
    pub(crate) fn load(context: &Arc<Context>) -> Result<Self, CudaError> {
        if context.arch < 80 {
            return Err(CudaError::DeviceUnsuitable {
                device: context.name.clone(),
                needed: "compute capability 8.0".to_owned(),
                found: format!("{}.{}", context.arch / 10, context.arch % 10),
            });
        }
        let images: Vec<_> = std::thread::scope(|scope| {
            let jobs: Vec<_> = FILES
                .iter()
                .filter(|f| f.supports(context.arch))
                .map(|f| scope.spawn(|| nvrtc::compile_cached(f, context.arch)))
                .collect();
            jobs.into_iter().map(|j| j.join().expect("compiling does not panic")).collect()
        });
        let (mut modules, mut functions) = (Vec::new(), HashMap::new());
        for (file, compiled) in FILES.iter().filter(|f| f.supports(context.arch)).zip(images) {
            let module = Module::load(context, &compiled?.image)?;
            for name in file.kernels {
                functions.insert(*name, module.function(name)?);
            }
            modules.push(module);
        }
        Ok(Self { _modules: modules, functions })
    }

    pub(crate) fn get(&self, name: &str) -> Result<Function, CudaError> {
        self.functions.get(name).copied().ok_or_else(|| CudaError::Call {
            call: "kernel lookup",
            what: format!("no kernel is called {name}"),
        })
    }

    /// A kernel that there is for every width of K and V.
    pub(crate) fn of_width(&self, name: &str, digits: Digits) -> Result<Function, CudaError> {
        self.get(&format!("{name}_{}", digits.count()))
    }

    pub(crate) fn products(&self, context: &Arc<Context>) -> Result<ProductKernels, CudaError> {
        ProductKernels::new(context, &|name: &str| self.get(name))
    }

    pub(crate) fn repack(&self) -> Result<Repack, CudaError> {
        let [a, b, c, d, e] = Tile::ALL.map(|t| self.get(&format!("repack_{}", t.name())));
        Ok([a?, b?, c?, d?, e?])
    }
}
