//! Checks and measurements on a card, as one JSON object on standard output.
//!
//! ```text
//! cuda_check probe
//! cuda_check selftest
//! cuda_check exact MODEL [SEEDS]        row invariance, import, random schedules (E1, E2, E3)
//! cuda_check types                      models of every weight type against the CPU backend: logits and KV bytes
//! cuda_check memory MODEL               asks for more memory than the card has; everything goes on afterwards
//! cuda_check agree MODEL [POSITIONS]    logits against the scalar reference executor
//! cuda_check synth FILE [MIX [PRESET]]  full-size synthetic Q4_K_M file; MIX and PRESET as in `muser synth`
//! cuda_check greedy MODEL [TOKENS]      greedy ids of ten prompts against the CPU backend: ids, logits and KV bytes
//! cuda_check same MODEL [POSITIONS]     random ids against the CPU backend: logits and KV bytes
//! cuda_check speed MODEL NAME COMMIT DATE  decode and prefill against a plain read of device memory, as a receipt
//! cuda_check quick MODEL [few|prefill]  a few of these figures in seconds, to compare variants
//! cuda_check options MODEL              what 16 and 8 bits of K and V cost, and what leaving the logits on the card saves
//! cuda_check step MODEL SEQS ROWS DEPTH two steps of SEQS sequences of ROWS rows, kernel by kernel, for a profiler
//! ```
//! `MUSER_CHECK_PREFILL=fast` does all this with fast prefill, `MUSER_CHECK_KV=8` with K and V in 8 bits
//! (all but `options`, which has both).
#![expect(clippy::print_stdout, reason = "the result is printed")]

use std::sync::{Arc, Mutex};
use std::time::Instant;

use muser_backend::arith::attention::StoredHead;
use muser_backend::conformance::{Random, agreement, import_continues, row_invariance, with_factor_on_table};
use muser_backend::kv_layout::HeadLayout;
use muser_backend::{
    DraftExecutor, ExecError, Executor, ExecutorInfo, KvCapacity, KvType, ReferenceExecutor, Row, RowInput,
    RowWants, StepBatch, StepOutput, delegate_executor,
};
use muser_bench::middle;
use muser_cpu::{CpuExecutor, CpuOptions};
use muser_cuda::{CudaExecutor, CudaOptions, Prefill, device, selftest};
use muser_gguf::{GgmlType, GgufFile};
use muser_kv::{BLOCK_LEN, BlockId, KvGroup};
use muser_model::synth::{self, Mix, Preset, SynthOptions};
use muser_model::{Geometry, Model};
use muser_text::{Specials, Tokenizer};
use serde_json::{Value, json};

type Outcome = Result<Value, Box<dyn std::error::Error>>;

/// Wants of most rows here.
const LOGITS: RowWants = RowWants { logits: true, hidden: false, argmax: false, candidates: 0 };
/// What a greedy decode wants: the most likely id.
const LARGEST: RowWants = RowWants { logits: false, argmax: true, ..LOGITS };

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = muser_bench::arguments().collect();
    let arg = |i: usize| args.get(i).map(String::as_str);
    let number = |i: usize, otherwise: usize| arg(i).map_or(Ok(otherwise), str::parse::<usize>);
    if let (Some("speed"), Some(model)) = (arg(0), arg(1)) {
        let report = speed(&Model::load(model)?)?;
        let receipt = json!({
            "name": arg(2), "commit": arg(3), "date": arg(4), "tree": "clean", "withdrawn": null,
            "command": format!("cargo bench -p muser-bench --bench cuda_check -- speed {model}"),
            "report": report,
        });
        println!("{}", serde_json::to_string_pretty(&receipt)?);
        return Ok(());
    }
    let result = match (arg(0), arg(1)) {
        (Some("probe"), _) => probe()?,
        (Some("selftest"), _) => json!({ "values_compared": selftest::run(0)?.compared, "differing": 0 }),
        (Some("exact"), Some(model)) => exact(&Model::load(model)?, number(2, 2)?)?,
        (Some("options"), Some(model)) => options(&Model::load(model)?)?,
        (Some("types"), _) => types()?,
        (Some("memory"), Some(model)) => memory(&Model::load(model)?)?,
        (Some("agree"), Some(model)) => agree(&Model::load(model)?, number(2, 200)?)?,
        (Some("synth"), Some(file)) => make(file, arg(2), arg(3))?,
        (Some("greedy"), Some(model)) => greedy(&Model::load(model)?, number(2, 64)?)?,
        (Some("same"), Some(model)) => same(&Model::load(model)?, number(2, 1100)?)?,
        (Some("quick"), Some(model)) => quick(&Model::load(model)?, arg(2))?,
        (Some("step"), Some(model)) => {
            step(&Model::load(model)?, number(2, 1)?, number(3, 1)?, number(4, 0)?)?
        }
        _ => {
            return Err(
                "usage: probe | selftest | exact MODEL | types | memory MODEL | agree MODEL | synth FILE [MIX [PRESET]] | greedy MODEL | \
                 same MODEL | speed MODEL NAME COMMIT DATE | quick MODEL | options MODEL | step MODEL SEQS ROWS DEPTH"
                    .into(),
            );
        }
    };
    println!("{}", serde_json::to_string_pretty(&json!({ "command": args.join(" "), "result": result }))?);
    Ok(())
}

