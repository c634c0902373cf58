//! The cache against a memory that knows what should be in it.
//!
//! Every row written into the fake memory is a hash of the whole prefix up to it, so that a wrong block, a stale row or a
//! wrong position shows at once.

use std::collections::HashMap;

use muser_testkit::Rng;

use super::*;

mod policies;

/// Block memory of both groups plus the cache in front of it.
struct Bench {
    cache: KvCache,
    full: Vec<[u64; BLOCK_LEN]>,
    sliding: Vec<[u64; BLOCK_LEN]>,
}

struct Live {
    kv: KvSeq,
    units: Vec<PositionKey>,
}

fn row_hash(prefix: u64, unit: PositionKey) -> u64 {
    Rng(prefix ^ u64::from_le_bytes(unit.to_le_bytes()).wrapping_mul(0x1234_5678_9ABC_DEF1)).next_u64()
}

fn row_hashes(units: &[PositionKey]) -> Vec<u64> {
    let mut prefix = 7;
    units
        .iter()
        .map(|&unit| {
            prefix = row_hash(prefix, unit);
            prefix
        })
        .collect()
}

impl Bench {
    fn new(full: u32, sliding: u32, window: usize) -> Self {
        let config = CacheConfig {
            full_blocks: full,
            sliding_blocks: sliding,
            window,
            slack: 0,
            min_copy: 4,
            identity: b"test".to_vec(),
        };
        Self {
            cache: KvCache::new(&config),
            full: vec![[0; BLOCK_LEN]; full as usize],
            sliding: vec![[0; BLOCK_LEN]; sliding as usize],
        }
    }

    fn begin(&mut self, units: &[PositionKey], max_reuse: usize, publish: bool) -> Live {
        let mut copies = Vec::new();
        let kv = self.cache.begin(CacheScope::EVERYBODY, units, max_reuse, 4096, publish, &mut copies);
        for copy in copies {
            let memory = match copy.group {
                KvGroup::Full => &mut self.full,
                KvGroup::Sliding => &mut self.sliding,
            };
            memory[copy.to.0 as usize] = memory[copy.from.0 as usize];
        }
        let live = Live { units: units[..kv.len()].to_vec(), kv };
        self.check(&live);
        live
    }

    /// Computes `units` and commits the first `keep` of them (the rest is rolled back).
    fn extend(&mut self, live: &mut Live, units: &[PositionKey], keep: usize) -> Result<(), KvError> {
        let start = live.kv.len();
        self.cache.reserve(&mut live.kv, start + units.len())?;
        let mut all = live.units.clone();
        all.extend_from_slice(units);
        let hashes = row_hashes(&all);
        for (position, &hash) in hashes.iter().enumerate().skip(start) {
            let block = position / BLOCK_LEN;
            self.full[live.kv.full()[block].0 as usize][position % BLOCK_LEN] = hash;
            let sliding = live.kv.sliding()[block - live.kv.sliding_first()];
            self.sliding[sliding.0 as usize][position % BLOCK_LEN] = hash;
        }
        self.cache.commit(&mut live.kv, &units[..keep]);
        live.units.extend_from_slice(&units[..keep]);
        self.check(live);
        Ok(())
    }

    /// Everything that the next row may read is what it should be.
    fn check(&self, live: &Live) {
        let hashes = row_hashes(&live.units);
        let first_visible = (live.kv.len() + 1).saturating_sub(self.cache.window);
        for (position, &hash) in hashes.iter().enumerate() {
            let (block, row) = (position / BLOCK_LEN, position % BLOCK_LEN);
            assert_eq!(self.full[live.kv.full()[block].0 as usize][row], hash, "full row {position}");
            if position >= first_visible {
                let sliding = live.kv.sliding()[block - live.kv.sliding_first()];
                assert_eq!(self.sliding[sliding.0 as usize][row], hash, "sliding row {position}");
            }
        }
    }

