//! Devices that share a model's layers: what this machine has, the plan, and the executor over it.

use anyhow::{Context as _, Result};
use muser_backend::{ExecError, Executor, KvType, LayerRange, PartExecutor};
use muser_bench::report::{Expectation, PartFacts};
use muser_cpu::{BandwidthProbe, CpuExecutor, CpuOptions, Isa};
use muser_fit::{
    Asked, Backend, Device, DeviceList, DeviceSpec, Expected, Kind, ModelSize, PartPlan, Plan, Wish, host,
    plan, plan_auto,
};
use muser_model::Model;
use muser_split::{Grouping, Renew, RenewingExecutor, SplitExecutor};

use crate::backends;
use crate::cli::{DEFAULT_CONTEXT, ModelArgs};
use crate::output::{Console, usage_error};

/// Bytes of the buffer that the processor's reading is measured with: 192 MiB were found in the third-level cache of a server.
const PROBE_BYTES: usize = if cfg!(test) { 4 << 20 } else { 512 << 20 };

/// A device and what it is called on the command line.
struct Found {
    spec: DeviceSpec,
    device: Device,
}

/// An executor over devices that share the layers, and the plan behind it.
pub struct Planned {
    /// What computes.
    pub executor: Box<dyn Executor>,
    plan: Plan,
    devices: Vec<Device>,
}

impl Planned {
    /// What the plan expects, beside which measurements are written.
    pub fn expectation(&self, model: &Model) -> Expectation {
        let size = ModelSize::of_file(&model.file, &model.geometry);
        let part = |part: &PartPlan| PartFacts {
            device: self.devices[part.device].id.clone(),
            layers: part.range.count(),
            weight_bytes: size.streamed(part.range),
            read_gb_s: self.devices[part.device].read / 1e9,
        };
        let parts: Vec<PartFacts> = self.plan.parts.iter().map(part).collect();
        let read_ms = parts.iter().map(|part| part.weight_bytes as f64 / part.read_gb_s / 1e6).sum();
        let Expected { one, eight, prompt } = self.plan.expected;
        Expectation { parts, tok_s_one: one, tok_s_eight: eight, prompt_tok_s: prompt, read_ms }
    }
}

/// The executor for `--devices`.
pub fn build(
    model: &Model,
    list: &DeviceList,
    args: &ModelArgs,
    parallel: Option<usize>,
    console: &Console,
) -> Result<Planned> {
    let kv = backends::kv_type(args)?;
    let size = ModelSize::of_file(&model.file, &model.geometry);
    let wish = wish(model, args, parallel, kv);
    let (found, plan) = match list {
        DeviceList::Auto => {
            let found = all(args.threads, None);
            let devices: Vec<Device> = found.iter().map(|found| found.device.clone()).collect();
            let plan = plan_auto(&size, &devices, &wish).map_err(usage_error)?;
            (found, plan)
        }
        DeviceList::These(specs) => named(&size, specs, args, &wish)?,
    };
    say(&plan, &found, console);
    let executor = assemble(model, &found, &plan, args, kv)?;
    let devices: Vec<Device> = found.iter().map(|found| found.device.clone()).collect();
    let executor: Box<dyn Executor> = if plan.parts.len() > 1 {
        let others = Others { model: model.clone(), found, plan: plan.clone(), args: args.clone(), kv };
        Box::new(RenewingExecutor::new(executor, others.into_renew()))
    } else {
        Box::new(executor)
    };
    Ok(Planned { executor, plan, devices })
}

/// What the layers of a lost device are shared among.
struct Others {
    model: Model,
    found: Vec<Found>,
    plan: Plan,
    args: ModelArgs,
    kv: KvType,
}

impl Others {
    fn into_renew(mut self) -> Renew {
        Box::new(move |lost| {
            self.without(lost).map_err(|error| match error.downcast() {
                Ok(error) => error,
                Err(error) => ExecError::Device { device: "the others".into(), what: format!("{error:#}") },
            })
        })
    }

    /// A split without a part's device: of all others that were there, and of the processor.
    fn without(&mut self, lost: usize) -> Result<SplitExecutor> {
        let part = self.plan.parts.get(lost).context("bug: a part that is not in the plan")?;
        self.found.remove(part.device);
        for found in &mut self.found {
            // With the memory that is free now.
            let limit = found.spec.memory;
            found.device = limited(find(found.spec, self.args.threads, true)?, limit);
        }
        if self.found.iter().all(|found| found.spec.backend != Backend::Cpu) {
            self.found.push(processor_found(self.args.threads, None));
        }
        let size = ModelSize::of_file(&self.model.file, &self.model.geometry);
        let (context, parallel) = (Asked::fixed(self.plan.context), Asked::fixed(self.plan.parallel));
        let wish = Wish { context, parallel, kv: self.kv, draft: 0 };
        let devices: Vec<Device> = self.found.iter().map(|found| found.device.clone()).collect();
        let rows = self.plan.rows;
        // Steps are of as many rows as before.
        self.plan = Plan { rows, ..plan_auto(&size, &devices, &wish)? };
        for line in self.plan.in_three_lines(&devices) {
            tracing::warn!("{line}");
        }
        assemble(&self.model, &self.found, &self.plan, &self.args, self.kv)
    }
}

