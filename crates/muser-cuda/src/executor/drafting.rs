//! Taking a draft in, and its rounds: what the executor does for [`crate::draft`].

use muser_backend::arith::attention::{MAX_LOG2_DRAFT_SCORE, draft_score_bound};
use muser_backend::{DraftBatch, ExecError, KvCapacity, check_draft, draft_mark};
use muser_gguf::GgmlType;
use muser_model::Draft;

use super::{CudaExecutor, angles, check_bound, copy_rows, types_of, weight_types};
use crate::CudaError;
use crate::draft::{self, DRAFT_ROUTE, Drafter, RoundTarget};
use crate::driver::Buffer;
use crate::forward::{TOP_ROWS, id_of_rank, layer_bytes};
use crate::kernels::Tuning;
use crate::selftest::{self, Card};

impl CudaExecutor {
    pub(super) fn take_draft(&mut self, draft: &Draft) -> Result<(), ExecError> {
        let unsupported = |what: &str| Err(ExecError::Unsupported { backend: "cuda", what: what.into() });
        if self.drafter.is_some() {
            return unsupported("a second draft model");
        }
        if self.full.blocks > 0 || self.sliding.blocks > 0 {
            return unsupported("a draft model after KV blocks were allocated");
        }
        if !self.range.has_output() {
            return unsupported("a draft model without the output layer");
        }
        check_draft(draft, &self.model, "cuda")?;
        draft::check_shapes(&draft.config)
            .map_err(|e| ExecError::Unsupported { backend: "cuda", what: e.to_string() })?;
        for (i, layer) in draft.layers.iter().enumerate() {
            let bound = draft_score_bound(&layer.attn_q_norm, &layer.attn_k_norm, draft.config.head_dim);
            check_bound(&format!("draft layer {i}"), bound, MAX_LOG2_DRAFT_SCORE)
                .map_err(|e| ExecError::Unsupported { backend: "cuda", what: e.to_string() })?;
        }
        let drafter = self.load_draft(draft).map_err(|e| self.fail(e))?;
        self.graphs.clear();
        self.info.draft = Some(drafter.info());
        self.info.sliding_block_bytes += draft.layers.len() * layer_bytes(self.digits, draft.config.kv_heads);
        self.info.route = format!("{}+{DRAFT_ROUTE}-{}", self.info.route, draft_mark(draft));
        self.drafter = Some(drafter);
        self.note_room().map_err(|e| self.fail(e))
    }

    fn load_draft(&mut self, draft: &Draft) -> Result<Drafter, CudaError> {
        let (c, g) = (&draft.config, &self.geometry);
        if std::env::var_os(selftest::SKIP_VARIABLE).is_none() {
            let tested = weight_types(&self.model);
            let new: Vec<GgmlType> =
                draft_types(draft).into_iter().filter(|ty| !tested.contains(ty)).collect();
            let (context, kernels) = (&self.context, &self.kernels);
            let card = Card { context, kernels, products: &self.products, stream: &self.stream };
            let compared = selftest::of_draft(&card, &new, self.digits)?.compared;
            tracing::debug!(compared, "the draft's kernels are right");
        }
        // A block reaches beyond the context by what is proposed there.
        let own_angles = angles(c.rope_theta, c.head_dim, g.context + c.block_size);
        let own_angles = Buffer::from_slice(&self.context, &own_angles, "the draft's rotation angles")?;
        let first_plane = self.info.sliding_block_bytes;
        let rows = self.options.max_rows;
        if self.weights.embedding.len() == 0 {
            // Its rows are looked up here; where there is no embedding the table has not been needed.
            self.weights.load_table(&self.context, &self.model)?;
        }
        let drafter =
            Drafter::new(&self.context, &self.kernels, draft, rows, first_plane, own_angles, self.digits)?;
        self.products.reserve(&self.context, drafter.products())?;
        Ok(drafter)
    }

    pub(super) fn check_round(&self, batch: &DraftBatch) -> Result<(), ExecError> {
        let Some(drafter) = &self.drafter else {
            return Err(ExecError::InvalidBatch("no draft model is attached".into()));
        };
        let capacity = KvCapacity { full: self.full.blocks, sliding: self.sliding.blocks };
        batch.validate(drafter.info(), self.geometry.vocab, capacity)?;
        let context = self.geometry.context;
        match batch.seqs().iter().find(|seq| seq.pos as usize >= context) {
            Some(seq) => Err(ExecError::InvalidBatch(format!(
                "a draft at position {}, the context is {context}",
                seq.pos
            ))),
            None => Ok(()),
        }
    }

    /// Logits of all proposals, or with `ids` the largest alone.
    pub(super) fn rounds(
        &mut self,
        batch: &DraftBatch,
        logits: &mut Vec<f32>,
        mut ids: Option<&mut Vec<Option<u32>>>,
    ) -> Result<(), CudaError> {
        self.context.bind()?;
        let _settle = self.stream.settle_at_end();
        let vocab = self.geometry.vocab;
        match &mut ids {
            Some(ids) => ids.clear(),
            None => logits.resize(batch.proposals() * vocab, 0.0),
        }
        let mut logit_rows = logits.chunks_mut(vocab);
        let Some(drafter) = &mut self.drafter else { return Ok(()) };
        let target = RoundTarget {
            stream: &self.stream,
            products: &self.products,
            rows: &self.rows,
            weights: &self.weights,
            scratch: &self.scratch,
            sliding: &self.sliding,
            multiprocessors: self.context.multiprocessors,
            tuning: Tuning::of(self.context.arch),
            graphs: self.options.graphs,
            vocab,
            logit_scale: self.geometry.logit_scale,
            softcap: self.geometry.softcap.unwrap_or(0.0),
        };
        let mut first = 0;
        while first < batch.seqs().len() {
            let round = drafter.round(&target, batch, first)?;
            first = round.next;
            for from in (0..round.proposals).step_by(TOP_ROWS) {
                let count = TOP_ROWS.min(round.proposals - from);
                if !round.proposed {
                    drafter.propose(&target, round.rows, from, count)?;
                }
                if let Some(ids) = &mut ids {
                    self.stream.download(&self.scratch.best, &mut self.best_on_host, 0, count)?;
                    self.stream.synchronize()?;
                    ids.extend(self.best_on_host.slice()[..count].iter().map(|&rank| id_of_rank(rank)));
                } else {
                    self.stream.download(&self.scratch.logits, &mut self.logits_on_host, 0, count * vocab)?;
                    self.stream.synchronize()?;
                    let rows = self.logits_on_host.slice().chunks(vocab);
                    copy_rows(rows.zip(logit_rows.by_ref().take(count)).collect());
                }
            }
            // The data of the next round is written where that of this one was.
            self.stream.synchronize()?;
        }
        Ok(())
    }
}

/// Types of a draft's matrices, each once.
fn draft_types(draft: &Draft) -> Vec<GgmlType> {
    let layers = draft
        .layers
        .iter()
        .flat_map(|l| [&l.attn_q, &l.attn_k, &l.attn_v, &l.attn_output, &l.ffn_gate, &l.ffn_up, &l.ffn_down]);
    types_of(layers.chain(std::iter::once(&draft.fc)))
}
