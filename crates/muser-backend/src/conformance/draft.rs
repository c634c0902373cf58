//! What a backend that drafts must pass besides [`super::row_invariance`] (which, with a draft attached, also compares the
//! draft's planes in the sliding blocks).
//!
//! Proposals never change a token, but they must not depend on chance either: what a sequence is proposed is a function of
//! its own tokens. [`draft_invariance`] compares the logits of proposals, bit for bit, of sequences that were computed
//! alone and token by token with those of sequences that were chunked, drafted together, rolled back, and whose blocks
//! were copied out and in under other names.

use muser_kv::{BLOCK_LEN, BlockId, KvGroup};
use muser_model::Geometry;

use super::{Random, Sequence, hash_row};
use crate::{DraftBatch, DraftInfo, Executor, KvCapacity, Row, RowInput, RowWants, StepBatch, StepOutput};

/// A place where a sequence is drafted for.
#[derive(Clone, Copy)]
struct Point {
    pos: usize,
    proposals: usize,
}

/// A sequence of a test, and where it is drafted for.
struct Plan {
    ids: Vec<u32>,
    points: Vec<Point>,
}

impl Plan {
    fn random(random: &mut Random, geometry: &Geometry, draft: DraftInfo, max_len: usize) -> Self {
        let len = 2 + random.below(max_len.min(geometry.context - 1));
        let ids: Vec<u32> = (0..len).map(|_| random.below(geometry.vocab) as u32).collect();
        let mut points: Vec<usize> = (0..5).map(|_| random.below(len)).collect();
        // Nothing before the anchor; the last token as the anchor.
        points.extend([0, len - 1]);
        points.sort_unstable();
        points.dedup();
        let point = |pos| Point { pos, proposals: 1 + random.below(draft.max_proposals) };
        Self { ids, points: points.into_iter().map(point).collect() }
    }

    fn blocks(&self) -> usize {
        self.ids.len().div_ceil(BLOCK_LEN)
    }
}

/// Random schedules of steps and draft rounds against each sequence alone. `executor` is called for fresh executors with a
/// draft attached; they may differ in what must not show (threads, instruction set).
///
/// # Panics
/// When a bit differs: this is a test.
pub fn draft_invariance(
    mut executor: impl FnMut() -> Box<dyn Executor>,
    geometry: &Geometry,
    seed: u64,
    sequences: usize,
    max_len: usize,
) {
    let mut random = Random::new(seed);
    let draft = executor().info().draft.expect("a draft is attached");
    let plans: Vec<Plan> =
        (0..sequences).map(|_| Plan::random(&mut random, geometry, draft, max_len)).collect();
    let alone: Vec<_> = plans.iter().map(|plan| run_alone(&mut *executor(), geometry, draft, plan)).collect();
    let mixed = run_mixed(&mut *executor(), geometry, draft, &plans, &mut random);
    for (i, (alone, mixed)) in alone.iter().zip(&mixed).enumerate() {
        assert_eq!(alone.len(), mixed.len(), "seed {seed}: sequence {i}");
        for (point, (a, m)) in plans[i].points.iter().zip(alone.iter().zip(mixed)) {
            let Point { pos, proposals } = *point;
            assert!(a == m, "seed {seed}: sequence {i}: {proposals} proposals at {pos} differ");
        }
    }
}

/// Logits of `proposals` proposals after all of `prompt` but its last token, which is the anchor; `[proposals, vocab]`.
///
/// # Panics
/// When the executor fails.
pub fn draft_logits(executor: &mut dyn Executor, prompt: &[u32], proposals: usize) -> Vec<f32> {
    let (&anchor, context) = prompt.split_last().expect("an anchor");
    let blocks = prompt.len().div_ceil(BLOCK_LEN) as u32;
    executor.allocate_kv(KvCapacity { full: blocks, sliding: blocks }).expect("KV memory");
    let table: Vec<BlockId> = (0..blocks).map(BlockId).collect();
    let (mut batch, mut out) = (StepBatch::default(), StepOutput::default());
    for (i, chunk) in context.chunks(64).enumerate() {
        batch.clear();
        batch.push_seq(64 * i as u32, &table, 0, &table);
        chunk
            .iter()
            .for_each(|&id| batch.push_row(Row { input: RowInput::Token(id), wants: RowWants::default() }));
        executor.step(&batch, &mut out).expect("step");
    }
    let (mut draft, mut logits) = (DraftBatch::default(), Vec::new());
    let covering = &table[..context.len().div_ceil(BLOCK_LEN)];
    draft.push(anchor, context.len() as u32, proposals as u32, 0, covering);
    executor.draft(&draft, &mut logits).expect("draft");
    logits
}

