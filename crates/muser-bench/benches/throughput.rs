//! Tokens per second at 1, 2, 4, ... sequences together on the CPU, and the sampler's cost on a large vocabulary.
//!
//! `cargo bench -p muser-bench --bench throughput -- [MODEL] [MAX_SEQUENCES]`

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use muser_cpu::{CpuExecutor, CpuOptions};
use muser_engine::{
    Engine, EngineConfig, Event, Request, SamplingParams,
    sampler::{DrawKey, Sampler},
};
use muser_model::Model;

const TOKENS: u32 = 128;

#[expect(clippy::print_stdout, reason = "a measurement for people")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = muser_bench::arguments();
    let bundled = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/muse-tiny-Q4_K_M.gguf");
    let path = arguments.next().map_or_else(|| PathBuf::from(bundled), PathBuf::from);
    let most: usize = arguments.next().map_or(Ok(8), |text| text.parse())?;
    let mut alone = 0.0;
    let mut sequences = 1;
    while sequences <= most {
        let (rate, in_steps) = tokens_per_second(&path, sequences)?;
        if sequences == 1 {
            alone = rate;
        }
        let times = rate / alone;
        println!(
            "{sequences:2} sequences: {rate:8.1} tokens/s, {times:.2} times one, {in_steps:.1} % in the executor"
        );
        sequences *= 2;
    }
    for (name, params) in [
        ("greedy", SamplingParams::greedy()),
        ("defaults (top-k 64, top-p 0.95)", SamplingParams::default()),
        ("top-p 0.95 alone", SamplingParams { top_k: 0, ..SamplingParams::default() }),
        ("no filter", SamplingParams { top_k: 0, top_p: 1.0, ..SamplingParams::default() }),
    ] {
        println!("sampling 202,048 logits, {name}: {:.0} us", sampling_cost(&params).as_secs_f64() * 1e6);
    }
    Ok(())
}

/// Tokens decoded per second while `sequences` sequences decode together, and the percentage of time in the executor.
fn tokens_per_second(
    path: &std::path::Path,
    sequences: usize,
) -> Result<(f64, f64), Box<dyn std::error::Error>> {
    let model = Model::load(path)?;
    let geometry = model.geometry.clone();
    let executor = CpuExecutor::new(model, CpuOptions::default())?;
    let config = EngineConfig { parallel: sequences, ..EngineConfig::default() };
    let engine = Engine::spawn(Box::new(executor), geometry.clone(), config)?;
    let mut best = (0.0f64, 0.0f64);
    for round in 0..6 {
        let mut submissions = Vec::new();
        for i in 0..sequences {
            let prompt = (0..16)
                .map(|k| ((round * 1000 + i * 100 + k * 7) % geometry.vocab) as u32)
                .collect::<Vec<_>>();
            let request = Request {
                max_tokens: Some(TOKENS),
                sampling: SamplingParams::greedy(),
                ..Request::new(prompt, Vec::new())
            };
            submissions.push(engine.submit(request)?);
        }
        // From the moment when all have begun, so that prefill does not count.
        for submission in &mut submissions {
            while !matches!(submission.recv(), Some(Event::Token(_)) | None) {}
        }
        let start = Instant::now();
        let before = engine.metrics();
        for submission in &mut submissions {
            while submission.recv().is_some() {}
        }
        let (after, seconds) = (engine.metrics(), start.elapsed().as_secs_f64());
        let rate = (after.generated_tokens - before.generated_tokens) as f64 / seconds;
        if rate > best.0 {
            best = (rate, (after.step_time.sum_s - before.step_time.sum_s) / seconds * 100.0);
        }
    }
    Ok(best)
}

fn sampling_cost(params: &SamplingParams) -> Duration {
    let logits: Vec<f32> = (0..202_048u32)
        .map(|i| {
            let u = f64::from(i.wrapping_mul(2_654_435_761) >> 8) / f64::from(1 << 24);
            (12.0 * u.powi(40) - 6.0 * u) as f32
        })
        .collect();
    let mut sampler = Sampler::new();
    let draws = 200u32;
    let mut sum = 0u64;
    let start = Instant::now();
    for position in 0..u64::from(draws) {
        let key = DrawKey { seed: 1, index: 0, position };
        sum += u64::from(sampler.draw(params, &logits, key).unwrap_or(0));
    }
    std::hint::black_box(sum);
    start.elapsed() / draws
}
