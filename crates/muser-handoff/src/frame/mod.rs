//! The messages, byte by byte as `docs/formats/handoff.md` has them.
//!
//! A frame is a header of 8 bytes and a body. [`Header::decode`] is all that is looked at before it is known that somebody
//! waits for the frame; it bounds the body by its kind.

mod ask;
mod hello;
mod transfer;

pub use ask::{Load, Quote, Quoted, Request};
pub use hello::{BUILD, Hello, Part, VERSION};
pub use transfer::{Abort, Ack, Begin, ChunkHead, Nack, Progress, Reason, Seal, StageEnd, holdings_digest};

use crate::Refusal;
use crate::encode::{Reader, Writer};
use crate::planes::MAX_CHUNK_BYTES;

/// Bytes of a header.
pub const HEADER_BYTES: usize = 8;

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum Kind {
    /// Who speaks.
    Hello = 1,
    /// How busy a node is; also the sign of life.
    Load = 2,
    /// How soon would this prefix be there?
    Quote = 3,
    /// That soon.
    Quoted = 4,
    /// Compute and send a prefix.
    Request = 5,
    /// It is admitted.
    Begin = 6,
    /// Rows.
    Chunk = 7,
    /// How far computing is; what may be sent.
    Progress = 8,
    /// All chunks of a stage are sent.
    Stage = 9,
    /// All chunks are sent.
    Seal = 10,
    /// The prefix is installed.
    Ack = 11,
    /// What was sent is not believed.
    Nack = 12,
    /// It is over.
    Abort = 13,
}

impl Kind {
    const ALL: [Self; 13] = [
        Self::Hello,
        Self::Load,
        Self::Quote,
        Self::Quoted,
        Self::Request,
        Self::Begin,
        Self::Chunk,
        Self::Progress,
        Self::Stage,
        Self::Seal,
        Self::Ack,
        Self::Nack,
        Self::Abort,
    ];

    /// Its name in the documents.
    pub fn name(self) -> &'static str {
        match self {
            Self::Hello => "HELLO",
            Self::Load => "LOAD",
            Self::Quote => "QUOTE",
            Self::Quoted => "QUOTED",
            Self::Request => "REQUEST",
            Self::Begin => "BEGIN",
            Self::Chunk => "CHUNK",
            Self::Progress => "PROGRESS",
            Self::Stage => "STAGE",
            Self::Seal => "SEAL",
            Self::Ack => "ACK",
            Self::Nack => "NACK",
            Self::Abort => "ABORT",
        }
    }

    /// Most bytes of a body.
    pub fn limit(self) -> usize {
        match self {
            Self::Hello => 8 << 10,
            Self::Load => 512,
            Self::Quote => Quote::MAX_BYTES,
            Self::Request => Request::MAX_BYTES,
            Self::Begin => 1 << 10,
            Self::Chunk => ChunkHead::BYTES + MAX_CHUNK_BYTES,
            Self::Quoted
            | Self::Progress
            | Self::Stage
            | Self::Seal
            | Self::Ack
            | Self::Nack
            | Self::Abort => 128,
        }
    }
}

/// What stands before a body: kind u16, zero u16, bytes of the body u32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What follows.
    pub kind: Kind,
    /// Bytes of it.
    pub body: u32,
}

impl Header {
    /// Its bytes.
    pub fn encode(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..2].copy_from_slice(&(self.kind as u16).to_le_bytes());
        bytes[4..].copy_from_slice(&self.body.to_le_bytes());
        bytes
    }

    /// Reads one. Nothing is allocated.
    pub fn decode(bytes: [u8; HEADER_BYTES]) -> Result<Self, Refusal> {
        let [a, b, zero, zero_too, length @ ..] = bytes;
        let found = u16::from_le_bytes([a, b]);
        let kind = Kind::ALL.into_iter().find(|kind| *kind as u16 == found).ok_or(Refusal::Kind { found })?;
        if (zero, zero_too) != (0, 0) {
            return Err(Refusal::Reserved);
        }
        let body = u32::from_le_bytes(length);
        if body as usize > kind.limit() {
            return Err(Refusal::Length { limit: kind.limit() as u64, found: u64::from(body) });
        }
        Ok(Self { kind, body })
    }
}

