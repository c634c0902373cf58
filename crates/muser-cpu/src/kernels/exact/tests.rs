//! Every instruction set against the definition, bit for bit.

use muser_backend::arith::attention::{self, StoredHead, hadamard};
use muser_backend::conformance::Random;

use super::super::Kernels;
use super::super::kv::{self, KvView};
use super::*;
use crate::bounds::Reach;
use crate::isa::Isa;
use muser_backend::kv_layout::HeadLayout;
use muser_kv::BlockId;

/// Rows of one sequence behind `start` positions.
#[derive(Clone, Copy, Debug)]
struct Case {
    digits: Digits,
    dim: usize,
    heads: usize,
    start: usize,
    rows: usize,
    window: usize,
}

/// Inputs of a case, `[position][dim]` and `[row][head][dim]`.
struct Inputs {
    k: Vec<f32>,
    v: Vec<f32>,
    q: Vec<f32>,
}

impl Case {
    fn positions(&self) -> usize {
        self.start + self.rows
    }

    fn inputs(&self, seed: u64) -> Inputs {
        let mut random = Random::new(seed);
        let mut values = |n: usize, scale: f32| -> Vec<f32> {
            (0..n).map(|_| (random.below(20_001) as f32 - 10_000.0) / 10_000.0 * scale).collect()
        };
        let n = self.positions() * self.dim;
        Inputs { k: values(n, 1.7), v: values(n, 3.0), q: values(self.rows * self.heads * self.dim, 4.0) }
    }

    /// What the definition says.
    fn expected(&self, inputs: &Inputs) -> Vec<f32> {
        let stored = |x: &[f32], rotate: bool| -> Vec<StoredHead> {
            let head = |x: &[f32]| {
                let mut x = x.to_vec();
                if rotate {
                    hadamard(&mut x);
                }
                StoredHead::of(&x, self.digits)
            };
            x.chunks(self.dim).map(head).collect()
        };
        let (keys, values) = (stored(&inputs.k, true), stored(&inputs.v, false));
        let mut out = Vec::new();
        for (i, q) in inputs.q.chunks(self.dim).enumerate() {
            let end = self.start + i / self.heads + 1;
            let seen = |j: usize| j < end && j.saturating_add(self.window) >= end;
            out.extend(attention::attend(q, &keys[..end], &values[..end], seen, self.digits));
        }
        out
    }
}

/// Blocks of one head, in an order of their own, full of `stale` before anything is written.
struct Memory {
    bytes: Vec<u64>,
    table: Vec<BlockId>,
    head: HeadLayout,
}

impl Memory {
    fn new(case: &Case, stale: u8) -> Self {
        let head = HeadLayout { dim: case.dim, digits: case.digits };
        let blocks = case.positions().div_ceil(BLOCK_LEN) as u32;
        let bytes = vec![u64::from_ne_bytes([stale; 8]); (blocks as usize + 1) * head.bytes() / 8];
        Self { bytes, table: (1..=blocks).rev().map(BlockId).collect(), head }
    }

    fn view(&mut self) -> DigitKv {
        let (first, block_stride) = (self.bytes.as_mut_ptr().cast(), self.head.bytes());
        DigitKv {
            first,
            block_stride,
            blocks: Reach::of(self.bytes.len() * 8 / block_stride),
            head: self.head,
            bounded: true,
        }
    }

    fn store(&mut self, kernels: &Kernels, inputs: &Inputs) {
        let (view, dim) = (KvView::Digits(self.view()), self.head.dim);
        for (position, (k, v)) in inputs.k.chunks(dim).zip(inputs.v.chunks(dim)).enumerate() {
            let mut k = k.to_vec();
            let id = self.table[position / BLOCK_LEN];
            // SAFETY: heads of `dim` values, and a block of the table.
            unsafe {
                (kernels.store_kv)(&view, id, position % BLOCK_LEN, k.as_mut_ptr(), v.as_ptr());
            }
        }
    }
}

fn sets() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_supported())
}

fn same(found: &[f32], expected: &[f32]) -> bool {
    found.len() == expected.len()
        && found.iter().zip(expected).all(|(a, b)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan())
}

