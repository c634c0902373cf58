//! A scripted executor and a simulated clock: what the engine is tested with.
//!
//! The executor's KV rows are 64-bit hashes and attention is their sum over the visible positions, read through the block
//! tables, for one sliding layer below one full layer. So a wrong block, a stale row, a wrong position or a wrong window
//! changes every logit that follows. [`Oracle`] computes the same model without blocks, batches or an engine.
//!
//! Its draft is the sliding layer alone, whose share in the logits is the larger one: proposals are often right, and wrong
//! ones are likely. What it reads through the sliding table decides what it proposes.

use std::{
    collections::{BTreeSet, HashSet},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering},
    },
    time::Duration,
};

use muser_backend::arith::vision::PositionRule;
use muser_backend::{
    DraftBatch, DraftExecutor, DraftInfo, ExecError, Executor, ExecutorInfo, KvCapacity, KvType, LentBlock,
    RowInput, SeqRows, StepBatch, StepOutput, TowerExecutor, TowerImage, TowerInfo, largest_of_draft,
};
use muser_kv::{BLOCK_LEN, BlockId, KvGroup};
use muser_model::{Draft, Geometry, Projector};

pub(crate) use crate::testing_bench::{Answer, Bench};
use crate::{
    ImageSource, Prompt, Request,
    sampler::{DrawKey, Sampler},
};

pub(crate) const VOCAB: usize = 40;
pub(crate) const HIDDEN: usize = 2;

pub(crate) fn geometry(context: usize, window: usize) -> Geometry {
    Geometry {
        hidden: HIDDEN,
        ffn: 1,
        heads: 1,
        kv_heads: 1,
        head_dim: 2,
        vocab: VOCAB,
        context,
        window,
        sliding: vec![true, false],
        rope_theta: 1.0,
        rms_eps: 1.0,
        post_norm_eps: 1.0,
        logit_scale: 1.0,
        softcap: None,
    }
}

pub(crate) fn info(geometry: &Geometry) -> ExecutorInfo {
    ExecutorInfo {
        backend: "scripted",
        device: "none".into(),
        route: "scripted".into(),
        kv_type: KvType::F32,
        full_block_bytes: BLOCK_LEN * 8,
        sliding_block_bytes: BLOCK_LEN * 8,
        max_rows: 512,
        vocab: geometry.vocab,
        hidden: geometry.hidden,
        draft: None,
        kv_room: None,
        prompt_rows: 0,
    }
}

/// A good 64-bit mixer.
pub(crate) fn mix(a: u64, b: u64) -> u64 {
    let mut z = (a ^ b.rotate_left(32)).wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    (z ^ (z >> 31)).wrapping_add(b)
}

/// Random numbers for tests.
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(1);
        mix(self.0, 0x5151)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    pub(crate) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

fn bottom(input: u64, position: usize) -> u64 {
    mix(input, position as u64)
}

fn kv_row(h: u64, layer: u64) -> u64 {
    mix(h, 0xA0 + layer)
}

/// Logits of the states after both layers; without the second one, as the draft sees it.
fn logits_of(sliding: u64, full: Option<u64>, out: &mut Vec<f32>) {
    let unit = |h: u64, i: u64| (mix(h, i) >> 40) as f32 / (1u64 << 24) as f32;
    let value = |i: u64| unit(sliding, i) * 0.8 + full.map_or(0.5, |h| unit(h, i)) * 0.2;
    out.extend((0..VOCAB as u64).map(|i| value(i) * 10.0 - 5.0));
}

fn embedding_input(values: &[f32]) -> u64 {
    values.iter().fold(1 << 40, |h, v| mix(h, u64::from(v.to_bits())))
}

/// Rows of a picture under the scripted tower, whose tokens are single pixels.
pub(crate) fn picture_rows(picture: &TowerImage) -> Vec<f32> {
    let all = picture.rgb.iter().fold(picture.cols as u64, |h, byte| mix(h, u64::from(*byte)));
    (0..(picture.tokens() * HIDDEN) as u64).map(|i| (mix(all, i) >> 40) as f32).collect()
}

