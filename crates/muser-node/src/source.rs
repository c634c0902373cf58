//! The source that the engine gets.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use muser_engine::{KvConnector, PrefixExport, PrefixQuery};
use muser_handoff::{Facts, Peers};

use crate::consumer::Consumer;
use crate::nodes::NodeUse;
use crate::options::NodeOptions;
use crate::told::Told;

/// The engine's end of the nodes' use. When the engine drops it, the thread ends.
pub struct NodeSource {
    tell: Sender<Told>,
}

impl NodeSource {
    /// Starts the thread that asks and chooses. `facts` are those of the engine that gets the source.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn start(
        peers: Arc<dyn Peers>,
        facts: Facts,
        options: NodeOptions,
    ) -> std::io::Result<(Self, NodeUse)> {
        let (tell, hear): (Sender<Told>, Receiver<Told>) = channel();
        let handle = NodeUse::default();
        let mut consumer = Consumer::new(peers, facts, options, handle.clone(), tell.clone());
        std::thread::Builder::new().name("node-fetch".into()).spawn(move || {
            loop {
                let now = Instant::now();
                let until = consumer.work(now);
                let wait = until.map_or(Duration::from_mins(1), |until| until.saturating_duration_since(now));
                match hear.recv_timeout(wait) {
                    Ok(Told::Close) | Err(RecvTimeoutError::Disconnected) => break,
                    Ok(told) => consumer.take(told, Instant::now()),
                    Err(RecvTimeoutError::Timeout) => {}
                }
            }
            consumer.close();
        })?;
        Ok((Self { tell }, handle))
    }
}

impl KvConnector for NodeSource {
    fn look_up(&mut self, query: PrefixQuery) {
        let _ = self.tell.send(Told::Asked(query));
    }

    fn offer(&mut self, offer: PrefixExport) {
        drop(offer);
    }
}

impl Drop for NodeSource {
    fn drop(&mut self) {
        let _ = self.tell.send(Told::Close);
    }
}
