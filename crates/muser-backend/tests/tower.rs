//! The scalar tower against transformers 5.24 in f64.
//!
//! The committed rows come from `golden/tower.py`, which agrees with transformers to 4e-13 and needs only a projector file; the
//! projectors are synthetic, a function of their seed. `MUSER_VISION_GOLDEN` may name a folder with `vision-tiny.mmproj.gguf`,
//! `vision-tiny.text.gguf` and `vision-tiny.safetensors`, made by transformers itself: then these are checked too, pictures, rows,
//! and the text model's logits through a picture.

#![expect(clippy::unwrap_used, reason = "a test may fail that way")]

mod support;

use muser_backend::TowerExecutor as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use muser_backend::arith::vision::{self, PositionRule};
use muser_backend::{
    ExecError, Executor, KvCapacity, KvType, ReferenceExecutor, Row, RowInput, RowWants, StepBatch,
    StepOutput, TowerImage,
};
use muser_gguf::{GgmlType, GgufFile};
use muser_kv::BlockId;
use muser_model::synth::{Mix, Preset, projector_to_bytes, projector_with_adapter, tiny};
use muser_model::{Model, Projector, VisionConfig};
use support::Tensors;

/// Largest error allowed of a row, relative to the largest magnitude of the picture's rows.
const ROWS: f64 = 5e-6;
/// The same of logits through a picture.
const LOGITS: f64 = 5e-5;
const SIZES: [(usize, usize); 4] = [(1, 1), (4, 3), (1, 5), (5, 7)];

