//! What the kernels of a step must know besides the weights, as one array of u32 that is copied to the card in one go.
//!
//! Two of these exist: a small one whose addresses are part of the decode graphs, and one for steps of many rows. The
//! block tables come last and only the used part is copied.

use std::sync::Arc;

use muser_backend::{RowInput, SeqRows, StepBatch};
use muser_kv::{BLOCK_LEN, BlockId, KvGroup};
use muser_model::Geometry;

use crate::CudaError;
use crate::driver::{Buffer, Context, Pinned, Stream};

/// u32 values of a tile (`struct Tile` in `kernels/attention.cuh`).
const TILE_LEN: usize = 8;
/// Sequences with at most this many rows in a step are attended block by block in parallel.
const SPLIT_ROWS: u32 = 16;

/// Counts that shape the launches of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct StepShape {
    /// Rows.
    pub(crate) n: usize,
    /// Rows that want something of the top: logits, their largest, or the hidden state.
    pub(crate) top: usize,
    /// Are there tiles for the split attention kernel?
    pub(crate) split: bool,
    /// CTA rows of the many-row attention kernel.
    pub(crate) groups: usize,
    /// Does a row want its largest logits?
    pub(crate) candidates: bool,
    /// Are an attached draft's K and V computed? Else they are zeros.
    pub(crate) context: bool,
}

/// Where things lie in the array.
#[derive(Clone, Copy, Debug)]
struct Offsets {
    positions: usize,
    slots: [usize; 2],
    row_tile: usize,
    top: usize,
    candidates: usize,
    counts: usize,
    tiles: [usize; 2],
    groups: usize,
    tables: usize,
}

impl Offsets {
    fn new(rows: usize) -> Self {
        let tiles = 8 * rows + 8;
        Self {
            positions: rows,
            slots: [2 * rows, 3 * rows],
            row_tile: 4 * rows,
            top: 5 * rows,
            candidates: 6 * rows,
            // A multiple of 8, whatever the rows are.
            counts: 8 * rows,
            tiles: [tiles, tiles + TILE_LEN * rows],
            groups: tiles + 2 * TILE_LEN * rows,
            tables: tiles + 2 * TILE_LEN * rows + 2 * rows,
        }
    }
}

/// Figures of the model and the card that the attention plan depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionLimits {
    /// Query heads per KV head; at most 16, a divisor of 16.
    pub(crate) group: usize,
    pub(crate) kv_heads: usize,
    /// Warps (tiles) of a CTA of the many-row kernel.
    pub(crate) many_warps: usize,
    /// Partial results (16 query vectors x 128) that split attention may use.
    pub(crate) split_parts: usize,
}

/// The array, on both sides.
pub(crate) struct StepData {
    rows: usize,
    offsets: Offsets,
    host: Pinned<u32>,
    device: Buffer<u32>,
    used: usize,
}

impl StepData {
    pub(crate) fn new(context: &Arc<Context>, rows: usize, table_len: usize) -> Result<Self, CudaError> {
        let offsets = Offsets::new(rows);
        let len = offsets.tables + table_len;
        Ok(Self {
            rows,
            offsets,
            host: Pinned::zeroed(context, len)?,
            device: Buffer::new(context, len, "step data")?,
            used: 0,
        })
    }

    /// Table entries that fit.
    pub(crate) fn table_len(&self) -> usize {
        self.device.len() - self.offsets.tables
    }

    pub(crate) fn inputs(&self) -> u64 {
        self.device.at(0)
    }

    pub(crate) fn positions(&self) -> u64 {
        self.device.at(self.offsets.positions)
    }

    pub(crate) fn slots(&self, group: KvGroup) -> u64 {
        self.device.at(self.offsets.slots[index(group)])
    }

    pub(crate) fn row_tile(&self) -> u64 {
        self.device.at(self.offsets.row_tile)
    }

    pub(crate) fn top(&self, from: usize) -> u64 {
        self.device.at(self.offsets.top + from)
    }

    /// How many of its largest logits each top row wants.
    pub(crate) fn candidates(&self, from: usize) -> u64 {
        self.device.at(self.offsets.candidates + from)
    }

    pub(crate) fn counts(&self, group: KvGroup) -> u64 {
        self.device.at(self.offsets.counts + 2 * index(group))
    }

    pub(crate) fn tiles(&self, group: KvGroup) -> u64 {
        self.device.at(self.offsets.tiles[index(group)])
    }

    pub(crate) fn groups(&self) -> u64 {
        self.device.at(self.offsets.groups)
    }

    pub(crate) fn tables(&self) -> u64 {
        self.device.at(self.offsets.tables)
    }