/// Attention of a case as a walk, and block by block.
fn found(case: &Case, inputs: &Inputs, kernels: &Kernels, stale: u8) -> [Vec<f32>; 2] {
    let mut memory = Memory::new(case, stale);
    memory.store(kernels, inputs);
    let width = case.heads * case.dim;
    let mut scratch = kv::Scratch::Digits(Scratch::new(case.dim));
    let (mut walked, mut combined) = (vec![0.0; inputs.q.len()], vec![0.0; inputs.q.len()]);
    let per_tile = (TILE_QUERIES / case.heads).max(1);
    let view = memory.view();
    for row in (0..case.rows).step_by(per_tile) {
        let rows = per_tile.min(case.rows - row);
        let first_block = (case.start + row + 1).saturating_sub(case.window) / BLOCK_LEN;
        let tile = kv::Tile {
            kv: KvView::Digits(view),
            head_dim: case.dim,
            table: &memory.table[first_block..],
            first_block,
            start: case.start + row,
            rows,
            heads: case.heads,
            window: case.window,
            end: None,
            q: inputs.q[row * width..].as_ptr(),
            q_stride: width,
        };
        let (blocks, size) = (tile.blocks(), STATE_HEAD + case.dim);
        let mut partial = vec![f32::NAN; blocks.len() * rows * case.heads * size];
        // SAFETY: the tile describes memory that lives, the outputs have room for its rows.
        unsafe {
            (kernels.attend)(&tile, walked[row * width..].as_mut_ptr(), width, &mut scratch);
            (kernels.attend_blocks)(&tile, blocks.clone(), partial.as_mut_ptr(), &mut scratch);
            for query in 0..rows * case.heads {
                let from = partial.as_ptr().add(query * size);
                let (stride, out) =
                    (rows * case.heads * size, &mut combined[row * width + query * case.dim..]);
                (kernels.combine_blocks)(
                    from,
                    blocks.len(),
                    stride,
                    out.as_mut_ptr(),
                    case.dim,
                    &mut scratch,
                );
            }
        }
    }
    [walked, combined]
}

fn check(case: &Case, inputs: &Inputs) {
    let expected = case.expected(inputs);
    for isa in sets() {
        for stale in [0, 0xff, 0x7f] {
            for (found, how) in
                found(case, inputs, Kernels::of(isa), stale).iter().zip(["as a walk", "by blocks"])
            {
                assert!(same(found, &expected), "{} {how}, stale {stale:#x}: {case:?}", isa.name());
            }
        }
    }
}

#[test]
fn every_set_gives_the_bits_of_the_definition() {
    let mut seed = 0;
    for digits in [Digits::One, Digits::Two] {
        for (dim, heads, start, rows, window) in [
            (32, 1, 0, 3, usize::MAX),
            (128, 16, 70, 1, usize::MAX),
            (128, 16, 0, 9, usize::MAX),
            (64, 2, 254, 5, usize::MAX),
            (96, 3, 255, 2, usize::MAX),
            (48, 2, 63, 3, usize::MAX),
            (64, 1, 62, 66, usize::MAX),
            (128, 5, 300, 1, 100),
            (128, 16, 510, 6, 256),
            (32, 4, 600, 40, 64),
            (64, 2, 516, 2, 5),
            (16, 64, 511, 2, 250),
            (16, 7, 140, 1, 1),
        ] {
            seed += 1;
            let case = Case { digits, dim, heads, start, rows, window };
            check(&case, &case.inputs(seed));
        }
    }
}

/// Keys that end together, and scores of any size: the attention of a vision tower.
#[test]
fn every_set_gives_the_bits_of_the_tower() {
    for (seed, (dim, keys, rows, size)) in
        [(64, 1, 1, 1.0), (96, 700, 70, 3.0), (64, 300, 9, 400.0), (128, 513, 3, 1e20), (16, 66, 64, 0.0)]
            .into_iter()
            .enumerate()
    {
        let case = Case { digits: Digits::Two, dim, heads: 1, start: 0, rows: keys, window: usize::MAX };
        let mut inputs = case.inputs(seed as u64);
        inputs.k.iter_mut().for_each(|x| *x *= size);
        inputs.q.iter_mut().for_each(|x| *x *= size);
        // A maximum that comes late, and queries that see nothing but themselves.
        inputs.k[(keys - 1) * dim] += 50.0 * size;
        inputs.q[0] = if rows > 60 { f32::NAN } else { 1.0 };
        let stored = |x: &[f32], key: bool| {
            let mut x = x.to_vec();
            if key {
                hadamard(&mut x);
            }
            StoredHead::of(&x, Digits::Two)
        };
        let k: Vec<_> = inputs.k.chunks(dim).map(|x| stored(x, true)).collect();
        let v: Vec<_> = inputs.v.chunks(dim).map(|x| stored(x, false)).collect();
        let queries = &inputs.q[..rows.min(keys) * dim];
        let expected: Vec<f32> = queries
            .chunks(dim)
            .flat_map(|q| muser_backend::arith::vision::attention::attend(q, &k, &v))
            .collect();
        for isa in sets() {
            let kernels = Kernels::of(isa);
            for stale in [0, 0xff, 0x7f] {
                let mut memory = Memory::new(&case, stale);
                memory.store(kernels, &inputs);
                let kv = KvView::Digits(memory.view()).unbounded();
                let mut scratch = kv::Scratch::Digits(Scratch::new(dim));
                let mut found = vec![0.0; queries.len()];
                for row in (0..queries.len() / dim).step_by(TILE_QUERIES) {
                    let tile = kv::Tile {
                        kv,
                        head_dim: dim,
                        table: &memory.table,
                        first_block: 0,
                        start: 0,
                        rows: TILE_QUERIES.min(queries.len() / dim - row),
                        heads: 1,
                        window: usize::MAX,
                        end: Some(keys),
                        q: queries[row * dim..].as_ptr(),
                        q_stride: dim,
                    };
                    // SAFETY: the tile describes memory that lives, the output has room for its rows.
                    unsafe { (kernels.attend)(&tile, found[row * dim..].as_mut_ptr(), dim, &mut scratch) };
                }
                assert!(same(&found, &expected), "{} {dim} {keys} {size}, stale {stale:#x}", isa.name());
            }
        }
    }
}

