//! The executor over its parts.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use muser_backend::{
    Crossing, ExecError, Executor, ExecutorInfo, KvCapacity, LayerRange, LentBlock, PartExecutor, StepBatch,
    StepOutput, TowerInfo,
};
use muser_kv::{BlockId, KvGroup};
use muser_model::Model;

use crate::blocks::{self, SplitLoan};
use crate::groups;
use crate::pace::{Grouping, Pace, Way};
use crate::part::{Part, lock};
use crate::pipeline::Pipeline;

/// One executor made of several; see the crate.
pub struct SplitExecutor {
    pub(crate) info: ExecutorInfo,
    /// In the order of their layers.
    pub(crate) parts: Vec<Part>,
    /// Bytes of a block that each part has, in the order of the groups.
    sizes: [Vec<usize>; 2],
    crossing: Crossing,
    /// Layers whose inputs cross for a draft.
    pub(crate) taps: Vec<usize>,
    /// The part with the vision tower, and what it is.
    pub(crate) tower: Option<(usize, TowerInfo)>,
    /// A part whose device is gone.
    lost: Option<usize>,
    pace: Pace,
    cuts: Vec<std::ops::Range<usize>>,
    pipeline: Option<Pipeline>,
    /// Bytes for blocks in host memory, where some parts have blocks there and others elsewhere.
    host_room: Option<u64>,
    /// Bytes for blocks that a part may take at most, by part; those that are not there may take what they have.
    most: Vec<Option<u64>>,
}

impl SplitExecutor {
    /// Puts parts together that have all layers of `model` between them, in order.
    ///
    /// # Errors
    /// [`ExecError::Unsupported`] where layers are missing or come twice, or parts compute with different numbers.
    pub fn new(
        parts: Vec<Box<dyn PartExecutor>>,
        model: &Model,
        grouping: Grouping,
    ) -> Result<Self, ExecError> {
        check(&parts, model)?;
        let parts: Vec<Part> = parts
            .into_iter()
            .map(|executor| {
                let range = executor.range();
                let matrices = model.matrices_of(range.layers());
                let output = range.has_output().then_some(&model.output);
                let weights = matrices.chain(output).map(|m| m.bytes().len() as u64).sum();
                Part { executor: Arc::new(Mutex::new(executor)), range, weights, streamer: None }
            })
            .collect();
        let info = parts[0].lock().info().clone();
        let mut executor = Self {
            info,
            parts,
            sizes: [Vec::new(), Vec::new()],
            crossing: Crossing::default(),
            taps: Vec::new(),
            tower: None,
            lost: None,
            pace: Pace::new(grouping),
            cuts: Vec::new(),
            pipeline: None,
            host_room: None,
            most: Vec::new(),
        };
        executor.gather();
        Ok(executor)
    }

    /// Parts with blocks in host memory have so much for them all together; it counts where other parts have a limit, too.
    #[must_use]
    pub fn with_host_room(mut self, bytes: Option<u64>) -> Self {
        self.host_room = bytes;
        self.gather();
        self
    }

    /// Parts may take no more than so much for blocks, whatever their devices have.
    #[must_use]
    pub fn with_most(mut self, bytes: Vec<Option<u64>>) -> Self {
        self.most = bytes;
        self.gather();
        self
    }

    /// From now on steps of many rows may have layers that lie in host memory computed by another part, where that takes less time:
    /// room is made for sequences of up to `positions`. What cannot be streamed stays where it is, and the log says why.
    #[must_use]
    pub fn with_streaming(mut self, positions: usize) -> Self {
        for home in 0..self.parts.len() {
            let range = self.parts[home].range;
            if range.has_output() || self.parts[home].lock().as_host().is_none() {
                continue;
            }
            // Each device has room for one range; those behind the part first, which take over what comes out.
            let taken = |by: usize| self.parts.iter().any(|part| part.streamer == Some(by));
            let others = (home + 1..self.parts.len()).chain(0..home).filter(|by| !taken(*by));
            let ready = others.filter(|by| {
                let mut device = self.parts[*by].lock();
                let Some(streamer) = device.as_streamer() else { return false };
                let prepared = streamer.prepare_layers(range, positions);
                prepared.inspect_err(|error| tracing::warn!(%error, "{range} are not streamed")).is_ok()
            });
            let first = ready.take(1).next();
            self.parts[home].streamer = first;
        }
        self.gather();
        self
    }

