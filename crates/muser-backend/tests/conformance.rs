//! The conformance suite on the scalar reference executor: the suite itself is tested, and the reference keeps the
//! contract that it judges others by.

#![expect(clippy::unwrap_used, reason = "a test may fail that way")]

use std::path::Path;

use muser_backend::{Executor, KvType, ReferenceExecutor, conformance};
use muser_model::Model;

fn model() -> Model {
    Model::load(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/muse-tiny-Q4_K_M.gguf")).unwrap()
}

fn executor(model: &Model, kv_type: KvType) -> Box<dyn Executor> {
    Box::new(ReferenceExecutor::new(model.clone(), kv_type).unwrap())
}

#[test]
fn rows_do_not_meet() {
    let model = model();
    for (seed, kv_type) in [(1, KvType::F32), (2, KvType::F16)] {
        conformance::row_invariance(|| executor(&model, kv_type), &model.geometry, seed, 3, 24);
    }
}

#[test]
fn imported_blocks_continue() {
    let model = model();
    conformance::import_continues(|| executor(&model, KvType::F16), &model.geometry, 3, 21, 4);
}

#[test]
fn what_leaves_holds_no_rows_of_another_sequence() {
    let model = model();
    for kv_type in [KvType::F32, KvType::F16] {
        conformance::cleared_rows_tell_nothing(|| executor(&model, kv_type), &model.geometry, 4, &[1, 3]);
    }
}

#[test]
fn agreement_measures_error_divergence_and_the_first_choice() {
    let reference = [0.0, 1.0, 2.0, 5.0, 5.0, 1.0];
    let same = conformance::agreement(&reference, &reference, 3);
    assert_eq!((same.max_error, same.mean_kl, same.same_argmax), (0.0, 0.0, 1.0));
    let other = conformance::agreement(&reference, &[0.0, 1.0, 2.5, 1.0, 5.0, 5.0], 3);
    assert!(
        (other.max_error - 0.8).abs() < 1e-9 && other.mean_kl > 0.1 && other.same_argmax == 0.5,
        "{other:?}"
    );
    let broken = conformance::agreement(&reference, &[f32::NAN; 6], 3);
    assert!(broken.max_error.is_nan() && broken.mean_kl.is_nan());
}
