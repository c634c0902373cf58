//! Who may talk to this node, and to whom it talks: `nodes.toml` in muser's folder, private as a key file is, read again when it
//! changes.
//!
//! ```toml
//! [[node]]
//! name = "box"
//! address = "box.example:7788"     # absent: it dials us
//! key = "64 hexadecimal digits"
//! may = ["prefill", "sessions"]    # what it may ask of us
//! transfers = 4                    # at once, that it may ask of us
//! rows_a_minute = 0                # that it may ask of us; 0: any
//! streams = 1                      # that we open to it
//! ```

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use crate::NodeError;
use crate::frame::Hello;
use crate::ids::NodeKey;
use crate::peers::Limits;
use crate::private::{self, Stamp};

/// Most bytes of the file.
const MAX_BYTES: u64 = 1 << 20;
/// Most nodes.
const MAX_NODES: usize = 256;
/// Transfers at once where the registry says nothing.
const TRANSFERS: u16 = 8;

/// What a peer may ask for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rights {
    /// Prompts to be read.
    pub prefill: bool,
    /// Sessions to be taken and given.
    pub sessions: bool,
}

impl Rights {
    /// From words with commas between them.
    ///
    /// # Errors
    /// If a word is no right.
    pub fn parse(words: &str) -> Result<Self, NodeError> {
        let mut rights = Self::default();
        for word in words.split(',').map(str::trim).filter(|word| !word.is_empty()) {
            match word {
                "prefill" => rights.prefill = true,
                "sessions" => rights.sessions = true,
                _ => {
                    return Err(NodeError::caller("a right", "`prefill` or `sessions`", format!("`{word}`")));
                }
            }
        }
        Ok(rights)
    }

    /// The words.
    pub fn words(self) -> impl Iterator<Item = &'static str> {
        [("prefill", self.prefill), ("sessions", self.sessions)]
            .into_iter()
            .filter(|right| right.1)
            .map(|right| right.0)
    }
}

/// A node in the registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// What it is called here.
    pub name: String,
    /// Where it can be reached; `None`: it dials us.
    pub address: Option<String>,
    /// Its key.
    pub key: NodeKey,
    /// The key that it has announced under its present one.
    pub next_key: Option<NodeKey>,
    /// Our next key, once it has said that it knows it.
    pub told_key: Option<NodeKey>,
    /// What it may ask for.
    pub rights: Rights,
    /// Transfers at once that it may ask for.
    pub transfers: u16,
    /// Rows a minute that it may ask for; 0: any.
    pub rows_a_minute: u32,
    /// Streams that we open to it.
    pub streams: u8,
}

impl Entry {
    /// A node with what is usual.
    pub fn new(name: &str, address: Option<String>, key: NodeKey, rights: Rights) -> Self {
        Self {
            name: name.to_owned(),
            address,
            key,
            next_key: None,
            told_key: None,
            rights,
            transfers: TRANSFERS,
            rows_a_minute: 0,
            streams: 1,
        }
    }

    /// What it may do.
    pub fn limits(&self) -> Limits {
        Limits {
            may_prefill: self.rights.prefill,
            transfers: self.transfers,
            rows_a_minute: self.rows_a_minute,
        }
    }

    /// Is it known by this key?
    pub fn has_key(&self, key: &NodeKey) -> bool {
        self.key == *key || self.next_key.as_ref() == Some(key)
    }

    /// The newest key that it is known by.
    pub fn newest_key(&self) -> NodeKey {
        self.next_key.unwrap_or(self.key)
    }
}

/// The nodes of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Registry {
    /// In the file's order.
    pub nodes: Vec<Entry>,
}

impl Registry {
    /// Where it lies in muser's folder.
    pub fn path(home: &Path) -> PathBuf {
        home.join("nodes.toml")
    }

    /// Reads it; no file is no nodes.
    pub fn read(home: &Path) -> Result<Self, NodeError> {
        let path = Self::path(home);
        let Some(bytes) = private::read(&path, MAX_BYTES)? else { return Ok(Self::default()) };
        let text = std::str::from_utf8(&bytes).map_err(|_| NodeError::file(&path, "it is not UTF-8"))?;
        Self::parse(&path, text)
    }

    /// Changes it. What the file had besides (comments) is lost.
    pub fn update<T>(
        home: &Path,
        change: impl FnOnce(&mut Self) -> Result<T, NodeError>,
    ) -> Result<T, NodeError> {
        let path = Self::path(home);
        let _lock = private::lock(&path)?;
        let before = Self::read(home)?;
        let mut registry = before.clone();
        let outcome = change(&mut registry)?;
        if registry != before {
            private::write(&path, registry.text().as_bytes())?;
        }
        Ok(outcome)
    }

    /// The node with this name.
    ///
    /// # Errors
    /// If there is none; says which there are.
    pub fn named(&self, name: &str) -> Result<&Entry, NodeError> {
        let names = || match self.nodes.len() {
            0 => "a node of `muser node list`, which has none (`muser node add`)".to_owned(),
            _ => format!(
                "one of {}",
                self.nodes.iter().map(|node| node.name.as_str()).collect::<Vec<_>>().join(", ")
            ),
        };
        let found = self.nodes.iter().find(|node| node.name == name);
        found.ok_or_else(|| NodeError::caller("the node's name", names(), format!("`{name}`")))
    }

