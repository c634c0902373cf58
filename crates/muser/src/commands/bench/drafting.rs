//! What drafting is worth: plain and drafted decoding of the same texts in turn, through the engine, greedy.
//!
//! Two engines hold the same model, one of them with a draft. Every repetition decodes with the one, then with the other,
//! and compares; the text must be the same. With `--draft-accept P` the draft is a *stand-in*: the real draft does all its
//! work, but its proposals are replaced by ones that are right with probability `P`, taken from the known continuation. It
//! shows what a draft of that cost and that quality is worth on a model that is random weights, and is labelled synthetic.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, Result, ensure};
use muser_backend::{DraftBatch, ExecError, Executor, ExecutorInfo, KvCapacity, StepBatch, StepOutput};
use muser_engine::{DraftLength, Engine, EngineConfig, EngineHandle, Event, Request, SamplingParams};
use muser_kv::{BlockId, KvGroup};
use muser_model::{Draft, Model};
use muser_text::{Specials, Tokenizer};
use serde::Serialize;

use super::noise::Counters;
use super::report::{Rep, TestResult};
use super::stats::{median, round, spread};
use crate::cli::{BenchArgs, DraftChoice};
use crate::model_file::ModelSource;
use crate::output::{Console, Progress, usage_error};
use crate::{draft, executor};

/// What the texts begin with. Any text does for random weights; for Muse Tiny these are the things that it knows.
const BEGINNINGS: [&str; 20] = [
    "Write a short story about a fox.",
    "Write a short story for children about a brave mouse.",
    "Tell me about the sea.",
    "What is a good name for a cat?",
    "Why is the sky blue?",
    "Write a poem about winter.",
    "How do I bake bread?",
    "Tell a story about two friends who find a map.",
    "What do bees do all day?",
    "Describe a quiet morning in a small town.",
    "List three fruits and their colours.",
    "Write a letter to a teacher.",
    "Once upon a time there was a little dragon",
    "What is seven times eight?",
    "Explain what a river is.",
    "Tell me a joke.",
    "Write a story about a lost kite.",
    "Who lives in the forest?",
    "How can I sleep better?",
    "Write about a robot that likes to paint.",
];

/// The comparison.
#[derive(Debug, Serialize)]
pub struct DraftingReport {
    /// True when proposals came from the known continuation: then the speedup is not that of any real draft.
    pub synthetic: bool,
    /// The probability with which a stand-in's proposals were right.
    pub stand_in_accept: Option<f64>,
    /// The draft.
    pub draft: String,
    /// Proposals per round, as asked.
    pub length: String,
    /// Tokens of each text.
    pub tokens: u32,
    /// Median over the texts of drafted over plain speed.
    pub speedup: f64,
    /// The lowest of them.
    pub lowest_speedup: f64,
    /// Tokens per step of the drafted texts.
    pub tokens_per_target_pass: f64,
    /// Proposals of a round, mean over all steps of the timed texts.
    pub proposals_per_step: f64,
    /// Proposals accepted, as a share of those made.
    pub accepted: f64,
    /// The same by place, the first place first.
    pub accepted_by_position: Vec<f64>,
    /// What rounds with proposals were expected to take over what they took; null where lengths were fixed or nothing was
    /// proposed.
    pub forecast_over_measured: Option<f64>,
    /// Each text.
    pub texts: Vec<TextResult>,
}

/// One text.
#[derive(Debug, Serialize)]
pub struct TextResult {
    /// Its beginning.
    pub begins: String,
    /// Tokens per second without a draft, median.
    pub plain_tok_s: f64,
    /// With the draft.
    pub drafted_tok_s: f64,
    /// Median of the ratios of the repetitions.
    pub speedup: f64,
    /// All of them.
    pub speedups: Vec<f64>,
}

