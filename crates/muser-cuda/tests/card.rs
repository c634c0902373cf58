//! What needs a card: kernels against the scalar definition, row invariance, agreement with the reference.
//!
//! Where there is none, each test is in the list of those that did not run, which `cargo xtask test` prints.

use std::time::Duration;

use muser_backend::arith::vision::PositionRule;
use muser_backend::conformance::{
    cleared_rows_tell_nothing, draft_invariance, draft_logits, import_continues, row_invariance,
    skipped_context_is_blank,
};
use muser_backend::{DraftExecutor as _, Executor, KvType, TowerExecutor as _, TowerImage};
use muser_cpu::{CpuExecutor, CpuOptions};
use muser_cuda::{CudaError, CudaExecutor, CudaOptions, device, selftest};
use muser_model::{Draft, Model, Projector};

fn card() -> bool {
    match device::probe(0) {
        Ok(_) => true,
        Err(error) => {
            muser_testkit::skip(muser_testkit::Need::Card, error);
            false
        }
    }
}

fn tiny() -> Model {
    let path = muser_testkit::muse_tiny();
    Model::load(path).expect("the model in the repository loads")
}

/// What the kernels store.
const KV_TYPES: [KvType; 2] = [KvType::Int16, KvType::Int8];

fn executor(model: &Model, kv: KvType) -> Box<dyn Executor> {
    let options = CudaOptions { max_rows: 512, kv, ..CudaOptions::default() };
    Box::new(CudaExecutor::new(model, options).expect("loads"))
}

fn tiny_draft() -> Draft {
    let path = muser_testkit::muse_tiny_draft();
    Draft::load(path).expect("the draft in the repository loads")
}

fn drafting(model: &Model, kv: KvType) -> Box<dyn Executor> {
    let mut executor = executor(model, kv);
    executor.attach_draft(tiny_draft()).expect("fits");
    executor
}

#[test]
fn products_equal_the_scalar_definition() {
    if card() {
        let report = selftest::run(0).expect("every kernel is right");
        assert!(report.compared > 100_000);
    }
}

#[test]
fn rows_do_not_depend_on_the_batch_and_blocks_tell_what_they_should() {
    if !card() {
        return;
    }
    let model = tiny();
    for kv in KV_TYPES {
        let fresh = || executor(&model, kv);
        row_invariance(fresh, &model.geometry, 1, 4, 700);
        import_continues(fresh, &model.geometry, 2, 700, 40);
        cleared_rows_tell_nothing(fresh, &model.geometry, 3, &[1, 100, 255, 259]);
        cleared_rows_tell_nothing(|| drafting(&model, kv), &model.geometry, 4, &[1, 100, 255, 259]);
    }
}

/// E8: a prefix that the processor computed goes on upon the card as if it had computed it, and the reverse.
#[test]
fn blocks_move_between_processor_and_card() {
    if !card() {
        return;
    }
    let model = tiny();
    for kv in KV_TYPES {
        let on_card = || executor(&model, kv);
        let on_processor = || {
            let options = CpuOptions { kv, ..CpuOptions::default() };
            Box::new(CpuExecutor::new(model.clone(), options).expect("loads")) as Box<dyn Executor>
        };
        assert_eq!(on_card().info().route, on_processor().info().route);
        // Whatever is made first computes the prefix, the second one imports it.
        for card_first in [true, false] {
            let mut made = 0;
            let next = || {
                made += 1;
                if (made % 2 == 1) == card_first { on_card() } else { on_processor() }
            };
            import_continues(next, &model.geometry, 7, 700, 40);
        }
    }
}

#[test]
fn proposals_are_those_of_the_cpu() {
    if !card() {
        return;
    }
    let model = tiny();
    for kv in KV_TYPES {
        let options = CpuOptions { kv, ..CpuOptions::default() };
        let mut cpu = CpuExecutor::new(model.clone(), options).expect("loads");
        cpu.attach_draft(tiny_draft()).expect("fits");
        let mut cuda = drafting(&model, kv);
        for (len, proposals) in [(1, 7), (300, 3), (600, 7)] {
            let ids: Vec<u32> = (0..len).map(|i| (i * 41 + 11) % 4000).collect();
            let expected = draft_logits(&mut cpu, &ids, proposals);
            assert!(expected == draft_logits(cuda.as_mut(), &ids, proposals), "{kv:?}, {len} ids");
        }
    }
}

#[test]
fn proposals_do_not_depend_on_company_and_a_context_left_out_is_blank() {
    if !card() {
        return;
    }
    let model = tiny();
    let g = &model.geometry;
    let layers = g.sliding.iter().filter(|sliding| **sliding).count();
    for kv in KV_TYPES {
        let target_bytes = layers * g.kv_heads * kv.head_bytes(g.head_dim) * muser_kv::BLOCK_LEN;
        draft_invariance(|| drafting(&model, kv), g, 1, 4, 700);
        skipped_context_is_blank(|| drafting(&model, kv), g, target_bytes);
    }
}

/// E8 with pictures: rows of the card are those of the CPU, in whatever slices.
#[test]
fn rows_of_pictures_are_those_of_the_cpu() {
    if !card() {
        return;
    }
    let model = tiny();
    let path = muser_testkit::muse_tiny_projector();
    let projector = Projector::load(path).expect("the projector in the repository loads");
    let mut cpu = CpuExecutor::new(model.clone(), CpuOptions::default()).expect("loads");
    let mut cuda = executor(&model, KvType::Int16);
    for rule in PositionRule::ALL {
        cpu.attach_projector(projector.clone(), rule).expect("fits");
        cuda.attach_projector(projector.clone(), rule).expect("fits");
        assert_eq!(cpu.tower(), cuda.tower());
        for (rows, cols) in [(1, 1), (3, 5), (8, 9), (2, 40)] {
            let bytes = (0..(rows * cols * 28 * 28 * 3) as u64).map(|i| ((i * 2_654_435_761) >> 13) as u8);
            let image = TowerImage { rows, cols, rgb: bytes.collect() };
            let encode = |executor: &mut dyn Executor, time: Duration| {
                let mut rows = Vec::new();
                executor.begin_image(&image).expect("begins");
                while !executor.encode_image(time, &mut rows).expect("goes on") {}
                rows
            };
            let expected = encode(&mut cpu, Duration::ZERO);
            for time in [Duration::ZERO, Duration::from_mins(1)] {
                assert!(encode(cuda.as_mut(), time) == expected, "{rule:?} {rows}x{cols} {time:?}");
            }
        }
    }
}

/// With or without a card: the kernels store digits.
#[test]
fn keys_and_values_in_floats_are_refused_with_what_there_is() {
    let model = tiny();
    for (kv, name) in [(KvType::F16, "f16"), (KvType::F32, "f32")] {
        match CudaExecutor::new(&model, CudaOptions { kv, ..CudaOptions::default() }) {
            Err(CudaError::Unsupported(what)) => {
                assert_eq!(what, format!("KV type {name}, the kernels have 16 and 8"));
            }
            Err(other) => panic!("{other}"),
            Ok(_) => panic!("{kv:?} is not there"),
        }
    }
}

#[test]
fn a_machine_without_a_card_gets_an_error_and_no_panic() {
    if let Err(error) = CudaExecutor::new(&tiny(), CudaOptions { device: 999, ..CudaOptions::default() }) {
        let text = error.to_string();
        assert!(text.contains("driver"), "{text}");
    } else {
        panic!("there is no device 999");
    }
}
