//! Parts that fail, and parts that work at the same time.

mod support;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use muser_backend::{
    Crossing, DraftExecutor, ExecError, Executor, HostLayers, KvCapacity, KvType, LayerRange, LayerStreamer,
    PartExecutor, Row, RowInput, RowWants, StepBatch, StepOutput, TowerExecutor, delegate_executor,
};
use muser_kv::BlockId;
use muser_split::{Grouping, SplitExecutor};
use support::{parts, tiny, tiny_draft, whole};

/// What goes wrong, by the number of the call.
#[derive(Default)]
struct Script {
    fail_step: AtomicUsize,
    panic_in_step: AtomicBool,
    fail_allocation: AtomicBool,
    fail_taps: AtomicBool,
    /// Blocks of the last allocation.
    full_blocks: AtomicUsize,
    steps: AtomicUsize,
}

type Meeting = Arc<(Mutex<usize>, Condvar)>;

/// A part that does as the script says.
struct Scripted {
    inner: Box<dyn PartExecutor>,
    script: Arc<Script>,
    /// The step that waits until a step of the other part waits, too.
    meets_at: Option<(usize, Meeting)>,
}

fn out_of_memory() -> ExecError {
    ExecError::OutOfMemory { device: "scripted".into(), what: "as told".into(), needed: 2, available: 1 }
}

impl Executor for Scripted {
    delegate_executor!(self => self.inner; info, step, most_candidates, read_bandwidth, export_block, clear_rows,
        import_block, lend_block);

    fn allocate_kv(&mut self, capacity: KvCapacity) -> Result<(), ExecError> {
        if capacity.full > 0 && self.script.fail_allocation.load(Ordering::SeqCst) {
            return Err(out_of_memory());
        }
        self.script.full_blocks.store(capacity.full as usize, Ordering::SeqCst);
        self.inner.allocate_kv(capacity)
    }
}

impl DraftExecutor for Scripted {
    delegate_executor!(self => self.inner; attach_draft, draft, draft_largest, has_draft_context);
}

impl TowerExecutor for Scripted {
    delegate_executor!(self => self.inner; attach_projector, tower, begin_image, encode_image, drop_image);
}

impl PartExecutor for Scripted {
    fn range(&self) -> LayerRange {
        self.inner.range()
    }

    fn tap_features(&mut self, layers: &[usize]) -> Result<(), ExecError> {
        if !layers.is_empty() && self.script.fail_taps.load(Ordering::SeqCst) {
            return Err(out_of_memory());
        }
        self.inner.tap_features(layers)
    }

    fn step_part(
        &mut self,
        batch: &StepBatch,
        crossing: &mut Crossing,
        out: &mut StepOutput,
    ) -> Result<(), ExecError> {
        let step = self.script.steps.fetch_add(1, Ordering::SeqCst);
        if let Some((at, meeting)) = &self.meets_at
            && *at == step
        {
            meet(meeting);
        }
        assert!(!self.script.panic_in_step.load(Ordering::SeqCst), "as told");
        if self.script.fail_step.load(Ordering::SeqCst) == step + 1 {
            return Err(ExecError::Device { device: "scripted".into(), what: "as told".into() });
        }
        self.inner.step_part(batch, crossing, out)
    }

    fn as_host(&mut self) -> Option<&mut dyn HostLayers> {
        self.inner.as_host()
    }

    fn as_streamer(&mut self) -> Option<&mut dyn LayerStreamer> {
        self.inner.as_streamer()
    }
}

/// Waits until two are here: nobody comes alone.
fn meet((here, came): &(Mutex<usize>, Condvar)) {
    let mut here = here.lock().expect("not poisoned");
    *here += 1;
    came.notify_all();
    while *here < 2 {
        let (waited, late) = came.wait_timeout(here, Duration::from_mins(1)).expect("not poisoned");
        here = waited;
        assert!(!late.timed_out(), "the parts never worked at the same time");
    }
}

struct Bench {
    split: SplitExecutor,
    scripts: [Arc<Script>; 2],
}

fn bench(grouping: Grouping, meeting: bool) -> Bench {
    let model = tiny();
    let scripts: [Arc<Script>; 2] = Default::default();
    let place: Meeting = Arc::default();
    let parts = parts(&model, &[4], KvType::Int16).into_iter().zip(&scripts).enumerate();
    let parts = parts.map(|(number, (inner, script))| -> Box<dyn PartExecutor> {
        // The first part's second group, while the second part has the first one.
        let meets_at = meeting.then(|| (1 - number, Arc::clone(&place)));
        Box::new(Scripted { inner, script: Arc::clone(script), meets_at })
    });
    let mut split = SplitExecutor::new(parts.collect(), &model, grouping).expect("a split");
    split.allocate_kv(KvCapacity { full: 4, sliding: 4 }).expect("KV memory");
    Bench { split, scripts }
}

/// A decode step of four sequences at position `from`.
fn step(executor: &mut dyn Executor, from: u32) -> Result<Vec<f32>, ExecError> {
    let (mut batch, mut out) = (StepBatch::default(), StepOutput::default());
    for seq in 0..4 {
        batch.push_seq(from, &[BlockId(seq)], 0, &[BlockId(seq)]);
        let wants = RowWants { logits: true, ..RowWants::default() };
        batch.push_row(Row { input: RowInput::Token(100 * seq + from), wants });
    }
    executor.step(&batch, &mut out).map(|()| out.logits)
}

fn expected() -> [Vec<f32>; 2] {
    let mut one = whole(&tiny(), KvType::Int16);
    one.allocate_kv(KvCapacity { full: 4, sliding: 4 }).expect("KV memory");
    [0, 1].map(|from| step(&mut *one, from).expect("step"))
}

