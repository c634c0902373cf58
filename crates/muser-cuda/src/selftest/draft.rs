//! The steps of a draft, and the selection of the largest logits, on random rows against the scalar definitions.

use muser_backend::arith;
use muser_backend::arith::attention::{self as definition, Digits, StoredHead, score_factor};
use muser_backend::candidates;
use muser_backend::conformance::Random;
use muser_kv::BLOCK_LEN;

use super::Card;
use super::digits::{normed, put, rotated_key, same_blocks, same_queries, stored_query};
use super::steps::{EPS, Factors, HEAD, activations, dequantised, quantised, read, row, same, summed};
use crate::CudaError;
use crate::driver::{Buffer, Launch};
use crate::forward::{
    SELECT_KEYS, SELECT_THREADS, SelectShape, combine_launch, digits_split_launch, head_layout, id_of_rank,
    value_of_rank,
};
use crate::kernels::{
    CombineArgs, DigitArgs, DraftEmbedArgs, DraftHeadArgs, DraftNormArgs, DraftTapArgs, SelectArgs, Tuning,
};

/// Checks every kernel of a draft with K and V of one width; returns how many values were compared.
pub(super) fn check(card: &Card<'_>, kv: Digits, random: &mut Random) -> Result<usize, CudaError> {
    let mut compared = tap(card, random)? + embed(card, random)?;
    for hidden in [2560, 512] {
        compared += norm(card, hidden, true, random)? + norm(card, hidden, false, random)?;
    }
    compared += heads(card, kv, true, random)? + heads(card, kv, false, random)?;
    for position in [300, 256, 0] {
        compared += attention(card, kv, position, random)?;
    }
    Ok(compared)
}

fn tap(card: &Card<'_>, random: &mut Random) -> Result<usize, CudaError> {
    let (n, hidden, taps) = (2, 512, 2);
    let rows: Vec<Vec<f32>> = (0..taps).map(|_| row(random, n * hidden)).collect();
    let target = activations(card, n, taps * hidden)?;
    for (tap, h) in rows.iter().enumerate() {
        let h_on = Buffer::from_slice(card.context, h, "self-test rows")?;
        let args = DraftTapArgs {
            h: h_on.at(0),
            act: target.act,
            hidden: hidden as u32,
            first_block: (tap * hidden / 256) as u32,
        };
        card.stream.launch(&card.kernels.get("draft_tap")?, Launch::new((1, n as u32), 128), &args)?;
        card.stream.synchronize()?;
    }
    let together = (0..n).flat_map(|r| rows.iter().flat_map(move |h| &h[r * hidden..][..hidden]));
    let expected = quantised(&together.copied().collect::<Vec<f32>>());
    same("draft_tap", "quantised value", &expected, &dequantised(&target, n)?)
}

fn embed(card: &Card<'_>, random: &mut Random) -> Result<usize, CudaError> {
    let hidden = 768;
    let table = row(random, 3 * hidden);
    let table_on = Buffer::from_slice(card.context, &table, "self-test rows")?;
    let inputs = Buffer::from_slice(card.context, &[2u32, 0], "self-test rows")?;
    let h = Buffer::from_slice(card.context, &vec![f32::NAN; 2 * hidden], "self-test rows")?;
    let args = DraftEmbedArgs {
        table: table_on.at(0),
        inputs: inputs.at(0),
        h: h.at(0),
        row_bytes: 4 * hidden as u64,
        type_id: muser_gguf::GgmlType::F32.id(),
        hidden: hidden as u32,
        factor: 0.75,
        _padding: 0,
    };
    card.stream.launch(&card.kernels.get("draft_embed")?, Launch::new((1, 2), 128), &args)?;
    card.stream.synchronize()?;
    let expected: Vec<f32> =
        [&table[2 * hidden..], &table[..hidden]].concat().iter().map(|v| v * 0.75).collect();
    same("draft_embed", "value", &expected, &read(&h, 2 * hidden)?)
}

