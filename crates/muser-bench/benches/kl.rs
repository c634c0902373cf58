//! How far quantised files of one model are from its best file, in nats.
//!
//! `kl BASE.gguf OTHER.gguf ... [--positions 5000] [--seed 1]`. Ten texts are drawn from the base model at temperature 1, from the
//! token that begins a text; then every model reads them. Of each position the Kullback-Leibler divergence from the base
//! model's distribution is taken; printed are bytes of the file, mean, 99th percentile and how often the most probable token is the same.
#![allow(clippy::print_stdout, reason = "a command")]

use muser_backend::conformance::Random;
use muser_backend::{Executor, KvCapacity, Row, RowInput, RowWants, StepBatch, StepOutput, argmax};
use muser_cpu::{CpuExecutor, CpuOptions};
use muser_kv::{BLOCK_LEN, BlockId};
use muser_model::Model;

const TEXTS: usize = 10;

struct Reader {
    executor: CpuExecutor,
    tables: Vec<Vec<BlockId>>,
    vocab: usize,
}

impl Reader {
    fn new(path: &str, len: usize) -> (Self, u32) {
        let model = Model::load(path).expect("a model");
        let (vocab, bos) = (model.geometry.vocab, model.file.u32("tokenizer.ggml.bos_token_id").unwrap_or(0));
        let options = CpuOptions { max_rows: 256, ..CpuOptions::default() };
        let mut executor = CpuExecutor::new(model, options).expect("an executor");
        let each = len.div_ceil(BLOCK_LEN) as u32;
        let all = each * TEXTS as u32;
        executor.allocate_kv(KvCapacity { full: all, sliding: all }).expect("memory");
        let tables = (0..TEXTS as u32).map(|t| (t * each..(t + 1) * each).map(BlockId).collect()).collect();
        (Self { executor, tables, vocab }, bos)
    }

    /// Logits of some tokens of some texts, which begin at `position`.
    fn read(&mut self, texts: &[(usize, &[u32])], position: usize) -> Vec<f32> {
        let (mut batch, mut out) = (StepBatch::default(), StepOutput::default());
        for (text, tokens) in texts {
            let table = &self.tables[*text];
            batch.push_seq(position as u32, table, 0, table);
            for &id in *tokens {
                let wants = RowWants { logits: true, ..RowWants::default() };
                batch.push_row(Row { input: RowInput::Token(id), wants });
            }
        }
        self.executor.step(&batch, &mut out).expect("a step");
        out.logits
    }
}

/// Log-probabilities.
fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let top = f64::from(logits.iter().fold(f32::NEG_INFINITY, |a, b| a.max(*b)));
    let sum: f64 = logits.iter().map(|l| (f64::from(*l) - top).exp()).sum();
    logits.iter().map(|l| f64::from(*l) - top - sum.ln()).collect()
}

fn draw(logits: &[f32], random: &mut Random) -> u32 {
    let mut rest = random.below(1 << 53) as f64 / (1u64 << 53) as f64;
    for (id, log) in log_softmax(logits).iter().enumerate() {
        rest -= log.exp();
        if rest < 0.0 {
            return id as u32;
        }
    }
    0
}

fn write_texts(reader: &mut Reader, bos: u32, len: usize, seed: u64) -> Vec<Vec<u32>> {
    let mut random = Random::new(seed);
    let mut texts = vec![vec![bos]; TEXTS];
    for position in 0..len - 1 {
        let last: Vec<(usize, &[u32])> =
            texts.iter().enumerate().map(|(t, text)| (t, &text[position..])).collect();
        let logits = reader.read(&last, position);
        let vocab = reader.vocab;
        for (text, logits) in texts.iter_mut().zip(logits.chunks(vocab)) {
            text.push(draw(logits, &mut random));
        }
    }
    texts
}

fn main() {
    let (mut files, mut positions, mut seed) = (Vec::new(), 5000usize, 1u64);
    let mut args = muser_bench::arguments();
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--positions" => positions = args.next().and_then(|v| v.parse().ok()).expect("a number"),
            "--seed" => seed = args.next().and_then(|v| v.parse().ok()).expect("a number"),
            _ => files.push(arg),
        }
    }
    let len = positions.div_ceil(TEXTS);
    let (mut base, bos) = Reader::new(&files[0], len);
    let texts = write_texts(&mut base, bos, len, seed);
    let chunks = |reader: &mut Reader| -> Vec<f32> {
        let mut all = Vec::new();
        for (t, text) in texts.iter().enumerate() {
            for (i, chunk) in text.chunks(128).enumerate() {
                all.extend(reader.read(&[(t, chunk)], 128 * i));
            }
        }
        all
    };
    let expected = chunks(&mut base);
    let vocab = base.vocab;
    println!("{} positions of text drawn from {}", expected.len() / vocab, files[0]);
    println!("| file | bytes | mean KL | 99 % | top-1 |\n|---|---|---|---|---|");
    for file in &files {
        let found = chunks(&mut Reader::new(file, len).0);
        let (mut divergences, mut same) = (Vec::new(), 0usize);
        for (p, q) in expected.chunks(vocab).zip(found.chunks(vocab)) {
            same += usize::from(argmax(p) == argmax(q));
            let (p, q) = (log_softmax(p), log_softmax(q));
            divergences.push(p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>());
        }
        let count = divergences.len();
        divergences.sort_by(f64::total_cmp);
        let mean = divergences.iter().sum::<f64>() / count as f64;
        let top = divergences[count * 99 / 100];
        let bytes = std::fs::metadata(file).map_or(0, |m| m.len());
        let name = file.rsplit('/').next().unwrap_or(file);
        println!("| {name} | {bytes} | {mean:.5} | {top:.4} | {:.2} % |", 100.0 * same as f64 / count as f64);
    }
}
