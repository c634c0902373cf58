//! Layers of another part, computed with weights that come over the bus while the layer before is computed.
//!
//! Two slots on the card hold the tiles of a layer each, two more its K and V. Bytes go file map -> pinned memory -> card -> tiles on the
//! uploader's streams, one layer ahead of the arithmetic; marks between the streams say when a slot is full and when it is free.
//! The host only launches, so it is ahead of both. Each layer is walked through as a range of its own, with the residual
//! stream left where it is; K and V of new rows are collected in pinned memory and go to their owner when the step has succeeded.

use muser_backend::{Crossing, ExecError, HostLayers, LayerRange, LayerStreamer, StepBatch, StreamedStep};
use muser_kv::{BLOCK_LEN, BlockId};

use super::{CudaExecutor, scratch};
use crate::CudaError;
use crate::driver::{Buffer, Event, Pinned};
use crate::forward::{ForwardPass, KvPool, layer_bytes};
use crate::streaming::{MATRICES, Streaming, group_of};
use crate::taps::Taps;
use crate::uploader::{Uploader, copy_pieces};
use crate::weights::{LayerOnDevice, Plan, Unfit, unfit_of, widest};

/// Bytes of a staging slot: long enough for the bus, and small beside what a small card has.
const STAGING_BYTES: usize = 32 << 20;
/// Blocks beyond those of one long sequence that a step may see.
const MORE_BLOCKS: usize = 8;

impl CudaExecutor {
    fn prepare(&mut self, range: LayerRange, positions: usize) -> Result<(), CudaError> {
        self.context.bind()?;
        let (context, g) = (self.context.clone(), &self.geometry);
        if range.has_output() {
            return Err(CudaError::Unsupported("the vocabulary matrix is not streamed".to_owned()));
        }
        let mut plan = Plan::new(&Unfit::new());
        let (mut layers, mut most) = (Vec::with_capacity(range.count()), 0);
        for layer in &self.model.layers[range.layers()] {
            plan.bytes = 0;
            layers.push(plan.layer(layer, g)?);
            most = most.max(plan.bytes);
        }
        plan.factors_of(&mut layers);
        let tiles = || Buffer::<u8>::new(&context, most, "weights on their way");
        let tiles = [tiles()?, tiles()?];
        let norms = Buffer::from_slice(&context, &plan.norms, "the norm weights")?;
        for (layer, slot) in layers.iter_mut().zip([0, 1].into_iter().cycle()) {
            layer.place(&tiles[slot], &norms);
        }
        let window = (g.window + self.options.max_rows).min(positions);
        let blocks = positions.max(window).div_ceil(BLOCK_LEN) + 1 + MORE_BLOCKS;
        let bytes = layer_bytes(self.digits, g.kv_heads);
        // Zeroed for the same reason as the executor's own.
        let pool = || -> Result<KvPool, CudaError> {
            let memory = Buffer::zeroed(&context, blocks * bytes, "KV of layers on their way")?;
            Ok(KvPool { memory, blocks: blocks as u32, block_bytes: bytes as u64 })
        };
        let written = self.options.max_rows.div_ceil(BLOCK_LEN) + 1 + MORE_BLOCKS;
        let event = || Event::new(&context);
        let streaming = Streaming {
            range,
            _norms: norms,
            tiles,
            pools: [pool()?, pool()?],
            uploader: Uploader::new(&context, STAGING_BYTES.max(widest(&plan.jobs)).max(bytes))?,
            repack: self.kernels.repack()?,
            ready: [[event()?, event()?], [event()?, event()?]],
            done: [event()?, event()?],
            unfit: Buffer::zeroed(&context, range.count() * MATRICES, "counts of what does not fit")?,
            is_checked: false,
            leaving: Buffer::new(&context, written.min(blocks) * bytes, "KV on its way back")?,
            left: Pinned::zeroed(&context, 0)?,
            step: StreamedStep::default(),
            layers,
        };
        // Working memory is shaped by the products that use it.
        let all: Vec<&LayerOnDevice> = self.weights.layers.iter().chain(&streaming.layers).collect();
        let products = all.iter().flat_map(|layer| layer.products());
        self.products.reserve(&context, products)?;
        let shapes = (&all[..], &self.weights.output);
        self.graphs.clear();
        self.scratch = scratch(&context, &self.geometry, shapes, self.range, &self.options, self.limits)?;
        self.streaming = Some(streaming);
        self.note_room()
    }