    /// Reference counts are those of the live sequences, and the tree and the pools agree.
    fn audit(&self, live: &[Live]) {
        let mut full = HashMap::new();
        let mut sliding = HashMap::new();
        for seq in live {
            for block in seq.kv.full() {
                *full.entry(*block).or_insert(0) += 1;
            }
            for block in seq.kv.sliding() {
                *sliding.entry(*block).or_insert(0) += 1;
            }
        }
        for (pool, counts) in [(&self.cache.full, &full), (&self.cache.sliding, &sliding)] {
            for block in (0..pool.total()).map(BlockId) {
                assert_eq!(pool.refs(block), counts.get(&block).copied().unwrap_or(0), "{block:?}");
            }
            assert_eq!(pool.used() as usize, counts.len());
        }
        let mut cached = 0;
        for block in self.cache.tree.iter() {
            cached += u32::from(self.cache.full.refs(block) == 0);
            if let Some(parent) = self.cache.tree.parent(block) {
                assert!(self.cache.tree.is_full(parent), "only a full block has children");
                assert!(self.cache.full.refs(parent) >= u32::from(self.cache.full.refs(block) > 0));
            }
        }
        assert_eq!(cached, self.cache.full.cached());
    }
}

fn tokens(ids: impl IntoIterator<Item = u32>) -> Vec<PositionKey> {
    ids.into_iter().map(PositionKey::token).collect()
}

/// Computes a whole prompt in one go and ends the sequence.
fn run(bench: &mut Bench, units: &[PositionKey]) -> usize {
    let mut live = bench.begin(units, units.len() - 1, true);
    let reused = live.kv.len();
    let rest = units[reused..].to_vec();
    bench.extend(&mut live, &rest, rest.len()).expect("the bench is large enough");
    bench.cache.release(live.kv);
    reused
}

#[test]
fn a_known_prompt_is_reused_up_to_its_last_token() {
    let mut bench = Bench::new(40, 40, 512);
    let prompt = tokens(0..2000);
    assert_eq!(run(&mut bench, &prompt), 0);
    assert_eq!(run(&mut bench, &prompt), 1999);
    let mut longer = prompt.clone();
    longer.extend(tokens(5000..5100));
    assert_eq!(run(&mut bench, &longer), 2000);
    bench.audit(&[]);
}

#[test]
fn divergence_inside_a_cached_prompt_resumes_there() {
    // A prompt of 2,724 tokens, another one that parts at 960, a window much shorter than both.
    let mut bench = Bench::new(64, 64, 512);
    run(&mut bench, &tokens(0..2724));
    let mut other = tokens(0..960);
    other.extend(tokens(9000..9500));
    assert_eq!(run(&mut bench, &other), 960);
    bench.audit(&[]);
}

#[test]
fn divergence_resumes_at_the_last_boundary_whose_window_is_left() {
    let mut bench = Bench::new(64, 16, 512);
    run(&mut bench, &tokens(0..2724));
    // Another conversation takes most of the sliding memory: the middle of the first loses its sliding blocks.
    run(&mut bench, &tokens(20_000..22_500));
    let mut again = tokens(0..2724);
    again.push(PositionKey::token(1));
    assert_eq!(
        bench.cache.known(CacheScope::EVERYBODY, &again, 2724),
        2724,
        "the end of a path keeps its window"
    );
    let mut other = tokens(0..960);
    other.extend(tokens(9000..9100));
    let known = bench.cache.known(CacheScope::EVERYBODY, &other, other.len() - 1);
    assert!(known <= 960);
    assert_eq!(run(&mut bench, &other), known);
    bench.audit(&[]);
}

#[test]
fn an_unfinished_block_is_taken_over_without_a_copy_by_its_continuation() {
    let mut bench = Bench::new(8, 8, 256);
    run(&mut bench, &tokens(0..100));
    let mut copies = Vec::new();
    let next = tokens(0..140);
    let seq = bench.cache.begin(CacheScope::EVERYBODY, &next, 139, 512, true, &mut copies);
    assert_eq!((seq.len(), copies.len()), (100, 0));
    // It belongs to that sequence now: a second one gets a copy.
    let second = bench.cache.begin(CacheScope::EVERYBODY, &next, 139, 512, true, &mut copies);
    assert_eq!((second.len(), copies.len()), (100, 2));
    assert_ne!(seq.full()[0], second.full()[0]);
    bench.cache.release(seq);
    bench.cache.release(second);
    bench.audit(&[]);
}

