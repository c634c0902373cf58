//! How fast this machine reads memory right now: the figure that decoding is measured against.

use std::hint::black_box;
use std::time::Instant;

/// Bytes of the buffer: far beyond any last-level cache share of the threads. Tests only look whether it works.
const BUFFER_BYTES: usize = if cfg!(test) { 8 << 20 } else { 512 << 20 };

/// Passes of a probe; the best counts, since anything that disturbs a pass makes it slower.
const PASSES: usize = 4;

/// A buffer that several threads sum up.
pub struct Probe {
    words: Vec<u64>,
    threads: usize,
}

impl Probe {
    /// Allocates and touches the buffer.
    pub fn new(threads: usize) -> Self {
        Self { words: vec![1; BUFFER_BYTES / 8], threads: threads.max(1) }
    }

    /// Bytes per second of the best pass.
    pub fn bytes_per_s(&self) -> f64 {
        let share = self.words.len().div_ceil(self.threads);
        let mut best = 0.0f64;
        for _ in 0..PASSES {
            let start = Instant::now();
            std::thread::scope(|scope| {
                for part in self.words.chunks(share) {
                    scope.spawn(move || black_box(sum(black_box(part))));
                }
            });
            best = best.max((self.words.len() * 8) as f64 / start.elapsed().as_secs_f64());
        }
        best
    }
}

/// Eight independent sums of four words, so that loads and not additions are the limit.
fn sum(words: &[u64]) -> u64 {
    let mut sums = [0u64; 32];
    for chunk in words.chunks_exact(32) {
        for (sum, word) in sums.iter_mut().zip(chunk) {
            *sum = sum.wrapping_add(*word);
        }
    }
    sums.iter().fold(0, |a, b| a.wrapping_add(*b))
}
