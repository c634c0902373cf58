//! An executor of one's own, as small as one can be: what a backend has to do, without a model.
//!
//! Its "model" looks at all tokens before a place through the block tables, as attention does, and expects their sum plus one. So
//! it keeps something of every row in the KV blocks, reads it where the tables say, and moves blocks as bytes; the contract's
//! conformance suite and the engine do the rest.
//!
//! ```text
//! cargo run -p muser-engine --example executor
//! ```

use std::error::Error;

use muser_backend::{
    ExecError, Executor, ExecutorInfo, KvCapacity, KvType, LentBlock, RowInput, SeqRows, StepBatch,
    StepOutput, conformance, no_drafts, no_tower,
};
use muser_engine::{Engine, EngineConfig, Event, Request, SamplingParams};
use muser_kv::{BLOCK_LEN, BlockId, KvGroup};
use muser_model::Geometry;

/// Tokens that it knows.
const VOCAB: usize = 100;

struct Summing {
    info: ExecutorInfo,
    geometry: Geometry,
    capacity: KvCapacity,
    /// Of each block of the full group, the token of each position. Its sliding group has blocks and keeps nothing in them.
    blocks: Vec<[u8; BLOCK_LEN]>,
}

impl Summing {
    fn new(geometry: Geometry) -> Self {
        let info = ExecutorInfo {
            backend: "summing",
            device: "none".into(),
            // Whoever has the same route may read its blocks: say everything here that their bytes depend on.
            route: "summing-1".into(),
            kv_type: KvType::F32,
            full_block_bytes: BLOCK_LEN,
            sliding_block_bytes: 0,
            max_rows: 64,
            vocab: VOCAB,
            hidden: geometry.hidden,
            draft: None,
            kv_room: None,
            prompt_rows: 0,
        };
        Self { info, geometry, capacity: KvCapacity { full: 0, sliding: 0 }, blocks: Vec::new() }
    }

    /// Keeps a row where its sequence's table says, and sums what stands before it.
    fn row(&mut self, table: &[BlockId], position: usize, token: u8) -> usize {
        let at = |position: usize| (table[position / BLOCK_LEN].0 as usize, position % BLOCK_LEN);
        let (block, row) = at(position);
        self.blocks[block][row] = token;
        let tokens = (0..=position).map(at).map(|(block, row)| usize::from(self.blocks[block][row]));
        (tokens.sum::<usize>() + 1) % VOCAB
    }

    fn sequence(&mut self, batch: &StepBatch, seq: &SeqRows, out: &mut StepOutput) -> Result<(), ExecError> {
        let rows = &batch.rows()[seq.first_row as usize..][..seq.n_rows as usize];
        for (i, row) in rows.iter().enumerate() {
            let RowInput::Token(token) = row.input else {
                let what = "rows of images".into();
                return Err(ExecError::Unsupported { backend: self.info.backend, what });
            };
            let expected = self.row(batch.full_table(seq), seq.start_pos as usize + i, token as u8);
            if row.wants.needs_logits() {
                out.logits.extend((0..VOCAB).map(|id| if id == expected { 1.0 } else { 0.0 }));
            }
            if row.wants.hidden {
                out.hidden.extend(std::iter::repeat_n(expected as f32, self.info.hidden));
            }
        }
        Ok(())
    }
}

impl Executor for Summing {
    fn info(&self) -> &ExecutorInfo {
        &self.info
    }

    fn allocate_kv(&mut self, capacity: KvCapacity) -> Result<(), ExecError> {
        self.capacity = capacity;
        self.blocks = vec![[0; BLOCK_LEN]; capacity.full as usize];
        Ok(())
    }

    fn step(&mut self, batch: &StepBatch, out: &mut StepOutput) -> Result<(), ExecError> {
        batch.validate(&self.geometry, self.capacity, self.info.max_rows)?;
        out.logits.clear();
        out.hidden.clear();
        for seq in batch.seqs() {
            self.sequence(batch, seq, out)?;
        }
        // Rows that want the largest logit alone get it from those that were made for them.
        out.reduce_to_argmax(batch, VOCAB);
        Ok(())
    }

    fn most_candidates(&self) -> usize {
        0
    }

    fn read_bandwidth(&self) -> Result<Option<f64>, ExecError> {
        Ok(None)
    }

    fn export_block(&self, group: KvGroup, block: BlockId, dst: &mut [u8]) -> Result<(), ExecError> {
        if group == KvGroup::Full {
            dst.copy_from_slice(&self.blocks[block.0 as usize]);
        }
        Ok(())
    }

    fn clear_rows(&self, _: KvGroup, rows: usize, bytes: &mut [u8]) {
        bytes.iter_mut().skip(rows).for_each(|byte| *byte = 0);
    }

    fn import_block(&mut self, group: KvGroup, block: BlockId, src: &[u8]) -> Result<(), ExecError> {
        if group == KvGroup::Full {
            self.blocks[block.0 as usize].copy_from_slice(src);
        }
        Ok(())
    }

    fn lend_block(&mut self, _: KvGroup, _: BlockId) -> Option<Box<dyn LentBlock>> {
        // Blocks come in through `import_block`.
        None
    }
}

no_drafts!(Summing);
no_tower!(Summing);

#[expect(clippy::print_stdout, reason = "it is the result")]
fn main() -> Result<(), Box<dyn Error>> {
    let geometry = Geometry {
        hidden: 2,
        ffn: 1,
        heads: 1,
        kv_heads: 1,
        head_dim: 2,
        vocab: VOCAB,
        context: 2048,
        window: 256,
        sliding: vec![true, false],
        rope_theta: 1.0,
        rms_eps: 1.0,
        post_norm_eps: 1.0,
        logit_scale: 1.0,
        softcap: None,
    };
    // The contract: alone or with others, in whatever pieces, the same bits; blocks that moved go on the same.
    let make = || -> Box<dyn Executor> { Box::new(Summing::new(geometry.clone())) };
    conformance::row_invariance(make, &geometry, 1, 3, 600);
    conformance::import_continues(make, &geometry, 2, 300, 40);

    let engine = Engine::spawn(make(), geometry.clone(), EngineConfig::default())?;
    let request = Request {
        max_tokens: Some(8),
        sampling: SamplingParams::greedy(),
        ..Request::new(vec![1, 2], Vec::new())
    };
    let mut submission = engine.submit(request)?;
    let mut tokens = Vec::new();
    while let Some(event) = submission.recv() {
        if let Event::Token(token) = event {
            tokens.push(token.id);
        }
    }
    println!("{tokens:?}");
    // 1 + 2 + 1, and then twice as much each time.
    assert_eq!(tokens, [4, 8, 16, 32, 64, 28, 56, 12]);
    Ok(())
}
