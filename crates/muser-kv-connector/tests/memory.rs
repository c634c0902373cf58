//! Memory under a cache limit: many different prompts, one after another, with packs beside them, and the process stays
//! within the limit and what it needs anyway. A program of its own, because it reads the whole process's memory.
//!
//! Fifteen prompts of 900 tokens by default, 200 of 4,000 with `MUSER_TEST_LONG=1`.

#![cfg(target_os = "linux")]

mod support;

use std::time::Duration;

use muser_engine::EngineConfig;
use muser_kv_connector::PackOptions;
use muser_pack::MemoryStore;
use muser_testkit::resident_bytes;
use support::{Disk, Rng, ask, config, request, start_with};

const LIMIT: u64 = 32 << 20;
const STORE: u64 = 24 << 20;
/// Weights (mapped, and repacked for the kernels), scratch of a step, buffers between engine and store, the allocator.
const FIXED: u64 = 160 << 20;

#[test]
fn many_prompts_stay_within_the_cache_limit() {
    let long = muser_testkit::is_long();
    let (prompts, len) = if long { (200, 4000) } else { (15, 900) };
    let disk = Disk::over(MemoryStore::with_budget(STORE));
    let engine = EngineConfig { kv_bytes: Some(LIMIT), ..config() };
    let before = resident_bytes().expect("Linux");
    let running = start_with(&disk, engine, PackOptions::default(), |_| {});
    let mut rng = Rng(8);
    let mut after_a_third = 0;
    for prompt in 0..prompts {
        ask(&running.engine, request(&rng.tokens(len), 2, true));
        assert!(running.packs.flush(Duration::from_mins(1)));
        let metrics = running.engine.metrics();
        assert!(metrics.kv_bytes_held <= LIMIT, "{} bytes", metrics.kv_bytes_held);
        if prompt == prompts / 3 {
            after_a_third = resident_bytes().expect("Linux");
        }
    }
    let at_the_end = resident_bytes().expect("Linux");
    let grown = at_the_end.saturating_sub(after_a_third);
    assert!(grown < 16 << 20, "{grown} bytes more after {prompts} prompts than after a third of them");
    let all = at_the_end.saturating_sub(before);
    assert!(all < LIMIT + STORE + FIXED, "{all} bytes for a cache of {LIMIT} and a store of {STORE}");
    eprintln!("{prompts} prompts: {all} bytes, {grown} of them after the first third");
    running.stop();
}
