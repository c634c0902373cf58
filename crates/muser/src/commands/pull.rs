//! `muser pull`: brings model files into the store. All the work is `muser_hub`'s; here are names, progress and words.

use std::io::Write as _;
use std::ops::ControlFlow;
use std::time::Duration;

use anyhow::Result;
use muser_hub::{
    DEFAULT_BASE, DEFAULT_NAME, Hub, HubError, ModelStore, Phase, Proxies, PullOptions, Pulled, Sha256,
    Source, Token, Verified, pull,
};

use crate::cli::PullArgs;
use crate::env_vars;
use crate::interrupt::Interrupt;
use crate::output::{Console, HintExt as _, Progress, interrupted, usage_error};

/// Runs the command.
pub fn run(args: PullArgs, console: &Console) -> Result<()> {
    let store = ModelStore::open(env_vars::muser_home().as_deref())?;
    let hub = Hub::new(&args.hub.or_else(|| text(env_vars::HF_ENDPOINT)).unwrap_or(DEFAULT_BASE.to_owned()))?;
    let given = if args.sources.is_empty() { vec![DEFAULT_NAME.to_owned()] } else { args.sources };
    let mut sources = Vec::new();
    for given in &given {
        sources.extend(Source::parse(given, &hub).map_err(usage_error)?);
    }
    if let Some(hex) = &args.sha256 {
        let sha256 = Sha256::from_hex(hex).ok_or_else(|| {
            usage_error(format!("--sha256: expected 64 hexadecimal digits, found \"{hex}\""))
        })?;
        match sources.as_mut_slice() {
            [one] => one.expected.sha256 = Some(sha256),
            several => {
                return Err(usage_error(format!("--sha256 is for one file, these are {}", several.len())));
            }
        }
    }
    let options = PullOptions {
        token: text(env_vars::MUSER_HUB_TOKEN)
            .or_else(|| text(env_vars::HF_TOKEN))
            .and_then(|t| Token::new(&t)),
        offline: args.offline,
        force: args.force,
        stall_timeout: Duration::from_secs(args.stall_timeout.into()),
        max_failures: args.retries,
        proxies: Proxies::from_env(text)?,
        extra_roots: text(env_vars::SSL_CERT_FILE).map(Into::into),
        ..PullOptions::default()
    };
    // The first Ctrl-C keeps the bytes, the second does not wait for the network.
    let interrupt = Interrupt::install(2);
    for source in &sources {
        let pulled = one(&store, &hub, source, &options, &interrupt, console)?;
        tell(&pulled, args.json, console)?;
    }
    Ok(())
}

fn one(
    store: &ModelStore,
    hub: &Hub,
    source: &Source,
    options: &PullOptions,
    interrupt: &Interrupt,
    console: &Console,
) -> Result<Pulled> {
    let mut bar: Option<Progress> = None;
    let mut said_waiting = false;
    let mut watch = |progress: &muser_hub::Progress| {
        match &progress.phase {
            Phase::Waiting { reason, wait } => {
                if !said_waiting {
                    console.note(format!("{reason}; trying again in {:.1} s", wait.as_secs_f64()));
                    said_waiting = true;
                }
            }
            Phase::Connecting => {}
            Phase::Checking | Phase::Downloading => {
                said_waiting = false;
                if let Some(total) = progress.total {
                    bar.get_or_insert_with(|| Progress::bytes(console, &source.file_name, total))
                        .set(progress.bytes);
                }
            }
        }
        if interrupt.pressed() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let pulled = pull(store, hub, source, options, &mut watch);
    if let Some(bar) = bar {
        bar.finish();
    }
    if let Err(HubError::Cancelled { bytes }) = pulled {
        console.note(format!("stopped; {bytes} bytes are kept and the next pull goes on from there"));
        return Err(interrupted());
    }
    pulled.hint(format!(
        "files are kept in {}; an interrupted pull goes on where it stopped",
        store.dir().display()
    ))
}

fn tell(pulled: &Pulled, json: bool, console: &Console) -> Result<()> {
    let model = &pulled.model;
    let (checked, sha256) = match &model.verified {
        Verified::Yes(sha256) => ("SHA-256 as expected", Some(*sha256)),
        Verified::HashedOnly(sha256) => ("nothing to compare its SHA-256 with", Some(*sha256)),
        Verified::ChangedSince | Verified::No => ("not checked", None),
    };
    if json {
        let line = serde_json::json!({
            "name": model.name,
            "path": model.path,
            "size": model.size,
            "sha256": sha256.map(|s| s.to_string()),
            "verified": matches!(model.verified, Verified::Yes(_)),
            "already_there": pulled.already_there,
            "fetched_bytes": pulled.fetched_bytes,
            "resumed_bytes": pulled.resumed_bytes,
        });
        writeln!(std::io::stdout().lock(), "{line}")?;
        return Ok(());
    }
    let what = model.known.map_or("unknown weights", |known| known.about);
    let verb = if pulled.already_there { "already there" } else { "pulled" };
    console.note(format!("{verb}: {what}, {} bytes, {checked}", model.size));
    writeln!(std::io::stdout().lock(), "{}", model.path.display())?;
    Ok(())
}

fn text(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}
