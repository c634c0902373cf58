//! The DFlash draft by the book: context K and V from the target's residual stream, and the block forward.

use muser_kv::{BLOCK_LEN, BlockId, KvGroup};
use muser_model::{Draft, DraftLayer, Model};

use super::kv::{KvRow, KvStore, LayerShape};
use super::matrix::product;
use super::ops;
use crate::{DraftBatch, DraftInfo, DraftSeq};

/// A draft model beside its target. Its layers are the KV store's layers from `first_layer` on.
pub(super) struct Drafter {
    pub(super) model: Draft,
    first_layer: usize,
}

impl Drafter {
    /// Adds the draft's layers to the store.
    pub(super) fn new(model: Draft, kv: &mut KvStore, first_layer: usize) -> Self {
        let g = &model.config;
        for _ in 0..model.layers.len() {
            kv.add_layer(LayerShape {
                heads: g.heads,
                kv_heads: g.kv_heads,
                head_dim: g.head_dim,
                group: KvGroup::Sliding,
            });
        }
        Self { model, first_layer }
    }

    pub(super) fn info(&self) -> DraftInfo {
        DraftInfo { max_proposals: self.model.config.max_draft(), window: self.model.config.window }
    }

    /// Stores the K and V that positions contribute to later drafts. `features` has a row for each position: the
    /// residual stream at the input of each target layer, one after the other. They depend on the position alone.
    pub(super) fn extend(&self, kv: &mut KvStore, features: &[f32], places: &[((BlockId, usize), usize)]) {
        let g = &self.model.config;
        let mut context = product(&self.model.fc, features);
        context
            .chunks_mut(g.hidden)
            .for_each(|x| ops::rms_norm(x, Some(&self.model.enc_output_norm), g.rms_eps));
        for (i, layer) in self.model.layers.iter().enumerate() {
            // The context is not passed through attn_norm.
            let mut k = product(&layer.attn_k, &context);
            let v = product(&layer.attn_v, &context);
            let width = g.kv_width();
            for ((place, pos), (k, v)) in places.iter().zip(k.chunks_mut(width).zip(v.chunks(width))) {
                self.finish_heads(k, &layer.attn_k_norm, *pos);
                kv.write(self.first_layer + i, *place, k, v);
            }
        }
    }

    /// Stores zeros where positions contribute nothing.
    pub(super) fn blank(&self, kv: &mut KvStore, places: &[((BlockId, usize), usize)]) {
        let zeros = vec![0.0; self.model.config.kv_width()];
        for layer in 0..self.model.layers.len() {
            for (place, _) in places {
                kv.write(self.first_layer + layer, *place, &zeros, &zeros);
            }
        }
    }

    /// Is this anything but zeros? A computed key has been normalised and is not.
    pub(super) fn has_context(&self, kv: &KvStore, block: BlockId, row: usize) -> bool {
        self.model.layers.is_empty() || kv.row(self.first_layer, (block, row)).0.iter().any(|&k| k != 0.0)
    }

    /// Logits of the proposals of every sequence, without scale and soft cap.
    pub(super) fn propose(&self, target: &Model, kv: &KvStore, batch: &DraftBatch) -> Vec<f32> {
        let mut rows = Vec::new();
        for seq in batch.seqs() {
            let block = self.block(target, kv, seq, batch.sliding_table(seq));
            rows.extend_from_slice(&block[self.model.config.hidden..]); // the anchor's own row proposes nothing
        }
        product(&target.output, &rows)
    }

    /// The block forward: the anchor, then a mask for each proposal.
    fn block(&self, target: &Model, kv: &KvStore, seq: &DraftSeq, table: &[BlockId]) -> Vec<f32> {
        let g = &self.model.config;
        let n = seq.proposals as usize + 1;
        let mut h = vec![0.0; n * g.hidden];
        for (i, x) in h.chunks_mut(g.hidden).enumerate() {
            let id = if i == 0 { seq.anchor } else { g.mask_token };
            // Raw rows: the target's norm of the embedding is not applied here.
            target.token_embd.look_up(id as usize, x).expect("checked when the executor was made");
        }
        for (i, layer) in self.model.layers.iter().enumerate() {
            self.block_layer(kv, self.first_layer + i, layer, seq, table, &mut h);
        }
        h.chunks_mut(g.hidden).for_each(|x| ops::rms_norm(x, Some(&self.model.output_norm), g.rms_eps));
        h
    }

    fn block_layer(
        &self,
        kv: &KvStore,
        index: usize,
        layer: &DraftLayer,
        seq: &DraftSeq,
        table: &[BlockId],
        h: &mut [f32],
    ) {
        let g = &self.model.config;
        let start = seq.pos as usize;
        let mut a = h.to_vec();
        a.chunks_mut(g.hidden).for_each(|x| ops::rms_norm(x, Some(&layer.attn_norm), g.rms_eps));
        let mut q = product(&layer.attn_q, &a);
        let mut k = product(&layer.attn_k, &a);
        let v = product(&layer.attn_v, &a);
        for (i, k) in k.chunks_mut(g.kv_width()).enumerate() {
            self.finish_heads(k, &layer.attn_k_norm, start + i);
        }
        let mut o = vec![0.0; q.len()];
        for (i, (q, o)) in q.chunks_mut(g.q_width()).zip(o.chunks_mut(g.q_width())).enumerate() {
            self.finish_heads(q, &layer.attn_q_norm, start + i);
            // The window bounds the context; rows of the block all see each other.
            let oldest = (start + i + 1).saturating_sub(g.window).min(start);
            let place = |p: usize| (table[p / BLOCK_LEN - seq.sliding_first as usize], p % BLOCK_LEN);
            let mut rows: Vec<KvRow<'_>> = (oldest..start).map(|p| kv.row(index, place(p))).collect();
            rows.extend(k.chunks(g.kv_width()).zip(v.chunks(g.kv_width())));
            kv.attend(index, &rows, q, o);
        }
        h.iter_mut().zip(product(&layer.attn_output, &o)).for_each(|(h, o)| *h += o);

        let mut f = h.to_vec();
        f.chunks_mut(g.hidden).for_each(|x| ops::rms_norm(x, Some(&layer.ffn_norm), g.rms_eps));
        let mut gate = product(&layer.ffn_gate, &f);
        let up = product(&layer.ffn_up, &f);
        gate.iter_mut().zip(&up).for_each(|(x, u)| *x = ops::silu(*x) * u);
        h.iter_mut().zip(product(&layer.ffn_down, &gate)).for_each(|(h, d)| *h += d);
    }

    /// Norm, then rotation, of every head of one row.
    fn finish_heads(&self, row: &mut [f32], norm: &[f32], pos: usize) {
        let g = &self.model.config;
        for head in row.chunks_mut(g.head_dim) {
            ops::rms_norm(head, Some(norm), g.rms_eps);
            ops::rope_halves(head, pos, g.rope_theta);
        }
    }
}
