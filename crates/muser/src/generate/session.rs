//! A model ready to answer: weights bound, tokenizer built, engine running.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use muser_engine::{EngineConfig, EngineHandle};
use muser_kv_connector::PackUse;
use muser_server::pictures::Reader;
use muser_text::{ChatTemplate, Tokenizer};

use crate::cli::{DraftArgs, ModelArgs, PackStoreArgs, Parallel, ProjectorArgs};
use crate::engine::{self, EngineParts, Started};
use crate::model_file::ModelSource;
use crate::nodes::{NodeWish, Nodes};
use crate::output::Console;
use crate::packs::{self, PackFolder};

/// A loaded model and its engine. One request at a time; what one turn read, the next does not read again.
pub struct Session {
    /// Text to ids and back.
    pub tokenizer: Arc<Tokenizer>,
    /// The model's chat template, if it has one.
    pub template: Option<ChatTemplate>,
    /// The engine.
    pub engine: EngineHandle,
    /// Where prompts and answers are kept, if they are.
    pub packs: Option<PackUse>,
    /// Its node, if it hands prompts to others.
    pub nodes: Option<Nodes>,
    /// What messages call the model.
    pub label: String,
    /// What messages call its draft, if it has one.
    pub draft: Option<String>,
    /// What makes images into what the model reads, or why nothing does.
    pub sight: Result<Reader, String>,
    /// Time from the decision which model to the engine being ready.
    pub load_time: Duration,
}

impl Session {
    /// Loads the model that the arguments name, and its draft, and starts an engine on it, with packs if a folder for them is
    /// given.
    pub fn open(
        args: &ModelArgs,
        drafting: &DraftArgs,
        seeing: &ProjectorArgs,
        packs: Option<(PackFolder, &PackStoreArgs)>,
        nodes: NodeWish,
        console: &Console,
    ) -> anyhow::Result<Self> {
        let source = ModelSource::choose(args.model.as_deref(), console)?;
        let started = Instant::now();
        let model = source.load()?;
        let geometry = model.geometry.clone();
        let file = Arc::clone(&model.file);
        let bytes: u64 = file.tensors().iter().map(|tensor| tensor.len as u64).sum();
        if bytes > SLOW_LOAD_BYTES {
            console.note(format!("loading {} ({:.1} GB)", source.label(), bytes as f64 / 1e9));
        }
        // Building the tables of 200,000 tokens takes as long as setting up the executor, so they share the time.
        let (text, engine) = std::thread::scope(|scope| {
            let text = scope.spawn(|| -> anyhow::Result<_> {
                Ok((Tokenizer::from_gguf(&file)?, ChatTemplate::from_gguf(&file)?))
            });
            let parts = EngineParts {
                model: args,
                draft: drafting,
                projector: seeing,
                packs,
                nodes,
                parallel: Parallel::Fixed(1),
                itl_target: None,
                measure_memory: false,
                config: EngineConfig::default(),
            };
            let engine = engine::start(&model, &source, parts, console);
            let text = text.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            (text, engine)
        });
        let (tokenizer, template) = text.with_context(|| source.label())?;
        let Started { engine, packs, nodes, draft, projector, .. } =
            engine.with_context(|| source.label())?;
        let sight = match &engine.limits().tower {
            Some(tower) => Ok(Reader::new(tower.clone(), seeing.image_max_tokens)),
            None => Err(projector
                .fault
                .unwrap_or_else(|| format!("{}: no projector belongs to this model", source.label()))),
        };
        draft.passed_over.into_iter().for_each(|reason| console.warning(reason));
        anyhow::ensure!(
            tokenizer.vocab_size() == geometry.vocab,
            "{}: the tokenizer has {} tokens, the weights have {}",
            source.label(),
            tokenizer.vocab_size(),
            geometry.vocab
        );
        Ok(Self {
            tokenizer: Arc::new(tokenizer),
            template,
            engine,
            packs,
            nodes,
            label: source.label(),
            draft: draft.label,
            sight,
            load_time: started.elapsed(),
        })
    }

    /// Waits for what is being published and says what went wrong with it.
    pub fn keep(&self, console: &Console) {
        if let Some(nodes) = &self.nodes {
            nodes.remarks(console);
        }
        let Some(packs) = &self.packs else { return };
        if !packs.flush(packs::FLUSH_LIMIT) {
            console.warning("the packs were not written in time: the next run reads more than it had to");
        }
        if packs.figures().failed > 0 {
            console.warning("something was not kept: the pack store failed or is full (-v says more)");
        }
    }
}

/// Weights from this size on take long enough to load that silence would look like a hang.
const SLOW_LOAD_BYTES: u64 = 1 << 30;
