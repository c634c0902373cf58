//! `muser node serve`: an engine that reads prompts for other nodes and does nothing else. `muser node test`: what a node is worth.

use std::io::Write as _;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use muser_engine::{EngineConfig, Shutdown};
use muser_handoff::Peers as _;
use muser_node::canary;

use super::serve::asked_to_stop;
use crate::cli::{CompanionChoice, NodeServeArgs, NodeTestArgs, Parallel, PositionChoice, ProjectorArgs};
use crate::engine::{self, EngineParts, Started};
use crate::model_file::ModelSource;
use crate::nodes::{NodeChoice, NodeWish};
use crate::output::{Console, HintExt as _};
use crate::packs::{self, PackFolder};

/// Longest step: nobody waits for a next token here, and long steps are the fastest.
const STEP: Duration = Duration::from_secs(2);
/// How long what is being given has when the node is told to stop.
const DRAIN: Duration = Duration::from_secs(30);

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
        let until = std::time::Instant::now() + DRAIN;
        while nodes.going() > 0 && std::time::Instant::now() < until {
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

/// Runs `muser node test`.
pub fn test(args: &NodeTestArgs, console: &Console) -> anyhow::Result<()> {
    let source = ModelSource::choose(args.model.model.as_deref(), console)?;
    let model = source.load()?;
    let projector = no_pictures();
    let parts = EngineParts {
        model: &args.model,
        draft: &args.draft,
        projector: &projector,
        packs: None,
        nodes: NodeWish { use_of: NodeChoice::Named(vec![args.name.clone()]), ..NodeWish::default() },
        parallel: Parallel::Fixed(1),
        itl_target: None,
        measure_memory: false,
        config: EngineConfig::default(),
    };
    let Started { engine, nodes, .. } =
        engine::start(&model, &source, parts, console).with_context(|| source.label())?;
    let nodes = nodes.ok_or_else(|| anyhow!("the node of this process did not start"))?;
    let state = nodes.node().list().into_iter().find(|peer| *peer.peer.name == *args.name);
    let hello = state.as_ref().filter(|peer| peer.connected).and_then(|peer| peer.hello.clone());
    let Some(hello) = hello else {
        let fault = state.and_then(|peer| peer.last_fault).unwrap_or_else(|| "no connection".into());
        return Err(anyhow!("{}: {fault}", args.name)).hint("`muser node list` says how it is reached");
    };
    if let muser_handoff::Fit::Unlike { part, ours, theirs } = muser_handoff::Fit::of(nodes.facts(), &hello) {
        let sides = if ours.is_empty() { String::new() } else { format!(": here {ours}, there {theirs}") };
        return Err(anyhow!("{} is unlike this node in its {part}{sides}", args.name))
            .hint("both must have the same model file and compute it by the same route");
    }
    let report =
        canary(&**nodes.node(), &args.name, nodes.facts(), &engine).with_context(|| args.name.clone())?;
    let round_trip = state.and_then(|peer| peer.round_trip).map(|trip| trip.as_secs_f64() * 1e3);
    let seconds = |time: Duration| time.as_secs_f64();
    let mut out = std::io::stdout().lock();
    if args.json {
        let value = serde_json::json!({
            "name": args.name,
            "equal": true,
            "there_seconds": seconds(report.there),
            "here_seconds": seconds(report.here),
            "bytes": report.bytes,
            "round_trip_ms": round_trip,
        });
        writeln!(out, "{value}")?;
    } else {
        writeln!(
            out,
            "{}: every byte of 600 positions is equal; {:.2} s there with {:.1} MB on the way, {:.2} s here",
            args.name,
            seconds(report.there),
            report.bytes as f64 / 1e6,
            seconds(report.here)
        )?;
    }
    drop(nodes);
    engine.shut_down(Shutdown::Cancel);
    Ok(())
}
