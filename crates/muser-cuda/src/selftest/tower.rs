//! What a vision tower does besides products, against the scalar definitions: heads and attention, layer norm, GELU.

use muser_backend::arith::attention::{Digits, StoredHead, hadamard_factor, score_factor};
use muser_backend::arith::vision;
use muser_backend::conformance::Random;
use muser_gguf::GgmlType;
use muser_kv::BLOCK_LEN;

use super::Card;
use super::digits::rotated_key;
use super::steps::{EPS, read, row, same};
use crate::CudaError;
use crate::driver::Buffer;
use crate::forward::{Activations, layer_bytes};
use crate::kernels::{DigitArgs, GeluArgs, HeadArgs, RunArgs, TowerAttention, TowerNormArgs};
use crate::matrix::{AnyKind, Product, RawPart};
use crate::tower::{NARROW, TowerKernels};

/// Checks them; returns how many values were compared.
pub(super) fn check(card: &Card<'_>, random: &mut Random) -> Result<usize, CudaError> {
    let mut compared = 0;
    for (dim, keys, size) in [(96, 300, 1.0), (64, 70, 20.0), (128, 1, 1.0), (16, 600, 1e4), (80, 130, 1.0)] {
        for kernel in TowerAttention::of(card.context.arch, dim) {
            let kernels = TowerKernels::new(card.kernels, kernel)?;
            if compared == 0 {
                compared += rows(card, &kernels, random)?;
            }
            compared += attention(card, &kernels, (dim, keys, size), random)?;
        }
    }
    Ok(compared)
}

/// Queries, keys and values of two heads, all of one run.
fn attention(
    card: &Card<'_>,
    kernels: &TowerKernels,
    (dim, keys, size): (usize, usize, f32),
    random: &mut Random,
) -> Result<usize, CudaError> {
    let heads = 2;
    let (hidden, width) = (heads * dim, 3 * heads * dim);
    let mut part = row(random, keys * width);
    // Queries and keys of any size: nothing bounds the scores.
    part.chunks_mut(width).for_each(|row| row[..2 * hidden].iter_mut().for_each(|x| *x *= size));
    let upload = |values: &[f32]| Buffer::from_slice(card.context, values, "the self-test");
    let (part_on_card, bias) = (upload(&part)?, upload(&vec![0.0; width])?);
    // Turned by nothing: that belongs to the picture's plan.
    let turn: Vec<f32> = (0..keys * dim).map(|i| if i % dim < dim / 2 { 1.0 } else { 0.0 }).collect();
    let rope = upload(&turn)?;
    let slots: Vec<u32> = (0..keys as u32).collect();
    let slots = Buffer::from_slice(card.context, &slots, "the self-test")?;
    let block_bytes = layer_bytes(Digits::Two, heads);
    let kv = Buffer::<u8>::zeroed(card.context, keys.div_ceil(BLOCK_LEN) * block_bytes, "the self-test")?;
    let q = Buffer::<u8>::zeroed(card.context, keys * heads * 256, "the self-test")?;
    let f = Buffer::<f32>::zeroed(card.context, keys * heads, "the self-test")?;
    let args = HeadArgs {
        part: part_on_card.at(0),
        bias: bias.at(0),
        rope: rope.at(0),
        slots: slots.at(0),
        q: q.at(0),
        f: f.at(0),
        kv: kv.at(0),
        block_bytes: block_bytes as u64,
        segments: 1,
        n: keys as u32,
        heads: heads as u32,
        dim: dim as u32,
        factor: score_factor(dim, Digits::Two),
        hadamard: if dim.is_power_of_two() { hadamard_factor(dim) } else { 0.0 },
    };
    kernels.store_heads(card.stream, &args)?;

    let run = 16 * kernels.attend.1.warps as usize;
    let runs: Vec<u32> = (0..keys)
        .step_by(run)
        .flat_map(|first| [first, (first + run).min(keys), 0, keys].map(|x| x as u32))
        .collect();
    let runs_on_card = Buffer::from_slice(card.context, &runs, "the self-test")?;
    let out = Buffer::<f32>::zeroed(card.context, keys * hidden, "the self-test")?;
    let d = DigitArgs {
        q: q.at(0),
        f: f.at(0),
        kv: kv.at(0),
        block_bytes: block_bytes as u64,
        heads: heads as u32,
        kv_heads: heads as u32,
        group: 1,
        ..DigitArgs::default()
    };
    let args = RunArgs {
        d,
        runs: runs_on_card.at(0),
        out: out.at(0),
        from: 0,
        to: keys as u32,
        dim: dim as u32,
        _padding: 0,
    };
    kernels.attend(card.stream, &args, runs.len() / 4)?;
    card.stream.synchronize()?;
    let found = read(&out, keys * hidden)?;

    let mut compared = 0;
    for head in 0..heads {
        let of = |row: usize, which: usize| &part[row * width + which * hidden + head * dim..][..dim];
        let k: Vec<StoredHead> = (0..keys).map(|row| rotated_key(of(row, 1).to_vec(), Digits::Two)).collect();
        let v: Vec<StoredHead> = (0..keys).map(|row| StoredHead::of(of(row, 2), Digits::Two)).collect();
        for row in (0..keys).step_by(7) {
            let expected = vision::attention::attend(of(row, 0), &k, &v);
            let found = &found[row * hidden + head * dim..][..dim];
            compared += same(
                &kernels.attend.1.name,
                &format!("heads of {dim}, {keys} keys, row {row}"),
                &expected,
                found,
            )?;
        }
    }
    Ok(compared)
}

