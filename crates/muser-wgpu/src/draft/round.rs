//! A draft round: the block forward of several sequences at once.
//!
//! A sequence has a row for its anchor and one for each proposal. Rows of one block see each other, all of them, besides the
//! context before the anchor; their K and V lie in a block of the round's own, the same for all layers.

use muser_backend::DraftBatch;
use muser_model::DflashConfig;

use super::buffers::{DraftLayer, RoundBuffers};
use super::calls::{Extend, Round};
use super::{Drafter, Target};
use crate::WgpuError;
use crate::activations::Activations;
use crate::call::{Counts, Maker};
use crate::device::Buffer;
use crate::products::{Output, Product, output_segments};
use crate::program::{
    Attend, Block, BlockParts, Kind, Mode, Norm, Parts, Rotation, Store, embed, logits, norm,
};
use crate::step_data::TOP_AT;

impl Round {
    pub(super) fn new(
        maker: &mut Maker<'_>,
        drafter: &Drafter,
        p: Parts<'_>,
        kv: &[Buffer],
    ) -> Result<Self, WgpuError> {
        let (c, w, b, s) = (&drafter.config, &drafter.weights, &drafter.round, p.scratch);
        let step = &drafter.data.device;
        let mut layers = Vec::with_capacity(w.layers.len());
        for (index, kv) in kv.iter().enumerate() {
            layers.push(Self::layer(maker, drafter, p, index, kv)?);
        }
        let last = Norm {
            top: Some((drafter.data.top_at(), &s.hidden)),
            ..residual(maker, w.layers.last(), c, b, p, &w.output_norm, &s.act_top)
        };
        let output = Output {
            step,
            to: &s.top,
            width: p.geometry.vocab as u32,
            first_row: 0,
            count_at: TOP_AT,
            whole: false,
        };
        let (Some(table), Some(matrix)) = (&p.weights.embedding, &p.weights.output) else {
            return Err(WgpuError::Unsupported("a draft without the output layer".to_owned()));
        };
        Ok(Self {
            embed: embed(maker, table, step, &s.nothing, &b.h)?,
            layers,
            top: norm(maker, step, &b.factors, &s.sink, last)?,
            output: Product::new(maker, matrix, &s.act_top, output)?,
            logits: logits(maker, Parts { step: &drafter.data, ..p }, matrix)?,
        })
    }

    fn layer(
        maker: &mut Maker<'_>,
        drafter: &Drafter,
        p: Parts<'_>,
        index: usize,
        kv: &Buffer,
    ) -> Result<Block, WgpuError> {
        let (c, l, b, s) = (&drafter.config, &drafter.weights.layers[index], &drafter.round, p.scratch);
        let added = residual(
            maker,
            index.checked_sub(1).map(|at| &drafter.weights.layers[at]),
            c,
            b,
            p,
            &l.attn_norm,
            &b.act_hidden,
        );
        let parts = BlockParts {
            step: &drafter.data.device,
            factors: &b.factors,
            sink: &s.sink,
            heads: drafter.heads(),
            has_factors: false,
            norms: [
                Norm { mode: if index == 0 { Mode::Plain } else { Mode::Add }, ..added },
                Norm { weight: &l.ffn_norm, ..added },
            ],
            inputs: &[
                (&l.attn_q, &b.act_hidden, &b.q),
                (&l.attn_k, &b.act_hidden, &b.k),
                (&l.attn_v, &b.act_hidden, &b.v),
            ],
            query: Store {
                kind: Kind::Query,
                rotation: Rotation::Halves,
                part: &b.q,
                weight: &l.q_norm,
                angles: &b.angles,
                to: &b.queries,
                factors: &b.query_factors,
                slot: 2,
                segments: 1,
                blank: false,
            },
            kv: (&b.k, &b.v, &b.own),
            k_norm: &l.k_norm,
            attend: Attend {
                queries: &b.queries,
                factors: &b.query_factors,
                kv,
                own: Some(&b.own),
                nothing: &s.nothing,
                part_o: &b.part_o,
                part_l: &b.part_l,
                gate: None,
                sliding: true,
                to: &b.act_attention,
            },
            output: (&l.attn_output, &b.act_attention, &b.projected),
            ffn: [
                (&l.ffn_gate, &b.act_hidden, &b.ffn_gate),
                (&l.ffn_up, &b.act_hidden, &b.ffn_up),
                (&l.ffn_down, &b.act_ffn, &b.projected),
            ],
        };
        Block::new(maker, &parts)
    }
}

