//! The vision tower by the book: its formula line by line, sums in f64, values stored as f32.

use muser_model::{LayerNorm, Linear, Projector};

use super::matrix::product;
use super::ops;
use crate::arith::vision::{self, PatchGrid, PositionRule};
use crate::{ExecError, TowerImage, TowerInfo};

/// The tower's arithmetic; independent of how K and V of text are stored.
const ROUTE: &str = "scalar-tower-1";

pub(super) struct Tower {
    pub(super) info: TowerInfo,
    projector: Projector,
    rule: PositionRule,
    /// What [`crate::Executor::begin_image`] left to be done.
    pub(super) image: Option<TowerImage>,
}

impl Tower {
    pub(super) fn new(projector: Projector, rule: PositionRule) -> Self {
        Self { info: TowerInfo::new(ROUTE, &projector, rule), projector, rule, image: None }
    }

    pub(super) fn check(&self, image: &TowerImage) -> Result<PatchGrid, ExecError> {
        image.validate(&self.projector)
    }

    pub(super) fn rows(&self, image: &TowerImage) -> Result<Vec<f32>, ExecError> {
        let (p, c) = (&self.projector, &self.projector.config);
        let grid = self.check(image)?;
        // Raster order; a window is a condition on the places of two patches.
        let places: Vec<(usize, usize)> = (0..grid.count()).map(|i| (i / grid.cols, i % grid.cols)).collect();
        let mut x = self.embed(image, grid, &places);
        norm(&mut x, &p.pre_norm, c.norm_eps);
        for (index, layer) in p.layers.iter().enumerate() {
            let mut n = x.clone();
            norm(&mut n, &layer.ln1, c.norm_eps);
            let (mut q, mut k) = (linear(&layer.attn_q, &n), linear(&layer.attn_k, &n));
            let v = linear(&layer.attn_v, &n);
            for (rows, place) in q.chunks_mut(c.hidden).zip(k.chunks_mut(c.hidden)).zip(&places) {
                [rows.0, rows.1].into_iter().for_each(|row| rotate(row, c.head_dim(), *place));
            }
            let window = |(y, x): (usize, usize)| (y / c.grid(), x / c.grid());
            let sees = |a: usize, b: usize| c.is_full(index) || window(places[a]) == window(places[b]);
            let o = attend(&q, &k, &v, c.heads, c.head_dim(), sees);
            add(&mut x, &linear(&layer.attn_out, &o));
            let mut n = x.clone();
            norm(&mut n, &layer.ln2, c.norm_eps);
            let mut wide = linear(&layer.ffn_up, &n);
            activate(&mut wide);
            add(&mut x, &linear(&layer.ffn_down, &wide));
        }
        norm(&mut x, &p.post_norm, c.norm_eps);
        let mut rows = merge(&x, grid, c.hidden, c.merge);
        let [first, second, third] = &p.adapters;
        for matrix in [first, second] {
            rows = product(matrix, &rows);
            activate(&mut rows);
        }
        Ok(product(third, &rows))
    }

    fn embed(&self, image: &TowerImage, grid: PatchGrid, places: &[(usize, usize)]) -> Vec<f32> {
        let (p, c) = (&self.projector, &self.projector.config);
        let values = vision::values_of_bytes(c.mean, c.std);
        let mut patches = vec![0.0; grid.count() * c.patch_values()];
        for (patch, place) in patches.chunks_mut(c.patch_values()).zip(places) {
            vision::patch(&image.rgb, grid.cols, c.patch, *place, &values, patch);
        }
        let mut x = product(&p.patches, &patches);
        for (x, place) in x.chunks_mut(c.hidden).zip(places) {
            let taps = vision::position_taps(self.rule, grid, *place, c.grid());
            for (i, x) in x.iter_mut().enumerate() {
                let learned: f64 =
                    taps.iter().map(|(at, weight)| weight * f64::from(p.positions[at * c.hidden + i])).sum();
                *x = (f64::from(*x) + learned) as f32;
            }
        }
        x
    }
}

fn norm(x: &mut [f32], norm: &LayerNorm, eps: f32) {
    for row in x.chunks_mut(norm.weight.len()) {
        let n = row.len() as f64;
        let mean = row.iter().map(|v| f64::from(*v)).sum::<f64>() / n;
        let square = row.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>() / n;
        let inverse = 1.0 / (square + f64::from(eps)).sqrt();
        for ((v, weight), bias) in row.iter_mut().zip(&norm.weight).zip(&norm.bias) {
            *v = ((f64::from(*v) - mean) * inverse * f64::from(*weight) + f64::from(*bias)) as f32;
        }
    }
}

fn linear(linear: &Linear, x: &[f32]) -> Vec<f32> {
    let mut y = product(&linear.matrix, x);
    y.chunks_mut(linear.bias.len()).for_each(|row| add(row, &linear.bias));
    y
}

fn add(x: &mut [f32], y: &[f32]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += *y);
}

fn activate(x: &mut [f32]) {
    x.iter_mut().for_each(|x| *x = ops::gelu(f64::from(*x)) as f32);
}

/// Of every head, the first half of the pairs turns by the column, the second by the row, both counted from 1.
fn rotate(row: &mut [f32], head_dim: usize, (y, x): (usize, usize)) {
    for head in row.chunks_mut(head_dim) {
        let (by_column, by_row) = head.split_at_mut(head_dim / 2);
        ops::rope(by_column, x + 1, vision::ROPE_THETA as f32);
        ops::rope(by_row, y + 1, vision::ROPE_THETA as f32);
    }
}

fn attend(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    heads: usize,
    dim: usize,
    sees: impl Fn(usize, usize) -> bool,
) -> Vec<f32> {
    let (n, width) = (q.len() / (heads * dim), heads * dim);
    let scale = 1.0 / (dim as f64).sqrt();
    let mut out = vec![0.0; q.len()];
    for row in 0..n {
        let seen: Vec<usize> = (0..n).filter(|other| sees(row, *other)).collect();
        for head in 0..heads {
            let at = |row: usize| row * width + head * dim..row * width + (head + 1) * dim;
            let scores: Vec<f64> =
                seen.iter().map(|j| ops::dot_wide(&q[at(row)], &k[at(*j)]) * scale).collect();
            let top = scores.iter().fold(f64::NEG_INFINITY, |top, s| top.max(*s));
            let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
            let sum: f64 = weights.iter().sum();
            let mut mixed = vec![0.0f64; dim];
            for (weight, j) in weights.iter().zip(&seen) {
                mixed.iter_mut().zip(&v[at(*j)]).for_each(|(m, v)| *m += weight * f64::from(*v));
            }
            out[at(row)].iter_mut().zip(&mixed).for_each(|(out, m)| *out = (m / sum) as f32);
        }
    }
    out
}

/// Pixel shuffle: the patches of a square become one row, channel by channel.
fn merge(x: &[f32], grid: PatchGrid, hidden: usize, side: usize) -> Vec<f32> {
    let mut out = Vec::with_capacity(x.len());
    for top in (0..grid.rows).step_by(side) {
        for left in (0..grid.cols).step_by(side) {
            for channel in 0..hidden {
                for s in 0..side * side {
                    let patch = (top + s / side) * grid.cols + left + s % side;
                    out.push(x[patch * hidden + channel]);
                }
            }
        }
    }
    out
}