/// A message without the rows of a chunk, which are handed about apart from it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    /// See [`Kind`].
    Hello(Box<Hello>),
    /// See [`Kind`].
    Load(Load),
    /// See [`Kind`].
    Quote(Quote),
    /// See [`Kind`].
    Quoted(Quoted),
    /// See [`Kind`].
    Request(Box<Request>),
    /// See [`Kind`].
    Begin(Box<Begin>),
    /// See [`Kind`].
    Chunk(ChunkHead),
    /// See [`Kind`].
    Progress(Progress),
    /// See [`Kind`].
    Stage(StageEnd),
    /// See [`Kind`].
    Seal(Seal),
    /// See [`Kind`].
    Ack(Ack),
    /// See [`Kind`].
    Nack(Nack),
    /// See [`Kind`].
    Abort(Abort),
}

impl Frame {
    /// What it is.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Hello(_) => Kind::Hello,
            Self::Load(_) => Kind::Load,
            Self::Quote(_) => Kind::Quote,
            Self::Quoted(_) => Kind::Quoted,
            Self::Request(_) => Kind::Request,
            Self::Begin(_) => Kind::Begin,
            Self::Chunk(_) => Kind::Chunk,
            Self::Progress(_) => Kind::Progress,
            Self::Stage(_) => Kind::Stage,
            Self::Seal(_) => Kind::Seal,
            Self::Ack(_) => Kind::Ack,
            Self::Nack(_) => Kind::Nack,
            Self::Abort(_) => Kind::Abort,
        }
    }

    /// Header and body, the body followed by `payload_bytes` of a chunk's rows that the caller sends behind it.
    pub fn encode(&self, payload_bytes: usize) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.fixed(&[0; HEADER_BYTES]);
        self.encode_body(&mut writer);
        let mut bytes = writer.into_bytes();
        let body = bytes.len() - HEADER_BYTES + payload_bytes;
        bytes[..HEADER_BYTES].copy_from_slice(&Header { kind: self.kind(), body: body as u32 }.encode());
        bytes
    }

    fn encode_body(&self, writer: &mut Writer) {
        match self {
            Self::Hello(frame) => frame.encode(writer),
            Self::Load(frame) => frame.encode(writer),
            Self::Quote(frame) => frame.encode(writer),
            Self::Quoted(frame) => frame.encode(writer),
            Self::Request(frame) => frame.encode(writer),
            Self::Begin(frame) => frame.encode(writer),
            Self::Chunk(frame) => frame.encode(writer),
            Self::Progress(frame) => frame.encode(writer),
            Self::Stage(frame) => frame.encode(writer),
            Self::Seal(frame) => frame.encode(writer),
            Self::Ack(frame) => frame.encode(writer),
            Self::Nack(frame) => frame.encode(writer),
            Self::Abort(frame) => frame.encode(writer),
        }
    }

    /// Reads a body; of a chunk, its head, and what is left are its rows.
    pub fn decode(kind: Kind, body: &[u8]) -> Result<(Self, &[u8]), Refusal> {
        let mut reader = Reader::new(body);
        let of = &mut reader;
        let frame = match kind {
            Kind::Hello => Self::Hello(Box::new(Hello::decode(of)?)),
            Kind::Load => Self::Load(Load::decode(of)?),
            Kind::Quote => Self::Quote(Quote::decode(of)?),
            Kind::Quoted => Self::Quoted(Quoted::decode(of)?),
            Kind::Request => Self::Request(Box::new(Request::decode(of)?)),
            Kind::Begin => Self::Begin(Box::new(Begin::decode(of)?)),
            Kind::Chunk => Self::Chunk(ChunkHead::decode(of)?),
            Kind::Progress => Self::Progress(Progress::decode(of)?),
            Kind::Stage => Self::Stage(StageEnd::decode(of)?),
            Kind::Seal => Self::Seal(Seal::decode(of)?),
            Kind::Ack => Self::Ack(Ack::decode(of)?),
            Kind::Nack => Self::Nack(Nack::decode(of)?),
            Kind::Abort => Self::Abort(Abort::decode(of)?),
        };
        let payload = if kind == Kind::Chunk { reader.rest() } else { &[] };
        reader.finish()?;
        Ok((frame, payload))
    }
}