/// The norm of the round's residual stream, to which the product before is added.
fn residual<'a>(
    maker: &Maker<'_>,
    before: Option<&DraftLayer>,
    c: &DflashConfig,
    b: &'a RoundBuffers,
    p: Parts<'a>,
    weight: &'a Buffer,
    to: &'a Activations,
) -> Norm<'a> {
    Norm {
        mode: Mode::Add,
        width: c.hidden,
        h: &b.h,
        o: &b.projected,
        post: &p.scratch.nothing,
        weight,
        to,
        segments: before.map_or(1, |l| output_segments(maker, &l.ffn_down)),
        top: None,
        eps: c.rms_eps,
        post_eps: 0.0,
    }
}

impl Drafter {
    /// Makes the calls of steps and rounds; `parts.kv` are K and V of the target's layers, then those of the draft.
    pub(crate) fn make_calls(&mut self, maker: &mut Maker<'_>, parts: Parts<'_>) -> Result<(), WgpuError> {
        let kv = &parts.kv[parts.range.count()..];
        let extend = Extend::new(maker, self, parts, kv)?;
        let round = Round::new(maker, self, parts, kv)?;
        self.calls = Some((extend, round));
        Ok(())
    }

    /// Runs the sequences from `first` on, as many as fit; the first that is left over. Proposals are in the list of top rows.
    pub(crate) fn round(
        &mut self,
        target: Target<'_>,
        batch: &DraftBatch,
        first: usize,
    ) -> Result<usize, WgpuError> {
        let (shape, end, next) = self.data.fill_round(batch, first, &self.config)?;
        let device = target.device;
        self.data.upload(device, shape.rows, end)?;
        let angles =
            self.angles(batch.seqs()[first..next].iter().flat_map(|seq| seq.pos..=seq.pos + seq.proposals));
        device.write(&self.round.angles, 0, bytemuck::cast_slice(&angles))?;
        let Some((_, round)) = &self.calls else { return Ok(next) };
        let counts = Counts { rows: shape.rows, parts: shape.parts[1] };
        let mut recorder = device.recorder();
        round.embed.iter().for_each(|call| call.record(&mut recorder, counts));
        round.layers.iter().for_each(|block| block.record(&mut recorder, counts, |_| {}));
        device.submit(recorder)?;
        Ok(next)
    }

    /// Logits of proposals `from .. from + count` of the round, and the best of each, copied to `staging`: ranks, then rows.
    pub(crate) fn propose(
        &self,
        target: Target<'_>,
        from: usize,
        count: usize,
        logits: bool,
        staging: &Buffer,
    ) -> Result<(), WgpuError> {
        let Some((_, round)) = &self.calls else { return Ok(()) };
        let (device, s) = (target.device, target.scratch);
        self.data.upload_top(device, from, count)?;
        let mut recorder = device.recorder();
        let counts = Counts { rows: count as u32, parts: 1 };
        round.top.iter().for_each(|call| call.record(&mut recorder, counts));
        round.output.record(&mut recorder, counts);
        round.logits.iter().for_each(|call| call.record(&mut recorder, counts));
        recorder.copy(&s.chosen, 0, staging, 0, 8 * count as u64);
        if logits {
            let bytes = (4 * count * target.geometry.vocab) as u64;
            recorder.copy(&s.logits, 0, staging, 8 * count as u64, bytes);
        }
        device.submit(recorder)
    }
}
