//! `muser serve`: the HTTP server. It listens first and loads then, so that an orchestrator sees 503 and not a refused
//! connection; Ctrl-C or SIGTERM stop it, the second one at once.

use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use muser_bench::bandwidth::Probe;
use muser_engine::{EngineConfig, EngineHandle, Shutdown};
use muser_gguf::GgufFile;
use muser_kv_connector::PackUse;
use muser_model::Geometry;
use muser_model::cost::{Cost, CostOptions};
use muser_server::dashboard::{Bandwidth, Machine};
use muser_server::text::TextPipeline;
use muser_server::{
    Limits, LiveEngine, ModelFacts, Packs, Reloader, Server, ServerConfig, SharedApp, ShutdownPolicy,
};
use tokio::signal;
use tokio::sync::oneshot;

use crate::cli::ServeArgs;
use crate::engine::{self, EngineParts, MemoryRate, Started};
use crate::model_file::{BUNDLED_NAME, ModelSource};
use crate::nodes::{NodeWish, Nodes};
use crate::output::{Console, HintExt as _, usage_error};
use crate::packs::{self, PackFolder};

/// Runs the command.
pub fn run(args: ServeArgs, console: &Console) -> anyhow::Result<()> {
    let config = config(&args)?;
    let source = ModelSource::choose(args.model.model.as_deref(), console)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let outcome = runtime.block_on(serve(args, config, source, console));
    // What still runs beside the connections (a prompt being cut into tokens) has nobody to answer to.
    runtime.shutdown_timeout(Duration::from_secs(1));
    outcome
}

async fn serve(
    args: ServeArgs,
    config: ServerConfig,
    source: ModelSource,
    console: &Console,
) -> anyhow::Result<()> {
    if let Err(error) = muser_pack::keep_out_of_dumps() {
        tracing::warn!(%error, "a crash may write prompts and keys into a core file");
    }
    let open = exposure(&config);
    let server = Server::bind(config).await?;
    let url = server.url();
    console.note(format!("listening on {url}, loading {}", source.label()));
    if let Some(open) = open {
        console.warning(open);
    }
    tokio::spawn(reload_when_asked(server.reloader(), console.clone()));
    let app = server.app();
    let (failed, failure) = oneshot::channel();
    let for_loading = console.clone();
    let loading = tokio::task::spawn_blocking(move || load(&args, &source, &app, &for_loading));
    let watcher = tokio::spawn(async move {
        match loading.await {
            Ok(Ok(engine)) => Some(engine),
            Ok(Err(error)) => {
                let _ = failed.send(error);
                None
            }
            Err(panic) => {
                let _ = failed.send(anyhow::anyhow!("loading the model failed: {panic}"));
                None
            }
        }
    });
    let mut load_error = None;
    let stop = async {
        tokio::select! {
            () = asked_to_stop() => {}
            error = failure => {
                if let Ok(error) = error {
                    load_error = Some(error);
                } else {
                    // Loaded: from now on only a signal stops the server.
                    console.note(match url.strip_prefix("unix:") {
                        Some(path) => format!("ready on the socket {path}"),
                        None => format!("ready: {url} has a page to talk to, {url}/v1 is the address for clients"),
                    });
                    asked_to_stop().await;
                }
            }
        }
    };
    let in_time = tokio::select! {
        () = server.run(stop) => true,
        () = asked_twice() => false,
    };
    if let Some(error) = load_error {
        return Err(error);
    }
    if watcher.is_finished()
        && let Ok(Some(Loaded { engine, packs, nodes })) = watcher.await
    {
        if let Some(packs) = packs.filter(|_| in_time) {
            // The engine copies out what is still to be kept, so it stops afterwards.
            let flushed = tokio::task::spawn_blocking(move || packs.flush(packs::FLUSH_LIMIT));
            tokio::select! {
                _ = flushed => {}
                () = asked_to_stop() => {}
            }
        }
        drop(nodes);
        engine.shut_down(Shutdown::Cancel);
        engine.join(Duration::from_secs(2));
    }
    Ok(())
}

