//! A draft round: the block forward of all sequences at once.
//!
//! A sequence has a row for its anchor and one for each proposal. Rows of one block see each other, all of them, besides the
//! context before the anchor. The K and V of the block's rows lie in blocks of the round's own (one for each sequence, the
//! same for all layers), so attention is that of the context's blocks followed by one more.
#![allow(unsafe_code, reason = "threads write disjoint parts of shared buffers")]

use muser_backend::DraftBatch;
use muser_kv::BlockId;
use muser_model::{Draft, Model};

use super::Drafter;
use super::buffers::DraftLayerViews;
use super::round_plan::{RoundRow, RoundTile};
use crate::executor::buffers::{Pointers, Widths};
use crate::executor::kv::{Heads, KvStore};
use crate::executor::rows::angles;
use crate::executor::scratch::ThreadScratch;
use crate::executor::share::{ProductSet, share_chunks, share_products};
use crate::kernels::Kernels;
use crate::kernels::kv::{KvView, Tile};
use crate::kernels::matmul::{Finish, MatrixView};
use crate::kernels::query_tile::STATE_HEAD;
use crate::pool::{Broken, Worker};

/// The executor's side of a round.
pub(crate) struct RoundTarget<'a> {
    pub(crate) model: &'a Model,
    pub(crate) output: MatrixView,
    pub(crate) kernels: &'static Kernels,
    pub(crate) kv: &'a KvStore,
    /// Row buffers with room for `max_rows` rows of the draft.
    pub(crate) buffers: Pointers,
    pub(crate) max_rows: usize,
    /// One entry per thread.
    pub(crate) scratch: *mut ThreadScratch,
    pub(crate) threads: usize,
}

/// Everything that a round reads and writes.
pub(crate) struct Round<'a> {
    target: RoundTarget<'a>,
    draft: &'a Draft,
    layers: &'a [DraftLayerViews],
    first_layer: usize,
    inverse_frequencies: &'a [f64],
    batch: &'a DraftBatch,
    rows: &'a [RoundRow],
    tiles: &'a [RoundTile],
    heads: Heads,
    block_kv: *mut u8,
    partial: *mut f32,
    partial_size: usize,
    logits: *mut f32,
    logit_rows: usize,
}

// SAFETY: the pointers are to buffers that outlive the round; phases write disjoint items between barriers.
unsafe impl Sync for Round<'_> {}

impl Drafter {
    /// The round of the sequences from `first` on, as many as fit, and the first that is left over. `logits` has a row for
    /// each proposal from `first` on.
    pub(crate) fn round<'a>(
        &'a mut self,
        target: RoundTarget<'a>,
        batch: &'a DraftBatch,
        first: usize,
        logits: &'a mut [f32],
    ) -> (Round<'a>, usize) {
        let b = &mut self.round;
        let next = b.plan(&self.model.config, batch.seqs(), first, target.max_rows, target.threads);
        let round = Round {
            target,
            draft: &self.model,
            layers: &self.layers,
            first_layer: self.first_layer,
            inverse_frequencies: &self.inverse_frequencies,
            batch,
            rows: &b.rows,
            tiles: &b.tiles,
            heads: b.heads,
            block_kv: b.block_kv.as_mut_ptr().cast(),
            partial: b.partial.as_mut_ptr(),
            partial_size: b.partial_size,
            logits: logits.as_mut_ptr(),
            logit_rows: b.logit_rows,
        };
        (round, next)
    }
}

