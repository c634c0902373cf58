//! Packs and sessions, as far as they concern the server: which prefix is kept, and what is remembered beside it.
//!
//! The engine publishes and restores by itself; nothing here is on a request's way. A *keepsake* (a session, or a slot
//! that was saved under a file name) is a sealed record with what its owner wants back, and a pinned pack of the prefix
//! that belongs to it. Names are checked, and inside the store only keyed hashes of them exist. Every call may wait for a
//! disk: never call one on a thread that drives connections.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::http::StatusCode;
use muser_kv::PositionKey;
use muser_pack::{Expect, Library, PackError, PackId, RecordInfo, Refusal, Scope};
use serde_json::{Value, json};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::ApiError;
use crate::owner::Owner;

/// Longest name of a session or a slot file in bytes.
const MAX_NAME_BYTES: usize = 128;

/// Of the store's budget one key's pinned packs may take one part in so many.
const PINNED_SHARE: u64 = 2;

/// Most saves at a time. Each has a thread of the pool on which all prompts are prepared.
const MOST_SAVES: usize = 32;

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

/// Where a keepsake is: whose, of which kind, under which name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Whose it is.
    pub owner: Owner,
    /// What it is.
    pub what: Keepsake,
    /// Its name, which is checked.
    pub name: String,
}

/// In which state a name must be for what is to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Whatever.
    Any,
    /// Nothing is remembered under it.
    New,
    /// What was created then is.
    Created(u64),
}

impl Place {
    /// A place of whoever is being answered.
    pub fn of_current(what: Keepsake, name: &str) -> Result<Self, ApiError> {
        Ok(Self { owner: Owner::current()?, what, name: name.to_owned() })
    }

    fn kind(&self) -> String {
        self.owner.record_kind(self.what.kind())
    }

    fn check(&self, state: State, before: Option<(u64, &Value)>) -> Result<Expect, ApiError> {
        match (state, before) {
            (State::Any, _) => Ok(Expect::Anything),
            (State::New, None) => Ok(Expect::Absent),
            (State::Created(time), Some((revision, content))) if content["created"] == time => {
                Ok(Expect::Revision(revision))
            }
            _ => Err(self.changed()),
        }
    }

    fn changed(&self) -> ApiError {
        let kind = self.what.kind();
        ApiError::conflict(
            "name",
            format!(
                "There is a {kind} of this name, or it was changed meanwhile; save to it, or delete it first"
            ),
        )
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
    /// Lookups of prompts that are there under another KV type, numeric route or model.
    pub unlike: u64,
}

/// What a revision of a keepsake names.
#[derive(Clone, Copy)]
struct Naming {
    revision: u64,
    pack: Option<PackId>,
}

/// The store of packs that the loaded model reads and writes.
pub struct Packs {
    library: Library,
    scope: Scope,
    settle: Box<dyn Fn(Duration) -> bool + Send + Sync>,
    most_keepsakes: usize,
    most_keepsake_bytes: u64,
    /// Saves may wait long for a disk; a few at a time do.
    saving: Arc<Semaphore>,
    /// The packs that keepsakes name, with the revisions that say so: no need to read all of them when one is let go.
    named: Mutex<HashMap<(String, String), Naming>>,
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
        let limits = crate::Limits::default();
        Self {
            library,
            scope,
            settle: Box::new(settle),
            most_keepsakes: limits.keepsakes_per_owner,
            most_keepsake_bytes: limits.keepsake_bytes_per_owner,
            saving: Arc::new(Semaphore::new(MOST_SAVES)),
            named: Mutex::default(),
            changing: Mutex::new(()),
        }
    }

    /// The same with other limits on how much one owner may keep.
    #[must_use]
    pub fn with_most_keepsakes(self, most_keepsakes: usize, most_keepsake_bytes: u64) -> Self {
        Self { most_keepsakes, most_keepsake_bytes, ..self }
    }

    /// The right to save something, until it is dropped.
    ///
    /// # Errors
    /// 429 while as many as may are saving.
    pub fn begin_save(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        Arc::clone(&self.saving).try_acquire_owned().map_err(|_| ApiError::queue_full(1))
    }

    /// The library.
    pub fn library(&self) -> &Library {
        &self.library
    }

    /// How much there is, and what was not believed. May wait for the store.
    pub fn figures(&self) -> PackFigures {
        let counted = self.library.counters().snapshot();
        PackFigures {
            count: self.library.packs().len() as u64,
            held_bytes: self.library.store().usage().map_or(0, |usage| usage.held_bytes),
            refusals: counted.refused().collect(),
            unlike: counted.unlike,
        }
    }

