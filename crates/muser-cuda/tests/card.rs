//! What needs a card: kernels against the scalar definition, row invariance, agreement with the reference.
//!
//! Skipped loudly where there is none.

use std::path::Path;

use muser_backend::Executor;
use muser_backend::conformance::{import_continues, row_invariance};
use muser_cuda::{CudaExecutor, CudaOptions, device, selftest};
use muser_model::Model;

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

#[test]
fn an_imported_prefix_continues_with_the_same_bits() {
    if card() {
        let model = tiny();
        import_continues(|| executor(&model), &model.geometry, 2, 700, 40);
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
