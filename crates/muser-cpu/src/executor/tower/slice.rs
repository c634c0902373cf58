//! One slice of a picture's way through the tower, as every thread of the pool walks through it.
#![allow(unsafe_code, reason = "threads write disjoint parts of shared buffers")]

use std::time::{Duration, Instant};

use muser_backend::arith::vision;
use muser_backend::{ExecError, no_image};
use muser_kv::{BLOCK_LEN, BlockId};
use muser_model::{LayerNorm, Projector, TowerLayer};

use super::{LayerViews, SLICE, Stage, Tower};
use crate::executor::kv::Heads;
use crate::executor::panels::PanelPointers;
use crate::executor::scratch::ThreadScratch;
use crate::executor::share::{ProductSet, share_chunks, share_products};
use crate::kernels::Kernels;
use crate::kernels::kv::Tile;
use crate::kernels::matmul::MatrixView;
use crate::kernels::query_tile::TILE_QUERIES;
use crate::pool::{Broken, Pool, Worker};

impl Tower {
    /// Slices until `time` is over; see [`muser_backend::Executor::encode_image`].
    pub(crate) fn encode(
        &mut self,
        kernels: &'static Kernels,
        pool: &mut Pool,
        time: Duration,
        rows: &mut Vec<f32>,
    ) -> Result<bool, ExecError> {
        let start = Instant::now();
        loop {
            let work = self.work.as_mut().ok_or_else(no_image)?;
            let (stage, at) = (work.stage, work.at);
            let total = match stage {
                Stage::Adapt => work.image.tokens(),
                _ => work.grid.count(),
            };
            let count = SLICE.min(total - at);
            let slice = Slice::new(self, kernels, stage, at, count).ok_or_else(no_image)?;
            if let Err(what) = pool.run_rows(0, &|worker| slice.run(worker)) {
                self.work = None;
                return Err(ExecError::Device { device: "cpu".into(), what });
            }
            let work = self.work.as_mut().ok_or_else(no_image)?;
            work.at += count;
            if work.at == total {
                let Some(next) = stage.next(self.projector.layers.len()) else {
                    rows.clear();
                    rows.append(&mut work.rows);
                    self.work = None;
                    return Ok(true);
                };
                (work.stage, work.at) = (next, 0);
            }
            if start.elapsed() >= time {
                return Ok(false);
            }
        }
    }
}

/// What a slice reads and writes.
struct Slice<'a> {
    projector: &'a Projector,
    patches: MatrixView,
    layers: &'a [LayerViews],
    adapters: [MatrixView; 3],
    values: &'a [[f32; 256]; 3],
    rule: vision::PositionRule,
    heads: Heads,
    kernels: &'static Kernels,
    rgb: &'a [u8],
    grid: vision::PatchGrid,
    order: &'a [(usize, usize)],
    ends: &'a [usize],
    window: &'a [u32],
    first_block: &'a [u32],
    index: &'a [u32],
    blocks: &'a [BlockId],
    rope: &'a [f32],
    h: *mut f32,
    q: *mut f32,
    kv: *mut u8,
    rows: *mut f32,
    a: *mut f32,
    k: *mut f32,
    v: *mut f32,
    o: *mut f32,
    projected: *mut f32,
    wide: *mut f32,
    panels: PanelPointers,
    scratch: *mut ThreadScratch,
    stage: Stage,
    at: usize,
    count: usize,
}

// SAFETY: the pointers are to buffers that outlive the slice; phases write disjoint items between barriers.
unsafe impl Sync for Slice<'_> {}

impl<'a> Slice<'a> {
    /// `None` if no picture is in work.
    pub(super) fn new(
        tower: &'a mut Tower,
        kernels: &'static Kernels,
        stage: Stage,
        at: usize,
        count: usize,
    ) -> Option<Self> {
        let (b, work) = (&mut tower.buffers, tower.work.as_mut()?);
        Some(Self {
            projector: &tower.projector,
            patches: tower.patches,
            layers: &tower.layers,
            adapters: tower.adapters,
            values: &tower.values,
            rule: tower.rule,
            heads: tower.heads,
            kernels,
            rgb: &work.image.rgb,
            grid: work.grid,
            order: &work.order,
            ends: &work.ends,
            window: &work.window,
            first_block: &work.first_block,
            index: &work.index,
            blocks: &work.blocks,
            rope: &work.rope,
            h: work.h.as_mut_ptr(),
            q: work.q.as_mut_ptr(),
            kv: work.kv.as_mut_ptr().cast(),
            rows: work.rows.as_mut_ptr(),
            a: b.a.as_mut_ptr(),
            k: b.k.as_mut_ptr(),
            v: b.v.as_mut_ptr(),
            o: b.o.as_mut_ptr(),
            projected: b.projected.as_mut_ptr(),
            wide: b.wide.as_mut_ptr(),
            panels: b.panels.pointers(),
            scratch: tower.scratch.as_mut_ptr(),
            stage,
            at,
            count,
        })
    }

