//! `muser config`: which values hold for flags that are not given, and where they come from.

use std::ffi::OsString;
use std::io::Write as _;

use anyhow::Result;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, CommandFactory as _};
use serde_json::{Map, Value, json};

use crate::cli::{Cli, ConfigArgs, ConfigCommand, ConfigShowArgs};
use crate::config::{self, ConfigError, Configured, Setting};
use crate::output::{HintExt as _, sanitize, usage_error};

/// Runs the command. `words` is the whole command line.
pub fn run(args: ConfigArgs, words: &[OsString]) -> Result<()> {
    match args.command {
        ConfigCommand::Show(args) => show(&args, words),
        ConfigCommand::Path => {
            let outer = read(words)?;
            let (path, _) = config::path(&outer.matches);
            let path = path.ok_or_else(|| {
                usage_error(
                    "no file is read: --config or MUSER_CONFIG says `off`, or there is no home folder",
                )
            })?;
            writeln!(std::io::stdout(), "{}", path.display())?;
            Ok(())
        }
    }
}

fn read(words: &[OsString]) -> Result<Configured> {
    config::read(&Cli::command(), words, false).map_err(|error| match error {
        ConfigError::File(what) => usage_error(what),
        ConfigError::Usage(error) => usage_error(error.render().to_string().trim_start_matches("error: ")),
    })
}

fn show(args: &ConfigShowArgs, words: &[OsString]) -> Result<()> {
    let outer = read(words)?;
    let mut out = std::io::stdout().lock();
    if args.command.is_empty() {
        return file_alone(&outer, args.json, &mut out);
    }
    let mut inner: Vec<OsString> = vec!["muser".into()];
    if let Some(file) = outer.matches.get_one::<std::path::PathBuf>("config") {
        inner.extend(["--config".into(), file.into()]);
    }
    inner.extend(args.command.iter().map(Into::into));
    let configured = read(&inner)?;
    let (command, matches) = config::leaf(&configured.matches);
    let first = args.command.first().map_or("", String::as_str);
    let mut definition = &configured.definitions;
    for name in &command {
        definition = definition.find_subcommand(name).unwrap_or(definition);
    }
    if command.is_empty() || definition.has_subcommands() {
        let found = args.command.join(" ");
        let names: Vec<&str> = definition.get_subcommands().map(clap::Command::get_name).collect();
        let at = if command.is_empty() { first.to_owned() } else { found };
        return Err(usage_error(format!("`{}` is not a command with flags", sanitize(&at))))
            .hint(format!("these are: {}", names.join(", ")));
    }
    let arguments = definition.get_arguments().chain(configured.definitions.get_arguments());
    let rows = arguments
        .filter(|arg| config::is_settable(arg))
        .map(|arg| Row::new(arg, &configured, &command, matches));
    let rows: Vec<Row> = rows.collect();
    if args.json {
        let all: Map<String, Value> = rows
            .iter()
            .map(|row| (row.key.clone(), json!({"value": row.value, "source": row.source})))
            .collect();
        writeln!(out, "{}", serde_json::to_string_pretty(&Value::Object(all))?)?;
        return Ok(());
    }
    let lines: Vec<(String, &str)> = rows.iter().map(|row| (row.line(), row.source.as_str())).collect();
    let width =
        lines.iter().map(|(line, _)| line.chars().count()).filter(|&width| width <= 40).max().unwrap_or(0);
    writeln!(out, "[{}]", command.join("."))?;
    for (line, source) in &lines {
        writeln!(out, "{line:width$}  # {source}")?;
    }
    Ok(())
}

fn file_alone(outer: &Configured, json: bool, out: &mut impl std::io::Write) -> Result<()> {
    let sources = &outer.sources;
    if json {
        let one = |setting: &Setting| json!({"section": setting.section, "key": setting.key, "value": setting.value.to_json(), "line": setting.line});
        let settings: Vec<Value> = sources.settings.iter().map(one).collect();
        let whole = json!({"file": sources.file, "settings": settings});
        writeln!(out, "{}", serde_json::to_string_pretty(&whole)?)?;
        return Ok(());
    }
    let Some(file) = &sources.file else {
        let place = config::path(&outer.matches).0.map_or("off".into(), |path| path.display().to_string());
        writeln!(
            out,
            "# no configuration file ({place}); `muser config show serve` prints what one could say"
        )?;
        return Ok(());
    };
    writeln!(out, "# {}", file.display())?;
    let mut section: &[String] = &[];
    for setting in &sources.settings {
        if setting.section != section {
            section = &setting.section;
            writeln!(out, "[{}]", section.join("."))?;
        }
        writeln!(out, "{} = {}  # line {}", setting.key, toml_of(&setting.value.to_json()), setting.line)?;
    }
    Ok(())
}

/// One flag of a command.
struct Row {
    key: String,
    /// `null`: not set.
    value: Value,
    source: String,
}

impl Row {
    fn new(arg: &Arg, configured: &Configured, command: &[String], matches: &ArgMatches) -> Self {
        let id = arg.get_id().as_str();
        let key = arg.get_long().unwrap_or(id).to_owned();
        let line = configured.sources.line(command, id);
        let found = matches.try_contains_id(id).is_ok().then(|| matches.value_source(id)).flatten();
        let source = match (found, line) {
            (Some(ValueSource::CommandLine), _) => "flag".into(),
            (Some(ValueSource::EnvVariable), _) => {
                format!("environment: {}", arg.get_env().unwrap_or_default().to_string_lossy())
            }
            (_, Some(line)) => {
                let file = configured
                    .sources
                    .file
                    .as_deref()
                    .and_then(std::path::Path::file_name)
                    .unwrap_or_default();
                format!("{}, line {line}", file.to_string_lossy())
            }
            (Some(_), None) => "built in".into(),
            (None, None) => "not set".into(),
        };
        let raw = matches.try_get_raw(id).ok().flatten();
        let mut raw: Vec<Value> =
            raw.into_iter().flatten().map(|value| scalar(&value.to_string_lossy())).collect();
        let value = match (arg.get_action(), raw.len()) {
            (ArgAction::Append, _) if found.is_some() => Value::Array(raw),
            (_, 0) => Value::Null,
            _ => raw.swap_remove(0),
        };
        Self { key, value, source }
    }

    fn line(&self) -> String {
        match &self.value {
            Value::Null => format!("# {} =", self.key),
            value => format!("{} = {}", self.key, toml_of(value)),
        }
    }
}

/// As TOML has it: numbers and switches bare, all else a text.
fn scalar(text: &str) -> Value {
    match (text, text.parse::<i64>(), text.parse::<f64>()) {
        ("true" | "false", ..) => Value::Bool(text == "true"),
        (_, Ok(number), _) if number.to_string() == text => number.into(),
        (_, _, Ok(number)) if number.is_finite() && number.to_string() == text => number.into(),
        _ => Value::String(text.to_owned()),
    }
}

/// JSON's notation of texts, numbers, switches and lists is TOML's, too.
fn toml_of(value: &Value) -> String {
    match value {
        Value::Array(items) => {
            let items: Vec<String> = items.iter().map(toml_of).collect();
            format!("[{}]", items.join(", "))
        }
        other => other.to_string(),
    }
}
