//! What a prefix consists of: its chunks, numbered in the canonical order.
//!
//! A plan is a function of what both sides know (planes, window, cut, stages), so nobody sends it: both compute it, and what
//! is held, lacks or has come are sets of its numbers.

use std::ops::Range;

use muser_kv::{BLOCK_LEN, KvGroup};

use crate::planes::{Component, Planes};
use crate::{RangeSet, Refusal};

/// Most positions of a prefix.
pub const MAX_POSITIONS: u32 = 1 << 20;
/// Most stages.
pub const MAX_STAGES: usize = 64;

/// Where a chunk's rows belong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Place {
    /// The group of the block.
    pub group: KvGroup,
    /// The block: positions from 256 times this.
    pub block: u32,
    /// Whose layer.
    pub component: Component,
    /// The layer, counted inside group and component.
    pub layer: u16,
    /// The first of its rows in the block.
    pub first_row: u16,
    /// How many rows.
    pub rows: u16,
}

impl Place {
    /// Its rows in the block.
    pub fn row_range(&self) -> Range<usize> {
        let first = usize::from(self.first_row);
        first..first + usize::from(self.rows)
    }
}

/// What a prefix is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// Positions.
    pub cut: u32,
    /// Boundaries before the cut at which the window is wanted too, so that the prefix can be resumed there: ascending whole
    /// blocks.
    pub stages: Vec<u32>,
    /// Positions that a row of a sliding layer reads, its own included.
    pub window: u32,
}

impl Span {
    /// # Errors
    /// If a figure is one that no consumer asks for.
    pub fn check(&self) -> Result<(), Refusal> {
        if self.cut == 0 || self.cut > MAX_POSITIONS {
            return Err(Refusal::Malformed { field: "cut", found: u64::from(self.cut) });
        }
        if self.window == 0 || self.window > MAX_POSITIONS {
            return Err(Refusal::Malformed { field: "window", found: u64::from(self.window) });
        }
        let mut before = 0;
        for &stage in &self.stages {
            if stage <= before || stage >= self.cut || !(stage as usize).is_multiple_of(BLOCK_LEN) {
                return Err(Refusal::Malformed { field: "stage", found: u64::from(stage) });
            }
            before = stage;
        }
        if self.stages.len() > MAX_STAGES {
            let found = self.stages.len() as u64;
            return Err(Refusal::OverLimit { field: "stages", limit: MAX_STAGES as u64, found });
        }
        Ok(())
    }

    /// Blocks of a group that a resumption at `boundary` needs.
    fn blocks(&self, group: KvGroup, boundary: u32) -> Range<u32> {
        let end = boundary.div_ceil(BLOCK_LEN as u32);
        match group {
            KvGroup::Full => 0..end,
            KvGroup::Sliding => ((boundary + 1).saturating_sub(self.window) / BLOCK_LEN as u32).min(end)..end,
        }
    }
}

/// Blocks of one group with equally many chunks, one after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Run {
    group: KvGroup,
    blocks: Range<u32>,
    /// Positions in each.
    rows: u16,
    /// Number of the first chunk.
    first: u32,
    /// Chunks of a block.
    chunks: u32,
}

/// The chunks of a prefix, by group, block, component, layer, row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    planes: Planes,
    span: Span,
    runs: Vec<Run>,
    chunks: u32,
}

impl Plan {
    /// The plan of a prefix.
    ///
    /// # Errors
    /// If the span is none, or has more chunks than can be numbered.
    pub fn new(planes: Planes, span: Span) -> Result<Self, Refusal> {
        span.check()?;
        let mut plan = Self { planes, span, runs: Vec::new(), chunks: 0 };
        for group in [KvGroup::Full, KvGroup::Sliding] {
            let boundaries = plan.span.stages.iter().copied().chain([plan.span.cut]);
            let blocks: RangeSet = boundaries.map(|boundary| plan.span.blocks(group, boundary)).collect();
            for range in blocks.ranges() {
                plan.add(group, range.clone())?;
            }
        }
        Ok(plan)
    }

    fn add(&mut self, group: KvGroup, blocks: Range<u32>) -> Result<(), Refusal> {
        let whole_blocks = (self.span.cut as usize / BLOCK_LEN) as u32;
        let whole = blocks.start..blocks.end.min(whole_blocks);
        let tail = blocks.start.max(whole_blocks)..blocks.end;
        let tail_rows = (self.span.cut as usize % BLOCK_LEN) as u16;
        for (blocks, rows) in [(whole, BLOCK_LEN as u16), (tail, tail_rows)] {
            let chunks = chunks_of_block(&self.planes, group, rows);
            if blocks.is_empty() || chunks == 0 {
                continue;
            }
            let count = u64::from(blocks.end - blocks.start) * u64::from(chunks);
            let after = u64::from(self.chunks) + count;
            let limit = u64::from(u32::MAX / 2);
            if after > limit {
                return Err(Refusal::OverLimit { field: "chunks", limit, found: after });
            }
            self.runs.push(Run { group, blocks, rows, first: self.chunks, chunks });
            self.chunks = after as u32;
        }
        Ok(())
    }

    /// The planes that it is made of.
    pub fn planes(&self) -> &Planes {
        &self.planes
    }

    /// What it was made for.
    pub fn span(&self) -> &Span {
        &self.span
    }

    /// How many chunks.
    pub fn chunks(&self) -> u32 {
        self.chunks
    }

