//! `muser node`: who may read prompts for whom. The work is `muser_handoff`'s; here are names and words.

use std::io::Write as _;
use std::path::Path;

use anyhow::{Result, anyhow};
use muser_handoff::{CODE_TIME, Code, NodeError, Registry, Secrets, add, invite};

use crate::cli::{NodeAddArgs, NodeArgs, NodeCommand, NodeRotateArgs};
use crate::commands::{node_list, node_serve};
use crate::env_vars;
use crate::output::{Console, HintExt as _, usage_error};

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
        NodeCommand::List(args) => node_list::list(&home, args, console),
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
    let added =
        node_list::runtime()?.block_on(add(home, &args.name, &args.address, &code, &own_name, args.may));
    let key = added.map_err(fault)?;
    console.note(format!("{} is known by its key {key}, and knows this node", args.name));
    if args.no_canary {
        return Ok(());
    }
    node_serve::prove_added(&args.name, home, &args.model, &args.draft, console)
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
