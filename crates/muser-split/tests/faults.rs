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
use muser_model::Draft;
use muser_split::{Grouping, RenewingExecutor, SplitExecutor};
use support::{parts, tiny, tiny_draft, whole};

/// What goes wrong, by the number of the call.
#[derive(Default)]
struct Script {
    /// The allocation, counted from now on, that fails; 0: none.
    fail_at: Arc<AtomicUsize>,
    fail_step: AtomicUsize,
    lose_step: AtomicUsize,
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

impl Script {
    /// Something is allocated.
    fn allocate(&self) -> Result<(), ExecError> {
        let counted =
            self.fail_at.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        if counted == Ok(1) { Err(out_of_memory()) } else { Ok(()) }
    }
}

fn out_of_memory() -> ExecError {
    ExecError::OutOfMemory { device: "scripted".into(), what: "as told".into(), needed: 2, available: 1 }
}

impl Executor for Scripted {
    delegate_executor!(self => self.inner; info, step, most_candidates, read_bandwidth, export_block, clear_rows,
        import_block, lend_block);

    fn allocate_kv(&mut self, capacity: KvCapacity) -> Result<(), ExecError> {
        if capacity.full > 0 {
            self.script.allocate()?;
            if self.script.fail_allocation.load(Ordering::SeqCst) {
                return Err(out_of_memory());
            }
        }
        self.script.full_blocks.store(capacity.full as usize, Ordering::SeqCst);
        self.inner.allocate_kv(capacity)
    }
}

impl DraftExecutor for Scripted {
    delegate_executor!(self => self.inner; draft, draft_largest, has_draft_context);

    fn attach_draft(&mut self, draft: Draft) -> Result<(), ExecError> {
        self.script.allocate()?;
        self.inner.attach_draft(draft)
    }
}

impl TowerExecutor for Scripted {
    delegate_executor!(self => self.inner; attach_projector, tower, begin_image, encode_image, drop_image);
}

impl PartExecutor for Scripted {
    fn range(&self) -> LayerRange {
        self.inner.range()
    }

