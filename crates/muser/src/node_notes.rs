//! What was found out about nodes, kept for the next process: `nodes-seen.json` in muser's folder, private as `nodes.toml` is.
//!
//! Nothing depends on it but which nodes are asked: a file that is lost or cannot be read is one without notes, and nodes are
//! shown anew.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use muser_handoff::{
    BUILD, Entry, Facts, Hello, NodeError, NodeKey, lock_private, read_private, write_private,
};
use serde::{Deserialize, Serialize};

const MAX_BYTES: u64 = 1 << 20;

/// All notes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Notes {
    /// What the last engine with nodes computed here.
    pub ours: Option<Ours>,
    /// By name.
    pub nodes: BTreeMap<String, Note>,
}

/// What an engine computes: what nodes compare.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Ours {
    pub identity: String,
    pub window: u32,
    pub parts: Vec<OurPart>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OurPart {
    pub name: String,
    pub shown: String,
    pub digest: String,
}

/// What is known of a node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Note {
    /// The key that it had.
    pub key: String,
    /// What its last canary or audit found.
    pub canary: Option<Canary>,
    pub bytes_per_s: Option<f64>,
    pub last_fault: Option<String>,
}

impl Note {
    /// Has it given other bits?
    pub fn is_aside(&self) -> bool {
        self.canary.as_ref().is_some_and(|canary| !canary.equal)
    }
}

/// What a comparison of bits found, and between which programs and models it was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Canary {
    pub equal: bool,
    /// What was found, where bits differ.
    pub found: Option<String>,
    pub theirs: String,
    pub ours: String,
    pub identity: String,
}

/// Where two nodes differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    pub part: String,
    pub ours: String,
    pub theirs: String,
}

impl Difference {
    /// What would have to change.
    pub fn remedy(&self) -> &'static str {
        match &*self.part {
            "numeric route" | "KV type" => "start both with the same --kv and --prefill exact",
            "layout" => "run the same version of muser on both",
            "window" => "use the draft on both or on none",
            _ => "give both the same model file",
        }
    }
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { part, ours, theirs } = self;
        write!(f, "unlike in its {part} (here {ours}, there {theirs}): {}", self.remedy())
    }
}

impl Ours {
    pub fn of(facts: &Facts) -> Self {
        let part = |part: &muser_handoff::Part| OurPart {
            name: part.name.clone(),
            shown: part.shown.clone(),
            digest: hex(part.digest),
        };
        let parts = facts.parts.iter().map(part).collect();
        Self { identity: hex(facts.identity), window: facts.window, parts }
    }

    /// Where a node differs that computes something else.
    pub fn difference(&self, hello: &Hello) -> Option<Difference> {
        let of =
            |part: &str, ours: String, theirs: String| Difference { part: part.to_owned(), ours, theirs };
        if self.identity == hex(hello.identity) {
            let short = hello.window < self.window;
            return short.then(|| of("window", self.window.to_string(), hello.window.to_string()));
        }
        let differing = self.parts.iter().find_map(|ours| {
            let theirs = hello.parts.iter().find(|theirs| theirs.name == ours.name);
            let same = theirs.is_some_and(|theirs| hex(theirs.digest) == ours.digest);
            let shown = || theirs.map_or_else(|| "nothing".to_owned(), |theirs| theirs.shown.clone());
            (!same).then(|| of(&ours.name, ours.shown.clone(), shown()))
        });
        let short = |text: &str| text.chars().take(8).collect();
        Some(differing.unwrap_or_else(|| of("identity", short(&self.identity), short(&hex(hello.identity)))))
    }
}

impl Notes {
    pub fn path(home: &Path) -> PathBuf {
        home.join("nodes-seen.json")
    }

    /// What is known; nothing where the file cannot be used.
    pub fn read(home: &Path) -> Self {
        let read = read_private(&Self::path(home), MAX_BYTES);
        let bytes = read.unwrap_or_else(|error| {
            tracing::warn!("what was found out about nodes is not used: {error}");
            None
        });
        bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default()
    }

    /// Changes the file, if there is something to change.
    pub fn update(home: &Path, change: impl FnOnce(&mut Self)) -> Result<(), NodeError> {
        let path = Self::path(home);
        let _lock = lock_private(&path)?;
        let before = Self::read(home);
        let mut after = before.clone();
        change(&mut after);
        if after == before {
            return Ok(());
        }
        let text = serde_json::to_vec(&after).map_err(|error| NodeError::System(error.to_string()))?;
        write_private(&path, &text)
    }

    /// The note on a node; one of another key of that name is begun anew.
    pub fn of(&mut self, name: &str, key: NodeKey) -> &mut Note {
        let note = self.nodes.entry(name.to_owned()).or_default();
        if note.key != key.to_string() {
            *note = Note { key: key.to_string(), ..Note::default() };
        }
        note
    }

    /// What was found of a node, if that was of these programs and this model.
    pub fn verdict(&self, name: &str, key: NodeKey, build: &str, identity: &str) -> Option<&Canary> {
        let note = self.nodes.get(name).filter(|note| note.key == key.to_string())?;
        let canary = note.canary.as_ref()?;
        (canary.theirs == build && canary.ours == BUILD && canary.identity == identity).then_some(canary)
    }

    /// The last thing that was found of a node, whatever it was of.
    pub fn note(&self, entry: &Entry) -> Option<&Note> {
        self.nodes.get(&entry.name).filter(|note| note.key == entry.key.to_string())
    }
}

/// A digest as text.
pub fn hex(digest: [u8; 32]) -> String {
    NodeKey(digest).to_string()
}
