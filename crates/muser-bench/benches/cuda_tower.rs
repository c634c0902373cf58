//! The vision tower on a card, as one JSON object on standard output.
//!
//! ```text
//! cuda_tower projector FILE           full-size synthetic projector (1.4 GB)
//! cuda_tower same                     small towers of every kind against the CPU: rows, bit by bit
//! cuda_tower same PROJECTOR           one projector against the CPU
//! cuda_tower kernels                  microseconds of kernels, each by itself, for 896x896 and the released tower
//! cuda_tower speed PROJECTOR [MODEL]  896x896: time, and that of the parts; with MODEL also prefill of as many tokens, and decoding
//!                                     beside pictures
//! ```
#![expect(clippy::print_stdout, reason = "the result is printed")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use muser_backend::arith::vision::PositionRule;
use muser_backend::conformance::Random;
use muser_backend::{
    ExecError, Executor, KvCapacity, Row, RowInput, RowWants, StepBatch, StepOutput, TowerExecutor as _,
    TowerImage, TowerStage,
};
use muser_bench::middle;
use muser_cpu::{CpuExecutor, CpuOptions};
use muser_cuda::{CudaExecutor, CudaOptions};
use muser_gguf::{GgmlType, GgufFile};
use muser_kv::{BLOCK_LEN, BlockId};
use muser_model::synth::{self, Mix, Preset};
use muser_model::{Geometry, Model, Projector, VisionConfig};
use serde_json::{Value, json};

type Outcome = Result<Value, Box<dyn std::error::Error>>;

/// Of the time of steps, the engine gives the tower one part in so many.
const SHARE: u32 = 10;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = muser_bench::arguments().collect();
    let arg = |i: usize| args.get(i).map(String::as_str);
    let result = match (arg(0), arg(1)) {
        (Some("projector"), Some(file)) => {
            let (config, mix) = (VisionConfig::released(), Mix::Medium(GgmlType::Q4_K));
            json!({ "bytes": synth::write_projector(file, &config, mix, 1, &mut |_, _| ())? })
        }
        (Some("same"), None) => small()?,
        (Some("same"), Some(file)) => {
            let projector = Projector::load(file)?;
            let sizes = [(1, 1), (5, 7), (3, 40), (12, 20)];
            json!({ "rows": same(&projector, PositionRule::Raster, &sizes)? })
        }
        (Some("kernels"), _) => {
            json!(muser_cuda::selftest::tower_times(0)?.into_iter().collect::<BTreeMap<_, _>>())
        }
        (Some("speed"), Some(file)) => speed(&Projector::load(file)?, arg(2))?,
        _ => {
            return Err("usage: projector FILE | same [PROJECTOR] | kernels | speed PROJECTOR [MODEL]".into());
        }
    };
    println!("{}", serde_json::to_string_pretty(&json!({ "command": args.join(" "), "result": result }))?);
    Ok(())
}

/// A text model as wide as the projector's rows, and nothing else.
fn narrow_model(hidden: usize) -> Result<Model, Box<dyn std::error::Error>> {
    let g = Geometry {
        hidden,
        ffn: 768,
        heads: 4,
        kv_heads: 2,
        head_dim: 128,
        sliding: vec![true, false],
        ..Preset::Tiny.geometry()
    };
    let file = GgufFile::from_bytes(synth::tiny(&g, GgmlType::Q8_0, 1)?)?;
    Ok(Model::from_gguf(Arc::new(file))?)
}

fn card(model: &Model, max_rows: usize) -> Result<CudaExecutor, Box<dyn std::error::Error>> {
    Ok(CudaExecutor::new(model, CudaOptions { max_rows, ..CudaOptions::default() })?)
}

fn picture(rows: usize, cols: usize, unit: usize) -> TowerImage {
    let mut random = Random::new((rows * 1000 + cols) as u64);
    // Areas and noise: neither flat nor without any structure.
    let width = cols * unit * 3;
    let byte = |i: usize| ((i / width / 9 * 37 + i % width / 50 * 61) & 127) as u8;
    let rgb = (0..rows * cols * unit * unit * 3).map(|i| byte(i) + random.below(128) as u8).collect();
    TowerImage { rows, cols, rgb }
}

fn encode(executor: &mut dyn Executor, image: &TowerImage, time: Duration) -> Result<Vec<f32>, ExecError> {
    let mut rows = Vec::new();
    encode_into(executor, image, time, &mut rows)?;
    Ok(rows)
}

/// Into memory that is there already, as the engine has it.
fn encode_into(
    executor: &mut dyn Executor,
    image: &TowerImage,
    time: Duration,
    rows: &mut Vec<f32>,
) -> Result<(), ExecError> {
    executor.begin_image(image)?;
    while !executor.encode_image(time, rows)? {}
    Ok(())
}

