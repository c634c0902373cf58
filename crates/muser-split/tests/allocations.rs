//! A decode step over a cut allocates nothing once its buffers have their size, in turn or in groups.

mod support;

use muser_backend::{KvCapacity, KvType, Row, RowInput, RowWants, StepBatch, StepOutput};
use muser_kv::BlockId;
use muser_split::Grouping;
use muser_testkit::{CountingAllocator, allocations_in_all};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[test]
fn a_decode_step_allocates_nothing() {
    let model = support::tiny();
    for count in [1, 2] {
        let mut executor = support::split(&model, &[4], KvType::Int16, Grouping::Fixed(count));
        executor.attach_draft(support::tiny_draft()).expect("draft");
        executor.allocate_kv(KvCapacity { full: 2, sliding: 2 }).expect("KV memory");
        let (mut batch, mut out) = (StepBatch::default(), StepOutput::default());
        let mut step = |from: u32| {
            batch.clear();
            for seq in 0..2 {
                batch.push_seq(from, &[BlockId(seq)], 0, &[BlockId(seq)]);
                let wants = RowWants { argmax: true, ..RowWants::default() };
                batch.push_row(Row { input: RowInput::Token(from + seq), wants });
            }
            let before = allocations_in_all();
            executor.step(&batch, &mut out).expect("step");
            allocations_in_all() - before
        };
        let counts: Vec<_> = (0..20).map(&mut step).collect();
        assert!(counts[0] > 0, "the counter counts");
        assert!(counts[8..].iter().all(|&count| count == 0), "{count} groups: {counts:?}");
    }
}
