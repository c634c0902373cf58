//! The DFlash draft of the bundled model in the scalar reference executor: verified text equals plain text, and enough
//! proposals are right to show that features, norms, window and rotation are what the draft was trained with.

#![expect(clippy::unwrap_used, reason = "a test may fail that way")]

use muser_backend::DraftExecutor as _;
use std::path::PathBuf;

use muser_backend::{
    DraftBatch, Executor, KvCapacity, KvType, ReferenceExecutor, Row, RowInput, RowWants, StepBatch,
    StepOutput,
};
use muser_kv::{BLOCK_LEN, BlockId, KvGroup};
use muser_model::{Draft, Model};

/// `<|begin_of_text|><|start|>user<|message|>Write a short story for children about a fox.<|eot|><|start|>assistant` in the
/// bundled vocabulary.
const PROMPT: [u32; 21] = [
    4084, 4089, 306, 272, 4090, 563, 256, 536, 402, 348, 1355, 387, 256, 1229, 87, 13, 4087, 4089, 539, 415,
    398,
];

fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../models").join(name)
}

fn executor(draft: bool) -> ReferenceExecutor {
    let model = Model::load(path("muse-tiny-Q4_K_M.gguf")).unwrap();
    let mut executor = ReferenceExecutor::new(model.clone(), KvType::F32).unwrap();
    if draft {
        executor.attach_draft(Draft::load(muser_testkit::muse_tiny_draft()).unwrap()).unwrap();
    }
    executor.allocate_kv(KvCapacity { full: 2, sliding: 2 }).unwrap();
    executor
}

/// Runs rows `ids` at `pos` and returns the most likely next token after each.
fn step(executor: &mut ReferenceExecutor, pos: usize, ids: &[u32]) -> Vec<u32> {
    let (mut batch, mut out) = (StepBatch::default(), StepOutput::default());
    batch.push_seq(pos as u32, &[BlockId(0), BlockId(1)], 0, &[BlockId(1), BlockId(0)]);
    for &id in ids {
        batch.push_row(Row {
            input: RowInput::Token(id),
            wants: RowWants { logits: true, ..RowWants::default() },
        });
    }
    executor.step(&batch, &mut out).unwrap();
    let vocab = executor.info().vocab;
    out.logits.chunks(vocab).map(argmax).collect()
}

fn argmax(x: &[f32]) -> u32 {
    x.iter().enumerate().fold(0, |best, (i, v)| if *v > x[best] { i } else { best }) as u32
}

/// Text that the model itself wrote, so that it is neither noise nor anybody's.
fn greedy(executor: &mut ReferenceExecutor, prompt: &[u32], n: usize) -> Vec<u32> {
    let mut ids = prompt.to_vec();
    let mut next = *step(executor, 0, prompt).last().unwrap();
    while ids.len() < prompt.len() + n {
        ids.push(next);
        next = step(executor, ids.len() - 1, &[next])[0];
    }
    ids.split_off(prompt.len())
}

#[test]
fn drafted_text_is_plain_text_and_proposals_are_often_right() {
    const N: usize = 90;
    let mut plain = executor(false);
    let prompt = PROMPT;
    let expected = greedy(&mut plain, &prompt, N);

    let mut drafted = executor(true);
    assert!(
        drafted.info().sliding_block_bytes > plain.info().sliding_block_bytes,
        "draft K and V live in sliding blocks"
    );
    let proposals = drafted.info().draft.unwrap().max_proposals;
    let mut ids = prompt.to_vec();
    let mut anchor = *step(&mut drafted, 0, &prompt).last().unwrap();
    let (mut draft, mut logits, mut passes) = (DraftBatch::default(), Vec::new(), 0);
    let mut text = vec![anchor];
    while text.len() < N {
        draft.clear();
        draft.push(
            anchor,
            ids.len() as u32,
            proposals as u32,
            0,
            &[BlockId(1), BlockId(0)][..ids.len().div_ceil(BLOCK_LEN)],
        );
        drafted.draft(&draft, &mut logits).unwrap();
        let mut rows = vec![anchor];
        rows.extend(logits.chunks(drafted.info().vocab).map(argmax));
        assert_eq!(rows.len(), proposals + 1);

        let verified = step(&mut drafted, ids.len(), &rows);
        passes += 1;
        let right = rows[1..].iter().zip(&verified).take_while(|(a, b)| a == b).count();
        ids.extend_from_slice(&rows[..=right]);
        text.extend_from_slice(&verified[..=right]);
        anchor = verified[right];
    }
    assert_eq!(text[..N], expected[..]);
    let per_pass = (text.len() - 1) as f64 / f64::from(passes);
    println!("{per_pass:.2} tokens per target pass with {proposals} proposals");
    assert!(per_pass > 1.8, "{per_pass:.2} tokens per target pass");
}

#[test]
fn a_step_that_skips_the_context_leaves_zeros_and_the_same_logits() {
    let (mut with, mut without) = (executor(true), executor(true));
    let blocks = [BlockId(0), BlockId(1)];
    let run = |executor: &mut ReferenceExecutor, skip: bool| {
        let (mut batch, mut out) = (StepBatch::default(), StepOutput::default());
        // First for other tokens, so that there is something to be seen by who comes next.
        for ids in [[7; 21], PROMPT] {
            batch.clear();
            if skip && ids == PROMPT {
                batch.skip_draft_context();
            }
            batch.push_seq(0, &blocks, 0, &blocks);
            for id in ids {
                let wants = RowWants { logits: true, ..RowWants::default() };
                batch.push_row(Row { input: RowInput::Token(id), wants });
            }
            executor.step(&batch, &mut out).unwrap();
        }
        let mut bytes = vec![0u8; executor.info().sliding_block_bytes];
        executor.export_block(KvGroup::Sliding, blocks[0], &mut bytes).unwrap();
        (out.logits, bytes)
    };
    let (logits, bytes) = run(&mut with, false);
    let (same_logits, blank_bytes) = run(&mut without, true);
    assert!(logits == same_logits);
    let target = executor(false).info().sliding_block_bytes;
    assert!(bytes[..target] == blank_bytes[..target] && bytes[target..] != blank_bytes[target..]);
    assert!(blank_bytes[target..].iter().all(|&byte| byte == 0));
}
