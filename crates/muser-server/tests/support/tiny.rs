//! The bundled model on the CPU behind a server in this process.

use std::sync::{Arc, OnceLock};

use muser_cpu::{CpuExecutor, CpuOptions};
use muser_engine::{Engine, EngineConfig, EngineHandle};
use muser_model::Model;
use muser_server::{LiveEngine, ModelFacts, ServerConfig};

use super::Running;

/// Starts an engine on the bundled model.
pub fn spawn(config: EngineConfig) -> (EngineHandle, ModelFacts) {
    let model = Model::load(super::model_path()).expect("the bundled model loads");
    let geometry = model.geometry.clone();
    let facts = ModelFacts::of_file("muse-tiny".into(), &model.file, geometry.context, geometry.hidden);
    let executor = CpuExecutor::new(model, CpuOptions::default()).expect("the CPU computes");
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
