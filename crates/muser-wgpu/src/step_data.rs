//! What kernels must know of a step besides weights, as one array of u32 that is written in one go.
//!
//! ```text
//! 0   rows of the step                       1   rows of the top in work
//! 16  a record of 16 for every row:
//!     0 token, or 2^31 + row that was put in     1 position
//!     2 place in the full blocks                 3 place in the sliding blocks (block * 256 + position in it)
//!     4 full table, 5 its first block            6 sliding table, 7 its first block
//!     8, 9 full: first partial result, how many  10, 11 sliding: the same
//!     12 end of what it sees                     13 first position it sees in sliding layers
//!     14, 15 block and rows of a draft's round
//! top rows of the step in work; block tables
//! ```

use muser_backend::{DraftBatch, RowInput, StepBatch};
use muser_kv::{BLOCK_LEN, BlockId, KvGroup};
use muser_model::{DflashConfig, Geometry};

use crate::WgpuError;
use crate::device::{Buffer, Device};

pub(crate) const ROWS_AT: u32 = 0;
pub(crate) const TOP_AT: u32 = 1;
pub(crate) const RECORDS: u32 = 16;
pub(crate) const RECORD: u32 = 16;
/// Partial results of attention beyond one a row: in steps of up to `SPLIT_ROWS` rows blocks have one each.
const MOST_SPLIT: u32 = 2048;
const SPLIT_ROWS: u32 = 64;

/// The array, on both sides.
pub(crate) struct StepData {
    pub(crate) device: Buffer,
    host: Vec<u32>,
    most_rows: usize,
    most_top: usize,
    tables: usize,
    split: u32,
    top: Vec<u32>,
}

/// Counts that shape the grids of a step.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Shape {
    pub(crate) rows: u32,
    /// Most partial results of a row, full and sliding.
    pub(crate) parts: [u32; 2],
}

/// Partial results beyond one a row that a step may have, `width` values each, where a binding has so many bytes.
pub(crate) fn most_split(rows: usize, width: usize, binding: u64) -> u32 {
    (binding / (4 * width as u64)).saturating_sub(rows as u64).min(u64::from(MOST_SPLIT)) as u32
}

impl StepData {
    pub(crate) fn new(
        device: &Device,
        rows: usize,
        top: usize,
        blocks: usize,
        split: u32,
    ) -> Result<Self, WgpuError> {
        let tables = (RECORDS + RECORD * rows as u32) as usize + top;
        // Every row might be a sequence.
        let len = tables + 2 * rows * (blocks + 2);
        Ok(Self {
            device: device.buffer(len as u64 * 4, "step data")?,
            host: vec![0; len],
            most_rows: rows,
            most_top: top,
            tables,
            split,
            top: Vec::with_capacity(rows),
        })
    }

    /// Place of the list of top rows.
    pub(crate) fn top_at(&self) -> u32 {
        RECORDS + RECORD * self.most_rows as u32
    }

    /// The rows whose top is wanted.
    pub(crate) fn top(&self) -> &[u32] {
        &self.top
    }

    /// Writes a validated batch; what is not on the device until [`Self::upload`].
    pub(crate) fn fill(
        &mut self,
        batch: &StepBatch,
        geometry: &Geometry,
    ) -> Result<(Shape, usize), WgpuError> {
        let mut shape = Shape { rows: batch.rows().len() as u32, parts: [1; 2] };
        self.host[ROWS_AT as usize] = shape.rows;
        self.top.clear();
        let (mut table, mut parts) = (self.tables, [0u32; 2]);
        // Later rows need one partial result each at least.
        let mut left = if shape.rows <= SPLIT_ROWS { self.split } else { 0 };
        for seq in batch.seqs() {
            let full_at = self.table(batch.full_table(seq), &mut table)?;
            let sliding_at = self.table(batch.sliding_table(seq), &mut table)?;
            for i in 0..seq.n_rows {
                let (row, position) = (seq.first_row + i, seq.start_pos + i);
                let wants = batch.rows()[row as usize].wants;
                if wants.needs_logits() || wants.hidden {
                    self.top.push(row);
                }
                let first = geometry.first_visible(position as usize) as u32;
                let block = position / BLOCK_LEN as u32;
                let slot = |table: &[BlockId], first: u32| {
                    table[(block - first) as usize].0 * BLOCK_LEN as u32 + position % BLOCK_LEN as u32
                };
                let blocks = [block + 1, block + 1 - first / BLOCK_LEN as u32];
                let mut split = [(0, 1); 2];
                for group in [0, 1] {
                    let count = if blocks[group] <= left { blocks[group] } else { 1 };
                    left -= count - 1;
                    split[group] = (parts[group], count);
                    parts[group] += count;
                    shape.parts[group] = shape.parts[group].max(count);
                }
                let record = [
                    match batch.rows()[row as usize].input {
                        RowInput::Token(id) => id,
                        RowInput::Embedding(index) => index | 1 << 31,
                    },
                    position,
                    slot(batch.full_table(seq), 0),
                    slot(batch.sliding_table(seq), seq.sliding_first),
                    full_at,
                    0,
                    sliding_at,
                    seq.sliding_first,
                    split[0].0,
                    split[0].1,
                    split[1].0,
                    split[1].1,
                    position + 1,
                    first,
                    0,
                    0,
                ];
                self.record(row, &record);
            }
        }
        Ok((shape, table))
    }