/// A device of which no more than so much is used.
fn limited(device: Device, memory: Option<u64>) -> Device {
    let most = memory.unwrap_or(u64::MAX);
    Device { free: device.free.min(most), total: device.total.min(most), ..device }
}

/// The devices that were named, with a plan for them.
fn named(
    size: &ModelSize,
    specs: &[DeviceSpec],
    args: &ModelArgs,
    wish: &Wish,
) -> Result<(Vec<Found>, Plan)> {
    // What is measured would change nothing where all numbers are given.
    let measured = specs.len() > 1 && specs.iter().any(|spec| spec.layers.is_none());
    let found = specs.iter().map(|spec| {
        let device = limited(find(*spec, args.threads, measured)?, spec.memory);
        Ok(Found { spec: *spec, device })
    });
    let found = found.collect::<Result<Vec<_>>>()?;
    let devices: Vec<_> = found.iter().map(|found| (found.device.clone(), found.spec.layers)).collect();
    let spare = processor(args.threads, false, None);
    let plan = plan(size, &devices, Some(&spare), wish).map_err(usage_error)?;
    Ok((found, plan))
}

/// Where no device holds the model by itself: the best of all of them together, unless that is the processor alone.
pub fn shared(
    model: &Model,
    args: &ModelArgs,
    parallel: Option<usize>,
    console: &Console,
) -> Result<Option<Planned>> {
    let size = ModelSize::of_file(&model.file, &model.geometry);
    let devices: Vec<Device> = all(args.threads, None).into_iter().map(|found| found.device).collect();
    let wish = wish(model, args, parallel, backends::kv_type(args)?);
    let plan = plan_auto(&size, &devices, &wish);
    let uses_card = plan.is_ok_and(|plan| plan.parts.iter().any(|part| !devices[part.device].is_processor()));
    if !uses_card {
        return Ok(None);
    }
    build(model, &DeviceList::Auto, args, parallel, console).map(Some)
}

/// Devices of this machine, for `muser fit`.
pub fn of_this_machine(ram_read: Option<f64>, console: &Console) -> Vec<Device> {
    let found = all(None, ram_read);
    let names: Vec<String> = found.iter().map(|f| format!("{} ({})", f.spec, f.device.name)).collect();
    console.note(format!("this machine: {}", names.join(", ")));
    found.into_iter().map(|found| found.device).collect()
}

/// A warning where the processor's memory does not hold the weights, with the rate to expect.
pub fn warn_of_little_memory(model: &Model, args: &ModelArgs, kv: KvType, console: &Console) {
    let size = ModelSize::of_file(&model.file, &model.geometry);
    let Some(free) = muser_cpu::available_bytes().filter(|free| *free < size.bytes()) else { return };
    let device = [host(free, None)];
    if let Ok(plan) = plan_auto(&size, &device, &wish(model, args, Some(1), kv)) {
        for line in &plan.in_three_lines(&device)[1..] {
            console.warning(line);
        }
    }
}

fn wish(model: &Model, args: &ModelArgs, parallel: Option<usize>, kv: KvType) -> Wish {
    let most = model.geometry.context as u32;
    let context = match args.ctx {
        Some(asked) => Asked::fixed(asked.min(most)),
        None => Asked::usual(most.min(DEFAULT_CONTEXT as u32)),
    };
    let parallel = parallel.map_or(Asked::usual(1), |parallel| Asked::fixed(parallel as u32));
    Wish { context, parallel, kv, draft: 0 }
}

fn say(plan: &Plan, found: &[Found], console: &Console) {
    let devices: Vec<Device> = found.iter().map(|found| found.device.clone()).collect();
    for line in plan.in_three_lines(&devices) {
        if plan.from_file > 0 { console.warning(line) } else { console.note(line) }
    }
}

/// All devices that layers may go to without being named.
fn all(threads: Option<u16>, ram_read: Option<f64>) -> Vec<Found> {
    let mut found = cards();
    found.push(processor_found(threads, ram_read));
    found
}

