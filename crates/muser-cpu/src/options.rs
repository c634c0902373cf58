//! What the caller of the executor decides.

use muser_backend::KvType;

use crate::isa::Isa;

/// Whether weights are copied into the layout that kernels read fastest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Repack {
    /// If the copy fits into the memory that is free, with a margin.
    #[default]
    Auto,
    /// Always; an error when there is not enough memory.
    On,
    /// Never: weights stay in the file map.
    Off,
}

/// Options of [`crate::CpuExecutor::new`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuOptions {
    /// Threads; `None` for one per core that the process may use.
    pub threads: Option<usize>,
    /// Copying of weights.
    pub repack: Repack,
    /// Instruction set; `None` for the environment's choice ([`crate::ISA_VARIABLE`]) or the best that is there.
    pub isa: Option<Isa>,
    /// Most rows of a step.
    pub max_rows: usize,
    /// Type of K and V: 16 or 8 bits in digits ([`muser_backend::arith::attention`]), or f16 for comparisons.
    pub kv: KvType,
}

impl Default for CpuOptions {
    fn default() -> Self {
        Self { threads: None, repack: Repack::Auto, isa: None, max_rows: 512, kv: KvType::Int16 }
    }
}
