//! How fast this machine reads memory, measured by the same threads and instructions that read weights.
#![allow(unsafe_code, reason = "reads a buffer of its own from several threads")]

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use muser_backend::ExecError;

use crate::isa::Isa;
use crate::kernels::Kernels;
use crate::memory::HugeBuffer;
use crate::pool::Pool;

/// Rates of the single passes, in bytes per second.
#[derive(Clone, Debug, PartialEq)]
pub struct ReadBandwidth {
    /// Threads that read side by side.
    pub threads: usize,
    /// Were huge pages asked for?
    pub huge_pages: bool,
    /// Bytes of a pass.
    pub bytes: usize,
    /// One figure per pass.
    pub passes: Vec<f64>,
}

impl ReadBandwidth {
    /// Rate of the fastest pass.
    pub fn best(&self) -> f64 {
        self.passes.iter().copied().fold(0.0, f64::max)
    }

    /// Rate of the middle pass.
    pub fn median(&self) -> f64 {
        let mut sorted = self.passes.clone();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
    }
}

/// A buffer and threads to read it with. Making one fills the buffer; a measurement then takes milliseconds.
pub struct BandwidthProbe {
    buffer: HugeBuffer,
    pool: Pool,
    kernels: &'static Kernels,
    huge_pages: bool,
}

impl BandwidthProbe {
    /// A probe over `bytes` (1 GiB is well beyond any cache); threads as for the executor.
    pub fn new(bytes: usize, threads: Option<usize>, huge_pages: bool) -> Result<Self, ExecError> {
        let mut pool = Pool::new(threads).map_err(|error| ExecError::Device {
            device: "cpu".into(),
            what: format!("starting threads: {error}"),
        })?;
        let part = (bytes / pool.threads()).next_multiple_of(1 << 20);
        let buffer = HugeBuffer::new(part * pool.threads(), huge_pages, "bandwidth probe")?;
        pool.run(&|worker| {
            // SAFETY: every thread fills its own part.
            unsafe { std::ptr::write_bytes(buffer.ptr().add(worker.index * part), 1, part) };
            Ok(())
        })
        .map_err(|what| ExecError::Device { device: "cpu".into(), what })?;
        Ok(Self { buffer, pool, kernels: Kernels::of(Isa::from_environment()?), huge_pages })
    }

    /// Reads the buffer `passes` times.
    pub fn measure(&mut self, passes: usize) -> Result<ReadBandwidth, ExecError> {
        let part = self.buffer.len() / self.pool.threads();
        let (buffer, kernels) = (&self.buffer, self.kernels);
        let sink = AtomicU64::new(0);
        let mut rates = Vec::with_capacity(passes);
        for _ in 0..passes {
            let start = Instant::now();
            self.pool
                .run(&|worker| {
                    // SAFETY: every thread reads its own part.
                    let sum = unsafe { (kernels.read_pass)(buffer.ptr().add(worker.index * part), part) };
                    sink.fetch_add(sum, Ordering::Relaxed);
                    Ok(())
                })
                .map_err(|what| ExecError::Device { device: "cpu".into(), what })?;
            rates.push(self.buffer.len() as f64 / start.elapsed().as_secs_f64());
        }
        std::hint::black_box(sink.into_inner());
        Ok(ReadBandwidth {
            threads: self.pool.threads(),
            huge_pages: self.huge_pages,
            bytes: self.buffer.len(),
            passes: rates,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measures_something() {
        let mut probe = BandwidthProbe::new(4 << 20, Some(2), false).expect("probe");
        let found = probe.measure(3).expect("measurement");
        assert_eq!((found.threads, found.passes.len(), found.bytes), (2, 3, 4 << 20));
        assert!(found.median() > 0.0 && found.best() >= found.median());
    }
}
