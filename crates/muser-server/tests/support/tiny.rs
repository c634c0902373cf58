//! The bundled model on the CPU behind a server in this process.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use muser_backend::arith::vision::PositionRule;
use muser_backend::{DraftExecutor as _, Executor as _, TowerExecutor as _};
use muser_cpu::{CpuExecutor, CpuOptions};
use muser_engine::{Engine, EngineConfig, EngineHandle};
use muser_kv_connector::{PackOptions, PackSource, identity_of, weights_root};
use muser_model::{Draft, Model, Projector};
use muser_pack::{KeyFile, Library, LibraryOptions, store::DirStore};
use muser_server::{LiveEngine, ModelFacts, Packs, ServerConfig};

use super::Running;

/// Starts an engine on the bundled model.
pub fn spawn(config: EngineConfig) -> (EngineHandle, ModelFacts) {
    spawn_from(&super::model_path(), config)
}

/// Starts an engine on a copy of the bundled model.
pub fn spawn_from(path: &Path, config: EngineConfig) -> (EngineHandle, ModelFacts) {
    let model = Model::load(path).expect("the model loads");
    let geometry = model.geometry.clone();
    let facts = ModelFacts::of_file("muse-tiny".into(), &model.file, geometry.context, geometry.hidden);
    let executor = CpuExecutor::new(model, CpuOptions::default()).expect("the CPU computes");
    (Engine::spawn(Box::new(executor), geometry, config).expect("the engine starts"), facts)
}

/// An engine that keeps packs in a folder, with a key file beside them, and what a server needs of them.
pub fn spawn_with_packs(folder: &Path, mut config: EngineConfig) -> (EngineHandle, ModelFacts, Packs) {
    let model = Model::load(super::model_path()).expect("the bundled model loads");
    let geometry = model.geometry.clone();
    let facts = ModelFacts::of_file("muse-tiny".into(), &model.file, geometry.context, geometry.hidden);
    let mut executor = CpuExecutor::new(model.clone(), CpuOptions::default()).expect("the CPU computes");
    see(&mut executor);
    let keys = KeyFile::open_or_create(&folder.join("keys")).expect("a key file");
    let store = Arc::new(DirStore::open(folder.join("packs"), None).expect("a folder"));
    let library = Library::open(store, keys, LibraryOptions::default()).expect("it opens");
    let root = weights_root(&model.file, None, 1, |_| {});
    let identity = identity_of(&model, root, None, executor.info()).expect("it fits");
    let scope = library.scope(identity, "");
    config.identity = scope.digest().to_vec();
    let (source, used) = PackSource::start(library, scope, PackOptions::default()).expect("threads");
    let engine = Engine::spawn_with(Box::new(executor), geometry, config, Some(Box::new(source)));
    let packs = Packs::new(used.library().clone(), used.scope().clone(), move |time| used.flush(time));
    (engine.expect("the engine starts"), facts, packs)
}

/// An engine that drafts with the bundled draft.
pub fn spawn_drafting(config: EngineConfig) -> (EngineHandle, ModelFacts) {
    let model = Model::load(super::model_path()).expect("the bundled model loads");
    let geometry = model.geometry.clone();
    let facts = ModelFacts::of_file("muse-tiny".into(), &model.file, geometry.context, geometry.hidden);
    let mut executor = CpuExecutor::new(model, CpuOptions::default()).expect("the CPU computes");
    let draft = muser_testkit::muse_tiny_draft();
    executor.attach_draft(Draft::load(draft).expect("the bundled draft loads")).expect("it fits");
    let config = EngineConfig { draft_length: muser_engine::DraftLength::Fixed(4), ..config };
    (Engine::spawn(Box::new(executor), geometry, config).expect("the engine starts"), facts)
}

fn see(executor: &mut CpuExecutor) {
    let file = muser_testkit::muse_tiny_projector();
    let projector = Projector::load(file).expect("the bundled projector loads");
    executor.attach_projector(projector, PositionRule::Raster).expect("it fits");
}

/// An engine on the bundled model that sees with the bundled projector.
pub fn spawn_seeing(config: EngineConfig) -> (EngineHandle, ModelFacts) {
    let model = Model::load(super::model_path()).expect("the bundled model loads");
    let geometry = model.geometry.clone();
    let facts = ModelFacts::of_file("muse-tiny".into(), &model.file, geometry.context, geometry.hidden);
    let mut executor = CpuExecutor::new(model, CpuOptions::default()).expect("the CPU computes");
    see(&mut executor);
    (Engine::spawn(Box::new(executor), geometry, config).expect("the engine starts"), facts)
}

/// One engine for the whole process: it has its own thread and does not care about runtimes.
pub fn engine() -> &'static (EngineHandle, ModelFacts) {
    static ENGINE: OnceLock<(EngineHandle, ModelFacts)> = OnceLock::new();
    ENGINE.get_or_init(|| spawn(EngineConfig::default()))
}

/// A server over an engine.
pub async fn serve_with(config: ServerConfig, engine: &EngineHandle, facts: &ModelFacts) -> Running {
    let server = Running::empty(config).await;
    let device = format!("{}: {}", engine.info().backend, engine.info().device);
    server.app.load(facts.clone(), super::text(), Arc::new(LiveEngine::new(engine.clone(), device)));
    server
}

/// A server over the process's engine.
pub async fn serve() -> Running {
    let (engine, facts) = engine();
    serve_with(ServerConfig::default(), engine, facts).await
}