    /// Weights that are streamed take their time whatever the rows are.
    fn note_prompt_rows(&mut self) {
        let most = self.info.max_rows;
        let streamed = self.streams() && self.pace.choose(most, true) == Way::Streamed;
        self.info.prompt_rows = if streamed { most } else { 0 };
    }

    /// Are there layers that may be streamed?
    pub fn streams(&self) -> bool {
        self.parts.iter().any(|part| part.streamer.is_some())
    }

    /// The layers of each part.
    pub fn ranges(&self) -> impl Iterator<Item = LayerRange> {
        self.parts.iter().map(|part| part.range)
    }

    pub(crate) fn last(&self) -> &Part {
        &self.parts[self.parts.len() - 1]
    }

    /// Sums up what the parts say of themselves.
    pub(crate) fn gather(&mut self) {
        let mut infos: Vec<ExecutorInfo> = self.parts.iter().map(|part| part.lock().info().clone()).collect();
        for (info, most) in infos.iter_mut().zip(&self.most) {
            info.kv_room = info.kv_room.map(|room| most.map_or(room, |most| room.min(most)));
        }
        let bytes = |group| infos.iter().map(|info| info.block_bytes(group)).collect::<Vec<_>>();
        self.sizes = [bytes(KvGroup::Full), bytes(KvGroup::Sliding)];
        let last = &infos[infos.len() - 1];
        let on = |(part, info): (&Part, &ExecutorInfo)| format!("{} on {}", part.range, info.device);
        self.info = ExecutorInfo {
            backend: "split",
            device: self.parts.iter().zip(&infos).map(on).collect::<Vec<_>>().join("; "),
            // That of the part with the draft, if there is one.
            route: last.route.clone(),
            draft: last.draft,
            full_block_bytes: self.sizes[0].iter().sum(),
            sliding_block_bytes: self.sizes[1].iter().sum(),
            max_rows: infos.iter().map(|info| info.max_rows).min().unwrap_or(1),
            kv_room: room(&infos, self.host_room),
            prompt_rows: 0,
            ..last.clone()
        };
        self.note_prompt_rows();
    }

    pub(crate) fn sizes(&self, group: KvGroup) -> &[usize] {
        match group {
            KvGroup::Full => &self.sizes[0],
            KvGroup::Sliding => &self.sizes[1],
        }
    }

    /// Taps of a step.
    fn taps_of(&self, batch: &StepBatch) -> usize {
        if batch.wants_draft_context() { self.taps.len() } else { 0 }
    }

    /// All rows through one part after the other.
    fn in_turn(&mut self, batch: &StepBatch, out: &mut StepOutput) -> Result<(), ExecError> {
        let taps = self.taps_of(batch);
        self.crossing.shape(batch.rows().len(), self.info.hidden, taps);
        (0..self.parts.len()).try_for_each(|at| self.step_of(at, batch, out))
    }

    fn step_of(&mut self, at: usize, batch: &StepBatch, out: &mut StepOutput) -> Result<(), ExecError> {
        let stepped = lock(&self.parts[at].executor).step_part(batch, &mut self.crossing, out);
        stepped.inspect_err(|error| self.note(at, error))
    }

    /// Remembers a part that is lost.
    fn note(&mut self, part: usize, error: &ExecError) {
        if matches!(error, ExecError::Lost { .. }) {
            self.lost = Some(part);
        }
    }

    /// The part whose device is gone, once a step has found out.
    pub fn lost(&self) -> Option<usize> {
        self.lost
    }

    /// All rows through one part after the other, layers in host memory by whoever they are streamed to. `false`: there was none with
    /// room for the step.
    fn streamed(&mut self, batch: &StepBatch, out: &mut StepOutput) -> Result<bool, ExecError> {
        let taps = self.taps_of(batch);
        self.crossing.shape(batch.rows().len(), self.info.hidden, taps);
        let mut any = false;
        for at in 0..self.parts.len() {
            if self.stream_part(at, batch)? {
                any = true;
            } else {
                self.step_of(at, batch, out)?;
            }
        }
        Ok(any)
    }