#[test]
fn identity_separates_prefixes() {
    let hash = |identity: &[u8]| {
        let tree = tree::Tree::new(1, identity);
        tree.hash_after(&tree.root(CacheScope::EVERYBODY), &tokens(0..256))
    };
    assert_eq!(hash(b"a"), hash(b"a"));
    assert_ne!(hash(b"a"), hash(b"b"));
    let tree = tree::Tree::new(1, b"a");
    let first = tree.hash_after(&tree.root(CacheScope::EVERYBODY), &tokens(0..256));
    assert_ne!(tree.hash_after(&first, &tokens(0..256)), first);
    assert_ne!(PositionKey::media(&[1; 32], 0), PositionKey::media(&[2; 32], 0));
    assert_ne!(PositionKey::media(&[1; 32], 0), PositionKey::media(&[1; 32], 1));
    assert_eq!(PositionKey::media(&[1; 32], 0).as_token(), None);
    assert_ne!(PositionKey::media_start(&[1; 32], 7), PositionKey::media_start(&[2; 32], 7));
    assert_ne!(PositionKey::media_start(&[1; 32], 7), PositionKey::media_start(&[1; 32], 8));
    assert_eq!(PositionKey::media_start(&[1; 32], 7).as_token(), None);
    assert_eq!(PositionKey::token(u32::MAX).as_token(), Some(u32::MAX));
}

#[test]
fn two_sequences_that_compute_the_same_block_end_up_sharing_it() {
    let mut bench = Bench::new(8, 8, 256);
    let units = tokens(0..300);
    let mut a = bench.begin(&units, 299, true);
    let mut b = bench.begin(&units, 299, true);
    bench.extend(&mut a, &units, 300).expect("fits");
    bench.extend(&mut b, &units, 300).expect("fits");
    assert_eq!(a.kv.full()[0], b.kv.full()[0]);
    assert_ne!(a.kv.full()[1], b.kv.full()[1]);
    let live = [a, b];
    bench.audit(&live);
    for seq in live {
        bench.cache.release(seq.kv);
    }
    bench.audit(&[]);
}

#[test]
fn an_unpublished_sequence_leaves_nothing() {
    let mut bench = Bench::new(8, 8, 256);
    let units = tokens(0..300);
    let mut a = bench.begin(&units, 0, false);
    bench.extend(&mut a, &units, 300).expect("fits");
    bench.cache.release(a.kv);
    let stats = bench.cache.stats();
    assert_eq!((stats.full.free, stats.sliding.free), (8, 8));
    assert_eq!(bench.cache.known(CacheScope::EVERYBODY, &units, 299), 0);
}

#[test]
fn distinct_prompts_never_exceed_the_pool() {
    // 200 prompts of 20 blocks through a pool of 25: old ones go, nothing grows.
    let mut bench = Bench::new(25, 12, 512);
    for i in 0..200 {
        let prompt = tokens((0..5120).map(|t| t + i * 10_000));
        assert_eq!(run_in_chunks(&mut bench, &prompt, 256), 0);
        let stats = bench.cache.stats();
        assert_eq!(stats.full.used + stats.full.cached + stats.full.free, 25);
        assert_eq!((stats.full.used, stats.sliding.used), (0, 0));
    }
    bench.cache.clear();
    let stats = bench.cache.stats();
    assert_eq!((stats.full.free, stats.sliding.free), (25, 12));
}

fn run_in_chunks(bench: &mut Bench, units: &[PositionKey], chunk: usize) -> usize {
    let mut live = bench.begin(units, units.len() - 1, true);
    let reused = live.kv.len();
    for part in units[reused..].chunks(chunk) {
        bench.extend(&mut live, part, part.len()).expect("one sequence fits");
    }
    bench.cache.release(live.kv);
    reused
}