/// Five layers, so that a full one (the fourth) is not the last, and windows of 6x6 patches.
fn towers() -> [(&'static str, VisionConfig); 2] {
    let base = VisionConfig { layers: 5, ffn: 320, image: 168, projection: 256, ..VisionConfig::released() };
    [
        ("heads-of-96", VisionConfig { hidden: 192, heads: 2, ..base.clone() }),
        ("heads-of-64", VisionConfig { hidden: 256, heads: 4, ..base }),
    ]
}

fn projector_bytes(config: &VisionConfig) -> Vec<u8> {
    // The golden files have adapters of whole 64s.
    let adapter = (config.hidden * 8 / 3).next_multiple_of(64);
    projector_with_adapter(config, adapter, Mix::Uniform(GgmlType::F32), 7).unwrap()
}

fn executor() -> ReferenceExecutor {
    let bytes = tiny(&Preset::Tiny.geometry(), GgmlType::F32, 1).unwrap();
    let model = Model::from_gguf(Arc::new(GgufFile::from_bytes(bytes).unwrap())).unwrap();
    ReferenceExecutor::new(model, KvType::F32).unwrap()
}

fn image(rows: usize, cols: usize) -> TowerImage {
    let bytes = (0..(rows * cols * 28 * 28 * 3) as u64).map(|i| ((i * 2_654_435_761) >> 13) as u8);
    TowerImage { rows, cols, rgb: bytes.collect() }
}

fn rows(executor: &mut dyn Executor, image: &TowerImage) -> Vec<f32> {
    let mut rows = Vec::new();
    executor.begin_image(image).unwrap();
    while !executor.encode_image(Duration::ZERO, &mut rows).unwrap() {}
    rows
}

/// Largest difference over the largest magnitude.
fn apart(found: impl Iterator<Item = f32>, expected: &[f64]) -> f64 {
    let top = expected.iter().fold(0.0f64, |top, v| top.max(v.abs()));
    let (mut worst, mut count) = (0.0f64, 0);
    for (found, expected) in found.zip(expected) {
        worst = worst.max((f64::from(found) - expected).abs());
        count += 1;
    }
    assert_eq!(count, expected.len(), "fewer values than expected");
    worst / top
}

#[test]
fn rows_are_those_of_the_golden_file() {
    let golden = Tensors::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/tower.safetensors"));
    for (name, config) in towers() {
        let file = Arc::new(GgufFile::from_bytes(projector_bytes(&config)).unwrap());
        for rule in PositionRule::ALL {
            let mut executor = executor();
            executor.attach_projector(Projector::from_gguf(Arc::clone(&file)).unwrap(), rule).unwrap();
            for (height, width) in SIZES {
                // For square pictures the rules agree.
                let known = if height == width { PositionRule::Raster } else { rule };
                let key = format!("{name}.{height}x{width}.{}", known.name());
                let expected: Vec<f64> = golden.f32(&key).into_iter().map(f64::from).collect();
                let found = rows(&mut executor, &image(height, width));
                assert_eq!(found.len(), height * width * 256, "{key}");
                let error = apart(found.into_iter().step_by(4), &expected);
                assert!(error < ROWS, "{key}: {error:.2e}");
            }
        }
    }
}

#[test]
#[ignore = "writes the projectors that golden/tower.py reads"]
fn write_projectors() {
    let dir = PathBuf::from(std::env::var_os("MUSER_TOWER_DIR").unwrap());
    for (name, config) in towers() {
        std::fs::write(dir.join(format!("{name}.gguf")), projector_bytes(&config)).unwrap();
    }
}

#[test]
fn without_a_projector_or_with_a_wrong_one_nothing_is_encoded() {
    let mut executor = executor();
    assert!(executor.tower().is_none());
    assert!(matches!(executor.begin_image(&image(1, 1)), Err(ExecError::InvalidBatch(_))));
    let wide = VisionConfig { projection: 512, ..Preset::Tiny.projector() };
    let attach = |executor: &mut ReferenceExecutor, config: &VisionConfig| {
        let bytes = projector_to_bytes(config, Mix::Uniform(GgmlType::F32), 1).unwrap();
        let projector = Projector::from_gguf(Arc::new(GgufFile::from_bytes(bytes).unwrap())).unwrap();
        executor.attach_projector(projector, PositionRule::Raster)
    };
    let error = attach(&mut executor, &wide).unwrap_err().to_string();
    assert!(error.contains("expected 256, the width of the text model, found 512"), "{error}");
    attach(&mut executor, &Preset::Tiny.projector()).unwrap();
    let info = executor.tower().unwrap().clone();
    assert_eq!((info.unit, info.width), (28, 256));
    assert!(info.route.starts_with("scalar-tower-1/raster/"), "{}", info.route);
    let mut short = image(1, 2);
    short.cols = 3;
    assert!(matches!(executor.begin_image(&short), Err(ExecError::InvalidBatch(_))));
    // Work that was given up is gone.
    executor.begin_image(&image(1, 2)).unwrap();
    executor.drop_image();
    assert!(executor.encode_image(Duration::ZERO, &mut Vec::new()).is_err());
    // Another projector is another route.
    attach(&mut executor, &VisionConfig { norm_eps: 1e-6, ..Preset::Tiny.projector() }).unwrap();
    assert_ne!(executor.tower().unwrap().route, info.route);
}

/// Logits of a prompt in which `patch` ids stand for the rows of `embeddings`.
fn logits(model: &Model, ids: &[u32], patch: u32, embeddings: &[f32]) -> Vec<f32> {
    let mut executor = ReferenceExecutor::new(model.clone(), KvType::F32).unwrap();
    executor.allocate_kv(KvCapacity { full: 1, sliding: 1 }).unwrap();
    let (mut batch, mut out) = (StepBatch::default(), StepOutput::default());
    batch.push_seq(0, &[BlockId(0)], 0, &[BlockId(0)]);
    let mut images = embeddings.chunks(model.geometry.hidden);
    for id in ids {
        let input = if *id == patch {
            RowInput::Embedding(batch.push_embedding(images.next().unwrap()))
        } else {
            RowInput::Token(*id)
        };
        batch.push_row(Row { input, wants: RowWants { logits: true, ..RowWants::default() } });
    }
    executor.step(&batch, &mut out).unwrap();
    out.logits
}

#[test]
fn everything_is_that_of_transformers() {
    let Some(dir) = std::env::var_os("MUSER_VISION_GOLDEN").map(PathBuf::from) else {
        muser_testkit::skip(
            muser_testkit::Need::Data,
            "a whole tower is compared where MUSER_VISION_GOLDEN names the folder of its golden rows",
        );
        return;
    };
    let golden = Tensors::open(&dir.join("vision-tiny.safetensors"));
    let projector = Projector::load(dir.join("vision-tiny.mmproj.gguf")).unwrap();
    let model = Model::load(dir.join("vision-tiny.text.gguf")).unwrap();
    let values = vision::values_of_bytes(projector.config.mean, projector.config.std);
    assert_eq!(values[0].as_slice(), golden.f32("value_of_byte"));
    for rule in PositionRule::ALL {
        let mut executor = ReferenceExecutor::new(model.clone(), KvType::F32).unwrap();
        executor.attach_projector(projector.clone(), rule).unwrap();
        for i in 0..11 {
            let grid: Vec<usize> = golden.i64(&format!("{i}.grid")).iter().map(|n| *n as usize).collect();
            let rgb: Vec<u8> = golden.u8(&format!("{i}.resized"));
            if golden.has(&format!("{i}.patches")) {
                let expected = golden.f32(&format!("{i}.patches"));
                let mut found = vec![0.0; expected.len()];
                for (n, out) in found.chunks_mut(588).enumerate() {
                    vision::patch(&rgb, grid[1], 14, (n / grid[1], n % grid[1]), &values, out);
                }
                assert!(found == expected, "{i}: patches");
            }
            let image = TowerImage { rows: grid[0] / 2, cols: grid[1] / 2, rgb: rgb.into() };
            let expected = golden.f64(&format!("{i}.rows.{}", rule.name()));
            let found = rows(&mut executor, &image);
            let error = apart(found.iter().copied(), &expected);
            println!("picture {i}, {}: {error:.2e}", rule.name());
            assert!(error < ROWS, "{i} {}: {error:.2e}", rule.name());
            if i == 4 {
                let all = logits(&model, &golden.u32("text.ids"), 319, &found);
                let error = apart(all.into_iter(), &golden.f64(&format!("text.logits.{}", rule.name())));
                println!("logits, {}: {error:.2e}", rule.name());
                assert!(error < LOGITS, "logits {}: {error:.2e}", rule.name());
            }
        }
    }
}