fn processor_found(threads: Option<u16>, ram_read: Option<f64>) -> Found {
    let spec = DeviceSpec { backend: Backend::Cpu, number: 0, layers: None, memory: None };
    Found { spec, device: processor(threads, true, ram_read) }
}

/// The device that was named.
fn find(spec: DeviceSpec, threads: Option<u16>, measured: bool) -> Result<Device> {
    match spec.backend {
        Backend::Cpu => Ok(Device { id: spec.to_string(), ..processor(threads, measured, None) }),
        Backend::Cuda => {
            cuda_card(spec.number).map_err(|why| usage_error(format!("--devices: {spec}: {why}")))
        }
        Backend::Wgpu => {
            wgpu_device(spec.number).map_err(|why| usage_error(format!("--devices: {spec}: {why}")))
        }
    }
}

/// Operations a second of a thread in products of many rows. With AVX-512 measured (receipt zen4-1b-pp2048); the others are guesses
/// by the width of their vectors.
fn operations(isa: Isa) -> f64 {
    match isa.label() {
        label if label.contains("512") => 250e9,
        label if label.contains("VNNI") => 150e9,
        "scalar" => 4e9,
        _ => 100e9,
    }
}

fn processor(threads: Option<u16>, measured: bool, read: Option<f64>) -> Device {
    let free = muser_cpu::available_bytes().unwrap_or(16 << 30);
    let threads = threads.map(usize::from);
    let probe = if measured && read.is_none() {
        let bytes = PROBE_BYTES.min(usize::try_from(free / 8).unwrap_or(PROBE_BYTES));
        BandwidthProbe::new(bytes, threads, true).and_then(|mut probe| probe.measure(5)).ok()
    } else {
        None
    };
    let count = probe.as_ref().map(|found| found.threads).or(threads);
    let count =
        count.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, std::num::NonZero::get));
    let rate = read.map(|rate| rate * 1e9).or(probe.map(|found| found.median()));
    Device { compute: count as f64 * operations(Isa::detect()), ..host(free, rate) }
}

/// NVIDIA cards; where there are none, hardware of its own with Vulkan or Metal.
fn cards() -> Vec<Found> {
    let spec = |backend, number| DeviceSpec { backend, number, layers: None, memory: None };
    let cuda = (0..16).map_while(|number| {
        let device = cuda_card(number).ok()?;
        Some(Found { spec: spec(Backend::Cuda, number), device })
    });
    let cuda: Vec<Found> = cuda.collect();
    if !cuda.is_empty() {
        return cuda;
    }
    discrete_gpus()
        .into_iter()
        .map(|(number, device)| Found { spec: spec(Backend::Wgpu, number), device })
        .collect()
}

#[cfg(feature = "cuda")]
fn cuda_card(number: usize) -> Result<Device, String> {
    let found = muser_cuda::device::probe(number).map_err(|error| error.to_string())?;
    let id = format!("cuda:{number}");
    // A card that is not in the table is taken for a small one.
    let rates = muser_fit::known(&found.name).map(|card| card.device(&id));
    let (read, compute, link) =
        rates.map_or((300e9, 2e13, 12e9), |card| (card.read, card.compute, card.link));
    let (free, total) = (found.free_bytes, found.total_bytes);
    Ok(Device { id, name: found.name, kind: Kind::Cuda, free, total, read, compute, link })
}

#[cfg(not(feature = "cuda"))]
fn cuda_card(_number: usize) -> Result<Device, String> {
    Err("this muser was built without the cuda feature".into())
}

#[cfg(feature = "wgpu")]
fn gpu(facts: &muser_wgpu::AdapterFacts) -> Device {
    let rates = muser_fit::known(&facts.name).map(|card| card.device(""));
    let (read, compute) = rates.map_or((200e9, 5e12), |card| (card.read, card.compute / 10.0));
    // A driver that does not tell is taken to have little.
    let memory = facts.memory.unwrap_or(4 << 30);
    let (id, name) = (format!("wgpu:{}", facts.index), facts.name.clone());
    Device { id, name, kind: Kind::Wgpu, free: memory, total: memory, read, compute, link: 12e9 }
}

#[cfg(feature = "wgpu")]
fn wgpu_device(number: usize) -> Result<Device, String> {
    let adapters = muser_wgpu::adapters();
    adapters.get(number).map(gpu).ok_or_else(|| match adapters.len() {
        0 => "there is no GPU with a driver for Vulkan or Metal".to_owned(),
        count => format!("there are {count}, the first is wgpu:0"),
    })
}

