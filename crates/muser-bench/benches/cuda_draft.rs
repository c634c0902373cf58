//! Drafts and sampling on a card: checks and measurements, as one JSON object on standard output.
//!
//! ```text
//! cuda_draft same MODEL DRAFT                        K, V and proposals against the CPU backend; schedules; odd drafts
//! cuda_draft texts MODEL DRAFT [TOKENS]              drafted greedy text against plain (E5), all lengths, alone and together
//! cuda_draft sampled MODEL [TOKENS]                  sampled text from the card's candidates against text from all logits
//! cuda_draft speed MODEL DRAFT NAME COMMIT DATE      what drafts and sampling cost on a large model, as a receipt
//! ```
//! `MUSER_CHECK_KV=8` does all this with K and V in 8 bits.
#![expect(clippy::print_stdout, reason = "the result is printed")]

use std::sync::{Arc, Mutex};
use std::time::Instant;

use muser_backend::conformance::{Random, draft_invariance, draft_logits, skipped_context_is_blank};
use muser_backend::{
    DraftBatch, DraftExecutor, ExecError, Executor, ExecutorInfo, KvCapacity, KvType, Row, RowInput,
    RowWants, StepBatch, StepOutput, delegate_executor,
};
use muser_bench::middle;
use muser_cpu::{CpuExecutor, CpuOptions};
use muser_cuda::{CudaExecutor, CudaOptions};
use muser_engine::{
    DraftLength, DraftSampling, Engine, EngineConfig, EngineHandle, Event, Request, SamplingParams,
    Submission,
};
use muser_gguf::GgufFile;
use muser_kv::{BLOCK_LEN, BlockId, KvGroup};
use muser_model::synth::{self, Mix};
use muser_model::{DflashConfig, Draft, Geometry, Model};
use muser_text::{Specials, Tokenizer};
use serde_json::{Value, json};

type AnyError = Box<dyn std::error::Error>;
type Outcome = Result<Value, AnyError>;

fn main() -> Result<(), AnyError> {
    let args: Vec<String> = muser_bench::arguments().collect();
    let arg = |i: usize| args.get(i).map(String::as_str);
    let number = |i: usize, otherwise: usize| arg(i).map_or(Ok(otherwise), str::parse::<usize>);
    let result = match (arg(0), arg(1), arg(2)) {
        (Some("same"), Some(model), Some(draft)) => same(&Model::load(model)?, &Draft::load(draft)?)?,
        (Some("texts"), Some(model), Some(draft)) => {
            texts(&Model::load(model)?, &Draft::load(draft)?, number(3, 64)?)?
        }
        (Some("sampled"), Some(model), _) => sampled(&Model::load(model)?, number(2, 200)?)?,
        (Some("speed"), Some(model), Some(draft)) => {
            let report = speed(&Model::load(model)?, &Draft::load(draft)?)?;
            let receipt = json!({
                "name": arg(3), "commit": arg(4), "date": arg(5), "tree": "clean", "withdrawn": null,
                "command": format!("cargo bench -p muser-bench --bench cuda_draft -- speed {model} {draft}"),
                "report": report,
            });
            println!("{}", serde_json::to_string_pretty(&receipt)?);
            return Ok(());
        }
        _ => {
            return Err(
                "usage: same MODEL DRAFT | texts MODEL DRAFT | sampled MODEL | speed MODEL DRAFT".into()
            );
        }
    };
    println!("{}", serde_json::to_string_pretty(&json!({ "command": args.join(" "), "result": result }))?);
    Ok(())
}

/// One executor behind many handles, with the card's candidates or without.
#[derive(Clone)]
struct Shared {
    executor: Arc<Mutex<Box<dyn Executor>>>,
    info: ExecutorInfo,
    candidates: bool,
}

impl Shared {
    fn new(executor: Box<dyn Executor>) -> Self {
        let info = executor.info().clone();
        Self { executor: Arc::new(Mutex::new(executor)), info, candidates: true }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Box<dyn Executor>> {
        self.executor.lock().expect("not poisoned")
    }
}

impl Executor for Shared {
    fn info(&self) -> &ExecutorInfo {
        &self.info
    }

    fn most_candidates(&self) -> usize {
        if self.candidates { self.lock().most_candidates() } else { 0 }
    }

