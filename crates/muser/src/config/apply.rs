//! Settings become the defaults of the definitions.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use clap::builder::BoolValueParser;
use clap::error::ErrorKind;
use clap::{Arg, ArgAction, ArgMatches, Command};

use super::file::{Setting, Value};
use super::given::{is_explicit, leaf};

/// Flags that no file can set: they are about the file, or about no computation at all.
const NOT_IN_FILES: [&str; 3] = ["help", "version", "config"];

/// What the file gave: by command (`node serve`) and flag, the line.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// The file.
    pub file: Option<PathBuf>,
    /// Its settings, in its order.
    pub settings: Vec<Setting>,
    lines: HashMap<(String, String), usize>,
}

impl Sources {
    /// The line that set an argument of a command.
    pub fn line(&self, command: &[String], id: &str) -> Option<usize> {
        let of = |command: String| self.lines.get(&(command, id.to_owned())).copied();
        of(command.join(" ")).or_else(|| of(String::new()))
    }
}

/// A flag that a setting is for.
struct Target {
    path: Vec<String>,
    id: String,
}

/// The definitions with the settings as defaults. `given` is what the command line says by itself.
pub fn apply(
    mut root: Command,
    file: &Path,
    settings: &[Setting],
    given: &ArgMatches,
) -> Result<(Command, Sources), String> {
    let mut built = root.clone();
    built.build();
    let (command, given) = leaf(given);
    let mut sources = Sources { file: Some(file.into()), settings: settings.to_vec(), ..Sources::default() };
    // The nearest section wins: it comes last.
    let mut ordered: Vec<&Setting> = settings.iter().collect();
    ordered.sort_by_key(|setting| setting.section.len());
    let mut in_force: Vec<(String, usize)> = Vec::new();
    for setting in ordered {
        let fault = |what: String| format!("{}, line {}: {what}", file.display(), setting.line);
        let base = find(&root, &setting.section).map_err(&fault)?;
        let mut targets = Vec::new();
        collect(base, &setting.section, &setting.key, &mut targets);
        if targets.is_empty() {
            return Err(fault(unknown(&root, base, setting)));
        }
        for target in targets {
            let owner = find(&root, &target.path)?;
            let arg = argument(owner, &target.id).ok_or("a flag without a definition")?;
            let values = values(owner, arg, setting).map_err(&fault)?;
            let runs_now = target.path.is_empty() || target.path == command;
            if runs_now {
                let rivals = rivals(find(&built, &target.path)?, &target.id);
                // What was said for this one run leaves no room for what usually holds.
                if rivals.iter().any(|rival| is_explicit(given, rival)) {
                    continue;
                }
                if let Some((rival, line)) = in_force.iter().find(|(id, _)| rivals.contains(id)) {
                    return Err(fault(format!(
                        "{} cannot be together with {rival} of line {line}",
                        target.id
                    )));
                }
                in_force.push((target.id.clone(), setting.line));
            }
            sources.lines.insert((target.path.join(" "), target.id.clone()), setting.line);
            root = with_default(root, &target.path, &target.id, &values);
        }
    }
    Ok((root, sources))
}

/// The command of a section.
fn find<'a>(root: &'a Command, path: &[String]) -> Result<&'a Command, String> {
    let mut at = root;
    for name in path {
        let Some(below) = at.find_subcommand(name) else {
            let names: Vec<&str> = at.get_subcommands().map(Command::get_name).collect();
            let what = format!("[{}] is not the name of a command", path.join("."));
            return Err(match nearest(name, names.iter().copied()) {
                Some(near) => format!("{what}; did you mean {near}?"),
                None => format!("{what}; these are: {}", names.join(", ")),
            });
        };
        at = below;
    }
    Ok(at)
}

/// Can a file set this argument?
pub fn is_settable(arg: &Arg) -> bool {
    arg.get_long().is_some() && !NOT_IN_FILES.contains(&arg.get_id().as_str())
}

/// Every command here and below that has the flag.
fn collect(command: &Command, path: &[String], key: &str, targets: &mut Vec<Target>) {
    for arg in command.get_arguments().filter(|arg| is_settable(arg)) {
        let aliases = arg.get_all_aliases().unwrap_or_default();
        if arg.get_long() == Some(key) || aliases.contains(&key) {
            targets.push(Target { path: path.to_vec(), id: arg.get_id().to_string() });
        }
    }
    for below in command.get_subcommands() {
        let path: Vec<String> = path.iter().cloned().chain([below.get_name().to_owned()]).collect();
        collect(below, &path, key, targets);
    }
}

fn argument<'a>(command: &'a Command, id: &str) -> Option<&'a Arg> {
    command.get_arguments().find(|arg| arg.get_id() == id)
}

