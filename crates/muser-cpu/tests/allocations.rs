//! A decode step allocates nothing once its buffers have their size, also when it reaches a new KV block.

use muser_backend::{Executor, KvCapacity, Row, RowInput, RowWants, StepBatch, StepOutput};
use muser_cpu::{CpuExecutor, CpuOptions};
use muser_kv::BlockId;
use muser_model::Model;
use muser_testkit::{CountingAllocator, allocations_in_all};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[test]
fn a_decode_step_allocates_nothing() {
    let path = muser_testkit::muse_tiny();
    let model = Model::load(path).expect("the bundled model loads");
    let options = CpuOptions { threads: Some(2), max_rows: 256, ..CpuOptions::default() };
    let mut executor = CpuExecutor::new(model, options).expect("executor");
    executor.allocate_kv(KvCapacity { full: 3, sliding: 3 }).expect("KV memory");
    let blocks: Vec<BlockId> = (0..3).map(BlockId).collect();
    let (mut batch, mut out) = (StepBatch::default(), StepOutput::default());
    let mut step = |from: u32, rows: u32| {
        batch.clear();
        batch.push_seq(from, &blocks, 0, &blocks);
        for row in 0..rows {
            let wants = RowWants { logits: row + 1 == rows, ..RowWants::default() };
            batch.push_row(Row { input: RowInput::Token(from + row), wants });
        }
        let before = allocations_in_all();
        executor.step(&batch, &mut out).expect("step");
        allocations_in_all() - before
    };
    let first = step(0, 250);
    assert!(first > 0, "the counter counts: a first step sizes its outputs");
    // Over the boundary between two blocks.
    let counts: Vec<_> = (250..262).map(|from| step(from, 1)).collect();
    assert!(counts[1..].iter().all(|&count| count == 0), "allocations of each step: {counts:?}");
}
