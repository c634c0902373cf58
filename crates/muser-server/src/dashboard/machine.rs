//! What the command knows of the machine: how much a step has to read, and how fast the memory can be read.
//!
//! A card's rate is measured before the engine has it. The host's takes a third of a second of all processors, which would be a
//! third of a second of every start; so it is measured when somebody first looks and nothing runs, once.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// Measures the rate in bytes per second; nothing where that cannot be done.
type Probe = Box<dyn Fn() -> Option<f64> + Send + Sync>;

/// The rate at which the memory that holds the weights can be read.
pub enum Bandwidth {
    /// Measured, or `None`: not to be had.
    Known(Option<f64>),
    /// To be measured while nothing runs.
    WhenIdle(Probe),
}

/// The machine under a loaded model.
pub struct Machine {
    weight_bytes: u64,
    probe: Option<Probe>,
    rate: OnceLock<Option<f64>>,
    probing: AtomicBool,
}

impl Machine {
    /// A machine whose steps read so many bytes of weights each.
    pub fn new(weight_bytes: u64, bandwidth: Bandwidth) -> Arc<Self> {
        let (probe, rate) = match bandwidth {
            Bandwidth::Known(rate) => (None, OnceLock::from(rate)),
            Bandwidth::WhenIdle(probe) => (Some(probe), OnceLock::new()),
        };
        Arc::new(Self { weight_bytes, probe, rate, probing: AtomicBool::new(false) })
    }

    /// Bytes of weights that a step reads, however many rows it has.
    pub fn weight_bytes(&self) -> u64 {
        self.weight_bytes
    }

    /// Bytes per second, once that is known.
    pub fn bandwidth(&self) -> Option<f64> {
        self.rate.get().copied().flatten()
    }

    /// Measures the rate if nobody has; takes a while. Only for a moment in which nothing runs.
    pub fn measure(&self) {
        if self.rate.get().is_none()
            && let Some(probe) = &self.probe
            && !self.probing.swap(true, Ordering::SeqCst)
        {
            let _ = self.rate.set(probe().filter(|rate| rate.is_finite() && *rate > 0.0));
        }
    }

    /// Is there something left to measure?
    pub fn is_unmeasured(&self) -> bool {
        self.rate.get().is_none() && !self.probing.load(Ordering::SeqCst)
    }
}

/// Memory that the process has in use, model file's pages that are in memory included, if the system says.
pub(super) fn process_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    resident_bytes(&status)
}

fn resident_bytes(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn the_memory_is_probed_once() {
        static CALLS: AtomicUsize = AtomicUsize::new(0);
        let probe = || {
            CALLS.fetch_add(1, Ordering::SeqCst);
            Some(2e10)
        };
        let machine = Machine::new(7, Bandwidth::WhenIdle(Box::new(probe)));
        assert!(machine.is_unmeasured() && machine.bandwidth().is_none());
        machine.measure();
        machine.measure();
        assert_eq!((machine.bandwidth(), CALLS.load(Ordering::SeqCst)), (Some(2e10), 1));
        assert!(!machine.is_unmeasured());
        for known in [None, Some(1e12)] {
            let machine = Machine::new(7, Bandwidth::Known(known));
            assert!(!machine.is_unmeasured());
            assert_eq!(machine.bandwidth(), known);
        }
        // What no memory can do is no measurement.
        let machine = Machine::new(7, Bandwidth::WhenIdle(Box::new(|| Some(f64::INFINITY))));
        machine.measure();
        assert_eq!(machine.bandwidth(), None);
    }

    #[test]
    fn memory_as_the_system_says_it() {
        assert_eq!(resident_bytes("Name:\tx\nVmRSS:\t    2048 kB\nVmSwap: 0 kB\n"), Some(2 << 20));
        for odd in ["", "VmRSS:", "VmRSS:\t 12 MB", "VmRSS: -1 kB", "VmRSS: 99999999999999999999 kB"] {
            assert_eq!(resident_bytes(odd), None, "{odd}");
        }
        #[cfg(target_os = "linux")]
        assert!(process_bytes().is_some_and(|bytes| bytes > 1 << 20));
    }
}