/// What `--insecure` leaves open, if it does.
fn exposure(config: &ServerConfig) -> Option<&'static str> {
    let (keyed, tls) = (config.key_file.is_some(), config.tls_certificate.is_some());
    if !config.insecure || !config.reaches_others() || (keyed && tls) {
        return None;
    }
    Some(if keyed {
        "--insecure: there is no TLS, so whoever is on the way reads keys, prompts and answers"
    } else {
        "--insecure: anyone who reaches this address may use the server"
    })
}

/// Takes up changed keys and certificates at SIGHUP. What ends a process by default and means nothing here is passed over.
#[cfg(unix)]
async fn reload_when_asked(reloader: Reloader, console: Console) {
    use signal::unix::{SignalKind, signal};
    let (Ok(mut hang_up), Ok(mut first), Ok(mut second)) = (
        signal(SignalKind::hangup()),
        signal(SignalKind::user_defined1()),
        signal(SignalKind::user_defined2()),
    ) else {
        return;
    };
    loop {
        tokio::select! {
            _ = hang_up.recv() => {
                let reloader = reloader.clone();
                match tokio::task::spawn_blocking(move || reloader.reload()).await {
                    Ok(Ok(())) => console.note("SIGHUP: keys and certificate have been read again"),
                    Ok(Err(error)) => console.warning(format!("SIGHUP: all stays as it was: {error}")),
                    Err(_) => {}
                }
            }
            _ = first.recv() => {}
            _ = second.recv() => {}
        }
    }
}

#[cfg(not(unix))]
async fn reload_when_asked(_: Reloader, _: Console) {}

/// Completes at the first Ctrl-C or SIGTERM, and when the terminal that it was started from is closed.
pub(super) async fn asked_to_stop() {
    #[cfg(unix)]
    {
        let Ok(mut terminate) = signal::unix::signal(signal::unix::SignalKind::terminate()) else {
            let _ = signal::ctrl_c().await;
            return;
        };
        tokio::select! {
            _ = signal::ctrl_c() => {}
            _ = terminate.recv() => {}
            () = terminal_closed() => {}
        }
    }
    #[cfg(not(unix))]
    {
        let _ = signal::ctrl_c().await;
    }
}

/// Completes when there was a terminal at the start and is none any more. The signal that says so is the same that asks for a
/// reload, so the terminal itself is looked at.
#[cfg(unix)]
async fn terminal_closed() {
    let there = || std::fs::File::open("/dev/tty").is_ok();
    if let Ok(mut hang_up) = signal::unix::signal(signal::unix::SignalKind::hangup())
        && there()
    {
        while hang_up.recv().await.is_some() {
            if !there() {
                return;
            }
        }
    }
    std::future::pending::<()>().await;
}

/// Completes at the second: whoever asks twice does not want to wait.
async fn asked_twice() {
    asked_to_stop().await;
    asked_to_stop().await;
}

fn config(args: &ServeArgs) -> anyhow::Result<ServerConfig> {
    let shutdown = match args.drain {
        0 => ShutdownPolicy::Cancel,
        seconds => ShutdownPolicy::Finish(Duration::from_secs(u64::from(seconds))),
    };
    let place = Place::of(&args.host, args.port)?;
    let connections = args.max_connections as usize;
    let per_address = args.max_connections_per_address.map_or(connections.div_ceil(2), |most| most as usize);
    let defaults = ServerConfig::default();
    Ok(ServerConfig {
        address: place.addresses.first().copied().unwrap_or(defaults.address),
        more_addresses: place.addresses.iter().skip(1).copied().collect(),
        socket: place.socket,
        key_file: args.key_file.clone(),
        tls_certificate: args.tls_cert.clone(),
        tls_key: args.tls_key.clone(),
        insecure: args.insecure,
        shared_cache: args.shared_cache,
        allowed_hosts: args.allowed_host.clone(),
        cors_origins: args.cors_origin.clone(),
        strict_model_name: args.strict_model,
        context_shift: args.context_shift,
        limits: Limits {
            body_bytes: usize::from(args.max_body_mib) << 20,
            bodies_bytes: (args.max_bodies_mib as usize) << 20,
            connections,
            connections_per_address: per_address,
            idle_time: Duration::from_secs(u64::from(args.keep_alive)),
            default_output_tokens: args.default_max_tokens,
            image_tokens: args.projector.image_max_tokens,
            ..Limits::default()
        },
        shutdown,
        ..defaults
    })
}

