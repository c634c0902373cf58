//! A model ready to answer: weights bound, tokenizer built, engine running.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use muser_engine::{Engine, EngineConfig, EngineHandle, PrefixSource};
use muser_model::Model;
use muser_prefix::PackUse;
use muser_server::pictures::Reader;
use muser_text::{ChatTemplate, Tokenizer};

use crate::cli::{DraftArgs, ModelArgs, PackStoreArgs, ProjectorArgs};
use crate::draft::{self, Attached};
use crate::executor;
use crate::model_file::ModelSource;
use crate::output::{Console, HintExt as _};
use crate::packs::{self, PackFolder, Packs};
use crate::projector;

/// Positions that prompt and answer may have together unless `--ctx` says otherwise: keys and values of the released model
/// then take half a gigabyte.
const DEFAULT_CONTEXT: usize = 32_768;

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
            let engine = start_engine(&model, &source, args, (drafting, seeing), packs, console);
            let text = text.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            (text, engine)
        });
        let (tokenizer, template) = text.with_context(|| source.label())?;
        let (engine, packs, Attached { label: draft, passed_over, .. }, blind) =
            engine.with_context(|| source.label())?;
        let sight =
            match &engine.limits().tower {
                Some(tower) => Ok(Reader::new(tower.clone(), seeing.image_max_tokens)),
                None => Err(blind
                    .unwrap_or_else(|| format!("{}: no projector belongs to this model", source.label()))),
            };
        passed_over.into_iter().for_each(|reason| console.warning(reason));
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
            label: source.label(),
            draft,
            sight,
            load_time: started.elapsed(),
        })
    }

    /// Waits for what is being published and says what went wrong with it.
    pub fn keep(&self, console: &Console) {
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

fn start_engine(
    model: &Model,
    source: &ModelSource,
    args: &ModelArgs,
    (drafting, seeing): (&DraftArgs, &ProjectorArgs),
    packs: Option<(PackFolder, &PackStoreArgs)>,
    console: &Console,
) -> anyhow::Result<(EngineHandle, Option<PackUse>, Attached, Option<String>)> {
    let geometry = model.geometry.clone();
    let context = match args.ctx {
        Some(asked) if asked as usize > geometry.context => {
            return Err(crate::output::usage_error(format!(
                "--ctx {asked} is more than the model's context of {}",
                geometry.context
            )));
        }
        Some(asked) => asked as usize,
        None => geometry.context.min(DEFAULT_CONTEXT),
    };
    // The norms are all that a copy copies; the weights lie in the map.
    let mut executor = executor::build(model.clone(), args, console)?;
    // Before packs: what a block holds depends on the draft.
    let attached = draft::attach(&drafting.draft, source, model, executor.as_mut())?;
    let blind = projector::attach(seeing, source, executor.as_mut()).fault;
    let mut config = EngineConfig {
        parallel: 1,
        context: Some(context),
        draft_length: drafting.draft_len,
        draft_sampling: drafting.draft_sampling.into(),
        ..EngineConfig::default()
    };
    let (mut prefixes, mut handle): (Option<Box<dyn PrefixSource>>, _) = (None, None);
    if let Some((folder, args)) = packs {
        let opened = packs::open(&folder, args, model, attached.draft.as_ref(), executor.info(), console)?;
        let Packs { source: for_engine, identity, handle: for_us } = opened;
        (prefixes, handle) = (Some(for_engine), Some(for_us));
        config.identity = identity;
    }
    let engine =
        Engine::spawn_with(executor, geometry, config, prefixes).hint("a smaller --ctx needs less memory")?;
    Ok((engine, handle, attached, blind))
}