    /// Whether a pack belongs to the loaded model as it computes now.
    pub fn is_ours(&self, pack: &muser_pack::PackInfo) -> bool {
        pack.identity == *self.scope.digest()
    }

    /// The packs of an owner.
    pub fn of_owner(&self, owner: Owner) -> Vec<muser_pack::PackInfo> {
        let tenant = *self.scope_of(owner).tenant_id();
        let mut packs = self.library.packs();
        packs.retain(|pack| pack.tenant == tenant);
        packs
    }

    /// A pack of an owner's.
    pub fn find(&self, owner: Owner, id: PackId) -> Result<muser_pack::PackInfo, ApiError> {
        let found = self.library.pack(id).filter(|pack| pack.tenant == *self.scope_of(owner).tenant_id());
        found.ok_or_else(|| ApiError::not_found("There is no such pack"))
    }

    /// Pins a pack of an owner's, if that leaves others their share of the store.
    pub fn pin_for(&self, owner: Owner, id: PackId) -> Result<(), ApiError> {
        let pack = self.find(owner, id)?;
        if let (false, Some(budget)) = (owner.is_everybody() || pack.pinned, self.budget()?) {
            let pinned: u64 =
                self.of_owner(owner).iter().filter(|pack| pack.pinned).map(|pack| pack.bytes).sum();
            let most = budget / PINNED_SHARE;
            if pinned.saturating_add(pack.bytes) > most {
                return Err(ApiError::over_quota(format!(
                    "This key has pinned packs of {pinned} bytes; with this one they would take more than {most}"
                )));
            }
        }
        self.library.set_pinned(id, true).map_err(|fault| pack_fault(&fault))
    }

    fn budget(&self) -> Result<Option<u64>, ApiError> {
        Ok(self.library.store().usage().map_err(|fault| pack_fault(&fault))?.budget_bytes)
    }

    fn scope_of(&self, owner: Owner) -> Scope {
        self.library.scope_for(self.scope.identity().clone(), owner.scope(None))
    }

    /// Waits for the pack of a prefix that the engine has just read, pins it, and remembers what `content` makes of it
    /// under a name. What was remembered there before is replaced, and its pack let go. The content gets no pack if nothing
    /// of the prefix is in the store; prefixes shorter than a block never are.
    ///
    /// # Errors
    /// 409 if the name is not as `state` says (any more), whoever has changed it; nothing is kept then.
    pub fn save(
        &self,
        place: &Place,
        state: State,
        ids: &[u32],
        content: impl FnOnce(Option<Kept>) -> Value,
    ) -> Result<Value, ApiError> {
        if !ids.is_empty() && !(self.settle)(SETTLE_TIME) {
            tracing::warn!("packs are not published in time; a save finds what there is");
        }
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.look(place)?;
        let expect = place.check(state, before.as_ref().map(|(info, content)| (info.revision, content)))?;
        let kept = if ids.is_empty() { None } else { self.pin(place.owner, ids)? };
        let content = content(kept);
        let before = before.and_then(|(_, before)| pack_of(&before));
        let bytes = content.to_string().into_bytes();
        let written = self.check_quota(place, bytes.len() as u64).and_then(|()| {
            let written = self.library.put_record_if(&place.kind(), &place.name, &bytes, expect);
            written.map_err(|fault| match fault {
                // Another process was faster.
                PackError::Changed { .. } => place.changed(),
                fault => pack_fault(&fault),
            })
        });
        let unneeded = match &written {
            Ok(_) => before.filter(|before| Some(*before) != pack_of(&content)),
            // What was pinned for nothing is let go.
            Err(_) => kept.map(|kept| kept.id).filter(|id| Some(*id) != before),
        };
        if let Some(unneeded) = unneeded {
            self.let_go(place.owner, unneeded, false)?;
        }
        written.map(|_| content)
    }

    /// Whether a keepsake of so many bytes may take this place, beside what its owner keeps elsewhere.
    fn check_quota(&self, place: &Place, bytes: u64) -> Result<(), ApiError> {
        let mut others = self.library.records(&place.kind()).map_err(|fault| pack_fault(&fault))?;
        others.retain(|record| record.name != place.name);
        let kind = place.what.kind();
        if others.len() >= self.most_keepsakes {
            let most = self.most_keepsakes;
            return Err(ApiError::over_quota(format!("{most} {kind}s are kept already; delete one first")));
        }
        let held: u64 = others.iter().map(|record| record.bytes as u64).sum();
        let most = self.most_keepsake_bytes;
        if held.saturating_add(bytes) > most {
            return Err(ApiError::over_quota(format!(
                "The other {kind}s of this key take {held} bytes; with the {bytes} of this one they would take more than \
                 {most}. Delete one first"
            )));
        }
        Ok(())
    }