/// The default options; with `MUSER_CHECK_PREFILL=fast` in the environment, fast prefill.
fn defaults() -> CudaOptions {
    let fast = std::env::var("MUSER_CHECK_PREFILL").is_ok_and(|v| v == "fast");
    let prefill = if fast { Prefill::Fast } else { Prefill::Exact };
    CudaOptions { prefill, kv: kv_type(), ..CudaOptions::default() }
}

/// The CPU backend with the same KV type.
fn cpu_defaults() -> CpuOptions {
    CpuOptions { kv: kv_type(), ..CpuOptions::default() }
}

fn kv_type() -> KvType {
    match std::env::var("MUSER_CHECK_KV").as_deref() {
        Ok("8") => KvType::Int8,
        _ => KvType::Int16,
    }
}

fn probe() -> Outcome {
    let d = device::probe(0)?;
    Ok(json!({
        "device": d.name, "arch": d.arch, "multiprocessors": d.multiprocessors, "driver": d.driver,
        "memory_bytes": d.total_bytes, "compiler": format!("{:?}", d.compiler),
    }))
}

/// One executor behind many handles: loading a full-size model for each sequence would take minutes.
struct Shared(Arc<Mutex<CudaExecutor>>, ExecutorInfo);

impl Executor for Shared {
    fn info(&self) -> &ExecutorInfo {
        &self.1
    }

    delegate_executor!(self => self.0.lock().expect("not poisoned"); allocate_kv, step, most_candidates, read_bandwidth,
        export_block, clear_rows, import_block, lend_block);
}

impl DraftExecutor for Shared {
    delegate_executor!(self => self.0.lock().expect("not poisoned"); attach_draft, draft, draft_largest,
        has_draft_context);
}

// What lies behind the lock cannot be shown.
muser_backend::no_tower!(Shared);

/// Random schedules; a differing bit panics with its place. With graphs and without.
fn exact(model: &Model, seeds: usize) -> Outcome {
    let g = &model.geometry;
    for graphs in [true, false] {
        let options = CudaOptions { max_rows: 512, graphs, ..defaults() };
        let executor = CudaExecutor::new(model, options)?;
        let info = executor.info().clone();
        let shared = Arc::new(Mutex::new(executor));
        let handle = || Box::new(Shared(shared.clone(), info.clone())) as Box<dyn Executor>;
        for seed in 0..seeds as u64 {
            row_invariance(handle, g, seed, 4, 700);
        }
    }
    // Two executors at once: the import goes from one to the other.
    if model.output.bytes().len() < 1 << 28 {
        let fresh = || {
            let options = CudaOptions { max_rows: 512, ..defaults() };
            Box::new(CudaExecutor::new(model, options).expect("loads")) as Box<dyn Executor>
        };
        import_continues(fresh, g, 3, 700, 40);
        import_continues(fresh, g, 4, 256, 3);
    }
    Ok(json!({ "seeds": seeds, "sequences": 4, "differing": 0 }))
}

