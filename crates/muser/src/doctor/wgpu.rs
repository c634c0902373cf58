//! What Vulkan or Metal offer, and what the wgpu backend found out about the GPU that it would take.

use serde::Serialize;

/// The GPU that `--backend wgpu` takes, or why there is none to use.
#[derive(Serialize)]
pub struct WgpuReport {
    /// All adapters, one line each.
    adapters: Vec<String>,
    /// How floats are rounded there, and why.
    arithmetic: Option<String>,
    /// Values of a small model compared bit by bit with scalar code.
    self_test: Option<usize>,
    /// Bytes per second of a plain read.
    read_bandwidth: Option<f64>,
    fault: Option<String>,
}

impl WgpuReport {
    /// Lists adapters; opens the first if it is hardware and `self_test` says so.
    #[cfg(feature = "wgpu")]
    pub fn find(self_test: bool) -> Self {
        use muser_wgpu::AdapterKind;
        let all = muser_wgpu::adapters();
        let gib = |bytes: u64| bytes as f64 / (1_u64 << 30) as f64;
        let adapters = all
            .iter()
            .map(|a| {
                let memory = a.memory.map_or_else(String::new, |bytes| format!(", {:.1} GiB", gib(bytes)));
                let (fewest, most) = a.subgroups;
                let (index, name, kind, api, driver) = (a.index, &a.name, a.kind, &a.api, &a.driver);
                format!(
                    "{index}: {name} ({kind:?}, {api}, driver {driver}{memory}, subgroups of {fewest} to {most}, \
                     bindings of {:.2} GiB)",
                    gib(a.binding)
                )
            })
            .collect();
        let mut report =
            Self { adapters, arithmetic: None, self_test: None, read_bandwidth: None, fault: None };
        let hardware = all.first().is_some_and(|first| first.kind != AdapterKind::Software);
        if hardware && self_test {
            report.fault = report.try_first().err().map(|error| format!("{error:#}"));
        }
        report
    }

    #[cfg(feature = "wgpu")]
    fn try_first(&mut self) -> anyhow::Result<()> {
        let model = crate::model_file::ModelSource::Bundled.load()?;
        let options = muser_wgpu::GpuOptions::default();
        let gpu = muser_wgpu::Gpu::open_for(&options, &model, muser_backend::KvType::Int16)?;
        let wrong = gpu.probe().tried.iter().filter(|(_, differ)| *differ > 0);
        let wrong: Vec<String> = wrong.map(|(what, differ)| format!("{what} {differ}")).collect();
        let plain = if gpu.is_plain() { "; only plain kernels, another one was wrong" } else { "" };
        self.arithmetic =
            Some(format!("{:?}; not right of 65536: {}{plain}", gpu.probe().operations, wrong.join(", ")));
        self.self_test = gpu.compared();
        self.read_bandwidth = gpu.read_bandwidth()?;
        Ok(())
    }

    /// Lists nothing.
    #[cfg(not(feature = "wgpu"))]
    pub fn find(_self_test: bool) -> Self {
        let fault = Some("this muser was built without the wgpu feature".to_owned());
        Self { adapters: Vec::new(), arithmetic: None, self_test: None, read_bandwidth: None, fault }
    }

    /// Lines for people.
    pub fn describe(&self) -> Vec<String> {
        let mut lines = self.adapters.clone();
        if lines.is_empty() && self.fault.is_none() {
            lines.push("no GPU with a driver for Vulkan or Metal".to_owned());
        }
        if let Some(compared) = self.self_test {
            lines.push(format!("self-test of 0: {compared} values, same bits as scalar code"));
        }
        lines.extend(self.arithmetic.as_ref().map(|text| format!("arithmetic of 0: {text}")));
        lines.extend(self.read_bandwidth.map(|rate| format!("plain read of 0: {:.0} GB/s", rate / 1e9)));
        lines.extend(self.fault.clone());
        lines
    }
}