#[test]
fn an_imported_prefix_is_known_afterwards_and_only_its_window_was_needed() {
    let mut bench = Bench::new(32, 32, 512);
    let units = tokens(0..2100);
    let import = bench.cache.begin_import(CacheScope::EVERYBODY, &units, 8).expect("fits");
    let todo: Vec<_> = import.blocks().collect();
    let count = |group| todo.iter().filter(|block| block.group == group).count();
    assert_eq!((count(KvGroup::Full), count(KvGroup::Sliding)), (8, 2));
    let hashes = row_hashes(&units);
    for block in todo {
        let memory = match block.group {
            KvGroup::Full => &mut bench.full,
            KvGroup::Sliding => &mut bench.sliding,
        };
        memory[block.block.0 as usize].copy_from_slice(&hashes[block.index * BLOCK_LEN..][..BLOCK_LEN]);
    }
    bench.cache.finish_import(import);
    bench.audit(&[]);
    assert_eq!(run(&mut bench, &units), 2048);
    let held = bench.cache.pin(CacheScope::EVERYBODY, &units);
    assert_eq!(held.blocks.len(), 8);
    assert!(held.blocks[5].sliding.is_none() && held.blocks[6].sliding.is_some());
    bench.cache.unpin(held);
    // An import that is given up leaves no trace.
    let before = bench.cache.stats();
    let import = bench.cache.begin_import(CacheScope::EVERYBODY, &tokens(50_000..52_000), 7).expect("fits");
    bench.cache.abort_import(import);
    assert_eq!(bench.cache.stats().full.free, before.full.free);
    assert!(matches!(
        bench.cache.begin_import(CacheScope::EVERYBODY, &units, 9),
        Err(KvError::ShortImport { .. })
    ));
    assert!(matches!(
        bench.cache.begin_import(CacheScope::EVERYBODY, &tokens(0..90 * 256), 90),
        Err(KvError::OutOfBlocks { .. })
    ));
    bench.audit(&[]);
}

/// Random life of a cache under pressure: shared prefixes, partial commits, releases, imports.
fn random_life(seed: u64) {
    let mut rng = Rng(seed);
    let window = [1, 200, 256, 257, 700][rng.below(5)];
    let per_seq = window / BLOCK_LEN + 3;
    let (full, sliding) = (12 + rng.below(20), 2 * per_seq + rng.below(10));
    let mut bench = Bench::new(full as u32, sliding as u32, window);
    let mut live: Vec<Live> = Vec::new();
    // A few stems; prompts branch off them at random points.
    let stems: Vec<Vec<PositionKey>> =
        (0..3).map(|s| tokens((0..1500).map(|_| rng.below(1000) as u32 + s * 1000))).collect();
    for _ in 0..60 {
        match rng.below(10) {
            0..=2 if live.len() < 3 => {
                let stem = &stems[rng.below(stems.len())];
                let mut prompt = stem[..=rng.below(stem.len())].to_vec();
                prompt.extend(tokens((0..rng.below(50)).map(|_| rng.below(9) as u32)));
                let publish = rng.below(5) > 0;
                let max_reuse = if publish { prompt.len() - 1 } else { 0 };
                let mut seq = bench.begin(&prompt, max_reuse, publish);
                let rest = prompt[seq.kv.len()..].to_vec();
                for part in rest.chunks(1 + rng.below(300)) {
                    if bench.extend(&mut seq, part, part.len()).is_err() {
                        break;
                    }
                }
                bench.cache.mark_resume(&seq.kv);
                live.push(seq);
            }
            3 if !live.is_empty() => {
                let seq = live.swap_remove(rng.below(live.len()));
                bench.cache.release(seq.kv);
            }
            4 => {
                let stem = &stems[rng.below(stems.len())];
                let blocks = 1 + rng.below(5);
                if let Ok(import) = bench.cache.begin_import(CacheScope::EVERYBODY, stem, blocks) {
                    let hashes = row_hashes(stem);
                    for block in import.blocks() {
                        let memory = match block.group {
                            KvGroup::Full => &mut bench.full,
                            KvGroup::Sliding => &mut bench.sliding,
                        };
                        let rows = &hashes[block.index * BLOCK_LEN..][..BLOCK_LEN];
                        memory[block.block.0 as usize].copy_from_slice(rows);
                    }
                    if rng.below(4) == 0 {
                        bench.cache.abort_import(import);
                    } else {
                        bench.cache.finish_import(import);
                    }
                }
            }
            _ if !live.is_empty() => {
                let at = rng.below(live.len());
                let mut seq = live.swap_remove(at);
                let most = if rng.below(3) == 0 { 280 } else { 8 };
                let rows = 1 + rng.below(most);
                let units = tokens((0..rows).map(|_| rng.below(5) as u32));
                let keep = if rng.below(2) == 0 { rows } else { rng.below(rows + 1) };
                let _ = bench.extend(&mut seq, &units, keep);
                live.push(seq);
            }
            _ => {}
        }
        for seq in &live {
            bench.check(seq);
        }
        bench.audit(&live);
    }
    for seq in live.drain(..) {
        bench.cache.release(seq.kv);
    }
    bench.audit(&[]);
    bench.cache.clear();
    let stats = bench.cache.stats();
    assert_eq!((stats.full.free as usize, stats.sliding.free as usize), (full, sliding));
}

