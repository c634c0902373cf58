//! Weights on their way: file map -> pinned staging -> device -> tiles.
//!
//! Two staging slots on two streams: while one is repacked, the other is filled by several threads from the map, so that the page
//! cache or the disk sets the pace.

use std::ops::Range;
use std::sync::Arc;

use muser_gguf::GgmlType;
use muser_model::Matrix;

use crate::CudaError;
use crate::driver::{Buffer, Context, Event, Function, Launch, Pinned, Settle, Stream};
use crate::kernels::RepackArgs;
use crate::matrix::Tile;

/// The kernels that make tiles, by [`Tile`].
pub(crate) type Repack = [Function; 5];

/// A matrix and where it goes: as tiles, or as it is in the file.
pub(crate) struct Job<'a> {
    pub(crate) matrix: &'a Matrix,
    pub(crate) tile: Option<Tile>,
    pub(crate) at: usize,
}

/// A staging slot.
pub(crate) struct Slot {
    pub(crate) stream: Stream,
    pub(crate) pinned: Pinned<u8>,
    pub(crate) raw: Buffer<u8>,
}

/// The slots, which take turns.
pub(crate) struct Uploader {
    slots: [Slot; 2],
    turn: usize,
    slot_bytes: usize,
}

impl Uploader {
    pub(crate) fn new(context: &Arc<Context>, slot_bytes: usize) -> Result<Self, CudaError> {
        let slot = || -> Result<Slot, CudaError> {
            Ok(Slot {
                stream: Stream::new(context)?,
                pinned: Pinned::zeroed(context, slot_bytes)?,
                raw: Buffer::new(context, slot_bytes, "weight staging")?,
            })
        };
        Ok(Self { slots: [slot()?, slot()?], turn: 0, slot_bytes })
    }

    /// Bytes of a slot.
    pub(crate) fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// The next slot, once what it held has left it.
    pub(crate) fn next_slot(&mut self) -> Result<&mut Slot, CudaError> {
        self.turn += 1;
        let slot = &mut self.slots[self.turn % 2];
        slot.stream.synchronize()?;
        Ok(slot)
    }

    /// Starts copying a matrix to its place behind `tiles` and repacking it; what does not fit is counted at the address `unfit`.
    pub(crate) fn matrix(
        &mut self,
        job: &Job<'_>,
        tiles: &Buffer<u8>,
        repack: &Repack,
        unfit: u64,
    ) -> Result<(), CudaError> {
        let bytes = job.matrix.bytes();
        let (row_bytes, kb) = (job.matrix.row_bytes(), job.matrix.cols / 256);
        let rows_per_chunk = self.slot_bytes / row_bytes / 16 * 16;
        let mut first = 0;
        while first < job.matrix.rows {
            let rows = rows_per_chunk.min(job.matrix.rows - first);
            let chunk = &bytes[first * row_bytes..][..rows * row_bytes];
            check_scales(job.matrix, first..first + rows)?;
            let slot = self.next_slot()?;
            copy_in_parallel(chunk, slot.pinned.slice_mut());
            first += rows;
            let Some(tile) = job.tile else {
                let to = job.at + (first - rows) * row_bytes;
                slot.stream.upload(&slot.pinned, 0, tiles, to, chunk.len())?;
                continue;
            };
            slot.stream.upload(&slot.pinned, 0, &slot.raw, 0, chunk.len())?;
            let words = (rows.div_ceil(16) * kb * tile.bytes() / 4) as u64;
            let args = RepackArgs {
                src: slot.raw.at(0),
                dst: tiles.at(job.at + (first - rows) / 16 * kb * tile.bytes()),
                words,
                rows: rows as u32,
                kb: kb as u32,
                type_id: job.matrix.ty.id(),
                _padding: 0,
                unfit,
            };
            let shape = Launch { overlap: false, ..Launch::new((words.div_ceil(256) as u32, 1), 256) };
            slot.stream.launch(&repack[tile as usize], shape, &args)?;
        }
        Ok(())
    }

    /// Starts copying bytes as they are.
    pub(crate) fn bytes(&mut self, bytes: &[u8], to: &Buffer<u8>, at: usize) -> Result<(), CudaError> {
        for (i, chunk) in bytes.chunks(self.slot_bytes).enumerate() {
            let piece = at + i * self.slot_bytes;
            let slot = self.next_slot()?;
            copy_in_parallel(chunk, slot.pinned.slice_mut());
            slot.stream.upload(&slot.pinned, 0, to, piece, chunk.len())?;
        }
        Ok(())
    }

    /// Waits for all that was started.
    pub(crate) fn synchronize(&self) -> Result<(), CudaError> {
        self.slots.iter().try_for_each(|slot| slot.stream.synchronize())
    }

    /// Waits for it when it is dropped.
    pub(crate) fn settle_at_end(&self) -> [Settle; 2] {
        let [a, b] = &self.slots;
        [a.stream.settle_at_end(), b.stream.settle_at_end()]
    }

    /// What is started from now on begins behind a mark.
    pub(crate) fn wait_for(&self, event: &Event) -> Result<(), CudaError> {
        self.slots.iter().try_for_each(|slot| slot.stream.wait_for(event))
    }

    /// Marks what was started, by slot.
    pub(crate) fn mark(&self, events: &[Event; 2]) -> Result<(), CudaError> {
        self.slots.iter().zip(events).try_for_each(|(slot, event)| slot.stream.mark(event))
    }
}

/// [`Matrix::check_scales`] by several threads, like the copy that follows it.
fn check_scales(matrix: &Matrix, rows: Range<usize>) -> Result<(), CudaError> {
    if !matches!(matrix.ty, GgmlType::NVFP4 | GgmlType::MXFP4) {
        return Ok(());
    }
    let share = rows.len().div_ceil(copy_threads()).max(1);
    let checked = std::thread::scope(|scope| {
        let parts = rows.clone().step_by(share).map(|from| from..(from + share).min(rows.end));
        let threads: Vec<_> = parts.map(|part| scope.spawn(|| matrix.check_scales(part))).collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    });
    checked.map_err(|error| CudaError::Unsupported(error.to_string()))
}

fn copy_threads() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(8)
}

/// One thread cannot read a map at the speed of the bus (page faults), so several do.
pub(crate) fn copy_in_parallel<T: Copy + Send + Sync>(from: &[T], to: &mut [T]) {
    let threads = copy_threads();
    let share = from.len().div_ceil(threads).max((1 << 20) / size_of::<T>());
    if from.len() <= share {
        to[..from.len()].copy_from_slice(from);
        return;
    }
    std::thread::scope(|scope| {
        for (source, target) in from.chunks(share).zip(to.chunks_mut(share)) {
            scope.spawn(|| target[..source.len()].copy_from_slice(source));
        }
    });
}

/// The same of many pieces.
pub(crate) fn copy_pieces(pieces: Vec<(&[u8], &mut [u8])>) {
    let bytes: usize = pieces.iter().map(|(from, _)| from.len()).sum();
    let share = pieces.len().div_ceil(if bytes > 4 << 20 { copy_threads() } else { 1 }).max(1);
    let mut pieces = pieces.into_iter();
    std::thread::scope(|scope| {
        loop {
            let some: Vec<_> = pieces.by_ref().take(share).collect();
            let copy = move || some.into_iter().for_each(|(from, to)| to.copy_from_slice(from));
            if pieces.len() == 0 {
                return copy();
            }
            scope.spawn(copy);
        }
    });
}
