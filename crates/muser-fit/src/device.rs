//! Devices and what they can do.

use muser_backend::LayerRange;

use crate::ModelSize;

/// What kind of device; what is known of each kind is in `expect.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The processor and its memory.
    Processor,
    /// A card with CUDA.
    Cuda,
    /// A GPU with Vulkan or Metal.
    Wgpu,
}

/// A device.
#[derive(Clone, Debug, PartialEq)]
pub struct Device {
    /// What `--devices` calls it.
    pub id: String,
    /// What people call it.
    pub name: String,
    /// Kind.
    pub kind: Kind,
    /// Bytes that are free now.
    pub free: u64,
    /// Bytes in all; a share of these is kept back.
    pub total: u64,
    /// Bytes a second of a plain read of its memory.
    pub read: f64,
    /// Operations a second that its products reach with many rows.
    pub compute: f64,
    /// Bytes a second from the machine's memory to its own.
    pub link: f64,
}

/// Bytes a second at which weights come from a file that memory does not hold, if nobody has measured it.
pub(crate) const FILE_READ: f64 = 2e9;

/// Rows of a step that working memory is for where a card has a part of a model, and where it has it all.
const ROWS: [u64; 2] = [512, 2048];

impl Device {
    /// Bytes that are not planned with: for other programs, what the driver keeps, and what is only known when it happens.
    pub fn reserve(&self) -> u64 {
        match self.kind {
            Kind::Processor => (1 << 30).max(self.total / 20),
            Kind::Cuda => (512 << 20).max(self.total / 50),
            Kind::Wgpu => (256 << 20).max(self.total / 50),
        }
    }

    /// Most rows of a step where it has the whole model or a part of it.
    pub(crate) fn rows(&self, whole: bool) -> u64 {
        match self.kind {
            Kind::Cuda => ROWS[usize::from(whole)],
            Kind::Processor | Kind::Wgpu => ROWS[0],
        }
    }

    /// The same where layers are streamed to it: about as many as it computes while a layer is on its way.
    pub(crate) fn streamed_rows(&self, model: &ModelSize) -> u64 {
        let range = LayerRange::whole(model.layers.len());
        let (bytes, operations) = (model.streamed(range) as f64, model.flops(range).max(1) as f64);
        let rows = bytes / self.link.max(1.0) * self.compute / operations;
        (rows as u64).next_power_of_two().clamp(ROWS[0], ROWS[1])
    }

    /// Working memory of steps of so many rows.
    pub(crate) fn scratch(&self, model: &ModelSize, rows: u64) -> u64 {
        let g = &model.geometry;
        // About 250 KB a row of the released model, 64 rows of logits, angles of all positions.
        let row = 38 * g.hidden as u64;
        let fixed = 64 * g.vocab as u64 * 8 + g.context as u64 * g.head_dim as u64 * 4;
        rows * row + if self.kind == Kind::Processor { 0 } else { fixed }
    }

    /// Is its memory the machine's own, so that weights may stay in the file map?
    pub fn is_processor(&self) -> bool {
        self.kind == Kind::Processor
    }
}

/// A card that people have: figures of its maker, except where they were measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Card {
    /// A part of the name that the driver gives it.
    pub name: &'static str,
    /// Gigabytes, as it is sold.
    pub gigabytes: u32,
    /// Gigabytes a second.
    pub read: f64,
    /// Tera-operations a second with dense 8-bit integers.
    pub int8: f64,
    /// Gigabytes a second over the bus in a slot that suits it.
    pub link: f64,
}

/// Cards by memory, the usual one of each size first.
pub const KNOWN: &[Card] = &[
    card("RTX 4060", 8, 272.0, 121.0, 12.0),
    card("RTX 3070", 8, 448.0, 163.0, 24.0),
    card("RTX 3060", 12, 360.0, 102.0, 24.0),
    card("RTX 4070", 12, 504.0, 233.0, 24.0),
    card("RTX 4060 Ti 16GB", 16, 288.0, 177.0, 12.0),
    card("RTX 4080", 16, 717.0, 390.0, 24.0),
    card("RTX 5080", 16, 960.0, 450.0, 48.0),
    card("RTX 3090", 24, 936.0, 285.0, 24.0),
    card("RTX 4090", 24, 1008.0, 660.0, 24.0),
    card("L4", 24, 300.0, 242.0, 24.0),
    card("RTX 5090", 32, 1792.0, 838.0, 48.0),
    card("L40S", 48, 864.0, 733.0, 24.0),
    card("RTX 6000 Ada", 48, 960.0, 728.0, 24.0),
    card("A100", 80, 2039.0, 624.0, 24.0),
    card("H100", 80, 3350.0, 1979.0, 48.0),
    card("RTX PRO 6000", 96, 1792.0, 1000.0, 48.0),
    // The read rate is measured (receipt cuda-h200-vs-llama).
    card("H200", 141, 4380.0, 1979.0, 48.0),
];

const fn card(name: &'static str, gigabytes: u32, read: f64, int8: f64, link: f64) -> Card {
    Card { name, gigabytes, read, int8, link }
}

/// Share of the dense 8-bit rate that prompts reached on the card that it was measured on (an H200: 8,323 tok/s of 54 GFLOP).
const PROMPT_SHARE: f64 = 0.227;
/// Of what a card is sold with the driver leaves about so much.
const LEFT_BY_DRIVER: f64 = 0.95;

/// The known card that a driver's name, or a person's, means: the longest name that is part of it.
pub fn known(name: &str) -> Option<&'static Card> {
    let name = name.to_lowercase();
    let matches = KNOWN.iter().filter(|card| name.contains(&card.name.to_lowercase()));
    matches.max_by_key(|card| card.name.len())
}

impl Card {
    /// The card as device `id`, with all that the driver leaves of it free.
    pub fn device(&self, id: &str) -> Device {
        let total = u64::from(self.gigabytes) << 30;
        Device {
            id: id.to_owned(),
            name: self.name.to_owned(),
            kind: Kind::Cuda,
            free: (total as f64 * LEFT_BY_DRIVER) as u64,
            total,
            read: self.read * 1e9,
            compute: self.compute(),
            link: self.link * 1e9,
        }
    }

    /// Operations a second with many rows.
    pub fn compute(&self) -> f64 {
        self.int8 * 1e12 * PROMPT_SHARE
    }
}

/// A processor with so much free memory, at the rates of an ordinary machine where `read` is not given: two channels of DDR5, eight
/// cores with vectors.
pub fn host(free: u64, read: Option<f64>) -> Device {
    Device {
        id: "cpu".into(),
        name: "the processor".into(),
        kind: Kind::Processor,
        free,
        total: free,
        read: read.unwrap_or(60e9),
        compute: 1.2e12,
        link: f64::INFINITY,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cards_are_known_by_what_drivers_call_them() {
        for (name, found) in [
            ("NVIDIA H200", Some("H200")),
            ("NVIDIA GeForce RTX 4060 Ti 16GB", Some("RTX 4060 Ti 16GB")),
            ("NVIDIA GeForce RTX 3060", Some("RTX 3060")),
            ("NVIDIA L40S", Some("L40S")),
            ("nvidia l4", Some("L4")),
            ("NVIDIA GeForce GTX 1080", None),
            ("", None),
        ] {
            assert_eq!(known(name).map(|card| card.name), found, "{name}");
        }
    }
}
