//! The configuration file as a list of settings.

use std::path::Path;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// Longest file that is read; a configuration has a few kilobytes.
const MOST_BYTES: u64 = 1 << 20;

/// One line of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// The command whose section it stands in, empty above the sections.
    pub section: Vec<String>,
    /// The flag, spelled with hyphens.
    pub key: String,
    /// Its value.
    pub value: Value,
    /// Where it stands, from 1.
    pub line: usize,
}

/// What may stand behind a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// `true` or `false`.
    Switch(bool),
    /// A number or a text, as it would be written behind the flag.
    One(String),
    /// Several of them.
    Many(Vec<String>),
}

impl Value {
    /// For people and programs.
    pub fn to_json(&self) -> serde_json::Value {
        match self {
            Self::Switch(switch) => (*switch).into(),
            Self::One(text) => text.as_str().into(),
            Self::Many(list) => list.clone().into(),
        }
    }
}

/// The file's text; `None` if nobody named it and it is not there.
pub fn read(path: &Path, is_named: bool) -> Result<Option<String>, String> {
    use std::io::{ErrorKind, Read as _};
    let fault = |error: std::io::Error| format!("{}: {error}", path.display());
    let file = match std::fs::File::open(path) {
        Ok(file) => file,
        Err(error) if !is_named && matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return Ok(None);
        }
        Err(error) => return Err(fault(error)),
    };
    check_owner(path, &file)?;
    let mut bytes = Vec::new();
    file.take(MOST_BYTES + 1).read_to_end(&mut bytes).map_err(fault)?;
    if bytes.len() as u64 > MOST_BYTES {
        return Err(format!("{}: longer than {MOST_BYTES} bytes, which no configuration is", path.display()));
    }
    let text = String::from_utf8(bytes).map_err(|error| {
        format!("{}: byte {} is not UTF-8", path.display(), error.utf8_error().valid_up_to())
    })?;
    Ok(Some(text))
}

/// The file names keys, models and addresses: whoever can write it decides what this user runs.
#[cfg(unix)]
fn check_owner(path: &Path, file: &std::fs::File) -> Result<(), String> {
    use std::os::unix::fs::PermissionsExt as _;
    let mode = file.metadata().map_err(|error| format!("{}: {error}", path.display()))?.permissions().mode();
    if mode & 0o002 != 0 {
        return Err(format!(
            "{}: anyone may write it (mode {:03o}), so it is not read; `chmod o-w` takes that right away",
            path.display(),
            mode & 0o777
        ));
    }
    Ok(())
}

#[cfg(not(unix))]
fn check_owner(_path: &Path, _file: &std::fs::File) -> Result<(), String> {
    Ok(())
}

/// The settings of a file, in its order.
pub fn parse(path: &Path, text: &str) -> Result<Vec<Setting>, String> {
    let at = |byte: usize| text.get(..byte).unwrap_or(text).matches('\n').count() + 1;
    let table = DeTable::parse(text).map_err(|error| {
        let line = error.span().map_or(1, |span| at(span.start));
        format!("{}, line {line}: {}", path.display(), error.message())
    })?;
    let mut settings = Vec::new();
    walk(table.get_ref(), &[], &at, &mut settings)
        .map_err(|(line, what)| format!("{}, line {line}: {what}", path.display()))?;
    // Tables of TOML are sorted by name; a person looks from above to below.
    settings.sort_by_key(|setting| setting.line);
    Ok(settings)
}

fn walk(
    table: &DeTable<'_>,
    section: &[String],
    at: &dyn Fn(usize) -> usize,
    settings: &mut Vec<Setting>,
) -> Result<(), (usize, String)> {
    for (key, value) in table {
        let line = at(key.span().start);
        let name = key.get_ref().replace('_', "-");
        if let DeValue::Table(below) = value.get_ref() {
            let section: Vec<String> = section.iter().cloned().chain([name]).collect();
            walk(below, &section, at, settings)?;
            continue;
        }
        let value = value_of(value).map_err(|what| (line, format!("{name}: {what}")))?;
        let twin = |other: &&Setting| other.section == section && other.key == name;
        if let Some(other) = settings.iter().find(twin) {
            return Err((
                line.max(other.line),
                format!("{name} is set in line {} already", line.min(other.line)),
            ));
        }
        settings.push(Setting { section: section.to_vec(), key: name, value, line });
    }
    Ok(())
}

fn value_of(value: &Spanned<DeValue<'_>>) -> Result<Value, String> {
    match value.get_ref() {
        DeValue::Boolean(switch) => Ok(Value::Switch(*switch)),
        DeValue::Array(items) => {
            items.iter().map(|item| scalar(item.get_ref())).collect::<Result<_, _>>().map(Value::Many)
        }
        one => scalar(one).map(Value::One),
    }
}

fn scalar(value: &DeValue<'_>) -> Result<String, String> {
    match value {
        DeValue::String(text) => Ok(text.to_string()),
        DeValue::Integer(number) if number.radix() == 10 => Ok(number.as_str().to_owned()),
        DeValue::Integer(number) => i128::from_str_radix(number.as_str(), number.radix())
            .map(|number| number.to_string())
            .map_err(|error| error.to_string()),
        DeValue::Float(number) => Ok(number.as_str().to_owned()),
        other => Err(format!("expected a number, a text or a list of these, found a {}", other.type_str())),
    }
}
