//! The contract over cuts: what a split computes is what one executor computes, bit for bit, wherever it is cut.

mod support;

use muser_backend::{
    DraftBatch, Executor, KvCapacity, KvType, Row, RowInput, RowWants, StepBatch, StepOutput, conformance,
};
use muser_kv::{BLOCK_LEN, BlockId, KvGroup};
use muser_model::{Draft, Model};
use muser_split::Grouping;
use support::{CUTS, split, tiny, tiny_draft, whole};

const KV: [KvType; 3] = [KvType::Int16, KvType::Int8, KvType::F16];

/// What an executor makes of ids in chunks: ids that greedy choice takes, logits, hidden states, proposals, all blocks.
#[derive(PartialEq)]
struct Trace {
    ids: Vec<Option<u32>>,
    proposals: Vec<Option<u32>>,
    rest: blake3::Hash,
}

fn trace(executor: &mut dyn Executor, ids: &[u32], chunk: usize) -> Trace {
    let blocks = ids.len().div_ceil(BLOCK_LEN) as u32;
    executor.allocate_kv(KvCapacity { full: blocks, sliding: blocks }).expect("KV memory");
    let table: Vec<BlockId> = (0..blocks).map(BlockId).collect();
    let (mut batch, mut out) = (StepBatch::default(), StepOutput::default());
    let mut hasher = blake3::Hasher::new();
    let mut floats = |values: &[f32]| {
        values.iter().for_each(|value| {
            hasher.update(&value.to_bits().to_le_bytes());
        });
    };
    let (mut best, mut proposals) = (Vec::new(), Vec::new());
    for (i, some) in ids.chunks(chunk).enumerate() {
        batch.clear();
        batch.push_seq((i * chunk) as u32, &table, 0, &table);
        for &id in some {
            let wants = RowWants { logits: true, hidden: true, argmax: true, candidates: 3 };
            batch.push_row(Row { input: RowInput::Token(id), wants });
        }
        executor.step(&batch, &mut out).expect("step");
        floats(&out.logits);
        floats(&out.hidden);
        floats(&out.candidates.iter().map(|(_, logit)| *logit).collect::<Vec<_>>());
        best.extend(&out.argmax);
    }
    if executor.info().draft.is_some() {
        let (mut round, mut logits) = (DraftBatch::default(), Vec::new());
        round.push(7, ids.len() as u32, 5, 0, &table);
        executor.draft_largest(&round, &mut Vec::new(), &mut proposals).expect("draft");
        executor.draft(&round, &mut logits).expect("draft");
        floats(&logits);
    }
    for group in [KvGroup::Full, KvGroup::Sliding] {
        let mut bytes = vec![0; executor.info().block_bytes(group)];
        for block in &table {
            executor.export_block(group, *block, &mut bytes).expect("export");
            hasher.update(&bytes);
        }
    }
    Trace { ids: best, proposals, rest: hasher.finalize() }
}

fn ids(count: usize) -> Vec<u32> {
    (0..count).map(|i| ((i * 41 + 7) % 4000) as u32).collect()
}

fn with(mut executor: Box<dyn Executor>, draft: Option<&Draft>) -> Box<dyn Executor> {
    if let Some(draft) = draft {
        executor.attach_draft(draft.clone()).expect("draft");
    }
    executor
}

#[test]
fn every_cut_gives_the_same_ids_logits_blocks_and_drafts() {
    let (model, draft) = (tiny(), tiny_draft());
    // Over the end of a block and of the window with the type that is the default.
    for (kv, draft, positions) in
        [(KvType::Int16, Some(&draft), 260), (KvType::Int8, None, 40), (KvType::F16, Some(&draft), 40)]
    {
        let prompt = ids(positions);
        let mut one = with(whole(&model, kv), draft);
        let expected = trace(&mut *one, &prompt, 100);
        for cuts in CUTS {
            let mut cut = with(split(&model, cuts, kv, Grouping::Fixed(1)), draft);
            let info = (cut.info().clone(), one.info());
            assert_eq!((&info.0.route, info.0.draft), (&info.1.route, info.1.draft), "{cuts:?}");
            assert_eq!(info.0.full_block_bytes, info.1.full_block_bytes, "{cuts:?}");
            assert_eq!(info.0.sliding_block_bytes, info.1.sliding_block_bytes, "{cuts:?}");
            let found = trace(&mut *cut, &prompt, 100);
            assert!(found.ids == expected.ids, "{kv:?}, cut at {cuts:?}: other ids");
            assert!(found.proposals == expected.proposals, "{kv:?}, cut at {cuts:?}: other proposals");
            assert!(found.rest == expected.rest, "{kv:?}, cut at {cuts:?}: other bits");
        }
    }
}

#[test]
fn groups_of_rows_give_the_same_bits() {
    let (model, draft) = (tiny(), tiny_draft());
    let prompt = ids(270);
    let expected = trace(&mut *with(whole(&model, KvType::Int16), Some(&draft)), &prompt, 90);
    for (cuts, grouping) in [
        (&[4][..], Grouping::Fixed(2)),
        (&[4], Grouping::Fixed(90)),
        (&[1, 6], Grouping::Fixed(3)),
        (&[2, 3, 5], Grouping::Fixed(8)),
        (&[3], Grouping::Measured),
    ] {
        let mut cut = with(split(&model, cuts, KvType::Int16, grouping), Some(&draft));
        assert!(trace(&mut *cut, &prompt, 90) == expected, "cut at {cuts:?}, {grouping:?}");
    }
}