/// Towers of all kinds of matrices and both head sizes.
fn small() -> Outcome {
    let mut compared = BTreeMap::new();
    for (heads, mix) in [
        (12, Mix::Uniform(GgmlType::F32)),
        (8, Mix::Uniform(GgmlType::BF16)),
        (12, Mix::Uniform(GgmlType::F16)),
        (8, Mix::Uniform(GgmlType::Q8_0)),
        (12, Mix::Medium(GgmlType::Q4_K)),
        (8, Mix::Medium(GgmlType::Q4_K)),
        (6, Mix::Uniform(GgmlType::Q5_K)),
    ] {
        let config = VisionConfig {
            layers: 5,
            hidden: 768,
            heads,
            ffn: 1024,
            image: 168,
            projection: 512,
            ..VisionConfig::released()
        };
        let file = GgufFile::from_bytes(synth::projector_to_bytes(&config, mix, 3)?)?;
        let projector = Projector::from_gguf(Arc::new(file))?;
        for rule in PositionRule::ALL {
            let sizes = [(1, 1), (4, 3), (5, 7), (8, 9), (1, 40), (20, 31)];
            let name = format!("{} heads, {}, {}", heads, mix.name(), rule.name());
            compared.insert(name, same(&projector, rule, &sizes)?);
        }
    }
    Ok(json!(compared))
}

/// Rows of both backends; the card in one go, in slices, and after other pictures. Returns how many values were equal.
fn same(
    projector: &Projector,
    rule: PositionRule,
    sizes: &[(usize, usize)],
) -> Result<usize, Box<dyn std::error::Error>> {
    let model = narrow_model(projector.config.projection)?;
    let mut cpu = CpuExecutor::new(model.clone(), CpuOptions::default())?;
    let mut cuda = card(&model, 128)?;
    cpu.attach_projector(projector.clone(), rule)?;
    cuda.attach_projector(projector.clone(), rule)?;
    if cpu.tower() != cuda.tower() {
        return Err(format!("{:?} and {:?}", cpu.tower(), cuda.tower()).into());
    }
    let mut compared = 0;
    for &(rows, cols) in sizes {
        let image = picture(rows, cols, projector.config.unit());
        let expected = encode(&mut cpu, &image, Duration::from_mins(10))?;
        for time in [Duration::from_mins(10), Duration::ZERO] {
            let found = encode(&mut cuda, &image, time)?;
            let other = |(a, b): (&f32, &f32)| a.to_bits() != b.to_bits();
            let differing = expected.iter().zip(&found).filter(|(a, b)| other((a, b))).count();
            if found.len() != expected.len() || differing > 0 {
                let first = expected.iter().zip(&found).position(|(a, b)| other((a, b)));
                let of = |rows: &[f32]| first.and_then(|at| rows.get(at).copied());
                let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(a * b)).sum::<f64>();
                let cosine =
                    dot(&expected, &found) / (dot(&expected, &expected) * dot(&found, &found)).sqrt();
                let what = format!(
                    "{rows}x{cols} tokens, {time:?} a slice: {differing} of {} values differ, the first at {first:?} ({:?}, \
                     expected {:?}), cosine {cosine}",
                    expected.len(),
                    of(&found),
                    of(&expected)
                );
                return Err(what.into());
            }
        }
        compared += expected.len();
    }
    Ok(compared)
}

fn speed(projector: &Projector, model: Option<&str>) -> Outcome {
    let c = &projector.config;
    let loaded = match model {
        Some(path) => Model::load(path)?,
        None => narrow_model(c.projection)?,
    };
    let mut executor = card(&loaded, 2048)?;
    let start = Instant::now();
    executor.attach_projector(projector.clone(), PositionRule::Raster)?;
    let attach_seconds = start.elapsed().as_secs_f64();
    let side = 896 / c.unit();
    let image = picture(side, side, c.unit());
    let mut whole = Vec::new();
    let mut rows = encode(&mut executor, &image, Duration::from_secs(1))?;
    assert!(rows.iter().all(|v| v.is_finite()), "rows are numbers");
    for _ in 0..7 {
        let start = Instant::now();
        encode_into(&mut executor, &image, Duration::from_secs(1), &mut rows)?;
        whole.push(start.elapsed().as_secs_f64() * 1e3);
    }
    let mut report = json!({
        "tokens": image.tokens(), "attach_seconds": attach_seconds, "ms_896x896": middle(&whole), "all_ms": whole,
        "ms_of_parts_in_short_slices": parts(&mut executor, c, &image)?,
    });
    for (name, rows, cols) in [("ms_224x224", 8, 8), ("ms_1092x1932", 39, 69), ("ms_1792x1792", 64, 64)] {
        let image = picture(rows, cols, c.unit());
        encode(&mut executor, &image, Duration::from_secs(1))?;
        let start = Instant::now();
        encode(&mut executor, &image, Duration::from_secs(1))?;
        report[name] = json!(start.elapsed().as_secs_f64() * 1e3);
    }
    if model.is_some() {
        report["prefill_ms"] = json!(prefill(&mut executor, &loaded.geometry, image.tokens())?);
        report["decoding"] = decoding(&mut executor, &loaded.geometry, &image)?;
    }
    Ok(report)
}