fn agree(model: &Model, positions: usize) -> Outcome {
    let g = &model.geometry;
    let mut random = Random::new(11);
    let ids: Vec<u32> = (0..positions).map(|_| random.below(g.vocab) as u32).collect();
    let mut cuda = CudaExecutor::new(model, CudaOptions { max_rows: 512, ..defaults() })?;
    let mut reference = ReferenceExecutor::new(model.clone(), KvType::F32)?;
    let (ours, theirs) = (logits(&mut cuda, g, &ids)?, logits(&mut reference, g, &ids)?);
    let a = agreement(&theirs.logits, &ours.logits, g.vocab);
    Ok(json!({
        "positions": positions, "max_logit_error_over_range": a.max_error, "mean_kl_nats": a.mean_kl,
        "same_argmax": a.same_argmax,
        "hidden_relative_error": relative(&theirs.hidden, &ours.hidden),
    }))
}

fn relative(expected: &[f32], found: &[f32]) -> f64 {
    assert_eq!(expected.len(), found.len());
    let sum = |f: &dyn Fn(usize) -> f64| (0..expected.len()).map(f).sum::<f64>();
    let difference = sum(&|i| f64::from(expected[i] - found[i]).powi(2));
    (difference / sum(&|i| f64::from(expected[i]).powi(2))).sqrt()
}

fn logits(executor: &mut dyn Executor, g: &Geometry, ids: &[u32]) -> Result<StepOutput, ExecError> {
    let blocks = ids.len().div_ceil(BLOCK_LEN) as u32;
    executor.allocate_kv(KvCapacity { full: blocks, sliding: blocks })?;
    let table: Vec<BlockId> = (0..blocks).map(BlockId).collect();
    let (mut batch, mut out, mut all) = (StepBatch::default(), StepOutput::default(), StepOutput::default());
    for (i, chunk) in ids.chunks(100).enumerate() {
        batch.clear();
        let first = g.first_visible(i * 100) / BLOCK_LEN;
        batch.push_seq((i * 100) as u32, &table, first as u32, &table[first..]);
        for &id in chunk {
            let wants = RowWants { logits: true, hidden: true, argmax: true, candidates: 0 };
            batch.push_row(Row { input: RowInput::Token(id), wants });
        }
        executor.step(&batch, &mut out)?;
        all.logits.extend(&out.logits);
        all.hidden.extend(&out.hidden);
    }
    Ok(all)
}

fn make(file: &str, mix: Option<&str>, preset: Option<&str>) -> Outcome {
    let start = Instant::now();
    let mix = mix.unwrap_or("q4_k_m");
    let mix = Mix::from_name(mix).ok_or_else(|| format!("no mix of types {mix}"))?;
    let preset = preset.unwrap_or("30b");
    let preset = Preset::from_name(preset).ok_or_else(|| format!("no preset {preset}"))?;
    let mut options = SynthOptions::new(preset, mix);
    if mix == Mix::Medium(GgmlType::Q4_K) {
        options.overrides = vec![("^output.".to_owned(), GgmlType::Q5_K)];
    }
    let bytes = synth::write(file, &options, &mut |_, _| ())?;
    Ok(json!({ "bytes": bytes, "seconds": start.elapsed().as_secs_f64() }))
}