#[test]
fn two_parts_work_at_the_same_time() {
    let Bench { mut split, .. } = bench(Grouping::Fixed(2), true);
    let [first, second] = expected();
    assert!(step(&mut split, 0).expect("both parts met") == first);
    assert!(step(&mut split, 1).expect("and go on") == second);
}

#[test]
fn a_step_that_fails_in_a_part_fails_and_the_next_one_does_not() {
    for grouping in [Grouping::Fixed(1), Grouping::Fixed(2), Grouping::Fixed(4)] {
        for part in 0..2 {
            let Bench { mut split, scripts } = bench(grouping, false);
            scripts[part].fail_step.store(1, Ordering::SeqCst);
            let error = step(&mut split, 0).expect_err("as told");
            assert!(matches!(error, ExecError::Device { .. }), "{error}");
            let [first, second] = expected();
            assert!(step(&mut split, 0).expect("usable") == first, "{grouping:?}, part {part}");
            assert!(step(&mut split, 1).expect("usable") == second, "{grouping:?}, part {part}");
        }
    }
}

#[test]
fn a_part_that_panics_takes_its_step_and_not_the_process() {
    let Bench { mut split, scripts } = bench(Grouping::Fixed(2), false);
    scripts[1].panic_in_step.store(true, Ordering::SeqCst);
    let error = step(&mut split, 0).expect_err("it panics").to_string();
    assert!(error.contains("panicked: as told"), "{error}");
    scripts[1].panic_in_step.store(false, Ordering::SeqCst);
    assert!(step(&mut split, 0).expect("usable") == expected()[0]);
}

#[test]
fn memory_that_one_part_lacks_the_others_give_back() {
    for part in 0..2 {
        let Bench { mut split, scripts } = bench(Grouping::Fixed(1), false);
        assert_eq!(scripts[0].full_blocks.load(Ordering::SeqCst), 4);
        scripts[part].fail_allocation.store(true, Ordering::SeqCst);
        let error = split.allocate_kv(KvCapacity { full: 9, sliding: 9 }).expect_err("as told");
        assert!(matches!(error, ExecError::OutOfMemory { .. }), "{error}");
        let left = scripts.each_ref().map(|script| script.full_blocks.load(Ordering::SeqCst));
        assert_eq!(left, [0, 0], "part {part}");
        assert!(step(&mut split, 0).is_err(), "there are no blocks");
        scripts[part].fail_allocation.store(false, Ordering::SeqCst);
        split.allocate_kv(KvCapacity { full: 4, sliding: 4 }).expect("there is memory again");
        assert!(step(&mut split, 0).expect("as before") == expected()[0]);
    }
}

#[test]
fn a_draft_that_finds_no_room_leaves_the_split_as_it_was() {
    let Bench { mut split, scripts } = bench(Grouping::Fixed(1), false);
    split.allocate_kv(KvCapacity { full: 0, sliding: 0 }).expect("none");
    let before = split.info().clone();
    scripts[0].fail_taps.store(true, Ordering::SeqCst);
    split.attach_draft(tiny_draft()).expect_err("as told");
    assert_eq!((&split.info().route, split.info().draft), (&before.route, None));
    assert_eq!(split.info().sliding_block_bytes, before.sliding_block_bytes);
    split.allocate_kv(KvCapacity { full: 4, sliding: 4 }).expect("KV memory");
    assert!(step(&mut split, 0).expect("without a draft") == expected()[0]);
    // Later there is room.
    scripts[0].fail_taps.store(false, Ordering::SeqCst);
    split.allocate_kv(KvCapacity { full: 0, sliding: 0 }).expect("none");
    split.attach_draft(tiny_draft()).expect("there is room");
    assert!(split.info().draft.is_some() && split.info().route != before.route);
    split.attach_draft(tiny_draft()).expect_err("a second one");
    split.allocate_kv(KvCapacity { full: 4, sliding: 4 }).expect("KV memory");
    assert!(step(&mut split, 0).expect("with a draft") == expected()[0]);
}

#[test]
fn parts_that_are_no_model_are_refused() {
    let model = tiny();
    let all = || parts(&model, &[3, 5], KvType::Int16);
    let refuse = |parts: Vec<Box<dyn PartExecutor>>| {
        let made = SplitExecutor::new(parts, &model, Grouping::Measured);
        made.err().expect("no model").to_string()
    };
    let without = |at: usize| {
        let mut parts = all();
        parts.remove(at);
        refuse(parts)
    };
    assert!(without(0).contains("layers 3 to 4 where layer 0 of 8"), "{}", without(0));
    assert!(without(1).contains("layers 5 to 7 where layer 3 of 8"), "{}", without(1));
    assert!(without(2).contains("parts up to layer 5 of a model of 8"), "{}", without(2));
    assert!(refuse(Vec::new()).contains("up to layer 0"));
    let mut twice = all();
    twice.swap(1, 2);
    assert!(refuse(twice).contains("where layer 3"));
    let mut mixed = parts(&model, &[3], KvType::Int16);
    mixed[1] = parts(&model, &[3], KvType::Int8).remove(1);
    assert!(refuse(mixed).contains("exact-1/kv8"));
    // A part alone takes no steps, and no draft where the output is not.
    let mut part = all().remove(0);
    part.allocate_kv(KvCapacity { full: 4, sliding: 4 }).expect("KV memory");
    assert!(step(&mut *part, 0).expect_err("a part").to_string().contains("layers 0 to 2"));
    let mut part = all().remove(0);
    part.attach_draft(tiny_draft()).expect_err("no output layer");
}
