//! Which adapter: the one that was named, else a discrete one before an integrated one, never software.

use super::memory;
use crate::WgpuError;

/// What kind of device an adapter is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum AdapterKind {
    /// A card with memory of its own.
    Discrete,
    /// A device that shares the processor's memory.
    Integrated,
    /// A part of a device, or of no known kind.
    Other,
    /// The processor, pretending.
    Software,
}

/// What an adapter is.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterFacts {
    /// Its number among those that there are.
    pub index: usize,
    /// Its name.
    pub name: String,
    /// Its kind.
    pub kind: AdapterKind,
    /// `Vulkan` or `Metal`.
    pub api: String,
    /// Driver and its version.
    pub driver: String,
    /// Fewest and most lanes of a subgroup; 0 without subgroups.
    pub subgroups: (u32, u32),
    /// Most bytes of a binding.
    pub binding: u64,
    /// Most bytes of a buffer.
    pub buffer: u64,
    /// Bytes of its memory, if the driver tells.
    pub memory: Option<u64>,
    /// Alignment of a binding's offset.
    pub alignment: u64,
}

/// All adapters, the best first.
pub fn adapters() -> Vec<AdapterFacts> {
    all().into_iter().map(|(_, facts)| facts).collect()
}

fn all() -> Vec<(wgpu::Adapter, AdapterFacts)> {
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    descriptor.backends = wgpu::Backends::VULKAN | wgpu::Backends::METAL;
    // Layers that check what we do are for those who ask for them by the loader's own variables.
    descriptor.flags = wgpu::InstanceFlags::empty();
    let instance = wgpu::Instance::new(descriptor);
    let found =
        pollster::block_on(instance.enumerate_adapters(wgpu::Backends::VULKAN | wgpu::Backends::METAL));
    let mut all: Vec<_> = found.into_iter().map(|adapter| (facts(&adapter), adapter)).collect();
    all.sort_by_key(|(facts, _)| facts.kind);
    all.into_iter()
        .enumerate()
        .map(|(index, (facts, adapter))| (adapter, AdapterFacts { index, ..facts }))
        .collect()
}

fn facts(adapter: &wgpu::Adapter) -> AdapterFacts {
    let (info, limits) = (adapter.get_info(), adapter.limits());
    AdapterFacts {
        index: 0,
        name: info.name.clone(),
        kind: match info.device_type {
            wgpu::DeviceType::DiscreteGpu => AdapterKind::Discrete,
            wgpu::DeviceType::IntegratedGpu => AdapterKind::Integrated,
            wgpu::DeviceType::Cpu => AdapterKind::Software,
            _ => AdapterKind::Other,
        },
        api: format!("{:?}", info.backend),
        driver: format!("{} {}", info.driver, info.driver_info).trim().to_owned(),
        subgroups: if adapter.features().contains(wgpu::Features::SUBGROUP) {
            (info.subgroup_min_size, info.subgroup_max_size)
        } else {
            (0, 0)
        },
        binding: limits.max_storage_buffer_binding_size,
        buffer: limits.max_buffer_size,
        memory: memory::of(adapter),
        alignment: u64::from(limits.min_storage_buffer_offset_alignment),
    }
}

/// What to say where there is nothing.
const HINT: &str = "the system has no Vulkan loader (Debian: libvulkan1) or no driver with a device for it";

pub(super) fn choose(wanted: Option<&str>) -> Result<(wgpu::Adapter, AdapterFacts), WgpuError> {
    let all = all();
    let facts: Vec<&AdapterFacts> = all.iter().map(|(_, facts)| facts).collect();
    let index = pick(&facts, wanted)?;
    let nothing = || WgpuError::NoAdapter(HINT.to_owned());
    all.into_iter().nth(index).ok_or_else(nothing)
}

/// The number of the adapter to take.
fn pick(all: &[&AdapterFacts], wanted: Option<&str>) -> Result<usize, WgpuError> {
    if all.is_empty() {
        return Err(WgpuError::NoAdapter(HINT.to_owned()));
    }
    let list = || {
        let lines: Vec<String> = all
            .iter()
            .map(|facts| format!("{}: {} ({:?}, {})", facts.index, facts.name, facts.kind, facts.api))
            .collect();
        lines.join("; ")
    };
    let Some(wanted) = wanted else {
        let hardware = all.iter().position(|facts| facts.kind != AdapterKind::Software);
        return hardware.ok_or_else(|| {
            WgpuError::NoAdapter(format!(
                "there is only software, which is taken where it is named: {}",
                list()
            ))
        });
    };
    let low = wanted.to_lowercase();
    let found = match wanted.parse::<usize>() {
        Ok(index) => (index < all.len()).then_some(index),
        Err(_) => all.iter().position(|facts| !low.is_empty() && facts.name.to_lowercase().contains(&low)),
    };
    found.ok_or_else(|| WgpuError::NoSuchAdapter { wanted: wanted.to_owned(), found: list() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adapter(index: usize, name: &str, kind: AdapterKind) -> AdapterFacts {
        AdapterFacts {
            index,
            name: name.to_owned(),
            kind,
            api: "Vulkan".to_owned(),
            driver: String::new(),
            subgroups: (32, 32),
            binding: 1 << 30,
            buffer: 1 << 30,
            memory: None,
            alignment: 256,
        }
    }

    #[test]
    fn an_adapter_is_taken_by_name_number_or_kind() {
        let card = adapter(0, "Radeon RX", AdapterKind::Discrete);
        let chip = adapter(1, "UHD Graphics", AdapterKind::Integrated);
        let soft = adapter(2, "llvmpipe (LLVM 15)", AdapterKind::Software);
        let all = [&card, &chip, &soft];
        for (wanted, expected) in
            [(None, 0), (Some("llvm"), 2), (Some("uhd"), 1), (Some("2"), 2), (Some("LLVMPIPE"), 2)]
        {
            assert_eq!(pick(&all, wanted).ok(), Some(expected), "{wanted:?}");
        }
        for wanted in ["3", "nvidia", ""] {
            let error = pick(&all, Some(wanted)).expect_err("not there").to_string();
            assert!(error.contains("Radeon RX") && error.contains("2: llvmpipe"), "{error}");
        }
        assert!(matches!(pick(&[&soft], None), Err(WgpuError::NoAdapter(what)) if what.contains("llvmpipe")));
        assert!(matches!(pick(&[], None), Err(WgpuError::NoAdapter(what)) if what.contains("libvulkan1")));
    }
}
