//! BEGIN to ABORT: a transfer.

use crate::digest::encode_place;
use crate::encode::{Reader, Writer};
use crate::ids::{Digest, Nonce, TransferId};
use crate::plan::{MAX_STAGES, Place};
use crate::planes::{Planes, decode_component, decode_group};
use crate::{RangeSet, Refusal};

/// Why something is over, or will not begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Reason {
    /// The consumer does not want it any more.
    Cancelled = 1,
    /// The producer needed the memory.
    Gone = 2,
    /// The producer has no place for it.
    Busy = 3,
    /// The peer asks for more than it may.
    Limit = 4,
    /// The peer may not ask for it.
    NotAllowed = 5,
    /// Another model, route or draft.
    Unlike = 6,
    /// The node stops taking requests.
    Draining = 7,
    /// The device failed.
    Device = 8,
    /// The budget is used up.
    Late = 9,
    /// Something that was sent was refused.
    Refused = 10,
    /// The peer was removed from the registry.
    Removed = 11,
    /// Nothing was heard for too long.
    Silent = 12,
    /// The prompt is longer than the node takes.
    TooLong = 13,
    /// A fault of the node itself.
    Internal = 14,
}

impl Reason {
    /// Every reason.
    pub const ALL: [Self; 14] = [
        Self::Cancelled,
        Self::Gone,
        Self::Busy,
        Self::Limit,
        Self::NotAllowed,
        Self::Unlike,
        Self::Draining,
        Self::Device,
        Self::Late,
        Self::Refused,
        Self::Removed,
        Self::Silent,
        Self::TooLong,
        Self::Internal,
    ];

    /// A word for metrics.
    pub fn label(self) -> &'static str {
        match self {
            Self::Cancelled => "cancelled",
            Self::Gone => "gone",
            Self::Busy => "busy",
            Self::Limit => "limit",
            Self::NotAllowed => "not_allowed",
            Self::Unlike => "unlike",
            Self::Draining => "draining",
            Self::Device => "device",
            Self::Late => "late",
            Self::Refused => "refused",
            Self::Removed => "removed",
            Self::Silent => "silent",
            Self::TooLong => "too_long",
            Self::Internal => "internal",
        }
    }

    pub(super) fn number(self) -> u8 {
        self as u8
    }

    pub(super) fn decode(number: u8) -> Result<Self, Refusal> {
        let reason = Self::ALL.into_iter().find(|reason| reason.number() == number);
        reason.ok_or(Refusal::Malformed { field: "reason", found: u64::from(number) })
    }
}

/// The producer's answer: it will compute the prefix, and send exactly this.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Begin {
    /// The transfer.
    pub transfer: TransferId,
    /// The request's nonce.
    pub nonce: Nonce,
    /// The producer's, so that two transfers never have equal BEGINs.
    pub producer_nonce: Nonce,
    /// What computes it.
    pub identity: Digest,
    /// Of the ids ([`crate::prefix_digest`]).
    pub prefix: Digest,
    /// Of the request's holdings ([`holdings_digest`]).
    pub holdings: Digest,
    /// Positions.
    pub cut: u32,
    /// Those of the stages asked for that will be given.
    pub stages: Vec<u32>,
    /// The planes that will come.
    pub planes: Planes,
    /// Chunks that will come.
    pub chunks: u32,
    /// Bytes of their rows.
    pub bytes: u64,
}

impl Begin {
    pub(super) fn encode(&self, writer: &mut Writer) {
        writer.u32(self.transfer.0);
        writer.fixed(&self.nonce.0);
        writer.fixed(&self.producer_nonce.0);
        writer.fixed(&self.identity);
        writer.fixed(&self.prefix);
        writer.fixed(&self.holdings);
        writer.u32(self.cut);
        writer.list(&self.stages, |writer, stage| writer.u32(*stage));
        self.planes.encode(writer);
        writer.u32(self.chunks);
        writer.u64(self.bytes);
    }

