//! `muser node`: who may read prompts for whom. The work is `muser_handoff`'s; here are names and words.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, anyhow};
use muser_handoff::{CODE_TIME, Code, Entry, NodeError, Registry, Secrets, Visit, add, invite, visit};

use crate::cli::{NodeAddArgs, NodeArgs, NodeCommand, NodeListArgs, NodeRotateArgs};
use crate::commands::node_serve;
use crate::env_vars;
use crate::output::{Console, HintExt as _, sanitize, usage_error};

/// How long a node may take to say who it is.
const PATIENCE: Duration = Duration::from_secs(3);

/// Runs the command.
pub fn run(args: NodeArgs, console: &Console) -> Result<()> {
    let home =
        env_vars::muser_home().ok_or_else(|| anyhow!("no home folder is known")).hint("set MUSER_HOME")?;
    match args.command {
        NodeCommand::Invite(args) => {
            let code = invite(&home, args.may).map_err(fault)?;
            writeln!(std::io::stdout().lock(), "{code}")?;
            let minutes = CODE_TIME.as_secs() / 60;
            console.note(format!(
                "good once, for {minutes} minutes, at a running node; on the other machine: muser node add NAME HOST:PORT CODE"
            ));
            Ok(())
        }
        NodeCommand::Add(args) => enrol(&home, args, console),
        NodeCommand::List(args) => list(&home, args, console),
        NodeCommand::Remove(args) => {
            let removed = Registry::update(&home, |registry| {
                let key = registry.named(&args.name)?.key;
                registry.nodes.retain(|node| node.name != args.name);
                Ok(key)
            });
            let key = removed.map_err(fault)?;
            console.note(format!("{} ({key}) is no longer known here; it still knows this node", args.name));
            Ok(())
        }
        NodeCommand::Rotate(args) => rotate(&home, args, console),
        NodeCommand::Serve(args) => node_serve::serve(&args, console),
        NodeCommand::Test(args) => node_serve::test(&args, console),
        NodeCommand::Key => {
            let key = Secrets::open_or_create(&home).map_err(fault)?.current.key();
            Ok(writeln!(std::io::stdout().lock(), "{key}")?)
        }
    }
}

/// Usage is the command line's fault, the rest is not.
fn fault(error: NodeError) -> anyhow::Error {
    if error.is_usage() { usage_error(error) } else { error.into() }
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?)
}

fn enrol(home: &Path, args: NodeAddArgs, console: &Console) -> Result<()> {
    let code = match args.code {
        Some(code) => code,
        None => std::io::read_to_string(std::io::stdin().lock())?
            .lines()
            .next()
            .unwrap_or_default()
            .trim()
            .to_owned(),
    };
    let code: Code = code.parse().map_err(fault)?;
    let own_name = args.own_name.unwrap_or_else(machine_name);
    let added = runtime()?.block_on(add(home, &args.name, &args.address, &code, &own_name, args.may));
    let key = added.map_err(fault)?;
    console.note(format!("{} is known by its key {key}, and knows this node", args.name));
    Ok(())
}

/// What the system calls this machine; nothing where it does not say, and the other side finds a name then.
fn machine_name() -> String {
    let said = ["/proc/sys/kernel/hostname", "/etc/hostname"]
        .iter()
        .find_map(|path| std::fs::read_to_string(path).ok());
    let said = said.or_else(|| std::env::var("COMPUTERNAME").ok()).unwrap_or_default();
    let first = said.trim().split('.').next().unwrap_or_default().to_owned();
    first.chars().filter(|letter| letter.is_ascii_alphanumeric() || "-_".contains(*letter)).take(63).collect()
}

/// What is known of a node, and what it says.
struct Seen {
    entry: Entry,
    said: Option<Result<Visit, NodeError>>,
}