    fn tap_features(&mut self, layers: &[usize]) -> Result<(), ExecError> {
        if !layers.is_empty() {
            self.script.allocate()?;
            if self.script.fail_taps.load(Ordering::SeqCst) {
                return Err(out_of_memory());
            }
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
        if self.script.lose_step.load(Ordering::SeqCst) == step + 1 {
            return Err(ExecError::Lost { device: "scripted".into(), what: "as told".into() });
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

/// A step of one row at a position.
fn one_row(executor: &mut dyn Executor, at: u32) -> Result<Vec<f32>, ExecError> {
    let (mut batch, mut out) = (StepBatch::default(), StepOutput::default());
    batch.push_seq(at, &[BlockId(0)], 0, &[BlockId(0)]);
    let wants = RowWants { logits: true, ..RowWants::default() };
    batch.push_row(Row { input: RowInput::Token(at + 3), wants });
    executor.step(&batch, &mut out).map(|()| out.logits)
}

/// A split of which a part is lost in its third step, and what is made of the rest: `others` by the number of the part.
fn dying(
    part: usize,
    grouping: Grouping,
    others: impl Fn() -> Result<SplitExecutor, ExecError> + Send + 'static,
) -> RenewingExecutor {
    let Bench { mut split, scripts } = bench(grouping, false);
    split.allocate_kv(KvCapacity { full: 0, sliding: 0 }).expect("none");
    scripts[part].lose_step.store(3, Ordering::SeqCst);
    let renew = move |lost| {
        assert_eq!(lost, part, "the part that is gone");
        others()
    };
    RenewingExecutor::new(split, Box::new(renew))
}

#[test]
fn a_part_that_dies_in_a_step_is_replaced() {
    let (model, draft) = (tiny(), tiny_draft());
    for (part, grouping) in [(0, Grouping::Fixed(1)), (1, Grouping::Fixed(1)), (1, Grouping::Fixed(2))] {
        let rest = model.clone();
        let others = move || SplitExecutor::new(parts(&rest, &[], KvType::Int16), &rest, Grouping::Fixed(1));
        let mut split = dying(part, grouping, others);
        split.attach_draft(draft.clone()).expect("draft");
        let info = split.info().clone();
        split.allocate_kv(KvCapacity { full: 2, sliding: 2 }).expect("KV memory");
        let mut steps = (0..4).map(|at| one_row(&mut split, at));
        assert!(steps.next().expect("one").is_ok() && steps.next().expect("two").is_ok());
        let error = steps.next().expect("three").expect_err("as told");
        assert!(matches!(error, ExecError::Renewed { .. }), "{error}");
        drop(steps);
        assert_eq!(split.info().draft, info.draft, "the draft came along");
        // Blocks are there, and empty: everything is computed again.
        let mut one = whole(&model, KvType::Int16);
        one.allocate_kv(KvCapacity { full: 2, sliding: 2 }).expect("KV memory");
        for at in 0..5 {
            let expected = one_row(&mut *one, at).expect("step");
            assert!(one_row(&mut split, at).expect("the others go on") == expected, "{at}");
        }
    }
}

#[test]
fn where_the_others_cannot_have_the_layers_the_device_is_lost() {
    let mut split = dying(1, Grouping::Fixed(1), || Err(out_of_memory()));
    split.allocate_kv(KvCapacity { full: 1, sliding: 1 }).expect("KV memory");
    one_row(&mut split, 0).expect("one");
    one_row(&mut split, 1).expect("two");
    let error = one_row(&mut split, 2).expect_err("as told").to_string();
    assert!(error.contains("is lost") && error.contains("out of memory on scripted"), "{error}");
    for at in 0..2 {
        let error = one_row(&mut split, at).expect_err("there is nothing left");
        assert!(matches!(error, ExecError::Lost { .. }), "{error}");
    }
    assert!(split.allocate_kv(KvCapacity { full: 1, sliding: 1 }).is_err() && split.tower().is_none());
}

/// What is allocated after the parts are there.
fn load(split: &mut SplitExecutor, draft: &Draft) -> Result<(), ExecError> {
    if split.info().draft.is_none() {
        split.attach_draft(draft.clone())?;
    }
    split.allocate_kv(KvCapacity { full: 2, sliding: 2 })
}

#[test]
fn memory_that_runs_out_at_any_step_of_loading_is_said_and_given_back() {
    let (model, draft) = (tiny(), tiny_draft());
    let mut one = whole(&model, KvType::Int16);
    one.attach_draft(draft.clone()).expect("draft");
    one.allocate_kv(KvCapacity { full: 2, sliding: 2 }).expect("KV memory");
    let expected = one_row(&mut *one, 0).expect("step");
    let mut failures = 0;
    loop {
        let fail_at = Arc::new(AtomicUsize::new(failures + 1));
        let scripts =
            [(); 3].map(|()| Arc::new(Script { fail_at: Arc::clone(&fail_at), ..Script::default() }));
        let parts = parts(&model, &[2, 5], KvType::Int16).into_iter().zip(&scripts);
        let parts = parts.map(|(inner, script)| -> Box<dyn PartExecutor> {
            Box::new(Scripted { inner, script: Arc::clone(script), meets_at: None })
        });
        let mut split = SplitExecutor::new(parts.collect(), &model, Grouping::Fixed(1)).expect("a split");
        match load(&mut split, &draft) {
            Ok(()) => break,
            Err(ExecError::OutOfMemory { device, .. }) => assert_eq!(device, "scripted"),
            Err(other) => panic!("allocation {failures}: {other}"),
        }
        failures += 1;
        for script in &scripts {
            assert_eq!(
                script.full_blocks.load(Ordering::SeqCst),
                0,
                "allocation {failures}: blocks are kept"
            );
        }
        // Nothing is in the way of a second try.
        load(&mut split, &draft).unwrap_or_else(|error| panic!("after allocation {failures}: {error}"));
        assert!(one_row(&mut split, 0).expect("step") == expected, "after allocation {failures}");
    }
    assert_eq!(failures, 2 + 1 + 3, "taps of two parts, the draft, blocks of three");
}
