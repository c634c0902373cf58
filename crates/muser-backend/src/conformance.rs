//! What every executor must pass, as a library: call it from the backend's own tests.
//!
//! [`row_invariance`] plays random schedules (many sequences, any chunk sizes, shuffled blocks, several sequences a
//! step) and compares every logit and every stored KV byte with each sequence run alone, token by token: E1 and E2 of
//! the exactness contract, and by [`import_continues`] the half of E3 and E4 that lies with the executor. [`agreement`]
//! measures how far two executors are apart in the figures that the documentation quotes.
//!
//! Everything is deterministic in the seed; a failure message names seed and place.

mod draft;
mod table;

use muser_kv::{BLOCK_LEN, BlockId, KvGroup};
use muser_model::Geometry;

pub use draft::{draft_invariance, draft_logits, skipped_context_is_blank};
pub use table::with_factor_on_table;

use crate::{ExecError, Executor, KvCapacity, Row, RowInput, RowWants, StepBatch, StepOutput};

/// SplitMix64: enough randomness for schedules, the same everywhere.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A generator for `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `n` (`n` is not 0).
    pub fn below(&mut self, n: usize) -> usize {
        (self.next_u64() % n as u64) as usize
    }
}

/// What a sequence left behind: logits of every position and the bytes of its KV blocks, hashed.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Trace {
    logits: Vec<blake3::Hash>,
    full: Vec<blake3::Hash>,
    sliding: Vec<blake3::Hash>,
}

/// A sequence with blocks of its own.
struct Sequence {
    ids: Vec<u32>,
    done: usize,
    full: Vec<BlockId>,
    sliding: Vec<BlockId>,
    logits: Vec<blake3::Hash>,
}

impl Sequence {
    fn new(ids: Vec<u32>, full: Vec<BlockId>, sliding: Vec<BlockId>) -> Self {
        Self { ids, done: 0, full, sliding, logits: Vec::new() }
    }

    /// Adds `n` rows to the batch, with the shortest sliding table that is allowed.
    fn push(&self, batch: &mut StepBatch, n: usize, geometry: &Geometry) {
        let first = geometry.first_visible(self.done) / BLOCK_LEN;
        batch.push_seq(self.done as u32, &self.full, first as u32, &self.sliding[first..]);
        for &id in &self.ids[self.done..self.done + n] {
            batch.push_row(Row {
                input: RowInput::Token(id),
                wants: RowWants { logits: true, ..RowWants::default() },
            });
        }
    }

    fn trace(self, executor: &dyn Executor) -> Result<Trace, ExecError> {
        let export = |group, blocks: &[BlockId]| {
            let mut bytes = vec![0u8; executor.info().block_bytes(group)];
            blocks
                .iter()
                .map(|b| executor.export_block(group, *b, &mut bytes).map(|()| blake3::hash(&bytes)))
                .collect::<Result<Vec<_>, _>>()
        };
        let full = export(KvGroup::Full, &self.full)?;
        let sliding = export(KvGroup::Sliding, &self.sliding)?;
        Ok(Trace { logits: self.logits, full, sliding })
    }
}

fn hash_row(row: &[f32]) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    row.iter().for_each(|v| {
        hasher.update(&v.to_bits().to_le_bytes());
    });
    hasher.finalize()
}

/// Random schedules against each sequence alone, token by token. `executor` is called for fresh executors over the same
/// model; they may differ in what must not show (threads, instruction set).
///
/// # Panics
/// When a bit differs, with the seed and the place: this is a test.
pub fn row_invariance(
    mut executor: impl FnMut() -> Box<dyn Executor>,
    geometry: &Geometry,
    seed: u64,
    sequences: usize,
    max_len: usize,
) {
    let mut random = Random::new(seed);
    let prompts: Vec<Vec<u32>> = (0..sequences)
        .map(|_| {
            let len = 1 + random.below(max_len.min(geometry.context));
            (0..len).map(|_| random.below(geometry.vocab) as u32).collect()
        })
        .collect();

    let alone: Vec<Trace> = prompts.iter().map(|ids| run_alone(&mut *executor(), geometry, ids)).collect();
    let mixed = run_mixed(&mut *executor(), geometry, &prompts, &mut random);
    for (i, (a, m)) in alone.iter().zip(&mixed).enumerate() {
        let at = a.logits.iter().zip(&m.logits).position(|(a, m)| a != m);
        assert!(at.is_none(), "seed {seed}: sequence {i}: logits differ first at position {at:?}");
        assert!(a.full == m.full, "seed {seed}: sequence {i}: bytes of a full KV block differ");
        assert!(a.sliding == m.sliding, "seed {seed}: sequence {i}: bytes of a sliding KV block differ");
    }
}

