//! Muse Tiny on the CPU with packs in a store that can be told to misbehave.

#![allow(dead_code, unreachable_pub, reason = "each test program uses its part")]

use muser_backend::DraftExecutor as _;
use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use muser_backend::Executor as _;
use muser_cpu::{CpuExecutor, CpuOptions};
use muser_engine::{
    DraftLength, Engine, EngineConfig, EngineHandle, Event, Request, SamplingParams, Submission, Usage,
};
use muser_kv_connector::{PackOptions, PackSource, PackUse, identity_of, weights_root};
use muser_model::{Draft, Model};
use muser_pack::{
    Area, Identity, KeyRing, Library, LibraryOptions, MemoryStore, ObjectName, PackError, PackStore,
    store::{Activity, CatalogStore, Listed, Put, ReadAt, Usage as StoreUsage},
};

/// SplitMix64, so that a run can be repeated.
pub struct Rng(pub u64);

impl Rng {
    pub fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % n as u64) as usize
    }

    pub fn tokens(&mut self, n: usize) -> Vec<u32> {
        (0..n).map(|_| self.below(4000) as u32).collect()
    }
}

/// What survives a restart: the store and the keys.
#[derive(Clone)]
pub struct Disk {
    pub store: FaultyStore,
    pub keys: KeyRing,
}

impl Disk {
    pub fn new() -> Self {
        Self::over(MemoryStore::new())
    }

    pub fn over(memory: MemoryStore) -> Self {
        let store = FaultyStore { memory, faults: Arc::default() };
        Self { store, keys: KeyRing::generate().expect("random bytes") }
    }

    pub fn library(&self) -> Library {
        let store = Arc::new(self.store.clone());
        Library::open(store, self.keys.clone(), LibraryOptions::default()).expect("it opens")
    }
}

/// A running engine with packs.
pub struct Running {
    pub engine: EngineHandle,
    pub packs: PackUse,
}

pub fn load() -> (Model, CpuExecutor) {
    let model = Model::load(models().join("muse-tiny-Q4_K_M.gguf")).expect("the bundled model loads");
    let executor = CpuExecutor::new(model.clone(), CpuOptions { threads: Some(1), ..CpuOptions::default() });
    (model, executor.expect("the CPU runs it"))
}

/// The bundled draft.
pub fn draft() -> Draft {
    Draft::load(muser_testkit::muse_tiny_draft()).expect("the bundled draft loads")
}

pub fn models() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models")
}

/// Rounds of drafts, where there is one, have a fixed length, so that their counts can be compared.
pub fn config() -> EngineConfig {
    EngineConfig { context: Some(5120), draft_length: DraftLength::Fixed(4), ..EngineConfig::default() }
}

/// An engine without packs.
pub fn alone() -> EngineHandle {
    alone_with(false)
}

/// An engine without packs, with a draft or not.
pub fn alone_with(with_draft: bool) -> EngineHandle {
    let (model, mut executor) = load();
    if with_draft {
        executor.attach_draft(draft()).expect("it fits");
    }
    Engine::spawn(Box::new(executor), model.geometry, config()).expect("it starts")
}

pub fn start(disk: &Disk) -> Running {
    start_with(disk, config(), PackOptions::default(), |_| {})
}

pub fn start_with(
    disk: &Disk,
    config: EngineConfig,
    options: PackOptions,
    change: impl FnOnce(&mut Identity),
) -> Running {
    start_on(disk.library(), false, config, options, change)
}

/// An engine on an opened library, with a draft or not.
pub fn start_on(
    library: Library,
    with_draft: bool,
    mut config: EngineConfig,
    options: PackOptions,
    change: impl FnOnce(&mut Identity),
) -> Running {
    let (model, mut executor) = load();
    let root = weights_root(&model.file, None, 1, |_| {});
    let draft = with_draft.then(draft);
    let draft = draft.as_ref().map(|draft| {
        executor.attach_draft(draft.clone()).expect("it fits");
        (draft, weights_root(&draft.file, None, 1, |_| {}))
    });
    let mut identity = identity_of(&model, root, draft, executor.info()).expect("it fits");
    change(&mut identity);
    let scope = library.scope(identity, "");
    config.identity = scope.digest().to_vec();
    let (source, packs) = PackSource::start(library, scope, options).expect("threads");
    let engine = Engine::spawn_with(Box::new(executor), model.geometry, config, Some(Box::new(source)));
    Running { engine: engine.expect("it starts"), packs }
}

impl Running {
    /// Publishes what is offered and drops everything.
    pub fn stop(self) {
        assert!(self.packs.flush(Duration::from_mins(1)), "publishing ends");
        drop(self.engine);
        assert!(self.packs.join(Duration::from_mins(1)), "the threads end");
    }