fn speed(model: &Model) -> Outcome {
    let g = &model.geometry;
    let start = Instant::now();
    let mut executor = CudaExecutor::new(model, defaults())?;
    let load_seconds = start.elapsed().as_secs_f64();
    let weight_bytes = executor.weight_bytes();
    let read_bytes = weight_bytes.clamp(1 << 28, 8 << 30) & !15;
    let read_rate = read_bytes as f64 / executor.measure_plain_read(read_bytes)?;

    let deepest = if g.context > 100_000 { 131_072 - 64 } else { g.context - 64 };
    let depths: Vec<usize> = [0, 8192, 32_768, deepest].into_iter().filter(|d| *d <= deepest).collect();
    let mut tests = Vec::new();
    // Fast prefill changes nothing about decoding.
    let decoded: &[usize] = if defaults().prefill == Prefill::Fast { &[] } else { &depths };
    for &depth in decoded {
        for rows in [1usize, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256] {
            if rows > 1 && depth > 8192 || rows > 16 && depth > 0 {
                continue;
            }
            for (what, wants) in [("", LOGITS), (", the largest logit alone", LARGEST)] {
                let times = decode_ms(&mut executor, g, depth, rows, wants)?;
                let ms = middle(&times);
                let rate = weight_bytes as f64 / (ms * 1e-3);
                tests.push(json!({
                    "test": format!("decode, {rows} sequence(s) at depth {depth}{what}"), "median_ms": ms,
                    "reps": times, "tok_s": rows as f64 / ms * 1e3, "gb_s": rate / 1e9,
                    "of_bandwidth": rate / read_rate,
                }));
            }
        }
    }
    for (depth, count) in
        [(0usize, 128usize), (0, 256), (0, 512), (0, 1024), (0, 2048), (30_720, 2048), (0, 32_768)]
    {
        if depth + count <= deepest {
            let times = prefill_ms(&mut executor, g, depth, count)?;
            let ms = middle(&times);
            tests.push(json!({
                "test": format!("prefill of {count} tokens at depth {depth}"), "median_ms": ms, "reps": times,
                "tok_s": count as f64 / ms * 1e3,
            }));
        }
    }
    Ok(json!({
        "device": executor.info().device, "model": "synthetic, see `cuda_check synth`", "route": executor.info().route,
        "bandwidth": read_rate / 1e9, "weight_bytes_per_token": weight_bytes, "load_seconds": load_seconds, "tests": tests,
        "notes": [
            "a step is timed from the call to the logits on the host",
            "of memory: weight bytes of a step against a plain read of device memory by the same program",
        ],
    }))
}

/// `only`: few rows (up to 16), or prefill.
fn quick(model: &Model, only: Option<&str>) -> Outcome {
    let g = &model.geometry;
    let mut executor = CudaExecutor::new(model, defaults())?;
    let mut tests = Vec::new();
    let deepest = 131_008.min(g.context - 64);
    let decoded: &[(usize, usize)] = &[
        (0, 1),
        (0, 8),
        (0, 16),
        (0, 24),
        (0, 32),
        (0, 48),
        (0, 64),
        (0, 128),
        (0, 256),
        (8192, 1),
        (deepest, 1),
    ];
    let few = only == Some("few");
    for &(depth, rows) in decoded {
        if only == Some("prefill") || (few && (rows > 16 || depth > 0)) {
            continue;
        }
        let ms = middle(&decode_ms(&mut executor, g, depth.min(deepest), rows, LARGEST)?);
        tests.push(format!("decode {rows} at {depth}: {ms:.3} ms, {:.1} tok/s", rows as f64 * 1e3 / ms));
    }
    for (depth, count) in [(0, 64), (0, 128), (0, 256), (0, 512), (0, 1024), (0, 2048), (30_720, 2048)] {
        if !few && depth + count <= deepest {
            let ms = middle(&prefill_ms(&mut executor, g, depth, count)?);
            tests.push(format!(
                "prefill {count} at {depth}: {ms:.1} ms, {:.0} tok/s",
                count as f64 * 1e3 / ms
            ));
        }
    }
    Ok(json!(tests))
}

