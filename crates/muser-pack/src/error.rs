//! What can go wrong with a pack, and whose fault it is.
//!
//! A [`Refusal`] is the important kind: bytes were there and were not believed. Each reason has a name of its own for
//! counters, so that an operator sees whether a disk decays, a key was changed or somebody plays tricks. Messages name
//! objects by their (keyed) names only and never show keys, tokens or text.

use std::path::PathBuf;

/// Why stored bytes were not believed.
#[derive(Clone, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The first bytes are not those of a pack object.
    #[error("not a pack object: it does not begin with the magic number")]
    NotAPack,
    /// Written by another version of the format.
    #[error("format version {found} is not supported, this build reads version {expected}")]
    Version {
        /// What this build reads.
        expected: u16,
        /// What the object says.
        found: u16,
    },
    /// The object ends too early.
    #[error("truncated: {expected} bytes expected, {found} found")]
    Truncated {
        /// Bytes that must be there.
        expected: u64,
        /// Bytes that are there.
        found: u64,
    },
    /// There are bytes behind the end.
    #[error("{found} bytes found where {expected} were expected: something was appended")]
    Trailing {
        /// Bytes that must be there.
        expected: u64,
        /// Bytes that are there.
        found: u64,
    },
    /// A field has a value that no writer produces.
    #[error("malformed: {field} is {found}")]
    Malformed {
        /// The field.
        field: &'static str,
        /// What it holds, as a number.
        found: u64,
    },
    /// A count or a length is above its documented limit.
    #[error("{field} is {found}, more than the limit of {limit}")]
    OverLimit {
        /// The field.
        field: &'static str,
        /// The limit.
        limit: u64,
        /// What it holds.
        found: u64,
    },
    /// Sealed with another store's key.
    #[error("sealed with a foreign key ({found}), this store's key is {expected}")]
    ForeignKey {
        /// Id of our key.
        expected: String,
        /// Id that the object names.
        found: String,
    },
    /// The key epoch was revoked or its secret destroyed.
    #[error("sealed in key epoch {epoch}, which is revoked")]
    RevokedKey {
        /// The epoch.
        epoch: u32,
    },
    /// The key epoch is older than the oldest one that may be read.
    #[error("sealed in key epoch {epoch}, the oldest that may be read is {minimum}")]
    EpochTooOld {
        /// The object's epoch.
        epoch: u32,
        /// The oldest readable one.
        minimum: u32,
    },
    /// The key epoch does not exist (yet): a newer key file wrote it.
    #[error("sealed in key epoch {epoch}, which the key file does not know")]
    UnknownEpoch {
        /// The epoch.
        epoch: u32,
    },
    /// Plain bytes in a store that only takes sealed ones.
    #[error("not encrypted, but this store only takes encrypted objects")]
    NotEncrypted,
    /// The header was changed after it was authenticated, or never was.
    #[error("the header does not match its authentication code")]
    Header,
    /// A piece of content was changed.
    #[error("chunk {index} does not match its authentication code")]
    Chunk {
        /// Which one.
        index: u32,
    },
    /// An authentic object in another one's place.
    #[error("another authentic object was put in this place")]
    Swapped,
    /// An authentic manifest that the catalog does not know (any more).
    #[error("the catalog does not know this manifest (any more): it was put back or replayed")]
    Replayed,
    /// The catalog itself was changed.
    #[error("catalog record {index} does not match its authentication code")]
    Catalog {
        /// Which record.
        index: u64,
    },
    /// The store as a whole is older than what was last seen of it.
    #[error(
        "the catalog has {found} records where {expected} had been seen: the store was rolled back, or \
             its catalog replaced; `muser pack accept` takes it as it is"
    )]
    RolledBack {
        /// Records seen before.
        expected: u64,
        /// Records now.
        found: u64,
    },
    /// The store has objects, or had a catalog, and has none now.
    #[error(
        "the catalog is missing or empty, and {objects} objects are there: nothing is found, written or deleted until \
         `muser pack recover` has rebuilt it (or `muser pack accept` has taken an emptied store as new)"
    )]
    CatalogMissing {
        /// Objects in the store.
        objects: u64,
    },
    /// Another store than the one that was last seen in this place.
    #[error("another store is in this place than was seen before; `muser pack accept` takes it as it is")]
    UnknownStore,
    /// The pack was computed by something else.
    #[error("computed under another identity: {field} differs")]
    ForeignModel {
        /// The first part of the identity that differs.
        field: &'static str,
    },
    /// A segment that a manifest names is gone.
    #[error("a segment that the manifest names is missing")]
    MissingSegment,
    /// An object of this name exists and has another content.
    #[error("an object of this name exists with another content")]
    Conflict,
    /// A named record is older than one that was committed.
    #[error("revision {found} is older than the committed revision {expected}")]
    OldRevision {
        /// The committed one.
        expected: u64,
        /// What was found.
        found: u64,
    },
}

impl Refusal {
    /// Every counter name, in the order of the counters.
    pub const NAMES: [&'static str; 23] = [
        "not_a_pack",
        "version",
        "truncated",
        "trailing",
        "malformed",
        "over_limit",
        "foreign_key",
        "revoked_key",
        "epoch_too_old",
        "unknown_epoch",
        "not_encrypted",
        "header",
        "chunk",
        "swapped",
        "replayed",
        "catalog",
        "rolled_back",
        "foreign_model",
        "missing_segment",
        "conflict",
        "old_revision",
        "catalog_missing",
        "unknown_store",
    ];

    /// May a good object take the place of one that was refused for this? Also of one that this key can never read again.
    pub(crate) fn may_be_replaced(&self) -> bool {
        let never_again =
            matches!(self, Self::RevokedKey { .. } | Self::EpochTooOld { .. } | Self::NotEncrypted);
        never_again || self.is_of_the_bytes()
    }

