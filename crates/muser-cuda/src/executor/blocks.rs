//! KV blocks that leave the card or come to it. In f16 the card's layout is what leaves; in digits it is that of all backends
//! ([`muser_backend::kv_layout`]), so that blocks go between them.

use muser_backend::ExecError;
use muser_backend::arith::attention::Digits;
use muser_kv::{BLOCK_LEN, BlockId, KvGroup};

use super::CudaExecutor;
use crate::CudaError;
use crate::block_rows;
use crate::draft::Drafter;
use crate::driver::Launch;
use crate::forward::head_layout;
use crate::kernels::TransposeArgs;

impl CudaExecutor {
    /// Byte offset of a block in its pool, checked.
    pub(super) fn place(&self, group: KvGroup, block: BlockId, len: usize) -> Result<usize, ExecError> {
        let (bytes, blocks) = (self.info.block_bytes(group), self.pool(group).blocks);
        if block.0 >= blocks || len != bytes {
            return Err(ExecError::InvalidBatch(format!(
                "block {} of {blocks}, {len} bytes where a block has {bytes}",
                block.0
            )));
        }
        Ok(block.0 as usize * bytes)
    }

    /// Copies a block out, in the layout that leaves the card.
    pub(super) fn read_block(&self, group: KvGroup, at: usize, dst: &mut [u8]) -> Result<(), CudaError> {
        let memory = &self.pool(group).memory;
        let Some(digits) = self.options.kv.digits() else { return memory.read(at, dst) };
        self.context.bind()?;
        self.transpose(digits, memory.at(at), self.staging.at(0), dst.len(), true)?;
        self.stream.synchronize()?;
        self.staging.read(0, dst)
    }

    /// Copies a block in.
    pub(super) fn write_block(&self, group: KvGroup, at: usize, src: &[u8]) -> Result<(), CudaError> {
        let memory = &self.pool(group).memory;
        let Some(digits) = self.options.kv.digits() else { return memory.write(at, src) };
        self.context.bind()?;
        self.staging.write(0, src)?;
        self.transpose(digits, self.staging.at(0), memory.at(at), src.len(), false)?;
        self.stream.synchronize()
    }

    /// All heads of a block between the card's layout and the one of all backends.
    fn transpose(
        &self,
        digits: Digits,
        src: u64,
        dst: u64,
        bytes: usize,
        out: bool,
    ) -> Result<(), CudaError> {
        let heads = bytes / head_layout(digits).bytes();
        let args = TransposeArgs { src, dst, digits: digits.count() as u32, out: u32::from(out) };
        let grid = (2 * digits.count() as u32 + 1, heads as u32);
        self.stream.launch(&self.rows.transpose, Launch { overlap: false, ..Launch::new(grid, 256) }, &args)
    }

    /// Zeroes the rows from `rows` on in the bytes of a block that has left.
    pub(super) fn clear(&self, group: KvGroup, rows: usize, bytes: &mut [u8]) {
        let of_group =
            self.geometry.sliding.iter().filter(|sliding| **sliding == (group == KvGroup::Sliding));
        let own = of_group.map(|_| self.geometry.kv_heads);
        let draft = self.drafter.iter().filter(|_| group == KvGroup::Sliding).flat_map(Drafter::kv_heads);
        match self.options.kv.digits() {
            None => block_rows::clear(bytes, rows, own.chain(draft)),
            Some(digits) => {
                let layout = head_layout(digits);
                let rows = rows.min(BLOCK_LEN)..BLOCK_LEN;
                bytes.chunks_exact_mut(layout.bytes()).for_each(|head| layout.clear(head, rows.clone()));
            }
        }
    }
}
