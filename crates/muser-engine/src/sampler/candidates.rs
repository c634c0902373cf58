//! The highest logits of a row: partial selection without sorting the vocabulary.

/// A token and its logit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// Token id.
    pub id: u32,
    /// Its logit, later its weight.
    pub value: f32,
}

/// The order of candidates: higher value first, lower id first among equals (zeros of either sign are). A total order, so
/// that every selection has one result.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "the shape that sorting wants")]
pub(crate) fn by_rank(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    (b.value + 0.0).total_cmp(&(a.value + 0.0)).then(a.id.cmp(&b.id))
}

/// Leaves the `k` highest logits in `out`, best first. `out` keeps its memory: no allocation once it has held `2 k`.
///
/// One pass: values above the threshold are collected; when `2 k` have come together, the better half stays and its worst
/// one is the new threshold. On ordinary logits the threshold soon lets little through and the pass is a comparison per
/// value. Negative infinity (a forbidden token) never gets in.
pub(crate) fn top_k(logits: &[f32], k: usize, out: &mut Vec<Candidate>) {
    const STRIDE: usize = 32;
    out.clear();
    let k = k.min(logits.len());
    if k == 0 {
        return;
    }
    out.reserve(2 * k);
    // Ties at the threshold: earlier ids rank higher and are already in, so strictly greater is right.
    let mut threshold = f32::NEG_INFINITY;
    for (chunk_index, chunk) in logits.chunks(STRIDE).enumerate() {
        // A branch per chunk instead of one per value.
        let above: u32 = chunk.iter().map(|&value| u32::from(value > threshold)).sum();
        if above == 0 {
            continue;
        }
        for (i, &value) in chunk.iter().enumerate() {
            if value > threshold {
                out.push(Candidate { id: (chunk_index * STRIDE + i) as u32, value });
                if out.len() == 2 * k {
                    out.select_nth_unstable_by(k - 1, by_rank);
                    out.truncate(k);
                    threshold = out[k - 1].value;
                }
            }
        }
    }
    if out.len() > k {
        out.select_nth_unstable_by(k - 1, by_rank);
        out.truncate(k);
    }
    out.sort_unstable_by(by_rank);
}

/// The highest logit, lowest id among equals; `None` if all are negative infinity or not a number.
pub(crate) fn argmax(logits: &[f32]) -> Option<u32> {
    const STRIDE: usize = 32;
    let mut best = f32::NEG_INFINITY;
    let mut best_chunk = None;
    for (chunk_index, chunk) in logits.chunks(STRIDE).enumerate() {
        let max = chunk.iter().fold(f32::NEG_INFINITY, |max, &value| if value > max { value } else { max });
        if max > best {
            best = max;
            best_chunk = Some(chunk_index);
        }
    }
    let start = best_chunk? * STRIDE;
    let end = logits.len().min(start + STRIDE);
    let offset = logits[start..end].iter().position(|&value| value == best)?;
    Some((start + offset) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selection_equals_sorting() {
        let mut state = 1u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32
        };
        for n in [1usize, 2, 31, 32, 33, 100, 5000] {
            for spread in [3.0f32, 1e9] {
                let mut logits: Vec<f32> = (0..n).map(|_| next() % spread).collect();
                logits[n / 2] = f32::NEG_INFINITY;
                let mut sorted: Vec<Candidate> = logits
                    .iter()
                    .enumerate()
                    .map(|(i, &value)| Candidate { id: i as u32, value })
                    .filter(|c| c.value > f32::NEG_INFINITY)
                    .collect();
                sorted.sort_by(by_rank);
                assert_eq!(argmax(&logits), sorted.first().map(|c| c.id));
                for k in [1, 2, 7, 64, n, 2 * n] {
                    let mut out = Vec::new();
                    top_k(&logits, k, &mut out);
                    assert_eq!(out, sorted[..k.min(sorted.len())], "n {n} k {k}");
                }
            }
        }
    }
}