/// With a residual stream all rows, without one output rows of a list.
fn norm(card: &Card<'_>, hidden: usize, residual: bool, random: &mut Random) -> Result<usize, CudaError> {
    let (n, segments) = (3, 5);
    let (h, part, w) = (row(random, n * hidden), row(random, segments * n * hidden), row(random, hidden));
    let buffer = |values: &[f32]| Buffer::from_slice(card.context, values, "self-test rows");
    let (h_on, part_on, w_on) = (buffer(&h)?, buffer(&part)?, buffer(&w)?);
    let list: Vec<u32> = if residual { vec![0, 1, 2] } else { vec![2, 1] };
    let list_on = Buffer::from_slice(card.context, &list, "self-test rows")?;
    let target = activations(card, n, hidden)?;
    let factors = Factors::of(card, hidden, random, residual)?;
    let args = DraftNormArgs {
        part: part_on.at(0),
        factors: factors.address(),
        h: if residual { h_on.at(0) } else { 0 },
        w: w_on.at(0),
        rows: if residual { 0 } else { list_on.at(0) },
        act: target.act,
        segments: segments as u32,
        n: n as u32,
        hidden: hidden as u32,
        eps: EPS,
        ..DraftNormArgs::default()
    };
    let shape = Launch::new((list.len() as u32, 1), (hidden / 8) as u32);
    card.stream.launch(&card.kernels.get("draft_norm")?, shape, &args)?;
    card.stream.synchronize()?;
    let (mut sums, mut normed) = (Vec::new(), Vec::new());
    for &r in &list {
        let o = summed(&part, &factors, (n, hidden), r as usize, 0, hidden);
        let h = &h[r as usize * hidden..][..hidden];
        let x: Vec<f32> = if residual { h.iter().zip(&o).map(|(h, o)| h + o).collect() } else { o };
        let factor = arith::inverse_rms(arith::row_dot(&x, &x), hidden, EPS);
        normed.extend(x.iter().zip(&w).map(|(x, w)| x * factor * w));
        sums.extend(x);
    }
    let codes = quantised(&normed);
    let mut compared = same("draft_norm", "quantised value", &codes, &dequantised(&target, list.len())?)?;
    if residual {
        compared += same("draft_norm", "residual", &sums, &read(&h_on, n * hidden)?)?;
    }
    Ok(compared)
}

/// Norm of a head and rotation of its halves.
fn rotated(x: &[f32], weight: &[f32], angles: &[f32]) -> Vec<f32> {
    let r = arith::inverse_rms(arith::row_dot(x, x), HEAD, EPS);
    let x: Vec<f32> = x.iter().zip(weight).map(|(x, w)| x * r * w).collect();
    let half = HEAD / 2;
    let pair = |t: usize| (x[t], x[t + half], angles[2 * t], angles[2 * t + 1]);
    let first = (0..half).map(&pair).map(|(a, b, c, s)| a * c - b * s);
    let second = (0..half).map(pair).map(|(a, b, c, s)| a * s + b * c);
    first.chain(second).collect()
}

/// Query heads, and K and V of two layers; not computed: zeros in their place. Bytes of other rows stay.
fn heads(card: &Card<'_>, kv: Digits, computed: bool, random: &mut Random) -> Result<usize, CudaError> {
    let name = format!("draft_heads_{}", kv.count());
    let (n, heads, layers, segments) = (2usize, 3usize, 2usize, 3usize);
    let (k_at, v_at) = (heads * HEAD, (heads + layers) * HEAD);
    let width = (heads + 2 * layers) * HEAD;
    let part = row(random, segments * n * width);
    let weights = row(random, (1 + layers) * HEAD);
    let angles: Vec<f32> = (0..n * HEAD / 2)
        .flat_map(|i| {
            <[f32; 2]>::from(arith::rotation(i / (HEAD / 2) * 55, 1.0 / (1 + i % (HEAD / 2)) as f64))
        })
        .collect();
    let places = [(1usize, 255usize), (0, 3)];
    let data: Vec<u32> = [0, 1].into_iter().chain(places.map(|(b, p)| (b * BLOCK_LEN + p) as u32)).collect();
    let floats = |values: &[f32]| Buffer::from_slice(card.context, values, "self-test rows");
    let (part_on, weights_on, angles_on) = (floats(&part)?, floats(&weights)?, floats(&angles)?);
    let data_on = Buffer::from_slice(card.context, &data, "self-test positions")?;
    let layer_bytes = head_layout(kv).bytes();
    let mut expected = vec![0xABu8; 2 * layers * layer_bytes];
    let kv_on = Buffer::from_slice(card.context, &expected, "self-test KV")?;
    let q_on = Buffer::<u8>::zeroed(card.context, n * heads * 2 * HEAD, "self-test queries")?;
    let f_on = floats(&vec![f32::NAN; n * heads])?;
    let factors = Factors::of(card, width, random, computed)?;
    let args = DraftHeadArgs {
        part: if computed { part_on.at(0) } else { 0 },
        factors: factors.address(),
        q_norm: weights_on.at(0),
        k_norms: weights_on.at(HEAD),
        angles: angles_on.at(0),
        positions: data_on.at(0),
        slots: data_on.at(2),
        q: q_on.at(0),
        f: f_on.at(0),
        kv: kv_on.at(0),
        block_bytes: (layers * layer_bytes) as u64,
        layer_bytes: layer_bytes as u64,
        segments: segments as u32,
        n: n as u32,
        width: width as u32,
        heads: heads as u32,
        kv_heads: 1,
        layers: layers as u32,
        k_at: k_at as u32,
        v_at: v_at as u32,
        eps: EPS,
        factor: score_factor(HEAD, kv),
    };
    let grid = ((heads + 2 * layers).div_ceil(4) as u32, n as u32);
    card.stream.launch(&card.kernels.get(&name)?, Launch::new(grid, 128), &args)?;
    card.stream.synchronize()?;
    let mut queries = Vec::new();
    for (r, (block, position)) in places.into_iter().enumerate() {
        let angles = &angles[r * HEAD..][..HEAD];
        let sums = |at: usize| summed(&part, &factors, (n, width), r, at, HEAD);
        queries.extend(
            (0..heads).map(|head| stored_query(rotated(&sums(head * HEAD), &weights[..HEAD], angles), kv)),
        );
        for layer in 0..layers {
            let (mut k, mut v) = (vec![0.0; HEAD], vec![0.0; HEAD]);
            if computed {
                k = rotated(&sums(k_at + layer * HEAD), &weights[(1 + layer) * HEAD..][..HEAD], angles);
                v = sums(v_at + layer * HEAD);
            }
            let head = &mut expected[(block * layers + layer) * layer_bytes..][..layer_bytes];
            put(head, kv, position, &rotated_key(k, kv), &StoredHead::of(&v, kv));
        }
    }
    let mut compared = same_blocks(&name, &expected, &kv_on)?;
    if computed {
        compared += same_queries(&name, &queries, (&q_on, &f_on))?;
    }
    Ok(compared)
}

