//! One step, as every thread of the pool walks through it.
//!
//! Phases are separated by barriers; inside a phase the threads share out items that write to different places. The
//! phases of a layer: products q k v gate | head norms, RoPE, KV | attention | gate, quantise | output product | add,
//! norm, quantise | products gate up | silu, quantise | down product | add, norm, quantise.
#![allow(unsafe_code, reason = "threads write disjoint parts of shared buffers")]

use muser_backend::{Crossing, LayerRange, RowInput, StepBatch};
use muser_model::Model;

use super::buffers::{Pointers, Widths};
use super::draft::extend::Extend;
use super::kv::KvStore;
use super::plan::{AttentionTile, Plan};
use super::rows::{RowPlace, STORE_ROWS, StepRows, angles};
use super::scratch::ThreadScratch;
use super::share::{ProductSet, share_chunks, share_products};
use crate::kernels::Kernels;
use crate::kernels::kv;
use crate::kernels::matmul::Finish;
use crate::kernels::query_tile::{STATE_HEAD, TILE_QUERIES};
use crate::pool::{Broken, Worker};
use crate::weights::Weights;

/// Everything that a step reads and writes.
pub(crate) struct StepJob<'a> {
    pub(crate) model: &'a Model,
    pub(crate) weights: &'a Weights,
    pub(crate) kernels: &'static Kernels,
    pub(crate) batch: &'a StepBatch,
    pub(crate) kv: &'a KvStore,
    pub(crate) plan: &'a Plan,
    pub(crate) buffers: Pointers,
    pub(crate) places: &'a [RowPlace],
    pub(crate) inverse_frequencies: &'a [f64],
    /// One entry per thread.
    pub(crate) scratch: *mut ThreadScratch,
    pub(crate) partial: *mut f32,
    pub(crate) logits: *mut f32,
    pub(crate) logit_rows: usize,
    pub(crate) hidden: *mut f32,
    pub(crate) draft: Option<&'a Extend<'a>>,
    /// The layers of the model that are computed here.
    pub(crate) range: LayerRange,
    pub(crate) cut: Cut<'a>,
}

/// The crossing of a step ([`Crossing`]); null without a cut.
#[derive(Clone, Copy)]
pub(crate) struct Cut<'a> {
    rows: *mut f32,
    factors: *mut f32,
    features: *mut f32,
    /// Layers whose inputs are written down here.
    taps: &'a [usize],
}

impl<'a> Cut<'a> {
    pub(crate) fn new(crossing: &'a mut Crossing, taps: &'a [usize]) -> Self {
        let Crossing { rows, factors, features } = crossing;
        Self { rows: rows.as_mut_ptr(), factors: factors.as_mut_ptr(), features: features.as_mut_ptr(), taps }
    }
}

// SAFETY: the pointers are to buffers that outlive the step; phases write disjoint items between barriers.
unsafe impl Sync for StepJob<'_> {}

