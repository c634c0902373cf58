//! Everything about a device in one run: adapters, arithmetic, bits against the CPU backend, times.
//!
//! ```text
//! cargo bench -p muser-bench --bench wgpu_check -- [--adapter NAME|N] [--model FILE]... [--synth 0.1b|1b|30b] [--depth N] [--file FILE]
//! ```
//!
//! Models are compared with the CPU backend by hashes of logits, K and V; `--synth` and `--file` are timed alone.
#![expect(clippy::print_stdout, reason = "its output is what it is for")]

use std::sync::Arc;
use std::time::Instant;

use muser_backend::{Executor, KvCapacity, KvType, Row, RowInput, RowWants, StepBatch, StepOutput};
use muser_cpu::{CpuExecutor, CpuOptions};
use muser_gguf::{GgmlType, GgufFile};
use muser_kv::{BLOCK_LEN, BlockId, KvGroup};
use muser_model::synth::{self, Mix, Preset, SynthOptions};
use muser_model::{Geometry, Model};
use muser_wgpu::{Gpu, GpuOptions, WgpuExecutor, WgpuOptions, adapters};

type Failure = Box<dyn std::error::Error>;

struct Arguments {
    adapter: Option<String>,
    models: Vec<String>,
    files: Vec<String>,
    synth: Option<Preset>,
    depth: usize,
}

fn arguments() -> Result<Arguments, Failure> {
    let mut found = Arguments { adapter: None, models: Vec::new(), files: Vec::new(), synth: None, depth: 0 };
    let mut words = muser_bench::arguments();
    while let Some(word) = words.next() {
        let value = words.next().ok_or_else(|| format!("{word}: a value is missing"))?;
        match &word[..] {
            "--adapter" => found.adapter = Some(value),
            "--model" => found.models.push(value),
            "--file" => found.files.push(value),
            "--depth" => found.depth = value.parse()?,
            "--synth" => found.synth = Some(Preset::from_name(&value).ok_or("no such preset")?),
            _ => return Err(format!("{word}: no such option").into()),
        }
    }
    Ok(found)
}

fn main() -> Result<(), Failure> {
    let arguments = arguments()?;
    for facts in adapters() {
        println!("adapter {}: {facts:?}", facts.index);
    }
    let start = Instant::now();
    let gpu = Gpu::open(&GpuOptions { adapter: arguments.adapter.clone(), ..GpuOptions::default() })?;
    println!("taken: {} after {:.2} s", gpu.facts().name, start.elapsed().as_secs_f64());
    println!("operations: {:?}", gpu.probe().operations);
    for (what, differ) in &gpu.probe().tried {
        println!("  {what}: {differ} differ");
    }
    if let Some(rate) = gpu.read_bandwidth()? {
        println!("plain read: {:.0} GB/s", rate / 1e9);
    }
    types(&gpu)?;
    for path in &arguments.models {
        let model = Model::load(path)?;
        let options = GpuOptions { adapter: arguments.adapter.clone(), ..GpuOptions::default() };
        let start = Instant::now();
        let tested = Gpu::open_for(&options, &model, KvType::Int16)?;
        let (compared, plain) = (tested.compared().unwrap_or(0), tested.is_plain());
        let seconds = start.elapsed().as_secs_f64();
        println!(
            "self-test for {path}: {compared} values equal, plain kernels only: {plain}, {seconds:.2} s"
        );
        for kv in [KvType::Int16, KvType::Int8] {
            compare(path, &gpu, &model, kv, 300, &[130, 1, 1, 16, 3])?;
        }
    }
    for path in &arguments.files {
        times(path, &gpu, Model::load(path)?, arguments.depth)?;
    }
    if let Some(preset) = arguments.synth {
        let mix = Mix::from_name("q4_k_m").ok_or("no such mix")?;
        let bytes = synth::to_bytes(&SynthOptions::new(preset, mix))?;
        let model = Model::from_gguf(Arc::new(GgufFile::from_bytes(bytes)?))?;
        times("synthetic", &gpu, model, arguments.depth)?;
    }
    Ok(())
}

/// A small model of every type.
fn types(gpu: &Arc<Gpu>) -> Result<(), Failure> {
    let geometry = Geometry { sliding: vec![true, false], window: 40, ffn: 512, ..Preset::Tiny.geometry() };
    for ty in GgmlType::all().filter(|ty| ty.is_decodable() && *ty != GgmlType::Q8_K) {
        let bytes = synth::tiny(&geometry, ty, 3)?;
        let model = Model::from_gguf(Arc::new(GgufFile::from_bytes(bytes)?))?;
        compare(ty.name(), gpu, &model, KvType::Int16, 60, &[3, 1, 16, 9])?;
    }
    Ok(())
}