    /// Writes as many sequences of a validated batch from `first` on as fit: shape, end of what was filled in, the first that is left.
    /// The list of top rows is that of the proposals.
    pub(crate) fn fill_round(
        &mut self,
        batch: &DraftBatch,
        first: usize,
        c: &DflashConfig,
    ) -> Result<(Shape, usize, usize), WgpuError> {
        let mut shape = Shape { rows: 0, parts: [1; 2] };
        self.top.clear();
        let (mut table, mut parts, mut left, mut next) = (self.tables, 0, self.split, first);
        while let Some(seq) = batch.seqs().get(next) {
            let rows = seq.proposals + 1;
            if (shape.rows + rows) as usize > self.most_rows {
                break;
            }
            let table_at = self.table(batch.sliding_table(seq), &mut table)?;
            let slot = (next - first) as u32;
            for index in 0..rows {
                let row = shape.rows + index;
                let token = if index == 0 { seq.anchor } else { c.mask_token };
                // The window bounds the context; rows of the block all see each other.
                let seen = (seq.pos + index + 1).saturating_sub(c.window as u32).min(seq.pos);
                let end = seq.pos.div_ceil(BLOCK_LEN as u32);
                let blocks = end - (seen / BLOCK_LEN as u32).min(end) + 1;
                let count = if blocks <= left { blocks } else { 1 };
                left -= count - 1;
                shape.parts[1] = shape.parts[1].max(count);
                let record = [
                    token,
                    seq.pos + index,
                    slot * BLOCK_LEN as u32 + index,
                    0,
                    0,
                    0,
                    table_at,
                    seq.sliding_first,
                    0,
                    0,
                    parts,
                    count,
                    seq.pos,
                    seen,
                    slot,
                    rows,
                ];
                self.record(row, &record);
                parts += count;
                if index > 0 {
                    self.top.push(row);
                }
            }
            shape.rows += rows;
            next += 1;
        }
        self.host[ROWS_AT as usize] = shape.rows;
        Ok((shape, table, next))
    }

    fn record(&mut self, row: u32, record: &[u32; RECORD as usize]) {
        let at = (RECORDS + RECORD * row) as usize;
        self.host[at..at + record.len()].copy_from_slice(record);
    }

    fn table(&mut self, blocks: &[BlockId], at: &mut usize) -> Result<u32, WgpuError> {
        let from = *at;
        let Some(place) = self.host.get_mut(from..from + blocks.len()) else {
            return Err(WgpuError::Unsupported(
                "block tables of a step that are longer than the context".into(),
            ));
        };
        place.iter_mut().zip(blocks).for_each(|(place, block)| *place = block.0);
        *at += blocks.len();
        Ok(from as u32)
    }

    /// Sends what was filled in, up to `end`.
    pub(crate) fn upload(&self, device: &Device, rows: u32, end: usize) -> Result<(), WgpuError> {
        let records = (RECORDS + RECORD * rows) as usize;
        device.write(&self.device, 0, bytemuck::cast_slice(&self.host[..records]))?;
        device.write(&self.device, self.tables as u64 * 4, bytemuck::cast_slice(&self.host[self.tables..end]))
    }

    /// Sends the top rows `from .. from + count` of the list.
    pub(crate) fn upload_top(&self, device: &Device, from: usize, count: usize) -> Result<(), WgpuError> {
        debug_assert!(count <= self.most_top, "the caller cuts");
        device.write(&self.device, u64::from(TOP_AT) * 4, bytemuck::cast_slice(&[count as u32]))?;
        let rows = &self.top[from..from + count];
        device.write(&self.device, u64::from(self.top_at()) * 4, bytemuck::cast_slice(rows))
    }
}

/// Number of a group in arrays.
pub(crate) fn index(group: KvGroup) -> usize {
    match group {
        KvGroup::Full => 0,
        KvGroup::Sliding => 1,
    }
}
