//! The `muser` command: a table of contents. Arguments are defined in [`cli`], each command lives in a file of
//! [`commands`], everything a person reads goes through [`output`].
//!
//! Invariant: standard output carries results only (text, JSON, tables); notes, progress, logs and errors go to
//! standard error. This is the one place where a process ends and where an outcome becomes an exit code.

#![allow(unreachable_pub, reason = "nothing outside a binary can use it; `pub` marks what other modules use")]

mod backends;
mod cli;
mod commands;
mod config;
mod devices;
mod doctor;
mod draft;
mod engine;
mod env_vars;
mod executor;
mod generate;
mod header;
mod ids;
mod images;
mod inspect;
mod interrupt;
mod model_file;
mod node_notes;
mod node_watch;
mod nodes;
mod npy;
mod one_sequence;
mod output;
mod packs;
mod projector;

use std::process::ExitCode;

use clap::{CommandFactory as _, FromArgMatches as _};

use crate::cli::{Cli, Command, GlobalArgs};
use crate::config::ConfigError;
use crate::output::{Console, usage_error};

/// Commit that this program was built from.
const COMMIT: &str = env!("MUSER_COMMIT");

// glibc's allocator gives every thread an arena and returns memory late; the engine's buffers live long and are few, but
// tokenizing and JSON allocate a lot of small pieces from several threads.
#[cfg(feature = "mimalloc")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let words: Vec<_> = std::env::args_os().collect();
    let cli = match config::read(&Cli::command(), &words, true) {
        Ok(configured) => Cli::from_arg_matches(&configured.matches).unwrap_or_else(|error| error.exit()),
        Err(ConfigError::Usage(error)) => error.exit(),
        Err(ConfigError::File(what)) => {
            let console = Console::from_environment(&GlobalArgs::default());
            return output::exit_code(Err(usage_error(what)), &console);
        }
    };
    let console = Console::from_environment(&cli.global);
    let log_json = matches!(&cli.command, Command::Serve(args) if args.log_json);
    output::start_logging(&cli.global, &console, log_json);
    let outcome = match cli.command {
        Command::Run(args) => commands::run::run(args, &console),
        Command::Chat(args) => commands::chat::run(args, &console),
        Command::Tokenize(args) => commands::tokenize::run(args, &console),
        Command::Detokenize(args) => commands::detokenize::run(args, &console),
        Command::Logits(args) => commands::logits::run(args, &console),
        Command::Inspect(args) => commands::inspect::run(args, &console),
        Command::Convert(args) => commands::convert::run(args, &console),
        Command::Synth(args) => commands::synth::run(args, &console),
        Command::Serve(args) => commands::serve::run(args, &console),
        Command::Top(args) => commands::top::run(args, &console),
        Command::Pull(args) => commands::pull::run(args, &console),
        Command::Models(args) => commands::models::run(args, &console),
        Command::Pack(args) => commands::pack::run(args, &console),
        Command::Node(args) => commands::node::run(args, &console),
        Command::Bench(args) => commands::bench::run(args, &console),
        Command::Cost(args) => commands::cost::run(args, &console),
        Command::Fit(args) => commands::fit::run(args, &console),
        Command::Doctor(args) => commands::doctor::run(args, &console),
        Command::Config(args) => commands::config::run(args, &words),
        Command::Completions(args) => commands::shell::completions(args),
        Command::Man(args) => commands::shell::manual(args, &console),
    };
    output::exit_code(outcome, &console)
}