    /// What each thread runs.
    pub(super) fn run(&self, worker: &Worker<'_>) -> Result<(), Broken> {
        // SAFETY: every thread has an index of its own.
        let scratch = unsafe { &mut *self.scratch.add(worker.index) };
        match self.stage {
            Stage::Embed => self.embed(worker, scratch),
            Stage::Keys(layer) => self.keys(worker, layer, scratch),
            Stage::Mix(layer) => self.mix(worker, layer, scratch),
            Stage::Adapt => self.adapt(worker, scratch),
        }
    }

    fn hidden(&self) -> usize {
        self.projector.config.hidden
    }

    /// One product of rows of `k` values that begin at `float` and have been quantised if need be.
    fn product(
        &self,
        worker: &Worker<'_>,
        scratch: &mut ThreadScratch,
        (k, float): (usize, *const f32),
        products: &[(MatrixView, *mut f32, usize)],
    ) {
        let input = self.panels.input(k, self.count, float);
        let set = ProductSet::plain(input, products);
        share_products(self.kernels, worker, &[set], &mut scratch.product);
    }

    /// Values of the patches, their product, positions, the first norm.
    fn embed(&self, worker: &Worker<'_>, scratch: &mut ThreadScratch) -> Result<(), Broken> {
        let c = &self.projector.config;
        let (k, hidden) = (c.patch_values(), c.hidden);
        let target = self.panels.target(k, self.count);
        worker.share(self.count, |row| {
            // SAFETY: the row belongs to this item.
            unsafe {
                let a = std::slice::from_raw_parts_mut(self.a.add(row * k), k);
                let place = self.order[self.at + row];
                vision::patch(self.rgb, self.grid.cols, c.patch, place, self.values, a);
                (self.kernels.quantize)(a.as_ptr(), row, 0, k, &target);
            }
        });
        worker.barrier()?;
        let h = self.h.wrapping_add(self.at * hidden);
        self.product(worker, scratch, (k, self.a), &[(self.patches, h, hidden)]);
        worker.barrier()?;
        worker.share(self.count, |row| {
            let place = self.order[self.at + row];
            let taps = vision::position_taps(self.rule, self.grid, place, c.grid())
                .map(|(at, weight)| (at, weight as f32));
            let norm = &self.projector.pre_norm;
            // SAFETY: the row belongs to this item; the table has the places that taps name.
            unsafe {
                let x = h.add(row * hidden);
                (self.kernels.add_position)(x, &taps, self.projector.positions.as_ptr(), hidden);
                self.norm(norm, x, x);
            }
        });
        Ok(())
    }

    /// `out = norm(x)`.
    ///
    /// # Safety
    /// Both are valid for a row that belongs to the caller.
    unsafe fn norm(&self, norm: &LayerNorm, x: *const f32, out: *mut f32) {
        let (weight, bias, eps) = (norm.weight.as_ptr(), norm.bias.as_ptr(), self.projector.config.norm_eps);
        // SAFETY: by the contract of this function; norms have `hidden` values.
        unsafe { (self.kernels.layer_norm)(x, weight, bias, eps, out, self.hidden()) };
    }

    /// `a` of a row: the normed residual stream, quantised.
    fn norm_input(&self, norm: &LayerNorm, row: usize) {
        let hidden = self.hidden();
        let target = self.panels.target(hidden, self.count);
        // SAFETY: the row belongs to the caller's item.
        unsafe {
            let a = self.a.add(row * hidden);
            self.norm(norm, self.h.add((self.at + row) * hidden), a);
            (self.kernels.quantize)(a, row, 0, hidden, &target);
        }
    }

