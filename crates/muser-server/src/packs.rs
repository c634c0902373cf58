//! Packs and sessions, as far as they concern the server: which prefix is kept, and what is remembered beside it.
//!
//! The engine publishes and restores by itself; nothing here is on a request's way. A *keepsake* (a session, or a slot
//! that was saved under a file name) is a sealed record with what its owner wants back, and a pinned pack of the prefix
//! that belongs to it. Names are checked, and inside the store only keyed hashes of them exist. Every call may wait for a
//! disk: never call one on a thread that drives connections.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use axum::http::StatusCode;
use muser_kv::Unit;
use muser_pack::{Library, PackError, PackId, Scope};
use serde_json::{Value, json};

use crate::error::ApiError;

/// Longest name of a session or a slot file in bytes.
const MAX_NAME_BYTES: usize = 128;

/// How long a save waits for the engine to have published what it computed.
const SETTLE_TIME: Duration = Duration::from_mins(1);

/// What a keepsake is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keepsake {
    /// A conversation.
    Session,
    /// Token ids, saved from a slot.
    Slot,
}

impl Keepsake {
    const ALL: [Self; 2] = [Self::Session, Self::Slot];

    fn kind(self) -> &'static str {
        match self {
            Self::Session => "session",
            Self::Slot => "slot",
        }
    }
}

/// A pack that was found for a prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kept {
    /// Its name.
    pub id: PackId,
    /// Tokens of the prefix that it brings back.
    pub tokens: usize,
    /// Bytes that have to be read for that.
    pub bytes: usize,
}

impl Kept {
    /// For answers and records.
    pub fn json(&self) -> Value {
        json!({"id": self.id.to_string(), "tokens": self.tokens, "bytes": self.bytes})
    }
}

/// What operators want to know of the store.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PackFigures {
    /// Packs.
    pub count: u64,
    /// Bytes of the store.
    pub held_bytes: u64,
    /// Objects that were not believed, by reason.
    pub refusals: Vec<(&'static str, u64)>,
}

/// The store of packs that the loaded model reads and writes.
pub struct Packs {
    library: Library,
    scope: Scope,
    settle: Box<dyn Fn(Duration) -> bool + Send + Sync>,
    /// Held while a keepsake and its pack change together, so that nobody removes a pack that another has just found.
    changing: Mutex<()>,
}

impl Packs {
    /// Packs of `library` under `scope`, which are the loaded model's. `settle` waits until what the engine has computed
    /// so far is published, and says whether it is.
    pub fn new(
        library: Library,
        scope: Scope,
        settle: impl Fn(Duration) -> bool + Send + Sync + 'static,
    ) -> Self {
        Self { library, scope, settle: Box::new(settle), changing: Mutex::new(()) }
    }

    /// The library.
    pub fn library(&self) -> &Library {
        &self.library
    }

    /// How much there is, and what was not believed. May wait for the store.
    pub fn figures(&self) -> PackFigures {
        PackFigures {
            count: self.library.packs().len() as u64,
            held_bytes: self.library.store().usage().map_or(0, |usage| usage.held_bytes),
            refusals: self.library.counters().snapshot().refused().collect(),
        }
    }

    /// Whether a pack belongs to the loaded model as it computes now.
    pub fn is_ours(&self, pack: &muser_pack::PackInfo) -> bool {
        pack.identity == *self.scope.digest()
    }

    /// Waits for the pack of a prefix that the engine has just read, pins it, and remembers what `content` makes of it
    /// under a name. What was remembered there before is replaced, and its pack let go. The content gets no pack if nothing
    /// of the prefix is in the store; prefixes shorter than a block never are.
    pub fn save(
        &self,
        what: Keepsake,
        name: &str,
        ids: &[u32],
        content: impl FnOnce(Option<Kept>) -> Value,
    ) -> Result<Value, ApiError> {
        if !ids.is_empty() && !(self.settle)(SETTLE_TIME) {
            tracing::warn!("packs are not published in time; a save finds what there is");
        }
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let content = content(if ids.is_empty() { None } else { self.pin(ids)? });
        self.remember(what, name, &content)?;
        Ok(content)
    }

    fn pin(&self, ids: &[u32]) -> Result<Option<Kept>, ApiError> {
        let units: Vec<Unit> = ids.iter().copied().map(Unit::token).collect();
        let Some(plan) = self.library.longest(&self.scope, &units, units.len(), false) else {
            return Ok(None);
        };
        self.library.set_pinned(plan.pack, true).map_err(|fault| pack_fault(&fault))?;
        Ok(Some(Kept { id: plan.pack, tokens: plan.positions, bytes: plan.bytes() }))
    }

    fn remember(&self, what: Keepsake, name: &str, content: &Value) -> Result<(), ApiError> {
        let before = self.recall(what, name)?.and_then(|(before, _)| pack_of(&before));
        let bytes = content.to_string().into_bytes();
        self.library.put_record(what.kind(), name, &bytes).map_err(|fault| pack_fault(&fault))?;
        match before.filter(|before| Some(*before) != pack_of(content)) {
            Some(before) => self.let_go(before, false),
            None => Ok(()),
        }
    }

