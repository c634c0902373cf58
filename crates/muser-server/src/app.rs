//! What all routes share: the configuration, the keys, and the model once it is loaded.
//!
//! The server listens before the model is loaded, so that an orchestrator sees 503 and not a refused connection;
//! [`App::load`] switches it on. Nothing here is changed after that except counters.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::{SystemTime, UNIX_EPOCH};

use aws_lc_rs::rand::{SecureRandom as _, SystemRandom};
use muser_gguf::GgufFile;
use tokio::runtime::Handle;
use tokio::task::spawn_blocking;

use crate::backend::{Backend, Slot, Snapshot};
use crate::believed::Believed;
use crate::body_budget::BodyBudget;
use crate::config::ServerConfig;
use crate::dashboard::{Board, Machine, NodePart};
use crate::error::{ApiError, ServerError};
use crate::keys::Keys;
use crate::metrics::Metrics;
use crate::nodes::{Handoff, KnownNodes, NodeTotals};
use crate::packs::Packs;
use crate::pictures::{Pictures, Reader};
use crate::routes::responses::Responses;
use crate::slot_book::SlotBook;
use crate::text::TextPipeline;
use crate::wrong_keys::WrongKeys;

/// Facts about the loaded model.
#[derive(Debug, Clone, Default)]
pub struct ModelFacts {
    /// The name that requests use.
    pub name: String,
    /// Where its file is.
    pub path: String,
    /// Tokens that one request's context holds.
    pub context_tokens: usize,
    /// Parameters.
    pub parameters: u64,
    /// Length of the file in bytes.
    pub file_bytes: u64,
    /// Name of the quantisation.
    pub quantization: String,
    /// Width of the hidden state.
    pub hidden: usize,
    /// Why images cannot be shown, if there is more to say than that no projector belongs to the model: its file is named.
    pub blind: Option<String>,
}

impl ModelFacts {
    /// Facts of a model file, of which one request's context holds `context_tokens`.
    pub fn of_file(name: String, file: &GgufFile, context_tokens: usize, hidden: usize) -> Self {
        let mut values_by_type: BTreeMap<&str, u64> = BTreeMap::new();
        for tensor in file.tensors() {
            *values_by_type.entry(tensor.ty.name()).or_default() += tensor.values();
        }
        // The type that most values have gives the file its name.
        let most = values_by_type.iter().max_by_key(|(_, values)| **values).map_or("", |(name, _)| name);
        Self {
            name,
            path: file.path().display().to_string(),
            context_tokens,
            parameters: file.tensors().iter().map(muser_gguf::TensorInfo::values).sum(),
            file_bytes: (0..file.shard_count()).map(|shard| file.shard_bytes(shard).len() as u64).sum(),
            quantization: most.to_owned(),
            hidden,
            blind: None,
        }
    }
}

/// A model with everything that answers for it.
pub struct Loaded {
    /// Facts.
    pub facts: ModelFacts,
    /// Vocabulary, template and parsers.
    pub text: Arc<TextPipeline>,
    /// The engine.
    pub backend: Arc<dyn Backend>,
    /// Metrics.
    pub metrics: Metrics,
    /// Seconds since 1970 at loading.
    pub created: u64,
    /// What each slot held last.
    pub slots: SlotBook,
    /// The past hour.
    pub board: Board,
}

/// The shared state.
pub struct App {
    /// The configuration.
    pub config: ServerConfig,
    /// What is believed where no key is asked for.
    pub believed: Believed,
    keys: RwLock<Arc<Keys>>,
    pub(crate) wrong_keys: WrongKeys,
    bodies: BodyBudget,
    work_room: RwLock<Option<Handle>>,
    loaded: OnceLock<Arc<Loaded>>,
    packs: OnceLock<Arc<Packs>>,
    machine: OnceLock<Arc<Machine>>,
    nodes: OnceLock<Box<dyn KnownNodes>>,
    stopping: AtomicBool,
    counter: AtomicU64,
    random: SystemRandom,
    /// Responses that clients may go on from.
    pub responses: Responses,
}

/// The shared state as routes hold it.
pub type SharedApp = Arc<App>;

impl App {
    /// The state before the model is loaded. Checks the configuration and reads the keys.
    pub fn new(config: ServerConfig) -> Result<SharedApp, ServerError> {
        config.check()?;
        let keys = RwLock::new(Arc::new(config.load_keys()?));
        let believed = Believed::new(&config)?;
        let bodies = BodyBudget::new(config.limits.bodies_bytes);
        if believed.every_origin() && config.key_file.is_none() {
            tracing::warn!(
                "--cors-origin '*' without a key: every web page that somebody here visits may use the server"
            );
        }
        Ok(Arc::new(Self {
            config,
            believed,
            keys,
            wrong_keys: WrongKeys::default(),
            bodies,
            work_room: RwLock::new(None),
            loaded: OnceLock::new(),
            packs: OnceLock::new(),
            machine: OnceLock::new(),
            nodes: OnceLock::new(),
            stopping: AtomicBool::new(false),
            counter: AtomicU64::new(0),
            random: SystemRandom::new(),
            responses: Responses::default(),
        }))
    }

    /// Starts answering for a model. A second call has no effect.
    pub fn load(&self, facts: ModelFacts, text: TextPipeline, backend: Arc<dyn Backend>) {
        let metrics = Metrics::new(&facts.name);
        let mut text = text;
        let pictures = match (backend.tower(), &facts.blind) {
            (Some(tower), _) => Pictures::Shown(Reader::new(tower, self.config.limits.image_tokens)),
            (None, Some(reason)) => Pictures::Absent(reason.clone()),
            (None, None) => Pictures::default(),
        };
        text.show_pictures(pictures);
        let (text, created) = (Arc::new(text), unix_seconds());
        let (slots, board) = (SlotBook::default(), Board::default());
        let loaded = Loaded { facts, text, backend, metrics, created, slots, board };
        let _ = self.loaded.set(Arc::new(loaded));
    }

