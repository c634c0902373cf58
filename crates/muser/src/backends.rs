//! What each backend is asked for, and what this build says for those that it lacks.

use clap::ValueEnum as _;
use muser_backend::{Executor, KvType, LayerRange, PartExecutor};
use muser_model::Model;

use crate::cli::{BackendChoice, KvChoice, ModelArgs, PrefillChoice};
#[cfg(any(feature = "cuda", feature = "wgpu"))]
use crate::output::HintExt as _;
use crate::output::usage_error;

/// How K and V are stored: what was asked for, if the backend has it, else its default.
pub fn kv_type(args: &ModelArgs) -> anyhow::Result<KvType> {
    let has: &[(KvChoice, KvType)] = match args.backend {
        BackendChoice::Scalar => &[(KvChoice::F32, KvType::F32), (KvChoice::F16, KvType::F16)],
        BackendChoice::Cpu | BackendChoice::Cuda | BackendChoice::Wgpu | BackendChoice::Auto => {
            &[(KvChoice::Int16, KvType::Int16), (KvChoice::Int8, KvType::Int8)]
        }
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

/// May there be a GPU at all? Asking drivers takes a while, and some write to the terminal where there is no screen.
#[cfg(feature = "wgpu")]
pub fn gpu_nodes() -> bool {
    if !cfg!(target_os = "linux") {
        return true;
    }
    let is_node = |folder: &str, name: &str| {
        std::fs::read_dir(folder).is_ok_and(|entries| {
            entries.flatten().any(|entry| entry.file_name().to_string_lossy().starts_with(name))
        })
    };
    is_node("/dev/dri", "render") || is_node("/dev", "nvidia") || std::path::Path::new("/dev/dxg").exists()
}

/// An executor on a GPU by Vulkan or Metal.
#[cfg(feature = "wgpu")]
pub fn wgpu(model: &Model, args: &ModelArgs, kv: KvType) -> anyhow::Result<Box<dyn Executor>> {
    use muser_wgpu::{Gpu, GpuOptions, WgpuExecutor, WgpuOptions};
    let options = GpuOptions { adapter: args.adapter.clone(), ..GpuOptions::default() };
    let made = Gpu::open_for(&options, model, kv)
        .and_then(|gpu| WgpuExecutor::new(&gpu, model.clone(), WgpuOptions { kv, ..WgpuOptions::default() }));
    match made {
        Ok(executor) => Ok(Box::new(executor)),
        Err(error) => Err(anyhow::Error::new(error)).hint("`--backend cpu` runs on any machine"),
    }
}

/// This build has no wgpu backend.
#[cfg(not(feature = "wgpu"))]
pub fn wgpu(_model: &Model, _args: &ModelArgs, _kv: KvType) -> anyhow::Result<Box<dyn Executor>> {
    Err(usage_error("--backend wgpu: this muser was built without the wgpu feature"))
}

/// Some layers on a GPU by Vulkan or Metal.
#[cfg(feature = "wgpu")]
pub fn wgpu_part(
    model: &Model,
    number: usize,
    range: LayerRange,
    kv: KvType,
) -> anyhow::Result<Box<dyn PartExecutor>> {
    use muser_wgpu::{Gpu, GpuOptions, WgpuExecutor, WgpuOptions};
    let options = GpuOptions { adapter: Some(number.to_string()), ..GpuOptions::default() };
    let gpu = Gpu::open_for(&options, model, kv)?;
    let options = WgpuOptions { kv, ..WgpuOptions::default() };
    Ok(Box::new(WgpuExecutor::part(&gpu, model.clone(), range, options)?))
}

/// This build has no wgpu backend.
#[cfg(not(feature = "wgpu"))]
pub fn wgpu_part(
    _model: &Model,
    _number: usize,
    _range: LayerRange,
    _kv: KvType,
) -> anyhow::Result<Box<dyn PartExecutor>> {
    Err(usage_error("this muser was built without the wgpu feature"))
}

/// Some layers on an NVIDIA card.
#[cfg(feature = "cuda")]
pub fn cuda_part(
    model: &Model,
    number: usize,
    (range, max_rows): (LayerRange, usize),
    prefill: PrefillChoice,
    kv: KvType,
) -> anyhow::Result<Box<dyn PartExecutor>> {
    use muser_cuda::{CudaExecutor, CudaOptions};
    let prefill = rounding(prefill);
    let options = CudaOptions { device: number, max_rows, prefill, kv, ..CudaOptions::default() };
    Ok(Box::new(CudaExecutor::part(model, range, options)?))
}

/// This build has no CUDA backend.
#[cfg(not(feature = "cuda"))]
pub fn cuda_part(
    _model: &Model,
    _number: usize,
    _part: (LayerRange, usize),
    _prefill: PrefillChoice,
    _kv: KvType,
) -> anyhow::Result<Box<dyn PartExecutor>> {
    Err(usage_error("this muser was built without the cuda feature"))
}

#[cfg(feature = "cuda")]
fn rounding(prefill: PrefillChoice) -> muser_cuda::Prefill {
    match prefill {
        PrefillChoice::Exact => muser_cuda::Prefill::Exact,
        PrefillChoice::Fast => muser_cuda::Prefill::Fast,
    }
}

/// An executor on the first NVIDIA card.
#[cfg(feature = "cuda")]
pub fn cuda(model: &Model, prefill: PrefillChoice, kv: KvType) -> anyhow::Result<Box<dyn Executor>> {
    use muser_cuda::{CudaExecutor, CudaOptions};
    let prefill = rounding(prefill);
    match CudaExecutor::new(model, CudaOptions { prefill, kv, ..CudaOptions::default() }) {
        Ok(executor) => Ok(Box::new(executor)),
        Err(error) => Err(anyhow::Error::new(error)).hint("`--backend cpu` runs on any machine"),
    }
}

/// This build has no CUDA backend.
#[cfg(not(feature = "cuda"))]
pub fn cuda(_model: &Model, _prefill: PrefillChoice, _kv: KvType) -> anyhow::Result<Box<dyn Executor>> {
    Err(usage_error("--backend cuda: this muser was built without the cuda feature"))
}
