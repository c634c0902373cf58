//! Draft rounds and the steps that verify them allocate nothing once they have been as large before. Counted in all
//! threads, so this file has one test.

use muser_backend::DraftExecutor as _;

use muser_backend::{DraftBatch, Executor, KvCapacity, Row, RowInput, RowWants, StepBatch, StepOutput};
use muser_cpu::{CpuExecutor, CpuOptions};
use muser_kv::BlockId;
use muser_model::{Draft, Model};
use muser_testkit::{CountingAllocator, allocations_in_all};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[test]
fn rounds_allocate_nothing() {
    let model = Model::load(muser_testkit::muse_tiny()).expect("the bundled model loads");
    let options = CpuOptions { threads: Some(2), ..CpuOptions::default() };
    let mut executor = CpuExecutor::new(model, options).expect("it runs everywhere");
    let draft = Draft::load(muser_testkit::muse_tiny_draft()).expect("the bundled draft loads");
    executor.attach_draft(draft).expect("it fits");
    executor.allocate_kv(KvCapacity { full: 6, sliding: 6 }).expect("KV memory");
    let tables = [[BlockId(0), BlockId(1)], [BlockId(2), BlockId(3)], [BlockId(4), BlockId(5)]];
    let (mut batch, mut out) = (StepBatch::default(), StepOutput::default());
    let (mut round, mut logits) = (DraftBatch::default(), Vec::new());
    let mut counts = Vec::new();
    for turn in 0..80u32 {
        let before = allocations_in_all();
        let pos = 4 * turn;
        round.clear();
        batch.clear();
        for (i, table) in (0..).zip(&tables) {
            let covered = (pos as usize).div_ceil(256);
            round.push(300 + i, pos, 7 - (turn + i) % 3, 0, &table[..covered]);
            batch.push_seq(pos, table, 0, table);
            for k in 0..8 {
                let wants = RowWants { logits: true, ..RowWants::default() };
                batch.push_row(Row { input: RowInput::Token(300 + 7 * k + i), wants });
            }
        }
        executor.draft(&round, &mut logits).expect("draft");
        executor.step(&batch, &mut out).expect("step");
        counts.push(allocations_in_all() - before);
    }
    assert!(counts[0] > 0, "the counter counts");
    // The third turn is the first whose round is the largest; position 256 gives every table its second block.
    let late: u64 = counts[66..].iter().sum();
    assert_eq!((counts[4..60].iter().sum::<u64>(), late), (0, 0), "{counts:?}");
}