    fn pin(&self, owner: Owner, ids: &[u32]) -> Result<Option<Kept>, ApiError> {
        let units: Vec<PositionKey> = ids.iter().copied().map(PositionKey::token).collect();
        let Some(plan) = self.library.longest(&self.scope_of(owner), &units, units.len(), false) else {
            return Ok(None);
        };
        self.pin_for(owner, plan.pack)?;
        Ok(Some(Kept { id: plan.pack, tokens: plan.positions, bytes: plan.bytes() }))
    }

    fn look(&self, place: &Place) -> Result<Option<(RecordInfo, Value)>, ApiError> {
        match self.library.record_with_info(&place.kind(), &place.name) {
            Ok(found) => {
                let content =
                    |(info, bytes): (RecordInfo, Vec<u8>)| Some((info, serde_json::from_slice(&bytes).ok()?));
                Ok(found.and_then(content))
            }
            Err(PackError::Refused { reason, .. }) => {
                tracing::warn!(reason = reason.name(), "a record is not believed");
                Ok(None)
            }
            Err(fault) => Err(pack_fault(&fault)),
        }
    }

    /// What is remembered under a name, and when it was written. What is not believed (changed by somebody else, sealed
    /// with a lost key) counts as forgotten; the library counts the reason.
    pub fn recall(&self, place: &Place) -> Result<Option<(Value, u64)>, ApiError> {
        Ok(self.look(place)?.map(|(info, content)| (content, info.written_unix_s)))
    }

    /// All keepsakes of a kind that an owner has, by name, with the time of their writing.
    pub fn list(&self, owner: Owner, what: Keepsake) -> Result<Vec<(String, Value, u64)>, ApiError> {
        let listed =
            self.library.records(&owner.record_kind(what.kind())).map_err(|fault| pack_fault(&fault))?;
        let mut found = Vec::with_capacity(listed.len());
        for record in listed {
            let place = Place { owner, what, name: record.name };
            if let Ok(Some((info, content))) = self.look(&place) {
                found.push((place.name, content, info.written_unix_s));
            }
        }
        Ok(found)
    }

    /// Forgets a keepsake and removes its pack, unless another one needs it. `false`: there was none.
    pub fn forget(&self, place: &Place) -> Result<bool, ApiError> {
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let pack = self.recall(place)?.and_then(|(content, _)| pack_of(&content));
        let there =
            self.library.remove_record(&place.kind(), &place.name).map_err(|fault| pack_fault(&fault))?;
        if let Some(pack) = pack {
            self.let_go(place.owner, pack, true)?;
        }
        Ok(there)
    }

    /// Does a keepsake of this kind name the pack? Only what was written since the last time is read.
    fn names(&self, owner: Owner, what: Keepsake, pack: PackId) -> Result<bool, ApiError> {
        let kind = owner.record_kind(what.kind());
        let records = self.library.records(&kind).map_err(|fault| pack_fault(&fault))?;
        let mut named = self.named.lock().unwrap_or_else(PoisonError::into_inner);
        let there: HashSet<&str> = records.iter().map(|record| record.name.as_str()).collect();
        named.retain(|(of, name), _| *of != kind || there.contains(name.as_str()));
        let mut found = false;
        for record in &records {
            let key = (kind.clone(), record.name.clone());
            let known = named.get(&key).filter(|known| known.revision == record.revision).copied();
            let naming = if let Some(known) = known {
                known
            } else {
                let place = Place { owner, what, name: record.name.clone() };
                let Ok(Some((info, content))) = self.look(&place) else { continue };
                let naming = Naming { revision: info.revision, pack: pack_of(&content) };
                named.insert(key, naming);
                naming
            };
            found |= naming.pack == Some(pack);
        }
        Ok(found)
    }

    /// Unpins a pack that no keepsake needs any more, and removes it if asked to.
    fn let_go(&self, owner: Owner, pack: PackId, remove: bool) -> Result<(), ApiError> {
        for what in Keepsake::ALL {
            if self.names(owner, what, pack)? {
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
        PackError::Refused { reason: Refusal::OverLimit { limit, found, .. }, .. } => {
            let mut answer =
                ApiError::bad(format!("This is too large to be kept: {found} bytes, at most {limit} are"));
            answer.status = StatusCode::PAYLOAD_TOO_LARGE;
            answer
        }
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
