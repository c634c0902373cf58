//! How fast the device reads its own memory: what a step of few rows is measured against.

use std::time::Instant;

use crate::WgpuError;
use crate::call::{Axis, Counts, Maker, Params};
use crate::device::Device;
use crate::library::Library;
use crate::text::{Source, shader};

/// Bytes that a workgroup of the kernel reads.
const GROUP_BYTES: u64 = 32 << 10;
/// Reads of one measurement.
const READS: u32 = 8;

/// Bytes per second of a plain read, the best of a few; `None` where there is no memory left for it.
pub(crate) fn measure(device: &Device, library: &Library) -> Result<Option<f64>, WgpuError> {
    // Beyond any cache if possible.
    let largest = device.facts.binding.min(device.facts.buffer).min(1 << 30) / GROUP_BYTES * GROUP_BYTES;
    let memory = match device.buffer(largest, "the read test") {
        Ok(memory) => memory,
        Err(WgpuError::OutOfMemory { .. }) => return Ok(None),
        Err(error) => return Err(error),
    };
    let sink = device.buffer(4, "the read test")?;
    let mut params = Params::default();
    let mut maker = Maker { device, library, params: &mut params };
    let source = Source::new("plain_read", &[], &[shader!("read")]);
    let groups = (largest / GROUP_BYTES) as u32;
    let grid = [Axis::Fixed(groups.min(32_768)), Axis::Fixed(groups.div_ceil(32_768)), Axis::Fixed(1)];
    let read = maker.call(&source, &[], &[(&memory).into(), (&sink).into()], grid)?;
    maker.finish()?;
    let mut best = f64::MAX;
    for _ in 0..5 {
        device.wait()?;
        let mut recorder = device.recorder();
        (0..READS).for_each(|_| read.record(&mut recorder, Counts::default()));
        let start = Instant::now();
        device.submit(recorder)?;
        device.wait()?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(Some((largest * u64::from(READS)) as f64 / best))
}