/// Layer norms and GELU, read back in the format of float matrices.
fn rows(card: &Card<'_>, kernels: &TowerKernels, random: &mut Random) -> Result<usize, CudaError> {
    let (n, hidden) = (5, NARROW as usize);
    let mut reader = Product::new(muser_backend::arith::MatrixRole::FfnIn, hidden);
    reader.raw.push(RawPart {
        ty: GgmlType::F32,
        kind: AnyKind::Float,
        address: 0,
        rows: 0,
        row_bytes: 0,
        first_row: 0,
        scale: 1.0,
    });
    let activations = Activations::new(card.context, n, hidden, &[&reader])?;
    let upload = |values: &[f32]| Buffer::from_slice(card.context, values, "the self-test");
    let floats = |activations: &Activations| -> Result<Vec<f32>, CudaError> {
        let mut bytes = vec![0u8; n * hidden * 4];
        activations.read(activations.act.f, &mut bytes)?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
    };
    let (h, part) = (row(random, n * hidden), row(random, 2 * n * hidden));
    let [part_bias, weight, bias] = [0; 3].map(|_| row(random, hidden));
    let on_card = [upload(&part)?, upload(&part_bias)?, upload(&weight)?, upload(&bias)?];
    let norm = |h: u64| TowerNormArgs {
        part: on_card[0].at(0),
        part_bias: on_card[1].at(0),
        h,
        weight: on_card[2].at(0),
        bias: on_card[3].at(0),
        act: activations.act,
        segments: 2,
        n: n as u32,
        hidden: hidden as u32,
        eps: EPS,
    };
    let mut norms = Vec::new();
    for (name, narrow) in [("tower_norm_6", true), ("tower_norm", false)] {
        let h_on_card = upload(&h)?;
        kernels.norm_by(narrow, card.stream, &norm(h_on_card.at(0)))?;
        card.stream.synchronize()?;
        norms.push((name, floats(&activations)?, read(&h_on_card, n * hidden)?));
    }
    let gelu = GeluArgs {
        part: on_card[0].at(0),
        bias: on_card[1].at(0),
        act: activations.act,
        segments: 2,
        n: n as u32,
    };
    let mut activated = Vec::new();
    for rows in [1, 3] {
        kernels.gelu_by(rows, card.stream, &gelu)?;
        card.stream.synchronize()?;
        activated.push(floats(&activations)?);
    }

    let mut compared = 0;
    for r in 0..n {
        let at = r * hidden..(r + 1) * hidden;
        let product: Vec<f32> =
            (0..hidden).map(|i| (part[r * hidden + i] + part[(n + r) * hidden + i]) + part_bias[i]).collect();
        let sum: Vec<f32> = h[at.clone()].iter().zip(&product).map(|(h, p)| h + p).collect();
        let mut expected = vec![0.0; hidden];
        vision::layer_norm(&sum, &weight, &bias, EPS, &mut expected);
        for (name, normed, stream) in &norms {
            compared += same(name, "value of the residual stream", &sum, &stream[at.clone()])?;
            compared += same(name, "normed value", &expected, &normed[at.clone()])?;
        }
        let expected: Vec<f32> = product.iter().map(|x| vision::gelu(*x)).collect();
        for activated in &activated {
            compared += same("tower_gelu", "value", &expected, &activated[at.clone()])?;
        }
    }
    Ok(compared)
}