/// A picture for the scripted tower.
pub(crate) fn picture(rows: usize, cols: usize, seed: u64) -> TowerImage {
    let rgb = (0..(rows * cols * 3) as u64).map(|i| mix(seed, i) as u8).collect();
    TowerImage { rows, cols, rgb }
}

/// The model without an engine: one position at a time.
#[derive(Clone)]
pub(crate) struct Oracle {
    window: usize,
    /// Prefix sums of the rows of both layers.
    sums: [Vec<u64>; 2],
    pub(crate) logits: Vec<f32>,
    /// What the draft says about the next position.
    pub(crate) draft_logits: Vec<f32>,
    pub(crate) hidden: Vec<f32>,
}

impl Oracle {
    pub(crate) fn new(window: usize) -> Self {
        Self {
            window,
            sums: [vec![0], vec![0]],
            logits: Vec::new(),
            draft_logits: Vec::new(),
            hidden: Vec::new(),
        }
    }

    pub(crate) fn push(&mut self, input: u64) {
        let position = self.sums[0].len() - 1;
        let mut h = bottom(input, position);
        let mut states = [0; 2];
        for (layer, state) in states.iter_mut().enumerate() {
            let sums = &mut self.sums[layer];
            sums.push(sums[position].wrapping_add(kv_row(h, layer as u64)));
            let first = if layer == 0 { (position + 1).saturating_sub(self.window) } else { 0 };
            h = mix(h, sums[position + 1].wrapping_sub(sums[first]));
            *state = h;
        }
        self.logits.clear();
        logits_of(states[0], Some(states[1]), &mut self.logits);
        self.draft_logits.clear();
        logits_of(states[0], None, &mut self.draft_logits);
        self.hidden = hidden_of(h);
    }

    pub(crate) fn push_prompt(&mut self, prompt: &Prompt) {
        for (position, &token) in prompt.tokens.iter().enumerate() {
            let image = prompt.images.iter().rfind(|image| image.at <= position);
            let row = image.filter(|image| position < image.at + image.positions(HIDDEN)).map(|image| {
                let rows = match &image.source {
                    ImageSource::Rows(rows) => rows.to_vec(),
                    ImageSource::Picture(picture) => picture_rows(picture),
                };
                embedding_input(&rows[(position - image.at) * HIDDEN..][..HIDDEN])
            });
            self.push(row.unwrap_or(u64::from(token)));
        }
    }
}

fn hidden_of(h: u64) -> Vec<f32> {
    (0..HIDDEN as u64).map(|i| (mix(h, 0xE0 + i) >> 40) as f32).collect()
}

/// What choice `index` of a request must sample, with the logits' hashes, without stops: alone and cold by construction.
pub(crate) fn expected(request: &Request, seed: u64, index: u32, window: usize, n: usize) -> Vec<(u32, u64)> {
    let mut oracle = Oracle::new(window);
    oracle.push_prompt(&request.prompt);
    let mut sampler = Sampler::new();
    let mut sampling = request.sampling.clone();
    if sampling.top_k as usize >= VOCAB {
        // The engine takes all there are for no filter.
        sampling.top_k = 0;
    }
    let mut tokens = Vec::new();
    for i in 0..n {
        let hash = crate::step::hash_logits(&oracle.logits);
        let position = (request.prompt.tokens.len() + i) as u64;
        let key = DrawKey { seed, index, position };
        let id = sampler.draw(&sampling, &oracle.logits, key).expect("nothing is masked");
        tokens.push((id, hash));
        oracle.push(u64::from(id));
    }
    tokens
}

/// The highest logit, the lowest id of equals.
pub(crate) fn argmax(logits: &[f32]) -> u32 {
    logits.iter().enumerate().fold(0, |best, (i, v)| if *v > logits[best] { i } else { best }) as u32
}

/// What goes wrong in the steps to come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Device = 1,
    Panic = 2,
    NotANumber = 3,
    Lost = 4,
    Memory = 5,
    Renewed = 6,
}

