//! Progress of long work: one type for all commands, drawn on standard error, silent when nobody looks.

use indicatif::{ProgressBar, ProgressStyle};

use super::Console;

/// A bar that counts bytes or steps; does nothing when the console does not want progress.
pub struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// A bar over `total` bytes with rate and time left.
    pub fn bytes(console: &Console, label: &str, total: u64) -> Self {
        Self::new(console, label, total, "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}")
    }

    /// A bar over `total` steps of `unit`.
    pub fn steps(console: &Console, label: &str, total: u64, unit: &str) -> Self {
        Self::new(console, label, total, &format!("{{msg}} {{wide_bar}} {{pos}}/{{len}} {unit} {{eta}}"))
    }

    fn new(console: &Console, label: &str, total: u64, template: &str) -> Self {
        if !console.progress() {
            return Self { bar: ProgressBar::hidden() };
        }
        let bar = ProgressBar::new(total).with_message(label.to_owned());
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("━╸ "));
        }
        Self { bar }
    }

    /// More was done.
    pub fn advance(&self, amount: u64) {
        self.bar.inc(amount);
    }

    /// So much is done in total.
    pub fn set(&self, done: u64) {
        self.bar.set_position(done);
    }

    /// Removes the bar; what remains to be said is the command's business.
    pub fn finish(self) {
        self.bar.finish_and_clear();
    }
}