fn run_alone(executor: &mut dyn Executor, geometry: &Geometry, ids: &[u32]) -> Trace {
    let blocks = ids.len().div_ceil(BLOCK_LEN) as u32;
    executor.allocate_kv(KvCapacity { full: blocks, sliding: blocks }).expect("KV memory");
    let ascending: Vec<BlockId> = (0..blocks).map(BlockId).collect();
    let mut seq = Sequence::new(ids.to_vec(), ascending.clone(), ascending);
    let (mut batch, mut out) = (StepBatch::default(), StepOutput::default());
    while seq.done < ids.len() {
        batch.clear();
        seq.push(&mut batch, 1, geometry);
        executor.step(&batch, &mut out).expect("step");
        seq.logits.push(hash_row(&out.logits));
        seq.done += 1;
    }
    seq.trace(executor).expect("export")
}

fn run_mixed(
    executor: &mut dyn Executor,
    geometry: &Geometry,
    prompts: &[Vec<u32>],
    random: &mut Random,
) -> Vec<Trace> {
    let blocks: usize = prompts.iter().map(|p| p.len().div_ceil(BLOCK_LEN)).sum();
    executor.allocate_kv(KvCapacity { full: blocks as u32, sliding: blocks as u32 }).expect("KV memory");
    let mut shuffled = || {
        let mut ids: Vec<BlockId> = (0..blocks as u32).map(BlockId).collect();
        for i in (1..ids.len()).rev() {
            ids.swap(i, random.below(i + 1));
        }
        ids
    };
    let (mut full, mut sliding) = (shuffled(), shuffled());
    let mut seqs: Vec<Sequence> = prompts
        .iter()
        .map(|ids| {
            let n = ids.len().div_ceil(BLOCK_LEN);
            Sequence::new(ids.clone(), full.split_off(full.len() - n), sliding.split_off(sliding.len() - n))
        })
        .collect();

    let max_rows = executor.info().max_rows;
    let (mut batch, mut out) = (StepBatch::default(), StepOutput::default());
    while seqs.iter().any(|s| s.done < s.ids.len()) {
        batch.clear();
        let mut taken: Vec<(usize, usize)> = Vec::new();
        let mut rows = 0;
        let start = random.below(seqs.len());
        for k in 0..seqs.len() {
            let i = (start + k) % seqs.len();
            let left = seqs[i].ids.len() - seqs[i].done;
            // Mostly a row or a few (decode, drafts), sometimes a long chunk (prefill), sometimes none.
            let n = match random.below(8) {
                0 => 0,
                1..=3 => 1,
                4..=6 => 1 + random.below(16),
                _ => 1 + random.below(200),
            };
            let n = n.min(left).min(max_rows - rows);
            if n > 0 {
                seqs[i].push(&mut batch, n, geometry);
                taken.push((i, n));
                rows += n;
            }
        }
        if rows == 0 {
            continue;
        }
        executor.step(&batch, &mut out).expect("step");
        let mut logits = out.logits.chunks(geometry.vocab);
        for (i, n) in taken {
            seqs[i].logits.extend(logits.by_ref().take(n).map(hash_row));
            seqs[i].done += n;
        }
    }
    seqs.into_iter().map(|s| s.trace(executor).expect("export")).collect()
}

/// Exports the KV of a prefix, imports it into a second executor and continues there: the logits must not change.
///
/// # Panics
/// When a bit differs.
pub fn import_continues(
    mut executor: impl FnMut() -> Box<dyn Executor>,
    geometry: &Geometry,
    seed: u64,
    prefix: usize,
    tail: usize,
) {
    let mut random = Random::new(seed);
    let ids: Vec<u32> = (0..prefix + tail).map(|_| random.below(geometry.vocab) as u32).collect();
    let whole = run_alone(&mut *executor(), geometry, &ids);

    let blocks = ids.len().div_ceil(BLOCK_LEN) as u32;
    let ascending: Vec<BlockId> = (0..blocks).map(BlockId).collect();
    let mut first = executor();
    first.allocate_kv(KvCapacity { full: blocks, sliding: blocks }).expect("KV memory");
    let (mut batch, mut out) = (StepBatch::default(), StepOutput::default());
    let mut seq = Sequence::new(ids.clone(), ascending.clone(), ascending.clone());
    while seq.done < prefix {
        let n = (prefix - seq.done).min(64);
        batch.clear();
        seq.push(&mut batch, n, geometry);
        first.step(&batch, &mut out).expect("step");
        seq.done += n;
    }

    let mut second = executor();
    second.allocate_kv(KvCapacity { full: blocks + 1, sliding: blocks + 1 }).expect("KV memory");
    let moved: Vec<BlockId> = (0..blocks).map(|b| BlockId(blocks - b)).collect();
    for group in [KvGroup::Full, KvGroup::Sliding] {
        let mut bytes = vec![0u8; first.info().block_bytes(group)];
        let oldest = if group == KvGroup::Full { 0 } else { geometry.first_visible(prefix) / BLOCK_LEN };
        for b in oldest..prefix.div_ceil(BLOCK_LEN) {
            first.export_block(group, ascending[b], &mut bytes).expect("export");
            second.import_block(group, moved[b], &bytes).expect("import");
        }
    }
    let mut seq = Sequence { done: prefix, ..Sequence::new(ids, moved.clone(), moved) };
    batch.clear();
    seq.push(&mut batch, tail, geometry);
    second.step(&batch, &mut out).expect("step");
    seq.logits.extend(out.logits.chunks(geometry.vocab).map(hash_row));
    assert!(seq.logits == whole.logits[prefix..], "seed {seed}: logits after an import at {prefix} differ");
}

