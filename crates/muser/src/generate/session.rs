//! A model ready to answer: weights bound, tokenizer built, engine running.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use muser_engine::{Engine, EngineConfig, EngineHandle};
use muser_model::Model;
use muser_text::{ChatTemplate, Tokenizer};

use crate::cli::ModelArgs;
use crate::executor;
use crate::model_file::ModelSource;
use crate::output::{Console, HintExt as _};

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
    /// What messages call the model.
    pub label: String,
    /// Time from the decision which model to the engine being ready.
    pub load_time: Duration,
}

impl Session {
    /// Loads the model that the arguments name and starts an engine on it.
    pub fn open(args: &ModelArgs, console: &Console) -> anyhow::Result<Self> {
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
            let engine = start_engine(model, args);
            let text = text.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            (text, engine)
        });
        let (tokenizer, template) = text.with_context(|| source.label())?;
        let engine = engine.with_context(|| source.label())?;
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
            label: source.label(),
            load_time: started.elapsed(),
        })
    }
}

/// Weights from this size on take long enough to load that silence would look like a hang.
const SLOW_LOAD_BYTES: u64 = 1 << 30;

fn start_engine(model: Model, args: &ModelArgs) -> anyhow::Result<EngineHandle> {
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
    let executor = executor::build(model, args, None)?;
    let config = EngineConfig { parallel: 1, context: Some(context), ..EngineConfig::default() };
    Engine::spawn(executor, geometry, config).hint("a smaller --ctx needs less memory")
}
