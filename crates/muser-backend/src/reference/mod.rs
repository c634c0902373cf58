//! The scalar reference executor: the model's formula in plain Rust, to be read in one sitting.
//!
//! Weights are dequantised row by row as they are used, values are stored as f32, sums are taken in f64. No integer
//! arithmetic, no SIMD, no fusion: this is the yardstick that the fast backends are measured against, so it follows
//! the model's formula line by line and nothing else: this module is where the tree says what the model computes. Every operation takes one row and the KV before it; rows of
//! a step are worked on side by side only so that a weight row is dequantised once for all of them.
//!
//! Cost: about two multiply-adds a nanosecond and core, so a 30-million-parameter model writes some tens of tokens a
//! second and a 30-billion one needs minutes for a token. It runs both.

mod draft;
mod kv;
mod matrix;
mod ops;
mod tower;

use std::time::Duration;

use muser_kv::{BlockId, KvGroup};
use muser_model::{Draft, LayerWeights, Matrix, Model, Projector};

use self::draft::Drafter;
use self::kv::{KvRow, KvStore, LayerShape};
use self::matrix::{dequantize, product};
use self::tower::Tower;
use crate::arith::vision::PositionRule;
use crate::draft::{check_draft, draft_mark};
use crate::tower::{check_projector, no_image, no_tower};
use crate::{
    DraftBatch, DraftExecutor, ExecError, Executor, ExecutorInfo, KvCapacity, KvType, LentBlock, RowInput,
    SeqRows, StepBatch, StepOutput, TowerExecutor, TowerImage, TowerInfo, largest_of_draft,
};
#[cfg(test)]
pub(crate) use ops::gelu;

/// Most rows of a step; any number would do.
const MAX_ROWS: usize = 1024;

/// Executes Muse Glimmer by the book. See the module documentation.
pub struct ReferenceExecutor {
    model: Model,
    info: ExecutorInfo,
    kv: KvStore,
    drafter: Option<Drafter>,
    tower: Option<Tower>,
}

impl ReferenceExecutor {
    /// An executor over `model` that stores K and V as `kv_type`.
    ///
    /// # Errors
    /// [`ExecError::Unsupported`] names the first weight matrix whose type cannot be dequantised, or a KV type of digits.
    pub fn new(model: Model, kv_type: KvType) -> Result<Self, ExecError> {
        check_types(&model.matrices().collect::<Vec<_>>())?;
        if kv_type.digits().is_some() {
            let what = format!("KV type {}: the reference computes in floats", kv_type.name());
            return Err(ExecError::Unsupported { backend: "scalar", what });
        }
        let g = &model.geometry;
        let shape = |sliding: &bool| LayerShape {
            heads: g.heads,
            kv_heads: g.kv_heads,
            head_dim: g.head_dim,
            group: if *sliding { KvGroup::Sliding } else { KvGroup::Full },
        };
        let kv = KvStore::new(g.sliding.iter().map(shape).collect(), kv_type);
        let info = ExecutorInfo {
            backend: "scalar",
            device: "scalar reference, plain Rust".into(),
            route: format!("scalar-1/{}", if kv_type == KvType::F32 { "f32" } else { "f16" }),
            kv_type,
            full_block_bytes: kv.block_bytes(KvGroup::Full),
            sliding_block_bytes: kv.block_bytes(KvGroup::Sliding),
            max_rows: MAX_ROWS,
            vocab: g.vocab,
            hidden: g.hidden,
            draft: None,
            kv_room: None,
            prompt_rows: 0,
        };
        Ok(Self { model, info, kv, drafter: None, tower: None })
    }

    /// Input of the bottom layer: the (dequantised) embedding row or the given one, normalised without a weight.
    fn embed(&self, batch: &StepBatch) -> Vec<f32> {
        let g = &self.model.geometry;
        let mut h = vec![0.0; batch.rows().len() * g.hidden];
        for (row, x) in batch.rows().iter().zip(h.chunks_mut(g.hidden)) {
            match row.input {
                RowInput::Token(id) => {
                    self.model
                        .token_embd
                        .look_up(id as usize, x)
                        .expect("checked when the executor was made");
                }
                RowInput::Embedding(e) => {
                    x.copy_from_slice(&batch.embeddings()[e as usize * g.hidden..][..g.hidden]);
                }
            }
            ops::rms_norm(x, None, g.rms_eps);
        }
        h
    }