/// What `--host` and `--port` mean.
#[derive(Debug, Default, PartialEq, Eq)]
struct Place {
    addresses: Vec<SocketAddr>,
    socket: Option<PathBuf>,
}

impl Place {
    fn of(host: &str, port: u16) -> anyhow::Result<Self> {
        if let Some(path) = host.strip_prefix("unix:").or_else(|| host.contains('/').then_some(host)) {
            let path = path.strip_prefix("//").unwrap_or(path);
            if path.is_empty() || host.contains("://") && !host.starts_with("unix:") {
                return Err(usage_error(format!(
                    "--host {host}: expected an address, a host name or unix:PATH"
                )));
            }
            return Ok(Self { socket: Some(path.into()), ..Self::default() });
        }
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let found = (bare, port).to_socket_addrs();
        let mut addresses: Vec<SocketAddr> = match found {
            Ok(found) => found.collect(),
            Err(error) => {
                return Err(usage_error(format!("--host {host}: no such address or host name ({error})")))
                    .hint("the port has a flag of its own, --port");
            }
        };
        // IPv4 first: it is what a bare address in a note is understood by.
        addresses.sort_by_key(SocketAddr::is_ipv6);
        addresses.dedup();
        if addresses.is_empty() {
            return Err(usage_error(format!("--host {host}: the name has no address")));
        }
        Ok(Self { addresses, socket: None })
    }
}

/// Loads the model and switches the server on.
fn load(
    args: &ServeArgs,
    source: &ModelSource,
    app: &SharedApp,
    console: &Console,
) -> anyhow::Result<Loaded> {
    let model = source.load()?;
    let geometry = &model.geometry;
    let file = Arc::clone(&model.file);
    let text = TextPipeline::from_gguf(&file).with_context(|| source.label())?;
    anyhow::ensure!(
        text.vocabulary() == geometry.vocab,
        "{}: the tokenizer has {} tokens, the weights have {}",
        source.label(),
        text.vocabulary(),
        geometry.vocab
    );
    let parts = EngineParts {
        model: &args.model,
        draft: &args.draft,
        projector: &args.projector,
        packs: (args.packs.as_os_str() != "off")
            .then(|| (PackFolder::from_flag(args.packs.clone()), &args.pack_store)),
        nodes: NodeWish {
            use_of: args.nodes.choice(),
            listen: args.node_listen,
            proves: true,
            ..NodeWish::default()
        },
        parallel: args.parallel,
        itl_target: args.itl_target,
        measure_memory: true,
        config: EngineConfig {
            kv_bytes: args.kv_mib.map(|mebibytes| mebibytes << 20),
            host_bytes: usize::try_from(args.kv_host_mib << 20).unwrap_or(usize::MAX),
            max_waiting: args.queue as usize,
            ..EngineConfig::default()
        },
    };
    let Started { engine, packs, nodes, memory, draft, projector } =
        engine::start(&model, source, parts, console).with_context(|| source.label())?;
    for reason in draft.passed_over {
        tracing::warn!("{reason}");
    }
    if let Some(draft) = draft.label {
        tracing::info!(draft, "drafting");
    }
    if let Some(projector) = projector.label {
        tracing::info!(projector, "images are shown");
    }
    if let Some(fault) = &projector.fault {
        tracing::warn!("{fault}");
    }
    let name = args.name.clone().unwrap_or_else(|| name_of(source));
    let device = format!("{}: {}", engine.info().backend, engine.info().device);
    let mut facts = ModelFacts::of_file(name, &file, engine.limits().context, geometry.hidden);
    facts.blind = projector.fault;
    if let Some(packs) = &packs {
        let settle = packs.clone();
        app.attach_packs(Packs::new(packs.library().clone(), packs.scope().clone(), move |time| {
            settle.flush(time)
        }));
    }
    app.attach_machine(machine(&file, geometry, memory, args.model.threads.map(usize::from)));
    if let Some(nodes) = &nodes {
        app.attach_nodes(nodes.known());
    }
    app.load(facts, text, Arc::new(LiveEngine::new(engine.clone(), device)));
    Ok(Loaded { engine, packs, nodes })
}

