//! `muser node serve`: an engine that reads prompts for other nodes and does nothing else. `muser node test`: what a node is worth.

use std::io::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use muser_engine::{EngineConfig, EngineHandle, Shutdown};
use muser_handoff::{Node, PeerState, Peers as _, Registry, visit};
use muser_node::{CanaryError, CanaryReport, canary};

use super::serve::asked_to_stop;
use crate::cli::{
    CompanionChoice, DraftArgs, ModelArgs, NodeServeArgs, NodeTestArgs, Parallel, PositionChoice,
    ProjectorArgs,
};
use crate::engine::{self, EngineParts, Started};
use crate::model_file::ModelSource;
use crate::node_notes::{Note, Notes, Ours, hex};
use crate::node_watch::canary_note;
use crate::nodes::{NodeChoice, NodeWish, Nodes};
use crate::output::{Console, HintExt as _};
use crate::packs::{self, PackFolder};

/// Longest step: nobody waits for a next token here, and long steps are the fastest.
const STEP: Duration = Duration::from_secs(2);
/// How long what is being given has when the node is told to stop.
const DRAIN: Duration = Duration::from_secs(30);

/// How long a node may take until there is a connection.
const CONNECTION: Duration = Duration::from_secs(5);

/// Prompts with pictures are not handed over.
fn no_pictures() -> ProjectorArgs {
    ProjectorArgs {
        mmproj: CompanionChoice::Off,
        image_max_tokens: 4096,
        image_positions: PositionChoice::Raster,
    }
}