/// Exports blocks that another sequence has filled before: after [`Executor::clear_rows`] their bytes are those of a fresh
/// executor that never saw the other sequence, whose prefix had any of `lens` positions (at most 260). `executor` is called
/// for fresh executors, with a draft or without.
///
/// # Panics
/// When a byte differs.
pub fn cleared_rows_tell_nothing(
    mut executor: impl FnMut() -> Box<dyn Executor>,
    geometry: &Geometry,
    seed: u64,
    lens: &[usize],
) {
    let mut random = Random::new(seed);
    let mut ids =
        |len: usize| -> Vec<u32> { (0..len).map(|_| random.below(geometry.vocab) as u32).collect() };
    let most = lens.iter().copied().max().unwrap_or(1);
    let (other, own) = (ids(most + 9), ids(most));
    let compute = |executor: &mut dyn Executor, ids: &[u32]| {
        let (mut batch, mut out) = (StepBatch::default(), StepOutput::default());
        let mut seq = Sequence::new(ids.to_vec(), vec![BlockId(0), BlockId(1)], vec![BlockId(0), BlockId(1)]);
        while seq.done < ids.len() {
            let n = (ids.len() - seq.done).min(executor.info().max_rows);
            batch.clear();
            seq.push(&mut batch, n, geometry);
            executor.step(&batch, &mut out).expect("step");
            seq.done += n;
        }
    };
    for &len in lens {
        let (mut used, mut fresh) = (executor(), executor());
        for executor in [&mut used, &mut fresh] {
            executor.allocate_kv(KvCapacity { full: 2, sliding: 2 }).expect("KV memory");
        }
        compute(&mut *used, &other);
        compute(&mut *used, &own[..len]);
        compute(&mut *fresh, &own[..len]);
        let (block, rows) = (BlockId(((len - 1) / BLOCK_LEN) as u32), (len - 1) % BLOCK_LEN + 1);
        for group in [KvGroup::Full, KvGroup::Sliding] {
            let export = |executor: &dyn Executor| {
                let mut bytes = vec![0u8; executor.info().block_bytes(group)];
                executor.export_block(group, block, &mut bytes).expect("export");
                bytes
            };
            let (mut found, expected) = (export(&*used), export(&*fresh));
            assert!(
                found != expected,
                "{group:?}, {rows} rows: the other sequence should show before they are cleared"
            );
            used.clear_rows(group, rows, &mut found);
            assert!(found == expected, "{group:?}, {rows} rows: bytes of another sequence are left");
            used.clear_rows(group, BLOCK_LEN, &mut found);
            assert!(found == expected, "{group:?}: nothing is cleared of a whole block");
        }
    }
}

/// How far the logits of one executor are from those of another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Agreement {
    /// Largest difference over the range of the reference's logits.
    pub max_error: f64,
    /// Mean over the positions of KL(reference || other), in nats.
    pub mean_kl: f64,
    /// Share of positions with the same most likely token.
    pub same_argmax: f64,
}

/// Compares `[n, vocab]` logits with those of a reference.
pub fn agreement(reference: &[f32], other: &[f32], vocab: usize) -> Agreement {
    let (mut largest, mut low, mut high) = (0.0f64, f64::MAX, f64::MIN);
    for (r, o) in reference.iter().zip(other) {
        let (r, o) = (f64::from(*r), f64::from(*o));
        // `max` alone would swallow a NaN.
        let difference = (r - o).abs();
        largest = if difference.is_nan() || largest.is_nan() { f64::NAN } else { largest.max(difference) };
        low = low.min(r);
        high = high.max(r);
    }
    let positions = reference.len() / vocab;
    let (mut kl, mut same) = (0.0, 0);
    for (r, o) in reference.chunks(vocab).zip(other.chunks(vocab)) {
        let (log_p, log_q) = (log_softmax(r), log_softmax(o));
        kl += log_p.iter().zip(&log_q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
        same += usize::from(argmax(r) == argmax(o));
    }
    Agreement {
        max_error: largest / (high - low),
        mean_kl: kl / positions as f64,
        same_argmax: same as f64 / positions as f64,
    }
}

fn log_softmax(x: &[f32]) -> Vec<f64> {
    let max = x.iter().copied().fold(f32::MIN, f32::max);
    let sum: f64 = x.iter().map(|v| f64::from(v - max).exp()).sum();
    x.iter().map(|v| f64::from(v - max) - sum.ln()).collect()
}

/// Index of the largest value, the lowest of equals.
fn argmax(x: &[f32]) -> usize {
    x.iter().enumerate().fold(0, |best, (i, v)| if *v > x[best] { i } else { best })
}