pub(crate) struct ScriptedExecutor {
    info: ExecutorInfo,
    pub(crate) geometry: Geometry,
    capacity: KvCapacity,
    blocks: [Vec<[u64; BLOCK_LEN]>; 2],
    /// `step number << 8 | fault`; 0 for none.
    pub(crate) fault: Arc<AtomicU64>,
    steps: u64,
    pub(crate) largest_step: Arc<AtomicU64>,
    /// What a step and a draft cost, on this clock.
    pub(crate) costs: Option<(Costs, Arc<AtomicU64>)>,
    /// The next draft fails.
    pub(crate) draft_fails: Arc<AtomicBool>,
    /// Imports that still succeed; below 0: all of them.
    pub(crate) imports_until_fault: Arc<AtomicI64>,
    lent: Arc<Mutex<Lent>>,
    tower: TowerInfo,
    /// The picture in work and the slices that it still takes.
    image: Option<(TowerImage, usize)>,
    pub(crate) tower_state: Arc<TowerState>,
    /// Rows of the sliding layer, wherever they are, whose draft context was left out.
    without_context: HashSet<u64>,
}

/// What tests see of the tower, and tell it.
#[derive(Default)]
pub(crate) struct TowerState {
    /// Slices worked.
    pub(crate) slices: AtomicU64,
    /// Pictures begun and given up.
    pub(crate) dropped: AtomicU64,
    /// Microseconds of a slice on the clock of a bench with costs.
    pub(crate) slice_us: AtomicU64,
    /// The next slice fails (1) or panics (2).
    pub(crate) fault: AtomicU64,
}

/// Group (as in `blocks`) and number.
type BlockAt = (usize, usize);

/// Blocks in other hands, and what came back and is not in its place yet.
#[derive(Default)]
struct Lent {
    out: BTreeSet<BlockAt>,
    returned: Vec<(BlockAt, Vec<u8>)>,
}

struct ScriptedLoan {
    at: BlockAt,
    bytes: Vec<u8>,
    home: Arc<Mutex<Lent>>,
}

