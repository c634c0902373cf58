//! Large blocks of anonymous memory on huge pages where the system gives them, and how much there is to be had.
#![allow(unsafe_code, reason = "maps memory")]

use memmap2::{MmapMut, MmapOptions};
use muser_backend::ExecError;

/// Size of a huge page that we align to.
const HUGE: usize = 2 << 20;

/// Zeroed memory, aligned to 2 MiB; pages come when first touched.
pub(crate) struct HugeBuffer {
    map: MmapMut,
    at: *mut u8,
    len: usize,
}

// SAFETY: the buffer is owned memory; who writes where is decided by its users.
unsafe impl Send for HugeBuffer {}
// SAFETY: as above, shared access only hands out pointers.
unsafe impl Sync for HugeBuffer {}

impl HugeBuffer {
    /// Maps `len` bytes for `what`; asks for huge pages if `huge`.
    pub(crate) fn new(len: usize, huge: bool, what: &str) -> Result<Self, ExecError> {
        let mapped = len.max(1).next_multiple_of(HUGE) + HUGE;
        let mut map = MmapOptions::new().len(mapped).no_reserve_swap().map_anon().map_err(|_| {
            let available = available_bytes().unwrap_or(0);
            ExecError::OutOfMemory { device: "cpu".into(), what: what.into(), needed: len as u64, available }
        })?;
        let base = map.as_mut_ptr();
        let buffer = Self { map, at: base.wrapping_add(base.align_offset(HUGE)), len };
        buffer.advise(0, len, huge);
        Ok(buffer)
    }

    /// Asks for huge pages for bytes `from .. to` (rounded out to whole ones), or for none.
    pub(crate) fn advise(&self, from: usize, to: usize, huge: bool) {
        let (from, to) = (from / HUGE * HUGE, to.min(self.len.max(1)).next_multiple_of(HUGE));
        #[cfg(target_os = "linux")]
        if from < to {
            let advice = if huge { memmap2::Advice::HugePage } else { memmap2::Advice::NoHugePage };
            let start = self.at as usize - self.map.as_ptr() as usize;
            // It may fail without harm.
            let _ = self.map.advise_range(advice, start + from, to - from);
        }
        #[cfg(not(target_os = "linux"))]
        let _ = (from, to, huge, &self.map);
    }

    /// First byte.
    pub(crate) fn ptr(&self) -> *mut u8 {
        self.at
    }

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

/// Asks the system to take these bytes of a file map out of its cache now. Memory that is not a file's stays as it is.
#[cfg(target_os = "linux")]
pub(crate) fn drop_from_cache(bytes: &[u8]) {
    const PAGE: usize = 4096;
    // Whole pages; the one at the end still has bytes to be read, the one at the start has not.
    let start = bytes.as_ptr() as usize / PAGE * PAGE;
    let end = (bytes.as_ptr() as usize + bytes.len()) / PAGE * PAGE;
    if start < end {
        // SAFETY: the advice changes no byte of the range, whatever is mapped there; it may fail without harm.
        let _ = unsafe {
            rustix::mm::madvise(start as *mut std::ffi::c_void, end - start, rustix::mm::Advice::LinuxPageOut)
        };
    }
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn drop_from_cache(_bytes: &[u8]) {}

/// Bytes that can be used without swapping, also inside a memory cgroup; `None` where the system does not say.
pub fn available_bytes() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let free = meminfo_available(&info)?;
    let limit = cgroup_room().unwrap_or(u64::MAX);
    Some(free.min(limit))
}

/// Bytes that the system could hand out as huge pages at once, without moving anything; `None` where it does not say.
pub(crate) fn free_huge_bytes() -> Option<usize> {
    buddy_huge_bytes(&std::fs::read_to_string("/proc/buddyinfo").ok()?)
}

/// From `/proc/buddyinfo`: free runs of 2^order pages of 4 KiB, by order.
fn buddy_huge_bytes(info: &str) -> Option<usize> {
    let mut huge = 0;
    for line in info.lines() {
        let (_, counts) = line.split_once("zone")?;
        for (order, count) in counts.split_whitespace().skip(1).enumerate().skip(9) {
            huge += count.parse::<usize>().ok()?.checked_mul(4096 << order)?;
        }
    }
    Some(huge)
}

/// `MemAvailable` of `/proc/meminfo`, in bytes.
fn meminfo_available(info: &str) -> Option<u64> {
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// What the memory cgroup (version 2) still allows, file cache not counted as used.
fn cgroup_room() -> Option<u64> {
    let own = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = own.lines().find_map(|line| line.strip_prefix("0::"))?.trim_start_matches('/');
    let dir = std::path::Path::new("/sys/fs/cgroup").join(path);
    let max = std::fs::read_to_string(dir.join("memory.max")).ok()?.trim().parse::<u64>().ok()?;
    let used = std::fs::read_to_string(dir.join("memory.current")).ok()?.trim().parse::<u64>().ok()?;
    let stat = std::fs::read_to_string(dir.join("memory.stat")).ok()?;
    let cache = stat
        .lines()
        .find_map(|line| line.strip_prefix("file "))
        .and_then(|n| n.trim().parse().ok())
        .unwrap_or(0);
    Some(max.saturating_sub(used.saturating_sub(cache)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_meminfo() {
        assert_eq!(meminfo_available("MemTotal: 5 kB\nMemAvailable:   24012 kB\n"), Some(24012 * 1024));
        assert_eq!(meminfo_available("MemTotal: 5 kB\n"), None);
        assert_eq!(meminfo_available("MemAvailable: many kB\n"), None);
    }

    #[test]
    fn reads_buddyinfo() {
        let info = "Node 0, zone      DMA      1 0 0 0 0 0 0 0 1 1 2\n\
                    Node 0, zone   Normal    216 5 5 5 5 5 5 5 5 3 0\n";
        assert_eq!(buddy_huge_bytes(info), Some((1 + 2 * 2 + 3) * HUGE));
        assert_eq!(buddy_huge_bytes("nonsense\n"), None);
    }

    #[test]
    fn dropping_from_the_cache_keeps_what_is_there() {
        let bytes: Vec<u8> = (0..100_000u32).map(|i| i as u8).collect();
        drop_from_cache(&bytes[1..]);
        drop_from_cache(&bytes[..10]);
        assert!(bytes.iter().enumerate().all(|(i, &b)| b == i as u8));
    }

    #[test]
    fn buffer_is_zeroed_and_aligned() {
        let buffer = HugeBuffer::new(3 << 20, true, "test").expect("3 MiB can be mapped");
        assert_eq!(buffer.ptr().align_offset(HUGE), 0);
        assert_eq!(buffer.len(), 3 << 20);
        // SAFETY: inside the buffer.
        unsafe {
            assert_eq!(*buffer.ptr().add((3 << 20) - 1), 0);
            *buffer.ptr().add((3 << 20) - 1) = 7;
        }
    }
}