fn options(model: &Model) -> Outcome {
    let g = &model.geometry;
    let deepest = if g.context > 100_000 { 131_072 - 64 } else { g.context - 64 };
    let mut tests = Vec::new();
    // In turn, and the first again at the end: what a pause or a clock does shows between its two.
    for kv in [KvType::Int16, KvType::Int8, KvType::Int16] {
        let name = kv.name();
        let start = Instant::now();
        let mut executor = CudaExecutor::new(model, CudaOptions { kv, ..defaults() })?;
        let load_seconds = start.elapsed().as_secs_f64();
        for (depth, rows) in [(0, 1), (0, 16), (8192, 1), (8192, 16), (deepest, 1)] {
            if depth > deepest {
                continue;
            }
            let logits_ms = middle(&decode_ms(&mut executor, g, depth, rows, LOGITS)?);
            let argmax_ms = middle(&decode_ms(&mut executor, g, depth, rows, LARGEST)?);
            tests.push(json!({
                "test": format!("decode, KV type {name}, {rows} sequence(s) at depth {depth}"),
                "median_ms": logits_ms, "median_ms_largest_alone": argmax_ms, "load_seconds": load_seconds,
            }));
        }
        for depth in [0usize, 30_720] {
            if depth + 2048 <= deepest {
                let ms = middle(&prefill_ms(&mut executor, g, depth, 2048)?);
                tests.push(json!({
                    "test": format!("prefill of 2048 tokens, KV type {name}, at depth {depth}"), "median_ms": ms,
                }));
            }
        }
    }
    Ok(json!({ "tests": tests }))
}

/// Greedy continuations of ten prompts on the card and on the CPU: how many are the same ids to the end, and how many of
/// these have the same bits in every logit and every stored K and V?
fn greedy(model: &Model, tokens: usize) -> Outcome {
    let g = &model.geometry;
    let mut cpu = CpuExecutor::new(model.clone(), cpu_defaults())?;
    let tokenizer = Tokenizer::from_gguf(&model.file)?;
    let topics = ["fox", "river", "king", "clock", "garden", "ship", "teacher", "winter", "moon", "bridge"];
    let prompts: Vec<Vec<u32>> = topics
        .iter()
        .map(|topic| {
            let text = format!(
                "<|start|>user<|message|>Write a short story for children about a {topic}.<|eot|><|start|>assistant"
            );
            tokenizer.encode_prompt(&text, Specials::Parse)
        })
        .collect();
    let expected = prompts
        .iter()
        .map(|prompt| continuation(&mut cpu, g, prompt, tokens))
        .collect::<Result<Vec<_>, ExecError>>()?;
    let mut cuda = CudaExecutor::new(model, CudaOptions { max_rows: 512, ..defaults() })?;
    let (mut equal_tokens, mut equal_bits) = (Vec::new(), 0);
    for (prompt, expected) in prompts.iter().zip(&expected) {
        let found = continuation(&mut cuda, g, prompt, tokens)?;
        equal_tokens.push(found.ids.iter().zip(&expected.ids).take_while(|(a, b)| a == b).count());
        equal_bits += usize::from(found.bits == expected.bits);
    }
    let whole = equal_tokens.iter().filter(|n| **n == tokens).count();
    Ok(json!({
        "prompts": topics.len(), "tokens": tokens, "equal_to_the_end": whole, "equal_tokens": equal_tokens,
        "equal_logits_and_kv_bytes": equal_bits,
    }))
}

/// A random model of each type that the CPU backend runs, with embedding table and output of that type: logits of prefill and
/// of single tokens, bit by bit.
fn types() -> Outcome {
    let g = Geometry {
        hidden: 512,
        ffn: 768,
        heads: 4,
        kv_heads: 2,
        head_dim: 128,
        sliding: vec![true, false],
        ..Preset::Tiny.geometry()
    };
    let mut equal = Vec::new();
    let types = GgmlType::all().filter(|ty| ty.is_decodable() && *ty != GgmlType::Q8_K);
    for (ty, factor) in types.map(|ty| (ty, false)).chain([(GgmlType::Q6_K, true), (GgmlType::Q8_0, true)]) {
        let file = GgufFile::from_bytes(synth::tiny(&g, ty, 1)?)?;
        let mut model = Model::from_gguf(Arc::new(file))?;
        if factor {
            model = with_factor_on_table(&model);
        }
        let mut cpu = CpuExecutor::new(model.clone(), cpu_defaults())?;
        let mut cuda = CudaExecutor::new(&model, CudaOptions { max_rows: 128, ..defaults() })?;
        let ids: Vec<u32> = (0..40u32).map(|i| (i * 97 + 11) % g.vocab as u32).collect();
        let (a, b) = (continuation(&mut cpu, &g, &ids, 4)?, continuation(&mut cuda, &g, &ids, 4)?);
        if a.bits != b.bits {
            return Err(format!("{}: ids {:?}, expected {:?}, or other bits", ty.name(), b.ids, a.ids).into());
        }
        equal.push(format!("{}{}", ty.name(), if factor { ", factor on the table" } else { "" }));
    }
    Ok(json!({ "equal_logits_and_kv_bytes": equal }))
}

