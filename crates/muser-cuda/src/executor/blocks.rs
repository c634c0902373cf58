//! KV blocks that leave the card or come to it, in the layout of all backends ([`muser_backend::kv_layout`]), so that they go
//! between them.

use muser_backend::ExecError;
use muser_kv::{BLOCK_LEN, BlockId, KvGroup};

use super::CudaExecutor;
use crate::CudaError;
use crate::driver::{Launch, Stream};
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
        self.context.bind()?;
        self.transpose(memory.at(at), self.staging.at(0), dst.len(), true)?;
        self.stream.synchronize()?;
        self.staging.read(0, dst)
    }

    /// Copies a block in.
    pub(super) fn write_block(&self, group: KvGroup, at: usize, src: &[u8]) -> Result<(), CudaError> {
        let memory = &self.pool(group).memory;
        self.context.bind()?;
        self.staging.write(0, src)?;
        self.transpose(self.staging.at(0), memory.at(at), src.len(), false)?;
        self.stream.synchronize()
    }

    /// All heads of a block between the card's layout and the one of all backends.
    pub(super) fn transpose(&self, src: u64, dst: u64, bytes: usize, out: bool) -> Result<(), CudaError> {
        self.transpose_on(&self.stream, src, dst, bytes, out)
    }

    /// The same on another stream.
    pub(super) fn transpose_on(
        &self,
        stream: &Stream,
        src: u64,
        dst: u64,
        bytes: usize,
        out: bool,
    ) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(()); // a range without layers of this group
        }
        let (digits, heads) = (self.digits.count() as u32, bytes / head_layout(self.digits).bytes());
        let args = TransposeArgs { src, dst, digits, out: u32::from(out) };
        let grid = (2 * digits + 1, heads as u32);
        stream.launch(&self.rows.transpose, Launch { overlap: false, ..Launch::new(grid, 256) }, &args)
    }

    /// Zeroes the rows from `rows` on in the bytes of a block that has left.
    pub(super) fn clear(&self, rows: usize, bytes: &mut [u8]) {
        let layout = head_layout(self.digits);
        let rows = rows.min(BLOCK_LEN)..BLOCK_LEN;
        bytes.chunks_exact_mut(layout.bytes()).for_each(|head| layout.clear(head, rows.clone()));
    }
}