    /// Is this a fault of the stored bytes themselves? Then they may be put aside or replaced. Otherwise they may be good:
    /// for another key, epoch or version, or because nothing could be read.
    pub(crate) fn is_of_the_bytes(&self) -> bool {
        match self {
            Self::NotAPack
            | Self::Truncated { .. }
            | Self::Trailing { .. }
            | Self::Malformed { .. }
            | Self::OverLimit { .. }
            | Self::Header
            | Self::Chunk { .. }
            | Self::Swapped
            | Self::Replayed
            | Self::Conflict
            | Self::OldRevision { .. } => true,
            Self::Version { .. }
            | Self::ForeignKey { .. }
            | Self::RevokedKey { .. }
            | Self::EpochTooOld { .. }
            | Self::UnknownEpoch { .. }
            | Self::NotEncrypted
            | Self::Catalog { .. }
            | Self::RolledBack { .. }
            | Self::CatalogMissing { .. }
            | Self::UnknownStore
            | Self::ForeignModel { .. }
            | Self::MissingSegment => false,
        }
    }

    /// Name for counters and logs.
    pub fn name(&self) -> &'static str {
        Self::NAMES[self.number()]
    }

    /// Index into [`Refusal::NAMES`].
    pub fn number(&self) -> usize {
        match self {
            Self::NotAPack => 0,
            Self::Version { .. } => 1,
            Self::Truncated { .. } => 2,
            Self::Trailing { .. } => 3,
            Self::Malformed { .. } => 4,
            Self::OverLimit { .. } => 5,
            Self::ForeignKey { .. } => 6,
            Self::RevokedKey { .. } => 7,
            Self::EpochTooOld { .. } => 8,
            Self::UnknownEpoch { .. } => 9,
            Self::NotEncrypted => 10,
            Self::Header => 11,
            Self::Chunk { .. } => 12,
            Self::Swapped => 13,
            Self::Replayed => 14,
            Self::Catalog { .. } => 15,
            Self::RolledBack { .. } => 16,
            Self::ForeignModel { .. } => 17,
            Self::MissingSegment => 18,
            Self::Conflict => 19,
            Self::OldRevision { .. } => 20,
            Self::CatalogMissing { .. } => 21,
            Self::UnknownStore => 22,
        }
    }
}

/// Why a pack operation failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PackError {
    /// Stored bytes were not believed.
    #[error("{object} is refused: {reason}")]
    Refused {
        /// Which object, by its keyed name.
        object: String,
        /// Why.
        reason: Refusal,
    },
    /// The store cannot take more: byte budget or disk.
    #[error("the pack store is full: {needed_bytes} bytes are needed, {detail}")]
    Full {
        /// Bytes of the object that did not fit.
        needed_bytes: u64,
        /// Which limit.
        detail: String,
    },
    /// There is no such object.
    #[error("{object} is not in the store")]
    NotFound {
        /// Which object.
        object: String,
    },
    /// A file or a folder of the store failed.
    #[error("the pack store failed: cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// Where.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A remote store failed.
    #[error("the pack store failed: {action} of {object}: {reason}")]
    Remote {
        /// What was tried.
        action: &'static str,
        /// Which object.
        object: String,
        /// The store's reason.
        reason: String,
    },
    /// The key file cannot be used.
    #[error("the key file {} cannot be used: {reason}", path.display())]
    KeyFile {
        /// Which file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The system gave no random bytes.
    #[error("the system's random generator failed")]
    Random,
    /// Garbage is being collected; nothing may be read or written for the moment.
    #[error("the pack store is being cleaned up")]
    Busy,
    /// Somebody else has changed it since the caller looked.
    #[error("{what} was changed meanwhile")]
    Changed {
        /// What.
        what: &'static str,
    },
    /// The caller stopped the work.
    #[error("cancelled")]
    Cancelled,
    /// A restore did not stay within the caller's limits.
    #[error("{what}: the limit is {limit}{}", needed.map_or_else(String::new, |needed| format!(", {needed} are needed")))]
    Limit {
        /// Which limit.
        what: &'static str,
        /// The limit.
        limit: u64,
        /// What the restore needs, where that is known.
        needed: Option<u64>,
    },
    /// The caller asked for something that does not exist.
    #[error("{what}: {expected} expected, {found} found")]
    Caller {
        /// What was asked for.
        what: &'static str,
        /// What would have been right.
        expected: String,
        /// What came.
        found: String,
    },
}

impl PackError {
    /// The reason, if bytes were refused.
    pub fn refusal(&self) -> Option<&Refusal> {
        match self {
            Self::Refused { reason, .. } => Some(reason),
            _ => None,
        }
    }

    /// Name for counters: the refusal's, or what kind of failure it was.
    pub fn counter_name(&self) -> &'static str {
        match self {
            Self::Refused { reason, .. } => reason.name(),
            Self::Full { .. } => "full",
            Self::NotFound { .. } => "not_found",
            Self::Io { .. } => "io",
            Self::Remote { .. } => "remote",
            Self::KeyFile { .. } => "key_file",
            Self::Random => "random",
            Self::Busy => "busy",
            Self::Changed { .. } => "changed",
            Self::Cancelled => "cancelled",
            Self::Limit { .. } => "limit",
            Self::Caller { .. } => "caller",
        }
    }

    pub(crate) fn refused(object: impl std::fmt::Display, reason: Refusal) -> Self {
        Self::Refused { object: object.to_string(), reason }
    }

    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>, source: std::io::Error) -> Self {
        Self::Io { action, path: path.into(), source }
    }
}