/// Runs the comparison; the second part are its two lines of the table.
pub fn compare(
    args: &BenchArgs,
    source: &ModelSource,
    console: &Console,
) -> Result<(DraftingReport, Vec<TestResult>)> {
    let model = source.load()?;
    let tokenizer = Tokenizer::from_gguf(&model.file)?;
    let known = Arc::new(Mutex::new(Continuation::default()));
    let plain = engine(args, &model, executor::build(model.clone(), &args.model, None)?)?;
    let (drafted, label) = drafted_engine(args, source, &model, &known)?;
    let texts = if args.draft_accept.is_some() { 1 } else { BEGINNINGS.len() };
    let tokens = args.gen_tokens.max(2);

    let bar = Progress::steps(console, "drafting", (texts * args.reps as usize) as u64, "texts");
    let mut both = [Rates::default(), Rates::default()];
    let mut results = Vec::new();
    let before = drafted.metrics();
    let mut steps = 0;
    for begins in &BEGINNINGS[..texts] {
        let prompt = tokenizer.encode_prompt(begins, Specials::Plain);
        let mut speeds = [Vec::new(), Vec::new()];
        for rep in 0..=args.reps {
            let counters = Counters::now();
            let first = decode(&plain, &prompt, tokens)?;
            known.lock().unwrap_or_else(PoisonError::into_inner).set(&prompt, &first.ids);
            let second = decode(&drafted, &prompt, tokens)?;
            ensure!(
                first.ids == second.ids,
                "bug: the drafted text differs from the plain one after \"{begins}\""
            );
            // The first one warms caches and, for the first text, is where the engine learns what a draft costs.
            if rep == 0 && args.reps > 1 {
                continue;
            }
            let noise = Counters::now().since(&counters);
            steps += second.steps;
            for (decoded, (speeds, rates)) in [first, second].iter().zip(speeds.iter_mut().zip(&mut both)) {
                speeds.push(decoded.tok_s);
                rates.note(decoded, &noise);
            }
            bar.advance(1);
        }
        let speedups: Vec<f64> = speeds[1].iter().zip(&speeds[0]).map(|(d, p)| round(d / p, 4)).collect();
        results.push(TextResult {
            begins: (*begins).to_owned(),
            plain_tok_s: round(median(&speeds[0]).unwrap_or(0.0), 3),
            drafted_tok_s: round(median(&speeds[1]).unwrap_or(0.0), 3),
            speedup: round(median(&speedups).unwrap_or(0.0), 4),
            speedups,
        });
    }
    bar.finish();
    let after = drafted.metrics();
    let synthetic = args.draft_accept.is_some();
    let speedups: Vec<f64> = results.iter().map(|text| text.speedup).collect();
    let since = |pick: fn(&muser_engine::MetricsSnapshot) -> u64| (pick(&after) - pick(&before)) as f64;
    let all_steps = since(|m| m.steps).max(1.0);
    let forecast = since(|m| m.forecast_rounds_ns);
    let places = after.accepted_by_place.iter().zip(&after.drafted_by_place);
    let timed = f64::from(args.reps) * texts as f64;
    let report = DraftingReport {
        synthetic,
        stand_in_accept: args.draft_accept,
        draft: label,
        length: match args.draft_len {
            DraftLength::Auto => "auto".to_owned(),
            DraftLength::Fixed(n) => n.to_string(),
        },
        tokens,
        speedup: median(&speedups).unwrap_or(0.0),
        lowest_speedup: speedups.iter().copied().fold(f64::MAX, f64::min),
        tokens_per_target_pass: round(timed * f64::from(tokens - 1) / f64::from(steps).max(1.0), 3),
        proposals_per_step: round(since(|m| m.drafted_tokens) / all_steps, 3),
        accepted: round(since(|m| m.accepted_tokens) / since(|m| m.drafted_tokens).max(1.0), 4),
        accepted_by_position: places
            .take_while(|(_, drafted)| **drafted > 0)
            .map(|(accepted, drafted)| round(*accepted as f64 / *drafted as f64, 3))
            .collect(),
        forecast_over_measured: (forecast > 0.0).then(|| round(since(|m| m.forecast_ns) / forecast, 4)),
        texts: results,
    };
    let names = if synthetic { ["synthetic-plain", "synthetic-drafted"] } else { ["plain", "drafted"] };
    let lines = names.iter().zip(both).map(|(name, rates)| rates.into_result(name)).collect();
    Ok((report, lines))
}

