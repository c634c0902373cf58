//! What people write: devices, and sizes.

use std::fmt;
use std::str::FromStr;

/// Most devices of a list.
const MOST_DEVICES: usize = 16;
/// Most of a kind that a machine has.
const MOST_OF_A_KIND: usize = 64;

/// A backend that devices belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Backend {
    /// The processor.
    Cpu,
    /// A card with CUDA.
    Cuda,
    /// A GPU with Vulkan or Metal.
    Wgpu,
}

impl Backend {
    /// As in `--devices`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
            Self::Wgpu => "wgpu",
        }
    }
}

/// A device that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceSpec {
    /// Backend.
    pub backend: Backend,
    /// Number among the backend's devices.
    pub number: usize,
    /// Layers, if they were given.
    pub layers: Option<usize>,
    /// Bytes of its memory that may be used, if it is not all that is free.
    pub memory: Option<u64>,
}

impl fmt::Display for DeviceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.backend, self.number) {
            (Backend::Cpu, 0) => f.write_str("cpu"),
            (backend, number) => write!(f, "{}:{number}", backend.name()),
        }
    }
}

/// What `--devices` takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceList {
    /// What is best.
    Auto,
    /// These, in this order.
    These(Vec<DeviceSpec>),
}

impl FromStr for DeviceList {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.trim().eq_ignore_ascii_case("auto") {
            return Ok(Self::Auto);
        }
        let mut devices: Vec<DeviceSpec> = Vec::new();
        for item in text.split(',') {
            let device = device(item.trim())?;
            let same = |other: &DeviceSpec| (other.backend, other.number) == (device.backend, device.number);
            if devices.iter().any(same) {
                return Err(format!("{device} is there twice"));
            }
            devices.push(device);
        }
        if devices.len() > MOST_DEVICES {
            return Err(format!("{} devices, at most {MOST_DEVICES}", devices.len()));
        }
        Ok(Self::These(devices))
    }
}

fn device(item: &str) -> Result<DeviceSpec, String> {
    let (device, layers) = match item.split_once('=') {
        Some((device, layers)) => (device.trim(), Some(layers.trim())),
        None => (item, None),
    };
    let (device, memory) = match device.split_once('@') {
        Some((device, memory)) => (device.trim(), Some(memory.trim())),
        None => (device, None),
    };
    let (name, number) = device.split_once(':').map_or((device, None), |(name, n)| (name, Some(n)));
    let backend = match name.to_ascii_lowercase().as_str() {
        "cpu" => Backend::Cpu,
        "cuda" => Backend::Cuda,
        "wgpu" | "vulkan" | "metal" => Backend::Wgpu,
        _ => {
            let found = if item.is_empty() { "nothing".into() } else { format!("`{item}`") };
            return Err(format!(
                "expected cpu, cuda:N or wgpu:N, with @SIZE and =LAYERS where memory and layers matter, or auto alone; found {found}"
            ));
        }
    };
    let number = match number {
        None => 0,
        Some(text) => whole(text).filter(|n| *n < MOST_OF_A_KIND).ok_or_else(|| {
            format!("the number of a {name} device is 0 to {}, found `{text}`", MOST_OF_A_KIND - 1)
        })?,
    };
    let layers = match layers {
        None => None,
        Some(text) => Some(
            whole(text)
                .filter(|n| *n > 0)
                .ok_or_else(|| format!("layers of {device}: expected a number from 1, found `{text}`"))?,
        ),
    };
    let memory = memory.map(|text| parse_bytes(text).map_err(|error| format!("memory of {device}: {error}")));
    Ok(DeviceSpec { backend, number, layers, memory: memory.transpose()? })
}

/// Digits and nothing else.
fn whole(text: &str) -> Option<usize> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