    /// The node that is known by this key.
    pub fn by_key(&self, key: &NodeKey) -> Option<&Entry> {
        self.nodes.iter().find(|node| node.has_key(key))
    }

    /// Adds a node.
    ///
    /// # Errors
    /// If the name or the key is there already, or the name or address is none.
    pub fn add(&mut self, entry: Entry) -> Result<(), NodeError> {
        check_name(&entry.name)?;
        if let Some(address) = &entry.address {
            check_address(address)?;
        }
        if self.nodes.len() >= MAX_NODES {
            return Err(NodeError::caller("nodes", format!("at most {MAX_NODES}"), "one more"));
        }
        if self.nodes.iter().any(|node| node.name == entry.name) {
            let found = format!("`{}`, which is taken (`muser node remove {0}` frees it)", entry.name);
            return Err(NodeError::caller("the node's name", "a new one", found));
        }
        if let Some(other) = self.by_key(&entry.key) {
            let found = format!("that of `{}`", other.name);
            return Err(NodeError::caller("the node's key", "one that is not known yet", found));
        }
        self.nodes.push(entry);
        Ok(())
    }

    pub(crate) fn parse(path: &Path, text: &str) -> Result<Self, NodeError> {
        let mut registry = Self::default();
        let mut open: Option<(usize, Fields)> = None;
        for (index, line) in text.lines().enumerate() {
            let fault =
                |reason: String| NodeError::Registry { path: path.to_owned(), line: index + 1, reason };
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            if line == "[[node]]" {
                registry.close(path, open.replace((index + 1, Fields::default())))?;
                continue;
            }
            let (key, value) = line
                .split_once('=')
                .ok_or_else(|| fault(format!("`[[node]]` or `key = value` expected, found `{line}`")))?;
            let fields = open.as_mut().map(|(_, fields)| fields);
            let fields = fields.ok_or_else(|| fault("`[[node]]` expected before the first value".into()))?;
            fields.set(key.trim(), value.trim()).map_err(fault)?;
        }
        registry.close(path, open)?;
        Ok(registry)
    }

    fn close(&mut self, path: &Path, open: Option<(usize, Fields)>) -> Result<(), NodeError> {
        let Some((line, fields)) = open else { return Ok(()) };
        let fault = |reason: String| NodeError::Registry { path: path.to_owned(), line, reason };
        let entry = fields.entry().map_err(fault)?;
        self.add(entry).map_err(|error| fault(error.to_string()))
    }

    pub(crate) fn text(&self) -> String {
        let mut text = String::from("# Written by `muser node`; read again when it changes.\n");
        for node in &self.nodes {
            let _ = write!(text, "\n[[node]]\nname = \"{}\"\n", node.name);
            if let Some(address) = &node.address {
                let _ = writeln!(text, "address = \"{address}\"");
            }
            let _ = writeln!(text, "key = \"{}\"", node.key);
            for (name, key) in [("next_key", node.next_key), ("told_key", node.told_key)] {
                if let Some(key) = key {
                    let _ = writeln!(text, "{name} = \"{key}\"");
                }
            }
            let words: Vec<String> = node.rights.words().map(|word| format!("\"{word}\"")).collect();
            let _ = write!(
                text,
                "may = [{}]\ntransfers = {}\nrows_a_minute = {}\nstreams = {}\n",
                words.join(", "),
                node.transfers,
                node.rows_a_minute,
                node.streams
            );
        }
        text
    }
}

/// What has been said of one node so far.
#[derive(Default)]
struct Fields {
    name: Option<String>,
    address: Option<String>,
    keys: [Option<NodeKey>; 3],
    rights: Option<Rights>,
    transfers: Option<u16>,
    rows_a_minute: Option<u32>,
    streams: Option<u8>,
}

impl Fields {
    fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        match key {
            "name" => once(&mut self.name, key, text(value)?),
            "address" => once(&mut self.address, key, text(value)?),
            "key" => once(&mut self.keys[0], key, parse_key(value)?),
            "next_key" => once(&mut self.keys[1], key, parse_key(value)?),
            "told_key" => once(&mut self.keys[2], key, parse_key(value)?),
            "may" => once(&mut self.rights, key, words(value)?),
            "transfers" => once(&mut self.transfers, key, number(value, 64)? as u16),
            "rows_a_minute" => once(&mut self.rows_a_minute, key, number(value, u32::MAX)?),
            "streams" => match number(value, 8)? {
                0 => Err("streams: 1 to 8 expected, found 0".into()),
                streams => once(&mut self.streams, key, streams as u8),
            },
            _ => Err(format!(
                "`name`, `address`, `key`, `may`, `transfers`, `rows_a_minute` or `streams` expected, found `{key}`"
            )),
        }
    }

    fn entry(self) -> Result<Entry, String> {
        let [key, next_key, told_key] = self.keys;
        let name = self.name.ok_or("this node has no `name`")?;
        let key = key.ok_or_else(|| format!("node `{name}` has no `key`"))?;
        let usual = Entry::new(&name, self.address, key, self.rights.unwrap_or_default());
        Ok(Entry {
            next_key,
            told_key,
            transfers: self.transfers.unwrap_or(usual.transfers),
            rows_a_minute: self.rows_a_minute.unwrap_or(usual.rows_a_minute),
            streams: self.streams.unwrap_or(usual.streams),
            ..usual
        })
    }
}