    /// One layer: attention and feed-forward, each added to the residual stream after its post-norm.
    fn layer(&mut self, batch: &StepBatch, index: usize, h: &mut [f32]) {
        let g = self.model.geometry.clone();
        let w = self.model.layers[index].clone();
        let mut a = h.to_vec();
        a.chunks_mut(g.hidden).for_each(|x| ops::rms_norm(x, Some(&w.attn_norm), g.rms_eps));
        let o = self.attention(batch, index, &w, &a);
        add_post_normed(h, o, &w.post_attention_norm, g.post_norm_eps);

        let mut f = h.to_vec();
        f.chunks_mut(g.hidden).for_each(|x| ops::rms_norm(x, Some(&w.ffn_norm), g.rms_eps));
        let mut gate = product(&w.ffn_gate, &f);
        let up = product(&w.ffn_up, &f);
        gate.iter_mut().zip(&up).for_each(|(x, u)| *x = ops::silu(*x) * u);
        add_post_normed(h, product(&w.ffn_down, &gate), &w.post_ffw_norm, g.post_norm_eps);
    }

    /// Gated attention of every row of the step; also stores the rows' K and V.
    fn attention(&mut self, batch: &StepBatch, index: usize, w: &LayerWeights, a: &[f32]) -> Vec<f32> {
        let g = self.model.geometry.clone();
        let mut q = product(&w.attn_q, a);
        let mut k = product(&w.attn_k, a);
        let v = product(&w.attn_v, a);
        let gate = product(&w.attn_gate, a);
        q.chunks_mut(g.head_dim).for_each(|x| ops::rms_norm(x, Some(&w.attn_q_norm), g.rms_eps));
        k.chunks_mut(g.head_dim).for_each(|x| ops::rms_norm(x, Some(&w.attn_k_norm), g.rms_eps));
        let sliding = g.sliding[index];
        let mut out = vec![0.0; q.len()];
        for seq in batch.seqs() {
            for i in 0..seq.n_rows as usize {
                let (row, pos) = (seq.first_row as usize + i, seq.start_pos as usize + i);
                let (q, k) = (
                    &mut q[row * g.q_width()..][..g.q_width()],
                    &mut k[row * g.kv_width()..][..g.kv_width()],
                );
                if sliding {
                    q.chunks_mut(g.head_dim).for_each(|x| ops::rope(x, pos, g.rope_theta));
                    k.chunks_mut(g.head_dim).for_each(|x| ops::rope(x, pos, g.rope_theta));
                }
                self.kv.write(
                    index,
                    locate(batch, seq, sliding, pos),
                    k,
                    &v[row * g.kv_width()..][..g.kv_width()],
                );
                // Rows of a sequence come in order: the KV of every earlier position is in place by now.
                let first = if sliding { g.first_visible(pos) } else { 0 };
                let rows: Vec<KvRow<'_>> =
                    (first..=pos).map(|p| self.kv.row(index, locate(batch, seq, sliding, p))).collect();
                self.kv.attend(index, &rows, q, &mut out[row * g.q_width()..][..g.q_width()]);
            }
        }
        out.iter_mut().zip(&gate).for_each(|(x, g)| *x *= ops::sigmoid(*g));
        product(&w.attn_output, &out)
    }

    /// Final norm, vocabulary matrix, scale and soft cap for the rows that want logits; hidden states likewise.
    fn head(&self, batch: &StepBatch, h: &[f32], out: &mut StepOutput) {
        let g = &self.model.geometry;
        let mut wanted = Vec::new();
        for (row, x) in batch.rows().iter().zip(h.chunks(g.hidden)) {
            if row.wants.needs_logits() || row.wants.hidden {
                let mut y = x.to_vec();
                ops::rms_norm(&mut y, Some(&self.model.output_norm), g.rms_eps);
                if row.wants.hidden {
                    out.hidden.extend_from_slice(&y);
                }
                if row.wants.needs_logits() {
                    wanted.extend_from_slice(&y);
                }
            }
        }
        out.logits = product(&self.model.output, &wanted);
        self.cap(&mut out.logits);
        out.reduce_to_argmax(batch, g.vocab);
    }