/// What the card says when its memory is spent, and that the executor works afterwards.
fn memory(model: &Model) -> Outcome {
    let g = &model.geometry;
    let mut executor = CudaExecutor::new(model, CudaOptions { max_rows: 512, ..defaults() })?;
    let ids: Vec<u32> = (0..20).collect();
    let before = continuation(&mut executor, g, &ids, 8)?;
    let blocks = (1usize << 38) / executor.info().full_block_bytes.max(1);
    let refused = match executor.allocate_kv(KvCapacity { full: blocks as u32, sliding: 4 }) {
        Ok(()) => return Err("a quarter of a terabyte was allocated".into()),
        Err(error) => error.to_string(),
    };
    // Without blocks a step must be refused, not crash.
    let mut batch = StepBatch::default();
    push(&mut batch, g, (&[BlockId(0)], 0, 1), 0, &[1], LOGITS);
    let step = match executor.step(&batch, &mut StepOutput::default()) {
        Ok(()) => return Err("a step without blocks went through".into()),
        Err(error) => error.to_string(),
    };
    let after = continuation(&mut executor, g, &ids, 8)?;
    if before.bits != after.bits {
        return Err("other bits after the failure".into());
    }
    Ok(json!({ "refused": refused, "step_without_blocks": step, "same_bits_afterwards": true }))
}

/// Random ids through both backends, in chunks and one by one: logits of every position and every stored byte.
fn same(model: &Model, positions: usize) -> Outcome {
    let g = &model.geometry;
    let mut random = Random::new(21);
    let ids: Vec<u32> = (0..positions).map(|_| random.below(g.vocab) as u32).collect();
    let mut cpu = CpuExecutor::new(model.clone(), cpu_defaults())?;
    let mut cuda = CudaExecutor::new(model, CudaOptions { max_rows: 512, ..defaults() })?;
    let mut results: Vec<(StepOutput, blake3::Hash)> = Vec::new();
    for executor in [&mut cpu as &mut dyn Executor, &mut cuda] {
        let out = logits(executor, g, &ids)?;
        let kv = kv_hash(executor, positions)?;
        results.push((out, kv));
    }
    let differing = |pick: fn(&StepOutput) -> &Vec<f32>| {
        let (a, b) = (pick(&results[0].0), pick(&results[1].0));
        assert_eq!(a.len(), b.len(), "both backends put out everything");
        a.iter().zip(b).filter(|(a, b)| a.to_bits() != b.to_bits()).count()
    };
    Ok(json!({
        "positions": positions, "logits": results[0].0.logits.len(), "logits_differing": differing(|o| &o.logits),
        "hidden_differing": differing(|o| &o.hidden),
        "kv_bytes_equal": results[0].1 == results[1].1, "kv_hash": results[1].1.to_string(),
    }))
}

/// Hash of all K and V of positions `0..positions`: one layout for both backends; rows that nobody wrote are cleared.
fn kv_hash(executor: &dyn Executor, positions: usize) -> Result<blake3::Hash, ExecError> {
    let mut hasher = blake3::Hasher::new();
    for group in [KvGroup::Full, KvGroup::Sliding] {
        let mut bytes = vec![0u8; executor.info().block_bytes(group)];
        for block in 0..positions.div_ceil(BLOCK_LEN) as u32 {
            executor.export_block(group, BlockId(block), &mut bytes)?;
            let rows = (positions - block as usize * BLOCK_LEN).min(BLOCK_LEN);
            executor.clear_rows(group, rows, &mut bytes);
            hasher.update(&bytes);
        }
    }
    Ok(hasher.finalize())
}