impl LentBlock for ScriptedLoan {
    fn bytes(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

impl Drop for ScriptedLoan {
    fn drop(&mut self) {
        let mut lent = self.home.lock().unwrap_or_else(PoisonError::into_inner);
        lent.out.remove(&self.at);
        lent.returned.push((self.at, std::mem::take(&mut self.bytes)));
    }
}

/// Microseconds of a step and of a draft by rows.
#[derive(Clone, Copy)]
pub(crate) struct Costs {
    pub(crate) step: fn(usize) -> u64,
    pub(crate) draft: fn(usize) -> u64,
}

impl ScriptedExecutor {
    /// One that does long steps of prompts as fast as short ones.
    pub(crate) fn with_prompt_rows(geometry: Geometry, prompt_rows: usize) -> Self {
        let mut executor = Self::new(geometry);
        executor.info.prompt_rows = prompt_rows;
        executor
    }

    pub(crate) fn new(geometry: Geometry) -> Self {
        Self {
            info: info(&geometry),
            geometry,
            capacity: KvCapacity { full: 0, sliding: 0 },
            blocks: [Vec::new(), Vec::new()],
            fault: Arc::default(),
            steps: 0,
            largest_step: Arc::default(),
            costs: None,
            draft_fails: Arc::default(),
            imports_until_fault: Arc::new(AtomicI64::new(-1)),
            lent: Arc::default(),
            tower: TowerInfo { route: "scripted tower".into(), unit: 1, width: HIDDEN },
            image: None,
            tower_state: Arc::default(),
            without_context: HashSet::with_capacity(1 << 15),
        }
    }

    fn lent(&self) -> MutexGuard<'_, Lent> {
        self.lent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts into its place what borrowers have written.
    fn settle(&mut self) {
        let returned = std::mem::take(&mut self.lent().returned);
        for ((group, block), bytes) in returned {
            fill(&mut self.blocks[group][block], &bytes);
        }
    }

    /// Refuses blocks that are lent.
    fn check_ours(&self, group: usize, blocks: &[BlockId]) -> Result<(), ExecError> {
        let lent = self.lent();
        match blocks.iter().find(|block| lent.out.contains(&(group, block.0 as usize))) {
            Some(block) => Err(ExecError::InvalidBatch(format!("block {} is lent", block.0))),
            None => Ok(()),
        }
    }

    /// The same with a draft.
    pub(crate) fn with_draft(geometry: Geometry, max_proposals: usize) -> Self {
        let draft = DraftInfo { max_proposals, window: geometry.window };
        let mut executor = Self::new(geometry);
        executor.info.draft = Some(draft);
        executor
    }

    fn spend(&self, cost: fn(&Costs) -> fn(usize) -> u64, rows: usize) {
        if let Some((costs, clock)) = &self.costs {
            clock.fetch_add(cost(costs)(rows), Ordering::Relaxed);
        }
    }

    fn blocks(&self, group: KvGroup) -> &[[u64; BLOCK_LEN]] {
        &self.blocks[usize::from(group == KvGroup::Full)]
    }

    fn row(
        &mut self,
        batch: &StepBatch,
        seq: &SeqRows,
        position: usize,
        input: u64,
        garbage: bool,
    ) -> [u64; 2] {
        let mut h = bottom(input, position);
        let (block, at) = (position / BLOCK_LEN, position % BLOCK_LEN);
        let mut states = [0; 2];
        for (layer, state) in states.iter_mut().enumerate() {
            let (table, table_first, first) = if layer == 0 {
                let first = (position + 1).saturating_sub(self.geometry.window);
                (batch.sliding_table(seq), seq.sliding_first as usize, first)
            } else {
                (batch.full_table(seq), 0, 0)
            };
            let memory = &mut self.blocks[layer];
            let BlockId(own) = table[block - table_first];
            if layer == 0 && batch.wants_draft_context() {
                self.without_context.remove(&kv_row(h, 0));
            } else if layer == 0 {
                self.without_context.insert(kv_row(h, 0));
            }
            memory[own as usize][at] = if garbage { 0xBAD } else { kv_row(h, layer as u64) };
            let mut sum = 0u64;
            for b in first / BLOCK_LEN..=block {
                let rows = &memory[table[b - table_first].0 as usize];
                let from = first.saturating_sub(b * BLOCK_LEN);
                let to = if b == block { at + 1 } else { BLOCK_LEN };
                sum = rows[from..to].iter().fold(sum, |sum, &row| sum.wrapping_add(row));
            }
            h = mix(h, sum);
            *state = h;
        }
        states
    }
}

impl Executor for ScriptedExecutor {
    fn info(&self) -> &ExecutorInfo {
        &self.info
    }

    fn allocate_kv(&mut self, capacity: KvCapacity) -> Result<(), ExecError> {
        self.capacity = capacity;
        let fill = |n: u32| (0..u64::from(n)).map(|i| [mix(i, 0xDEAD); BLOCK_LEN]).collect();
        self.blocks = [fill(capacity.sliding), fill(capacity.full)];
        Ok(())
    }

    fn step(&mut self, batch: &StepBatch, out: &mut StepOutput) -> Result<(), ExecError> {
        batch.validate(&self.geometry, self.capacity, self.info.max_rows)?;
        self.settle();
        for seq in batch.seqs() {
            self.check_ours(0, batch.sliding_table(seq))?;
            self.check_ours(1, batch.full_table(seq))?;
        }
        self.largest_step.fetch_max(batch.rows().len() as u64, Ordering::Relaxed);
        self.steps += 1;
        let fault = self.fault.load(Ordering::Relaxed);
        let fault = if fault >> 8 == self.steps { fault & 0xFF } else { 0 };
        out.logits.clear();
        out.hidden.clear();
        for seq in batch.seqs() {
            for i in 0..seq.n_rows as usize {
                let row = batch.rows()[seq.first_row as usize + i];
                let input = match row.input {
                    RowInput::Token(id) => u64::from(id),
                    RowInput::Embedding(e) => {
                        embedding_input(&batch.embeddings()[e as usize * HIDDEN..][..HIDDEN])
                    }
                };
                let position = seq.start_pos as usize + i;
                let [sliding, full] = self.row(batch, seq, position, input, matches!(fault, 1 | 2 | 5));
                if row.wants.needs_logits() {
                    logits_of(sliding, Some(full), &mut out.logits);
                }
                if row.wants.hidden {
                    out.hidden.extend(hidden_of(full));
                }
            }
        }
        self.spend(|costs| costs.step, batch.rows().len());
        match fault {
            1 => return Err(ExecError::Device { device: "scripted".into(), what: "as told".into() }),
            2 => panic!("as told"),
            4 => return Err(ExecError::Lost { device: "scripted".into(), what: "as told".into() }),
            5 => {
                let (device, what) = ("scripted".into(), "as told".into());
                return Err(ExecError::OutOfMemory { device, what, needed: 2, available: 1 });
            }
            6 => {
                // Whatever is read from them now is wrong.
                self.blocks.iter_mut().flatten().for_each(|block| block.fill(0xDEAD));
                return Err(ExecError::Renewed { device: "scripted".into(), what: "as told".into() });
            }
            3 => out.logits.fill(f32::NAN),
            _ => {}
        }
        out.reduce_to_argmax(batch, VOCAB);
        Ok(())
    }

    fn export_block(&self, group: KvGroup, block: BlockId, dst: &mut [u8]) -> Result<(), ExecError> {
        let at = (usize::from(group == KvGroup::Full), block.0 as usize);
        self.check_ours(at.0, &[block])?;
        if let Some((_, bytes)) = self.lent().returned.iter().rev().find(|(block, _)| *block == at) {
            dst.copy_from_slice(bytes);
            return Ok(());
        }
        for (to, row) in dst.chunks_exact_mut(8).zip(&self.blocks(group)[block.0 as usize]) {
            to.copy_from_slice(&row.to_le_bytes());
        }
        Ok(())
    }

    fn clear_rows(&self, _group: KvGroup, rows: usize, bytes: &mut [u8]) {
        bytes[rows * 8..].fill(0);
    }

    fn import_block(&mut self, group: KvGroup, block: BlockId, src: &[u8]) -> Result<(), ExecError> {
        let group = usize::from(group == KvGroup::Full);
        self.settle();
        self.check_ours(group, &[block])?;
        if self.imports_until_fault.fetch_sub(1, Ordering::Relaxed) == 0 {
            return Err(ExecError::Device { device: "scripted".into(), what: "the import fails".into() });
        }
        fill(&mut self.blocks[group][block.0 as usize], src);
        Ok(())
    }

    /// Every other block, so that both ways in are used.
    fn lend_block(&mut self, group: KvGroup, block: BlockId) -> Option<Box<dyn LentBlock>> {
        let at = (usize::from(group == KvGroup::Full), block.0 as usize);
        if block.0.is_multiple_of(2) || !self.lent().out.insert(at) {
            return None;
        }
        self.settle();
        let bytes = vec![0xEE; self.info.block_bytes(group)];
        Some(Box::new(ScriptedLoan { at, bytes, home: Arc::clone(&self.lent) }))
    }

    fn most_candidates(&self) -> usize {
        0
    }

    fn read_bandwidth(&self) -> Result<Option<f64>, ExecError> {
        Ok(None)
    }
}

impl DraftExecutor for ScriptedExecutor {
    fn attach_draft(&mut self, _: Draft) -> Result<(), ExecError> {
        unreachable!("it is made with its draft")
    }

    fn draft(&mut self, batch: &DraftBatch, logits: &mut Vec<f32>) -> Result<(), ExecError> {
        let info = self.info.draft.expect("the engine asks only executors with a draft");
        batch.validate(info, VOCAB, self.capacity)?;
        self.settle();
        logits.clear();
        for seq in batch.seqs() {
            let (start, table) = (seq.pos as usize, batch.sliding_table(seq));
            let stored = |p: usize| {
                let BlockId(block) = table[p / BLOCK_LEN - seq.sliding_first as usize];
                self.blocks[0][block as usize][p % BLOCK_LEN]
            };
            // Rows of the block itself: the anchor's, then those of what is proposed.
            let mut own = [0u64; 32];
            let mut input = u64::from(seq.anchor);
            for i in 0..seq.proposals as usize {
                let position = start + i;
                let h = bottom(input, position);
                own[i] = kv_row(h, 0);
                let first = (position + 1).saturating_sub(self.geometry.window);
                let context = (first.min(start)..start).fold(0u64, |sum, p| sum.wrapping_add(stored(p)));
                let block =
                    (first.max(start)..=position).fold(0u64, |sum, p| sum.wrapping_add(own[p - start]));
                let at = logits.len();
                logits_of(mix(h, context.wrapping_add(block)), None, logits);
                input = u64::from(argmax(&logits[at..]));
            }
        }
        self.spend(|costs| costs.draft, batch.proposals() + batch.seqs().len());
        if self.draft_fails.swap(false, Ordering::Relaxed) {
            return Err(ExecError::Device { device: "scripted".into(), what: "as told".into() });
        }
        Ok(())
    }

    fn draft_largest(
        &mut self,
        batch: &DraftBatch,
        scratch: &mut Vec<f32>,
        ids: &mut Vec<Option<u32>>,
    ) -> Result<(), ExecError> {
        largest_of_draft(self, batch, scratch, ids)
    }

    fn has_draft_context(&self, block: BlockId, row: usize) -> bool {
        !self.without_context.contains(&self.blocks[0][block.0 as usize][row])
    }
}

impl TowerExecutor for ScriptedExecutor {
    fn attach_projector(&mut self, _: Projector, _: PositionRule) -> Result<(), ExecError> {
        unreachable!("it is made with its tower")
    }

    fn tower(&self) -> Option<&TowerInfo> {
        Some(&self.tower)
    }

    fn begin_image(&mut self, image: &TowerImage) -> Result<(), ExecError> {
        self.drop_image();
        // A slice a token: pictures take turns that others can have steps in.
        self.image = Some((image.clone(), image.tokens()));
        Ok(())
    }

    fn encode_image(&mut self, _time: Duration, rows: &mut Vec<f32>) -> Result<bool, ExecError> {
        let (image, slices) = self.image.as_mut().expect("a picture is in work");
        let state = &self.tower_state;
        match state.fault.swap(0, Ordering::Relaxed) {
            0 => {}
            1 => {
                self.image = None;
                return Err(ExecError::Device { device: "scripted".into(), what: "as told".into() });
            }
            _ => panic!("as told"),
        }
        state.slices.fetch_add(1, Ordering::Relaxed);
        if let Some((_, clock)) = &self.costs {
            clock.fetch_add(state.slice_us.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        *slices -= 1;
        if *slices > 0 {
            return Ok(false);
        }
        *rows = picture_rows(image);
        self.image = None;
        Ok(true)
    }

    fn drop_image(&mut self) {
        if self.image.take().is_some() {
            self.tower_state.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

fn fill(memory: &mut [u64; BLOCK_LEN], bytes: &[u8]) {
    for (to, bytes) in memory.iter_mut().zip(bytes.chunks_exact(8)) {
        let mut word = [0; 8];
        word.copy_from_slice(bytes);
        *to = u64::from_le_bytes(word);
    }
}

/// A request with hashes and without stops.
pub(crate) fn request(prompt: Vec<u32>, max_tokens: u32) -> Request {
    Request {
        max_tokens: Some(max_tokens),
        hash_logits: true,
        seed: Some(5),
        ..Request::new(prompt, Vec::new())
    }
}

/// Tokens that differ from stem to stem.
pub(crate) fn stem(seed: u64, n: usize) -> Vec<u32> {
    (0..n as u64).map(|i| (mix(seed, i) % VOCAB as u64) as u32).collect()
}