#[test]
fn random_lives_keep_every_row_where_it_belongs() {
    let lives = if muser_testkit::is_long() { 20_000 } else { 1_000 };
    for seed in 0..lives {
        random_life(seed);
    }
}

#[test]
fn scopes_know_nothing_of_each_other() {
    let scopes = [
        CacheScope::EVERYBODY,
        CacheScope::of(&[b"a"]),
        CacheScope::of(&[b"a", b"salt"]),
        CacheScope::of(&[b"as", b"alt"]),
        CacheScope::of(&[b"asalt"]),
    ];
    let mut bench = Bench::new(64, 64, 512);
    let units = tokens(0..1000);
    let mut copies = Vec::new();
    // Whole blocks and an unfinished one, of one scope after the other.
    for (i, &scope) in scopes.iter().enumerate() {
        for (j, &other) in scopes.iter().enumerate() {
            let expected = if j < i { 999 } else { 0 };
            assert_eq!(bench.cache.known(other, &units, 999), expected, "{j} after {i}");
            let whole = |_, _| false;
            assert_eq!(bench.cache.resumable_with(other, &units, 3, whole), if j < i { 3 } else { 0 });
        }
        let mut seq = bench.cache.begin(scope, &units, 999, 1024, true, &mut copies);
        assert!(seq.is_empty() && copies.is_empty(), "nothing of another scope is taken or copied");
        bench.cache.reserve(&mut seq, units.len()).expect("fits");
        bench.cache.commit(&mut seq, &units);
        bench.cache.release(seq);
    }
    // Their hashes differ from the first block on, so a tier that goes by hashes keeps them apart too.
    let hashes: Vec<_> = scopes.iter().map(|&scope| bench.cache.chain_hashes(scope, &units)).collect();
    for (i, one) in hashes.iter().enumerate() {
        for other in &hashes[..i] {
            assert!(one.iter().all(|hash| !other.contains(hash)));
        }
    }
    // What is brought from elsewhere is for its scope alone.
    let fresh = tokens(5000..5600);
    let import = bench.cache.begin_import(scopes[1], &fresh, 2).expect("fits");
    bench.cache.finish_import(import);
    let known = scopes.map(|scope| bench.cache.known(scope, &fresh, 599));
    assert_eq!(known, [0, 512, 0, 0, 0]);
    let held = bench.cache.pin(scopes[2], &fresh);
    assert!(held.blocks.is_empty());
    bench.cache.unpin(held);
    assert!(!format!("{:?}", scopes[1]).contains(&format!("{:02x}", scopes[1].as_bytes()[0])));
}
