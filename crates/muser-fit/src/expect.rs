//! What a plan is expected to reach. The shares are those that were measured; the rates are the devices'.

use muser_backend::{KvType, LayerRange};

use crate::device::FILE_READ;
use crate::{Device, Kind, ModelSize};

/// Positions that sequences are taken to have when their K and V are read.
const USUAL_POSITION: u32 = 4096;
/// Seconds for a row to go over a cut, and bytes a second that many rows do.
const CROSSING: f64 = 60e-6;
const LINK: f64 = 10e9;
/// Groups that a prompt's rows are cut into where there are several parts.
const GROUPS: f64 = 8.0;

/// Rates of a plan.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Expected {
    /// Tokens a second that one sequence is written with.
    pub one: f64,
    /// The same of eight together.
    pub eight: f64,
    /// Tokens a second that a prompt is read with.
    pub prompt: f64,
}

/// Where layers are: a device and a range, with what the file map must bring again for each step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Placed<'a> {
    /// Of the device.
    pub(crate) number: usize,
    pub(crate) device: &'a Device,
    pub(crate) range: LayerRange,
    /// Memory does not hold the weights.
    pub(crate) from_file: bool,
}

/// Share of a plain read that decoding reaches.
fn read_share(kind: Kind) -> f64 {
    match kind {
        Kind::Processor => 0.94,
        Kind::Cuda => 0.72,
        // Not measured on hardware.
        Kind::Wgpu => 0.4,
    }
}

impl Placed<'_> {
    /// Seconds of a step of `rows` sequences with one row each.
    pub(crate) fn decode(&self, model: &ModelSize, rows: u32, kv: KvType) -> f64 {
        let rate = self.device.read * read_share(self.device.kind);
        let weights = model.streamed(self.range) as f64;
        let keys = model.kv_read(self.range, USUAL_POSITION.min(model.geometry.context as u32), kv) as f64;
        // The pages of a file that is read from its beginning to its end, larger than memory, are gone when they are needed again.
        let weights = if self.from_file { weights / FILE_READ.min(rate) } else { weights / rate };
        let reading = weights + f64::from(rows) * keys / rate;
        let computing = f64::from(rows) * model.flops(self.range) as f64 / self.device.compute;
        match self.device.kind {
            // Threads read ahead of what they multiply; on a card products of few rows come on top.
            Kind::Processor => reading.max(computing),
            Kind::Cuda | Kind::Wgpu => reading + computing,
        }
    }

    /// Seconds a row of a prompt.
    pub(crate) fn prompt(&self, model: &ModelSize) -> f64 {
        let computing = model.flops(self.range) as f64 / self.device.compute;
        let rows = 512.0;
        let reading = if self.from_file { model.streamed(self.range) as f64 / FILE_READ / rows } else { 0.0 };
        computing.max(reading)
    }

    /// The same where the card `by` computes the layers in steps of `rows` rows: weights come while the layer before is computed.
    pub(crate) fn streamed(&self, model: &ModelSize, by: &Device, rows: u64) -> f64 {
        // From the file map to pinned memory and from there over the bus: read, written and read again. Measured: 15 to 18 GB/s where the
        // processor reads 77 to 95 (receipt cuda-h200-splits).
        let rate = by.link.min(self.device.read / 5.0);
        let rate = if self.from_file { rate.min(FILE_READ) } else { rate };
        let bringing = model.streamed(self.range) as f64 / rate / rows as f64;
        bringing.max(model.flops(self.range) as f64 / by.compute)
    }
}

/// Seconds that rows take over all cuts of a plan.
pub(crate) fn crossings(model: &ModelSize, parts: usize, rows: u32) -> f64 {
    let bytes = f64::from(rows) * 4.0 * (model.geometry.hidden + 1) as f64;
    parts.saturating_sub(1) as f64 * (CROSSING + bytes / LINK)
}

/// Seconds a row of a prompt where a card behind the processor computes the processor's layers; none without such a card.
fn streamed(model: &ModelSize, parts: &[Placed<'_>], rows: u64) -> Option<f64> {
    let host = parts.iter().position(|part| part.device.is_processor())?;
    let by = parts[host + 1..].iter().find(|part| part.device.kind == Kind::Cuda)?.device;
    let others = parts.iter().enumerate().filter(|(at, _)| *at != host);
    Some(parts[host].streamed(model, by, rows) + others.map(|(_, part)| part.prompt(model)).sum::<f64>())
}

/// The rates of parts in a row, where layers are streamed in steps of `streamed_rows` rows.
pub(crate) fn of(
    model: &ModelSize,
    parts: &[Placed<'_>],
    kv: KvType,
    streamed_rows: Option<u64>,
) -> Expected {
    let decode = |rows: u32| {
        let steps: f64 = parts.iter().map(|part| part.decode(model, rows, kv)).sum();
        f64::from(rows) / (steps + crossings(model, parts.len(), rows))
    };
    let rows: Vec<f64> = parts.iter().map(|part| part.prompt(model)).collect();
    let (sum, longest) = (rows.iter().sum::<f64>(), rows.iter().copied().fold(0.0, f64::max));
    // Groups follow each other: the slowest part is never idle, the others wait for it.
    let row = longest + (sum - longest) / GROUPS;
    let by_card = streamed_rows.and_then(|rows| streamed(model, parts, rows));
    let row = by_card.map_or(row, |streamed| row.min(streamed));
    Expected { one: decode(1), eight: decode(8), prompt: 1.0 / row }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{host, known};

    fn whole(device: &Device) -> Expected {
        let model = ModelSize::released().expect("constants");
        let part = Placed { number: 0, device, range: LayerRange::whole(52), from_file: false };
        of(&model, &[part], KvType::Int16, None)
    }

    /// What was measured of the whole model (receipts cuda-h200-vs-llama and zen4-30b-decode), within 15 %.
    #[test]
    fn what_was_measured_is_expected() {
        let near = |found: f64, measured: f64| {
            assert!((found / measured - 1.0).abs() < 0.15, "{found} expected, {measured} measured");
        };
        let card = whole(&known("H200").expect("known").device("cuda:0"));
        near(card.one, 194.956);
        near(card.eight, 1309.341);
        near(card.prompt, 8323.412);
        near(whole(&host(32 << 30, Some(40.5e9))).one, 2.396);
    }

    #[test]
    fn what_memory_does_not_hold_comes_from_the_file() {
        let model = ModelSize::released().expect("constants");
        let device = host(32 << 30, None);
        let part = |from_file| Placed { number: 0, device: &device, range: LayerRange::whole(52), from_file };
        let [held, read] = [false, true].map(|from_file| of(&model, &[part(from_file)], KvType::Int16, None));
        assert!(held.one > 20.0 * read.one && read.one > 0.1, "{held:?} {read:?}");
    }
}
