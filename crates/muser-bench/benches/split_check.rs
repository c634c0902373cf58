//! A model shared between processor and cards: checks, as one JSON object on standard output.
//!
//! ```text
//! split_check same MODEL [DRAFT]      every cut, both orders, three parts, two executors on one card: ids, logits, proposals, K and V
//!                                     are those of one executor on the processor
//! split_check streamed MODEL [DRAFT]  the same with the processor first and its layers streamed to the card in every step
//! ```
//! `MUSER_CHECK_KV=8` does it with K and V in 8 bits.
#![expect(clippy::print_stdout, reason = "the result is printed")]

use std::time::Instant;

use muser_backend::{
    DraftBatch, Executor, KvCapacity, KvType, LayerRange, PartExecutor, Row, RowInput, RowWants, StepBatch,
    StepOutput,
};
use muser_cpu::{CpuExecutor, CpuOptions};
use muser_cuda::{CudaExecutor, CudaOptions};
use muser_kv::{BLOCK_LEN, BlockId, KvGroup};
use muser_model::{Draft, Model};
use muser_split::{Grouping, SplitExecutor};
use serde_json::{Value, json};

type AnyError = Box<dyn std::error::Error>;

/// Rows of the steps that every executor takes: a long prompt, the rest of a block and more, single tokens, a few.
const STEPS: [usize; 9] = [300, 100, 1, 1, 1, 5, 130, 1, 17];

fn main() -> Result<(), AnyError> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let args: Vec<String> = muser_bench::arguments().collect();
    let result = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["same", model, ref draft @ ..] => {
            let draft = draft.first().map(Draft::load).transpose()?;
            same(&Model::load(model)?, draft.as_ref(), false)?
        }
        ["streamed", model, ref draft @ ..] => {
            let draft = draft.first().map(Draft::load).transpose()?;
            same(&Model::load(model)?, draft.as_ref(), true)?
        }
        _ => return Err("usage: same MODEL [DRAFT] | streamed MODEL [DRAFT]".into()),
    };
    println!("{}", serde_json::to_string_pretty(&json!({ "command": args.join(" "), "result": result }))?);
    Ok(())
}

fn kv_type() -> KvType {
    match std::env::var("MUSER_CHECK_KV").as_deref() {
        Ok("8") => KvType::Int8,
        _ => KvType::Int16,
    }
}

/// Where a part is.
#[derive(Clone, Copy, PartialEq)]
enum Place {
    Processor,
    Card,
}
use Place::{Card, Processor};

/// Parts with the layer that each ends before.
type Cut = Vec<(Place, usize)>;

fn cuts(layers: usize) -> Vec<Cut> {
    let mut cuts = Vec::new();
    for cut in 1..layers {
        cuts.push(vec![(Processor, cut), (Card, layers)]);
        cuts.push(vec![(Card, cut), (Processor, layers)]);
    }
    let third = (layers / 3).max(1);
    let ends = [third, 2 * third, layers];
    if ends[1] < layers {
        cuts.push(ends.map(|end| (Card, end)).to_vec());
        cuts.push([Processor, Card, Processor].into_iter().zip(ends).collect());
        cuts.push([Card, Processor, Card].into_iter().zip(ends).collect());
    }
    cuts.push(vec![(Card, layers / 2), (Card, layers)]);
    cuts
}

