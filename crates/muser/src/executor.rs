//! The one place where a backend is chosen.

use muser_backend::{Executor, KvType, ReferenceExecutor};
use muser_cpu::{CpuExecutor, CpuOptions};
use muser_model::Model;

use crate::cli::{BackendChoice, KvChoice, ModelArgs, PrefillChoice};
#[cfg(feature = "cuda")]
use crate::output::HintExt as _;
use crate::output::usage_error;

/// An executor for `model` as the arguments ask; `kv` is only a question for the scalar backend.
pub fn build(model: Model, args: &ModelArgs, kv: Option<KvChoice>) -> anyhow::Result<Box<dyn Executor>> {
    match (args.backend, kv) {
        (BackendChoice::Scalar, Some(KvChoice::F16)) => {
            Ok(Box::new(ReferenceExecutor::new(model, KvType::F16)?))
        }
        (BackendChoice::Scalar, _) => Ok(Box::new(ReferenceExecutor::new(model, KvType::F32)?)),
        (BackendChoice::Cpu | BackendChoice::Cuda | BackendChoice::CudaExact, Some(KvChoice::F32)) => {
            Err(usage_error("--kv f32 needs --backend scalar: the fast backends store f16"))
        }
        (BackendChoice::Cuda, _) => cuda(&model, false, args.prefill),
        (BackendChoice::CudaExact, _) => cuda(&model, true, args.prefill),
        (BackendChoice::Cpu, _) => {
            let options = CpuOptions { threads: args.threads.map(usize::from), ..CpuOptions::default() };
            Ok(Box::new(CpuExecutor::new(model, options)?))
        }
    }
}

/// An executor on the first NVIDIA card; `exact` gives the bits of the CPU backend.
#[cfg(feature = "cuda")]
pub fn cuda(model: &Model, exact: bool, prefill: PrefillChoice) -> anyhow::Result<Box<dyn Executor>> {
    use muser_cuda::{Attention, CudaExecutor, CudaOptions, Prefill};
    let attention = if exact { Attention::Exact } else { Attention::Fast };
    let prefill = match prefill {
        PrefillChoice::Exact => Prefill::Exact,
        PrefillChoice::Fast => Prefill::Fast,
    };
    match CudaExecutor::new(model, CudaOptions { attention, prefill, ..CudaOptions::default() }) {
        Ok(executor) => Ok(Box::new(executor)),
        Err(error) => Err(anyhow::Error::new(error)).hint("`--backend cpu` runs on any machine"),
    }
}

/// This build has no CUDA backend.
#[cfg(not(feature = "cuda"))]
pub fn cuda(_model: &Model, _exact: bool, _prefill: PrefillChoice) -> anyhow::Result<Box<dyn Executor>> {
    Err(usage_error("--backend cuda: this muser was built without the cuda feature"))
}