/// Three rows of two query heads and one key head, the first at `position`: the context through a window, then the block.
fn attention(card: &Card<'_>, kv: Digits, position: usize, random: &mut Random) -> Result<usize, CudaError> {
    let name = format!("digits_split_{}", kv.count());
    let (heads, rows, window) = (2usize, 3usize, 200usize);
    let (width, layout) = (heads * HEAD, head_layout(kv));
    let blocks = position.div_ceil(BLOCK_LEN);
    // The table swaps the blocks of the context; the block's own is the second of its kind. Rows behind the context and the
    // block are stale.
    let mut memory = vec![0u8; 2 * layout.bytes()];
    let mut own = vec![0u8; 2 * layout.bytes()];
    let (mut keys, mut values) = (Vec::new(), Vec::new());
    for j in 0..(blocks + 1) * BLOCK_LEN {
        let (block, place) = (j / BLOCK_LEN, j % BLOCK_LEN);
        let (k, v) = (rotated_key(normed(random, 2.0), kv), StoredHead::of(&row(random, HEAD), kv));
        let head = if block < blocks {
            &mut memory[(1 - block) * layout.bytes()..][..layout.bytes()]
        } else {
            &mut own[layout.bytes()..]
        };
        put(head, kv, place, &k, &v);
        keys.push(k);
        values.push(v);
    }
    let first_of = |row: usize| (position + row + 1).saturating_sub(window).min(position);
    let first_block = (first_of(0) / BLOCK_LEN).min(blocks);
    // The context takes whole blocks, the block comes behind them.
    let own_at = blocks * BLOCK_LEN;
    let (mut codes, mut factors, mut expected) = (Vec::new(), Vec::new(), Vec::new());
    for r in 0..rows {
        let sees = |j: usize| (first_of(r)..position).contains(&j) || (own_at..own_at + rows).contains(&j);
        for _ in 0..heads {
            let q = normed(random, 1.9);
            expected.extend(definition::attend(&q, &keys, &values, sees, kv));
            let (digits, f) = stored_query(q, kv);
            codes.extend(digits);
            factors.push(f);
        }
    }
    let parts = (blocks - first_block + 1) as u32;
    // counts, row_tile and padding, a tile, its ends.
    let tile = [0, rows as u32, position as u32, first_block as u32, first_block as u32, parts, 0, parts];
    let data: Vec<u32> = [parts, 1, 0, 0, 0, 0, 0, 0]
        .into_iter()
        .chain(tile)
        .chain([position as u32, 1, rows as u32])
        .collect();
    let data_on = Buffer::from_slice(card.context, &data, "self-test data")?;
    let table_on = Buffer::from_slice(card.context, &[1u32, 0], "self-test data")?;
    let bytes = |values: &[u8]| Buffer::from_slice(card.context, values, "self-test KV");
    let (q_on, kv_on, own_on) = (bytes(&codes)?, bytes(&memory)?, bytes(&own)?);
    let floats = |values: &[f32]| Buffer::from_slice(card.context, values, "self-test sums");
    let f_on = floats(&factors)?;
    let part_o = floats(&vec![f32::NAN; parts as usize * 16 * HEAD])?;
    let part_l = floats(&vec![f32::NAN; parts as usize * 16])?;
    let target = activations(card, rows, width)?;
    let attend = DigitArgs {
        q: q_on.at(0),
        f: f_on.at(0),
        kv: kv_on.at(0),
        block_bytes: layout.bytes() as u64,
        tiles: data_on.at(8),
        counts: data_on.at(0),
        tables: table_on.at(0),
        part_o: part_o.at(0),
        part_l: part_l.at(0),
        heads: heads as u32,
        kv_heads: 1,
        group: heads as u32,
        window: window as u32,
        own: own_on.at(0),
        own_bytes: layout.bytes() as u64,
        ends: data_on.at(16),
        ..DigitArgs::default()
    };
    let shape = digits_split_launch(kv, &Tuning::of(card.context.arch), 2);
    card.stream.launch(&card.kernels.get(&name)?, shape, &attend)?;
    let combine = CombineArgs {
        part_o: part_o.at(0),
        part_l: part_l.at(0),
        tiles: data_on.at(8),
        row_tile: data_on.at(2),
        act: target.act,
        n: rows as u32,
        group: heads as u32,
        ..CombineArgs::default()
    };
    card.stream.launch(&card.kernels.get("digits_combine")?, combine_launch(width, rows), &combine)?;
    card.stream.synchronize()?;
    same(&name, "output of a drafted block", &quantised(&expected), &dequantised(&target, rows)?)
}

