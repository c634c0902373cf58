//! How fast the memory that weights are read from can be read right now: the figure that decoding is measured against.

use anyhow::Result;
use muser_backend::Executor;
use muser_cpu::BandwidthProbe;

/// Bytes of the buffer: far beyond any last-level cache share of the threads. Tests only look whether it works.
const BUFFER_BYTES: usize = if cfg!(test) { 8 << 20 } else { 512 << 20 };

/// Passes of a probe; the best counts, since anything that disturbs a pass makes it slower.
const PASSES: usize = 3;

/// A buffer in huge pages that the threads of the CPU backend read: what memory can do at best.
pub struct Probe(BandwidthProbe);

impl Probe {
    /// Allocates and fills the buffer; threads as for the executor.
    pub fn new(threads: Option<usize>) -> Result<Self> {
        Ok(Self(BandwidthProbe::new(BUFFER_BYTES, threads, true)?))
    }

    /// What a running server can find out: nothing where the buffer would take a good part of the memory that is left.
    pub fn rate_if_there_is_room(threads: Option<usize>) -> Option<f64> {
        if muser_cpu::available_bytes()? / 4 < BUFFER_BYTES as u64 {
            return None;
        }
        Self::new(threads).and_then(|mut probe| probe.bytes_per_s()).ok()
    }

    /// Bytes per second of the best pass.
    pub fn bytes_per_s(&mut self) -> Result<f64> {
        Ok(self.0.measure(PASSES)?.best())
    }
}

/// Bytes per second of the memory that `executor` reads its weights from: the card's own, else this machine's by `probe`,
/// which is made when it is needed first.
pub fn of_executor(
    executor: &dyn Executor,
    probe: &mut Option<Probe>,
    threads: Option<usize>,
) -> Result<f64> {
    if let Some(bytes_per_s) = executor.read_bandwidth()? {
        return Ok(bytes_per_s);
    }
    match probe {
        Some(probe) => probe.bytes_per_s(),
        None => probe.insert(Probe::new(threads)?).bytes_per_s(),
    }
}