fn same(model: &Model, draft: Option<&Draft>, streamed: bool) -> Result<Value, AnyError> {
    let kv = kv_type();
    let layers = model.geometry.layers();
    let mut whole = CpuExecutor::new(model.clone(), CpuOptions { kv, ..CpuOptions::default() })?;
    let expected = trace(&mut whole, draft)?;
    let mut equal = 0;
    let start = Instant::now();
    let cuts = cuts(layers).into_iter().filter(|cut| !streamed || cut[0].0 == Processor);
    let ways: &[Grouping] =
        if streamed { &[Grouping::Streamed] } else { &[Grouping::Fixed(1), Grouping::Fixed(3)] };
    for cut in cuts {
        for way in ways {
            let parts = parts(model, &cut, kv)?;
            let mut split = SplitExecutor::new(parts, model, *way)?;
            if streamed {
                split = split.with_streaming(STEPS.iter().sum());
                if !split.streams() {
                    return Err(format!("{}: nothing is streamed", split.info().device).into());
                }
            }
            let name = format!("{}, {way:?}", split.info().device);
            let found = trace(&mut split, draft).map_err(|error| format!("{name}: {error}"))?;
            if streamed && !split.streams() {
                return Err(format!("{name}: it was given up, the log says why").into());
            }
            if found != expected {
                let (ids, proposals) = (found.ids == expected.ids, found.proposals == expected.proposals);
                return Err(
                    format!("{name}: other bits (same ids: {ids}, same proposals: {proposals})").into()
                );
            }
            equal += 1;
        }
    }
    Ok(json!({
        "layers": layers, "draft": draft.is_some(), "kv": kv.name(), "splits_with_equal_bits": equal, "of": equal,
        "seconds": start.elapsed().as_secs_f64(), "hash": expected.rest.to_string(),
    }))
}

fn parts(model: &Model, cut: &Cut, kv: KvType) -> Result<Vec<Box<dyn PartExecutor>>, AnyError> {
    let layers = model.geometry.layers();
    let mut first = 0;
    let mut parts: Vec<Box<dyn PartExecutor>> = Vec::new();
    for (place, end) in cut {
        let range = LayerRange::new(first..*end, layers).ok_or("a cut outside the model")?;
        first = *end;
        parts.push(match place {
            Processor => {
                Box::new(CpuExecutor::part(model.clone(), range, CpuOptions { kv, ..CpuOptions::default() })?)
            }
            Card => {
                let options = CudaOptions { max_rows: 512, kv, ..CudaOptions::default() };
                Box::new(CudaExecutor::part(model, range, options)?)
            }
        });
    }
    Ok(parts)
}

/// What an executor makes of the steps.
#[derive(PartialEq)]
struct Trace {
    ids: Vec<Option<u32>>,
    proposals: Vec<Option<u32>>,
    /// Logits, hidden states, K and V of rows that were written.
    rest: blake3::Hash,
}

fn trace(executor: &mut dyn Executor, draft: Option<&Draft>) -> Result<Trace, AnyError> {
    if let Some(draft) = draft {
        executor.attach_draft(draft.clone())?;
    }
    let positions: usize = STEPS.iter().sum();
    let blocks = positions.div_ceil(BLOCK_LEN) as u32;
    executor.allocate_kv(KvCapacity { full: blocks, sliding: blocks })?;
    let table: Vec<BlockId> = (0..blocks).map(BlockId).collect();
    let (mut batch, mut out) = (StepBatch::default(), StepOutput::default());
    let mut hasher = blake3::Hasher::new();
    let mut floats = |values: &[f32]| {
        values.iter().for_each(|value| {
            hasher.update(&value.to_bits().to_le_bytes());
        });
    };
    let (mut ids, mut proposals, mut at) = (Vec::new(), Vec::new(), 0);
    for rows in STEPS {
        batch.clear();
        batch.push_seq(at as u32, &table, 0, &table);
        for position in at..at + rows {
            let wants = RowWants { logits: true, hidden: true, argmax: true, candidates: 0 };
            batch.push_row(Row { input: RowInput::Token((position * 41 % 4000) as u32), wants });
        }
        executor.step(&batch, &mut out)?;
        floats(&out.logits);
        floats(&out.hidden);
        ids.extend(&out.argmax);
        at += rows;
    }
    if draft.is_some() {
        let (mut round, mut logits) = (DraftBatch::default(), Vec::new());
        round.push(7, positions as u32, 5, 0, &table);
        executor.draft_largest(&round, &mut Vec::new(), &mut proposals)?;
        executor.draft(&round, &mut logits)?;
        floats(&logits);
    }
    for group in [KvGroup::Full, KvGroup::Sliding] {
        let mut bytes = vec![0; executor.info().block_bytes(group)];
        for (number, block) in table.iter().enumerate() {
            executor.export_block(group, *block, &mut bytes)?;
            executor.clear_rows(group, (positions - number * BLOCK_LEN).min(BLOCK_LEN), &mut bytes);
            hasher.update(&bytes);
        }
    }
    Ok(Trace { ids, proposals, rest: hasher.finalize() })
}
