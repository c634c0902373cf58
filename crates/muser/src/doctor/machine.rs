//! Facts about the machine from the places where Linux tells them; elsewhere they are simply unknown.
//!
//! Every parser takes text, so that tests need no particular machine.

use std::fs;

use serde::Serialize;

/// What the machine offers.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub struct Machine {
    /// Processor by name.
    pub cpu: Option<String>,
    /// Logical processors that exist.
    pub logical_cpus: Option<usize>,
    /// Cores that exist: siblings counted once.
    pub cores: Option<usize>,
    /// Logical processors that this process may use, as a list such as `0-3,8`.
    pub allowed_cpus: Option<String>,
    /// Processors that the container's quota is worth, in hundredths.
    pub cpu_quota_percent: Option<u64>,
    /// Bytes of memory.
    pub memory_bytes: Option<u64>,
    /// Bytes that are free or can be freed.
    pub memory_available_bytes: Option<u64>,
    /// Bytes that the container may use.
    pub memory_limit_bytes: Option<u64>,
    /// When the kernel uses large pages by itself: `always`, `madvise` or `never`.
    pub transparent_huge_pages: Option<String>,
}

impl Machine {
    /// Looks around.
    pub fn find() -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let cpuinfo = read("/proc/cpuinfo");
        let meminfo = read("/proc/meminfo");
        Self {
            cpu: field(&cpuinfo, "model name").map(str::to_owned),
            logical_cpus: some_count(cpuinfo.lines().filter(|line| line.starts_with("processor")).count()),
            cores: cores(&cpuinfo),
            allowed_cpus: field(&read("/proc/self/status"), "Cpus_allowed_list").map(str::to_owned),
            cpu_quota_percent: quota_percent(&read("/sys/fs/cgroup/cpu.max")),
            memory_bytes: kibibytes(&meminfo, "MemTotal"),
            memory_available_bytes: kibibytes(&meminfo, "MemAvailable"),
            memory_limit_bytes: read("/sys/fs/cgroup/memory.max").trim().parse().ok(),
            transparent_huge_pages: chosen(&read("/sys/kernel/mm/transparent_hugepage/enabled"))
                .map(str::to_owned),
        }
    }
}

/// The value of the first line `name : value`.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(key, _)| key.trim() == name)
        .map(|(_, value)| value.trim())
        .filter(|value| !value.is_empty())
}

fn kibibytes(text: &str, name: &str) -> Option<u64> {
    field(text, name)?.strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

/// Distinct pairs of package and core.
fn cores(cpuinfo: &str) -> Option<usize> {
    let pair = |processor: &str| {
        Some((field(processor, "physical id")?.to_owned(), field(processor, "core id")?.to_owned()))
    };
    let mut pairs: Vec<_> = cpuinfo.split("\n\n").filter_map(pair).collect();
    pairs.sort();
    pairs.dedup();
    some_count(pairs.len())
}

fn some_count(count: usize) -> Option<usize> {
    (count > 0).then_some(count)
}

/// `quota period` in microseconds; `max` is no quota.
fn quota_percent(text: &str) -> Option<u64> {
    let (quota, period) = text.trim().split_once(' ')?;
    let (quota, period): (u64, u64) = (quota.parse().ok()?, period.parse().ok()?);
    quota.checked_mul(100)?.checked_div(period)
}

/// The word in brackets.
fn chosen(text: &str) -> Option<&str> {
    Some(text.split_once('[')?.1.split_once(']')?.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_texts_of_linux_are_understood() {
        let cpuinfo = "processor\t: 0\nmodel name\t: A CPU: the second\nphysical id\t: 0\ncore id\t\t: 0\n\n\
                       processor\t: 1\nmodel name\t: A CPU: the second\nphysical id\t: 0\ncore id\t\t: 0\n\n\
                       processor\t: 2\nphysical id\t: 1\ncore id\t\t: 0\n";
        assert_eq!(field(cpuinfo, "model name"), Some("A CPU: the second"));
        assert_eq!(cores(cpuinfo), Some(2));
        assert_eq!(kibibytes("MemTotal:       24 kB\nMemAvailable: x kB\n", "MemTotal"), Some(24576));
        assert_eq!(kibibytes("MemAvailable: x kB\n", "MemAvailable"), None);
        assert_eq!(quota_percent("150000 100000\n"), Some(150));
        assert_eq!(quota_percent("max 100000\n"), None);
        assert_eq!(quota_percent("1 0"), None);
        assert_eq!(chosen("always [madvise] never\n"), Some("madvise"));
        assert_eq!(chosen(""), None);
    }
}