/// Repetitions on their way into the report.
#[derive(Default)]
struct Rates {
    reps: Vec<Rep>,
    quiet: usize,
}

impl Rates {
    fn note(&mut self, decoded: &Decoded, noise: &super::noise::Noise) {
        self.quiet += usize::from(noise.quiet());
        let ms = 1e3 / decoded.tok_s.max(f64::MIN_POSITIVE);
        self.reps.push(Rep {
            tok_s: round(decoded.tok_s, 3),
            median_ms: round(ms, 4),
            best_ms: round(ms, 4),
            steps: decoded.steps as usize,
            others: noise.others.map(|share| round(share, 4)),
            steal: noise.steal.map(|share| round(share, 4)),
            load_average: super::noise::load_average(),
            ..Rep::default()
        });
    }

    fn into_result(self, name: &str) -> TestResult {
        let speeds: Vec<f64> = self.reps.iter().map(|rep| rep.tok_s).collect();
        let tok_s = median(&speeds).unwrap_or(0.0);
        TestResult {
            test: name.to_owned(),
            tok_s: round(tok_s, 3),
            median_ms: round(1e3 / tok_s.max(f64::MIN_POSITIVE), 4),
            spread: round(spread(&speeds).unwrap_or(0.0), 4),
            quiet_reps: self.quiet,
            reps: self.reps,
            ..TestResult::default()
        }
    }
}

fn engine(args: &BenchArgs, model: &Model, executor: Box<dyn Executor>) -> Result<EngineHandle> {
    let config = EngineConfig {
        parallel: 1,
        context: Some(model.geometry.context.min(4096)),
        draft_length: args.draft_len,
        ..EngineConfig::default()
    };
    Ok(Engine::spawn(executor, model.geometry.clone(), config)?)
}

/// An engine with a draft, and what the draft is called.
fn drafted_engine(
    args: &BenchArgs,
    source: &ModelSource,
    model: &Model,
    known: &Arc<Mutex<Continuation>>,
) -> Result<(EngineHandle, String)> {
    let mut inner = executor::build(model.clone(), &args.model, None)?;
    // With a stand-in, off means that nobody named one: auto.
    let choice = match (&args.draft, args.draft_accept) {
        (DraftChoice::Off, Some(_)) => &DraftChoice::Auto,
        (choice, _) => choice,
    };
    let attached = draft::attach(choice, source, model, inner.as_mut())?;
    let Some(label) = attached.label else {
        return Err(usage_error(format!(
            "no draft for {}: name one with --draft (for a synthetic model `muser synth --draft` makes one)",
            source.label()
        )));
    };
    let label =
        std::path::Path::new(&label).file_name().map_or(label.clone(), |n| n.to_string_lossy().into_owned());
    let Some(accept) = args.draft_accept else { return Ok((engine(args, model, inner)?, label)) };
    let stand_in = StandIn { inner, known: Arc::clone(known), accept, draws: 0 };
    Ok((engine(args, model, Box::new(stand_in))?, format!("{label}, proposals from a stand-in (synthetic)")))
}

struct Decoded {
    ids: Vec<u32>,
    tok_s: f64,
    /// Steps after the one that read the prompt.
    steps: u32,
}