impl Round<'_> {
    /// Proposals whose logits this round writes.
    pub(crate) fn logit_rows(&self) -> usize {
        self.logit_rows
    }

    /// What each thread runs.
    pub(crate) fn run(&self, worker: &Worker<'_>) -> Result<(), Broken> {
        // SAFETY: every thread has an index of its own.
        let scratch = unsafe { &mut *self.target.scratch.add(worker.index) };
        let c = &self.draft.config;
        let kernels = self.target.kernels;
        let b = &self.target.buffers;
        let n = self.rows.len();
        b.holds(n, Widths::of_draft(c));
        let (hidden, ffn, q_width, kv_width) = (c.hidden, c.ffn, c.q_width(), c.kv_width());

        worker.share(n, |row| self.embed(row));
        worker.barrier()?;
        for (index, layer) in self.layers.iter().enumerate() {
            let norms = &self.draft.layers[index];
            let input = b.input(hidden, n, b.a);
            let products =
                [(layer.attn_q, b.q, q_width), (layer.attn_k, b.k, kv_width), (layer.attn_v, b.v, kv_width)];
            share_products(kernels, worker, &[ProductSet::plain(input, &products)], &mut scratch.product);
            worker.barrier()?;

            worker.share(n * c.kv_heads, |item| self.store(index, item / c.kv_heads, item % c.kv_heads));
            worker.barrier()?;

            worker
                .share(self.tiles.len(), |item| self.attend(index, &self.tiles[item], worker.index, scratch));
            worker.barrier()?;

            let target = b.target(q_width, n);
            share_chunks(worker, n, q_width, |row, from, to| {
                // SAFETY: this part of this row belongs to this item.
                unsafe { (kernels.quantize)(b.o.add(row * q_width), row, from, to, &target) };
            });
            worker.barrier()?;

            let input = b.input(q_width, n, b.o);
            let product = [(layer.attn_output, b.projected, hidden)];
            share_products(kernels, worker, &[ProductSet::plain(input, &product)], &mut scratch.product);
            worker.barrier()?;

            worker.share(n, |row| {
                self.add_projected(row);
                self.norm_input(row, &norms.ffn_norm);
            });
            worker.barrier()?;

            let input = b.input(hidden, n, b.a);
            let products = [(layer.ffn_gate, b.ffn_gate, ffn), (layer.ffn_up, b.ffn_up, ffn)];
            share_products(kernels, worker, &[ProductSet::plain(input, &products)], &mut scratch.product);
            worker.barrier()?;

            let target = b.target(ffn, n);
            share_chunks(worker, n, ffn, |row, from, to| {
                // SAFETY: this part of this row belongs to this item.
                unsafe {
                    let up = b.ffn_up.add(row * ffn);
                    (kernels.silu_mul)(b.ffn_gate.add(row * ffn + from), up.add(from), to - from);
                    (kernels.quantize)(up, row, from, to, &target);
                }
            });
            worker.barrier()?;

            let input = b.input(ffn, n, b.ffn_up);
            let product = [(layer.ffn_down, b.projected, hidden)];
            share_products(kernels, worker, &[ProductSet::plain(input, &product)], &mut scratch.product);
            worker.barrier()?;

            worker.share(n, |row| {
                self.add_projected(row);
                match self.draft.layers.get(index + 1) {
                    Some(next) => self.norm_input(row, &next.attn_norm),
                    None => self.leave(row),
                }
            });
            worker.barrier()?;
        }
        let g = &self.target.model.geometry;
        let input = b.input(hidden, self.logit_rows, b.a);
        let finish = Finish::Logits { scale: g.logit_scale, cap: g.softcap };
        let product = [(self.target.output, self.logits, g.vocab)];
        share_products(
            kernels,
            worker,
            &[ProductSet { input, products: &product, finish }],
            &mut scratch.product,
        );
        Ok(())
    }

    /// Bottom of the draft: the raw embedding of the anchor or of the mask, and the row's RoPE angles.
    fn embed(&self, row: usize) {
        let c = &self.draft.config;
        let b = &self.target.buffers;
        let place = &self.rows[row];
        let seq = &self.batch.seqs()[place.seq];
        // SAFETY: the row belongs to this item.
        let h = unsafe { std::slice::from_raw_parts_mut(b.h.add(row * c.hidden), c.hidden) };
        let id = if place.index == 0 { seq.anchor } else { c.mask_token };
        let table = &self.target.model.token_embd;
        if table.look_up(id as usize, h).is_err() {
            // Checked when the executor was made; NaN shows if it ever was not.
            h.fill(f32::NAN);
        }
        // SAFETY: as above.
        let rope = unsafe { std::slice::from_raw_parts_mut(b.rope.add(row * c.head_dim), c.head_dim) };
        angles(self.inverse_frequencies, seq.pos as usize + place.index, rope);
        self.norm_input(row, &self.draft.layers[0].attn_norm);
    }

    /// `a = norm(h) * weight`, quantised.
    fn norm_input(&self, row: usize, weight: &[f32]) {
        let c = &self.draft.config;
        let b = &self.target.buffers;
        let target = b.target(c.hidden, self.rows.len());
        // SAFETY: the row belongs to the caller's item, the weight has `hidden` values.
        unsafe {
            let a = b.a.add(row * c.hidden);
            (self.target.kernels.rms_norm)(b.h.add(row * c.hidden), weight.as_ptr(), c.rms_eps, a, c.hidden);
            (self.target.kernels.quantize)(a, row, 0, c.hidden, &target);
        }
    }

    /// `h += projected`: the draft has no norm there.
    fn add_projected(&self, row: usize) {
        let hidden = self.draft.config.hidden;
        let b = &self.target.buffers;
        // SAFETY: the row belongs to the caller's item.
        let (h, o) = unsafe {
            let h = std::slice::from_raw_parts_mut(b.h.add(row * hidden), hidden);
            (h, std::slice::from_raw_parts(b.projected.add(row * hidden), hidden))
        };
        h.iter_mut().zip(o).for_each(|(h, o)| *h += *o);
    }

    /// Top of the draft: final norm of the rows that propose.
    fn leave(&self, row: usize) {
        let c = &self.draft.config;
        let b = &self.target.buffers;
        let Some(at) = self.rows[row].logits else { return };
        // SAFETY: `projected` of this row has been added and is free; a place among the proposals belongs to one row, and
        // `a` is free because the last layer's products are done.
        unsafe {
            let y = b.projected.add(row * c.hidden);
            let weight = self.draft.output_norm.as_ptr();
            (self.target.kernels.rms_norm)(b.h.add(row * c.hidden), weight, c.rms_eps, y, c.hidden);
            std::ptr::copy_nonoverlapping(y, b.a.add(at * c.hidden), c.hidden);
            (self.target.kernels.quantize)(y, at, 0, c.hidden, &b.target(c.hidden, self.logit_rows));
        }
    }

    /// Head norms and RoPE of one key head of one row and its query heads; K and V go to the round's block.
    fn store(&self, layer: usize, row: usize, kv_head: usize) {
        let c = &self.draft.config;
        let b = &self.target.buffers;
        let norms = &self.draft.layers[layer];
        let kernels = self.target.kernels;
        let group = c.heads / c.kv_heads;
        let place = &self.rows[row];
        let view = self.block_view(kv_head);
        // SAFETY: these heads of this row, and this position of the round's block, belong to this item.
        unsafe {
            let rope = b.rope.add(row * c.head_dim).cast_const();
            for head in kv_head * group..(kv_head + 1) * group {
                let q = b.q.add(row * c.q_width() + head * c.head_dim);
                (kernels.head_norm_rope_halves)(q, norms.attn_q_norm.as_ptr(), c.rms_eps, c.head_dim, rope);
            }
            let at = row * c.kv_width() + kv_head * c.head_dim;
            let k = b.k.add(at);
            (kernels.head_norm_rope_halves)(k, norms.attn_k_norm.as_ptr(), c.rms_eps, c.head_dim, rope);
            (kernels.store_kv)(&view, BlockId(place.slot as u32), place.index, k, b.v.add(at));
        }
    }

    /// The round's own blocks.
    fn block_view(&self, kv_head: usize) -> KvView {
        self.heads.view(self.block_kv, kv_head, self.heads.bytes(), self.batch.seqs().len())
    }

    fn attend(&self, layer: usize, tile: &RoundTile, thread: usize, scratch: &mut ThreadScratch) {
        let c = &self.draft.config;
        let b = &self.target.buffers;
        let kernels = self.target.kernels;
        let seq = &self.batch.seqs()[tile.seq];
        let pos = seq.pos as usize;
        let group = c.heads / c.kv_heads;
        let at = tile.row * c.q_width() + tile.kv_head * group * c.head_dim;
        // The window bounds the context; rows of the block all see each other.
        let context = Tile {
            kv: self.target.kv.view(self.first_layer + layer, tile.kv_head),
            head_dim: c.head_dim,
            table: self.batch.sliding_table(seq),
            first_block: seq.sliding_first as usize,
            start: pos + tile.index,
            rows: tile.rows,
            heads: group,
            window: c.window,
            end: Some(pos),
            q: b.q.wrapping_add(at),
            q_stride: c.q_width(),
        };
        let own = [BlockId(tile.slot as u32)];
        let block = Tile {
            kv: self.block_view(tile.kv_head),
            table: &own,
            first_block: 0,
            start: tile.index,
            window: usize::MAX,
            end: Some(seq.proposals as usize + 1),
            ..context
        };
        let blocks = context.blocks();
        let (count, queries) = (blocks.len(), tile.rows * group);
        let stride = queries * (STATE_HEAD + c.head_dim);
        // SAFETY: the tile's outputs belong to this item and the partial results to this thread; the context was written
        // by earlier steps (the batch's tables were checked), the block before the last barrier.
        unsafe {
            let partial = self.partial.add(thread * self.partial_size);
            (kernels.attend_blocks)(&context, blocks, partial, &mut scratch.attention);
            (kernels.attend_blocks)(&block, 0..1, partial.add(count * stride), &mut scratch.attention);
            for query in 0..queries {
                let from = partial.add(query * (STATE_HEAD + c.head_dim));
                let out = b.o.wrapping_add(at + query / group * c.q_width() + query % group * c.head_dim);
                let attention = &mut scratch.attention;
                (kernels.combine_blocks)(from, count + 1, stride, out, c.head_dim, attention);
            }
        }
    }
}