/// A step that leaves the context out stores zeros in the draft's planes, whoever had the block before, and changes nothing
/// else. `target_bytes` is the size of a sliding block without a draft.
///
/// # Panics
/// When it does not.
pub fn skipped_context_is_blank(
    mut executor: impl FnMut() -> Box<dyn Executor>,
    geometry: &Geometry,
    target_bytes: usize,
) {
    let table = [BlockId(1), BlockId(0)];
    let mut run = |skip: bool| {
        let mut executor = executor();
        executor.allocate_kv(KvCapacity { full: 2, sliding: 2 }).expect("KV memory");
        let (mut batch, mut out) = (StepBatch::default(), StepOutput::default());
        for first in [3, 5] {
            batch.clear();
            if skip && first == 5 {
                batch.skip_draft_context();
            }
            batch.push_seq(0, &table, 0, &table);
            for i in 0..30 {
                let input = RowInput::Token((first + 7 * i) % geometry.vocab as u32);
                batch.push_row(Row { input, wants: RowWants { logits: true, ..RowWants::default() } });
            }
            executor.step(&batch, &mut out).expect("step");
        }
        let mut bytes = vec![0u8; executor.info().sliding_block_bytes];
        executor.export_block(KvGroup::Sliding, table[0], &mut bytes).expect("export");
        (out.logits, bytes)
    };
    let ((logits, bytes), (same_logits, blank)) = (run(false), run(true));
    assert!(logits == same_logits, "logits depend on the draft's context");
    assert!(bytes[..target_bytes] == blank[..target_bytes], "the target's planes depend on it");
    assert!(bytes[target_bytes..].iter().any(|&byte| byte != 0), "the context was never written");
    assert!(blank[target_bytes..].iter().all(|&byte| byte == 0), "old context is left");
}

fn run_alone(
    executor: &mut dyn Executor,
    geometry: &Geometry,
    draft: DraftInfo,
    plan: &Plan,
) -> Vec<blake3::Hash> {
    let blocks = plan.blocks() as u32;
    executor.allocate_kv(KvCapacity { full: blocks, sliding: blocks }).expect("KV memory");
    let ascending: Vec<BlockId> = (0..blocks).map(BlockId).collect();
    let mut seq = Sequence::new(plan.ids.clone(), ascending.clone(), ascending);
    let (mut batch, mut out) = (StepBatch::default(), StepOutput::default());
    let (mut round, mut logits) = (DraftBatch::default(), Vec::new());
    let mut found = Vec::new();
    for point in &plan.points {
        while seq.done < point.pos {
            batch.clear();
            seq.push(&mut batch, 1, geometry);
            executor.step(&batch, &mut out).expect("step");
            seq.done += 1;
        }
        round.clear();
        push_draft(&mut round, &seq, point.proposals, draft);
        executor.draft(&round, &mut logits).expect("draft");
        assert_eq!(logits.len(), point.proposals * geometry.vocab);
        found.push(hash_row(&logits));
    }
    found
}

/// Asks for a draft at the end of `seq`, with the shortest table that is allowed.
fn push_draft(round: &mut DraftBatch, seq: &Sequence, proposals: usize, draft: DraftInfo) {
    let first = seq.done.saturating_sub(draft.window - 1) / BLOCK_LEN;
    let table = &seq.sliding[first..seq.done.div_ceil(BLOCK_LEN).max(first)];
    round.push(seq.ids[seq.done], seq.done as u32, proposals as u32, first as u32, table);
}

