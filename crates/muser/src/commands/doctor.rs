//! `muser doctor`: what this machine offers, what muser uses of it and why, and whether it computes right.

use std::io::Write as _;

use muser_backend::{Executor as _, ExecutorInfo};
use muser_cpu::{CpuDescription, CpuExecutor, CpuOptions, ISA_VARIABLE, Isa, Repack};
use muser_hub::ModelStore;
use serde::Serialize;

use crate::cli::DoctorArgs;
use crate::commands::node_list::{self, Seen};
use crate::doctor::{Machine, TypeResult, WgpuReport, self_test, tested_types};
use crate::env_vars;
use crate::model_file::ModelSource;
use crate::output::{Console, HintExt as _, Progress, sanitize};

/// All that is said.
#[derive(Serialize)]
struct Diagnosis {
    version: &'static str,
    machine: Machine,
    cpu: CpuReport,
    cuda: CudaReport,
    wgpu: WgpuReport,
    store: Option<String>,
    models: usize,
    /// The nodes of nodes.toml as `muser node list --json` shows them, or why the file cannot be used.
    nodes: Vec<serde_json::Value>,
    nodes_fault: Option<String>,
    #[serde(skip)]
    node_lines: Vec<String>,
    self_test: Vec<TypeResult>,
}

/// What the CPU backend chose.
#[derive(Serialize)]
struct CpuReport {
    threads: usize,
    instruction_set: &'static str,
    supported: Vec<&'static str>,
    why: String,
    /// How K and V are stored where nothing else is asked for, and the numeric route that packs then carry.
    kv_type: &'static str,
    numeric_route: String,
}

/// The first NVIDIA card, or why there is none to use.
#[derive(Serialize)]
struct CudaReport {
    device: Option<String>,
    free_bytes: Option<u64>,
    total_bytes: Option<u64>,
    /// Values of kernel results compared bit by bit with the scalar definition.
    self_test: Option<usize>,
    /// The file that the run-time compiler was loaded from, and its version.
    compiler: Option<String>,
    fault: Option<String>,
}

/// Runs the command.
pub fn run(args: DoctorArgs, console: &Console) -> anyhow::Result<()> {
    let threads = args.threads.map(usize::from);
    let options = CpuOptions { threads, repack: Repack::Off, ..CpuOptions::default() };
    let executor = CpuExecutor::new(ModelSource::Bundled.load()?, options)?;
    let cpu = CpuReport::new(executor.describe(), executor.info());
    drop(executor);
    let mut self_tests = Vec::new();
    if !args.no_self_test {
        let types = tested_types();
        let progress = Progress::steps(console, "self-test", types.len() as u64, "types");
        for ty in types {
            self_tests.push(self_test(ty, threads)?);
            progress.advance(1);
        }
        progress.finish();
    }
    let store = ModelStore::open(env_vars::muser_home().as_deref()).ok();
    let models = store.as_ref().and_then(|store| store.list().ok()).map_or(0, |models| models.len());
    let (nodes, nodes_fault) = find_nodes();
    let diagnosis = Diagnosis {
        version: env!("CARGO_PKG_VERSION"),
        machine: Machine::find(),
        cpu,
        cuda: CudaReport::find(!args.no_self_test),
        wgpu: WgpuReport::find(!args.no_self_test),
        store: store.map(|store| store.dir().display().to_string()),
        models,
        node_lines: nodes.iter().map(|node| format!("{}: {}", node.entry.name, node.line())).collect(),
        nodes: nodes.iter().map(Seen::as_json).collect(),
        nodes_fault,
        self_test: self_tests,
    };
    let mut out = std::io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &diagnosis)?;
        writeln!(out)?;
    } else {
        print(&diagnosis, &mut out)?;
    }
    out.flush()?;
    let faults =
        diagnosis.self_test.iter().flat_map(|ty| &ty.paths).filter(|path| path.fault.is_some()).count();
    if faults > 0 {
        return Err(anyhow::anyhow!("{faults} kernel paths compute wrong on this machine")).hint(format!(
            "{ISA_VARIABLE}=scalar avoids vector instructions; please report the table above"
        ));
    }
    Ok(())
}

/// The nodes that are known here, each asked how it is.
fn find_nodes() -> (Vec<Seen>, Option<String>) {
    let Some(home) = env_vars::muser_home() else { return (Vec::new(), None) };
    match node_list::look(&home, false) {
        Ok(nodes) => (nodes, None),
        Err(error) => (Vec::new(), Some(format!("{error:#}"))),
    }
}

impl CpuReport {
    fn new(found: &CpuDescription, info: &ExecutorInfo) -> Self {
        let why = if std::env::var_os(ISA_VARIABLE).is_some() {
            format!("{ISA_VARIABLE} asks for it")
        } else if found.isa == Isa::Scalar {
            "this processor has none of the vector sets that muser uses".to_owned()
        } else {
            "the fastest that this processor has".to_owned()
        };
        Self {
            threads: found.threads,
            instruction_set: found.isa.label(),
            supported: found.supported.iter().map(|isa| isa.label()).collect(),
            why,
            kv_type: info.kv_type.name(),
            numeric_route: info.route.clone(),
        }
    }
}

impl CudaReport {
    fn none(fault: String) -> Self {
        let (device, compiler) = (None, None);
        Self { device, free_bytes: None, total_bytes: None, self_test: None, compiler, fault: Some(fault) }
    }

