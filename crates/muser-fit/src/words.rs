//! A plan in words.

use crate::{Device, Plan};

/// Gigabytes with one decimal, as people write memory of models.
pub fn gigabytes(bytes: u64) -> String {
    format!("{:.1} GB", bytes as f64 / 1e9)
}

impl Plan {
    /// What was chosen, what is expected of it, what would change it; `devices` are those that were planned for.
    pub fn in_three_lines(&self, devices: &[Device]) -> [String; 3] {
        let name = |at: usize| devices.get(at).map_or("?", |device| device.id.as_str());
        let part = |part: &crate::PartPlan| {
            let free = devices.get(part.device).map_or(0, |device| device.free);
            format!(
                "{} on {} ({} of {})",
                part.range,
                name(part.device),
                gigabytes(part.bytes()),
                gigabytes(free)
            )
        };
        let parts: Vec<String> = self.parts.iter().map(part).collect();
        let sequences = if self.parallel == 1 { "sequence" } else { "sequences" };
        let chosen = format!(
            "{}; {} {sequences} of {} positions, --kv {}",
            parts.join(", "),
            self.parallel,
            self.context,
            self.kv.name()
        );
        let mut expected = format!(
            "expected: {} tok/s, {} for eight sequences together, prompts {}{}",
            rate(self.expected.one),
            rate(self.expected.eight),
            rate(self.expected.prompt),
            if self.streams { " with weights streamed to the card" } else { "" }
        );
        if self.from_file > 0 {
            expected = format!(
                "{expected}; memory lacks {} for the weights, which are read from the file for every token",
                gigabytes(self.from_file)
            );
        }
        [chosen, expected, format!("what would change it: {}", self.change)]
    }
}

/// Three digits that count.
pub(crate) fn rate(value: f64) -> String {
    match value {
        v if v >= 100.0 => format!("{v:.0}"),
        v if v >= 10.0 => format!("{v:.1}"),
        v => format!("{v:.2}"),
    }
}
