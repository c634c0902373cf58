//! What the kernels of the released tower take, each by itself, for 4,096 patches: where the time of a picture goes.

use muser_backend::arith::MatrixRole;
use muser_backend::arith::attention::{Digits, score_factor};
use muser_backend::conformance::Random;
use muser_gguf::GgmlType;

use super::Card;
use crate::CudaError;
use crate::driver::{Buffer, Context, Stream};
use crate::forward::{Activations, layer_bytes};
use crate::kernels::{DigitArgs, GeluArgs, HeadArgs, RunArgs, TowerAttention, TowerNormArgs};
use crate::loaded::Kernels;
use crate::matrix::{AnyKind, Product, RawPart};
use crate::tower::TowerKernels;

const PATCHES: usize = 4096;
const HIDDEN: usize = 1536;
const HEADS: usize = 16;
const FFN: usize = 8960;
const TOKENS: usize = 1024;

/// Microseconds of each kernel, the median of some launches.
pub fn tower_times(index: usize) -> Result<Vec<(String, f64)>, CudaError> {
    let context = Context::open(index)?;
    let kernels = Kernels::load(&context)?;
    let products = kernels.products(&context)?;
    let stream = Stream::new(&context)?;
    let card = Card { context: &context, kernels: &kernels, products: &products, stream: &stream };
    let mut times = Vec::new();
    attention(&card, &mut times)?;
    rows(&card, &mut times)?;
    adapter(&card, &mut times)?;
    Ok(times)
}

fn noise(card: &Card<'_>, len: usize) -> Result<Buffer<f32>, CudaError> {
    let mut random = Random::new(len as u64);
    let some: Vec<f32> = (0..999_983).map(|_| random.below(20_001) as f32 / 10_000.0 - 1.0).collect();
    let values: Vec<f32> = some.iter().copied().cycle().take(len).collect();
    Buffer::from_slice(card.context, &values, "timing")
}

fn time(
    card: &Card<'_>,
    times: &mut Vec<(String, f64)>,
    name: &str,
    mut launch: impl FnMut() -> Result<(), CudaError>,
) -> Result<(), CudaError> {
    const LAUNCHES: u32 = 10;
    let mut found = Vec::new();
    for _ in 0..5 {
        let start = std::time::Instant::now();
        for _ in 0..LAUNCHES {
            launch()?;
        }
        card.stream.synchronize()?;
        found.push(start.elapsed().as_secs_f64() * 1e6 / f64::from(LAUNCHES));
    }
    found.sort_by(f64::total_cmp);
    times.push((name.to_owned(), found[2]));
    Ok(())
}

fn attention(card: &Card<'_>, times: &mut Vec<(String, f64)>) -> Result<(), CudaError> {
    let dim = HIDDEN / HEADS;
    let part = noise(card, PATCHES * 3 * HIDDEN)?;
    let (bias, rope) = (noise(card, 3 * HIDDEN)?, noise(card, PATCHES * dim)?);
    let slots: Vec<u32> = (0..PATCHES as u32).collect();
    let slots = Buffer::from_slice(card.context, &slots, "timing")?;
    let block_bytes = layer_bytes(Digits::Two, HEADS);
    let kv = Buffer::<u8>::zeroed(card.context, PATCHES / 256 * block_bytes, "timing")?;
    let q = Buffer::<u8>::zeroed(card.context, PATCHES * HEADS * 256, "timing")?;
    let f = Buffer::<f32>::zeroed(card.context, PATCHES * HEADS, "timing")?;
    let out = Buffer::<f32>::zeroed(card.context, PATCHES * HIDDEN, "timing")?;
    let heads = HeadArgs {
        part: part.at(0),
        bias: bias.at(0),
        rope: rope.at(0),
        slots: slots.at(0),
        q: q.at(0),
        f: f.at(0),
        kv: kv.at(0),
        block_bytes: block_bytes as u64,
        segments: 1,
        n: PATCHES as u32,
        heads: HEADS as u32,
        dim: dim as u32,
        factor: score_factor(dim, Digits::Two),
        hadamard: 0.0,
    };
    let d = DigitArgs {
        q: q.at(0),
        f: f.at(0),
        kv: kv.at(0),
        block_bytes: block_bytes as u64,
        heads: HEADS as u32,
        kv_heads: HEADS as u32,
        group: 1,
        ..DigitArgs::default()
    };
    for (i, attention) in TowerAttention::of(card.context.arch, dim).into_iter().enumerate() {
        let (name, run) = (attention.name.clone(), 16 * attention.warps as usize);
        let kernels = TowerKernels::new(card.kernels, attention)?;
        if i == 0 {
            time(card, times, "q, k and v of all heads", || kernels.store_heads(card.stream, &heads))?;
        }
        for (what, keys) in [("full", PATCHES), ("windows", PATCHES / 4)] {
            let runs: Vec<u32> = (0..PATCHES)
                .step_by(run)
                .flat_map(|first| {
                    let window = first / keys;
                    [first, (window + 1) * keys, window * keys / 256, keys].map(|x| x as u32)
                })
                .collect();
            let on_card = Buffer::from_slice(card.context, &runs, "timing")?;
            let args = RunArgs {
                d,
                runs: on_card.at(0),
                out: out.at(0),
                from: 0,
                to: PATCHES as u32,
                dim: dim as u32,
                _padding: 0,
            };
            let name = format!("{name}, {what}");
            time(card, times, &name, || kernels.attend(card.stream, &args, runs.len() / 4))?;
        }
    }
    Ok(())
}