    /// A part's layers by the device that they are streamed to. `false`: not done, and nothing has changed.
    fn stream_part(&mut self, at: usize, batch: &StepBatch) -> Result<bool, ExecError> {
        let Some(by) = self.parts[at].streamer else { return Ok(false) };
        let done = {
            let (mut home, mut device) = (lock(&self.parts[at].executor), lock(&self.parts[by].executor));
            let (Some(home), Some(device)) = (home.as_host(), device.as_streamer()) else { return Ok(false) };
            device.step_streamed(home, batch, &self.taps, &mut self.crossing)
        };
        match done {
            Ok(done) => Ok(done),
            // A bug or the end of the device: the part itself would fare no better.
            Err(error @ (ExecError::Lost { .. } | ExecError::InvalidBatch(_))) => {
                self.note(by, &error);
                Err(error)
            }
            Err(error) => {
                tracing::warn!(%error, "{} are not streamed any more", self.parts[at].range);
                self.parts[at].streamer = None;
                Ok(false)
            }
        }
    }

    /// Groups of rows behind each other.
    fn in_groups(&mut self, batch: &StepBatch, count: usize, out: &mut StepOutput) -> Result<(), ExecError> {
        groups::cut(batch, count, &mut self.cuts);
        let taps = self.taps_of(batch);
        let pipeline = match &mut self.pipeline {
            Some(pipeline) => pipeline,
            none => none.insert(Pipeline::start(self.parts.iter().map(|part| Arc::clone(&part.executor)))?),
        };
        let run = pipeline.run(batch, &self.cuts, (self.info.hidden, taps), out);
        run.map_err(|failure| {
            failure.part.into_iter().for_each(|part| self.note(part, &failure.error));
            failure.error
        })
    }
}

/// Refuses parts that are no model.
fn check(parts: &[Box<dyn PartExecutor>], model: &Model) -> Result<(), ExecError> {
    let refuse = |what: String| Err(ExecError::Unsupported { backend: "split", what });
    let layers = model.geometry.layers();
    let mut next = 0;
    for part in parts {
        let range = part.range();
        let whole = LayerRange::new(range.layers(), layers);
        if range.first() != next || whole != Some(range) {
            return refuse(format!("{range} where layer {next} of {layers} should begin"));
        }
        next = range.end();
    }
    if next != layers || parts.is_empty() {
        return refuse(format!("parts up to layer {next} of a model of {layers}"));
    }
    let first = parts[0].info();
    for info in parts.iter().map(|part| part.info()) {
        let same = info.route == first.route && info.kv_type == first.kv_type;
        if !same || (info.vocab, info.hidden) != (first.vocab, first.hidden) {
            let (a, b) = (&first.route, &info.route);
            return refuse(format!("{} computes by {a}, {} by {b}", first.device, info.device));
        }
    }
    Ok(())
}

/// What the parts have left for blocks of the whole model, whatever of both groups is taken: the part runs out first that has the
/// least room for its share. Parts with blocks in host memory have `host` together.
fn room(infos: &[ExecutorInfo], host: Option<u64>) -> Option<u64> {
    let sum = |infos: &[&ExecutorInfo], group| -> usize {
        infos.iter().map(|info| info.block_bytes(group)).sum::<usize>()
    };
    let all: Vec<&ExecutorInfo> = infos.iter().collect();
    let of = |infos: &[&ExecutorInfo], room: u64| {
        let share = |group| sum(infos, group) as f64 / sum(&all, group).max(1) as f64;
        (room as f64 / share(KvGroup::Full).max(share(KvGroup::Sliding)).max(1e-9)) as u64
    };
    let (own, on_host): (Vec<&ExecutorInfo>, Vec<&ExecutorInfo>) =
        infos.iter().partition(|info| info.kv_room.is_some());
    let least = own.iter().filter_map(|info| info.kv_room.map(|room| of(&[info], room))).min()?;
    let host = host.filter(|_| !on_host.is_empty()).map(|room| of(&on_host, room));
    Some(host.map_or(least, |host| least.min(host)))
}

impl Executor for SplitExecutor {
    fn info(&self) -> &ExecutorInfo {
        &self.info
    }

    fn allocate_kv(&mut self, capacity: KvCapacity) -> Result<(), ExecError> {
        let allocated = self.parts.iter().try_for_each(|part| part.lock().allocate_kv(capacity));
        if allocated.is_err() {
            // What the others have got serves nobody.
            for part in &self.parts {
                let none = KvCapacity { full: 0, sliding: 0 };
                if let Err(error) = part.lock().allocate_kv(none) {
                    tracing::warn!(%error, "blocks were not given back");
                }
            }
        }
        allocated
    }

