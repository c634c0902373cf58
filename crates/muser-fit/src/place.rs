//! Placing layers: the cheapest of all ways to share them out among devices in an order.

use muser_backend::{KvType, LayerRange};

use crate::expect::{Placed, crossings};
use crate::{Device, Kind, ModelSize};

/// Tokens of a prompt that are read for each token that is written, where one kind of speed is weighed against the other.
const READ_FOR_ONE: f64 = 4.0;
/// Bytes of the slots that weights pass on their way to a card.
const STAGING: u64 = 64 << 20;

/// For how much K and V there must be room.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load<'a> {
    pub(crate) model: &'a ModelSize,
    pub(crate) context: u32,
    pub(crate) sequences: u32,
    pub(crate) kv: KvType,
    /// Bytes that the part with the output needs besides: a draft.
    pub(crate) draft: u64,
    /// May a card behind the processor compute the processor's layers in steps of many rows?
    pub(crate) streams: bool,
}

/// A device that layers may go to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Choice<'a> {
    /// Its number in the list that was given.
    pub(crate) number: usize,
    pub(crate) device: &'a Device,
    /// So many layers and no others.
    pub(crate) count: Option<usize>,
}

/// A way to have some layers on some devices, and the seconds that a token takes then.
type Way<'a> = Option<(f64, Vec<Placed<'a>>)>;

/// What a part takes of its device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Needs {
    pub(crate) weights: u64,
    pub(crate) kv: u64,
    pub(crate) scratch: u64,
}

impl Needs {
    pub(crate) fn sum(&self) -> u64 {
        self.weights.saturating_add(self.kv).saturating_add(self.scratch)
    }
}

impl Load<'_> {
    pub(crate) fn needs(&self, device: &Device, range: LayerRange) -> Needs {
        let table = if range.has_embedding() { self.model.table } else { 0 };
        let draft = if range.has_output() { self.draft } else { 0 };
        let streams = self.streams_to(device, range);
        let rows = if streams { device.streamed_rows(self.model) } else { device.rows(range.is_whole()) };
        let transit = if streams { self.transit(rows) } else { 0 };
        Needs {
            weights: self.model.streamed(range) + table + draft,
            kv: self.model.kv_bytes(range, self.context, self.sequences, self.kv),
            scratch: device.scratch(self.model, rows) + transit,
        }
    }

    pub(crate) fn streams_to(&self, device: &Device, range: LayerRange) -> bool {
        self.streams && device.kind == Kind::Cuda && range.first() > 0
    }

    /// Room for layers on their way through a card: two slots for weights and two for K and V of a long sequence, staging.
    fn transit(&self, rows: u64) -> u64 {
        let model = self.model;
        let weights = model.layers.iter().map(|layer| layer.bytes).max().unwrap_or(0);
        let positions = u64::from(self.context).max(model.geometry.window as u64 + rows);
        let keys = model.kv_of_layer(positions + 10 * muser_model::cost::KV_BLOCK, self.kv);
        2 * weights + 2 * keys + model.kv_of_layer(rows, self.kv) + STAGING
    }

    /// Most rows of a step through these parts.
    pub(crate) fn rows(&self, parts: &[Placed<'_>]) -> u64 {
        let streamer = parts.iter().find(|part| self.streams_to(part.device, part.range));
        match (streamer, parts) {
            (Some(part), _) => part.device.streamed_rows(self.model),
            (None, [part]) => part.device.rows(true),
            _ => parts.iter().map(|part| part.device.rows(false)).min().unwrap_or(1),
        }
    }

    /// Bytes of a device that may be planned with.
    pub(crate) fn room(device: &Device) -> u64 {
        device.free.saturating_sub(device.reserve())
    }

    /// The part, if the device has room for it.
    pub(crate) fn place<'d>(&self, choice: Choice<'d>, range: LayerRange) -> Option<Placed<'d>> {
        let Choice { number, device, .. } = choice;
        let (needs, room) = (self.needs(device, range), Self::room(device));
        let placed = |from_file| Some(Placed { number, device, range, from_file });
        if needs.sum() <= room {
            return placed(false);
        }
        // Weights may stay in the file, K and V may not.
        if device.is_processor() && needs.kv.saturating_add(needs.scratch) <= room {
            return placed(true);
        }
        None
    }

    /// Seconds of a part for a token that is written, and for those that are read with it.
    fn seconds(&self, part: &Placed<'_>, by: Option<&Device>) -> f64 {
        let streamer = by.filter(|_| self.streams && part.device.is_processor() && !part.range.has_output());
        let read = match streamer {
            Some(by) => part.streamed(self.model, by, by.streamed_rows(self.model)),
            None => part.prompt(self.model),
        };
        part.decode(self.model, 1, self.kv) + READ_FOR_ONE * read
    }

    /// The way that takes one sequence the least time: every layer once, in the order of `devices`, `count` of them where given; the
    /// fewest parts among equals. `all`: no device may be left out.
    pub(crate) fn best<'d>(&self, devices: &[Choice<'d>], all: bool) -> Way<'d> {
        let layers = self.model.layers.len();
        // Best way to have the first layers, as many as the index says, on the devices so far.
        let mut ways: Vec<Way<'d>> = vec![None; layers + 1];
        ways[0] = Some((0.0, Vec::new()));
        for (number, &choice) in devices.iter().enumerate() {
            let behind = devices[number + 1..].iter().map(|choice| choice.device);
            let by = behind
                .filter(|device| device.kind == Kind::Cuda)
                .max_by(|a, b| a.compute.total_cmp(&b.compute));
            let mut next: Vec<Way<'d>> = if all { vec![None; layers + 1] } else { ways.clone() };
            for (first, way) in ways.iter().enumerate() {
                let Some((seconds, parts)) = way else { continue };
                let cut = if parts.is_empty() { 0.0 } else { crossings(self.model, 2, 1) };
                let ends = (first + 1..=layers).filter(|end| choice.count.is_none_or(|n| n == end - first));
                for end in ends {
                    let Some(range) = LayerRange::new(first..end, layers) else { continue };
                    let Some(part) = self.place(choice, range) else { continue };
                    let total = seconds + self.seconds(&part, by) + cut;
                    if next[end].as_ref().is_none_or(|(best, _)| total < *best) {
                        next[end] = Some((total, parts.iter().copied().chain([part]).collect()));
                    }
                }
            }
            ways = next;
        }
        ways.pop().flatten()
    }
}
