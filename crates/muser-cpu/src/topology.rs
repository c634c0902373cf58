//! Which processors to use: the affinity mask and the cgroup quota that are already set, one thread per core.

use std::collections::BTreeSet;
use std::path::Path;

#[cfg(target_os = "linux")]
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

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

/// Whole processors in the smallest quota on the way from this process's groups to their roots, in either version of
/// control groups.
fn quota(sys: &Path, cgroup: &str) -> Option<usize> {
    let root = sys.join("fs/cgroup");
    let mut least = None;
    for line in cgroup.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        // Version 2 has one tree for all controllers and no name for it, version 1 one for each, named after them; a
        // machine may have both.
        let trees: Vec<_> = match controllers {
            "" => vec![root.clone(), root.join("unified")],
            some if some.split(',').any(|name| name == "cpu") => vec![root.join(some), root.join("cpu")],
            _ => continue,
        };
        for tree in trees {
            least = [least, least_quota(&tree, path)].into_iter().flatten().min();
        }
    }
    least
}

/// The smallest quota from a group up to the root of its tree. Inside a container the group's path may be that of the
/// host, of which only the root is there.
fn least_quota(tree: &Path, path: &str) -> Option<usize> {
    let names: Vec<_> = path.split('/').filter(|name| !name.is_empty() && *name != "..").collect();
    let dirs = (0..=names.len()).map(|count| tree.join(names[..count].join("/")));
    dirs.filter_map(|dir| processors_of(&dir)).min()
}

/// Whole processors that one group may use: a quota of time within a period.
fn processors_of(dir: &Path) -> Option<usize> {
    let read = |name: &str| std::fs::read_to_string(dir.join(name)).ok();
    let number = |text: &str| text.trim().parse::<usize>().ok();
    let (quota, period) = match read("cpu.max") {
        Some(text) => {
            let (quota, period) = text.trim().split_once(' ')?;
            (number(quota)?, number(period)?)
        }
        // Without a limit the quota is -1, which is no number here.
        None => (number(&read("cpu.cfs_quota_us")?)?, number(&read("cpu.cfs_period_us")?)?),
    };
    (period > 0).then(|| quota.div_ceil(period).max(1))
}

/// Logical processors of the affinity mask; empty where there is no such thing.
#[cfg(target_os = "linux")]
fn allowed_processors() -> Vec<usize> {
    let Ok(set) = sched_getaffinity(None) else { return Vec::new() };
    (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect()
}

#[cfg(not(target_os = "linux"))]
fn allowed_processors() -> Vec<usize> {
    Vec::new()
}

/// Affinity that a thread had before it was pinned.
pub(crate) struct Pinned {
    #[cfg(target_os = "linux")]
    before: Option<CpuSet>,
}

/// Pins the calling thread; failing to is not an error, the thread then floats.
#[cfg(target_os = "linux")]
pub(crate) fn pin_to(cpu: usize) -> Pinned {
    if cpu >= CpuSet::MAX_CPU {
        return Pinned { before: None };
    }
    let before = sched_getaffinity(None).ok();
    let mut set = CpuSet::new();
    set.set(cpu);
    let pinned = sched_setaffinity(None, &set).is_ok();
    Pinned { before: before.filter(|_| pinned) }
}

#[cfg(target_os = "linux")]
impl Pinned {
    /// Gives the calling thread its affinity back: threads that it starts later inherit it.
    pub(crate) fn undo(self) {
        if let Some(before) = self.before {
            let _ = sched_setaffinity(None, &before);
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

    fn check_tree(
        files: &[(&str, &str)],
        allowed: &[usize],
        cgroup: &str,
        processors: &[usize],
        threads: usize,
    ) {
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
        check_tree(&SMT, &[0, 1, 2, 3], "", &[0, 1], 2);
    }

    #[test]
    fn affinity_mask_is_respected() {
        check_tree(&SMT, &[2], "", &[2], 1);
        check_tree(&SMT, &[1, 2, 3], "", &[1, 2], 2);
    }

    #[test]
    fn missing_tree_counts_every_processor() {
        check_tree(&[], &[0, 1, 4], "", &[0, 1, 4], 3);
    }

    #[test]
    fn quota_cuts_threads() {
        let quota = |text| [("fs/cgroup/a/cpu.max", text), ("fs/cgroup/a/b/cpu.max", "max 100000\n")];
        check_tree(&quota("150000 100000\n"), &[0, 1, 2], "0::/a/b\n", &[0, 1, 2], 2);
        check_tree(&quota("10000 100000\n"), &[0, 1, 2], "0::/a/b\n", &[0, 1, 2], 1);
        check_tree(&quota("max 100000\n"), &[0, 1, 2], "0::/a/b\n", &[0, 1, 2], 3);
    }

    #[test]
    fn the_older_control_groups_count_too() {
        let group = |tree: &str, path: &str, quota: &str| {
            let dir = format!("fs/cgroup/{tree}{path}");
            [
                (format!("{dir}/cpu.cfs_quota_us"), quota.to_owned()),
                (format!("{dir}/cpu.cfs_period_us"), "100000\n".to_owned()),
            ]
        };
        let check = |files: &[[(String, String); 2]], cgroup: &str, threads: usize| {
            let files: Vec<_> =
                files.iter().flatten().map(|(name, text)| (name.as_str(), text.as_str())).collect();
            check_tree(&files, &[0, 1, 2, 3], cgroup, &[0, 1, 2, 3], threads);
        };
        let own = "12:memory:/a\n4:cpu,cpuacct:/docker/abc\n0::/\n";
        check(&[group("cpu,cpuacct", "/docker/abc", "50000\n")], own, 1);
        check(&[group("cpu", "/docker/abc", "150000\n")], own, 2);
        // A parent's limit holds for its children.
        check(&[group("cpu", "/docker/abc", "-1\n"), group("cpu", "/docker", "200000\n")], own, 2);
        // In a container the host's path is not there, and the root is the container's own group.
        check(&[group("cpu", "", "300000\n")], own, 3);
        check(&[group("cpu", "/docker/abc", "-1\n")], own, 4);
        check(&[group("memory", "/a", "100000\n")], own, 4);
        let both = [("fs/cgroup/unified/x/cpu.max", "300000 100000\n")];
        check_tree(&both, &[0, 1, 2, 3], "0::/x\n", &[0, 1, 2, 3], 3);
        check_tree(&[("fs/cgroup/cpu.max", "200000 100000\n")], &[0, 1, 2], "0::/../../y\n", &[0, 1, 2], 2);
        for odd in ["", "0:", "x", "::", "0::", "4:cpu", "1:cpu:relative\n"] {
            check_tree(&[], &[0, 1], odd, &[0, 1], 2);
        }
    }

    #[test]
    fn lists() {
        assert_eq!(parse_list("0-2,5\n"), [0, 1, 2, 5]);
        assert_eq!(parse_list("x,3"), [3]);
    }
}