/// Ids, and a hash of the logits they were taken from and of K and V.
struct Continuation {
    ids: Vec<u32>,
    bits: blake3::Hash,
}

fn continuation(
    executor: &mut dyn Executor,
    g: &Geometry,
    prompt: &[u32],
    tokens: usize,
) -> Result<Continuation, ExecError> {
    let mut hasher = blake3::Hasher::new();
    let blocks = (prompt.len() + tokens).div_ceil(BLOCK_LEN) as u32;
    executor.allocate_kv(KvCapacity { full: blocks, sliding: blocks })?;
    let table: Vec<BlockId> = (0..blocks).map(BlockId).collect();
    let (mut batch, mut out) = (StepBatch::default(), StepOutput::default());
    let (mut ids, mut done) = (prompt.to_vec(), 0);
    while ids.len() < prompt.len() + tokens {
        batch.clear();
        push(&mut batch, g, (&table, 0, blocks as usize), done, &ids[done..], LOGITS);
        executor.step(&batch, &mut out)?;
        done = ids.len();
        out.logits.iter().for_each(|v| {
            hasher.update(&v.to_bits().to_le_bytes());
        });
        ids.push(
            (0..g.vocab).fold(0, |best, i| if out.logits[i] > out.logits[best] { i } else { best }) as u32
        );
    }
    hasher.update(kv_hash(executor, done)?.as_bytes());
    Ok(Continuation { ids: ids.split_off(prompt.len()), bits: hasher.finalize() })
}

fn step(model: &Model, sequences: usize, rows: usize, depth: usize) -> Outcome {
    let g = &model.geometry;
    let mut executor = CudaExecutor::new(model, CudaOptions { graphs: false, ..defaults() })?;
    let (tables, ring) = (fill(&mut executor, g, depth + rows, sequences)?, ring_len(&executor, g));
    let (mut batch, mut out, mut random) = (StepBatch::default(), StepOutput::default(), Random::new(9));
    let mut ms = Vec::new();
    for _ in 0..2 {
        batch.clear();
        for (s, full) in tables.iter().enumerate() {
            let ids: Vec<u32> = (0..rows).map(|_| random.below(g.vocab) as u32).collect();
            push(&mut batch, g, (full, s, ring), depth, &ids, LOGITS);
        }
        let start = Instant::now();
        executor.step(&batch, &mut out)?;
        ms.push(start.elapsed().as_secs_f64() * 1e3);
    }
    Ok(json!({ "ms": ms }))
}

/// Blocks for `sequences` sequences of `len` positions, filled with random keys and values: real caches are not zeros.
fn fill(
    executor: &mut CudaExecutor,
    g: &Geometry,
    len: usize,
    sequences: usize,
) -> Result<Vec<Vec<BlockId>>, ExecError> {
    let blocks = len.div_ceil(BLOCK_LEN);
    let (full, sliding) = ((blocks * sequences) as u32, (ring_len(executor, g) * sequences) as u32);
    executor.allocate_kv(KvCapacity { full, sliding })?;
    let digits = executor.info().kv_type.digits().expect("cards store digits");
    let head = random_head(HeadLayout { dim: g.head_dim, digits }, &mut Random::new(5));
    for group in [KvGroup::Full, KvGroup::Sliding] {
        let block = head.repeat(executor.info().block_bytes(group) / head.len());
        let count = if group == KvGroup::Full { full } else { sliding };
        for b in 0..count {
            executor.import_block(group, BlockId(b), &block)?;
        }
    }
    Ok((0..sequences).map(|s| (s * blocks..(s + 1) * blocks).map(|b| BlockId(b as u32)).collect()).collect())
}