    pub(super) fn decode(of: &mut Reader<'_>) -> Result<Self, Refusal> {
        Ok(Self {
            transfer: TransferId::decode(of)?,
            nonce: Nonce(of.array("nonce")?),
            producer_nonce: Nonce(of.array("producer_nonce")?),
            identity: of.array("identity")?,
            prefix: of.array("prefix")?,
            holdings: of.array("holdings")?,
            cut: of.u32("cut")?,
            stages: of.list("stages", MAX_STAGES, 4, |of| of.u32("stage"))?,
            planes: Planes::decode(of)?,
            chunks: of.u32("chunks")?,
            bytes: of.u64("bytes")?,
        })
    }
}

/// What BEGIN repeats of a request's holdings.
pub fn holdings_digest(own: &RangeSet, received: &RangeSet) -> Digest {
    let mut writer = Writer::default();
    own.encode(&mut writer);
    received.encode(&mut writer);
    blake3::derive_key("muser hand-off v1 holdings", &writer.into_bytes())
}

/// A chunk without its rows, which follow: as many bytes as are left of the frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkHead {
    /// The transfer.
    pub transfer: TransferId,
    /// Where the rows belong.
    pub place: Place,
    /// Over place and rows ([`crate::SeriesKey::chunk`]).
    pub digest: Digest,
}

impl ChunkHead {
    /// Bytes of it.
    pub const BYTES: usize = 4 + 12 + 32;

    pub(super) fn encode(&self, writer: &mut Writer) {
        writer.u32(self.transfer.0);
        encode_place(writer, &self.place);
        writer.fixed(&self.digest);
    }

    pub(super) fn decode(of: &mut Reader<'_>) -> Result<Self, Refusal> {
        let transfer = TransferId::decode(of)?;
        let (group, component) = (decode_group(of)?, decode_component(of)?);
        let (layer, block) = (of.u16("layer")?, of.u32("block")?);
        let (first_row, rows) = (of.u16("first_row")?, of.u16("rows")?);
        let place = Place { group, block, component, layer, first_row, rows };
        Ok(Self { transfer, place, digest: of.array("digest")? })
    }
}

/// How it goes; each side sends one every 500 ms at least.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Of the producer.
    Producer {
        /// The transfer.
        transfer: TransferId,
        /// Positions whose rows are final.
        rows: u32,
        /// Milliseconds until the last row is final; `None` where that is not known.
        rest_ms: Option<u32>,
    },
    /// Of the consumer.
    Consumer {
        /// The transfer.
        transfer: TransferId,
        /// Bytes of rows that the producer may have sent since BEGIN.
        credit: u64,
        /// Chunks believed, those of earlier transfers of the series included.
        verified: u32,
        /// Positions that are installed.
        installed: u32,
    },
}

impl Progress {
    /// The transfer.
    pub fn transfer(&self) -> TransferId {
        match self {
            Self::Producer { transfer, .. } | Self::Consumer { transfer, .. } => *transfer,
        }
    }

    pub(super) fn encode(&self, writer: &mut Writer) {
        writer.u32(self.transfer().0);
        match *self {
            Self::Producer { rows, rest_ms, .. } => {
                writer.u8(0);
                writer.u32(rows);
                writer.u32(rest_ms.unwrap_or(u32::MAX));
            }
            Self::Consumer { credit, verified, installed, .. } => {
                writer.u8(1);
                writer.u64(credit);
                writer.u32(verified);
                writer.u32(installed);
            }
        }
    }

    pub(super) fn decode(of: &mut Reader<'_>) -> Result<Self, Refusal> {
        let transfer = TransferId::decode(of)?;
        match of.u8("side")? {
            0 => {
                let (rows, rest) = (of.u32("rows")?, of.u32("rest_ms")?);
                Ok(Self::Producer { transfer, rows, rest_ms: (rest != u32::MAX).then_some(rest) })
            }
            1 => Ok(Self::Consumer {
                transfer,
                credit: of.u64("credit")?,
                verified: of.u32("verified")?,
                installed: of.u32("installed")?,
            }),
            found => Err(Refusal::Malformed { field: "side", found: u64::from(found) }),
        }
    }
}