/// Executors that take turns: each is cut at another place than the one before, and into other groups.
fn turns(model: &Model, kv: KvType, draft: Option<Draft>) -> impl FnMut() -> Box<dyn Executor> {
    let mut turn = 0;
    let groupings = [Grouping::Fixed(1), Grouping::Fixed(2), Grouping::Fixed(5), Grouping::Measured];
    move || {
        turn += 1;
        let cuts = CUTS[turn * 3 % CUTS.len()];
        with(split(model, cuts, kv, groupings[turn % 4]), draft.as_ref())
    }
}

#[test]
fn rows_do_not_see_their_neighbours() {
    let model = tiny();
    let cases = muser_testkit::long_or(30, 3);
    for (seed, kv) in KV.into_iter().cycle().take(cases).enumerate() {
        let positions = if seed == 0 { 300 } else { 60 + 31 * (seed % 7) };
        conformance::row_invariance(
            turns(&model, kv, None),
            &model.geometry,
            seed as u64,
            2 + seed % 3,
            positions,
        );
    }
}

#[test]
fn what_one_split_computed_another_continues() {
    let model = tiny();
    for (seed, kv) in KV.into_iter().enumerate() {
        conformance::import_continues(turns(&model, kv, None), &model.geometry, seed as u64, 290, 20);
        let draft = Some(tiny_draft());
        conformance::import_continues(turns(&model, kv, draft), &model.geometry, seed as u64, 40, 9);
    }
}

#[test]
fn what_leaves_holds_no_rows_of_another_sequence() {
    let model = tiny();
    for draft in [None, Some(tiny_draft())] {
        let make = turns(&model, KvType::Int16, draft);
        conformance::cleared_rows_tell_nothing(make, &model.geometry, 9, &[1, 100, 259]);
    }
}

#[test]
fn drafts_depend_on_nothing_but_their_sequence() {
    let model = tiny();
    for (seed, kv) in [KvType::Int16, KvType::Int8].into_iter().enumerate() {
        let make = turns(&model, kv, Some(tiny_draft()));
        conformance::draft_invariance(make, &model.geometry, seed as u64, 3, 120);
    }
}

#[test]
fn skipped_context_is_blank() {
    let model = tiny();
    let bytes = whole(&model, KvType::Int16).info().sliding_block_bytes;
    let make = turns(&model, KvType::Int16, Some(tiny_draft()));
    conformance::skipped_context_is_blank(make, &model.geometry, bytes);
}

#[test]
fn a_lent_block_is_one_block() {
    let (model, draft) = (tiny(), tiny_draft());
    let prompt = ids(30);
    let mut source = with(whole(&model, KvType::Int16), Some(&draft));
    trace(&mut *source, &prompt, 30);
    let mut target = with(split(&model, &[2, 5], KvType::Int16, Grouping::Fixed(1)), Some(&draft));
    target.allocate_kv(KvCapacity { full: 2, sliding: 2 }).expect("KV memory");
    for group in [KvGroup::Full, KvGroup::Sliding] {
        let mut bytes = vec![0; source.info().block_bytes(group)];
        source.export_block(group, BlockId(0), &mut bytes).expect("export");
        let mut loan = target.lend_block(group, BlockId(1)).expect("all parts lend");
        assert!(target.lend_block(group, BlockId(1)).is_none(), "lent already");
        assert!(target.lend_block(group, BlockId(2)).is_none(), "there is no such block");
        let mut found = vec![0; bytes.len()];
        target.export_block(group, BlockId(1), &mut found).expect_err("it is lent");
        loan.bytes().copy_from_slice(&bytes);
        drop(loan);
        target.export_block(group, BlockId(1), &mut found).expect("it is back");
        assert!(found == bytes, "{group:?}");
        target.export_block(group, BlockId(1), &mut found[1..]).expect_err("a byte short");
        target.import_block(group, BlockId(1), &bytes[1..]).expect_err("a byte short");
    }
    // And a step goes on from there.
    let next = |executor: &mut dyn Executor, block: u32| {
        let (mut batch, mut out) = (StepBatch::default(), StepOutput::default());
        batch.push_seq(30, &[BlockId(block)], 0, &[BlockId(block)]);
        let wants = RowWants { logits: true, ..RowWants::default() };
        batch.push_row(Row { input: RowInput::Token(11), wants });
        executor.step(&batch, &mut out).expect("step");
        out.logits
    };
    assert!(next(&mut *source, 0) == next(&mut *target, 1));
}

#[test]
fn rows_of_pictures_cross_like_others() {
    let model = tiny();
    let hidden = model.geometry.hidden;
    let run = |mut executor: Box<dyn Executor>| {
        executor.allocate_kv(KvCapacity { full: 1, sliding: 1 }).expect("KV memory");
        let (mut batch, mut out) = (StepBatch::default(), StepOutput::default());
        batch.push_seq(0, &[BlockId(0)], 0, &[BlockId(0)]);
        for row in 0..40 {
            let values: Vec<f32> = (0..hidden).map(|i| ((i * 7 + row * 13) % 101) as f32 - 50.0).collect();
            let input = match row % 3 {
                0 => RowInput::Token(row as u32),
                _ => RowInput::Embedding(batch.push_embedding(&values)),
            };
            batch.push_row(Row { input, wants: RowWants { logits: true, ..RowWants::default() } });
        }
        executor.step(&batch, &mut out).expect("step");
        out.logits
    };
    let expected = run(whole(&model, KvType::Int16));
    for count in [1, 2, 3] {
        assert!(run(split(&model, &[3], KvType::Int16, Grouping::Fixed(count))) == expected, "{count}");
    }
}