/// Greedy text of exactly `tokens` tokens, from nothing.
fn decode(engine: &EngineHandle, prompt: &[u32], tokens: u32) -> Result<Decoded> {
    let mut submission = engine.submit(Request {
        max_tokens: Some(tokens),
        sampling: SamplingParams::greedy(),
        cache: false,
        ..Request::new(prompt.to_vec(), Vec::new())
    })?;
    let mut ids = Vec::new();
    while let Some(event) = submission.recv() {
        match event {
            Event::Token(token) => ids.push(token.id),
            Event::Finished(finished) => {
                let seconds = finished.timings.decode.as_secs_f64();
                let written = ids.len().saturating_sub(1) as f64;
                let steps = finished.usage.decode_steps.saturating_sub(1);
                return Ok(Decoded { ids, tok_s: written / seconds.max(1e-9), steps });
            }
            Event::Failed(error) => return Err(error.into()),
            _ => {}
        }
    }
    Err(anyhow::anyhow!("bug: the engine gave no end")).context("drafting")
}

/// A text whose continuation is known.
#[derive(Debug, Default)]
struct Continuation {
    ids: Vec<u32>,
}

impl Continuation {
    fn set(&mut self, prompt: &[u32], ids: &[u32]) {
        self.ids = [prompt, ids].concat();
    }
}

/// An executor whose draft does its work and is then overruled.
struct StandIn {
    inner: Box<dyn Executor>,
    known: Arc<Mutex<Continuation>>,
    accept: f64,
    draws: u64,
}

impl StandIn {
    /// Another number in `[0, 1)` each time, the same in every run.
    fn draw(&mut self) -> f64 {
        self.draws += 1;
        let mut z = self.draws.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Proposals that are right as often as they should be.
    fn overrule(&mut self, batch: &DraftBatch) -> Vec<u32> {
        let vocab = self.inner.info().vocab as u32;
        let known = Arc::clone(&self.known);
        let known = known.lock().unwrap_or_else(PoisonError::into_inner);
        let places =
            batch.seqs().iter().flat_map(|seq| (1..=seq.proposals as usize).map(|i| seq.pos as usize + i));
        let right = places.map(|at| known.ids.get(at).copied().unwrap_or(0));
        right.map(|id| if self.draw() < self.accept { id } else { (id + 1) % vocab }).collect()
    }
}

impl Executor for StandIn {
    fn info(&self) -> &ExecutorInfo {
        self.inner.info()
    }

    fn allocate_kv(&mut self, capacity: KvCapacity) -> Result<(), ExecError> {
        self.inner.allocate_kv(capacity)
    }

    fn set_feature_layers(&mut self, layers: &[usize]) -> Result<(), ExecError> {
        self.inner.set_feature_layers(layers)
    }

    fn step(&mut self, batch: &StepBatch, out: &mut StepOutput) -> Result<(), ExecError> {
        self.inner.step(batch, out)
    }

    fn attach_draft(&mut self, draft: Draft) -> Result<(), ExecError> {
        self.inner.attach_draft(draft)
    }

    fn draft(&mut self, batch: &DraftBatch, logits: &mut Vec<f32>) -> Result<(), ExecError> {
        self.inner.draft(batch, logits)?;
        let vocab = self.inner.info().vocab;
        for (row, id) in logits.chunks_exact_mut(vocab).zip(self.overrule(batch)) {
            // Above every soft cap; the engine takes the highest.
            row[id as usize] = 1e4;
        }
        Ok(())
    }

    fn read_bandwidth(&self) -> Result<Option<f64>, ExecError> {
        self.inner.read_bandwidth()
    }

    fn draft_largest(
        &mut self,
        batch: &DraftBatch,
        scratch: &mut Vec<f32>,
        ids: &mut Vec<Option<u32>>,
    ) -> Result<(), ExecError> {
        self.inner.draft_largest(batch, scratch, ids)?;
        ids.clear();
        ids.extend(self.overrule(batch).into_iter().map(Some));
        Ok(())
    }

    fn most_candidates(&self) -> usize {
        self.inner.most_candidates()
    }

    fn export_block(&self, group: KvGroup, block: BlockId, dst: &mut [u8]) -> Result<(), ExecError> {
        self.inner.export_block(group, block, dst)
    }

    fn import_block(&mut self, group: KvGroup, block: BlockId, src: &[u8]) -> Result<(), ExecError> {
        self.inner.import_block(group, block, src)
    }
}