/// All chunks without which the prefix cannot be resumed at a boundary are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StageEnd {
    /// The transfer.
    pub transfer: TransferId,
    /// The boundary.
    pub boundary: u32,
    /// Root over the digests of those chunks, but for the consumer's own.
    pub root: Digest,
}

impl StageEnd {
    pub(super) fn encode(&self, writer: &mut Writer) {
        writer.u32(self.transfer.0);
        writer.u32(self.boundary);
        writer.fixed(&self.root);
    }

    pub(super) fn decode(of: &mut Reader<'_>) -> Result<Self, Refusal> {
        Ok(Self { transfer: TransferId::decode(of)?, boundary: of.u32("boundary")?, root: of.array("root")? })
    }
}

/// All chunks are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seal {
    /// The transfer.
    pub transfer: TransferId,
    /// Chunks that were sent.
    pub chunks: u32,
    /// Bytes of their rows.
    pub bytes: u64,
    /// Root over the digests of all chunks of the prefix, but for the consumer's own: those of earlier transfers too.
    pub root: Digest,
    /// Binds BEGIN and the root ([`crate::SeriesKey::seal`]).
    pub code: Digest,
}

impl Seal {
    pub(super) fn encode(&self, writer: &mut Writer) {
        writer.u32(self.transfer.0);
        writer.u32(self.chunks);
        writer.u64(self.bytes);
        writer.fixed(&self.root);
        writer.fixed(&self.code);
    }

    pub(super) fn decode(of: &mut Reader<'_>) -> Result<Self, Refusal> {
        Ok(Self {
            transfer: TransferId::decode(of)?,
            chunks: of.u32("chunks")?,
            bytes: of.u64("bytes")?,
            root: of.array("root")?,
            code: of.array("code")?,
        })
    }
}

/// The consumer has installed the prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ack {
    /// The transfer.
    pub transfer: TransferId,
    /// The root that was sealed.
    pub root: Digest,
}

impl Ack {
    pub(super) fn encode(&self, writer: &mut Writer) {
        writer.u32(self.transfer.0);
        writer.fixed(&self.root);
    }

    pub(super) fn decode(of: &mut Reader<'_>) -> Result<Self, Refusal> {
        Ok(Self { transfer: TransferId::decode(of)?, root: of.array("root")? })
    }
}

/// The consumer does not believe what was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nack {
    /// The transfer.
    pub transfer: TransferId,
    /// Index into [`Refusal::NAMES`].
    pub refusal: u16,
}

impl Nack {
    pub(super) fn encode(self, writer: &mut Writer) {
        writer.u32(self.transfer.0);
        writer.u16(self.refusal);
    }

    pub(super) fn decode(of: &mut Reader<'_>) -> Result<Self, Refusal> {
        let (transfer, refusal) = (TransferId::decode(of)?, of.u16("refusal")?);
        if usize::from(refusal) >= Refusal::NAMES.len() {
            return Err(Refusal::Malformed { field: "refusal", found: u64::from(refusal) });
        }
        Ok(Self { transfer, refusal })
    }
}

/// A transfer, or with the id 0 the connection, is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abort {
    /// The transfer; 0 is the connection.
    pub transfer: TransferId,
    /// Is it one that the speaker consumes?
    pub by_consumer: bool,
    /// Why.
    pub reason: Reason,
}

impl Abort {
    pub(super) fn encode(self, writer: &mut Writer) {
        writer.u32(self.transfer.0);
        writer.u8(u8::from(self.by_consumer));
        writer.u8(self.reason.number());
    }

    pub(super) fn decode(of: &mut Reader<'_>) -> Result<Self, Refusal> {
        let transfer = TransferId(of.u32("transfer")?);
        let by_consumer = match of.u8("side")? {
            0 => false,
            1 if transfer.0 != 0 => true,
            found => return Err(Refusal::Malformed { field: "side", found: u64::from(found) }),
        };
        Ok(Self { transfer, by_consumer, reason: Reason::decode(of.u8("reason")?)? })
    }
}