    /// Blocks that sequences or exports hold.
    pub fn blocks_used(&self) -> u64 {
        let metrics = self.engine.metrics();
        metrics.full_blocks_used + metrics.sliding_blocks_used
    }
}

/// Greedy or sampled with a fixed seed, with logit hashes.
pub fn request(prompt: &[u32], tokens: u32, greedy: bool) -> Request {
    Request {
        max_tokens: Some(tokens),
        sampling: if greedy { SamplingParams::greedy() } else { SamplingParams::default() },
        seed: Some(11),
        hash_logits: true,
        ..Request::new(prompt.to_vec(), Vec::new())
    }
}

/// Tokens with the hashes of their logits, and the figures.
pub type Answer = (Vec<(u32, u64)>, Usage);

pub fn read(submission: &mut Submission) -> Answer {
    let (mut tokens, mut usage) = (Vec::new(), Usage::default());
    while let Some(event) = submission.recv() {
        match event {
            Event::Token(token) => tokens.push((token.id, token.logit_hash.expect("asked for"))),
            Event::Finished(finished) => usage = finished.usage,
            Event::Started(started) => assert!(started.cached_tokens < started.prompt_tokens),
            other => panic!("{other:?}"),
        }
    }
    (tokens, usage)
}

pub fn ask(engine: &EngineHandle, request: Request) -> Answer {
    read(&mut engine.submit(request).expect("good"))
}

pub fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_mins(1), "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// What a store does wrong.
#[derive(Default)]
pub struct Faults {
    /// Every read of a segment takes this long.
    pub read_ms: AtomicU64,
    /// Every read fails.
    pub broken: AtomicBool,
    /// Every write finds the disk full.
    pub full: AtomicBool,
    /// Objects opened so far.
    pub opened: AtomicU64,
}

/// A store in memory with faults.
#[derive(Clone)]
pub struct FaultyStore {
    pub memory: MemoryStore,
    pub faults: Arc<Faults>,
}

struct Slow(Box<dyn ReadAt>, Arc<Faults>);

impl ReadAt for Slow {
    fn len(&self) -> Result<u64, PackError> {
        self.0.len()
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), PackError> {
        if out.len() > 4096 {
            std::thread::sleep(Duration::from_millis(self.1.read_ms.load(SeqCst)));
        }
        self.0.read_at(offset, out)
    }
}

impl PackStore for FaultyStore {
    fn describe(&self) -> String {
        "faulty".into()
    }

    fn put(&self, name: &ObjectName, parts: &[&[u8]]) -> Result<Put, PackError> {
        if self.faults.full.load(SeqCst) {
            let needed_bytes = parts.iter().map(|part| part.len() as u64).sum();
            return Err(PackError::Full { needed_bytes, detail: "as told".into() });
        }
        self.memory.put(name, parts)
    }

    fn open(&self, name: &ObjectName) -> Result<Option<Box<dyn ReadAt>>, PackError> {
        if self.faults.broken.load(SeqCst) {
            return Err(PackError::Remote {
                action: "read",
                object: name.to_string(),
                reason: "500, as told".into(),
            });
        }
        self.faults.opened.fetch_add(u64::from(name.area == Area::Segments), SeqCst);
        let opened = self.memory.open(name)?;
        Ok(opened.map(|inner| Box::new(Slow(inner, Arc::clone(&self.faults))) as Box<dyn ReadAt>))
    }

    fn delete(&self, name: &ObjectName) -> Result<bool, PackError> {
        self.memory.delete(name)
    }

    fn quarantine(&self, name: &ObjectName) -> Result<(), PackError> {
        self.memory.quarantine(name)
    }

    fn replace(&self, name: &ObjectName, parts: &[&[u8]]) -> Result<(), PackError> {
        self.memory.replace(name, parts)
    }

    fn list(&self, area: Area) -> Result<Vec<Listed>, PackError> {
        self.memory.list(area)
    }

    fn touch(&self, name: &ObjectName) {
        self.memory.touch(name);
    }

    fn flush(&self) -> Result<(), PackError> {
        self.memory.flush()
    }

    fn usage(&self) -> Result<StoreUsage, PackError> {
        self.memory.usage()
    }

    fn clean(&self) -> Result<u64, PackError> {
        self.memory.clean()
    }

    fn activity(&self) -> Result<Option<Box<dyn Activity>>, PackError> {
        self.memory.activity()
    }

    fn quiet(&self) -> Result<Option<Box<dyn Activity>>, PackError> {
        self.memory.quiet()
    }

    fn catalog(&self) -> Option<&dyn CatalogStore> {
        self.memory.catalog()
    }
}
