//! What needs a card: kernels against the scalar definition, row invariance, agreement with the reference.
//!
//! Where there is none, each test is in the list of those that did not run, which `cargo xtask test` prints.

use std::path::Path;

use muser_backend::conformance::{
    cleared_rows_tell_nothing, draft_invariance, draft_logits, import_continues, row_invariance,
    skipped_context_is_blank,
};
use muser_backend::{Executor, KvType};
use muser_cpu::{CpuExecutor, CpuOptions};
use muser_cuda::{Attention, CudaExecutor, CudaOptions, device, selftest};
use muser_model::{Draft, Model};

fn card() -> bool {
    match device::probe(0) {
        Ok(_) => true,
        Err(error) => {
            eprintln!("SKIPPED: {error}");
            false
        }
    }
}

fn tiny() -> Model {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/muse-tiny-Q4_K_M.gguf");
    Model::load(path).expect("the model in the repository loads")
}

fn executor(model: &Model) -> Box<dyn Executor> {
    Box::new(
        CudaExecutor::new(model, CudaOptions { max_rows: 512, ..CudaOptions::default() }).expect("loads"),
    )
}

fn tiny_draft() -> Draft {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/muse-tiny-dflash-Q8_0.gguf");
    Draft::load(path).expect("the draft in the repository loads")
}

fn drafting(model: &Model, attention: Attention) -> Box<dyn Executor> {
    let options = CudaOptions { max_rows: 512, attention, ..CudaOptions::default() };
    let mut executor = CudaExecutor::new(model, options).expect("loads");
    executor.attach_draft(tiny_draft()).expect("fits");
    Box::new(executor)
}

#[test]
fn products_equal_the_scalar_definition() {
    if card() {
        let report = selftest::run(0).expect("every kernel is right");
        assert!(report.compared > 100_000);
    }
}

#[test]
fn rows_do_not_depend_on_the_batch() {
    if card() {
        let model = tiny();
        row_invariance(|| executor(&model), &model.geometry, 1, 4, 700);
    }
}

/// K and V in digits: the same invariances, and blocks in the layout of every backend.
#[test]
fn attention_in_integers_keeps_the_contract() {
    if !card() {
        return;
    }
    let model = tiny();
    for kv in [KvType::Int16, KvType::Int8] {
        let fresh = || {
            let options = CudaOptions { max_rows: 512, kv, ..CudaOptions::default() };
            Box::new(CudaExecutor::new(&model, options).expect("loads")) as Box<dyn Executor>
        };
        row_invariance(fresh, &model.geometry, 1, 4, 700);
        import_continues(fresh, &model.geometry, 2, 700, 40);
        cleared_rows_tell_nothing(fresh, &model.geometry, 3, &[1, 100, 255, 259]);
    }
}

/// E8: a prefix that the processor computed goes on upon the card as if it had computed it, and the reverse.
#[test]
fn blocks_move_between_processor_and_card() {
    if !card() {
        return;
    }
    let model = tiny();
    for kv in [KvType::Int16, KvType::Int8] {
        let on_card = || {
            let options = CudaOptions { max_rows: 512, kv, ..CudaOptions::default() };
            Box::new(CudaExecutor::new(&model, options).expect("loads")) as Box<dyn Executor>
        };
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
fn an_imported_prefix_continues_with_the_same_bits() {
    if card() {
        let model = tiny();
        import_continues(|| executor(&model), &model.geometry, 2, 700, 40);
    }
}

#[test]
fn what_leaves_the_card_holds_no_rows_of_another_sequence() {
    if card() {
        let model = tiny();
        cleared_rows_tell_nothing(|| executor(&model), &model.geometry, 3, &[1, 100, 255, 259]);
        cleared_rows_tell_nothing(
            || drafting(&model, Attention::Fast),
            &model.geometry,
            4,
            &[1, 100, 255, 259],
        );
    }
}

#[test]
fn proposals_are_those_of_the_cpu() {
    if card() {
        let model = tiny();
        let mut cpu = CpuExecutor::new(model.clone(), CpuOptions::default()).expect("loads");
        cpu.attach_draft(tiny_draft()).expect("fits");
        let mut cuda = drafting(&model, Attention::Exact);
        for (len, proposals) in [(1, 7), (300, 3), (600, 7)] {
            let ids: Vec<u32> = (0..len).map(|i| (i * 41 + 11) % 4000).collect();
            let expected = draft_logits(&mut cpu, &ids, proposals);
            assert!(expected == draft_logits(cuda.as_mut(), &ids, proposals), "{len} ids");
        }
    }
}

#[test]
fn proposals_do_not_depend_on_company_and_a_context_left_out_is_blank() {
    if card() {
        let model = tiny();
        let g = &model.geometry;
        let layers = g.sliding.iter().filter(|sliding| **sliding).count();
        let target_bytes = layers * 2 * g.kv_width() * muser_kv::BLOCK_LEN * 2;
        draft_invariance(|| drafting(&model, Attention::Fast), g, 1, 4, 700);
        skipped_context_is_blank(|| drafting(&model, Attention::Fast), g, target_bytes);
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