    /// Norm, q, k, v, their biases, rotation, K and V stored.
    fn keys(&self, worker: &Worker<'_>, layer: usize, scratch: &mut ThreadScratch) -> Result<(), Broken> {
        let (hidden, dim) = (self.hidden(), self.heads.dim);
        let (views, weights) = (&self.layers[layer], &self.projector.layers[layer]);
        worker.share(self.count, |row| self.norm_input(&weights.ln1, row));
        worker.barrier()?;
        let q = self.q.wrapping_add(self.at * hidden);
        let products =
            [(views.attn_q, q, hidden), (views.attn_k, self.k, hidden), (views.attn_v, self.v, hidden)];
        self.product(worker, scratch, (hidden, self.a), &products);
        worker.barrier()?;
        worker.share(self.heads.count, |head| {
            let view = self.heads.view(self.kv, head, self.heads.bytes(), self.blocks.len());
            for row in 0..self.count {
                let patch = self.at + row;
                let (block, slot) = self.slot(layer, patch);
                let at = row * hidden + head * dim;
                let part = |bias: &[f32]| bias[head * dim..].as_ptr();
                // SAFETY: this head of this row, and its place in the blocks, belong to this item.
                unsafe {
                    let rope = self.rope[patch * dim..].as_ptr();
                    (self.kernels.bias_rope)(q.add(at), part(&weights.attn_q.bias), dim, rope);
                    (self.kernels.bias_rope)(self.k.add(at), part(&weights.attn_k.bias), dim, rope);
                    (self.kernels.add_bias)(self.v.add(at), part(&weights.attn_v.bias), dim);
                    (self.kernels.store_kv)(&view, block, slot, self.k.add(at), self.v.add(at));
                }
            }
        });
        Ok(())
    }

    /// Where a patch's K and V lie in a layer: in its window's blocks, or in everybody's.
    fn slot(&self, layer: usize, patch: usize) -> (BlockId, usize) {
        let (first_block, at) = if self.projector.config.is_full(layer) {
            (0, patch)
        } else {
            let window = self.window[patch] as usize;
            (self.first_block[window], patch - self.window_start(window))
        };
        (BlockId(first_block + (at / BLOCK_LEN) as u32), at % BLOCK_LEN)
    }

    fn window_start(&self, window: usize) -> usize {
        if window == 0 { 0 } else { self.ends[window - 1] }
    }

    /// Attention of the slice's patches, and everything after it.
    fn mix(&self, worker: &Worker<'_>, layer: usize, scratch: &mut ThreadScratch) -> Result<(), Broken> {
        let (hidden, ffn) = (self.hidden(), self.projector.config.ffn);
        let (views, weights) = (&self.layers[layer], &self.projector.layers[layer]);
        self.attention(worker, layer, scratch);
        worker.barrier()?;
        let target = self.panels.target(hidden, self.count);
        share_chunks(worker, self.count, hidden, |row, from, to| {
            // SAFETY: this part of this row belongs to this item.
            unsafe { (self.kernels.quantize)(self.o.add(row * hidden), row, from, to, &target) };
        });
        worker.barrier()?;
        self.product(worker, scratch, (hidden, self.o), &[(views.attn_out, self.projected, hidden)]);
        worker.barrier()?;
        worker.share(self.count, |row| {
            self.add_projected(row, &weights.attn_out.bias);
            self.norm_input(&weights.ln2, row);
        });
        worker.barrier()?;
        self.product(worker, scratch, (hidden, self.a), &[(views.ffn_up, self.wide, ffn)]);
        worker.barrier()?;
        self.activate(worker, self.wide, ffn, Some(weights));
        worker.barrier()?;
        self.product(worker, scratch, (ffn, self.wide), &[(views.ffn_down, self.projected, hidden)]);
        worker.barrier()?;
        worker.share(self.count, |row| self.add_projected(row, &weights.ffn_down.bias));
        Ok(())
    }

    fn add_projected(&self, row: usize, bias: &[f32]) {
        let hidden = self.hidden();
        // SAFETY: the row belongs to the caller's item.
        unsafe {
            let h = self.h.add((self.at + row) * hidden);
            (self.kernels.add_product)(h, self.projected.add(row * hidden), bias.as_ptr(), hidden);
        }
    }

    /// GELU of rows of `width` values, of a layer's feed-forward with its bias; then quantised.
    fn activate(&self, worker: &Worker<'_>, x: *mut f32, width: usize, layer: Option<&TowerLayer>) {
        let target = self.panels.target(width, self.count);
        share_chunks(worker, self.count, width, |row, from, to| {
            let bias = layer.map_or(std::ptr::null(), |layer| layer.ffn_up.bias[from..].as_ptr());
            // SAFETY: this part of this row belongs to this item.
            unsafe {
                let x = x.add(row * width);
                (self.kernels.gelu)(x.add(from), bias, to - from);
                (self.kernels.quantize)(x, row, from, to, &target);
            }
        });
    }