#[test]
fn numbers_that_are_not_finite_touch_only_the_rows_that_made_them() {
    for digits in [Digits::One, Digits::Two] {
        let case = Case { digits, dim: 64, heads: 2, start: 200, rows: 70, window: usize::MAX };
        let clean = case.inputs(7);
        let mut inputs = case.inputs(7);
        // Keys and values of the last row's own position, and of one between; a query of row 30.
        let dim = case.dim;
        inputs.k[269 * dim + 3] = f32::NAN;
        inputs.v[269 * dim] = f32::INFINITY;
        inputs.k[210 * dim..211 * dim].fill(f32::NEG_INFINITY);
        inputs.v[205 * dim + 1] = f32::NAN;
        inputs.q[30 * 2 * dim + 5] = f32::NAN;
        inputs.q[(31 * 2 + 1) * dim] = f32::INFINITY;
        check(&case, &inputs);
        let out = case.expected(&inputs);
        let row = |i: usize| &out[i * 2 * dim..(i + 1) * 2 * dim];
        assert!(row(30)[..dim].iter().all(|x| x.is_nan()) && row(30)[dim..].iter().all(|x| x.is_finite()));
        assert!(row(31)[dim..].iter().all(|x| x.is_nan()) && row(69).iter().all(|x| x.is_finite()));
        assert_eq!(row(4), &case.expected(&clean)[4 * 2 * dim..5 * 2 * dim], "nothing before it changes");
    }
}

#[test]
fn zeros_and_extremes_are_those_of_the_definition() {
    for digits in [Digits::One, Digits::Two] {
        let case = Case { digits, dim: 32, heads: 2, start: 130, rows: 3, window: usize::MAX };
        let dim = case.dim;
        let mut inputs = case.inputs(11);
        inputs.k[..40 * dim].fill(0.0);
        inputs.v[20 * dim..60 * dim].fill(-0.0);
        inputs.v[64 * dim..128 * dim].fill(0.0);
        inputs.v[70 * dim..71 * dim].fill(1e-39);
        inputs.v[129 * dim..130 * dim].fill(3e30);
        inputs.q[..dim].fill(0.0);
        inputs.q[dim..2 * dim].fill(1e-42);
        check(&case, &inputs);
        inputs.v.fill(1e-38);
        check(&case, &inputs);
    }
}

#[test]
fn what_is_stored_is_what_the_definition_stores() {
    for digits in [Digits::One, Digits::Two] {
        for dim in [16, 48, 64, 128] {
            let case = Case { digits, dim, heads: 1, start: 299, rows: 1, window: usize::MAX };
            let inputs = case.inputs(dim as u64);
            for isa in sets() {
                let mut memory = Memory::new(&case, 0x55);
                memory.store(Kernels::of(isa), &inputs);
                let (head, size) = (memory.head, memory.head.bytes());
                let bytes: Vec<u8> = memory.bytes.iter().flat_map(|word| word.to_ne_bytes()).collect();
                for position in [0, 1, 62, 255, 256, 299] {
                    let block = &bytes[memory.table[position / BLOCK_LEN].0 as usize * size..][..size];
                    let row = position % BLOCK_LEN;
                    let mut k = inputs.k[position * dim..][..dim].to_vec();
                    hadamard(&mut k);
                    let v = &inputs.v[position * dim..][..dim];
                    for (is_key, x) in [(true, &k[..]), (false, v)] {
                        let stored = StoredHead::of(x, digits);
                        for (plane, expected) in [stored.hi, stored.lo].iter().enumerate() {
                            for (d, digit) in expected.iter().enumerate() {
                                let at = if is_key {
                                    head.k(plane) + head.k_at(row, d)
                                } else {
                                    head.v(plane) + head.v_at(row, d)
                                };
                                assert_eq!(block[at] as i8, *digit, "{} {position} {d}", isa.name());
                            }
                        }
                        let at = if is_key { head.k_scales() } else { head.v_scales() } + 4 * row;
                        assert_eq!(block[at..at + 4], stored.d.to_le_bytes());
                    }
                }
            }
        }
    }
}