    /// What is remembered under a name, and when it was written. What is not believed (changed by somebody else, sealed
    /// with a lost key) counts as forgotten; the library counts the reason.
    pub fn recall(&self, what: Keepsake, name: &str) -> Result<Option<(Value, u64)>, ApiError> {
        let written = |listed: &muser_pack::RecordInfo| listed.name == name;
        match self.library.record(what.kind(), name) {
            Ok(None) => Ok(None),
            Ok(Some((bytes, _))) => {
                let listed = self.library.records(what.kind()).map_err(|fault| pack_fault(&fault))?;
                let when =
                    listed.iter().find(|listed| written(listed)).map_or(0, |listed| listed.written_unix_s);
                Ok(serde_json::from_slice(&bytes).ok().map(|content| (content, when)))
            }
            Err(PackError::Refused { reason, .. }) => {
                tracing::warn!(reason = reason.name(), "a record is not believed");
                Ok(None)
            }
            Err(fault) => Err(pack_fault(&fault)),
        }
    }

    /// All keepsakes of a kind, by name, with the time of their writing.
    pub fn list(&self, what: Keepsake) -> Result<Vec<(String, Value, u64)>, ApiError> {
        let listed = self.library.records(what.kind()).map_err(|fault| pack_fault(&fault))?;
        let mut found = Vec::with_capacity(listed.len());
        for record in listed {
            if let Ok(Some((bytes, _))) = self.library.record(what.kind(), &record.name)
                && let Ok(content) = serde_json::from_slice(&bytes)
            {
                found.push((record.name, content, record.written_unix_s));
            }
        }
        Ok(found)
    }

    /// Forgets a keepsake and removes its pack, unless another one needs it. `false`: there was none.
    pub fn forget(&self, what: Keepsake, name: &str) -> Result<bool, ApiError> {
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let pack = self.recall(what, name)?.and_then(|(content, _)| pack_of(&content));
        let there = self.library.remove_record(what.kind(), name).map_err(|fault| pack_fault(&fault))?;
        if let Some(pack) = pack {
            self.let_go(pack, true)?;
        }
        Ok(there)
    }

    /// Unpins a pack that no keepsake needs any more, and removes it if asked to.
    fn let_go(&self, pack: PackId, remove: bool) -> Result<(), ApiError> {
        for what in Keepsake::ALL {
            if self.list(what)?.iter().any(|(_, content, _)| pack_of(content) == Some(pack)) {
                return Ok(());
            }
        }
        let outcome = if remove { self.library.remove(pack) } else { self.library.set_pinned(pack, false) };
        match outcome {
            Ok(()) | Err(PackError::NotFound { .. }) => Ok(()),
            Err(fault) => Err(pack_fault(&fault)),
        }
    }
}

impl std::fmt::Debug for Packs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Packs").finish_non_exhaustive()
    }
}

/// The pack that a keepsake names.
fn pack_of(content: &Value) -> Option<PackId> {
    PackId::parse(content["pack"]["id"].as_str()?)
}

/// A name from outside: letters, digits, space, `.`, `_` and `-`, so that it is harmless wherever it is shown.
pub fn check_name(field: &str, name: &str) -> Result<(), ApiError> {
    let plain = |c: char| c.is_alphanumeric() || matches!(c, ' ' | '.' | '_' | '-');
    let fine = (1..=MAX_NAME_BYTES).contains(&name.len())
        && name.chars().all(plain)
        && !name.starts_with('.')
        && name.trim() == name;
    if fine {
        return Ok(());
    }
    Err(ApiError::field(
        field,
        format!(
            "'{field}' must be 1 to {MAX_NAME_BYTES} bytes of letters, digits, spaces, '.', '_' and '-', and not begin \
             with '.'"
        ),
    ))
}

/// A fault of the store as an answer.
pub fn pack_fault(fault: &PackError) -> ApiError {
    match fault {
        PackError::NotFound { .. } => ApiError::not_found("There is no such pack"),
        PackError::Caller { .. } => ApiError::bad(format!("This cannot be kept: {fault}")),
        PackError::Busy => ApiError::unavailable("The store of packs is busy"),
        PackError::Full { .. } => {
            let mut answer = ApiError::bad(format!("The store of packs is full: {fault}"));
            answer.status = StatusCode::INSUFFICIENT_STORAGE;
            answer.code = Some("packs_full");
            answer
        }
        fault => {
            tracing::error!(%fault, "the store of packs failed");
            ApiError::internal("The store of packs failed; the server's log has the reason")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_could_mean_something_else_are_refused() {
        for fine in ["a", "my chat.bin", "Überblick-3_b", &"x".repeat(128)] {
            assert_eq!(check_name("name", fine), Ok(()), "{fine}");
        }
        for wrong in [
            "",
            ".",
            "..",
            ".hidden",
            "../a",
            "a/b",
            "a\\b",
            "a\0b",
            "a\nb",
            " a",
            "a ",
            "a:b",
            &"x".repeat(129),
        ] {
            assert!(check_name("name", wrong).is_err(), "{wrong:?}");
        }
    }
}
