//! How fast this machine reads memory right now: the figure that decoding is measured against.

use anyhow::Result;
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

    /// Bytes per second of the best pass.
    pub fn bytes_per_s(&mut self) -> Result<f64> {
        Ok(self.0.measure(PASSES)?.best())
    }
}
