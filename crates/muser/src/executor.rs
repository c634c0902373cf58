//! The one place where a backend is chosen.

use clap::ValueEnum as _;
use muser_backend::{Executor, KvType, ReferenceExecutor};
use muser_cpu::{CpuExecutor, CpuOptions};
use muser_model::Model;

use crate::cli::{BackendChoice, KvChoice, ModelArgs, PrefillChoice};
#[cfg(feature = "cuda")]
use crate::output::HintExt as _;
use crate::output::usage_error;

/// An executor for `model` as the arguments ask.
pub fn build(model: Model, args: &ModelArgs) -> anyhow::Result<Box<dyn Executor>> {
    let kv = kv_type(args)?;
    match args.backend {
        BackendChoice::Scalar => Ok(Box::new(ReferenceExecutor::new(model, kv)?)),
        BackendChoice::Cuda => cuda(&model, false, args.prefill),
        BackendChoice::CudaExact => cuda(&model, true, args.prefill),
        BackendChoice::Cpu => {
            let options = CpuOptions { threads: args.threads.map(usize::from), kv, ..CpuOptions::default() };
            Ok(Box::new(CpuExecutor::new(model, options)?))
        }
    }
}

/// How K and V are stored: what was asked for, if the backend has it, else its default.
pub fn kv_type(args: &ModelArgs) -> anyhow::Result<KvType> {
    let has: &[(KvChoice, KvType)] = match args.backend {
        BackendChoice::Scalar => &[(KvChoice::F32, KvType::F32), (KvChoice::F16, KvType::F16)],
        BackendChoice::Cpu => {
            &[(KvChoice::F16, KvType::F16), (KvChoice::Int16, KvType::Int16), (KvChoice::Int8, KvType::Int8)]
        }
        BackendChoice::Cuda => {
            &[(KvChoice::F16, KvType::F16), (KvChoice::Int16, KvType::Int16), (KvChoice::Int8, KvType::Int8)]
        }
        // The CPU's order of float operations, which 16 and 8 do not need.
        BackendChoice::CudaExact => &[(KvChoice::F16, KvType::F16)],
    };
    let Some(choice) = args.kv else { return Ok(has[0].1) };
    has.iter().find(|(name, _)| *name == choice).map(|(_, kv)| *kv).ok_or_else(|| {
        let name = |choice: KvChoice| {
            choice.to_possible_value().map_or_else(String::new, |v| v.get_name().to_owned())
        };
        let names: Vec<_> = has.iter().map(|(choice, _)| name(*choice)).collect();
        let backend = args.backend.to_possible_value().map_or_else(String::new, |v| v.get_name().to_owned());
        usage_error(format!(
            "--kv {} is not there with --backend {backend}, which has {}",
            name(choice),
            names.join(", ")
        ))
    })
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

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::cli::LogitsArgs;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: LogitsArgs,
    }

    fn chosen(more: &[&str]) -> Result<KvType, String> {
        let line = ["muser", "--ids", "i", "--out", "o"].iter().chain(more);
        let line = Line::try_parse_from(line).map_err(|error| error.to_string())?;
        kv_type(&line.args.model).map_err(|error| error.to_string())
    }

    #[test]
    fn kv_types_are_those_of_the_backend() {
        for (line, expected) in [
            (&["--kv", "16"][..], KvType::Int16),
            (&["--kv", "8"], KvType::Int8),
            (&["--kv", "f16"], KvType::F16),
            (&[], KvType::F16),
            (&["--backend", "scalar"], KvType::F32),
            (&["--backend", "scalar", "--kv", "f16"], KvType::F16),
            (&["--backend", "cuda"], KvType::F16),
        ] {
            assert_eq!(chosen(line), Ok(expected), "{line:?}");
        }
        for (line, parts) in [
            (&["--kv", "12"][..], &["'12'", "16, 8"][..]),
            (&["--kv", "f32"], &["--kv f32", "--backend cpu", "f16, 16, 8"]),
            (&["--backend", "scalar", "--kv", "8"], &["--kv 8", "scalar", "f32, f16"]),
        ] {
            let error = chosen(line).expect_err("it is not there");
            assert!(parts.iter().all(|part| error.contains(part)), "{line:?}: {error}");
        }
    }
}
