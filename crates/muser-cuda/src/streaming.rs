//! Room on a card for layers that are on their way: two slots for tiles, two for K and V, the uploader, and marks between streams.

use std::sync::Arc;

use muser_backend::{ExecError, HostLayers, LayerRange, StreamedStep};
use muser_kv::KvGroup;

use crate::CudaError;
use crate::driver::{Buffer, Context, Event, Pinned};
use crate::forward::KvPool;
use crate::uploader::{Repack, Uploader};
use crate::weights::LayerOnDevice;

/// Matrices of a layer.
pub(crate) const MATRICES: usize = 8;

/// Room for layers on their way.
pub(crate) struct Streaming {
    pub(crate) range: LayerRange,
    /// Placed in the slots, which take turns.
    pub(crate) layers: Vec<LayerOnDevice>,
    /// The layers name addresses in it.
    pub(crate) _norms: Buffer<f32>,
    pub(crate) tiles: [Buffer<u8>; 2],
    pub(crate) pools: [KvPool; 2],
    pub(crate) uploader: Uploader,
    pub(crate) repack: Repack,
    /// By slot: what it holds has arrived (by the uploader's streams), and is no longer needed.
    pub(crate) ready: [[Event; 2]; 2],
    pub(crate) done: [Event; 2],
    /// By layer and matrix: numbers that no tile holds. Looked at after the first step.
    pub(crate) unfit: Buffer<u32>,
    pub(crate) is_checked: bool,
    /// Blocks of a layer on their way back, and those of all layers on the host.
    pub(crate) leaving: Buffer<u8>,
    pub(crate) left: Pinned<u8>,
    pub(crate) step: StreamedStep,
}

impl Streaming {
    /// Do the blocks of the step fit?
    pub(crate) fn has_room(&self) -> bool {
        [KvGroup::Full, KvGroup::Sliding].into_iter().all(|group| {
            let bytes = self.step.written(group).len() as u64 * self.pools[0].block_bytes;
            self.step.blocks(group).len() <= self.pools[0].blocks as usize
                && bytes <= self.leaving.len() as u64
        })
    }

    /// Bytes of blocks that a step brings back.
    fn bytes_back(&self, bytes: usize, sliding: &[bool]) -> usize {
        let written = |index: usize| self.step.written(group_of(sliding[index])).len();
        self.range.layers().map(written).sum::<usize>() * bytes
    }

    pub(crate) fn make_room_on_host(
        &mut self,
        context: &Arc<Context>,
        bytes: usize,
        sliding: &[bool],
    ) -> Result<(), CudaError> {
        let needed = self.bytes_back(bytes, sliding);
        if self.left.slice().len() < needed {
            self.left = Pinned::zeroed(context, needed.next_power_of_two())?;
        }
        Ok(())
    }

    /// Hands the blocks that were written to their owner.
    pub(crate) fn give_back(
        &self,
        home: &mut dyn HostLayers,
        bytes: usize,
        sliding: &[bool],
    ) -> Result<(), ExecError> {
        let mut left = self.left.slice().chunks_exact(bytes);
        for index in self.range.layers() {
            let group = group_of(sliding[index]);
            for number in self.step.written(group) {
                let Some(from) = left.next() else { break };
                let to = home.kv_of_mut(index, self.step.blocks(group)[*number])?;
                to.copy_from_slice(from);
            }
        }
        Ok(())
    }
}

/// The group of a layer.
pub(crate) fn group_of(sliding: bool) -> KvGroup {
    if sliding { KvGroup::Sliding } else { KvGroup::Full }
}
