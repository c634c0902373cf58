//! Placing layers: the cheapest of all ways to share them out among devices in an order.

use muser_backend::{KvType, LayerRange};

use crate::expect::{Placed, crossings};
use crate::{Device, ModelSize};

/// For how much K and V there must be room.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load<'a> {
    pub(crate) model: &'a ModelSize,
    pub(crate) context: u32,
    pub(crate) sequences: u32,
    pub(crate) kv: KvType,
    /// Bytes that the part with the output needs besides: a draft.
    pub(crate) draft: u64,
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
        Needs {
            weights: self.model.streamed(range) + table + draft,
            kv: self.model.kv_bytes(range, self.context, self.sequences, self.kv),
            scratch: device.scratch(self.model, range.is_whole()),
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

    /// The way that writes one sequence fastest: every layer once, in the order of `devices`, `count` of them where given; the
    /// fewest parts among equals. `all`: no device may be left out.
    pub(crate) fn best<'d>(&self, devices: &[Choice<'d>], all: bool) -> Way<'d> {
        let layers = self.model.layers.len();
        // Best way to have the first layers, as many as the index says, on the devices so far.
        let mut ways: Vec<Way<'d>> = vec![None; layers + 1];
        ways[0] = Some((0.0, Vec::new()));
        for &choice in devices {
            let mut next: Vec<Way<'d>> = if all { vec![None; layers + 1] } else { ways.clone() };
            for (first, way) in ways.iter().enumerate() {
                let Some((seconds, parts)) = way else { continue };
                let cut = if parts.is_empty() { 0.0 } else { crossings(self.model, 2, 1) };
                let ends = (first + 1..=layers).filter(|end| choice.count.is_none_or(|n| n == end - first));
                for end in ends {
                    let Some(range) = LayerRange::new(first..end, layers) else { continue };
                    let Some(part) = self.place(choice, range) else { continue };
                    let total = seconds + part.decode(self.model, 1, self.kv) + cut;
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
