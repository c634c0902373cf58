//! `muser fit`: which layers of a model would go to which device, and how fast that would be, on this machine or on one that is not
//! here. Nothing is loaded; of a model that is not here only the header is fetched.

use std::io::Write as _;

use anyhow::Result;
use muser_backend::KvType;
use muser_fit::{Asked, Device, KNOWN, ModelSize, Plan, Wish, host, known, plan_auto};
use muser_model::Geometry;
use serde::Serialize;

use crate::cli::{DEFAULT_CONTEXT, FitArgs, KvChoice, Memory};
use crate::devices;
use crate::header;
use crate::model_file::ModelSource;
use crate::output::{Console, usage_error};

/// Memory of the processor of a machine that is not here, if nobody says.
const USUAL_RAM: u64 = 32 << 30;

#[derive(Serialize)]
struct Report<'a> {
    model: &'a str,
    devices: Vec<DeviceReport<'a>>,
    context: u32,
    parallel: u32,
    kv: &'static str,
    parts: Vec<PartReport<'a>>,
    /// Bytes of weights that memory does not hold.
    from_file_bytes: u64,
    tok_s_one: f64,
    tok_s_eight: f64,
    prompt_tok_s: f64,
    change: &'a str,
}

#[derive(Serialize)]
struct DeviceReport<'a> {
    id: &'a str,
    name: &'a str,
    free_bytes: u64,
    read_bytes_s: f64,
}

#[derive(Serialize)]
struct PartReport<'a> {
    device: &'a str,
    first_layer: usize,
    layers: usize,
    weight_bytes: u64,
    kv_bytes: u64,
    scratch_bytes: u64,
    left_bytes: u64,
}

/// Runs the command.
pub fn run(args: FitArgs, console: &Console) -> Result<()> {
    let kv = match args.kv {
        KvChoice::Int16 => KvType::Int16,
        KvChoice::Int8 => KvType::Int8,
        KvChoice::F16 | KvChoice::F32 => return Err(usage_error("--kv: fast backends have 16 and 8")),
    };
    let (label, model) = model(args.model.as_deref(), console)?;
    let most = model.geometry.context as u32;
    let context = match args.ctx {
        Some(asked) if asked > most => {
            return Err(usage_error(format!("--ctx {asked} is more than the model's context of {most}")));
        }
        Some(asked) => Asked::fixed(asked),
        None => Asked::usual(most.min(DEFAULT_CONTEXT as u32)),
    };
    let devices = machine(&args, console)?;
    let wish = Wish { context, parallel: Asked::fixed(args.parallel), kv, draft: 0 };
    let plan = plan_auto(&model, &devices, &wish).map_err(usage_error)?;
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&report(&label, &devices, &plan))?)?;
        return Ok(());
    }
    writeln!(out, "{label}")?;
    for line in plan.in_three_lines(&devices) {
        writeln!(out, "{line}")?;
    }
    Ok(())
}

/// Sizes of the model that is meant, and what to call it.
fn model(named: Option<&str>, console: &Console) -> Result<(String, ModelSize)> {
    let here = match named {
        Some(named) => ModelSource::find(named)?,
        None => ModelSource::pulled_default()?,
    };
    if let Some(source) = here {
        let file = source.open()?;
        let geometry = Geometry::from_gguf(&file)?;
        return Ok((source.label(), ModelSize::of_file(&file, &geometry)));
    }
    let Some(named) = named else {
        return Ok(("Muse Glimmer 30B, as it was released".into(), ModelSize::released()?));
    };
    header::fetch(named, console).map(|(label, file, geometry)| (label, ModelSize::of_file(&file, &geometry)))
}

/// The devices that are asked about.
fn machine(args: &FitArgs, console: &Console) -> Result<Vec<Device>> {
    let is_here = args.memory.is_none() && args.card.is_none() && args.ram.is_none();
    if is_here {
        if args.read.is_some() || args.int8.is_some() {
            return Err(usage_error("--read and --int8 are a card's: name it with --card or --memory"));
        }
        return Ok(devices::of_this_machine(args.ram_read, console));
    }
    let processor = host(args.ram.unwrap_or(USUAL_RAM), args.ram_read.map(|rate| rate * 1e9));
    Ok(card(args)?.into_iter().chain([processor]).collect())
}

/// The card that is asked about.
fn card(args: &FitArgs) -> Result<Option<Device>> {
    let named = match &args.card {
        None => None,
        Some(name) => Some(known(name).ok_or_else(|| {
            let names: Vec<&str> = KNOWN.iter().map(|card| card.name).collect();
            usage_error(format!(
                "--card {name}: no known card; --memory, --read and --int8 describe any, known are {}",
                names.join(", ")
            ))
        })?),
    };
    let bytes = match (args.memory, named) {
        (Some(Memory::None), Some(card)) => {
            return Err(usage_error(format!("--memory none and --card {}: one of the two", card.name)));
        }
        (Some(Memory::None) | None, None) => {
            if args.read.is_some() || args.int8.is_some() {
                return Err(usage_error("--read and --int8 are a card's: name it with --card or --memory"));
            }
            return Ok(None);
        }
        (Some(Memory::Bytes(bytes)), _) => bytes,
        (None, Some(card)) => u64::from(card.gigabytes) << 30,
    };
    // Without a name the usual card of the size: the first that has at least as much, else the largest.
    let like = named.or_else(|| KNOWN.iter().find(|card| u64::from(card.gigabytes) << 30 >= bytes));
    let Some(like) = like.or(KNOWN.last()) else { return Ok(None) };
    let mut device = like.device("cuda:0");
    // What the driver leaves of it, as of the known one.
    device.free = (bytes as f64 * (device.free as f64 / device.total as f64)) as u64;
    device.total = bytes;
    if let Some(read) = args.read {
        device.read = read * 1e9;
    }
    if let Some(int8) = args.int8 {
        device.compute = muser_fit::Card { int8, ..*like }.compute();
    }
    Ok(Some(device))
}

fn report<'a>(label: &'a str, devices: &'a [Device], plan: &'a Plan) -> Report<'a> {
    let id = |at: usize| devices.get(at).map_or("?", |device| device.id.as_str());
    Report {
        model: label,
        devices: devices
            .iter()
            .map(|device| DeviceReport {
                id: &device.id,
                name: &device.name,
                free_bytes: device.free,
                read_bytes_s: device.read,
            })
            .collect(),
        context: plan.context,
        parallel: plan.parallel,
        kv: plan.kv.name(),
        parts: plan
            .parts
            .iter()
            .map(|part| PartReport {
                device: id(part.device),
                first_layer: part.range.first(),
                layers: part.range.count(),
                weight_bytes: part.weights,
                kv_bytes: part.kv,
                scratch_bytes: part.scratch,
                left_bytes: part.left,
            })
            .collect(),
        from_file_bytes: plan.from_file,
        tok_s_one: plan.expected.one,
        tok_s_eight: plan.expected.eight,
        prompt_tok_s: plan.expected.prompt,
        change: &plan.change,
    }
}
