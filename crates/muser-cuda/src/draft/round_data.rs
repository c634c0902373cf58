//! What the kernels of a round must know besides the weights, as one array of u32 that is copied to the card in one go.

use std::sync::Arc;

use muser_backend::{DraftBatch, DraftSeq};
use muser_kv::BLOCK_LEN;
use muser_model::DflashConfig;

use crate::CudaError;
use crate::driver::{Buffer, Context, Pinned, Stream};

/// Most rows of a round, where a block has no more: what more rows take, more rounds take as well.
pub(super) const ROUND_ROWS: usize = 32;

/// Most rows of a round.
pub(super) fn round_rows(c: &DflashConfig) -> usize {
    ROUND_ROWS.max(c.block_size)
}

/// Tokens of an attention tile.
fn tile_tokens(c: &DflashConfig) -> usize {
    16 / (c.heads / c.kv_heads)
}

/// u32 values of a tile (`struct Tile` in `kernels/attention.cuh`), and of what comes with it (`DigitArgs::ends`).
const TILE_LEN: usize = 8;
const ENDS_LEN: usize = 3;

/// Counts that shape the launches of a round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct RoundShape {
    /// Rows: anchors and proposals.
    pub(crate) rows: usize,
    /// Proposals.
    pub(crate) proposals: usize,
}

/// Where things lie in the array, for the most rows of a round.
struct Offsets {
    positions: usize,
    slots: usize,
    row_tile: usize,
    top: usize,
    counts: usize,
    tiles: usize,
    ends: usize,
    tables: usize,
    len: usize,
}

impl Offsets {
    fn new(c: &DflashConfig) -> Self {
        let rows = round_rows(c);
        let tiles = 5 * rows + 4;
        let tables = tiles + (TILE_LEN + ENDS_LEN) * rows;
        Self {
            positions: rows,
            slots: 2 * rows,
            row_tile: 3 * rows,
            top: 4 * rows,
            counts: 5 * rows,
            tiles,
            ends: tiles + TILE_LEN * rows,
            tables,
            len: tables + most_sequences(c) * most_context_blocks(c),
        }
    }
}

/// Sequences of a round: each has an anchor and a proposal at least.
pub(super) fn most_sequences(c: &DflashConfig) -> usize {
    round_rows(c) / 2
}

/// Blocks of the context that a sequence sees: a window may lie across one more than it fills.
fn most_context_blocks(c: &DflashConfig) -> usize {
    c.window.div_ceil(BLOCK_LEN) + 1
}

/// Most partial results of attention: each row might be a tile.
pub(super) fn most_parts(c: &DflashConfig) -> usize {
    let tiles = round_rows(c).div_ceil(tile_tokens(c)) + most_sequences(c);
    tiles.min(round_rows(c)) * c.kv_heads * (most_context_blocks(c) + 1)
}

/// The array, on both sides.
pub(crate) struct RoundData {
    offsets: Offsets,
    most_rows: usize,
    tile_tokens: usize,
    window: usize,
    kv_heads: usize,
    mask_token: u32,
    host: Pinned<u32>,
    device: Buffer<u32>,
    used: usize,
}

impl RoundData {
    pub(super) fn new(context: &Arc<Context>, c: &DflashConfig) -> Result<Self, CudaError> {
        let offsets = Offsets::new(c);
        Ok(Self {
            most_rows: round_rows(c),
            tile_tokens: tile_tokens(c),
            window: c.window,
            kv_heads: c.kv_heads,
            mask_token: c.mask_token,
            host: Pinned::zeroed(context, offsets.len)?,
            device: Buffer::zeroed(context, offsets.len, "round data")?,
            offsets,
            used: 0,
        })
    }

    pub(super) fn inputs(&self) -> u64 {
        self.device.at(0)
    }

    pub(super) fn positions(&self) -> u64 {
        self.device.at(self.offsets.positions)
    }

    pub(super) fn slots(&self) -> u64 {
        self.device.at(self.offsets.slots)
    }

    pub(super) fn row_tile(&self) -> u64 {
        self.device.at(self.offsets.row_tile)
    }

    pub(super) fn top(&self, from: usize) -> u64 {
        self.device.at(self.offsets.top + from)
    }

    pub(super) fn counts(&self) -> u64 {
        self.device.at(self.offsets.counts)
    }

    pub(super) fn tiles(&self) -> u64 {
        self.device.at(self.offsets.tiles)
    }

    pub(super) fn ends(&self) -> u64 {
        self.device.at(self.offsets.ends)
    }

    pub(super) fn tables(&self) -> u64 {
        self.device.at(self.offsets.tables)
    }

    pub(super) fn upload(&self, stream: &Stream) -> Result<(), CudaError> {
        stream.upload(&self.host, 0, &self.device, 0, self.used)
    }

    /// Writes as many sequences of a validated batch from `first` on as fit; returns the first that does not.
    pub(super) fn fill(&mut self, batch: &DraftBatch, first: usize) -> (RoundShape, usize) {
        let o = &self.offsets;
        let data = self.host.slice_mut();
        let mut shape = RoundShape::default();
        let (mut tiles, mut parts, mut table) = (0usize, 0u32, 0usize);
        let mut next = first;
        while let Some(seq) = batch.seqs().get(next) {
            let rows = seq.proposals as usize + 1;
            if shape.rows + rows > self.most_rows {
                break;
            }
            let slot = (next - first) as u32;
            for index in 0..rows {
                let row = shape.rows + index;
                data[row] = if index == 0 { seq.anchor } else { self.mask_token };
                data[o.positions + row] = seq.pos + index as u32;
                data[o.slots + row] = slot * BLOCK_LEN as u32 + index as u32;
                if index > 0 {
                    data[o.top + shape.proposals] = row as u32;
                    shape.proposals += 1;
                }
            }
            // The block table of what the first row sees, which is what any row sees.
            let blocks = window_blocks(seq, 0, self.window);
            for block in blocks.clone() {
                let id = batch.sliding_table(seq)[block - seq.sliding_first as usize];
                data[o.tables + table + block - blocks.start] = id.0;
            }
            for index in (0..rows).step_by(self.tile_tokens) {
                let count = self.tile_tokens.min(rows - index);
                let seen = window_blocks(seq, index, self.window);
                let of_tile = seen.len() as u32 + 1;
                let tile = [
                    (shape.rows + index) as u32,
                    count as u32,
                    seq.pos + index as u32,
                    (table + seen.start - blocks.start) as u32,
                    seen.start as u32,
                    of_tile,
                    parts,
                    of_tile,
                ];
                data[o.tiles + tiles * TILE_LEN..][..TILE_LEN].copy_from_slice(&tile);
                let ends = [seq.pos, slot, rows as u32];
                data[o.ends + tiles * ENDS_LEN..][..ENDS_LEN].copy_from_slice(&ends);
                for row in shape.rows + index..shape.rows + index + count {
                    data[o.row_tile + row] = tiles as u32;
                }
                parts += of_tile * self.kv_heads as u32;
                tiles += 1;
            }
            table += blocks.len();
            shape.rows += rows;
            next += 1;
        }
        data[o.counts] = parts;
        data[o.counts + 1] = tiles as u32;
        self.used = o.tables + table;
        (shape, next)
    }
}

/// Blocks before the anchor that row `index` of a sequence sees.
fn window_blocks(seq: &DraftSeq, index: usize, window: usize) -> std::ops::Range<usize> {
    let end = seq.pos as usize;
    let first = (end + index + 1).saturating_sub(window).min(end);
    let blocks = end.div_ceil(BLOCK_LEN);
    (first / BLOCK_LEN).min(blocks)..blocks
}