    /// The chunk with this number.
    pub fn place(&self, number: u32) -> Option<Place> {
        let run = self.runs.iter().rev().find(|run| run.first <= number)?;
        let block = (number - run.first) / run.chunks;
        if block >= run.blocks.end - run.blocks.start {
            return None;
        }
        let mut left = (number - run.first) % run.chunks;
        for plane in self.planes.of_group(run.group) {
            let per_layer = run.rows.div_ceil(plane.chunk_rows() as u16);
            let of_plane = u32::from(plane.layers) * u32::from(per_layer);
            if left >= of_plane {
                left -= of_plane;
                continue;
            }
            let first_row = (left % u32::from(per_layer)) as u16 * plane.chunk_rows() as u16;
            return Some(Place {
                group: run.group,
                block: run.blocks.start + block,
                component: plane.component,
                layer: (left / u32::from(per_layer)) as u16,
                first_row,
                rows: (run.rows - first_row).min(plane.chunk_rows() as u16),
            });
        }
        None
    }

    /// The number of the chunk at this place.
    ///
    /// # Errors
    /// [`Refusal::Place`] if the prefix has no such layer or block, [`Refusal::Rows`] if the rows are no chunk's.
    pub fn number(&self, place: &Place) -> Result<u32, Refusal> {
        let run = self
            .runs
            .iter()
            .find(|run| run.group == place.group && run.blocks.contains(&place.block))
            .ok_or(Refusal::Place)?;
        let mut before = run.first + (place.block - run.blocks.start) * run.chunks;
        for plane in self.planes.of_group(run.group) {
            let rows = plane.chunk_rows() as u16;
            let per_layer = u32::from(run.rows.div_ceil(rows));
            if plane.component != place.component {
                before += u32::from(plane.layers) * per_layer;
                continue;
            }
            if place.layer >= plane.layers {
                return Err(Refusal::Place);
            }
            let aligned = place.first_row.is_multiple_of(rows) && place.first_row < run.rows;
            if !aligned || place.rows != (run.rows - place.first_row).min(rows) {
                return Err(Refusal::Rows);
            }
            return Ok(before + u32::from(place.layer) * per_layer + u32::from(place.first_row / rows));
        }
        Err(Refusal::Place)
    }

    /// Bytes of the rows of a chunk of this plan.
    pub fn payload_bytes(&self, place: &Place) -> usize {
        let plane = self.planes.plane(place.group, place.component);
        plane.map_or(0, |plane| usize::from(place.rows) * plane.row_bytes())
    }

    /// Bytes of all these chunks.
    pub fn bytes_of(&self, chunks: &RangeSet) -> u64 {
        chunks
            .iter()
            .filter_map(|number| self.place(number))
            .map(|place| self.payload_bytes(&place) as u64)
            .sum()
    }

    /// Chunks of a block, all layers; none if the prefix does not need the block.
    pub fn block(&self, group: KvGroup, block: u32) -> Range<u32> {
        let run = self.runs.iter().find(|run| run.group == group && run.blocks.contains(&block));
        run.map_or(0..0, |run| {
            let first = run.first + (block - run.blocks.start) * run.chunks;
            first..first + run.chunks
        })
    }

    /// Chunks of one layer of a block; none if the prefix does not need it.
    pub fn layer_chunks(&self, group: KvGroup, block: u32, component: Component, layer: u16) -> Range<u32> {
        let rows = self.block_rows(group, block) as u16;
        let Some(chunk_rows) = self.planes.plane(group, component).map(|plane| plane.chunk_rows() as u16)
        else {
            return 0..0;
        };
        let place = Place { group, block, component, layer, first_row: 0, rows: rows.min(chunk_rows) };
        self.number(&place).map_or(0..0, |first| first..first + u32::from(rows.div_ceil(chunk_rows)))
    }

    /// Positions of a block that belong to the prefix; 0 if it does not need the block.
    pub fn block_rows(&self, group: KvGroup, block: u32) -> usize {
        let run = self.runs.iter().find(|run| run.group == group && run.blocks.contains(&block));
        run.map_or(0, |run| usize::from(run.rows))
    }

    /// Blocks that the prefix needs, in the canonical order.
    pub fn blocks(&self) -> impl Iterator<Item = (KvGroup, u32)> + '_ {
        self.runs.iter().flat_map(|run| run.blocks.clone().map(|block| (run.group, block)))
    }

    /// Chunks without which the prefix cannot be resumed at `boundary`, a stage or the cut. Those of the cut are not all: windows
    /// of earlier stages are not among them.
    pub fn needed_at(&self, boundary: u32) -> RangeSet {
        let mut needed = RangeSet::default();
        for run in &self.runs {
            let wanted = self.span.blocks(run.group, boundary);
            let (start, end) = (wanted.start.max(run.blocks.start), wanted.end.min(run.blocks.end));
            if start < end {
                let first = |block: u32| run.first + (block - run.blocks.start) * run.chunks;
                needed.insert(first(start)..first(end));
            }
        }
        needed
    }

    /// Chunks of a transfer that gives these stages, and the cut.
    pub fn needed_for(&self, stages: &[u32]) -> RangeSet {
        let at = |set: RangeSet, &boundary: &u32| set.union(&self.needed_at(boundary));
        stages.iter().fold(self.needed_at(self.span.cut), at)
    }
}

fn chunks_of_block(planes: &Planes, group: KvGroup, rows: u16) -> u32 {
    let of =
        |plane: &crate::Plane| u32::from(plane.layers) * u32::from(rows.div_ceil(plane.chunk_rows() as u16));
    planes.of_group(group).map(of).sum()
}
