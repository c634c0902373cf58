//! KV blocks that leave the device or come to it, in the layout of all backends, which is the one that they have there.

use std::ops::Range;

use muser_backend::ExecError;
use muser_kv::{BlockId, KvGroup};

use super::WgpuExecutor;
use crate::WgpuError;

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
        (0..self.kv_layers()).filter(move |layer| self.is_sliding(*layer) == (group == KvGroup::Sliding))
    }

    /// Zeroes rows in the bytes of a block that has left.
    pub(super) fn clear(&self, group: KvGroup, rows: Range<usize>, bytes: &mut [u8]) {
        let mut rest = bytes;
        for layer in self.layers_of(group) {
            let Some((own, others)) = rest.split_at_mut_checked(self.layer_bytes(layer)) else { return };
            let layout = self.head_layout(layer);
            own.chunks_exact_mut(layout.bytes()).for_each(|head| layout.clear(head, rows.clone()));
            rest = others;
        }
    }

    /// Which rows of a block that was copied in have the draft's context.
    pub(super) fn note_import(&mut self, group: KvGroup, block: BlockId, bytes: &[u8]) {
        let first = self.layer_count();
        let before: usize =
            self.layers_of(group).filter(|layer| *layer < first).map(|layer| self.layer_bytes(layer)).sum();
        let scales = before + self.head_layout(first).k_scales();
        if let (Some(drafter), KvGroup::Sliding) = (&mut self.drafter, group) {
            drafter.rows.note_import(block, bytes.get(scales..).unwrap_or_default());
        }
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