    #[cfg(not(feature = "cuda"))]
    fn find(_self_test: bool) -> Self {
        Self::none("this muser was built without the cuda feature".into())
    }

    #[cfg(feature = "cuda")]
    fn find(self_test: bool) -> Self {
        let found = match muser_cuda::device::probe(0) {
            Ok(found) => found,
            Err(error) => return Self::none(error.to_string()),
        };
        let version = found.compiler.as_ref().ok();
        let compiler = found.compiler_path.as_ref().zip(version);
        let mut report = Self {
            compiler: compiler
                .map(|(path, (major, minor))| format!("NVRTC {major}.{minor} from {}", path.display())),
            device: Some(format!(
                "{}, compute capability {}.{}",
                found.name,
                found.arch / 10,
                found.arch % 10
            )),
            free_bytes: Some(found.free_bytes),
            total_bytes: Some(found.total_bytes),
            self_test: None,
            fault: found.compiler.err(),
        };
        if self_test && report.fault.is_none() {
            match muser_cuda::selftest::run(0) {
                Ok(tested) => report.self_test = Some(tested.compared),
                Err(error) => report.fault = Some(error.to_string()),
            }
        }
        report
    }

    fn describe(&self) -> String {
        let mut text = self.device.clone().unwrap_or_else(|| "not used".into());
        if let (Some(free), Some(total)) = (self.free_bytes, self.total_bytes) {
            let gib = |bytes: u64| bytes as f64 / (1_u64 << 30) as f64;
            text = format!("{text}, {:.1} of {:.1} GiB free", gib(free), gib(total));
        }
        if let Some(compared) = self.self_test {
            text = format!("{text}; self-test: {compared} values, same bits as the scalar definition");
        }
        match &self.fault {
            Some(fault) => format!("{text}: {fault}"),
            None => text,
        }
    }
}

fn print(diagnosis: &Diagnosis, out: &mut impl std::io::Write) -> std::io::Result<()> {
    let mut line = |label: &str, value: String| writeln!(out, "{label:<17}{}", sanitize(&value));
    let unknown = || "unknown".to_owned();
    let machine = &diagnosis.machine;
    line("muser", diagnosis.version.to_owned())?;
    line("processor", machine.cpu.clone().unwrap_or_else(unknown))?;
    let count = |count: Option<usize>| count.map_or_else(unknown, |count| count.to_string());
    let mut cpus = format!("{} logical, {} cores", count(machine.logical_cpus), count(machine.cores));
    if let Some(allowed) = &machine.allowed_cpus {
        cpus.extend(["; this process may use ", allowed]);
    }
    if let Some(percent) = machine.cpu_quota_percent {
        cpus = format!("{cpus}; the container's quota is {} of them", percent as f64 / 100.0);
    }
    line("processors", cpus)?;
    let gib = |bytes: Option<u64>| {
        bytes.map_or_else(unknown, |bytes| format!("{:.1} GiB", bytes as f64 / (1_u64 << 30) as f64))
    };
    let mut memory =
        format!("{}, {} available", gib(machine.memory_bytes), gib(machine.memory_available_bytes));
    if machine.memory_limit_bytes.is_some() {
        memory = format!("{memory}; the container's limit is {}", gib(machine.memory_limit_bytes));
    }
    line("memory", memory)?;
    line("huge pages", machine.transparent_huge_pages.clone().unwrap_or_else(unknown))?;
    line("threads", diagnosis.cpu.threads.to_string())?;
    line("instruction set", format!("{}: {}", diagnosis.cpu.instruction_set, diagnosis.cpu.why))?;
    line("supported", diagnosis.cpu.supported.join(", "))?;
    let CpuReport { kv_type, numeric_route, .. } = &diagnosis.cpu;
    line(
        "KV",
        format!(
            "{kv_type} bits a value unless --kv says 8; numeric route {numeric_route}, the same on a card"
        ),
    )?;
    line("cuda", diagnosis.cuda.describe())?;
    if let Some(compiler) = &diagnosis.cuda.compiler {
        line("", format!("kernels are compiled by {compiler}"))?;
    }
    for (index, text) in diagnosis.wgpu.describe().into_iter().enumerate() {
        line(if index == 0 { "wgpu" } else { "" }, text)?;
    }
    let store = diagnosis.store.clone().unwrap_or_else(|| "no home folder is known".into());
    line("models", format!("{} in {store}, and the bundled one", diagnosis.models))?;
    let nodes = match &diagnosis.nodes_fault {
        Some(fault) => vec![fault.clone()],
        None if diagnosis.node_lines.is_empty() => vec!["none are known".to_owned()],
        None => diagnosis.node_lines.clone(),
    };
    for (index, node) in nodes.into_iter().enumerate() {
        line(if index == 0 { "nodes" } else { "" }, node)?;
    }
    for (index, ty) in diagnosis.self_test.iter().enumerate() {
        let worst = ty.paths.iter().map(|path| path.relative_error).fold(0.0, f64::max);
        let faults: Vec<_> = ty
            .paths
            .iter()
            .filter_map(|path| Some(format!("{}: {}", path.path, path.fault.as_ref()?)))
            .collect();
        let verdict = if faults.is_empty() {
            format!("ok on {} paths, same bits, {:.3} % from the reference", ty.paths.len(), worst * 100.0)
        } else {
            format!("WRONG: {}", faults.join("; "))
        };
        line(if index == 0 { "self-test" } else { "" }, format!("{:<8}{verdict}", ty.ty))?;
    }
    Ok(())
}
