//! How often proposals count, by method of verification, on text that the model itself has sampled.
//!
//! `draft_acceptance MODEL DRAFT TOKENS [POSITIONS_FILE]`: samples a story at temperature 1 with the published filters, then
//! asks the draft at every position for a whole block. For each method (those of the sampler, and some that it could have) it prints the probability that the i-th proposal is
//! accepted if those before it were, and the tokens per target pass that follow. With a file name it also writes the rows of
//! some positions, as the chi-square test of the sampler reads them.

#![expect(clippy::print_stdout, reason = "an example prints its figures")]

use std::io::Write as _;

use muser_backend::{
    DraftBatch, Executor, KvCapacity, KvType, ReferenceExecutor, Row, RowInput, RowWants, StepBatch,
    StepOutput,
};
use muser_engine::{
    SamplingParams,
    sampler::{DrawKey, Sampler, rng},
};
use muser_kv::{BLOCK_LEN, BlockId};
use muser_model::{Draft, Model};

/// A user asks for a short story, in the bundled vocabulary.
const PROMPT: [u32; 21] = [
    4084, 4089, 306, 272, 4090, 563, 256, 536, 402, 348, 1355, 387, 256, 1229, 87, 13, 4087, 4089, 539, 415,
    398,
];
const METHODS: [&str; 6] =
    ["exact", "rejection", "rejection, q at 1/2", "one uniform number", "one gumbel noise", "greedy"];
/// Candidates of a row that the test of the sampler keeps.
const KEPT: usize = 96;

type Distribution = Vec<(u32, f64)>;
type Rows = Vec<Vec<f32>>;
type AnyError = Box<dyn std::error::Error>;

fn main() -> Result<(), AnyError> {
    let mut args = muser_bench::arguments();
    let (Some(model), Some(draft), Some(tokens)) = (args.next(), args.next(), args.next()) else {
        return Err("usage: draft_acceptance MODEL DRAFT TOKENS [POSITIONS_FILE]".into());
    };
    let tokens: usize = tokens.parse()?;
    let model = Model::load(model)?;
    let mut executor: Box<dyn Executor> = Box::new(ReferenceExecutor::new(model, KvType::F32)?);
    executor.attach_draft(Draft::load(draft)?)?;
    let (ids, target_rows) = sample_text(executor.as_mut(), tokens)?;
    let draft_rows = draft_everywhere(executor.as_mut(), &ids)?;
    let block = executor.info().draft.map_or(0, |draft| draft.max_proposals);

    let params = SamplingParams::default();
    let mut sampler = Sampler::new();
    let targets: Vec<Distribution> =
        target_rows.iter().map(|row| distribution(&mut sampler, &params, row)).collect();
    let mut sums = vec![[0.0; METHODS.len()]; block];
    let mut counts = vec![0.0; block];
    for (start, rows) in draft_rows.iter().enumerate() {
        // Proposal i of a block that begins after `start` generated tokens is about generated token `start + 1 + i`.
        for (i, row) in rows.iter().enumerate() {
            let Some(p) = targets.get(start + 1 + i) else { break };
            let q = distribution(&mut sampler, &params, row);
            let sharp =
                distribution(&mut sampler, &SamplingParams { temperature: 0.5, ..params.clone() }, row);
            let rates = acceptance(p, &q, &sharp, (start * block + i) as u64);
            sums[i].iter_mut().zip(rates).for_each(|(sum, rate)| *sum += rate);
            counts[i] += 1.0;
        }
    }
    for (method, name) in METHODS.iter().enumerate() {
        let rates: Vec<f64> = sums.iter().zip(&counts).map(|(sum, n)| sum[method] / n).collect();
        let (mut survival, mut per_pass) = (1.0, 1.0);
        for rate in &rates {
            survival *= rate;
            per_pass += survival;
        }
        let rates: Vec<String> = rates.iter().map(|rate| format!("{rate:.3}")).collect();
        println!("{name:<20} {} -> {per_pass:.2} tokens per pass", rates.join(" "));
    }
    if let Some(path) = args.next() {
        let mut file = std::fs::File::create(path)?;
        for start in (0..draft_rows.len()).step_by(draft_rows.len().div_ceil(24)) {
            for row in [&target_rows[start + 1], &draft_rows[start][start % 2]] {
                write_row(&mut file, row)?;
            }
        }
    }
    Ok(())
}