impl StepJob<'_> {
    /// What each thread runs.
    pub(crate) fn run(&self, worker: &Worker<'_>) -> Result<(), Broken> {
        // SAFETY: every thread has an index of its own.
        let scratch = unsafe { &mut *self.scratch.add(worker.index) };
        let g = &self.model.geometry;
        let n = self.places.len();
        let b = &self.buffers;
        b.holds(n, Widths::of(g));
        let (hidden, ffn, q_width) = (g.hidden, g.ffn, g.q_width());

        worker.share(n, |row| self.enter(row));
        worker.barrier()?;
        for (index, layer) in self.range.layers().zip(&self.weights.layers) {
            let norms = &self.model.layers[index];
            let input = b.input(hidden, n, b.a);
            let products = [
                (layer.attn_q, b.q, q_width),
                (layer.attn_k, b.k, g.kv_width()),
                (layer.attn_v, b.v, g.kv_width()),
                (layer.attn_gate, b.gate, q_width),
            ];
            // The draft's context is made from the input of this layer on, in phases that are there anyway.
            let draft = self.draft.filter(|draft| draft.last_tap().max(self.range.first()) == index);
            let mut sets = [ProductSet::plain(input, &products), ProductSet::empty(input)];
            let fc = draft.map(|draft| draft.fc(n));
            if let Some((input, fc)) = &fc {
                sets[1] = ProductSet::plain(*input, fc);
            }
            share_products(self.kernels, worker, &sets, &mut scratch.product);
            worker.barrier()?;

            let stores = g.kv_heads * n.div_ceil(STORE_ROWS);
            let more = draft.map_or(0, |_| n);
            worker.share(stores + more, |item| match draft {
                _ if item < stores => self.store(index, item),
                Some(draft) => draft.norm(&self.rows(), item - stores),
                None => {}
            });
            worker.barrier()?;

            self.attention(worker, index, &mut scratch.attention)?;
            worker.barrier()?;

            let target = b.target(q_width, n);
            share_chunks(worker, n, q_width, |row, from, to| {
                // SAFETY: this part of this row belongs to this item.
                unsafe {
                    let o = b.o.add(row * q_width);
                    (self.kernels.gate)(o.add(from), b.gate.add(row * q_width + from), to - from);
                    (self.kernels.quantize)(o, row, from, to, &target);
                }
            });
            worker.barrier()?;

            let input = b.input(q_width, n, b.o);
            let product = [(layer.attn_output, b.projected, hidden)];
            let keys = draft.map_or(ProductSet::empty(input), |draft| draft.keys_and_values(n));
            let sets = [ProductSet::plain(input, &product), keys];
            share_products(self.kernels, worker, &sets, &mut scratch.product);
            worker.barrier()?;

            worker.share(n + draft.map_or(0, |draft| draft.stores(n)), |item| match draft {
                Some(draft) if item >= n => draft.store(&self.rows(), item - n),
                _ => {
                    // SAFETY: the row belongs to this item.
                    let r = unsafe { self.add_projected(item, &norms.post_attention_norm) };
                    self.norm_input(item, &norms.ffn_norm, Some(r));
                }
            });
            worker.barrier()?;

            let input = b.input(hidden, n, b.a);
            let products = [(layer.ffn_gate, b.ffn_gate, ffn), (layer.ffn_up, b.ffn_up, ffn)];
            share_products(
                self.kernels,
                worker,
                &[ProductSet::plain(input, &products)],
                &mut scratch.product,
            );
            worker.barrier()?;

            let target = b.target(ffn, n);
            share_chunks(worker, n, ffn, |row, from, to| {
                // SAFETY: this part of this row belongs to this item.
                unsafe {
                    let up = b.ffn_up.add(row * ffn);
                    (self.kernels.silu_mul)(b.ffn_gate.add(row * ffn + from), up.add(from), to - from);
                    (self.kernels.quantize)(up, row, from, to, &target);
                }
            });
            worker.barrier()?;

            let input = b.input(ffn, n, b.ffn_up);
            let product = [(layer.ffn_down, b.projected, hidden)];
            share_products(self.kernels, worker, &[ProductSet::plain(input, &product)], &mut scratch.product);
            worker.barrier()?;

            worker.share(n, |row| {
                // SAFETY: the row belongs to this item.
                let r = unsafe { self.add_projected(row, &norms.post_ffw_norm) };
                if index + 1 < self.range.end() {
                    self.enter_layer(row, index + 1, Some(r));
                } else if self.range.has_output() {
                    self.leave(row, r);
                } else {
                    self.hand_over(row, r);
                }
            });
            worker.barrier()?;
        }
        if let Some(output) = self.weights.output.filter(|_| self.logit_rows > 0) {
            let input = b.input(hidden, self.logit_rows, b.a);
            let finish = Finish::Logits { scale: g.logit_scale, cap: g.softcap };
            let product = [(output, self.logits, g.vocab)];
            let set = ProductSet { input, products: &product, finish };
            share_products(self.kernels, worker, &[set], &mut scratch.product);
        }
        Ok(())
    }

    fn rows(&self) -> StepRows<'_> {
        let rope = self.buffers.rope.cast_const();
        StepRows { batch: self.batch, places: self.places, kv: self.kv, kernels: self.kernels, rope }
    }

    /// Bottom of the range: the row as it comes, its RoPE angles, input of the first layer.
    fn enter(&self, row: usize) {
        let g = &self.model.geometry;
        let b = &self.buffers;
        let position = self.places[row].position;
        // SAFETY: the row belongs to this item.
        let rope = unsafe { std::slice::from_raw_parts_mut(b.rope.add(row * g.head_dim), g.head_dim) };
        angles(self.inverse_frequencies, position, rope);
        if let Some(draft) = self.draft {
            // SAFETY: as above.
            unsafe { draft.place(row, position) };
        }
        let factor = if self.range.has_embedding() {
            self.embed(row);
            None
        } else {
            Some(self.take_over(row))
        };
        self.enter_layer(row, self.range.first(), factor);
    }

    /// The row's embedding, normalised without a weight.
    fn embed(&self, row: usize) {
        let g = &self.model.geometry;
        // SAFETY: the row belongs to the caller's item.
        let h = unsafe { std::slice::from_raw_parts_mut(self.buffers.h.add(row * g.hidden), g.hidden) };
        match self.batch.rows()[row].input {
            RowInput::Token(id) => {
                let table = &self.model.token_embd;
                if table.look_up(id as usize, h).is_err() {
                    // Checked when the executor was made; NaN shows if it ever was not.
                    h.fill(f32::NAN);
                }
            }
            RowInput::Embedding(e) => {
                h.copy_from_slice(&self.batch.embeddings()[e as usize * g.hidden..][..g.hidden]);
            }
        }
        // SAFETY: `h` is this row; no weight.
        unsafe { (self.kernels.rms_norm)(h.as_ptr(), std::ptr::null(), g.rms_eps, h.as_mut_ptr(), g.hidden) };
    }

    /// The row and the factor of its norm from over the cut, and what a draft reads of the layers before.
    fn take_over(&self, row: usize) -> f32 {
        let hidden = self.model.geometry.hidden;
        // SAFETY: the row belongs to the caller's item; the crossing has the shape of the step.
        unsafe {
            let h = self.buffers.h.add(row * hidden);
            std::ptr::copy_nonoverlapping(self.cut.rows.add(row * hidden), h, hidden);
            if let Some(draft) = self.draft {
                // Ascending, as the draft wants it.
                for layer in 0..self.range.first() {
                    if let Some(tap) = draft.taps().iter().position(|&tap| tap == layer) {
                        let feature = self.feature(tap, row);
                        draft.tap(self.kernels, layer, row, self.places.len(), feature);
                    }
                }
            }
            *self.cut.factors.add(row)
        }
    }

    /// Top of a range with a cut behind it.
    fn hand_over(&self, row: usize, inverse_rms: f32) {
        let hidden = self.model.geometry.hidden;
        // SAFETY: the row belongs to the caller's item; the crossing has the shape of the step.
        unsafe {
            let h = self.buffers.h.add(row * hidden);
            std::ptr::copy_nonoverlapping(h, self.cut.rows.add(row * hidden), hidden);
            *self.cut.factors.add(row) = inverse_rms;
        }
    }

    /// Where a row of a tap lies in the crossing.
    fn feature(&self, tap: usize, row: usize) -> *mut f32 {
        self.cut.features.wrapping_add((tap * self.places.len() + row) * self.model.geometry.hidden)
    }

    /// Input of a layer: what a draft reads of it, norm, quantised.
    fn enter_layer(&self, row: usize, layer: usize, inverse_rms: Option<f32>) {
        let g = &self.model.geometry;
        if let Some(draft) = self.draft {
            // SAFETY: the row belongs to this item.
            unsafe {
                let h = self.buffers.h.add(row * g.hidden);
                draft.tap(self.kernels, layer, row, self.places.len(), h);
            }
        } else if let Some(tap) = self.cut.taps.iter().position(|&tap| tap == layer) {
            // SAFETY: the row belongs to this item; the crossing has the shape of the step.
            unsafe {
                let h = self.buffers.h.add(row * g.hidden);
                std::ptr::copy_nonoverlapping(h, self.feature(tap, row), g.hidden);
            }
        }
        self.norm_input(row, &self.model.layers[layer].attn_norm, inverse_rms);
    }

    /// `a = norm(h) * weight`, quantised; `inverse_rms` of `h` if it is known.
    fn norm_input(&self, row: usize, weight: &[f32], inverse_rms: Option<f32>) {
        let g = &self.model.geometry;
        let b = &self.buffers;
        let target = b.target(g.hidden, self.places.len());
        // SAFETY: the row belongs to this item, the weight has `hidden` values.
        unsafe {
            let (h, a) = (b.h.add(row * g.hidden), b.a.add(row * g.hidden));
            match inverse_rms {
                Some(r) => (self.kernels.scale_row)(h, r, weight.as_ptr(), a, g.hidden),
                None => (self.kernels.rms_norm)(h, weight.as_ptr(), g.rms_eps, a, g.hidden),
            }
            (self.kernels.quantize)(a, row, 0, g.hidden, &target);
        }
    }

    /// Adds the product's normed output to the residual stream; returns the inverse rms of the sum.
    ///
    /// # Safety
    /// The row belongs to the caller's item.
    unsafe fn add_projected(&self, row: usize, weight: &[f32]) -> f32 {
        let g = &self.model.geometry;
        let b = &self.buffers;
        // SAFETY: by contract; the weight has `hidden` values.
        unsafe {
            (self.kernels.add_post_norm)(
                b.h.add(row * g.hidden),
                b.projected.add(row * g.hidden),
                weight.as_ptr(),
                (g.post_norm_eps, g.rms_eps),
                g.hidden,
            )
        }
    }

    /// Top of the model: final norm for rows that want something.
    fn leave(&self, row: usize, inverse_rms: f32) {
        let g = &self.model.geometry;
        let b = &self.buffers;
        let place = self.places[row];
        if place.logits.is_none() && place.hidden.is_none() {
            return;
        }
        // SAFETY: `projected` of this row has been added and is free; logit slots and output rows belong to one row
        // each. `a` is free, because the last layer's products are done.
        unsafe {
            let y = b.projected.add(row * g.hidden);
            let weight = self.model.output_norm.as_ptr();
            (self.kernels.scale_row)(b.h.add(row * g.hidden), inverse_rms, weight, y, g.hidden);
            if let Some(at) = place.hidden {
                std::ptr::copy_nonoverlapping(y, self.hidden.add(at * g.hidden), g.hidden);
            }
            if let Some(at) = place.logits {
                std::ptr::copy_nonoverlapping(y, b.a.add(at * g.hidden), g.hidden);
                (self.kernels.quantize)(y, at, 0, g.hidden, &b.target(g.hidden, self.logit_rows));
            }
        }
    }

    /// Head norms, RoPE and KV of some rows of one key head and its query heads.
    fn store(&self, layer: usize, item: usize) {
        let g = &self.model.geometry;
        let b = &self.buffers;
        let norms = &self.model.layers[layer];
        let sliding = g.sliding[layer];
        let (kv_head, first) = (item % g.kv_heads, item / g.kv_heads * STORE_ROWS);
        let view = self.kv.view(layer - self.range.first(), kv_head);
        let group = g.heads / g.kv_heads;
        for row in first..(first + STORE_ROWS).min(self.places.len()) {
            let place = &self.places[row];
            let id = self.rows().block(place, sliding);
            // SAFETY: these heads of this row, and this position of these blocks, belong to this item.
            unsafe {
                let rope = if sliding { b.rope.add(row * g.head_dim).cast_const() } else { std::ptr::null() };
                for head in kv_head * group..(kv_head + 1) * group {
                    let q = b.q.add(row * g.q_width() + head * g.head_dim);
                    (self.kernels.head_norm_rope)(q, norms.attn_q_norm.as_ptr(), g.rms_eps, g.head_dim, rope);
                }
                let at = row * g.kv_width() + kv_head * g.head_dim;
                let k = b.k.add(at);
                (self.kernels.head_norm_rope)(k, norms.attn_k_norm.as_ptr(), g.rms_eps, g.head_dim, rope);
                (self.kernels.store_kv)(&view, id, place.position % muser_kv::BLOCK_LEN, k, b.v.add(at));
            }
        }
    }

    fn tile(&self, layer: usize, tile: &AttentionTile) -> (kv::Tile<'_>, *mut f32) {
        let g = &self.model.geometry;
        let sliding = g.sliding[layer];
        let seq = &self.batch.seqs()[tile.seq];
        let group = g.heads / g.kv_heads;
        let row = seq.first_row as usize + tile.row;
        let at = row * g.q_width() + tile.kv_head * group * g.head_dim;
        let (table, first_block) = if sliding {
            (self.batch.sliding_table(seq), seq.sliding_first as usize)
        } else {
            (self.batch.full_table(seq), 0)
        };
        let view = kv::Tile {
            kv: self.kv.view(layer - self.range.first(), tile.kv_head),
            head_dim: g.head_dim,
            table,
            first_block,
            start: seq.start_pos as usize + tile.row,
            rows: tile.rows,
            heads: group,
            window: if sliding { g.window } else { usize::MAX },
            end: None,
            q: self.buffers.q.wrapping_add(at),
            q_stride: g.q_width(),
        };
        (view, self.buffers.o.wrapping_add(at))
    }

    fn attention(&self, worker: &Worker<'_>, layer: usize, scratch: &mut kv::Scratch) -> Result<(), Broken> {
        let g = &self.model.geometry;
        let tiles = &self.plan.tiles;
        let Some(split) = self.plan.split_blocks else {
            worker.share(tiles.len(), |item| {
                let (tile, out) = self.tile(layer, &tiles[item]);
                // SAFETY: the tile's outputs belong to this item; its KV was written before the last barrier.
                unsafe { (self.kernels.attend)(&tile, out, g.q_width(), scratch) };
            });
            return Ok(());
        };
        let entry = STATE_HEAD + g.head_dim;
        let queries = TILE_QUERIES.max(g.heads / g.kv_heads);
        let tile_size = self.plan.max_blocks * queries * entry;
        worker.share(tiles.len() * self.plan.pieces, |item| {
            let (index, piece) = (item / self.plan.pieces, item % self.plan.pieces);
            let (tile, _) = self.tile(layer, &tiles[index]);
            let blocks = tile.blocks();
            let from = blocks.start + piece * split;
            let to = (from + split).min(blocks.end);
            if from < to {
                let at = index * tile_size + piece * split * tile.rows * tile.heads * entry;
                // SAFETY: this piece's entries of the partial buffer belong to this item.
                unsafe { (self.kernels.attend_blocks)(&tile, from..to, self.partial.add(at), scratch) };
            }
        });
        worker.barrier()?;
        let group = g.heads / g.kv_heads;
        let per_tile = queries;
        worker.share(tiles.len() * per_tile, |item| {
            let (index, query) = (item / per_tile, item % per_tile);
            let (tile, out) = self.tile(layer, &tiles[index]);
            let queries = tile.rows * tile.heads;
            if query < queries {
                let out = out.wrapping_add(query / group * g.q_width() + query % group * g.head_dim);
                // SAFETY: all pieces are there since the barrier; this query's output belongs to this item.
                unsafe {
                    let from = self.partial.add(index * tile_size + query * entry);
                    let (count, stride) = (tile.blocks().len(), queries * entry);
                    (self.kernels.combine_blocks)(from, count, stride, out, g.head_dim, scratch);
                }
            }
        });
        Ok(())
    }
}
