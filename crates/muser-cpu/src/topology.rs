//! Which processors to use: the affinity mask and the cgroup quota that are already set, one thread per core.
#![allow(unsafe_code, reason = "asks the system for the affinity mask and sets it")]

use std::collections::BTreeSet;
use std::path::Path;

/// Processors for the pool's threads, in order; one per physical core.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Topology {
    /// Logical processor of each thread; empty where threads cannot be pinned.
    pub(crate) processors: Vec<usize>,
    /// Threads that the quota allows, at least 1.
    pub(crate) threads: usize,
}

impl Topology {
    /// Of this machine, for this process.
    pub(crate) fn detect() -> Self {
        let allowed = allowed_processors();
        if allowed.is_empty() {
            let threads = std::thread::available_parallelism().map_or(1, usize::from);
            return Self { processors: Vec::new(), threads };
        }
        let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        Self::from_tree(Path::new("/sys"), &allowed, &own)
    }

    /// From a sysfs tree: the first allowed sibling of each core, cut to the cgroup quota rounded up.
    fn from_tree(sys: &Path, allowed: &[usize], cgroup: &str) -> Self {
        let mut cores = BTreeSet::new();
        let mut processors = Vec::new();
        for &cpu in allowed {
            let siblings = sys.join(format!("devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"));
            let core = std::fs::read_to_string(siblings)
                .ok()
                .and_then(|list| parse_list(&list).first().copied())
                .unwrap_or(cpu);
            if cores.insert(core) {
                processors.push(cpu);
            }
        }
        let quota = quota(sys, cgroup).unwrap_or(usize::MAX);
        let threads = processors.len().min(quota).max(1);
        Self { processors, threads }
    }
}

/// `0-2,5` as numbers; what does not parse is left out.
fn parse_list(list: &str) -> Vec<usize> {
    let mut out = Vec::new();
    for part in list.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.trim().parse::<usize>(), last.trim().parse::<usize>()) {
            out.extend(first..=last.min(first.saturating_add(4096)));
        }
    }
    out
}

/// Whole processors in the smallest quota on the way from this cgroup (version 2) to the root.
fn quota(sys: &Path, cgroup: &str) -> Option<usize> {
    let path = cgroup.lines().find_map(|line| line.strip_prefix("0::"))?.trim_start_matches('/');
    let root = sys.join("fs/cgroup");
    let mut dir = root.join(path);
    let mut least = None;
    loop {
        if let Ok(max) = std::fs::read_to_string(dir.join("cpu.max")) {
            let mut words = max.split_whitespace().map(str::parse::<usize>);
            if let (Some(Ok(quota)), Some(Ok(period))) = (words.next(), words.next())
                && period > 0
            {
                let cpus = quota.div_ceil(period).max(1);
                least = Some(least.map_or(cpus, |l: usize| l.min(cpus)));
            }
        }
        if dir == root || !dir.pop() {
            return least;
        }
    }
}

/// Logical processors of the affinity mask; empty where there is no such thing.
#[cfg(target_os = "linux")]
fn allowed_processors() -> Vec<usize> {
    // SAFETY: a cpu_set_t is plain bits, and the call writes no more than its size.
    let set = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        if libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) != 0 {
            return Vec::new();
        }
        set
    };
    // SAFETY: the index is below the size of the set.
    (0..libc::CPU_SETSIZE as usize).filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) }).collect()
}

#[cfg(not(target_os = "linux"))]
fn allowed_processors() -> Vec<usize> {
    Vec::new()
}

/// Affinity that a thread had before it was pinned.
pub(crate) struct Pinned {
    #[cfg(target_os = "linux")]
    before: Option<libc::cpu_set_t>,
}

/// Pins the calling thread; failing to is not an error, the thread then floats.
#[cfg(target_os = "linux")]
pub(crate) fn pin_to(cpu: usize) -> Pinned {
    if cpu >= libc::CPU_SETSIZE as usize {
        return Pinned { before: None };
    }
    // SAFETY: the sets are plain bits, the index is below their size, the calls read and write no more than that.
    unsafe {
        let mut before: libc::cpu_set_t = std::mem::zeroed();
        let known = libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut before) == 0;
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        let pinned = libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set) == 0;
        Pinned { before: (known && pinned).then_some(before) }
    }
}

#[cfg(target_os = "linux")]
impl Pinned {
    /// Gives the calling thread its affinity back: threads that it starts later inherit it.
    pub(crate) fn undo(self) {
        if let Some(before) = self.before {
            // SAFETY: the mask is the one that the system gave.
            unsafe {
                libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const before);
            }
        }
    }
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn pin_to(_cpu: usize) -> Pinned {
    Pinned {}
}

#[cfg(not(target_os = "linux"))]
impl Pinned {
    pub(crate) fn undo(self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes files below a temporary root.
    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("a temporary folder");
        for (name, text) in files {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().expect("has a parent")).expect("folders");
            std::fs::write(path, text).expect("file");
        }
        dir
    }

    fn check(files: &[(&str, &str)], allowed: &[usize], cgroup: &str, processors: &[usize], threads: usize) {
        let dir = tree(files);
        let found = Topology::from_tree(dir.path(), allowed, cgroup);
        assert_eq!(found, Topology { processors: processors.to_vec(), threads });
    }

    const SMT: [(&str, &str); 4] = [
        ("devices/system/cpu/cpu0/topology/thread_siblings_list", "0,2\n"),
        ("devices/system/cpu/cpu1/topology/thread_siblings_list", "1,3\n"),
        ("devices/system/cpu/cpu2/topology/thread_siblings_list", "0,2\n"),
        ("devices/system/cpu/cpu3/topology/thread_siblings_list", "1,3\n"),
    ];

    #[test]
    fn one_thread_per_core() {
        check(&SMT, &[0, 1, 2, 3], "", &[0, 1], 2);
    }

    #[test]
    fn affinity_mask_is_respected() {
        check(&SMT, &[2], "", &[2], 1);
        check(&SMT, &[1, 2, 3], "", &[1, 2], 2);
    }

    #[test]
    fn missing_tree_counts_every_processor() {
        check(&[], &[0, 1, 4], "", &[0, 1, 4], 3);
    }

    #[test]
    fn quota_cuts_threads() {
        let quota = |text| [("fs/cgroup/a/cpu.max", text), ("fs/cgroup/a/b/cpu.max", "max 100000\n")];
        check(&quota("150000 100000\n"), &[0, 1, 2], "0::/a/b\n", &[0, 1, 2], 2);
        check(&quota("10000 100000\n"), &[0, 1, 2], "0::/a/b\n", &[0, 1, 2], 1);
        check(&quota("max 100000\n"), &[0, 1, 2], "0::/a/b\n", &[0, 1, 2], 3);
    }

    #[test]
    fn lists() {
        assert_eq!(parse_list("0-2,5\n"), [0, 1, 2, 5]);
        assert_eq!(parse_list("x,3"), [3]);
    }
}