    /// Writes a validated batch into the array.
    pub(crate) fn fill(
        &mut self,
        batch: &StepBatch,
        geometry: &Geometry,
        limits: AttentionLimits,
    ) -> StepShape {
        debug_assert!(batch.rows().len() <= self.rows, "the caller picks the array by the number of rows");
        let o = self.offsets;
        let data = self.host.slice_mut();
        let context = batch.wants_draft_context();
        let mut shape = StepShape { n: batch.rows().len(), context, ..StepShape::default() };
        for (i, row) in batch.rows().iter().enumerate() {
            data[i] = match row.input {
                RowInput::Token(id) => id,
                RowInput::Embedding(e) => e | 1 << 31,
            };
            if row.wants.needs_logits() || row.wants.hidden {
                data[o.top + shape.top] = i as u32;
                data[o.candidates + shape.top] = u32::from(row.wants.candidates);
                shape.candidates |= row.wants.candidates > 0;
                shape.top += 1;
            }
        }
        let mut plan = Plan { data, o, geometry, limits, tiles: 0, parts: [0; 2], table: 0, groups: 0 };
        // Split tiles come first: their partial results must be numbered without gaps.
        let split: Vec<bool> = plan.choose(batch);
        for (seq, _) in batch.seqs().iter().zip(&split).filter(|(_, s)| **s) {
            plan.sequence(batch, seq, true);
        }
        let (parts, tiles) = (plan.parts, plan.tiles);
        shape.split = tiles > 0;
        for group in [KvGroup::Full, KvGroup::Sliding] {
            let at = o.counts + 2 * index(group);
            plan.data[at] = parts[index(group)];
            plan.data[at + 1] = tiles;
        }
        for (seq, _) in batch.seqs().iter().zip(&split).filter(|(_, s)| !**s) {
            plan.sequence(batch, seq, false);
        }
        shape.groups = plan.groups;
        self.used = o.tables + plan.table as usize;
        shape
    }

    /// Table entries that a batch needs at most.
    pub(crate) fn tables_needed(batch: &StepBatch) -> usize {
        batch.seqs().iter().map(|s| batch.full_table(s).len() + batch.sliding_table(s).len()).sum()
    }

    /// Starts the copy to the card.
    pub(crate) fn upload(&self, stream: &Stream) -> Result<(), CudaError> {
        stream.upload(&self.host, 0, &self.device, 0, self.used)
    }
}

fn index(group: KvGroup) -> usize {
    match group {
        KvGroup::Full => 0,
        KvGroup::Sliding => 1,
    }
}

struct Plan<'a> {
    data: &'a mut [u32],
    o: Offsets,
    geometry: &'a Geometry,
    limits: AttentionLimits,
    tiles: u32,
    parts: [u32; 2],
    table: u32,
    groups: usize,
}

impl Plan<'_> {
    /// Which sequences go to the split kernel: those with few rows, as long as their partial results fit.
    fn choose(&self, batch: &StepBatch) -> Vec<bool> {
        let tokens = 16 / self.limits.group;
        let mut parts = 0;
        let mut choose = |seq: &SeqRows| {
            let blocks = (seq.start_pos + seq.n_rows).div_ceil(BLOCK_LEN as u32) as usize;
            let needed = (seq.n_rows as usize).div_ceil(tokens) * blocks * self.limits.kv_heads;
            let fits = seq.n_rows <= SPLIT_ROWS && parts + needed <= self.limits.split_parts;
            parts += if fits { needed } else { 0 };
            fits
        };
        batch.seqs().iter().map(&mut choose).collect()
    }

    fn sequence(&mut self, batch: &StepBatch, seq: &SeqRows, split: bool) {
        let full_first = 0;
        let full_at = self.table(batch.full_table(seq));
        let sliding_at = self.table(batch.sliding_table(seq));
        let places =
            [(KvGroup::Full, full_at, full_first), (KvGroup::Sliding, sliding_at, seq.sliding_first)];

        for i in 0..seq.n_rows {
            let (row, pos) = ((seq.first_row + i) as usize, seq.start_pos + i);
            self.data[self.o.positions + row] = pos;
            for (group, at, first) in places {
                let block = self.data[self.o.tables + (at + pos / BLOCK_LEN as u32 - first) as usize];
                self.data[self.o.slots[index(group)] + row] =
                    block * BLOCK_LEN as u32 + pos % BLOCK_LEN as u32;
            }
        }

        let tokens = (16 / self.limits.group) as u32;
        let first_tile = self.tiles;
        let mut done = 0;
        while done < seq.n_rows {
            let count = tokens.min(seq.n_rows - done);
            let (row, pos) = (seq.first_row + done, seq.start_pos + done);
            for (group, at, first) in places {
                let visible = match group {
                    KvGroup::Full => 0,
                    KvGroup::Sliding => self.geometry.first_visible(pos as usize) as u32,
                };
                let first_block = visible / BLOCK_LEN as u32;
                let blocks = (pos + count).div_ceil(BLOCK_LEN as u32) - first_block;
                let parts = if split { blocks } else { 1 };
                let part = self.parts[index(group)];
                self.parts[index(group)] += parts * self.limits.kv_heads as u32;
                let tile = [row, count, pos, at + first_block - first, first_block, blocks, part, parts];
                let place = self.o.tiles[index(group)] + self.tiles as usize * TILE_LEN;
                self.data[place..place + TILE_LEN].copy_from_slice(&tile);
            }
            for r in row..row + count {
                self.data[self.o.row_tile + r as usize] = self.tiles;
            }
            self.tiles += 1;
            done += count;
        }
        if !split {
            let mut tile = first_tile;
            while tile < self.tiles {
                let count = (self.limits.many_warps as u32).min(self.tiles - tile);
                let place = self.o.groups + 2 * self.groups;
                self.data[place] = tile;
                self.data[place + 1] = count;
                self.groups += 1;
                tile += count;
            }
        }
    }

    /// Appends a block table and returns where it begins.
    fn table(&mut self, blocks: &[BlockId]) -> u32 {
        let at = self.table;
        let place = self.o.tables + at as usize;
        for (slot, block) in self.data[place..place + blocks.len()].iter_mut().zip(blocks) {
            *slot = block.0;
        }
        self.table += blocks.len() as u32;
        at
    }
}