/// A product of floats, for its formats of activations; and one of super-blocks.
fn product(k: usize, ty: GgmlType, rows: usize, address: u64) -> Product {
    let mut product = Product::new(MatrixRole::FfnDown, k);
    let kind = AnyKind::of(ty).unwrap_or(AnyKind::Float);
    let row_bytes = ty.row_bytes(k).unwrap_or(0);
    product.raw.push(RawPart { ty, kind, address, rows: rows as u32, row_bytes, first_row: 0, scale: 1.0 });
    product.out_rows = rows;
    product
}

fn rows(card: &Card<'_>, times: &mut Vec<(String, f64)>) -> Result<(), CudaError> {
    let attention = TowerAttention::of(card.context.arch, HIDDEN / HEADS).swap_remove(0);
    let kernels = TowerKernels::new(card.kernels, attention)?;
    let part = noise(card, PATCHES * FFN)?;
    let (h, weights) = (noise(card, PATCHES * HIDDEN)?, noise(card, FFN)?);
    let act = |k: usize| Activations::new(card.context, PATCHES, k, &[&product(k, GgmlType::Q4_K, 0, 0)]);
    let (hidden, ffn) = (act(HIDDEN)?, act(FFN)?);
    let norm = TowerNormArgs {
        part: part.at(0),
        part_bias: weights.at(0),
        h: h.at(0),
        weight: weights.at(0),
        bias: weights.at(0),
        act: hidden.act,
        segments: 1,
        n: PATCHES as u32,
        hidden: HIDDEN as u32,
        eps: 1e-5,
    };
    time(card, times, "addition and norm", || kernels.norm(card.stream, &norm))?;
    let gelu =
        GeluArgs { part: part.at(0), bias: weights.at(0), act: ffn.act, segments: 1, n: PATCHES as u32 };
    time(card, times, "GELU", || kernels.gelu(card.stream, &gelu))
}

fn adapter(card: &Card<'_>, times: &mut Vec<(String, f64)>) -> Result<(), CudaError> {
    for (k, rows) in [(6144, 4096), (4096, 6656)] {
        let weights = noise(card, k * rows / 2)?;
        let product = product(k, GgmlType::BF16, rows, weights.at(0));
        let activations = Activations::new(card.context, TOKENS, k, &[&product])?;
        let out = Buffer::<f32>::zeroed(card.context, product.output_len(TOKENS), "timing")?;
        let name = format!("BF16 {k} x {rows}, {TOKENS} rows");
        time(card, times, &name, || {
            card.products.multiply(card.stream, &product, activations.act, out.at(0), TOKENS)
        })?;
    }
    Ok(())
}