fn run_mixed(
    executor: &mut dyn Executor,
    geometry: &Geometry,
    draft: DraftInfo,
    plans: &[Plan],
    random: &mut Random,
) -> Vec<Vec<blake3::Hash>> {
    // Twice as many blocks as needed, so that a sequence can move.
    let blocks: usize = 2 * plans.iter().map(Plan::blocks).sum::<usize>();
    executor.allocate_kv(KvCapacity { full: blocks as u32, sliding: blocks as u32 }).expect("KV memory");
    let mut free: Vec<BlockId> = (0..blocks as u32).map(BlockId).collect();
    let mut seqs: Vec<Sequence> = plans
        .iter()
        .map(|plan| {
            let n = plan.blocks();
            let full: Vec<BlockId> = (0..n).map(|_| free.swap_remove(random.below(free.len()))).collect();
            Sequence::new(plan.ids.clone(), full.clone(), full)
        })
        .collect();
    let mut found: Vec<Vec<blake3::Hash>> = plans.iter().map(|_| Vec::new()).collect();
    let (mut batch, mut out) = (StepBatch::default(), StepOutput::default());
    let (mut round, mut logits) = (DraftBatch::default(), Vec::new());
    while (0..plans.len()).any(|i| found[i].len() < plans[i].points.len()) {
        let next = |i: usize| plans[i].points.get(found[i].len());
        batch.clear();
        let mut taken = Vec::new();
        for (i, seq) in seqs.iter().enumerate() {
            let Some(point) = next(i) else { continue };
            let room = executor.info().max_rows - batch.rows().len();
            let rows = (point.pos - seq.done).min(1 + random.below(40)).min(room);
            if rows > 0 && random.below(3) > 0 {
                seq.push(&mut batch, rows, geometry);
                // Rows that turn out wrong: they are written and not counted.
                let wrong = random.below(5).min(room - rows).min(seq.ids.len() - seq.done - rows);
                (0..wrong).for_each(|_| {
                    let id = random.below(geometry.vocab) as u32;
                    batch.push_row(Row { input: RowInput::Token(id), wants: RowWants::default() });
                });
                taken.push((i, rows));
            }
        }
        if !batch.rows().is_empty() {
            executor.step(&batch, &mut out).expect("step");
            taken.iter().for_each(|&(i, rows)| seqs[i].done += rows);
        }

        round.clear();
        let mut drafted = Vec::new();
        for i in 0..plans.len() {
            let Some(point) = plans[i].points.get(found[i].len()) else { continue };
            if seqs[i].done == point.pos && random.below(3) > 0 {
                if random.below(3) == 0 {
                    move_blocks(executor, &mut seqs[i], &mut free, random);
                }
                push_draft(&mut round, &seqs[i], point.proposals, draft);
                drafted.push(i);
            }
        }
        if !drafted.is_empty() {
            executor.draft(&round, &mut logits).expect("draft");
            let mut rest = &logits[..];
            for (&i, asked) in drafted.iter().zip(round.seqs()) {
                let (own, others) = rest.split_at(asked.proposals as usize * geometry.vocab);
                found[i].push(hash_row(own));
                rest = others;
            }
            assert!(rest.is_empty(), "logits of proposals that nobody asked for");
        }
    }
    found
}

/// Copies all blocks of a sequence out and in again as others.
fn move_blocks(
    executor: &mut dyn Executor,
    seq: &mut Sequence,
    free: &mut Vec<BlockId>,
    random: &mut Random,
) {
    let new: Vec<BlockId> = seq.full.iter().map(|_| free.swap_remove(random.below(free.len()))).collect();
    for group in [KvGroup::Full, KvGroup::Sliding] {
        let mut bytes = vec![0u8; executor.info().block_bytes(group)];
        for (&from, &to) in seq.full.iter().zip(&new) {
            executor.export_block(group, from, &mut bytes).expect("export");
            executor.import_block(group, to, &bytes).expect("import");
        }
    }
    free.append(&mut seq.full);
    seq.full.clone_from(&new);
    seq.sliding = new;
}
