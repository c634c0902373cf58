//! A place for prefixes that outlives an engine: here a map in memory, elsewhere files, a bucket, another machine.
//!
//! The engine tells a [`KvConnector`] of prompts that it does not know and of prefixes that it has computed; blocks come back as bytes.
//! A second engine then reads nothing of the prompt that the first one has read, and writes the same text.
//!
//! ```text
//! cargo run --release -p muser-engine --example prefix_store
//! ```

use std::{
    collections::HashMap,
    error::Error,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use muser_cpu::{CpuExecutor, CpuOptions};
use muser_engine::{
    BlockReceiver, Engine, EngineConfig, EngineHandle, Event, KvConnector, PrefixExport, PrefixQuery,
    Request, RestoreFailure, SamplingParams, StoredPrefix,
};
use muser_kv::{BLOCK_LEN, KvGroup, PositionKey};
use muser_model::Model;

/// A block is known by everything up to its end.
type Key = (Vec<PositionKey>, KvGroup);

/// The store; clones are the same one.
#[derive(Clone, Default)]
struct Store(Arc<Mutex<HashMap<Key, Vec<u8>>>>);

fn key(units: &[PositionKey], group: KvGroup, index: usize) -> Option<Key> {
    Some((units.get(..(index + 1) * BLOCK_LEN)?.to_vec(), group))
}

impl Store {
    fn blocks(&self) -> std::sync::MutexGuard<'_, HashMap<Key, Vec<u8>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl KvConnector for Store {
    // Both are called between two steps: what takes long belongs on other threads.
    fn look_up(&mut self, query: PrefixQuery) {
        let units = Arc::clone(query.units());
        query.answer(Some(Arc::new(Found { store: self.clone(), units })));
    }

    fn offer(&mut self, offer: PrefixExport) {
        for index in 0..offer.blocks() {
            for group in [KvGroup::Full, KvGroup::Sliding] {
                let Some(key) = key(offer.units(), group, index).filter(|_| offer.has(group, index)) else {
                    continue;
                };
                let store = self.clone();
                offer.copy_out(group, index, Vec::new(), move |bytes, copied| {
                    if copied.is_ok() {
                        store.blocks().insert(key, bytes);
                    }
                });
            }
        }
    }
}

/// What the store has of a prompt.
struct Found {
    store: Store,
    units: Arc<[PositionKey]>,
}

impl StoredPrefix for Found {
    fn has(&self, group: KvGroup, index: usize) -> bool {
        key(&self.units, group, index).is_some_and(|key| self.store.blocks().contains_key(&key))
    }

    fn fetch(&self, wanted: Vec<(KvGroup, usize)>, delivery: BlockReceiver) {
        let (store, units) = (self.store.clone(), Arc::clone(&self.units));
        std::thread::spawn(move || {
            for (group, index) in wanted {
                let bytes = key(&units, group, index).and_then(|key| store.blocks().get(&key).cloned());
                let Some(bytes) = bytes else {
                    // The engine asks for less, or computes.
                    return delivery.fail(RestoreFailure::Missing, Some((group, index)));
                };
                // Some executors lend the block's own memory; to others the bytes are handed over.
                match delivery.place(group, index) {
                    Some(place) => {
                        if place.write(0..bytes.len(), &mut |block| block.copy_from_slice(&bytes)) {
                            delivery.filled(place);
                        }
                    }
                    None => delivery.give(group, index, Box::new(bytes)),
                }
            }
        });
    }
}

fn start(store: &Store) -> Result<EngineHandle, Box<dyn Error>> {
    let model = Model::load(muser_testkit::muse_tiny())?;
    let geometry = model.geometry.clone();
    let executor = Box::new(CpuExecutor::new(model, CpuOptions::default())?);
    // A store that several models share needs `EngineConfig::identity` in its keys.
    Ok(Engine::spawn_with(executor, geometry, EngineConfig::default(), Some(Box::new(store.clone())))?)
}

/// The text's tokens and how many positions of the prompt the store brought.
fn ask(engine: &EngineHandle, prompt: &[u32]) -> Result<(Vec<u32>, u32), Box<dyn Error>> {
    let sampling = SamplingParams::greedy();
    let request = Request { max_tokens: Some(16), sampling, ..Request::new(prompt.to_vec(), Vec::new()) };
    let mut submission = engine.submit(request)?;
    let mut tokens = Vec::new();
    while let Some(event) = submission.recv() {
        match event {
            Event::Token(token) => tokens.push(token.id),
            Event::Finished(end) => return Ok((tokens, end.usage.restored_tokens)),
            Event::Failed(error) => return Err(error.into()),
            _ => {}
        }
    }
    Err("the engine stopped".into())
}

#[expect(clippy::print_stdout, reason = "it is the result")]
fn main() -> Result<(), Box<dyn Error>> {
    let store = Store::default();
    let prompt: Vec<u32> = (0..1000).map(|i| (i * 37 + 11) % 4000).collect();
    let first = start(&store)?;
    let (text, restored) = ask(&first, &prompt)?;
    assert_eq!(restored, 0);
    // Blocks leave the engine between its steps, after the answer.
    let until = Instant::now() + Duration::from_secs(10);
    let units: Vec<PositionKey> = prompt.iter().map(|&id| PositionKey::token(id)).collect();
    let last =
        key(&units, KvGroup::Sliding, prompt.len() / BLOCK_LEN - 1).ok_or("the prompt has whole blocks")?;
    while !store.blocks().contains_key(&last) {
        assert!(Instant::now() < until, "nothing was kept");
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(first);

    let second = start(&store)?;
    let (again, restored) = ask(&second, &prompt)?;
    assert_eq!(again, text, "the same text, bit for bit");
    println!("{restored} of {} positions came from the store", prompt.len());
    assert!(restored >= 768);
    Ok(())
}