/// One KV head of a block: keys with a root mean square of about 1, as norms leave them, and values up to 1.
fn random_head(layout: HeadLayout, random: &mut Random) -> Vec<u8> {
    let mut uniform = |size: f32| -> Vec<f32> {
        (0..layout.dim).map(|_| size * (random.below(2001) as f32 / 1000.0 - 1.0)).collect()
    };
    let mut head = vec![0u8; layout.bytes()];
    for row in 0..BLOCK_LEN {
        // The Hadamard matrix would make random keys of random keys.
        let k = StoredHead::of(&uniform(3f32.sqrt()), layout.digits);
        let v = StoredHead::of(&uniform(1.0), layout.digits);
        for (plane, (k, v)) in
            [(&k.hi, &v.hi), (&k.lo, &v.lo)].into_iter().take(layout.digits.count()).enumerate()
        {
            for d in 0..layout.dim {
                head[layout.k(plane) + layout.k_at(row, d)] = k[d] as u8;
                head[layout.v(plane) + layout.v_at(row, d)] = v[d] as u8;
            }
        }
        for (at, d) in [(layout.k_scales(), k.d), (layout.v_scales(), v.d)] {
            head[at + 4 * row..][..4].copy_from_slice(&d.to_le_bytes());
        }
    }
    head
}

/// Sliding blocks of a sequence: the window and the largest step, each begun and ended inside a block.
fn ring_len(executor: &CudaExecutor, g: &Geometry) -> usize {
    (g.window + executor.info().max_rows) / BLOCK_LEN + 2
}

fn push(
    batch: &mut StepBatch,
    g: &Geometry,
    (full, sequence, ring): (&[BlockId], usize, usize),
    pos: usize,
    ids: &[u32],
    of_last: RowWants,
) {
    let first = g.first_visible(pos) / BLOCK_LEN;
    let end = (pos + ids.len()).div_ceil(BLOCK_LEN);
    let sliding: Vec<BlockId> =
        (first..end.max(first + 1)).map(|b| BlockId((sequence * ring + b % ring) as u32)).collect();
    batch.push_seq(pos as u32, full, first as u32, &sliding);
    for (i, &id) in ids.iter().enumerate() {
        let wants = if i + 1 == ids.len() { of_last } else { RowWants::default() };
        batch.push_row(Row { input: RowInput::Token(id), wants });
    }
}

/// Milliseconds of decode steps, logits on the host included.
fn decode_ms(
    executor: &mut CudaExecutor,
    g: &Geometry,
    depth: usize,
    rows: usize,
    wants: RowWants,
) -> Result<Vec<f64>, ExecError> {
    let (tables, ring) = (fill(executor, g, depth + 64, rows)?, ring_len(executor, g));
    let (mut batch, mut out, mut random) = (StepBatch::default(), StepOutput::default(), Random::new(9));
    let mut times = Vec::new();
    for step in 0..40 {
        batch.clear();
        for (s, full) in tables.iter().enumerate() {
            push(&mut batch, g, (full, s, ring), depth + step, &[random.below(g.vocab) as u32], wants);
        }
        let start = Instant::now();
        executor.step(&batch, &mut out)?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    assert!(out.logits.iter().all(|v| v.is_finite()), "logits are numbers");
    times.drain(..8);
    Ok(times)
}

fn prefill_ms(
    executor: &mut CudaExecutor,
    g: &Geometry,
    depth: usize,
    count: usize,
) -> Result<Vec<f64>, ExecError> {
    let (tables, ring) = (fill(executor, g, depth + count, 1)?, ring_len(executor, g));
    let (mut batch, mut out, mut random) = (StepBatch::default(), StepOutput::default(), Random::new(9));
    let chunk = executor.info().max_rows;
    let mut times = Vec::new();
    for _ in 0..if count > 4096 { 1 } else { 5 } {
        let start = Instant::now();
        let mut done = 0;
        while done < count {
            let n = chunk.min(count - done);
            let ids: Vec<u32> = (0..n).map(|_| random.below(g.vocab) as u32).collect();
            batch.clear();
            push(&mut batch, g, (&tables[0], 0, ring), depth + done, &ids, LOGITS);
            executor.step(&batch, &mut out)?;
            done += n;
        }
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    Ok(times)
}