    fn streamed(
        &mut self,
        streaming: &mut Streaming,
        home: &mut dyn HostLayers,
        batch: &StepBatch,
        taps: &[usize],
        crossing: &mut Crossing,
    ) -> Result<bool, ExecError> {
        let most = self.options.max_rows;
        streaming.step.make(batch, &self.model, streaming.range, home.kv_capacity(), most)?;
        if !streaming.has_room() {
            return Ok(false);
        }
        if let Err(error) = self.make_room(streaming.step.batch(), false) {
            return Err(self.fail(error));
        }
        if let Err(error) = self.go_through(streaming, home, taps, crossing) {
            return match error {
                Failed::Card(error) => Err(self.fail(error)),
                Failed::Home(error) => Err(error),
            };
        }
        streaming.give_back(
            home,
            layer_bytes(self.digits, self.geometry.kv_heads),
            &self.geometry.sliding,
        )?;
        Ok(true)
    }

    /// All layers; K and V of what was written is in pinned memory then.
    fn go_through(
        &mut self,
        streaming: &mut Streaming,
        home: &dyn HostLayers,
        taps: &[usize],
        crossing: &mut Crossing,
    ) -> Result<(), Failed> {
        self.context.bind()?;
        let (stream, hidden) = (&self.stream, self.geometry.hidden);
        let _settle = (stream.settle_at_end(), streaming.uploader.settle_at_end());
        let bytes = layer_bytes(self.digits, self.geometry.kv_heads);
        streaming.make_room_on_host(&self.context, bytes, &self.geometry.sliding)?;
        let batch = streaming.step.batch();
        let shape = self.large.fill(batch, &self.geometry, self.limits);
        if streaming.range.has_embedding() {
            self.scratch.embeddings.write(0, batch.embeddings())?;
        } else {
            self.scratch.h.write(0, &crossing.rows)?;
            self.scratch.cut.write(0, &crossing.factors)?;
        }
        self.large.upload(stream)?;
        let no_taps = Taps::default();
        let mut left_at = 0;
        for (number, index) in streaming.range.layers().enumerate() {
            let slot = number % 2;
            let group = group_of(self.geometry.sliding[index]);
            self.bring(streaming, home, number, index)?;
            streaming.uploader.mark(&streaming.ready[slot])?;
            streaming.ready[slot].iter().try_for_each(|event| stream.wait_for(event))?;
            let range = LayerRange::new(index..index + 1, self.geometry.layers());
            let range = range.ok_or_else(|| CudaError::Unsupported(format!("layer {index} to stream")))?;
            let pool = &streaming.pools[slot];
            let walk = ForwardPass {
                layers: &streaming.layers[number..=number],
                range,
                full: pool,
                sliding: pool,
                taps: &no_taps,
                draft: None,
                ..self.walk(&self.large, shape)
            };
            if let Some(tap) = taps.iter().position(|tap| *tap == index).filter(|_| shape.context) {
                if range.has_embedding() {
                    walk.embed()?;
                }
                stream.synchronize()?;
                let values = shape.n * hidden;
                self.scratch.h.read(0, &mut crossing.features[tap * values..][..values])?;
            }
            walk.layers()?;
            let written = streaming.step.written(group);
            for (place, block) in written.iter().enumerate() {
                let (from, to) = (pool.memory.at(block * bytes), streaming.leaving.at(place * bytes));
                self.transpose(from, to, bytes, true)?;
            }
            let len = written.len() * bytes;
            stream.download_to(&streaming.leaving, 0, &mut streaming.left, left_at, len)?;
            left_at += len;
            stream.mark(&streaming.done[slot])?;
        }
        stream.synchronize()?;
        streaming.uploader.synchronize()?;
        self.check_fit(streaming)?;
        self.scratch.h.read(0, &mut crossing.rows)?;
        self.scratch.cut.read(0, &mut crossing.factors)?;
        Ok(())
    }

