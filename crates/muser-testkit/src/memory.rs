//! Memory of this process, as the system sees it.

/// Bytes of this process that are in memory; `None` where the system does not say.
pub fn resident_bytes() -> Option<u64> {
    field("VmRSS:")
}

/// The most that were at once, since the process began or since [`reset_peak`].
pub fn peak_resident_bytes() -> Option<u64> {
    field("VmHWM:")
}

/// The peak begins anew. `false` where the system does not let it.
pub fn reset_peak() -> bool {
    std::fs::write("/proc/self/clear_refs", "5").is_ok()
}

fn field(name: &str) -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_touched_is_resident() {
        let before = resident_bytes().expect("Linux says so");
        let memory = std::hint::black_box(vec![1_u8; 32 << 20]);
        let with = resident_bytes().expect("still");
        assert!(with >= before + (24 << 20), "{before} {with}");
        assert!(peak_resident_bytes().expect("as well") >= with - (1 << 20));
        drop(memory);
    }
}