/// Rows with ties and of one value only, with a few and with the most candidates, over one and over several chunks.
pub(super) fn select(card: &Card<'_>, random: &mut Random) -> Result<usize, CudaError> {
    let mut compared = 0;
    for vocab in [777, 3 * SELECT_KEYS + 100] {
        let SelectShape { chunks, most } = SelectShape::of(vocab);
        let wanted = [1u32, 0, most as u32, 40, 64];
        let n = wanted.len();
        let mut logits: Vec<f32> = row(random, n * vocab);
        logits[3 * vocab..4 * vocab].fill(-0.5);
        logits[4 * vocab..].iter_mut().for_each(|v| *v = (*v * 4.0).round());
        let logits_on = Buffer::from_slice(card.context, &logits, "self-test rows")?;
        let counts = Buffer::from_slice(card.context, &wanted, "self-test rows")?;
        let chosen = Buffer::<u64>::new(card.context, n * chunks * most, "self-test rows")?;
        let sorted = Buffer::from_slice(card.context, &vec![u64::MAX; n * most], "self-test rows")?;
        let args = SelectArgs {
            logits: logits_on.at(0),
            counts: counts.at(0),
            chosen: chosen.at(0),
            sorted: sorted.at(0),
            vocab: vocab as u32,
            chunks: chunks as u32,
            most: most as u32,
            _padding: 0,
        };
        let shape = Launch::new((chunks as u32, n as u32), SELECT_THREADS);
        card.stream.launch(&card.kernels.get("top_select")?, shape, &args)?;
        let shape = Launch::new((n as u32, 1), SELECT_THREADS);
        card.stream.launch(&card.kernels.get("top_merge")?, shape, &args)?;
        card.stream.synchronize()?;
        let mut found = vec![0u64; n * most];
        sorted.read(0, &mut found)?;
        for (r, &wanted) in wanted.iter().enumerate() {
            let expected = candidates(&logits[r * vocab..][..vocab], wanted as usize);
            for (i, &(id, value)) in expected.iter().enumerate() {
                let rank = found[r * most + i];
                if id_of_rank(rank) != Some(id) || value_of_rank(rank).to_bits() != (value + 0.0).to_bits() {
                    let what = format!(
                        "candidate {i} of row {r}: expected {id} ({value:e}), found {:?} ({:e})",
                        id_of_rank(rank),
                        value_of_rank(rank)
                    );
                    return Err(CudaError::SelfTest { kernel: "top_merge".to_owned(), what });
                }
            }
            compared += expected.len();
        }
    }
    Ok(compared)
}