fn look(home: &Path, offline: bool) -> Result<Vec<Seen>> {
    let nodes = Registry::read(home).map_err(fault)?.nodes;
    let looking = async {
        let visits: Vec<_> = nodes
            .into_iter()
            .map(|entry| {
                let home: PathBuf = home.to_owned();
                tokio::spawn(async move {
                    let asked = !offline && entry.address.is_some();
                    let said = if asked { Some(visit(&home, &entry, PATIENCE).await) } else { None };
                    Seen { entry, said }
                })
            })
            .collect();
        let mut seen = Vec::new();
        for one in visits {
            seen.push(one.await?);
        }
        Ok(seen)
    };
    runtime()?.block_on(looking)
}

fn list(home: &Path, args: NodeListArgs, console: &Console) -> Result<()> {
    let seen = look(home, args.offline)?;
    let mut out = std::io::stdout().lock();
    if args.json {
        let list: Vec<_> = seen.iter().map(as_json).collect();
        writeln!(out, "{}", serde_json::to_string_pretty(&list)?)?;
        return Ok(());
    }
    if seen.is_empty() {
        console.note("no nodes are known here; `muser node invite` on one machine and `muser node add` on another make two");
    }
    for Seen { entry, said } in &seen {
        let may: Vec<_> = entry.rights.words().collect();
        let may =
            if may.is_empty() { "may ask nothing".to_owned() } else { format!("may ask {}", may.join(", ")) };
        let place = entry.address.as_deref().unwrap_or("dials this node");
        let state = match said {
            Some(Ok(visit)) => {
                let serves = if visit.hello.serves_prefill {
                    "reads prompts for this node"
                } else {
                    "reads no prompts for this node"
                };
                let (route, trip) = (sanitize(&visit.hello.route), visit.round_trip.as_secs_f64() * 1e3);
                format!("{serves}, {route}, {} rows queued, {trip:.1} ms", visit.load.queued_rows)
            }
            Some(Err(error)) => error.to_string(),
            None => "not asked".into(),
        };
        writeln!(out, "{:16} {place:24} {may:24} {state}", entry.name)?;
    }
    Ok(())
}

fn as_json(seen: &Seen) -> serde_json::Value {
    let Seen { entry, said } = seen;
    let mut value = serde_json::json!({
        "name": entry.name,
        "address": entry.address,
        "key": entry.key.to_string(),
        "next_key": entry.next_key.map(|key| key.to_string()),
        "may": entry.rights.words().collect::<Vec<_>>(),
        "transfers": entry.transfers,
        "rows_a_minute": entry.rows_a_minute,
        "streams": entry.streams,
        "state": match said {
            Some(Ok(_)) => "reachable",
            Some(Err(_)) => "unreachable",
            None => "not asked",
        },
    });
    match said {
        Some(Ok(visit)) => {
            value["serves_prefill"] = visit.hello.serves_prefill.into();
            value["route"] = visit.hello.route.clone().into();
            value["build"] = visit.hello.build.clone().into();
            value["queued_rows"] = visit.load.queued_rows.into();
            value["running"] = visit.load.running.into();
            value["places"] = visit.load.places.into();
            value["draining"] = visit.load.draining.into();
            value["round_trip_ms"] = (visit.round_trip.as_secs_f64() * 1e3).into();
        }
        Some(Err(error)) => value["fault"] = error.to_string().into(),
        None => {}
    }
    value
}

fn rotate(home: &Path, args: NodeRotateArgs, console: &Console) -> Result<()> {
    let next = Secrets::begin_rotation(home).map_err(fault)?;
    let nodes = Registry::read(home).map_err(fault)?.nodes;
    let untold: Vec<_> =
        nodes.iter().filter(|node| node.told_key != Some(next)).map(|node| node.name.as_str()).collect();
    if !args.now && !untold.is_empty() {
        console.note(format!(
            "the next key is {next}; a running node tells {}, and uses it when all of them know it",
            untold.join(", ")
        ));
        return Ok(());
    }
    let key = Secrets::end_rotation(home).map_err(fault)?;
    console.note(format!("this node's key is {key} from now on"));
    if !untold.is_empty() {
        console.warning(format!(
            "{} will not know this node any more and must be enrolled anew",
            untold.join(", ")
        ));
    }
    Ok(())
}