/// Arguments that cannot be together with this one.
fn rivals(command: &Command, id: &str) -> Vec<String> {
    let Some(own) = argument(command, id) else { return Vec::new() };
    let named = |arg: &Arg| -> Vec<String> {
        command.get_arg_conflicts_with(arg).iter().map(|rival| rival.get_id().to_string()).collect()
    };
    let mut rivals = named(own);
    // A conflict is written at one of the two.
    let others = command.get_arguments().filter(|arg| arg.get_id() != id);
    rivals.extend(
        others.filter(|arg| named(arg).iter().any(|rival| rival == id)).map(|arg| arg.get_id().to_string()),
    );
    rivals
}

fn unknown(root: &Command, base: &Command, setting: &Setting) -> String {
    let key = &setting.key;
    let name = base.get_name();
    let mut elsewhere = Vec::new();
    collect(root, &[], key, &mut elsewhere);
    if let Some(first) = elsewhere.first() {
        let owners: Vec<String> = elsewhere.iter().map(|target| target.path.join(".")).collect();
        return if first.path.is_empty() {
            format!("{key} is a flag of every command: it stands above the sections")
        } else {
            format!("{key} is not a flag of {name}; it is one of [{}]", owners.join("], ["))
        };
    }
    let mut keys = Vec::new();
    all_keys(base, &mut keys);
    let of = if setting.section.is_empty() {
        "any command".into()
    } else {
        format!("muser {}", setting.section.join(" "))
    };
    match nearest(key, keys.iter().map(String::as_str)) {
        Some(near) => format!("{key} is not a flag of {of}; did you mean {near}?"),
        None => format!(
            "{key} is not a flag of {of}; `muser config show {}` prints those that are",
            setting.section.join(" ")
        ),
    }
}

fn all_keys(command: &Command, keys: &mut Vec<String>) {
    keys.extend(
        command.get_arguments().filter(|arg| is_settable(arg)).filter_map(Arg::get_long).map(str::to_owned),
    );
    command.get_subcommands().for_each(|below| all_keys(below, keys));
}

/// The name that looks most like a word, if one looks like it at all.
fn nearest<'a>(word: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let scored = names.map(|name| (strsim::jaro_winkler(word, name), name));
    scored.filter(|(score, _)| *score > 0.8).max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, name)| name)
}

/// What would stand behind the flag, if the flag takes it.
fn values(command: &Command, arg: &Arg, setting: &Setting) -> Result<Vec<String>, String> {
    let key = &setting.key;
    let takes = arg.get_action().takes_values();
    let values = match (&setting.value, arg.get_action()) {
        (Value::Switch(switch), ArgAction::SetTrue | ArgAction::SetFalse) => {
            return Ok(vec![switch.to_string()]);
        }
        (Value::One(number), ArgAction::Count) => {
            number
                .parse::<u8>()
                .map_err(|_| format!("{key}: expected a number from 0 to 255, found {number}"))?;
            return Ok(vec![number.clone()]);
        }
        (_, ArgAction::Count) => return Err(format!("{key}: expected a number from 0 to 255")),
        (_, _) if !takes => return Err(format!("{key}: expected true or false")),
        (Value::Switch(switch), _) => {
            return Err(format!("{key}: expected {}, found {switch}", expected(arg)));
        }
        (Value::One(value), _) => vec![value.clone()],
        (Value::Many(values), ArgAction::Append) => values.clone(),
        (Value::Many(_), _) => return Err(format!("{key}: expected {}, found a list", expected(arg))),
    };
    // The flag's own parser says what is wrong; what else the command would lack is no matter here.
    for value in &values {
        let line = [command.get_name().to_owned(), format!("--{}={value}", arg.get_long().unwrap_or(key))];
        if let Err(error) = command.clone().try_get_matches_from(line)
            && matches!(error.kind(), ErrorKind::InvalidValue | ErrorKind::ValueValidation)
        {
            return Err(plain(&error));
        }
    }
    Ok(values)
}

fn expected(arg: &Arg) -> String {
    arg.get_value_names().and_then(|names| names.first()).map_or("a value".into(), |name| format!("<{name}>"))
}

/// clap's message without its preface, its hints and its line breaks.
fn plain(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let message = text.split("\n\n").next().unwrap_or(&text).trim_start_matches("error: ");
    message.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn with_default(command: Command, path: &[String], id: &str, values: &[String]) -> Command {
    if let Some((first, rest)) = path.split_first() {
        return command.mut_subcommand(first, |below| with_default(below, rest, id, values));
    }
    // Not `mut_arg`, which puts the argument at the end of the help.
    command.mut_args(|arg| match arg.get_action() {
        _ if arg.get_id() != id => arg,
        ArgAction::SetTrue | ArgAction::SetFalse => {
            // So that `--flag=false` can take back for one run what the file says.
            let arg = arg.action(ArgAction::Set).value_parser(BoolValueParser::new()).num_args(0..=1);
            let switch = if values[0] == "true" { "true" } else { "false" };
            arg.require_equals(true).default_missing_value("true").default_value(switch)
        }
        // clap keeps what never goes away; a file is read once in a process.
        _ => arg.default_values(values.iter().map(|value| &*String::leak(value.clone()))),
    })
}