    /// Logit scale, then soft cap.
    fn cap(&self, logits: &mut [f32]) {
        let g = &self.model.geometry;
        for z in logits {
            *z *= g.logit_scale;
            if let Some(cap) = g.softcap {
                *z = (f64::from(cap) * (f64::from(*z) / f64::from(cap)).tanh()) as f32;
            }
        }
    }

    /// Row `row` of each tap of `layers`, one after the other.
    fn features(taps: &[(usize, Vec<f32>)], layers: &[usize], row: usize, hidden: usize, out: &mut Vec<f32>) {
        for layer in layers {
            let tap = taps.iter().find(|(tapped, _)| tapped == layer);
            out.extend_from_slice(&tap.expect("every wanted layer was tapped").1[row * hidden..][..hidden]);
        }
    }

    /// Gives the draft, if there is one, its context K and V of every row (zeros if the batch wants none).
    fn extend_draft(&mut self, batch: &StepBatch, taps: &[(usize, Vec<f32>)]) {
        let Some(drafter) = &self.drafter else { return };
        let (mut features, mut places) = (Vec::new(), Vec::new());
        for seq in batch.seqs() {
            for i in 0..seq.n_rows as usize {
                let (row, pos) = (seq.first_row as usize + i, seq.start_pos as usize + i);
                let layers = &drafter.model.config.target_layers;
                Self::features(taps, layers, row, self.model.geometry.hidden, &mut features);
                places.push((locate(batch, seq, true, pos), pos));
            }
        }
        if batch.wants_draft_context() {
            drafter.extend(&mut self.kv, &features, &places);
        } else {
            drafter.blank(&mut self.kv, &places);
        }
    }
}

impl Executor for ReferenceExecutor {
    fn info(&self) -> &ExecutorInfo {
        &self.info
    }

    fn allocate_kv(&mut self, capacity: KvCapacity) -> Result<(), ExecError> {
        self.kv.allocate(capacity);
        Ok(())
    }

    fn step(&mut self, batch: &StepBatch, out: &mut StepOutput) -> Result<(), ExecError> {
        batch.validate(&self.model.geometry, self.kv.capacity(), MAX_ROWS)?;
        out.hidden.clear();
        let mut h = self.embed(batch);
        let mut taps: Vec<(usize, Vec<f32>)> = Vec::new();
        for index in 0..self.model.layers.len() {
            let drafts = self.drafter.as_ref().is_some_and(|d| d.model.config.target_layers.contains(&index));
            if drafts {
                taps.push((index, h.clone()));
            }
            self.layer(batch, index, &mut h);
        }
        self.extend_draft(batch, &taps);
        self.head(batch, &h, out);
        Ok(())
    }

    fn export_block(&self, group: KvGroup, block: BlockId, dst: &mut [u8]) -> Result<(), ExecError> {
        self.kv.export(group, block, dst)
    }

    fn clear_rows(&self, group: KvGroup, rows: usize, bytes: &mut [u8]) {
        self.kv.clear_rows(group, rows, bytes);
    }

    fn import_block(&mut self, group: KvGroup, block: BlockId, src: &[u8]) -> Result<(), ExecError> {
        self.kv.import(group, block, src)
    }

    fn most_candidates(&self) -> usize {
        0
    }

    fn read_bandwidth(&self) -> Result<Option<f64>, ExecError> {
        Ok(None)
    }

    fn lend_block(&mut self, _: KvGroup, _: BlockId) -> Option<Box<dyn LentBlock>> {
        None
    }
}