    fn step(&mut self, batch: &StepBatch, out: &mut StepOutput) -> Result<(), ExecError> {
        let rows = batch.rows().len();
        if rows > self.info.max_rows {
            let most = self.info.max_rows;
            return Err(ExecError::InvalidBatch(format!("{rows} rows, expected 1 to {most}")));
        }
        let way = if self.parts.len() > 1 { self.pace.choose(rows, self.streams()) } else { Way::Groups(1) };
        let start = Instant::now();
        let way = match way {
            Way::Streamed if self.streamed(batch, out)? => Way::Streamed,
            Way::Streamed => Way::Groups(1),
            Way::Groups(0 | 1) => {
                self.in_turn(batch, out)?;
                way
            }
            Way::Groups(count) => {
                self.in_groups(batch, count, out)?;
                way
            }
        };
        self.pace.note(rows, way, start.elapsed());
        self.note_prompt_rows();
        Ok(())
    }

    fn most_candidates(&self) -> usize {
        self.last().lock().most_candidates()
    }

    fn read_bandwidth(&self) -> Result<Option<f64>, ExecError> {
        let (mut bytes, mut seconds) = (0.0, 0.0);
        for part in &self.parts {
            let Some(rate) = part.lock().read_bandwidth()? else { return Ok(None) };
            bytes += part.weights as f64;
            seconds += part.weights as f64 / rate;
        }
        Ok(Some(bytes / seconds))
    }

    fn export_block(&self, group: KvGroup, block: BlockId, dst: &mut [u8]) -> Result<(), ExecError> {
        blocks::check(dst.len(), self.sizes(group))?;
        let mut rest = dst;
        for (part, size) in self.parts.iter().zip(self.sizes(group)) {
            let (own, others) = rest.split_at_mut(*size);
            part.lock().export_block(group, block, own)?;
            rest = others;
        }
        Ok(())
    }

    fn clear_rows(&self, group: KvGroup, rows: usize, bytes: &mut [u8]) {
        let mut rest = bytes;
        for (part, size) in self.parts.iter().zip(self.sizes(group)) {
            let Some((own, others)) = rest.split_at_mut_checked(*size) else { return };
            part.lock().clear_rows(group, rows, own);
            rest = others;
        }
    }

    fn import_block(&mut self, group: KvGroup, block: BlockId, src: &[u8]) -> Result<(), ExecError> {
        blocks::check(src.len(), self.sizes(group))?;
        let mut rest = src;
        for (part, size) in self.parts.iter().zip(self.sizes(group)) {
            let (own, others) = rest.split_at(*size);
            part.lock().import_block(group, block, own)?;
            rest = others;
        }
        Ok(())
    }

    fn lend_block(&mut self, group: KvGroup, block: BlockId) -> Option<Box<dyn LentBlock>> {
        // Where one part does not lend, what the others have lent comes back here.
        let loans: Option<Vec<_>> =
            self.parts.iter().map(|part| part.lock().lend_block(group, block)).collect();
        Some(Box::new(SplitLoan::new(loans?)))
    }
}

#[cfg(test)]
mod tests {
    use muser_backend::KvType;

    use super::*;

    fn info(full: usize, sliding: usize, kv_room: Option<u64>) -> ExecutorInfo {
        ExecutorInfo {
            backend: "test",
            device: String::new(),
            route: String::new(),
            kv_type: KvType::Int16,
            full_block_bytes: full,
            sliding_block_bytes: sliding,
            max_rows: 1,
            vocab: 1,
            hidden: 1,
            draft: None,
            kv_room,
            prompt_rows: 0,
        }
    }

    #[test]
    fn whatever_blocks_are_taken_no_part_gets_more_than_it_has_room_for() {
        let host = info(10, 30, None);
        assert_eq!(room(&[host.clone(), host.clone()], Some(5)), None, "the engine's own budget");
        let card = info(30, 10, Some(3000));
        // Three quarters of the full blocks are the card's, three quarters of the sliding ones the host's.
        assert_eq!(room(&[host.clone(), card.clone()], None), Some(4000));
        assert_eq!(room(&[host.clone(), card.clone()], Some(600)), Some(800));
        assert_eq!(
            room(&[host, card, info(0, 0, Some(7))], Some(1 << 40)),
            Some(4000),
            "no layers, no share"
        );
    }
}