/// What the dashboard is told of the machine.
fn machine(
    file: &GgufFile,
    geometry: &Geometry,
    memory: Option<MemoryRate>,
    threads: Option<usize>,
) -> Arc<Machine> {
    let weight_bytes = Cost::of_file(file, geometry, CostOptions::default()).streamed_bytes;
    let bandwidth = match memory {
        Some(MemoryRate::OfHost) => {
            Bandwidth::WhenIdle(Box::new(move || Probe::rate_if_there_is_room(threads)))
        }
        Some(MemoryRate::OfCard(rate)) => Bandwidth::Known(rate),
        None => Bandwidth::Known(None),
    };
    Machine::new(weight_bytes, bandwidth)
}

/// What runs until the server stops.
struct Loaded {
    engine: EngineHandle,
    packs: Option<PackUse>,
    nodes: Option<Nodes>,
}

/// The model's name in answers: the file's name without what only matters on a disk.
fn name_of(source: &ModelSource) -> String {
    match source {
        ModelSource::Bundled => BUNDLED_NAME.to_owned(),
        ModelSource::File(path) => {
            let stem =
                path.file_stem().unwrap_or(Path::new("model").as_os_str()).to_string_lossy().into_owned();
            match stem.rsplit_once("-00001-of-") {
                Some((name, _)) => name.to_owned(),
                None => stem,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_to_listen() {
        let check = |host: &str, expected: &[&str]| {
            let expected: Vec<SocketAddr> =
                expected.iter().map(|address| address.parse().expect("address")).collect();
            assert_eq!(Place::of(host, 81).expect("a place").addresses, expected, "{host}");
        };
        check("127.0.0.1", &["127.0.0.1:81"]);
        check("::1", &["[::1]:81"]);
        check("[::1]", &["[::1]:81"]);
        assert!(
            Place::of("localhost", 81)
                .expect("a place")
                .addresses
                .iter()
                .all(|found| found.ip().is_loopback())
        );
        for (host, path) in
            [("unix:a.sock", "a.sock"), ("/run/a.sock", "/run/a.sock"), ("unix:///run/a", "/run/a")]
        {
            assert_eq!(Place::of(host, 81).expect("a place").socket.as_deref(), Some(Path::new(path)));
        }
        for wrong in ["", "unix:", "http://localhost", "localhost:8080", "no such name.invalid"] {
            assert!(Place::of(wrong, 81).is_err(), "{wrong}");
        }
    }

    #[test]
    fn names_of_files() {
        let check = |path: &str, expected: &str| {
            assert_eq!(name_of(&ModelSource::File(path.into())), expected);
        };
        check("/models/muse-glimmer-30b-Q4_K_M.gguf", "muse-glimmer-30b-Q4_K_M");
        check("big-00001-of-00003.gguf", "big");
        assert_eq!(name_of(&ModelSource::Bundled), "muse-tiny");
    }
}
