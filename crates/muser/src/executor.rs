//! The one place where a backend is chosen.

use muser_backend::{Executor, KvType, ReferenceExecutor};
use muser_cpu::{CpuExecutor, CpuOptions};
use muser_model::Model;

#[cfg(feature = "wgpu")]
use crate::backends::gpu_nodes;
pub use crate::backends::{cuda, kv_type, wgpu};
use crate::cli::{BackendChoice, ModelArgs};
use crate::devices::{self, Planned};
use crate::output::Console;

/// An executor for `model` as the arguments ask. Says on the console what was chosen where the choice was left to us.
pub fn build(model: Model, args: &ModelArgs, console: &Console) -> anyhow::Result<Box<dyn Executor>> {
    build_for(model, args, Some(1), console)
}

/// The same for so many sequences at the same time, if their number is known.
pub fn build_for(
    model: Model,
    args: &ModelArgs,
    parallel: Option<usize>,
    console: &Console,
) -> anyhow::Result<Box<dyn Executor>> {
    if let Some(list) = &args.devices {
        return Ok(devices::build(&model, list, args, parallel, console)?.executor);
    }
    let kv = kv_type(args)?;
    match args.backend {
        BackendChoice::Scalar => Ok(Box::new(ReferenceExecutor::new(model, kv)?)),
        BackendChoice::Cuda => cuda(&model, args.prefill, kv),
        BackendChoice::Wgpu => wgpu(&model, args, kv),
        BackendChoice::Auto => match auto(&model, args, parallel, console) {
            Found::Card(executor) => Ok(executor),
            Found::Shared(planned) => Ok(planned.executor),
            Found::Processor => cpu(model, args, kv, console),
        },
        BackendChoice::Cpu => cpu(model, args, kv, console),
    }
}

fn cpu(model: Model, args: &ModelArgs, kv: KvType, console: &Console) -> anyhow::Result<Box<dyn Executor>> {
    devices::warn_of_little_memory(&model, args, kv, console);
    let options = CpuOptions { threads: args.threads.map(usize::from), kv, ..CpuOptions::default() };
    Ok(Box::new(CpuExecutor::new(model, options)?))
}

/// What `auto` finds.
pub enum Found {
    /// A card that holds the model.
    Card(Box<dyn Executor>),
    /// Devices that hold it together.
    Shared(Planned),
    /// Nothing but the processor.
    Processor,
}

/// Why no card has the model by itself.
enum NoCard {
    /// There is one, and it is too small.
    TooSmall(String),
    /// There is none, or it cannot be used.
    Other(String),
}

impl NoCard {
    fn why(&self) -> &str {
        let (Self::TooSmall(why) | Self::Other(why)) = self;
        why
    }
}

/// What `auto` finds: a card that holds the model and computes right, else devices that hold it together, else the CPU. The console
/// says which and why.
pub fn auto(model: &Model, args: &ModelArgs, parallel: Option<usize>, console: &Console) -> Found {
    let found = try_card(model, args).or_else(|no_cuda| match args.threads {
        // What `--threads` asks for has been said.
        Some(_) => Err(no_cuda),
        None if matches!(no_cuda, NoCard::TooSmall(_)) => Err(no_cuda),
        None => try_wgpu(model, args).map_err(|no_wgpu| {
            let why = format!("{}; {}", no_cuda.why(), no_wgpu.why());
            if matches!(no_wgpu, NoCard::TooSmall(_)) { NoCard::TooSmall(why) } else { NoCard::Other(why) }
        }),
    });
    let why = match found {
        Ok((executor, name)) => {
            console.note(format!("computing on {name}, which holds the model and passed its self-test"));
            return Found::Card(executor);
        }
        Err(NoCard::Other(why)) => why,
        Err(NoCard::TooSmall(why)) => match devices::shared(model, args, parallel, console) {
            Ok(Some(planned)) => {
                console.note(format!("the layers are shared: {why}"));
                return Found::Shared(planned);
            }
            Ok(None) => why,
            Err(error) => format!("{why}; sharing the layers failed: {error:#}"),
        },
    };
    console.note(format!("computing on the CPU: {why}"));
    Found::Processor
}

#[cfg(feature = "cuda")]
fn try_card(model: &Model, args: &ModelArgs) -> Result<(Box<dyn Executor>, String), NoCard> {
    if args.threads.is_some() {
        return Err(NoCard::Other("--threads asks for it".to_owned()));
    }
    let found = muser_cuda::device::probe(0).map_err(|error| {
        NoCard::Other(match error {
            muser_cuda::CudaError::LibraryMissing { .. } => {
                "there is no NVIDIA driver on this machine".to_owned()
            }
            error => format!("no card can be used: {error}"),
        })
    })?;
    let kv = kv_type(args).map_err(|error| NoCard::Other(error.to_string()))?;
    let needed = needed_bytes(model, args, kv);
    if found.free_bytes < needed {
        return Err(NoCard::TooSmall(format!(
            "the model needs about {:.1} GB, {} has {:.1} GB free",
            needed as f64 / 1e9,
            found.name,
            found.free_bytes as f64 / 1e9
        )));
    }
    match cuda(model, args.prefill, kv) {
        Ok(executor) => Ok((executor, found.name)),
        Err(error) => Err(NoCard::Other(format!("{} cannot be used: {error:#}", found.name))),
    }
}

