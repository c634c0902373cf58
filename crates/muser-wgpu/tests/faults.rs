//! Each fault provoked once: it is found by probe or self-test, or changes no bit.

use std::sync::Arc;

use muser_backend::{
    ExecError, Executor, KvCapacity, KvType, Row, RowInput, RowWants, StepBatch, StepOutput,
};
use muser_gguf::{GgmlType, GgufFile};
use muser_kv::BlockId;
use muser_model::{Geometry, Model, synth};
use muser_wgpu::{Form, Gpu, GpuOptions, WgpuError, WgpuExecutor, WgpuOptions, adapters};

/// Options for the device of all tests; none is said.
fn options() -> Option<GpuOptions> {
    let adapter = std::env::var("MUSER_WGPU_ADAPTER").unwrap_or_else(|_| "llvmpipe".to_owned());
    let options = GpuOptions { adapter: Some(adapter), ..GpuOptions::default() };
    match Gpu::open(&options) {
        Ok(_) => Some(options),
        Err(error) => {
            muser_testkit::skip(muser_testkit::Need::Vulkan, error);
            None
        }
    }
}

fn model(ty: GgmlType) -> Model {
    let tiny = synth::Preset::Tiny.geometry();
    let geometry = Geometry { sliding: vec![true, false], window: 40, ffn: 512, ..tiny };
    let bytes = synth::tiny(&geometry, ty, 3).expect("a file");
    Model::from_gguf(Arc::new(GgufFile::from_bytes(bytes).expect("valid"))).expect("a model")
}

fn mutated(options: &GpuOptions, from: &str, to: &str) -> GpuOptions {
    GpuOptions { mutations: vec![(from.to_owned(), to.to_owned())], ..options.clone() }
}

#[test]
fn wrong_operations_are_found_and_mended() {
    let Some(options) = options() else { return };
    let mutations = [
        // Multiplied and added, rounded twice.
        ("fma(a, b, c)", "(a * b + c)"),
        // A sum that was reordered over a third value.
        ("pin(a + b)", "pin((a + 0.3f) + (b - 0.3f))"),
        // A reciprocal in place of a quotient; a root by its reciprocal. Software compiles what mends them for a minute.
        ("pin(a / b)", "pin(a * (1.0f / b))"),
        ("pin(sqrt(a))", "pin(a * (1.0f / sqrt(a)))"),
    ];
    let count = muser_testkit::long_or(4, 2);
    let mutations =
        mutations[..count].iter().map(|(from, to)| ((*from).to_owned(), (*to).to_owned())).collect();
    let gpu = Gpu::open(&GpuOptions { mutations, ..options.clone() }).expect("mended");
    let found = gpu.probe().operations;
    let forms = [("fma", found.fma), ("add", found.add), ("divide", found.divide), ("root", found.root)];
    for (what, form) in &forms[..count] {
        assert_ne!(*form, Form::Native, "{what}: {:?}", gpu.probe().tried);
    }
    // What cannot be mended is refused, with its name.
    match Gpu::open(&mutated(&options, "let top = select(31", "let top = 1 + select(31")) {
        Err(WgpuError::SelfTest { kernel, .. }) => assert!(kernel.contains("exact_fma"), "{kernel}"),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("wrong integers were taken"),
    }
}

#[test]
fn a_wrong_kernel_is_replaced_or_the_adapter_refused() {
    let Some(options) = options() else { return };
    let model = model(GgmlType::Q4_K);
    let right = Gpu::open_for(&options, &model, KvType::Int16).expect("right");
    assert!(!right.is_plain() && right.compared().is_some_and(|compared| compared > 10_000));
    let options = GpuOptions { operations: Some(right.probe().operations), ..options };
    // Only in the kernel of few rows.
    let few =
        Gpu::open_for(&mutated(&options, "byte(ml, 1u) * y.y", "byte(ml, 1u) * y.x"), &model, KvType::Int16);
    assert!(few.expect("the plain kernel is right").is_plain());
    // In attention, which has no other body.
    match Gpu::open_for(&mutated(&options, "exponent - 13u", "exponent - 12u"), &model, KvType::Int16) {
        Err(WgpuError::SelfTest { kernel, what }) => {
            assert!(kernel.contains("Q4_K") && what.contains("expected"), "{kernel}: {what}");
        }
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("wrong attention was taken"),
    }
}

fn step(executor: &mut dyn Executor) -> Result<Vec<u32>, ExecError> {
    executor.allocate_kv(KvCapacity { full: 1, sliding: 1 })?;
    let (mut batch, mut out) = (StepBatch::default(), StepOutput::default());
    batch.push_seq(0, &[BlockId(0)], 0, &[BlockId(0)]);
    for id in 0..5 {
        let wants = RowWants { logits: true, ..RowWants::default() };
        batch.push_row(Row { input: RowInput::Token(id), wants });
    }
    executor.step(&batch, &mut out)?;
    Ok(out.logits.iter().map(|value| value.to_bits()).collect())
}

#[test]
fn small_bindings_change_no_bit() {
    let Some(options) = options() else { return };
    let model = model(GgmlType::F16);
    let run = |binding_limit| {
        let gpu = Gpu::open(&GpuOptions { binding_limit, ..options.clone() }).expect("a device");
        let options = WgpuOptions { max_rows: 32, kv: KvType::Int16 };
        let mut executor = WgpuExecutor::new(&gpu, model.clone(), options).expect("an executor");
        step(&mut executor).expect("a step")
    };
    // The vocabulary matrix has 262 KB, K and V of a layer 135.
    let whole = run(None);
    assert!(run(Some(1 << 20)) == whole);
    assert!(run(Some(140_000)) == whole, "slabs of rows");
}

#[test]
fn what_does_not_fit_is_refused_with_figures() {
    let Some(options) = options() else { return };
    let gpu = Gpu::open(&options).expect("a device");
    let mut executor =
        WgpuExecutor::new(&gpu, model(GgmlType::Q4_K), WgpuOptions { max_rows: 32, kv: KvType::Int16 })
            .expect("an executor");
    match executor.allocate_kv(KvCapacity { full: 1 << 20, sliding: 1 }) {
        Err(ExecError::OutOfMemory { needed, available, .. }) => assert!(needed > available),
        other => panic!("{other:?}"),
    }
    step(&mut executor).expect("it lives on");
}

#[test]
fn a_lost_device_is_an_error_and_another_one_can_be_opened() {
    let Some(options) = options() else { return };
    let gpu = Gpu::open(&options).expect("a device");
    let options_of = WgpuOptions { max_rows: 32, kv: KvType::Int16 };
    let mut executor = WgpuExecutor::new(&gpu, model(GgmlType::Q4_K), options_of).expect("an executor");
    let before = step(&mut executor).expect("a step");
    gpu.lose();
    match step(&mut executor) {
        Err(ExecError::Lost { device, .. }) => assert!(!device.is_empty()),
        other => panic!("{other:?}"),
    }
    let gpu = Gpu::open(&options).expect("a device");
    let mut executor = WgpuExecutor::new(&gpu, model(GgmlType::Q4_K), options_of).expect("an executor");
    assert!(step(&mut executor).expect("a step") == before);
}

#[test]
fn an_adapter_that_is_not_there_is_told_from_those_that_are() {
    if options().is_none() {
        return;
    }
    let error = Gpu::open(&GpuOptions { adapter: Some("no such card".into()), ..GpuOptions::default() });
    let text = error.err().expect("not there").to_string();
    assert!(adapters().iter().all(|facts| text.contains(&facts.name)), "{text}");
}
