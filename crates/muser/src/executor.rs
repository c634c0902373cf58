//! The one place where a backend is chosen.

use muser_backend::{Executor, KvType, ReferenceExecutor};
use muser_cpu::{CpuExecutor, CpuOptions};
use muser_model::Model;

use crate::cli::{BackendChoice, KvChoice, ModelArgs};
use crate::output::usage_error;

/// An executor for `model` as the arguments ask; `kv` is only a question for the scalar backend.
pub fn build(model: Model, args: &ModelArgs, kv: Option<KvChoice>) -> anyhow::Result<Box<dyn Executor>> {
    match (args.backend, kv) {
        (BackendChoice::Scalar, Some(KvChoice::F16)) => {
            Ok(Box::new(ReferenceExecutor::new(model, KvType::F16)?))
        }
        (BackendChoice::Scalar, _) => Ok(Box::new(ReferenceExecutor::new(model, KvType::F32)?)),
        (BackendChoice::Cpu, Some(KvChoice::F32)) => {
            Err(usage_error("--kv f32 needs --backend scalar: the cpu backend stores f16"))
        }
        (BackendChoice::Cpu, _) => {
            let options = CpuOptions { threads: args.threads.map(usize::from), ..CpuOptions::default() };
            Ok(Box::new(CpuExecutor::new(model, options)?))
        }
    }
}