/// Milliseconds of each kind of slice, all layers together.
fn parts(executor: &mut CudaExecutor, c: &VisionConfig, image: &TowerImage) -> Outcome {
    let mut sums = BTreeMap::<&str, f64>::new();
    let mut rows = Vec::new();
    let start = Instant::now();
    executor.begin_image(image)?;
    sums.insert("begin", start.elapsed().as_secs_f64() * 1e3);
    let patches = image.tokens() * c.merge * c.merge;
    let mut stage = Some(TowerStage::Embed);
    while let Some(now) = stage {
        let slices =
            if now == TowerStage::Adapt { image.tokens().div_ceil(128) } else { patches.div_ceil(1024) };
        for _ in 0..slices {
            let start = Instant::now();
            executor.encode_image(Duration::ZERO, &mut rows)?;
            let name = match now {
                TowerStage::Embed => "embed",
                TowerStage::Keys(_) => "keys",
                TowerStage::Mix(layer) if c.is_full(layer) => "mix of full layers",
                TowerStage::Mix(_) => "mix of layers with windows",
                TowerStage::Adapt => "adapt",
            };
            *sums.entry(name).or_default() += start.elapsed().as_secs_f64() * 1e3;
        }
        stage = now.next(c.layers);
    }
    Ok(json!(sums))
}

/// A sequence in blocks of its own.
fn batch(g: &Geometry, pos: usize, ids: &[u32]) -> StepBatch {
    let wants = RowWants { logits: false, hidden: false, argmax: true, candidates: 0 };
    let end = (pos + ids.len()).div_ceil(BLOCK_LEN);
    let table: Vec<BlockId> = (0..end as u32).map(BlockId).collect();
    let first = g.first_visible(pos) / BLOCK_LEN;
    let mut batch = StepBatch::default();
    batch.push_seq(pos as u32, &table, first as u32, &table[first..]);
    for (i, &id) in ids.iter().enumerate() {
        let wants = if i + 1 == ids.len() { wants } else { RowWants::default() };
        batch.push_row(Row { input: RowInput::Token(id), wants });
    }
    batch
}

fn prefill(executor: &mut CudaExecutor, g: &Geometry, tokens: usize) -> Result<f64, ExecError> {
    let blocks = (tokens + 4096).div_ceil(BLOCK_LEN) as u32;
    executor.allocate_kv(KvCapacity { full: blocks, sliding: blocks })?;
    let mut random = Random::new(9);
    let (mut times, mut out) = (Vec::new(), StepOutput::default());
    for _ in 0..5 {
        let ids: Vec<u32> = (0..tokens).map(|_| random.below(g.vocab) as u32).collect();
        let start = Instant::now();
        executor.step(&batch(g, 0, &ids), &mut out)?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    Ok(middle(&times))
}

/// Tokens a second of one stream alone, and while the engine's share of the time goes to pictures.
fn decoding(executor: &mut CudaExecutor, g: &Geometry, image: &TowerImage) -> Outcome {
    let (mut out, mut rows, mut pos) = (StepOutput::default(), Vec::new(), 1024);
    let mut run = |executor: &mut CudaExecutor, steps: usize, pictures: bool| -> Result<_, ExecError> {
        let (mut allowance, mut encoded, mut in_work, mut longest) = (0i128, 0usize, false, 0f64);
        let start = Instant::now();
        for _ in 0..steps {
            let step = Instant::now();
            executor.step(&batch(g, pos, &[(pos % g.vocab) as u32]), &mut out)?;
            pos += 1;
            let share = (step.elapsed() / SHARE).as_nanos() as i128;
            allowance = (allowance + share).min(share);
            if pictures && allowance > 0 {
                let work = Instant::now();
                if !in_work {
                    executor.begin_image(image)?;
                    in_work = true;
                }
                let time = Duration::from_nanos(allowance as u64);
                if executor.encode_image(time, &mut rows)? {
                    (encoded, in_work) = (encoded + 1, false);
                }
                allowance -= work.elapsed().as_nanos() as i128;
            }
            longest = longest.max(step.elapsed().as_secs_f64() * 1e3);
        }
        Ok((steps as f64 / start.elapsed().as_secs_f64(), encoded, longest))
    };
    run(executor, 50, false)?;
    let (alone, ..) = run(executor, 400, false)?;
    let (beside, encoded, longest) = run(executor, 800, true)?;
    let (again, ..) = run(executor, 400, false)?;
    executor.drop_image();
    Ok(json!({
        "tok_s_alone": [alone, again], "tok_s_beside_pictures": beside, "pictures": encoded, "longest_step_ms": longest,
        "rate_kept": beside / (0.5 * (alone + again)),
    }))
}
