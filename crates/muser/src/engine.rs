//! Starting an engine on a model, for `muser run`, `chat` and `serve` alike: executor, draft, projector, packs, engine, in the
//! order in which they depend on each other.

use std::time::Duration;

use muser_backend::Executor;
use muser_engine::{Engine, EngineConfig, EngineHandle, KvConnector, parallel_that_fits};
use muser_kv_connector::PackUse;
use muser_model::Model;

use crate::cli::{DEFAULT_CONTEXT, DraftArgs, ModelArgs, PackStoreArgs, Parallel, ProjectorArgs};
use crate::draft;
use crate::executor;
use crate::model_file::ModelSource;
use crate::nodes::{self, NodeWish, Nodes};
use crate::output::{Console, HintExt as _, usage_error};
use crate::packs::{self, PackFolder};
use crate::projector;

/// Longest time to the next token that the reading of another prompt may cause on a card.
const CARD_ITL_TARGET: Duration = Duration::from_millis(50);

/// What an engine is started on.
pub struct EngineParts<'a> {
    /// Backend, threads, context.
    pub model: &'a ModelArgs,
    /// Which draft, how long.
    pub draft: &'a DraftArgs,
    /// Which projector.
    pub projector: &'a ProjectorArgs,
    /// Where prompts and answers are kept, if they are.
    pub packs: Option<(PackFolder, &'a PackStoreArgs)>,
    /// Who reads prompts for whom.
    pub nodes: NodeWish,
    /// How many requests are computed together.
    pub parallel: Parallel,
    /// Longest time to the next token that the reading of another prompt may cause, in ms; `None`: what suits the device.
    pub itl_target: Option<u32>,
    /// Measure how fast a card's memory can be read, before anything is in the way.
    pub measure_memory: bool,
    /// Everything else; what stands above, context and identity are filled in.
    pub config: EngineConfig,
}

/// An engine and what came of its parts.
pub struct Started {
    /// The engine.
    pub engine: EngineHandle,
    /// Its packs.
    pub packs: Option<PackUse>,
    /// Its node, if it has one.
    pub nodes: Option<Nodes>,
    /// The rate of the memory that holds the weights, if it was wanted.
    pub memory: Option<MemoryRate>,
    /// What became of the draft.
    pub draft: draft::Attached,
    /// What became of the projector.
    pub projector: projector::Attached,
}

/// How fast the memory that holds the weights can be read.
#[derive(Clone, Copy, Debug)]
pub enum MemoryRate {
    /// A card's, in bytes per second; `None`: it could not be measured.
    OfCard(Option<f64>),
    /// The host's, which nobody has measured yet.
    OfHost,
}

impl MemoryRate {
    fn of(executor: &dyn Executor) -> Self {
        match (executor.info().kv_room, executor.read_bandwidth()) {
            (None, Ok(None)) => Self::OfHost,
            (_, Ok(rate)) => Self::OfCard(rate),
            (_, Err(error)) => {
                tracing::warn!(%error, "the card's memory could not be measured");
                Self::OfCard(None)
            }
        }
    }
}

/// Starts an engine on `model`, which `source` has loaded.
pub fn start(
    model: &Model,
    source: &ModelSource,
    parts: EngineParts<'_>,
    console: &Console,
) -> anyhow::Result<Started> {
    let context = context(parts.model.ctx, model.geometry.context)?;
    // The norms are all that a copy copies; the weights lie in the map.
    let parallel = match parts.parallel {
        Parallel::Fixed(parallel) => Some(parallel),
        Parallel::Auto => None,
    };
    let mut executor = executor::build_for(model.clone(), parts.model, parallel, console)?;
    // Before packs: what a block holds depends on the draft.
    let draft = draft::attach(&parts.draft.draft, source, model, executor.as_mut())?;
    let projector = projector::attach(parts.projector, source, executor.as_mut());
    let memory = parts.measure_memory.then(|| MemoryRate::of(executor.as_ref()));
    let mut config = EngineConfig {
        context: Some(context),
        draft_length: parts.draft.draft_len,
        draft_sampling: parts.draft.draft_sampling.into(),
        ..parts.config
    };
    let info = executor.info();
    config.parallel = match parts.parallel {
        Parallel::Fixed(parallel) => parallel,
        Parallel::Auto => parallel_that_fits(&model.geometry, info, &config, context),
    };
    config.mixed_step = match (parts.itl_target, info.kv_room) {
        (Some(target), _) => Duration::from_millis(target.into()),
        // Where a processor has a part even a token takes longer.
        (None, Some(_)) if info.prompt_rows == 0 => CARD_ITL_TARGET,
        (None, _) => config.mixed_step,
    };
    let (mut prefixes, mut packs): (Option<Box<dyn KvConnector>>, _) = (None, None);
    if let Some((folder, args)) = parts.packs {
        let opened = packs::open(&folder, args, model, draft.draft.as_ref(), executor.info(), console)?;
        (prefixes, packs) = (Some(opened.source), Some(opened.handle));
        config.identity = opened.identity;
    }
    let mut nodes = None;
    if !parts.nodes.is_none() {
        let info = executor.info();
        let (source, opened) =
            nodes::open(&parts.nodes, model, draft.draft.as_ref(), info, context, prefixes, console)?;
        (prefixes, nodes) = (source, Some(opened));
    }
    let hint = match config.parallel {
        1 => "a smaller --ctx needs less memory",
        _ => "a smaller --ctx or --parallel needs less memory",
    };
    let engine = Engine::spawn_with(executor, model.geometry.clone(), config, prefixes).hint(hint)?;
    if let Some(nodes) = &mut nodes {
        nodes.attach(&engine)?;
    }
    Ok(Started { engine, packs, nodes, memory, draft, projector })
}

/// Positions of a sequence.
fn context(asked: Option<u32>, most: usize) -> anyhow::Result<usize> {
    match asked {
        Some(asked) if asked as usize > most => {
            Err(usage_error(format!("--ctx {asked} is more than the model's context of {most}")))
        }
        Some(asked) => Ok(asked as usize),
        None => Ok(most.min(DEFAULT_CONTEXT)),
    }
}

#[cfg(test)]
mod tests {
    use super::context;

    #[test]
    fn contexts_up_to_the_models_own() {
        assert_eq!(context(None, 4096).expect("the model's"), 4096);
        assert_eq!(context(None, 1 << 20).expect("ours"), 32_768);
        assert_eq!(context(Some(1 << 20), 1 << 20).expect("all of it"), 1 << 20);
        let refused = context(Some(4097), 4096).expect_err("one more").to_string();
        assert_eq!(refused, "--ctx 4097 is more than the model's context of 4096");
    }
}
