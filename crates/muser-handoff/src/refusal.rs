//! Why something that a peer sent was not believed. Each reason has a name and a counter of its own, so that an operator
//! sees whether a network decays, a peer is of another make or somebody plays tricks. None shows keys, tokens or text.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

macro_rules! refusals {
    ($($(#[$doc:meta])* $variant:ident $({ $($(#[$field_doc:meta])* $field:ident: $ty:ty),* $(,)? })? = $name:literal, $text:literal;)*) => {
        /// Why a frame was refused. A refused frame ends its transfer, or the connection if it belongs to none.
        #[derive(Clone, Debug, PartialEq, Eq, Hash, thiserror::Error)]
        #[non_exhaustive]
        pub enum Refusal {
            $($(#[$doc])* #[error($text)] $variant $({ $($(#[$field_doc])* $field: $ty),* })?,)*
        }

        #[derive(Clone, Copy)]
        enum Number { $($variant),* }

        impl Refusal {
            /// Every counter name, in the order of the counters.
            pub const NAMES: &'static [&'static str] = &[$($name),*];

            /// Index into [`Refusal::NAMES`].
            pub fn number(&self) -> usize {
                match self { $(Self::$variant $({ $($field: _),* })? => Number::$variant as usize,)* }
            }
        }
    };
}

refusals! {
    /// No frame has this number.
    Kind {
        /// The number.
        found: u16,
    } = "kind", "frame kind {found} is unknown";
    /// A field that must be zero is not.
    Reserved = "reserved", "a reserved field is not zero";
    /// A frame is longer than its kind may be.
    Length {
        /// Bytes of the longest.
        limit: u64,
        /// Bytes announced.
        found: u64,
    } = "length", "a frame of {found} bytes, at most {limit} are allowed";
    /// A frame ends inside a field.
    Truncated {
        /// The field.
        field: &'static str,
    } = "truncated", "the frame ends inside {field}";
    /// Bytes behind the last field.
    Trailing {
        /// How many.
        found: u64,
    } = "trailing", "{found} bytes behind the frame's last field";
    /// A field has a value that no writer produces.
    Malformed {
        /// The field.
        field: &'static str,
        /// What it holds, as a number.
        found: u64,
    } = "malformed", "{field} is {found}";
    /// A count is above its limit.
    OverLimit {
        /// The field.
        field: &'static str,
        /// The limit.
        limit: u64,
        /// What it holds.
        found: u64,
    } = "over_limit", "{field} is {found}, more than the limit of {limit}";
    /// The peer speaks another version.
    Version {
        /// What this build speaks.
        expected: u16,
        /// What the peer speaks.
        found: u16,
    } = "version", "the peer speaks version {found} of the protocol, this build speaks {expected}";
    /// Something came before HELLO, or HELLO came again.
    Order {
        /// The frame.
        frame: &'static str,
    } = "order", "{frame} at a time when it cannot come";
    /// The peer may not ask for this.
    NotAllowed {
        /// The right that it lacks.
        right: &'static str,
    } = "not_allowed", "the peer has no right {right}";
    /// The frame names no transfer that is going on: never asked for, over, or recorded earlier.
    Unsolicited {
        /// The frame.
        frame: &'static str,
    } = "unsolicited", "{frame} for a transfer that nobody has asked for";
    /// An id that is in use names a second transfer.
    TransferInUse = "transfer_in_use", "the id of a transfer that goes on";
    /// SEAL has come, nothing follows, and chunks lack.
    Missing {
        /// How many.
        found: u64,
    } = "missing", "{found} chunks never came";
    /// BEGIN echoes another nonce than the request's.
    Nonce = "nonce", "BEGIN answers another request";
    /// Computed by something else.
    Identity = "identity", "another identity than the one asked for";
    /// Another prefix than the one asked for.
    Prefix = "prefix", "another prefix than the one asked for";
    /// BEGIN says another cut.
    Cut {
        /// Asked for.
        expected: u32,
        /// Said.
        found: u32,
    } = "cut", "a cut at {found} where {expected} was asked for";
    /// BEGIN gives a stage that was not asked for.
    Stages = "stages", "stages that were not asked for";
    /// BEGIN starts from other holdings.
    Holdings = "holdings", "other holdings than those of the request";
    /// BEGIN has other planes than both sides agreed on.
    Planes = "planes", "other planes than both sides have";
    /// BEGIN's totals are not those of the plan.
    Totals {
        /// `chunks` or `bytes`.
        field: &'static str,
        /// By the plan.
        expected: u64,
        /// Said.
        found: u64,
    } = "totals", "{found} {field} where the plan has {expected}";
    /// A chunk that is no part of the transfer.
    Place = "place", "a chunk from a place that is no part of the transfer";
    /// Rows that overlap those of two chunks.
    Rows = "rows", "rows that are no chunk's";
    /// A payload of another length than its rows have.
    Payload {
        /// By the rows.
        expected: u64,
        /// Sent.
        found: u64,
    } = "payload", "{found} bytes of rows that have {expected}";
    /// A chunk that was there already.
    Again = "again", "a chunk that was there already";
    /// A chunk that the request said is held.
    Held = "held", "a chunk that is held";
    /// A chunk's bytes or its place are not what was hashed.
    ChunkDigest = "chunk_digest", "a chunk does not match its digest";
    /// More was sent than there was credit for.
    Credit {
        /// Bytes allowed.
        limit: u64,
        /// Bytes sent.
        found: u64,
    } = "credit", "{found} bytes sent, {limit} allowed";
    /// Credit, rows or what is installed went back.
    Backwards {
        /// Which figure.
        field: &'static str,
    } = "backwards", "{field} went back";
    /// More rows than the transfer has.
    Beyond {
        /// Which figure.
        field: &'static str,
    } = "beyond", "{field} lies beyond the transfer";
    /// A stage that BEGIN did not give, or a second time.
    Stage {
        /// Its positions.
        found: u32,
    } = "stage", "a stage at {found} that BEGIN did not give, or a second time";
    /// A stage's root is not that of its chunks.
    StageRoot = "stage_root", "a stage does not match its chunks";
    /// SEAL's totals are not those of the transfer.
    SealTotals = "seal_totals", "SEAL counts other chunks or bytes than came";
    /// SEAL's root is not that of the chunks.
    SealRoot = "seal_root", "SEAL does not match the chunks";
    /// SEAL does not bind this BEGIN.
    SealCode = "seal_code", "SEAL belongs to another BEGIN";
    /// The producer sealed twice, or sent something after it.
    AfterSeal = "after_seal", "something came behind SEAL that cannot";
    /// ACK for something that was not sealed.
    Ack = "ack", "ACK for another root than the sealed one";
    /// Two streams of one connection say different things.
    Stream = "stream", "a stream that does not belong to its connection";
    /// The peer asks for more at once than it may.
    Limit {
        /// Which limit.
        field: &'static str,
        /// The limit.
        limit: u64,
    } = "limit", "more {field} than the peer may have ({limit})";
    /// The peer announced a key without proving that it has it.
    NextKey = "next_key", "a new key was announced without proof";
}

impl Refusal {
    /// Name for counters and logs.
    pub fn name(&self) -> &'static str {
        Self::NAMES[self.number()]
    }
}

/// Refusals counted by name.
#[derive(Debug)]
pub struct Refusals(Vec<AtomicU64>);

impl Default for Refusals {
    fn default() -> Self {
        Self(Refusal::NAMES.iter().map(|_| AtomicU64::new(0)).collect())
    }
}

impl Refusals {
    /// Counts one.
    pub fn count(&self, refusal: &Refusal) {
        self.0[refusal.number()].fetch_add(1, Relaxed);
    }

    /// Names and totals, in the order of [`Refusal::NAMES`].
    pub fn totals(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        Refusal::NAMES.iter().copied().zip(self.0.iter().map(|counter| counter.load(Relaxed)))
    }
}