    /// Starts bringing K, V and weights of a layer to its slot.
    fn bring(
        &self,
        streaming: &mut Streaming,
        home: &dyn HostLayers,
        number: usize,
        index: usize,
    ) -> Result<(), Failed> {
        let slot = number % 2;
        let bytes = layer_bytes(self.digits, self.geometry.kv_heads);
        let Streaming { uploader, tiles, pools, repack, done, unfit, step, .. } = streaming;
        uploader.wait_for(&done[slot])?;
        let blocks = step.blocks(group_of(self.geometry.sliding[index]));
        let at_once = uploader.slot_bytes() / bytes;
        for (first, some) in blocks.chunks(at_once).enumerate() {
            let sources: Result<Vec<&[u8]>, ExecError> =
                some.iter().map(|block| kv_of(home, index, *block, bytes)).collect();
            let sources = sources.map_err(Failed::Home)?;
            let stage = uploader.next_slot()?;
            copy_pieces(sources.into_iter().zip(stage.pinned.slice_mut().chunks_mut(bytes)).collect());
            let len = some.len() * bytes;
            stage.stream.upload(&stage.pinned, 0, &stage.raw, 0, len)?;
            let to = pools[slot].memory.at(first * at_once * bytes);
            self.transpose_on(&stage.stream, stage.raw.at(0), to, len, false)?;
        }
        let mut plan = Plan::new(&Unfit::new());
        plan.layer(&self.model.layers[index], &self.geometry)?;
        for (matrix, job) in plan.jobs.iter().enumerate() {
            uploader.matrix(job, &tiles[slot], repack, unfit.at(number * MATRICES + matrix))?;
        }
        Ok(())
    }

    /// Refuses weights that tiles cannot hold, which only shows when these are made.
    fn check_fit(&self, streaming: &mut Streaming) -> Result<(), CudaError> {
        if streaming.is_checked {
            return Ok(());
        }
        let mut plan = Plan::new(&Unfit::new());
        for layer in &self.model.layers[streaming.range.layers()] {
            plan.layer(layer, &self.geometry)?;
        }
        let unfit = unfit_of(&plan.jobs, &streaming.unfit)?;
        if let Some(name) = unfit.first() {
            return Err(CudaError::Unsupported(format!(
                "{name} has numbers that no tile holds: it is not streamed"
            )));
        }
        streaming.is_checked = true;
        Ok(())
    }
}

/// K and V of a block, of the length that the card has.
fn kv_of(home: &dyn HostLayers, layer: usize, block: BlockId, bytes: usize) -> Result<&[u8], ExecError> {
    let found = home.kv_of(layer, block)?;
    if found.len() == bytes {
        return Ok(found);
    }
    let len = found.len();
    Err(ExecError::InvalidBatch(format!("layer {layer} of a block has {len} bytes, {bytes} here")))
}

/// On which side something went wrong.
enum Failed {
    Card(CudaError),
    Home(ExecError),
}

impl From<CudaError> for Failed {
    fn from(error: CudaError) -> Self {
        Self::Card(error)
    }
}

impl LayerStreamer for CudaExecutor {
    fn prepare_layers(&mut self, range: LayerRange, positions: usize) -> Result<(), ExecError> {
        self.streaming = None;
        self.prepare(range, positions).map_err(|error| self.fail(error))
    }

    fn step_streamed(
        &mut self,
        home: &mut dyn HostLayers,
        batch: &StepBatch,
        taps: &[usize],
        crossing: &mut Crossing,
    ) -> Result<bool, ExecError> {
        let Some(mut streaming) = self.streaming.take() else { return Ok(false) };
        let done = self.streamed(&mut streaming, home, batch, taps, crossing);
        self.streaming = Some(streaming);
        done
    }
}
