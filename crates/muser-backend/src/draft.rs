//! What a draft model is asked: for each sequence an anchor token and how many proposals.

use muser_gguf::GgmlType;
use muser_kv::{BLOCK_LEN, BlockId};
use muser_model::{Draft, Model};

use crate::route::NVFP4_REVISION;
use crate::{ExecError, KvCapacity};

/// What a draft model attached to an executor can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftInfo {
    /// Most proposals a sequence gets in one [`crate::DraftExecutor::draft`].
    pub max_proposals: usize,
    /// Positions back from the anchor that the draft looks at: sliding blocks must reach at least this far.
    pub window: usize,
}

/// One sequence to draft for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftSeq {
    /// The token sampled last, which the target has not processed yet.
    pub anchor: u32,
    /// Its position; KV exists for all positions before it.
    pub pos: u32,
    /// Proposals wanted, from 1.
    pub proposals: u32,
    /// Absolute block index of the first entry of the sliding table.
    pub sliding_first: u32,
    sliding: (u32, u32),
}

/// A draft of several sequences at once. Reused from round to round.
#[derive(Clone, Debug, Default)]
pub struct DraftBatch {
    seqs: Vec<DraftSeq>,
    sliding_blocks: Vec<BlockId>,
}

impl DraftBatch {
    /// Empties the batch and keeps its memory.
    pub fn clear(&mut self) {
        self.seqs.clear();
        self.sliding_blocks.clear();
    }

    /// Adds a sequence. `sliding[i]` holds the positions of block `sliding_first + i`; the table reaches from the
    /// draft's window before `pos` to position `pos - 1`.
    pub fn push(&mut self, anchor: u32, pos: u32, proposals: u32, sliding_first: u32, sliding: &[BlockId]) {
        let at = self.sliding_blocks.len() as u32;
        self.sliding_blocks.extend_from_slice(sliding);
        self.seqs.push(DraftSeq {
            anchor,
            pos,
            proposals,
            sliding_first,
            sliding: (at, sliding.len() as u32),
        });
    }

    /// The sequences.
    pub fn seqs(&self) -> &[DraftSeq] {
        &self.seqs
    }

    /// Block table of `seq`, from block [`DraftSeq::sliding_first`].
    pub fn sliding_table(&self, seq: &DraftSeq) -> &[BlockId] {
        &self.sliding_blocks[seq.sliding.0 as usize..][..seq.sliding.1 as usize]
    }

    /// Proposals wanted of all sequences together: the rows of the result.
    pub fn proposals(&self) -> usize {
        self.seqs.iter().map(|seq| seq.proposals as usize).sum()
    }

    /// Checks every index an executor is going to follow.
    pub fn validate(&self, draft: DraftInfo, vocab: usize, capacity: KvCapacity) -> Result<(), ExecError> {
        let bad = |what: String| Err(ExecError::InvalidBatch(what));
        for (i, seq) in self.seqs.iter().enumerate() {
            if seq.proposals == 0 || seq.proposals as usize > draft.max_proposals {
                let most = draft.max_proposals;
                return bad(format!("draft {i}: {} proposals, expected 1 to {most}", seq.proposals));
            }
            if seq.anchor as usize >= vocab {
                return bad(format!("draft {i}: anchor {}, vocabulary is {vocab}", seq.anchor));
            }
            let pos = seq.pos as usize;
            let (first, end) = (pos.saturating_sub(draft.window - 1) / BLOCK_LEN, pos.div_ceil(BLOCK_LEN));
            let (table, table_first) = (self.sliding_table(seq), seq.sliding_first as usize);
            if pos > 0 && (table_first > first || table_first + table.len() < end) {
                return bad(format!(
                    "draft {i}: sliding table covers blocks {table_first}..{}, needs {first}..{end}",
                    table_first + table.len()
                ));
            }
            if table.iter().any(|block| block.0 >= capacity.sliding) {
                return bad(format!("draft {i}: a block id is beyond the allocated blocks"));
            }
        }
        Ok(())
    }
}

/// What every executor asks of a draft before it takes it in: it fits the target, and all of its layers have a window (its
/// K and V live in sliding blocks).
pub fn check_draft(draft: &Draft, target: &Model, backend: &'static str) -> Result<(), ExecError> {
    let unsupported = |what: String| Err(ExecError::Unsupported { backend, what });
    if let Err(misfit) = draft.check_target(target) {
        return unsupported(format!("the draft does not fit the model: {misfit}"));
    }
    if draft.config.sliding.contains(&false) {
        return unsupported("a draft with a layer that has no window".into());
    }
    Ok(())
}

/// A short name of a draft for numeric routes: blocks that hold the context of one draft must not be taken for those of
/// another. Covers shape, norms, and the ends of every matrix; what it misses costs acceptance and never a token.
pub fn draft_mark(draft: &Draft) -> String {
    const END_BYTES: usize = 4096;
    let mut hasher = blake3::Hasher::new();
    hasher.update(format!("{:?}", draft.config).as_bytes());
    let mut vector = |values: &[f32]| {
        values.iter().for_each(|value| {
            hasher.update(&value.to_le_bytes());
        });
    };
    vector(&draft.enc_output_norm);
    vector(&draft.output_norm);
    for l in &draft.layers {
        [&l.attn_norm, &l.attn_q_norm, &l.attn_k_norm, &l.ffn_norm].into_iter().for_each(|norm| vector(norm));
    }
    if draft.matrices().any(|matrix| matrix.ty == GgmlType::NVFP4) {
        // The revision of that arithmetic, which files without such matrices do not depend on.
        hasher.update(NVFP4_REVISION.as_bytes());
    }
    for matrix in draft.matrices() {
        let bytes = matrix.bytes();
        hasher.update(format!("{} {:?} {} {}", matrix.name, matrix.ty, matrix.rows, matrix.cols).as_bytes());
        hasher.update(&matrix.scale.to_le_bytes());
        hasher.update(&bytes[..bytes.len().min(END_BYTES)]);
        hasher.update(&bytes[bytes.len().saturating_sub(END_BYTES)..]);
    }
    hasher.finalize().to_hex()[..16].to_owned()
}