    /// Runs of patches of the slice that see the same keys: first patch and end, first block, keys.
    fn runs(&self, layer: usize) -> Vec<(usize, usize, usize, usize)> {
        let (from, to) = (self.at, self.at + self.count);
        if self.projector.config.is_full(layer) {
            return vec![(from, to, 0, self.order.len())];
        }
        let windows = self.window[from] as usize..=self.window[to - 1] as usize;
        windows
            .map(|window| {
                let (start, end) = (self.window_start(window), self.ends[window]);
                (start.max(from), end.min(to), self.first_block[window] as usize, end - start)
            })
            .collect()
    }

    fn attention(&self, worker: &Worker<'_>, layer: usize, scratch: &mut ThreadScratch) {
        let (hidden, dim) = (self.hidden(), self.heads.dim);
        let runs = self.runs(layer);
        let tiles: Vec<(usize, usize, usize, usize)> = runs
            .iter()
            .flat_map(|&(from, to, block, keys)| {
                let cut = move |at: usize| (at, TILE_QUERIES.min(to - at), block, keys);
                (from..to).step_by(TILE_QUERIES).map(cut)
            })
            .collect();
        worker.share(tiles.len() * self.heads.count, |item| {
            let (patch, rows, block, keys) = tiles[item / self.heads.count];
            let head = item % self.heads.count;
            let tile = Tile {
                kv: self.heads.view(self.kv, head, self.heads.bytes(), self.blocks.len()).unbounded(),
                head_dim: dim,
                table: &self.blocks[block..],
                first_block: 0,
                start: 0,
                rows,
                heads: 1,
                window: usize::MAX,
                end: Some(keys),
                q: self.q.wrapping_add(patch * hidden + head * dim),
                q_stride: hidden,
            };
            let out = self.o.wrapping_add((patch - self.at) * hidden + head * dim);
            // SAFETY: this head of these rows belongs to this item; all keys were written by earlier slices.
            unsafe { (self.kernels.attend)(&tile, out, hidden, &mut scratch.attention) };
        });
    }

    /// Last norm, pixel shuffle and the adapter, of tokens.
    fn adapt(&self, worker: &Worker<'_>, scratch: &mut ThreadScratch) -> Result<(), Broken> {
        let c = &self.projector.config;
        let (merged, adapter) = (c.merged(), self.projector.adapter);
        let target = self.panels.target(merged, self.count);
        worker.share(self.count, |row| {
            // SAFETY: the row of `a`, and the patches of its token, belong to this item.
            unsafe {
                let a = self.a.add(row * merged);
                self.merge(self.at + row, a);
                (self.kernels.quantize)(a, row, 0, merged, &target);
            }
        });
        worker.barrier()?;
        let [first, second, third] = self.adapters;
        self.product(worker, scratch, (merged, self.a), &[(first, self.wide, adapter)]);
        worker.barrier()?;
        self.activate(worker, self.wide, adapter, None);
        worker.barrier()?;
        // The merged rows are done with, so the second layer's output may lie where they were.
        self.product(worker, scratch, (adapter, self.wide), &[(second, self.a, adapter)]);
        worker.barrier()?;
        self.activate(worker, self.a, adapter, None);
        worker.barrier()?;
        let rows = self.rows.wrapping_add(self.at * c.projection);
        self.product(worker, scratch, (adapter, self.a), &[(third, rows, c.projection)]);
        Ok(())
    }

    /// Norms the patches of a token and lays them out channel by channel.
    ///
    /// # Safety
    /// `out` is valid for a merged row; the patches belong to the caller's item.
    unsafe fn merge(&self, token: usize, out: *mut f32) {
        let c = &self.projector.config;
        let (side, cols) = (c.merge, self.grid.cols / c.merge);
        let (top, left) = (token / cols * side, token % cols * side);
        for s in 0..side * side {
            let place = (top + s / side) * self.grid.cols + left + s % side;
            // SAFETY: by the contract of this function; every place has a patch.
            unsafe {
                let x = self.h.add(self.index[place] as usize * c.hidden);
                self.norm(&self.projector.post_norm, x, x);
                for channel in 0..c.hidden {
                    *out.add(channel * side * side + s) = *x.add(channel);
                }
            }
        }
    }
}
