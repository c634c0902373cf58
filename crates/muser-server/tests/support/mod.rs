//! A server in this process on a loopback port, a scripted engine behind it, and a plain HTTP client that shows every
//! byte. The text side is the real one, with the vocabulary and template of the bundled model.

#![allow(
    dead_code,
    unreachable_pub,
    unused_imports,
    reason = "each test file is a crate that uses its own part"
)]

pub mod client;
pub mod script;
pub mod tiny;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use muser_gguf::GgufFile;
use muser_server::text::TextPipeline;
use muser_server::{ModelFacts, Server, ServerConfig, SharedApp};
use tokio::sync::oneshot;

pub use client::{Answer, get, post, request};
pub use script::{Script, Scripted};

/// Context of the scripted engine.
pub const CONTEXT: usize = 4096;
/// Name of the model.
pub const MODEL: &str = "muse-tiny";

/// The bundled model.
pub fn model_path() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../models/muse-tiny-Q4_K_M.gguf")
}

/// The text side of the bundled model.
pub fn text() -> TextPipeline {
    let file = GgufFile::open(model_path()).expect("the bundled model opens");
    TextPipeline::from_gguf(&file).expect("its vocabulary is whole")
}

/// Facts about it.
pub fn facts() -> ModelFacts {
    ModelFacts { name: MODEL.into(), context_tokens: CONTEXT, hidden: 512, ..ModelFacts::default() }
}

/// A running server.
pub struct Running {
    /// Where it listens.
    pub address: SocketAddr,
    /// Its state.
    pub app: SharedApp,
    stop: Option<oneshot::Sender<()>>,
    task: Option<tokio::task::JoinHandle<()>>,
}

impl Running {
    /// Starts a server without a model.
    pub async fn empty(config: ServerConfig) -> Self {
        let address = SocketAddr::from(([127, 0, 0, 1], 0));
        let server = Server::bind(ServerConfig { address, ..config }).await.expect("binds");
        let (stop, stopped) = oneshot::channel();
        let (address, app) = (server.address(), server.app());
        let task = tokio::spawn(server.run(async {
            let _ = stopped.await;
        }));
        Self { address, app, stop: Some(stop), task: Some(task) }
    }

    /// Starts a server over a scripted engine.
    pub async fn scripted(config: ServerConfig, engine: Scripted) -> Self {
        let running = Self::empty(config).await;
        // As with a real engine, the server knows of the context what the engine does.
        let facts = ModelFacts { context_tokens: engine.context, ..facts() };
        running.app.load(facts, text(), Arc::new(engine));
        running
    }

    /// Starts a server that always answers with `output`.
    pub async fn saying(output: &str) -> Self {
        let output = output.to_owned();
        let engine = Scripted::new(move |_| Script::saying(&output));
        Self::scripted(ServerConfig::default(), engine).await
    }

    /// Tells the server to stop and waits until it has.
    pub async fn stop(mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        if let Some(task) = self.task.take() {
            task.await.expect("the server ends well");
        }
    }
}