#[cfg(not(feature = "cuda"))]
fn try_card(_model: &Model, args: &ModelArgs) -> Result<(Box<dyn Executor>, String), NoCard> {
    Err(NoCard::Other(match args.threads {
        Some(_) => "--threads asks for it".to_owned(),
        None => "this muser was built without the cuda feature".to_owned(),
    }))
}

/// A hardware GPU by Vulkan or Metal that holds the model; one that shares the processor's memory only where it reads faster.
#[cfg(feature = "wgpu")]
fn try_wgpu(model: &Model, args: &ModelArgs) -> Result<(Box<dyn Executor>, String), NoCard> {
    use muser_wgpu::AdapterKind;
    let none = || Err(NoCard::Other("there is no other GPU with a driver for Vulkan or Metal".to_owned()));
    if !gpu_nodes() {
        return none();
    }
    let Some(facts) = muser_wgpu::adapters().into_iter().next() else { return none() };
    let kv = kv_type(args).map_err(|error| NoCard::Other(error.to_string()))?;
    match facts.kind {
        AdapterKind::Discrete => {}
        AdapterKind::Integrated => {
            let why = format!("{} shares the processor's memory (--backend wgpu takes it)", facts.name);
            return Err(NoCard::Other(why));
        }
        AdapterKind::Other | AdapterKind::Software => return none(),
    }
    let needed = needed_bytes(model, args, kv);
    if facts.memory.is_some_and(|memory| memory < needed) {
        let memory = facts.memory.unwrap_or(0) as f64 / 1e9;
        return Err(NoCard::TooSmall(format!(
            "the model needs about {:.1} GB, {} has {memory:.1} GB",
            needed as f64 / 1e9,
            facts.name
        )));
    }
    match wgpu(model, args, kv) {
        Ok(executor) => Ok((executor, facts.name)),
        Err(error) => Err(NoCard::Other(format!("{} cannot be used: {error:#}", facts.name))),
    }
}

#[cfg(not(feature = "wgpu"))]
fn try_wgpu(_model: &Model, _args: &ModelArgs) -> Result<(Box<dyn Executor>, String), NoCard> {
    Err(NoCard::Other("this muser was built without the wgpu feature".to_owned()))
}

/// What a model takes on a card: its weights, the keys and values of one context, and room to compute in.
#[cfg_attr(not(any(feature = "cuda", feature = "wgpu")), allow(dead_code, reason = "asked of cards only"))]
fn needed_bytes(model: &Model, args: &ModelArgs, kv: KvType) -> u64 {
    /// Activations of a step, kernels, what the driver keeps for itself.
    const ROOM_BYTES: u64 = 1 << 30;
    let weights: u64 = model.file.tensors().iter().map(|tensor| tensor.len as u64).sum();
    let positions = args.ctx.map_or(32_768, u64::from).min(model.geometry.context as u64);
    let g = &model.geometry;
    let position = g.layers() * g.kv_heads * kv.head_bytes(g.head_dim);
    weights + positions * position as u64 + ROOM_BYTES
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::cli::LogitsArgs;
    use crate::model_file::ModelSource;

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
            (&[], KvType::Int16),
            (&["--backend", "scalar"], KvType::F32),
            (&["--backend", "scalar", "--kv", "f16"], KvType::F16),
            (&["--backend", "cuda"], KvType::Int16),
            (&["--backend", "cuda-exact"], KvType::Int16),
            (&["--backend", "cuda", "--kv", "8"], KvType::Int8),
            (&["--backend", "vulkan", "--adapter", "0"], KvType::Int16),
        ] {
            assert_eq!(chosen(line), Ok(expected), "{line:?}");
        }
        for (line, parts) in [
            (&["--kv", "12"][..], &["'12'", "16, 8"][..]),
            (&["--kv", "f32"], &["--kv f32", "--backend auto", "16, 8"]),
            (&["--backend", "cpu", "--kv", "f16"], &["--kv f16", "--backend cpu", "16, 8"]),
            (&["--backend", "scalar", "--kv", "8"], &["--kv 8", "scalar", "f32, f16"]),
        ] {
            let error = chosen(line).expect_err("it is not there");
            assert!(parts.iter().all(|part| error.contains(part)), "{line:?}: {error}");
        }
    }

    #[test]
    fn what_a_card_must_hold_grows_with_the_context() {
        let model = ModelSource::Bundled.load().expect("the bundled model");
        let args = |ctx| ModelArgs { ctx, ..ModelArgs::default() };
        let (short, usual) = (
            needed_bytes(&model, &args(Some(16)), KvType::Int16),
            needed_bytes(&model, &args(None), KvType::Int16),
        );
        assert!(short > 1 << 30 && usual > short, "{short} {usual}");
        let whole = needed_bytes(&model, &args(Some(1 << 30)), KvType::Int16);
        assert_eq!(usual, whole, "no more than the model's own context");
        assert!(needed_bytes(&model, &args(None), KvType::Int8) < usual, "half the digits, half the room");
    }
}