    delegate_executor!(self => self.lock(); allocate_kv, step, read_bandwidth, export_block, clear_rows, import_block,
        lend_block);
}

impl DraftExecutor for Shared {
    delegate_executor!(self => self.lock(); attach_draft, draft, draft_largest, has_draft_context);
}

// What lies behind the lock cannot be shown.
muser_backend::no_tower!(Shared);

fn card(model: &Model, draft: Option<&Draft>, options: CudaOptions) -> Result<Box<dyn Executor>, AnyError> {
    let mut executor = CudaExecutor::new(model, options)?;
    if let Some(draft) = draft {
        executor.attach_draft(draft.clone())?;
    }
    Ok(Box::new(executor))
}

/// K and V in 8 bits with `MUSER_CHECK_KV=8`.
fn kv_type() -> KvType {
    match std::env::var("MUSER_CHECK_KV").as_deref() {
        Ok("8") => KvType::Int8,
        _ => KvType::Int16,
    }
}

fn options(graphs: bool) -> CudaOptions {
    CudaOptions { max_rows: 512, graphs, kv: kv_type(), ..CudaOptions::default() }
}

fn same(model: &Model, draft: &Draft) -> Outcome {
    let g = &model.geometry;
    let mut report = serde_json::Map::new();
    let mut drafts = vec![("bundled".to_owned(), draft.clone())];
    for (i, mix) in ["q4_k_m", "q8_0", "f16"].into_iter().enumerate() {
        let config = DflashConfig {
            hidden: g.hidden,
            ffn: 768,
            heads: 4,
            kv_heads: [1, 4, 2][i],
            head_dim: 128,
            context: 4096,
            window: [100, 300, 512][i],
            sliding: vec![true; 3],
            rope_theta: 10_000.0,
            rms_eps: 1e-5,
            block_size: [11, 16, 9][i],
            target_layers: vec![0, 1, 5],
            mask_token: 4090,
            vocab: None,
        };
        let mix_of = Mix::from_name(mix).ok_or("a mix")?;
        let bytes = synth::draft_to_bytes(&config, mix_of, 3 + i as u64)?;
        drafts.push((format!("synthetic {mix}"), Draft::from_gguf(Arc::new(GgufFile::from_bytes(bytes)?))?));
    }
    for (name, draft) in &drafts {
        let mut cpu = CpuExecutor::new(model.clone(), CpuOptions { kv: kv_type(), ..CpuOptions::default() })?;
        cpu.attach_draft(draft.clone())?;
        let mut equal = 0usize;
        for graphs in [true, false] {
            let mut cuda = card(model, Some(draft), options(graphs))?;
            for (len, proposals) in [(1, 1), (2, 7), (40, 3), (257, draft.config.max_draft()), (700, 5)] {
                let ids: Vec<u32> = (0..len).map(|i| ((i * 41 + 11) % 4000) as u32).collect();
                let proposals = proposals.min(draft.config.max_draft());
                let expected = draft_logits(&mut cpu, &ids, proposals);
                let found = draft_logits(cuda.as_mut(), &ids, proposals);
                let differing =
                    expected.iter().zip(&found).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
                let (a, b) = (planes(&cpu, g, len)?, planes(cuda.as_ref(), g, len)?);
                if differing > 0 || a != b {
                    return Err(format!(
                        "{name}, {len} ids, {proposals} proposals: {differing} logits differ, K and V equal: {}",
                        a == b
                    )
                    .into());
                }
                equal += found.len();
            }
        }
        report.insert(name.clone(), json!({ "logits_equal": equal, "context_kv_equal": true }));
    }
    for graphs in [true, false] {
        for (_, draft) in &drafts[..2] {
            let shared = Shared::new(card(model, Some(draft), options(graphs))?);
            for seed in 0..2 {
                draft_invariance(|| Box::new(shared.clone()), g, seed, 4, 700);
            }
            let layers = g.sliding.iter().filter(|sliding| **sliding).count();
            let target_bytes = layers * g.kv_heads * kv_type().head_bytes(g.head_dim) * BLOCK_LEN;
            skipped_context_is_blank(|| Box::new(shared.clone()), g, target_bytes);
        }
    }
    report.insert("schedules_differing".to_owned(), json!(0));
    Ok(Value::Object(report))
}

/// The draft's K and V of positions `0 .. len - 1`: one layout for both backends; rows behind the last one are cleared.
fn planes(executor: &dyn Executor, g: &Geometry, len: usize) -> Result<Vec<u8>, ExecError> {
    let layers = g.sliding.iter().filter(|sliding| **sliding).count();
    let target_bytes = layers * g.kv_heads * kv_type().head_bytes(g.head_dim) * BLOCK_LEN;
    let (mut bytes, mut all) = (vec![0u8; executor.info().sliding_block_bytes], Vec::new());
    for block in 0..(len - 1).div_ceil(BLOCK_LEN) {
        executor.export_block(KvGroup::Sliding, BlockId(block as u32), &mut bytes)?;
        executor.clear_rows(KvGroup::Sliding, (len - 1 - block * BLOCK_LEN).min(BLOCK_LEN), &mut bytes);
        all.extend_from_slice(&bytes[target_bytes..]);
    }
    Ok(all)
}

/// What the engine wrote.
#[derive(Default)]
struct Written {
    /// Ids and hashes of logits, text by text.
    tokens: Vec<Vec<(u32, Option<u64>)>>,
    drafted: u32,
    accepted: u32,
    steps: u32,
    /// Tokens but the first of each text.
    decoded: usize,
    /// From the moment when all have begun.
    seconds: f64,
}

impl Written {
    fn per_pass(&self) -> f64 {
        // The first token of a text comes from its prompt's step.
        self.decoded as f64 / f64::from(self.steps)
    }
}

#[derive(Clone)]
struct Ask {
    sampling: SamplingParams,
    seed: u64,
    hash: bool,
    tokens: usize,
}

fn write(
    executor: Shared,
    g: &Geometry,
    prompts: &[Vec<u32>],
    parallel: usize,
    (length, how): (DraftLength, DraftSampling),
    ask: &Ask,
) -> Result<Written, AnyError> {
    let config = EngineConfig {
        parallel,
        context: Some(g.context.min(2048)),
        draft_length: length,
        draft_sampling: how,
        ..EngineConfig::default()
    };
    let engine: EngineHandle = Engine::spawn(Box::new(executor), g.clone(), config)?;
    let mut written = Written::default();
    for prompts in prompts.chunks(parallel) {
        let mut submissions: Vec<Submission> = Vec::new();
        for prompt in prompts {
            submissions.push(engine.submit(Request {
                max_tokens: Some(ask.tokens as u32),
                sampling: ask.sampling.clone(),
                seed: Some(ask.seed),
                hash_logits: ask.hash,
                cache: false,
                ..Request::new(prompt.clone(), Vec::new())
            })?);
        }
        let mut texts: Vec<Vec<(u32, Option<u64>)>> = vec![Vec::new(); submissions.len()];
        for (submission, text) in submissions.iter_mut().zip(&mut texts) {
            while text.is_empty() {
                take(submission, text, &mut written)?;
            }
        }
        let start = Instant::now();
        let before: usize = texts.iter().map(Vec::len).sum();
        for (submission, text) in submissions.iter_mut().zip(&mut texts) {
            while take(submission, text, &mut written)? {}
        }
        written.seconds += start.elapsed().as_secs_f64();
        written.decoded += texts.iter().map(Vec::len).sum::<usize>() - before;
        written.tokens.extend(texts);
    }
    Ok(written)
}

fn take(
    submission: &mut Submission,
    text: &mut Vec<(u32, Option<u64>)>,
    written: &mut Written,
) -> Result<bool, AnyError> {
    match submission.recv() {
        Some(Event::Token(token)) => text.push((token.id, token.logit_hash)),
        Some(Event::Finished(finished)) => {
            written.drafted += finished.usage.drafted_tokens;
            written.accepted += finished.usage.accepted_tokens;
            written.steps += finished.usage.decode_steps.saturating_sub(1);
            return Ok(false);
        }
        Some(Event::Failed(error)) => return Err(error.into()),
        Some(_) => {}
        None => return Err("the engine gave no end".into()),
    }
    Ok(true)
}

fn prompts(model: &Model) -> Result<Vec<Vec<u32>>, AnyError> {
    let tokenizer = Tokenizer::from_gguf(&model.file)?;
    let topics = ["fox", "river", "king", "clock", "garden", "ship", "teacher", "winter", "moon", "bridge"];
    let prompt = |topic: &&str| {
        let text = format!(
            "<|start|>user<|message|>Write a short story for children about a {topic}.<|eot|><|start|>assistant"
        );
        tokenizer.encode_prompt(&text, Specials::Parse)
    };
    Ok(topics.iter().map(prompt).collect())
}

fn texts(model: &Model, draft: &Draft, tokens: usize) -> Outcome {
    let g = &model.geometry;
    let prompts = prompts(model)?;
    let greedy = |hash| Ask { sampling: SamplingParams::greedy(), seed: 1, hash, tokens };
    let mut report = serde_json::Map::new();
    let plain = Shared::new(card(model, None, options(true))?);
    let none = (DraftLength::Fixed(0), DraftSampling::Exact);
    let expected = write(plain, g, &prompts, 1, none, &greedy(true))?;
    let shared = Shared::new(card(model, Some(draft), options(true))?);
    let mut lines = Vec::new();
    let lengths = (1..=draft.config.max_draft()).map(DraftLength::Fixed).chain([DraftLength::Auto]);
    for length in lengths {
        for parallel in [1, 3, 8] {
            for hash in [true, false] {
                let how = (length, DraftSampling::Exact);
                let found = write(shared.clone(), g, &prompts, parallel, how, &greedy(hash))?;
                let bare = |tokens: &[Vec<(u32, Option<u64>)>]| -> Vec<Vec<u32>> {
                    tokens.iter().map(|text| text.iter().map(|t| t.0).collect()).collect()
                };
                let equal = bare(&found.tokens) == bare(&expected.tokens);
                if !equal || (hash && found.tokens != expected.tokens) {
                    let what = format!("{length:?}, {parallel} together, hashes {hash}");
                    return Err(format!("{what}: the drafted text differs").into());
                }
                lines.push(json!({
                    "length": format!("{length:?}"), "together": parallel, "hashes": hash, "texts_equal": prompts.len(),
                    "tokens_per_pass": (found.per_pass() * 1000.0).round() / 1000.0,
                    "tok_s": (found.decoded as f64 / found.seconds).round(),
                }));
            }
        }
    }
    let plain_rate = expected.decoded as f64 / expected.seconds;
    report.insert("cuda".to_owned(), json!({ "plain_tok_s": plain_rate.round(), "drafted": lines }));
    let mut cpu = CpuExecutor::new(model.clone(), CpuOptions { kv: kv_type(), ..CpuOptions::default() })?;
    cpu.attach_draft(draft.clone())?;
    let cpu = Shared::new(Box::new(cpu));
    let most = (DraftLength::Fixed(draft.config.max_draft()), DraftSampling::Exact);
    let found = write(cpu, g, &prompts, 1, most, &greedy(false))?;
    report.insert("cpu_tokens_per_pass_at_most".to_owned(), json!(found.per_pass()));
    report.insert("prompts".to_owned(), json!(prompts.len()));
    report.insert("tokens".to_owned(), json!(tokens));
    Ok(Value::Object(report))
}

fn sampled(model: &Model, tokens: usize) -> Outcome {
    let g = &model.geometry;
    let prompts = prompts(model)?;
    let shared = Shared::new(card(model, None, options(true))?);
    let host = Shared { candidates: false, ..shared.clone() };
    let none = (DraftLength::Fixed(0), DraftSampling::Exact);
    let default = SamplingParams::default;
    let mut lines = Vec::new();
    for sampling in [
        default(),
        SamplingParams { top_k: 2, top_p: 1.0, ..default() },
        SamplingParams { top_k: 40, min_p: 0.05, temperature: 0.7, ..default() },
        SamplingParams { top_k: 256, top_p: 1.0, temperature: 1.8, ..default() },
        SamplingParams { top_k: 257, ..default() },
        SamplingParams { top_k: 0, ..default() },
    ] {
        let ask = Ask { sampling, seed: 7, hash: false, tokens };
        for parallel in [1, 5] {
            let expected = write(host.clone(), g, &prompts, parallel, none, &ask)?;
            let found = write(shared.clone(), g, &prompts, parallel, none, &ask)?;
            if found.tokens != expected.tokens {
                return Err(format!("{:?}, {parallel} together: the text differs", ask.sampling).into());
            }
        }
        lines.push(format!(
            "top_k {}, top_p {}, min_p {}, temperature {}: equal",
            ask.sampling.top_k, ask.sampling.top_p, ask.sampling.min_p, ask.sampling.temperature
        ));
    }
    Ok(json!({ "prompts": prompts.len(), "tokens": tokens, "texts": lines }))
}

/// Sequences of a measurement: one block of each group for each.
fn push(batch: &mut StepBatch, sequence: usize, pos: usize, ids: &[u32], wants: RowWants) {
    let table = [BlockId(sequence as u32)];
    batch.push_seq(pos as u32, &table, 0, &table);
    for &id in ids {
        batch.push_row(Row { input: RowInput::Token(id), wants });
    }
}

fn speed(model: &Model, draft: &Draft) -> Outcome {
    let g = &model.geometry;
    let mut executor = card(model, Some(draft), CudaOptions { kv: kv_type(), ..CudaOptions::default() })?;
    let info = executor.info().clone();
    let mut tests = Vec::new();
    let mut random = Random::new(9);
    let mut ids = |n: usize| -> Vec<u32> { (0..n).map(|_| random.below(g.vocab) as u32).collect() };
    let none = RowWants::default();
    let (mut batch, mut out) = (StepBatch::default(), StepOutput::default());
    executor.allocate_kv(KvCapacity { full: 16, sliding: 16 })?;

    // Sampling: what leaves the card.
    for sequences in [1usize, 4, 16] {
        for (what, wants) in [
            ("logits to the host", RowWants { logits: true, ..none }),
            ("64 candidates", RowWants { candidates: 64, ..none }),
            ("256 candidates", RowWants { candidates: 256, ..none }),
            ("the largest alone", RowWants { argmax: true, ..none }),
        ] {
            let mut times = Vec::new();
            for step in 0..40 {
                batch.clear();
                batch.skip_draft_context();
                (0..sequences).for_each(|s| push(&mut batch, s, step, &ids(1), wants));
                let start = Instant::now();
                executor.step(&batch, &mut out)?;
                times.push(start.elapsed().as_secs_f64() * 1e3);
            }
            times.drain(..8);
            let ms = middle(&times);
            tests.push(json!({
                "test": format!("decode, {sequences} sequence(s), {what}"), "median_ms": ms, "reps": times,
                "tok_s": sequences as f64 / ms * 1e3,
            }));
        }
    }
    // Verification: rows of one sequence, with and without the draft's context.
    for rows in [1usize, 2, 4, 8, 16] {
        for context in [true, false] {
            let mut times = Vec::new();
            for _ in 0..24 {
                batch.clear();
                if !context {
                    batch.skip_draft_context();
                }
                push(&mut batch, 0, 100, &ids(rows), RowWants { argmax: true, ..none });
                let start = Instant::now();
                executor.step(&batch, &mut out)?;
                times.push(start.elapsed().as_secs_f64() * 1e3);
            }
            times.drain(..4);
            let with = if context { "with" } else { "without" };
            tests.push(json!({
                "test": format!("step of {rows} row(s) of one sequence, {with} the draft's context"),
                "median_ms": middle(&times), "reps": times,
            }));
        }
    }
    // Rounds.
    let (mut round, mut logits, mut best) = (DraftBatch::default(), Vec::new(), Vec::new());
    for sequences in [1usize, 4, 16] {
        for proposals in [1u32, 3, 7, 15] {
            for whole in [false, true] {
                let mut times = Vec::new();
                for _ in 0..24 {
                    round.clear();
                    for s in 0..sequences {
                        round.push(ids(1)[0], 100, proposals, 0, &[BlockId(s as u32)]);
                    }
                    let start = Instant::now();
                    if whole {
                        executor.draft(&round, &mut logits)?;
                    } else {
                        executor.draft_largest(&round, &mut logits, &mut best)?;
                    }
                    times.push(start.elapsed().as_secs_f64() * 1e3);
                }
                times.drain(..4);
                let what = if whole { "logits to the host" } else { "ids alone" };
                tests.push(json!({
                    "test": format!("draft of {proposals} for {sequences} sequence(s), {what}"),
                    "median_ms": middle(&times), "reps": times,
                }));
            }
        }
    }
    // Through the engine: sampled text with the published filters.
    let shared = Shared::new(executor);
    for sequences in [1usize, 4, 16] {
        let prompts: Vec<Vec<u32>> = (0..sequences).map(|_| ids(16)).collect();
        let ask = Ask { sampling: SamplingParams::default(), seed: 3, hash: false, tokens: 100 };
        let none = (DraftLength::Fixed(0), DraftSampling::Exact);
        let mut texts = Vec::new();
        for candidates in [true, false] {
            let executor = Shared { candidates, ..shared.clone() };
            let written = write(executor, g, &prompts, sequences, none, &ask)?;
            let what = if candidates { "candidates from the card" } else { "logits on the host" };
            tests.push(json!({
                "test": format!("sampled text in the engine, {sequences} together, {what}"),
                "median_ms": written.seconds * 1e3 / (ask.tokens - 1) as f64,
                "tok_s": written.decoded as f64 / written.seconds,
            }));
            texts.push(written.tokens);
        }
        if texts[0] != texts[1] {
            return Err(format!("{sequences} together: sampled texts differ").into());
        }
    }
    Ok(json!({
        "device": info.device, "model": "synthetic, see `muser synth`", "route": info.route, "tests": tests,
        "notes": ["a step or draft is timed from the call to its results on the host"],
    }))
}
