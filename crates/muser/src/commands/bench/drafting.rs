//! What drafting is worth: plain and drafted decoding of the same texts in turn, through the engine, greedy.
//!
//! Two engines hold the same model, one of them with a draft. Every repetition decodes with both, in another order each time,
//! and compares; the text must be the same. Where the model is small a third engine, without a draft like the first one,
//! takes part: what it gains or loses against the first one is what this measurement cannot tell from nothing. Events are
//! collected at the end of a text, so that no reader takes a processor from the threads that compute. With `--draft-accept P` the draft is a *stand-in*: the real draft does all its
//! work, but its proposals are replaced by ones that are right with probability `P`, taken from the known continuation. It
//! shows what a draft of that cost and that quality is worth on a model that is random weights, and is labelled synthetic.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use muser_backend::{DraftBatch, DraftExecutor, ExecError, Executor, TowerExecutor, delegate_executor};
use muser_bench::noise::{self, Counters};
use muser_bench::report::{DraftingReport, TextResult};
use muser_bench::results::{Rep, TestResult};
use muser_bench::stats::{median, round, spread};
use muser_engine::{DraftLength, Engine, EngineConfig, EngineHandle, Event, Request, SamplingParams};
use muser_model::Model;
use muser_model::cost::{Cost, CostOptions};
use muser_text::{Specials, Tokenizer};

use crate::cli::{BenchArgs, CompanionChoice};
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

/// Weights of which a third copy does not matter.
const SMALL_BYTES: u64 = 256 << 20;
/// Pause between looks at whether a text has ended.
const POLL: Duration = Duration::from_millis(3);

/// Runs the comparison; the second part are its two lines of the table.
pub fn compare(
    args: &BenchArgs,
    source: &ModelSource,
    console: &Console,
) -> Result<(DraftingReport, Vec<TestResult>)> {
    let model = source.load()?;
    let tokenizer = Tokenizer::from_gguf(&model.file)?;
    let known = Arc::new(Mutex::new(Continuation::default()));
    let plain_engine = || engine(args, &model, executor::build(model.clone(), &args.model, console)?);
    let plain = plain_engine()?;
    let (drafted, label) = drafted_engine(args, source, &model, &known, console)?;
    let is_small =
        Cost::of_file(&model.file, &model.geometry, CostOptions::default()).streamed_bytes < SMALL_BYTES;
    let again = if args.draft_accept.is_none() && is_small { Some(plain_engine()?) } else { None };
    let texts = if args.draft_accept.is_some() { 1 } else { BEGINNINGS.len() };
    let tokens = args.gen_tokens.max(2);

    let bar = Progress::steps(console, "drafting", texts as u64 * u64::from(args.reps), "texts");
    let mut both = [Rates::default(), Rates::default()];
    let engines: Vec<&EngineHandle> = [&plain, &drafted].into_iter().chain(again.as_ref()).collect();
    let prompts: Vec<Vec<u32>> =
        BEGINNINGS[..texts].iter().map(|begins| tokenizer.encode_prompt(begins, Specials::Plain)).collect();
    // Tokens per second by text and engine.
    let mut speeds = vec![vec![Vec::new(); engines.len()]; texts];
    let before = drafted.metrics();
    let mut steps = 0;
    for rep in 0..=args.reps {
        // The first round warms caches and is where the engine learns what a draft costs.
        let counts = rep > 0;
        for (text, prompt) in prompts.iter().enumerate() {
            if !counts && text > 0 && args.draft_accept.is_none() {
                // Everything has been touched once.
                continue;
            }
            let mut ids: Option<Vec<u32>> = None;
            for turn in 0..engines.len() {
                let which = order(rep as usize + text, turn, engines.len());
                let which = if counts { which } else { turn };
                let counters = Counters::now();
                let decoded = decode(engines[which], prompt, tokens)?;
                let noise = Counters::now().since(&counters);
                if counts {
                    speeds[text][which].push(decoded.tok_s);
                    if let Some(rates) = both.get_mut(which) {
                        rates.note(&decoded, &noise);
                    }
                    steps += if which == 1 { decoded.steps } else { 0 };
                } else {
                    known.lock().unwrap_or_else(PoisonError::into_inner).set(prompt, &decoded.ids);
                }
                ensure!(
                    ids.as_ref().is_none_or(|ids| *ids == decoded.ids),
                    "bug: the drafted text differs from the plain one after \"{}\"",
                    BEGINNINGS[text]
                );
                ids = Some(decoded.ids);
            }
            if counts {
                bar.advance(1);
            }
        }
    }
    let results: Vec<TextResult> =
        BEGINNINGS.iter().zip(&speeds).map(|(begins, speeds)| TextResult::new(begins, speeds)).collect();
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
        plain_against_plain: range(&results),
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

/// Which engine has its turn in a round: all orders come equally often.
fn order(round: usize, turn: usize, engines: usize) -> usize {
    let forwards = (round + turn) % engines;
    if (round / engines).is_multiple_of(2) { forwards } else { engines - 1 - forwards }
}

/// Lowest, median and highest of the second plain engine's ratios.
fn range(texts: &[TextResult]) -> Option<[f64; 3]> {
    let mut ratios: Vec<f64> = texts.iter().filter_map(|text| text.plain_again).collect();
    ratios.sort_by(f64::total_cmp);
    Some([*ratios.first()?, median(&ratios)?, *ratios.last()?])
}

/// Repetitions on their way into the report.
#[derive(Default)]
struct Rates {
    reps: Vec<Rep>,
    quiet: usize,
}

impl Rates {
    fn note(&mut self, decoded: &Decoded, noise: &noise::Noise) {
        self.quiet += usize::from(noise.quiet());
        let ms = 1e3 / decoded.tok_s.max(f64::MIN_POSITIVE);
        self.reps.push(Rep {
            tok_s: round(decoded.tok_s, 3),
            median_ms: round(ms, 4),
            best_ms: round(ms, 4),
            steps: decoded.steps as usize,
            others: noise.others.map(|share| round(share, 4)),
            steal: noise.steal.map(|share| round(share, 4)),
            load_average: noise::load_average(),
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
        // Room for all events of a text.
        event_ring: args.gen_tokens as usize + 16,
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
    console: &Console,
) -> Result<(EngineHandle, String)> {
    let mut inner = executor::build(model.clone(), &args.model, console)?;
    // With a stand-in, off means that nobody named one: auto.
    let choice = match (&args.draft, args.draft_accept) {
        (CompanionChoice::Off, Some(_)) => &CompanionChoice::Auto,
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
    while engine.is_running() {
        let Some(event) = submission.try_recv() else {
            // Reading each token as it comes would wake this thread on a processor that computes.
            std::thread::sleep(POLL);
            continue;
        };
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
    delegate_executor!(self => self.inner; info, allocate_kv, step, most_candidates, read_bandwidth, export_block,
        clear_rows, import_block, lend_block);
}

impl TowerExecutor for StandIn {
    delegate_executor!(self => self.inner; attach_projector, tower, begin_image, encode_image, drop_image);
}

impl DraftExecutor for StandIn {
    delegate_executor!(self => self.inner; attach_draft, has_draft_context);

    fn draft(&mut self, batch: &DraftBatch, logits: &mut Vec<f32>) -> Result<(), ExecError> {
        self.inner.draft(batch, logits)?;
        let vocab = self.inner.info().vocab;
        for (row, id) in logits.chunks_exact_mut(vocab).zip(self.overrule(batch)) {
            // Above every soft cap; the engine takes the highest.
            row[id as usize] = 1e4;
        }
        Ok(())
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
}
