//! What a step does for the draft: from the target's residual stream of a row to the draft's K and V of its position.
//!
//! ```text
//! features = residual stream at the input of the target layers, one after the other      quantised as it is tapped
//! g        = rms(fc features) * enc.output_norm
//! K, V     = rope(rms_head(Wk g) * attn_k_norm), Wv g       for every draft layer, into the sliding blocks
//! ```

use muser_backend::StepBatch;

use super::Drafter;
use super::calls::{Extend, ExtendLayer};
use crate::WgpuError;
use crate::call::{Axis, Counts, Maker};
use crate::device::{Buffer, Device, Recorder};
use crate::products::{Output, Product, output_segments};
use crate::program::{Kind, Mode, Norm, Parts, Rotation, Store, norm, store};
use crate::step_data::ROWS_AT;
use crate::text::{Source, shader};

impl Extend {
    pub(super) fn new(
        maker: &mut Maker<'_>,
        drafter: &Drafter,
        p: Parts<'_>,
        kv: &[Buffer],
    ) -> Result<Self, WgpuError> {
        let (c, w, b) = (&drafter.config, &drafter.weights, &drafter.extend);
        let (s, step) = (p.scratch, &p.step.device);
        let source = Source::new("tap", &[], &[shader!("quant"), shader!("tap")]);
        let (a, blocks) = (&b.act_features, (c.hidden / 256) as u32);
        let mut taps = Vec::with_capacity(c.target_layers.len());
        for (place, layer) in c.target_layers.iter().enumerate() {
            let words = [c.hidden as u32, place as u32 * blocks, a.blocks, a.forms, a.small_at];
            let views = [(&s.h).into(), (&a.codes).into(), (&a.figures).into(), (&a.floats).into()];
            let grid = [Axis::Fixed(blocks), Axis::Rows(1), Axis::Fixed(1)];
            taps.push((*layer, maker.call(&source, &words, &views, grid)?));
        }
        let output = |to, width: usize| Output {
            step,
            to,
            width: width as u32,
            first_row: 0,
            count_at: ROWS_AT,
            whole: false,
        };
        let mapped = Output { whole: true, ..output(&b.mapped, c.hidden) };
        let fc = Product::new(maker, &w.fc, &b.act_features, mapped)?;
        let features = Norm {
            mode: Mode::Plain,
            width: c.hidden,
            h: &b.mapped,
            o: &s.nothing,
            post: &s.nothing,
            weight: &w.enc_output_norm,
            to: &b.act_mapped,
            segments: 1,
            top: None,
            eps: c.rms_eps,
            post_eps: 0.0,
        };
        let norm = norm(maker, step, &b.factors, &s.sink, features)?;
        let mut layers = Vec::with_capacity(w.layers.len());
        for (layer, kv) in w.layers.iter().zip(kv) {
            let key = Store {
                kind: Kind::Key,
                rotation: Rotation::Halves,
                part: &b.k,
                weight: &layer.k_norm,
                angles: &b.angles,
                to: kv,
                factors: &s.sink,
                slot: 3,
                segments: output_segments(maker, &layer.attn_k),
                blank: false,
            };
            let segments = output_segments(maker, &layer.attn_v);
            let value = Store { kind: Kind::Value, part: &b.v, segments, ..key };
            let mut store = |one| store(maker, step, drafter.heads(), one);
            let stores = [store(key)?, store(value)?];
            let blanks = [store(Store { blank: true, ..key })?, store(Store { blank: true, ..value })?];
            let products = [
                Product::new(maker, &layer.attn_k, &b.act_mapped, output(&b.k, c.kv_width()))?,
                Product::new(maker, &layer.attn_v, &b.act_mapped, output(&b.v, c.kv_width()))?,
            ];
            layers.push(ExtendLayer { products, stores, blanks });
        }
        Ok(Self { taps, fc, norm, layers })
    }
}

impl Drafter {
    /// Writes what the step's rows need: the angles of their positions.
    pub(crate) fn prepare_step(&self, device: &Device, batch: &StepBatch) -> Result<(), WgpuError> {
        if !batch.wants_draft_context() {
            return Ok(());
        }
        let positions = batch.seqs().iter().flat_map(|seq| seq.start_pos..seq.start_pos + seq.n_rows);
        device.write(&self.extend.angles, 0, bytemuck::cast_slice(&self.angles(positions)))
    }

    /// Takes the residual stream at the input of a layer, if the draft reads it there.
    pub(crate) fn tap(&self, recorder: &mut Recorder, layer: usize, rows: u32) {
        let Some((extend, _)) = &self.calls else { return };
        for (_, call) in extend.taps.iter().filter(|(at, _)| *at == layer) {
            call.record(recorder, Counts { rows, parts: 1 });
        }
    }

    /// After the layers: K and V of all rows, or zeros in their place.
    pub(crate) fn extend(&self, recorder: &mut Recorder, rows: u32, wanted: bool) {
        let Some((extend, _)) = &self.calls else { return };
        let counts = Counts { rows, parts: 1 };
        if wanted {
            extend.fc.record(recorder, counts);
            extend.norm.iter().for_each(|call| call.record(recorder, counts));
        }
        for layer in &extend.layers {
            if wanted {
                layer.products.iter().for_each(|product| product.record(recorder, counts));
            }
            let stores = if wanted { &layer.stores } else { &layer.blanks };
            stores.iter().for_each(|call| call.record(recorder, counts));
        }
    }
}