fn once<T>(place: &mut Option<T>, key: &str, value: T) -> Result<(), String> {
    if place.replace(value).is_some() { Err(format!("`{key}` is there twice")) } else { Ok(()) }
}

/// A string without escapes, perhaps with a comment behind it.
fn text(value: &str) -> Result<String, String> {
    let inside = value.strip_prefix('"').and_then(|rest| rest.split_once('"'));
    match inside {
        Some((text, rest)) if !text.contains('\\') && is_comment(rest) => Ok(text.to_owned()),
        _ => Err(format!("a string in quotation marks expected, found `{value}`")),
    }
}

fn is_comment(rest: &str) -> bool {
    let rest = rest.trim_start();
    rest.is_empty() || rest.starts_with('#')
}

fn number(value: &str, limit: u32) -> Result<u32, String> {
    let digits = value.split('#').next().unwrap_or_default().trim();
    let number = digits.parse::<u32>().ok().filter(|number| *number <= limit);
    number.ok_or_else(|| format!("a number up to {limit} expected, found `{value}`"))
}

fn words(value: &str) -> Result<Rights, String> {
    let inside =
        value.strip_prefix('[').and_then(|rest| rest.split_once(']')).filter(|(_, rest)| is_comment(rest));
    let (inside, _) = inside.ok_or_else(|| format!("a list of strings expected, found `{value}`"))?;
    let items = inside.split(',').map(str::trim).filter(|item| !item.is_empty());
    let items: Vec<String> = items.map(text).collect::<Result<_, _>>()?;
    Rights::parse(&items.join(",")).map_err(|error| error.to_string())
}

fn parse_key(value: &str) -> Result<NodeKey, String> {
    text(value)?.parse().map_err(str::to_owned)
}

/// A name that can stand in a command, a URL and a metric.
fn check_name(name: &str) -> Result<(), NodeError> {
    let is_good = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    if (1..=63).contains(&name.len()) && name.bytes().all(is_good) && name != "off" {
        return Ok(());
    }
    let expected = "1 to 63 letters, digits, `-`, `_` and `.`, and not `off`";
    Err(NodeError::caller("the node's name", expected, format!("`{name}`")))
}

/// Checks that an address is a host and a port.
///
/// # Errors
/// If it is not.
pub fn check_address(address: &str) -> Result<(), NodeError> {
    let good = address.rsplit_once(':').is_some_and(|(host, port)| {
        let is_host = !host.is_empty()
            && host.bytes().all(|byte| byte.is_ascii_graphic() && !b"\"\\/@".contains(&byte));
        let is_bare_v6 = host.contains(':') && !(host.starts_with('[') && host.ends_with(']'));
        is_host && !is_bare_v6 && port.parse::<u16>().is_ok_and(|port| port != 0)
    });
    if good {
        return Ok(());
    }
    Err(NodeError::caller(
        "the node's address",
        "`HOST:PORT` (an IPv6 address in brackets)",
        format!("`{address}`"),
    ))
}

/// A registry that is read again when its file changes.
#[derive(Debug)]
pub(crate) struct Watch {
    home: PathBuf,
    stamp: Option<Stamp>,
    pub(crate) registry: Registry,
}

impl Watch {
    pub(crate) fn new(home: &Path) -> Result<Self, NodeError> {
        let stamp = Stamp::of(&Registry::path(home));
        Ok(Self { home: home.to_owned(), stamp, registry: Registry::read(home)? })
    }

    /// Has it changed? While the file cannot be used nobody is trusted.
    pub(crate) fn look(&mut self) -> Result<bool, NodeError> {
        let stamp = Stamp::of(&Registry::path(&self.home));
        if stamp == self.stamp {
            return Ok(false);
        }
        let read = Registry::read(&self.home);
        self.stamp = stamp;
        let changed = match &read {
            Ok(registry) => *registry != self.registry,
            Err(_) => !self.registry.nodes.is_empty(),
        };
        self.registry = read.as_ref().map(Clone::clone).unwrap_or_default();
        read.map(|_| changed)
    }
}

/// What a peer's HELLO changes in the registry: a key that it announces, or that it has begun to use.
pub(crate) fn note_keys(home: &Path, used: NodeKey, hello: &Hello) -> Result<(), NodeError> {
    Registry::update(home, |registry| {
        let Some(entry) = registry.nodes.iter_mut().find(|node| node.has_key(&used)) else { return Ok(()) };
        if entry.next_key == Some(used) {
            (entry.key, entry.next_key) = (used, None);
        }
        if hello.next_key != NodeKey([0; 32]) && hello.next_key != entry.key {
            entry.next_key = Some(hello.next_key);
        }
        entry.told_key = Some(hello.knows);
        Ok(())
    })
}
