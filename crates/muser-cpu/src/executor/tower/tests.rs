//! The tower against the scalar reference, and against itself: any instruction set, any number of threads, any slices.

use muser_backend::TowerExecutor as _;
use std::sync::Arc;
use std::time::Duration;

use muser_backend::arith::vision::PositionRule;
use muser_backend::{Executor, KvType, ReferenceExecutor, TowerImage};
use muser_gguf::{GgmlType, GgufFile};
use muser_model::synth::{Mix, Preset, projector_to_bytes, tiny};
use muser_model::{Model, Projector, VisionConfig};

use crate::isa::Isa;
use crate::options::{CpuOptions, Repack};
use crate::{CpuExecutor, ISA_VARIABLE};

fn model() -> Model {
    let bytes = tiny(&Preset::Tiny.geometry(), GgmlType::Q8_0, 1).expect("made");
    Model::from_gguf(Arc::new(GgufFile::from_bytes(bytes).expect("whole"))).expect("fits")
}

/// Five layers, a full one among them that is not the last; windows of 6x6 patches.
fn config(hidden: usize, heads: usize) -> VisionConfig {
    VisionConfig {
        layers: 5,
        hidden,
        heads,
        ffn: 512,
        image: 168,
        projection: 256,
        ..VisionConfig::released()
    }
}

fn projector(config: &VisionConfig, mix: Mix) -> Projector {
    let bytes = projector_to_bytes(config, mix, 3).expect("made");
    Projector::from_gguf(Arc::new(GgufFile::from_bytes(bytes).expect("whole"))).expect("fits")
}

fn image(rows: usize, cols: usize) -> TowerImage {
    let bytes = (0..(rows * cols * 28 * 28 * 3) as u64).map(|i| ((i * 2_654_435_761) >> 13) as u8);
    TowerImage { rows, cols, rgb: bytes.collect() }
}

fn rows(executor: &mut dyn Executor, image: &TowerImage, time: Duration) -> Vec<f32> {
    let mut rows = Vec::new();
    executor.begin_image(image).expect("begins");
    while !executor.encode_image(time, &mut rows).expect("goes on") {}
    rows
}

fn cpu(projector: &Projector, options: CpuOptions) -> CpuExecutor {
    let mut executor = CpuExecutor::new(model(), options).expect("starts");
    executor.attach_projector(projector.clone(), PositionRule::Raster).expect("attaches");
    executor
}

/// The smallest cosine of a row with its reference.
fn least_cosine(found: &[f32], expected: &[f32], width: usize) -> f64 {
    assert_eq!(found.len(), expected.len());
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    let cosine = |(a, b): (&[f32], &[f32])| dot(a, b) / (dot(a, a) * dot(b, b)).sqrt();
    found.chunks(width).zip(expected.chunks(width)).map(cosine).fold(1.0, f64::min)
}

#[test]
fn rows_are_near_the_reference_for_every_kind_of_matrix() {
    let bounds = [
        (config(192, 2), Mix::Uniform(GgmlType::F32), 0.999_999),
        (config(192, 2), Mix::Uniform(GgmlType::BF16), 0.999_999),
        (config(256, 4), Mix::Uniform(GgmlType::F16), 0.999_999),
        (config(256, 4), Mix::Uniform(GgmlType::Q8_0), 0.999),
        (config(256, 4), Mix::Medium(GgmlType::Q4_K), 0.999),
        (config(768, 8), Mix::Medium(GgmlType::Q4_K), 0.999),
    ];
    for (config, mix, bound) in bounds {
        let projector = projector(&config, mix);
        let mut reference = ReferenceExecutor::new(model(), KvType::F32).expect("starts");
        let mut executor = cpu(&projector, CpuOptions { threads: Some(2), ..CpuOptions::default() });
        for rule in PositionRule::ALL {
            for (height, width) in [(1, 1), (4, 3), (5, 7)] {
                reference.attach_projector(projector.clone(), rule).expect("attaches");
                executor.attach_projector(projector.clone(), rule).expect("attaches");
                let image = image(height, width);
                let expected = rows(&mut reference, &image, Duration::ZERO);
                let found = rows(&mut executor, &image, Duration::ZERO);
                let cosine = least_cosine(&found, &expected, config.projection);
                println!("{} {}x{height}: {cosine}", mix.name(), width);
                assert!(cosine >= bound, "{} {config:?} {width}x{height}: {cosine}", mix.name());
            }
        }
    }
}

#[test]
fn threads_instructions_slices_and_repacking_do_not_show() {
    for (config, mix) in [
        (config(192, 2), Mix::Uniform(GgmlType::F32)),
        (config(256, 4), Mix::Uniform(GgmlType::Q8_0)),
        (config(256, 4), Mix::Medium(GgmlType::Q4_K)),
    ] {
        let projector = projector(&config, mix);
        let base = CpuOptions { threads: Some(1), repack: Repack::Off, ..CpuOptions::default() };
        // More patches than a block of keys and than two slices.
        let picture = image(8, 9);
        let expected = rows(&mut cpu(&projector, base), &picture, Duration::from_mins(10));
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
            for (threads, repack, time) in [
                (1, Repack::On, Duration::ZERO),
                (2, Repack::Off, Duration::ZERO),
                (3, Repack::On, Duration::from_millis(5)),
            ] {
                if isa == Isa::Scalar && threads > 1 {
                    continue;
                }
                let options = CpuOptions { isa: Some(isa), threads: Some(threads), repack, ..base };
                let mut executor = cpu(&projector, options);
                // A picture of another size first: what it left behind does not show either.
                rows(&mut executor, &image(3, 2), Duration::ZERO);
                let found = rows(&mut executor, &picture, time);
                assert!(found == expected, "{isa:?}, {threads} threads, {repack:?} ({ISA_VARIABLE})");
            }
        }
    }
}

#[test]
fn a_picture_that_was_given_up_leaves_nothing() {
    let projector = projector(&config(256, 4), Mix::Uniform(GgmlType::Q8_0));
    let options = CpuOptions { threads: Some(2), ..CpuOptions::default() };
    let mut executor = cpu(&projector, options);
    let expected = rows(&mut executor, &image(4, 3), Duration::ZERO);
    executor.begin_image(&image(5, 7)).expect("begins");
    let mut out = Vec::new();
    for _ in 0..4 {
        assert!(!executor.encode_image(Duration::ZERO, &mut out).expect("goes on"));
    }
    executor.drop_image();
    assert!(executor.encode_image(Duration::ZERO, &mut out).is_err());
    // Beginning another one gives the first up, too.
    executor.begin_image(&image(5, 7)).expect("begins");
    assert!(!executor.encode_image(Duration::ZERO, &mut out).expect("goes on"));
    assert_eq!(rows(&mut executor, &image(4, 3), Duration::ZERO), expected);
    let mut short = image(2, 2);
    short.rows = 3;
    assert!(executor.begin_image(&short).is_err());
}