/// Tokens of prompt and story, and the target's logits for each token of the story.
fn sample_text(executor: &mut dyn Executor, tokens: usize) -> Result<(Vec<u32>, Rows), AnyError> {
    let blocks = blocks(PROMPT.len() + tokens);
    executor.allocate_kv(KvCapacity { full: blocks.len() as u32, sliding: blocks.len() as u32 })?;
    let mut ids = PROMPT.to_vec();
    let (mut batch, mut out) = (StepBatch::default(), StepOutput::default());
    let (mut rows, mut done) = (Vec::new(), 0);
    let mut sampler = Sampler::new();
    for position in 0..tokens as u64 {
        batch.clear();
        batch.push_seq(done as u32, &blocks, 0, &blocks);
        for (i, &id) in ids.iter().enumerate().skip(done) {
            let wants = RowWants { logits: i + 1 == ids.len(), ..RowWants::default() };
            batch.push_row(Row { input: RowInput::Token(id), wants });
        }
        done = ids.len();
        executor.step(&batch, &mut out)?;
        let key = DrawKey { seed: 1, index: 0, position };
        ids.extend(sampler.draw(&SamplingParams::default(), &out.logits, key));
        rows.push(out.logits.clone());
    }
    Ok((ids, rows))
}

/// A whole block of proposals after each token of the story, its last excepted: rows of logits.
fn draft_everywhere(executor: &mut dyn Executor, ids: &[u32]) -> Result<Vec<Rows>, AnyError> {
    let blocks = blocks(ids.len());
    let info = executor.info().clone();
    let proposals = info.draft.map_or(0, |draft| draft.max_proposals) as u32;
    let (mut batch, mut logits, mut all) = (DraftBatch::default(), Vec::new(), Vec::new());
    for position in PROMPT.len()..ids.len() - 1 {
        batch.clear();
        batch.push(ids[position], position as u32, proposals, 0, &blocks[..position.div_ceil(BLOCK_LEN)]);
        executor.draft(&batch, &mut logits)?;
        all.push(logits.chunks(info.vocab).map(<[f32]>::to_vec).collect());
    }
    Ok(all)
}

fn blocks(positions: usize) -> Vec<BlockId> {
    (0..positions.div_ceil(BLOCK_LEN) as u32).map(BlockId).collect()
}

fn distribution(sampler: &mut Sampler, params: &SamplingParams, row: &[f32]) -> Distribution {
    let Some(candidates) = sampler.distribution(params, row) else { return Vec::new() };
    let total: f64 = candidates.iter().map(|c| f64::from(c.value)).sum();
    candidates.iter().map(|c| (c.id, f64::from(c.value) / total)).collect()
}

/// Probability that a proposal counts, by method.
fn acceptance(p: &Distribution, q: &Distribution, sharp: &Distribution, salt: u64) -> [f64; METHODS.len()] {
    let of = |d: &Distribution, id: u32| d.iter().find(|(other, _)| *other == id).map_or(0.0, |(_, p)| *p);
    let overlap = |q: &Distribution| p.iter().map(|&(id, p)| p.min(of(q, id))).sum::<f64>();
    // With one number for both, a token counts where its stretch of [0, 1) is the same in both orders.
    let stretch = |d: &Distribution, id: u32| {
        let mut from = 0.0;
        for &(other, p) in d {
            if other == id {
                return (from, from + p);
            }
            from += p;
        }
        (1.0, 1.0)
    };
    let shared: f64 = p
        .iter()
        .map(|&(id, _)| {
            let ((a, b), (c, d)) = (stretch(p, id), stretch(q, id));
            (b.min(d) - a.max(c)).max(0.0)
        })
        .sum();
    let races = 200;
    let winner = |d: &Distribution, race: u64| {
        let time = |&(id, p): &(u32, f64)| {
            -(1.0 - rng::uniform(salt, id, race, rng::Stream::Sample)).ln() / p.max(1e-300)
        };
        d.iter().min_by(|a, b| time(a).total_cmp(&time(b))).map(|(id, _)| *id)
    };
    let gumbel = (0..races).filter(|&race| winner(p, race) == winner(q, race)).count() as f64 / races as f64;
    let (best_p, best_q) = (p.first().map(|c| c.0), q.first().map(|c| c.0));
    let exact = best_q.map_or(0.0, |id| of(p, id));
    [exact, overlap(q), overlap(sharp), shared, gumbel, f64::from(u8::from(best_p == best_q))]
}

/// The best candidates of a row: 16-bit ids and 32-bit logits, little-endian.
fn write_row(file: &mut std::fs::File, row: &[f32]) -> std::io::Result<()> {
    let mut ranked: Vec<(usize, f32)> = row.iter().copied().enumerate().collect();
    ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
    for (id, value) in &ranked[..KEPT] {
        file.write_all(&(*id as u16).to_le_bytes())?;
        file.write_all(&value.to_le_bytes())?;
    }
    Ok(())
}