    /// Gives the server the packs of the model, before [`App::load`]. A second call has no effect.
    pub fn attach_packs(&self, packs: Packs) {
        let _ = self.packs.set(Arc::new(packs));
    }

    /// Tells the dashboard of the machine. A second call has no effect.
    pub fn attach_machine(&self, machine: Arc<Machine>) {
        let _ = self.machine.set(machine);
    }

    /// The machine, if the server was told of it.
    pub fn machine(&self) -> Option<&Arc<Machine>> {
        self.machine.get()
    }

    /// Tells the server of other nodes. A second call has no effect.
    pub fn attach_nodes(&self, nodes: impl KnownNodes + 'static) {
        let _ = self.nodes.set(Box::new(nodes));
    }

    /// The nodes as they are now.
    pub fn nodes(&self) -> Vec<NodePart> {
        self.nodes.get().map_or_else(Vec::new, |nodes| nodes.states())
    }

    /// What nodes did for this server, and it for them.
    pub fn node_totals(&self) -> NodeTotals {
        self.nodes.get().map_or_else(NodeTotals::default, |nodes| nodes.totals())
    }

    /// Prompts that nodes read for this server now; how long they are is their owners' business.
    pub fn handoffs(&self) -> Vec<Handoff> {
        let mut now = self.nodes.get().map_or_else(Vec::new, |nodes| nodes.handoffs());
        if !self.shows_sizes() {
            now.iter_mut().for_each(|one| (one.positions, one.rows, one.bytes) = (0, 0, 0));
        }
        now
    }

    /// Remembers how things stand, once there is a model.
    pub fn sample(&self) {
        if let Some(loaded) = self.loaded.get() {
            let metrics = &loaded.metrics;
            loaded.board.sample(&loaded.backend.snapshot(), &metrics.clocks, metrics.cancelled.get());
        }
    }

    /// The packs, or 400 if the server runs without.
    pub fn packs(&self) -> Result<&Arc<Packs>, ApiError> {
        self.loaded()?;
        self.packs.get().ok_or_else(ApiError::no_packs)
    }

    /// The engine's state, with what is known of packs. Their store may have to be asked over a network.
    pub async fn snapshot(&self, loaded: &Loaded) -> Snapshot {
        let mut now = loaded.backend.snapshot();
        if let Some(packs) = self.packs.get().cloned()
            && let Ok(packs) = spawn_blocking(move || packs.figures()).await
        {
            now.pack_refusals = packs.refusals;
            now.pack_unlike = packs.unlike;
            now.packs = packs.count;
            now.pack_bytes = packs.held_bytes;
        }
        now
    }

    /// Whether everybody who may ask may know what others' requests are like.
    pub fn shows_sizes(&self) -> bool {
        self.keys().is_empty() || self.config.shared_cache
    }

    /// The state without what it says of single requests, where those are not everybody's: how long a prompt is and how
    /// much of it was cached is its owner's business.
    pub fn without_sizes(&self, mut now: Snapshot) -> Snapshot {
        if !self.shows_sizes() {
            for slot in &mut now.slots {
                *slot = Slot { id: slot.id, busy: slot.busy, ..Slot::default() };
            }
        }
        now
    }

    /// The model, or 503 while it loads, once the server stops and once the device is lost.
    pub fn loaded(&self) -> Result<&Arc<Loaded>, ApiError> {
        if self.stopping.load(Ordering::Relaxed) {
            return Err(ApiError::unavailable("The server is stopping"));
        }
        let loaded = self.loaded.get().ok_or_else(|| ApiError::unavailable("The model is being loaded"))?;
        match loaded.backend.lost() {
            Some(reason) => Err(ApiError::unavailable(reason)),
            None => Ok(loaded),
        }
    }

    /// The model, if it is loaded, also while stopping.
    pub fn loaded_if_any(&self) -> Option<&Arc<Loaded>> {
        self.loaded.get()
    }

    /// The accepted keys.
    pub fn keys(&self) -> Arc<Keys> {
        Arc::clone(&self.keys.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Accepts these keys from now on.
    pub(crate) fn set_keys(&self, keys: Keys) {
        *self.keys.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(keys);
    }

    /// The memory for bodies.
    pub(crate) fn bodies(&self) -> &BodyBudget {
        &self.bodies
    }

    /// Where requests are worked on, while the server runs.
    pub(crate) fn work_room(&self) -> Option<Handle> {
        self.work_room.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Has requests worked on there.
    pub(crate) fn set_work_room(&self, room: Option<Handle>) {
        *self.work_room.write().unwrap_or_else(PoisonError::into_inner) = room;
    }

    /// Whether no new requests are taken any more.
    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// Takes no new requests from now on.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::Relaxed);
    }

    /// A new identifier such as `chatcmpl-5f0c…`: unique within the process and not to be guessed.
    pub fn new_id(&self, prefix: &str) -> String {
        format!(
            "{prefix}{:016x}{:08x}",
            self.random_u64(),
            self.counter.fetch_add(1, Ordering::Relaxed) as u32
        )
    }

    /// A random number; used for identifiers and for seeds that the client did not choose.
    pub fn random_u64(&self) -> u64 {
        let mut bytes = [0; 8];
        if self.random.fill(&mut bytes).is_err() {
            // Without the system's generator identifiers stay unique through the counter.
            return unix_seconds().wrapping_mul(0x9e37_79b9_7f4a_7c15);
        }
        u64::from_le_bytes(bytes)
    }
}

/// Seconds since 1970.
pub fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs())
}
