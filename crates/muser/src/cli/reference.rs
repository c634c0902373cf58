//! `docs/cli.md`, generated from the definitions beside this file. The test fails when the committed page is not
//! current; `MUSER_UPDATE_DOCS=1 cargo test -p muser cli_reference` writes it anew.

use std::fmt::Write as _;
use std::path::Path;

use clap::CommandFactory as _;

use super::{Cli, EXIT_CODES};
use crate::env_vars;

#[test]
fn cli_reference_is_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/cli.md");
    let current = render();
    if std::env::var_os("MUSER_UPDATE_DOCS").is_some() {
        std::fs::create_dir_all(path.parent().expect("docs/cli.md has a parent"))
            .expect("docs can be created");
        std::fs::write(&path, &current).expect("docs/cli.md can be written");
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        committed == current,
        "docs/cli.md is stale: run MUSER_UPDATE_DOCS=1 cargo test -p muser cli_reference"
    );
}

#[test]
fn definitions_are_consistent() {
    Cli::command().debug_assert();
}

fn render() -> String {
    let mut root = Cli::command();
    root.build();
    let mut page = String::from(
        "# Command-line reference\n\nGenerated from `crates/muser/src/cli`; do not edit. Results go to standard output, everything \
         else to standard error.\n\n",
    );
    for command in root.get_subcommands().filter(|command| command.get_name() != "help") {
        render_command(&mut page, command, "muser");
    }
    page.push_str("## Options of every command\n\n| Option | Meaning |\n|---|---|\n");
    for argument in root.get_arguments().filter(|argument| argument.is_global_set()) {
        render_argument(&mut page, argument);
    }
    page.push_str("\n## Environment\n\n| Variable | Meaning |\n|---|---|\n");
    for (name, meaning) in env_vars::TABLE {
        let _ = writeln!(page, "| `{name}` | {meaning} |");
    }
    let _ =
        write!(page, "\n## Exit codes\n\n```text\n{}\n```\n", EXIT_CODES.trim_start_matches("Exit codes:\n"));
    page
}

fn render_command(page: &mut String, command: &clap::Command, parents: &str) {
    let name = format!("{parents} {}", command.get_name());
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    let usage = command.clone().render_usage().to_string();
    let usage = usage.trim_start_matches("Usage: ").trim();
    let _ = write!(page, "## {name}\n\n{about}.\n\n```text\n{usage}\n```\n\n");
    // What is global in a group of commands is told once, with the group.
    let is_group = command.has_subcommands();
    let everywhere = ["help", "version", "quiet", "verbose", "color", "config"];
    let own = |argument: &&clap::Arg| {
        !everywhere.contains(&argument.get_id().as_str()) && (is_group || !argument.is_global_set())
    };
    let arguments: Vec<_> = command.get_arguments().filter(own).collect();
    if !arguments.is_empty() && (!is_group || parents == "muser") {
        page.push_str("| Option | Meaning |\n|---|---|\n");
        for argument in arguments {
            render_argument(page, argument);
        }
        page.push('\n');
    }
    for command in command.get_subcommands().filter(|command| command.get_name() != "help") {
        render_command(page, command, &name);
    }
}

fn render_argument(page: &mut String, argument: &clap::Arg) {
    let mut name = String::new();
    if let Some(short) = argument.get_short() {
        let _ = write!(name, "-{short}, ");
    }
    if let Some(long) = argument.get_long() {
        let _ = write!(name, "--{long}");
    }
    if argument.is_positional() || argument.get_action().takes_values() {
        let value =
            argument.get_value_names().and_then(|names| names.first()).map_or("VALUE", |name| name.as_str());
        let _ = write!(name, "{}<{value}>", if argument.is_positional() { "" } else { " " });
    }
    let mut meaning = argument.get_help().map(ToString::to_string).unwrap_or_default();
    let choices: Vec<_> = argument.get_possible_values();
    if argument.get_action().takes_values() && !choices.is_empty() {
        let list: Vec<_> = choices
            .iter()
            .map(|choice| match choice.get_help() {
                Some(help) => format!("`{}` ({help})", choice.get_name()),
                None => format!("`{}`", choice.get_name()),
            })
            .collect();
        let _ = write!(meaning, ": {}", list.join(", "));
    }
    let defaults: Vec<_> =
        argument.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    if argument.get_action().takes_values() && !defaults.is_empty() {
        let _ = write!(meaning, " [default: `{}`]", defaults.join(", "));
    }
    if let Some(variable) = argument.get_env() {
        let _ = write!(meaning, " [environment: `{}`]", variable.to_string_lossy());
    }
    let _ = writeln!(page, "| `{}` | {} |", name.replace('|', "\\|"), meaning.replace('|', "\\|"));
}