#[cfg(feature = "wgpu")]
fn discrete_gpus() -> Vec<(usize, Device)> {
    if !backends::gpu_nodes() {
        return Vec::new();
    }
    let adapters = muser_wgpu::adapters().into_iter();
    let discrete = adapters.filter(|facts| facts.kind == muser_wgpu::AdapterKind::Discrete);
    discrete.map(|facts| (facts.index, gpu(&facts))).collect()
}

#[cfg(not(feature = "wgpu"))]
fn wgpu_device(_number: usize) -> Result<Device, String> {
    Err("this muser was built without the wgpu feature".into())
}

#[cfg(not(feature = "wgpu"))]
fn discrete_gpus() -> Vec<(usize, Device)> {
    Vec::new()
}

/// The executor of a plan.
fn assemble(
    model: &Model,
    found: &[Found],
    plan: &Plan,
    args: &ModelArgs,
    kv: KvType,
) -> Result<SplitExecutor> {
    let on_processor = |at: usize| found[at].spec.backend == Backend::Cpu;
    let processors = plan.parts.iter().filter(|part| on_processor(part.device)).count();
    let threads = args.threads.map(usize::from).or_else(|| {
        // Several parts on the processor work in turn or together: each gets its share.
        let all = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        (processors > 1).then(|| (all / processors).max(1))
    });
    let mut parts: Vec<Box<dyn PartExecutor>> = Vec::with_capacity(plan.parts.len());
    for part in &plan.parts {
        let wish = PartWish { range: part.range, rows: plan.rows as usize, threads };
        parts.push(make(model, found[part.device].spec, wish, args, kv)?);
    }
    let room: u64 =
        plan.parts.iter().filter(|part| on_processor(part.device)).map(|part| part.kv + part.left).sum();
    let executor = SplitExecutor::new(parts, model, Grouping::Measured)?;
    let most = |part: &PartPlan| found[part.device].spec.memory.map(|_| part.kv + part.left);
    let most = plan.parts.iter().map(most).collect();
    let executor = if plan.streams { executor.with_streaming(plan.context as usize) } else { executor };
    Ok(executor.with_host_room((processors > 0).then_some(room)).with_most(most))
}

/// What a part is to be.
struct PartWish {
    range: LayerRange,
    /// Most rows of a step.
    rows: usize,
    threads: Option<usize>,
}

fn make(
    model: &Model,
    spec: DeviceSpec,
    PartWish { range, rows, threads }: PartWish,
    args: &ModelArgs,
    kv: KvType,
) -> Result<Box<dyn PartExecutor>> {
    match spec.backend {
        Backend::Cpu => {
            let options = CpuOptions { threads, kv, max_rows: rows, ..CpuOptions::default() };
            Ok(Box::new(CpuExecutor::part(model.clone(), range, options)?))
        }
        Backend::Cuda => backends::cuda_part(model, spec.number, (range, rows), args.prefill, kv),
        Backend::Wgpu => backends::wgpu_part(model, spec.number, range, kv),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::model_file::ModelSource;

    #[test]
    fn the_others_get_the_layers_of_a_device_that_is_lost() {
        let model = ModelSource::Bundled.load().expect("the bundled model");
        let args = ModelArgs { threads: Some(1), ctx: Some(512), ..ModelArgs::default() };
        let DeviceList::These(specs) = "cpu:0=5,cpu:1=3".parse().expect("devices") else { panic!("a list") };
        let size = ModelSize::of_file(&model.file, &model.geometry);
        let wish = wish(&model, &args, Some(2), KvType::Int16);
        let (found, mut plan) = named(&size, &specs, &args, &wish).expect("they fit");
        plan.rows = 64;
        let mut others = Others { model, found, plan, args, kv: KvType::Int16 };
        let split = others.without(1).expect("the first one has room");
        assert_eq!(split.ranges().map(LayerRange::count).collect::<Vec<_>>(), [8]);
        assert_eq!(split.info().max_rows, 64, "steps as before");
        assert_eq!((others.plan.context, others.plan.parallel), (512, 2));
        assert_eq!(others.found.len(), 1);
        // Without that one there is still the processor.
        let mut last = others.into_renew();
        assert_eq!(last(0).expect("the processor").ranges().count(), 1);
        last(7).map(|_| ()).expect_err("no such part");
    }

    #[test]
    fn nothing_is_shared_with_cards_that_are_not_there() {
        let model = ModelSource::Bundled.load().expect("the bundled model");
        let console =
            Console::from_environment(&crate::cli::Cli::parse_from(["muser", "-q", "models"]).global);
        let args = ModelArgs { threads: Some(1), ..ModelArgs::default() };
        let found = shared(&model, &args, Some(1), &console).expect("a plan");
        assert!(found.is_none() || !cards().is_empty());
    }
}
