//! KV blocks that leave the device or come to it, in the layout of all backends, which is the one that they have there.

use muser_backend::ExecError;
use muser_kv::{BlockId, KvGroup};

use super::WgpuExecutor;
use crate::WgpuError;
use crate::step_data::index;

impl WgpuExecutor {
    pub(super) fn check_block(&self, group: KvGroup, block: BlockId, len: usize) -> Result<(), ExecError> {
        let blocks = match group {
            KvGroup::Full => self.capacity.full,
            KvGroup::Sliding => self.capacity.sliding,
        };
        let bytes = self.info.block_bytes(group);
        if block.0 >= blocks || len != bytes {
            let what = format!("block {} of {blocks}, {len} bytes where a block has {bytes}", block.0);
            return Err(ExecError::InvalidBatch(what));
        }
        Ok(())
    }

    /// Layers of a group, in the order of a block's bytes.
    fn layers_of(&self, group: KvGroup) -> impl Iterator<Item = usize> {
        let sliding = &self.model.geometry.sliding;
        (0..self.kv.len())
            .filter(move |layer| sliding.get(*layer).is_none_or(|s| usize::from(*s) == index(group)))
    }

    /// Copies a block out.
    pub(super) fn read_block(&self, group: KvGroup, block: BlockId, dst: &mut [u8]) -> Result<(), WgpuError> {
        let staging = self.gpu.device.staging(dst.len() as u64)?;
        let mut recorder = self.gpu.device.recorder();
        let mut at = 0;
        for layer in self.layers_of(group) {
            let bytes = self.layer_bytes(layer) as u64;
            recorder.copy(&self.kv[layer], u64::from(block.0) * bytes, &staging, at, bytes);
            at += bytes;
        }
        self.gpu.device.submit(recorder)?;
        self.gpu.device.fetch(&staging, |data| dst.copy_from_slice(&data[..dst.len()]))
    }

    /// Copies a block in.
    pub(super) fn write_block(&self, group: KvGroup, block: BlockId, src: &[u8]) -> Result<(), WgpuError> {
        let mut rest = src;
        for layer in self.layers_of(group) {
            let bytes = self.layer_bytes(layer);
            let Some((own, others)) = rest.split_at_checked(bytes) else { break };
            self.gpu.device.write(&self.kv[layer], u64::from(block.0) * bytes as u64, own)?;
            rest = others;
        }
        self.gpu.device.submit(self.gpu.device.recorder())
    }
}