/// Runs `muser node serve`.
pub fn serve(args: &NodeServeArgs, console: &Console) -> anyhow::Result<()> {
    if let Err(error) = muser_pack::keep_out_of_dumps() {
        tracing::warn!(%error, "a crash may write prompts and keys into a core file");
    }
    let source = ModelSource::choose(args.model.model.as_deref(), console)?;
    console.note(format!("loading {}", source.label()));
    let model = source.load()?;
    let projector = no_pictures();
    let parts = EngineParts {
        model: &args.model,
        draft: &args.draft,
        projector: &projector,
        packs: args.packs.clone().map(|dir| (PackFolder::from_flag(dir), &args.pack_store)),
        nodes: NodeWish { listen: Some(args.node_listen), serves_alone: true, ..NodeWish::default() },
        parallel: args.parallel,
        itl_target: None,
        measure_memory: false,
        config: EngineConfig {
            kv_bytes: args.kv_mib.map(|mebibytes| mebibytes << 20),
            prefill_step: STEP,
            ..EngineConfig::default()
        },
    };
    let Started { engine, packs, nodes, draft, .. } =
        engine::start(&model, &source, parts, console).with_context(|| source.label())?;
    draft.passed_over.into_iter().for_each(|reason| console.warning(reason));
    console.note("ready; Ctrl-C ends it");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(asked_to_stop());
    if let Some(nodes) = &nodes {
        nodes.drain();
        let until = Instant::now() + DRAIN;
        while nodes.going() > 0 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    if let Some(packs) = packs {
        packs.flush(packs::FLUSH_LIMIT);
    }
    drop(nodes);
    engine.shut_down(Shutdown::Cancel);
    engine.join(Duration::from_secs(2));
    Ok(())
}

/// What a comparison with a node has shown.
struct Shown {
    report: CanaryReport,
    round_trip: Option<Duration>,
}

/// Loads the model, has a node read what is read here, too, and keeps what that has shown.
fn prove(name: &str, model: &ModelArgs, draft: &DraftArgs, console: &Console) -> anyhow::Result<Shown> {
    let source = ModelSource::choose(model.model.as_deref(), console)?;
    let loaded = source.load()?;
    let projector = no_pictures();
    let parts = EngineParts {
        model,
        draft,
        projector: &projector,
        packs: None,
        nodes: NodeWish { use_of: NodeChoice::Named(vec![name.to_owned()]), ..NodeWish::default() },
        parallel: Parallel::Fixed(1),
        itl_target: None,
        measure_memory: false,
        config: EngineConfig::default(),
    };
    let Started { engine, nodes, .. } =
        engine::start(&loaded, &source, parts, console).with_context(|| source.label())?;
    let nodes = nodes.ok_or_else(|| anyhow!("the node of this process did not start"))?;
    let shown = compare(name, &nodes, &engine);
    drop(nodes);
    engine.shut_down(Shutdown::Cancel);
    shown
}

fn compare(name: &str, nodes: &Nodes, engine: &EngineHandle) -> anyhow::Result<Shown> {
    let state = connected(nodes.node(), name);
    let hello = state.as_ref().filter(|peer| peer.connected).and_then(|peer| peer.hello.clone());
    let (Some(state), Some(hello)) = (&state, hello) else {
        let fault = state.and_then(|peer| peer.last_fault).unwrap_or_else(|| "no connection".into());
        return Err(anyhow!("{name}: {fault}")).hint("`muser node list` says how it is reached");
    };
    if let Some(differs) = Ours::of(nodes.facts()).difference(&hello) {
        return Err(anyhow!("{name} is {differs}"));
    }
    let found = canary(&**nodes.node(), name, nodes.facts(), engine);
    let unlike = match &found {
        Ok(_) => None,
        Err(error @ CanaryError::Unlike { .. }) => Some(error.to_string()),
        Err(_) => {
            return Err(found.err().map_or_else(|| anyhow!("no canary"), Into::into))
                .context(name.to_owned());
        }
    };
    let note = canary_note(&hello, &hex(nodes.facts().identity), unlike.is_none(), unlike.clone());
    Notes::update(nodes.home(), |notes| notes.of(name, state.peer.key).canary = Some(note))?;
    match found {
        Ok(report) => Ok(Shown { report, round_trip: state.round_trip }),
        Err(error) => Err(anyhow!("{name} is put aside: {error}"))
            .hint(format!("it is not asked before `muser node test {name}` finds equal bits")),
    }
}

/// The node once there is a connection: it may have been made known to it a moment ago.
fn connected(node: &Node, name: &str) -> Option<PeerState> {
    let until = Instant::now() + CONNECTION;
    loop {
        let state = node.list().into_iter().find(|peer| *peer.peer.name == *name);
        let is_there = state.as_ref().is_some_and(|peer| peer.connected && peer.hello.is_some());
        if is_there || Instant::now() >= until {
            return state;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

impl Shown {
    fn line(&self, name: &str) -> String {
        let CanaryReport { there, here, bytes } = self.report;
        format!(
            "{name}: every byte of 600 positions is equal; {:.2} s there with {:.1} MB on the way, {:.2} s here",
            there.as_secs_f64(),
            bytes as f64 / 1e6,
            here.as_secs_f64()
        )
    }
}

/// Runs `muser node test`.
pub fn test(args: &NodeTestArgs, console: &Console) -> anyhow::Result<()> {
    let shown = prove(&args.name, &args.model, &args.draft, console)?;
    let mut out = std::io::stdout().lock();
    if args.json {
        let value = serde_json::json!({
            "name": args.name,
            "equal": true,
            "there_seconds": shown.report.there.as_secs_f64(),
            "here_seconds": shown.report.here.as_secs_f64(),
            "bytes": shown.report.bytes,
            "round_trip_ms": shown.round_trip.map(|trip| trip.as_secs_f64() * 1e3),
        });
        writeln!(out, "{value}")?;
    } else {
        writeln!(out, "{}", shown.line(&args.name))?;
    }
    Ok(())
}

/// The canary of `muser node add`: nodes that read no prompts for this one have none, and one that cannot be shown to be like
/// this one now is known all the same.
pub fn prove_added(
    name: &str,
    home: &Path,
    model: &ModelArgs,
    draft: &DraftArgs,
    console: &Console,
) -> anyhow::Result<()> {
    let entry = Registry::read(home)?.nodes.into_iter().find(|entry| entry.name == name);
    let Some(entry) = entry else { return Ok(()) };
    let runtime = super::node_list::runtime()?;
    let until = Instant::now() + CONNECTION;
    // It looks once a second who it knows.
    let said = loop {
        let said = runtime.block_on(visit(home, &entry, CONNECTION));
        if said.is_ok() || Instant::now() >= until {
            break said;
        }
        std::thread::sleep(Duration::from_millis(100));
    };
    match said {
        Ok(visit) if !visit.hello.serves_prefill => {
            console.note(format!("{name} reads no prompts for this node"));
            return Ok(());
        }
        Ok(_) => {}
        Err(error) => {
            console.warning(format!("{error}; `muser node test {name}` compares its bits with this node's"));
            return Ok(());
        }
    }
    match prove(name, model, draft, console) {
        Ok(shown) => {
            console.note(shown.line(name));
            Ok(())
        }
        Err(error) if Notes::read(home).note(&entry).is_some_and(Note::is_aside) => Err(error),
        Err(error) => {
            console.warning(format!("{error:#}; `muser node test {name} --model FILE` compares the two"));
            Ok(())
        }
    }
}
