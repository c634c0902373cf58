//! A kernel with its bindings and the shape of its grid: made once, dispatched in every step.

use std::sync::Arc;

use crate::WgpuError;
use crate::device::{Bindings, Buffer, Device, Kernel, PARAMS_BYTES, Recorder, View};
use crate::library::Library;
use crate::text::Source;

/// How long a grid is in one direction.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Axis {
    Fixed(u32),
    /// One workgroup for so many rows of the step.
    Rows(u32),
    /// As many as the row with the most partial results of attention has.
    Parts,
}

/// What the lengths of axes follow.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) rows: u32,
    pub(crate) parts: u32,
}

impl Axis {
    fn len(self, counts: Counts) -> u32 {
        match self {
            Self::Fixed(len) => len,
            Self::Rows(per) => counts.rows.div_ceil(per),
            Self::Parts => counts.parts,
        }
    }
}

/// A dispatch of every step.
pub(crate) struct Call {
    kernel: Arc<Kernel>,
    bindings: Bindings,
    grid: [Axis; 3],
}

impl Call {
    pub(crate) fn record(&self, recorder: &mut Recorder, counts: Counts) {
        recorder.dispatch(&self.kernel, &self.bindings, self.grid.map(|axis| axis.len(counts)));
    }
}

/// Parameter blocks of calls, many to a buffer.
#[derive(Default)]
pub(crate) struct Params {
    buffers: Vec<Buffer>,
    used: u64,
}

/// Bytes of a buffer of parameters.
const CHUNK: u64 = 256 * PARAMS_BYTES;

impl Params {
    /// Writes a block; which buffer, and where.
    fn place(&mut self, device: &Device, words: &[u32]) -> Result<(usize, u64), WgpuError> {
        debug_assert!(words.len() as u64 * 4 <= PARAMS_BYTES, "a block of parameters");
        if self.buffers.is_empty() || self.used == CHUNK {
            self.buffers.push(device.buffer(CHUNK, "parameters of kernels")?);
            self.used = 0;
        }
        let (index, at) = (self.buffers.len() - 1, self.used);
        device.write(&self.buffers[index], at, bytemuck::cast_slice(words))?;
        self.used += PARAMS_BYTES;
        Ok((index, at))
    }
}

/// Makes calls.
pub(crate) struct Maker<'a> {
    pub(crate) device: &'a Device,
    pub(crate) library: &'a Library,
    pub(crate) params: &'a mut Params,
}

impl Maker<'_> {
    /// A call of a kernel: `words` are its parameters after the zero that all begin with, `views` its other bindings.
    pub(crate) fn call(
        &mut self,
        source: &Source,
        words: &[u32],
        views: &[View<'_>],
        grid: [Axis; 3],
    ) -> Result<Call, WgpuError> {
        debug_assert_eq!(views.len() + 1, source.slots.len(), "bindings of {}", source.name);
        let kernel = self.library.get(self.device, source)?;
        let block: Vec<u32> = std::iter::once(0).chain(words.iter().copied()).collect();
        let (index, offset) = self.params.place(self.device, &block)?;
        let params = View { buffer: &self.params.buffers[index], offset, bytes: PARAMS_BYTES };
        let views: Vec<View<'_>> = std::iter::once(params).chain(views.iter().copied()).collect();
        let bindings = self.device.bind(&kernel, &views)?;
        Ok(Call { kernel, bindings, grid })
    }

    /// Compiles the kernels of all calls that were made.
    pub(crate) fn finish(self) -> Result<(), WgpuError> {
        self.library.compile(self.device)
    }
}
