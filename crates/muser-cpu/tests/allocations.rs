//! A decode step allocates nothing once its buffers have their size, also when it reaches a new KV block.
#![allow(unsafe_code, reason = "counts the calls of the allocator")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use muser_backend::{Executor, KvCapacity, Row, RowInput, RowWants, StepBatch, StepOutput};
use muser_cpu::{CpuExecutor, CpuOptions};
use muser_kv::BlockId;
use muser_model::Model;

struct Counting;

static COUNT: AtomicUsize = AtomicUsize::new(0);

// SAFETY: everything is the system allocator's.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::SeqCst);
        // SAFETY: by the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: by the caller's contract.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_decode_step_allocates_nothing() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/muse-tiny-Q4_K_M.gguf");
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
        let before = COUNT.load(Ordering::SeqCst);
        executor.step(&batch, &mut out).expect("step");
        COUNT.load(Ordering::SeqCst) - before
    };
    let first = step(0, 250);
    assert!(first > 0, "the counter counts: a first step sizes its outputs");
    // Over the boundary between two blocks.
    let counts: Vec<_> = (250..262).map(|from| step(from, 1)).collect();
    assert!(counts[1..].iter().all(|&count| count == 0), "allocations of each step: {counts:?}");
}