impl DraftExecutor for ReferenceExecutor {
    fn attach_draft(&mut self, draft: Draft) -> Result<(), ExecError> {
        let matrices: Vec<&Matrix> = draft.matrices().collect();
        check_types(&matrices)?;
        check_draft(&draft, &self.model, "scalar")?;
        if self.drafter.is_some() {
            let what = "a second draft model".into();
            return Err(ExecError::Unsupported { backend: "scalar", what });
        }
        let mark = draft_mark(&draft);
        let drafter = Drafter::new(draft, &mut self.kv, self.model.layers.len());
        self.info.draft = Some(drafter.info());
        self.info.route = format!("{}+dflash-1-{mark}", self.info.route);
        self.info.sliding_block_bytes = self.kv.block_bytes(KvGroup::Sliding);
        self.drafter = Some(drafter);
        Ok(())
    }

    fn draft(&mut self, batch: &DraftBatch, logits: &mut Vec<f32>) -> Result<(), ExecError> {
        let Some(drafter) = &self.drafter else {
            return Err(ExecError::InvalidBatch("no draft model is attached".into()));
        };
        batch.validate(drafter.info(), self.model.geometry.vocab, self.kv.capacity())?;
        *logits = drafter.propose(&self.model, &self.kv, batch);
        self.cap(logits);
        Ok(())
    }

    fn draft_largest(
        &mut self,
        batch: &DraftBatch,
        scratch: &mut Vec<f32>,
        ids: &mut Vec<Option<u32>>,
    ) -> Result<(), ExecError> {
        largest_of_draft(self, batch, scratch, ids)
    }

    fn has_draft_context(&self, block: BlockId, row: usize) -> bool {
        self.drafter.as_ref().is_none_or(|drafter| drafter.has_context(&self.kv, block, row))
    }
}

impl TowerExecutor for ReferenceExecutor {
    fn attach_projector(&mut self, projector: Projector, rule: PositionRule) -> Result<(), ExecError> {
        check_projector(&projector, &self.model.geometry, "scalar")?;
        check_types(&projector.matrices().collect::<Vec<_>>())?;
        self.tower = Some(Tower::new(projector, rule));
        Ok(())
    }

    fn tower(&self) -> Option<&TowerInfo> {
        self.tower.as_ref().map(|tower| &tower.info)
    }

    fn begin_image(&mut self, image: &TowerImage) -> Result<(), ExecError> {
        let tower = self.tower.as_mut().ok_or_else(no_tower)?;
        tower.check(image)?;
        tower.image = Some(image.clone());
        Ok(())
    }

    fn encode_image(&mut self, _time: Duration, rows: &mut Vec<f32>) -> Result<bool, ExecError> {
        let tower = self.tower.as_mut().ok_or_else(no_tower)?;
        let image = tower.image.take().ok_or_else(no_image)?;
        *rows = tower.rows(&image)?;
        Ok(true)
    }

    fn drop_image(&mut self) {
        if let Some(tower) = &mut self.tower {
            tower.image = None;
        }
    }
}

/// Every matrix has a type that can be dequantised, and scales that are numbers.
fn check_types(matrices: &[&Matrix]) -> Result<(), ExecError> {
    for m in matrices {
        let mut row = vec![0.0; m.cols];
        let unsupported = |what| ExecError::Unsupported { backend: "scalar", what };
        dequantize(m, 0, &mut row).map_err(unsupported)?;
        m.check_scales(0..m.rows).map_err(|error| unsupported(error.to_string()))?;
    }
    Ok(())
}

/// Block and row inside it of position `pos` of `seq`.
fn locate(batch: &StepBatch, seq: &SeqRows, sliding: bool, pos: usize) -> (BlockId, usize) {
    let (block, row) = (pos / muser_kv::BLOCK_LEN, pos % muser_kv::BLOCK_LEN);
    let id = if sliding {
        batch.sliding_table(seq)[block - seq.sliding_first as usize]
    } else {
        batch.full_table(seq)[block]
    };
    (id, row)
}

/// `h += rms(x) * weight`, row by row.
fn add_post_normed(h: &mut [f32], mut x: Vec<f32>, weight: &[f32], eps: f32) {
    for (h, x) in h.chunks_mut(weight.len()).zip(x.chunks_mut(weight.len())) {
        ops::rms_norm(x, Some(weight), eps);
        h.iter_mut().zip(x).for_each(|(h, x)| *h += *x);
    }
}