/// A size with its unit, such as `12g` or `512m`: binary, as memory is sold. An exabyte and more is none.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let wrong = || format!("expected a size with its unit, such as 12g or 512m, found `{text}`");
    let lower = text.trim().to_ascii_lowercase();
    let digits = lower.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match lower[digits.len()..].trim_end_matches('b').trim_end_matches('i') {
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        _ => return Err(wrong()),
    };
    let digits = digits.trim_end();
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.') {
        return Err(wrong());
    }
    let number: f64 = digits.parse().map_err(|_| wrong())?;
    let bytes = number * (1_u64 << shift) as f64;
    if (1.0..1e18).contains(&bytes) { Ok(bytes as u64) } else { Err(wrong()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> Result<String, String> {
        match text.parse()? {
            DeviceList::Auto => Ok("auto".into()),
            DeviceList::These(devices) => Ok(devices
                .iter()
                .map(|d| {
                    let memory = d.memory.map(|bytes| format!("@{bytes}")).unwrap_or_default();
                    d.layers.map_or(format!("{d}{memory}"), |layers| format!("{d}{memory}={layers}"))
                })
                .collect::<Vec<_>>()
                .join(" ")),
        }
    }

    #[test]
    fn devices_are_read_as_they_are_written() {
        for (text, expected) in [
            ("auto", "auto"),
            ("cpu", "cpu"),
            ("cuda:0,cpu", "cuda:0 cpu"),
            ("cuda,cuda:1", "cuda:0 cuda:1"),
            ("CUDA:0=30, cpu", "cuda:0=30 cpu"),
            ("cpu=4,vulkan:2=4", "cpu=4 wgpu:2=4"),
            ("cpu:0,cpu:1", "cpu cpu:1"),
            ("cuda:0@12g=30, cpu @ 512m", "cuda:0@12884901888=30 cpu@536870912"),
        ] {
            assert_eq!(names(text).as_deref(), Ok(expected), "{text}");
        }
    }

    #[test]
    fn what_is_no_list_of_devices_is_refused_with_what_was_found() {
        for (text, sign) in [
            ("", "found nothing"),
            ("cuda:0,", "found nothing"),
            ("rocm:0", "`rocm:0`"),
            ("gpu", "`gpu`"),
            ("cuda:0 cpu", "found `0 cpu`"),
            ("auto,cpu", "`auto`"),
            ("cuda:x", "found `x`"),
            ("cuda:-1", "found `-1`"),
            ("cuda:64", "0 to 63, found `64`"),
            ("cuda:99999999999999999999", "found `99999999999999999999`"),
            ("cuda:0=0,cpu", "layers of cuda:0: expected a number from 1, found `0`"),
            ("cuda:0=-3,cpu", "found `-3`"),
            ("cuda:0=,cpu", "found ``"),
            ("cuda:0=all,cpu", "found `all`"),
            (
                "cuda:0@12,cpu",
                "memory of cuda:0: expected a size with its unit, such as 12g or 512m, found `12`",
            ),
            ("cuda:0@,cpu", "found ``"),
            ("cuda:0=30@12g,cpu", "found `30@12g`"),
            ("cpu,cpu", "cpu is there twice"),
            ("cuda,cpu,cuda:0=3", "cuda:0 is there twice"),
            ("vulkan:1,wgpu:1", "wgpu:1 is there twice"),
        ] {
            let error = names(text).expect_err(text);
            assert!(error.contains(sign), "{text}: {error}");
        }
        let many: Vec<String> = (47..64).map(|n| format!("cuda:{n}")).collect();
        assert!(names(&many.join(",")).expect_err("too many").contains("17 devices"));
        assert_eq!(names(&many[1..].join(",")).expect("as many as are taken").split(' ').count(), 16);
    }

    #[test]
    fn sizes_have_units() {
        for (text, bytes) in [
            ("12g", 12 << 30),
            ("12G", 12 << 30),
            ("12GB", 12 << 30),
            ("12GiB", 12 << 30),
            ("1.5g", 3 << 29),
            ("512m", 512 << 20),
            ("64k", 64 << 10),
            ("2t", 2 << 40),
            (" 8 g ", 8 << 30),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in [
            "", "12", "g", "-1g", "0g", "12x", "12gg", "1e3g", "nan", "infg", "1..5g", "9999999t", "12 34g",
            "\u{661}g",
        ] {
            let error = parse_bytes(text).expect_err(text);
            assert!(error.contains(&format!("`{text}`")), "{error}");
        }
    }
}