/// Hash of logits, K and V.
fn hash(executor: &mut dyn Executor, ids: &[u32], chunks: &[usize]) -> Result<String, Failure> {
    let blocks = ids.len().div_ceil(BLOCK_LEN) as u32;
    executor.allocate_kv(KvCapacity { full: blocks, sliding: blocks })?;
    let table: Vec<BlockId> = (0..blocks).map(BlockId).collect();
    let (mut batch, mut out, mut hasher) =
        (StepBatch::default(), StepOutput::default(), blake3::Hasher::new());
    let (mut from, mut chunk) = (0, chunks.iter().cycle());
    while from < ids.len() {
        let count = chunk.next().map_or(1, |count| *count).min(ids.len() - from);
        step(executor, &mut batch, &mut out, &table, from, &ids[from..from + count], true)?;
        out.logits.iter().for_each(|value| {
            hasher.update(&value.to_le_bytes());
        });
        from += count;
    }
    for group in [KvGroup::Full, KvGroup::Sliding] {
        let mut bytes = vec![0; executor.info().block_bytes(group)];
        for block in &table {
            executor.export_block(group, *block, &mut bytes)?;
            hasher.update(&bytes);
        }
    }
    Ok(hasher.finalize().to_hex()[..16].to_owned())
}

fn step(
    executor: &mut dyn Executor,
    batch: &mut StepBatch,
    out: &mut StepOutput,
    table: &[BlockId],
    from: usize,
    ids: &[u32],
    logits: bool,
) -> Result<(), Failure> {
    batch.clear();
    batch.push_seq(from as u32, table, 0, table);
    for (i, id) in ids.iter().enumerate() {
        let wants = RowWants { logits, argmax: !logits && i + 1 == ids.len(), ..RowWants::default() };
        batch.push_row(Row { input: RowInput::Token(*id), wants });
    }
    Ok(executor.step(batch, out)?)
}

fn compare(
    what: &str,
    gpu: &Arc<Gpu>,
    model: &Model,
    kv: KvType,
    count: usize,
    chunks: &[usize],
) -> Result<(), Failure> {
    let ids: Vec<u32> = (0..count).map(|i| ((i * 37 + 11) % model.geometry.vocab) as u32).collect();
    let mut cpu = CpuExecutor::new(model.clone(), CpuOptions { kv, ..CpuOptions::default() })?;
    let expected = hash(&mut cpu, &ids, chunks)?;
    let mut executor = WgpuExecutor::new(gpu, model.clone(), WgpuOptions { max_rows: 256, kv })?;
    let start = Instant::now();
    let found = hash(&mut executor, &ids, chunks)?;
    let verdict = if found == expected { "equal" } else { "DIFFERENT" };
    println!(
        "{what}, KV {}: {found} {verdict} ({expected} on the processor), {:.2} s",
        kv.name(),
        start.elapsed().as_secs_f64()
    );
    Ok(())
}

/// Times of steps, best of a few.
fn times(what: &str, gpu: &Arc<Gpu>, model: Model, depth: usize) -> Result<(), Failure> {
    let start = Instant::now();
    let mut executor = WgpuExecutor::new(gpu, model, WgpuOptions { max_rows: 512, kv: KvType::Int16 })?;
    println!(
        "{what}: loaded after {:.2} s, {:.3} GB a token",
        start.elapsed().as_secs_f64(),
        executor.weight_bytes() as f64 / 1e9
    );
    let blocks = ((depth + 2048) / BLOCK_LEN + 17) as u32;
    let start = Instant::now();
    executor.allocate_kv(KvCapacity { full: blocks, sliding: blocks })?;
    println!("  kernels and bindings: {:.2} s", start.elapsed().as_secs_f64());
    let table: Vec<BlockId> = (0..blocks).map(BlockId).collect();
    let (mut batch, mut out) = (StepBatch::default(), StepOutput::default());
    for rows in [1, 2, 4, 8, 16, 128, 512] {
        let ids: Vec<u32> = (0..rows as u32).map(|i| i * 7 % 200).collect();
        let mut best = f64::MAX;
        let begun = Instant::now();
        for _ in 0..8 {
            let start = Instant::now();
            step(&mut executor, &mut batch, &mut out, &table, depth, &ids, false)?;
            best = best.min(start.elapsed().as_secs_f64());
            if begun.elapsed().as_secs_f64() > 20.0 {
                break;
            }
        }
        println!("  {rows} rows at {depth}: {:.3} ms, {:.1} tok/s", best * 1e3, rows as f64 / best);
    }
    Ok(())
}
