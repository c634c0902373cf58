//! HELLO: who speaks, and what it computes.

use crate::Refusal;
use crate::encode::{Reader, Writer};
use crate::ids::{Digest, NodeKey, Nonce};
use crate::planes::Planes;

/// Version of the protocol.
pub const VERSION: u16 = 1;

const MAX_PARTS: usize = 32;
const MAX_NAME: usize = 48;
const MAX_SHOWN: usize = 96;
/// Most streams of a connection.
pub(crate) const MAX_STREAMS: u8 = 8;

/// A part of an identity, so that two nodes that do not fit can say why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Such as `weights` or `numeric route`.
    pub name: String,
    /// Its value for people; empty where it is only a digest.
    pub shown: String,
    /// Digest of its value.
    pub digest: Digest,
}

/// This program, as nodes are told ([`Hello::build`]): what was shown of a node holds for one pair of them.
pub const BUILD: &str = concat!("muser ", env!("CARGO_PKG_VERSION"));

/// The first frame of each side on each stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The connection, by a number that its dialler drew: all of its streams say the same.
    pub connection: Nonce,
    /// Which stream this is, from 0.
    pub stream: u8,
    /// Streams that the speaker would use.
    pub streams: u8,
    /// Does the speaker read prompts for others?
    pub serves_prefill: bool,
    /// Does it take and give sessions?
    pub serves_sessions: bool,
    /// Most positions of a prompt.
    pub max_positions: u32,
    /// Most transfers at once that the peer may ask for.
    pub max_transfers: u16,
    /// Rows a minute that the peer may ask for; 0: as many as it likes.
    pub rows_a_minute: u32,
    /// Digest of what is computed and how it lies in memory, without a draft: equal ones may hand to each other.
    pub identity: Digest,
    /// The same of the draft's part; zeros without a draft.
    pub draft: Digest,
    /// Digest of what is computed, however: equal ones may hand to each other where both say `nearby`.
    pub semantic: Digest,
    /// Positions that a row of a sliding layer reads.
    pub window: u32,
    /// What a block consists of.
    pub planes: Planes,
    /// The numeric route, for people.
    pub route: String,
    /// The program and its version, for people.
    pub build: String,
    /// Parts of the identity.
    pub parts: Vec<Part>,
    /// The key by which the speaker knows the peer: shows the peer whether its new key has arrived.
    pub knows: NodeKey,
    /// The speaker's next key while it changes keys; zeros otherwise.
    pub next_key: NodeKey,
    /// Ed25519 by the next key over the domain, the present key and the next one: that the speaker has it. Zeros otherwise.
    pub next_proof: [u8; 64],
}

impl Hello {
    pub(super) fn encode(&self, writer: &mut Writer) {
        writer.u16(VERSION);
        writer.fixed(&self.connection.0);
        writer.u8(self.stream);
        writer.u8(self.streams);
        writer.u8(u8::from(self.serves_prefill) | u8::from(self.serves_sessions) << 1);
        writer.u32(self.max_positions);
        writer.u16(self.max_transfers);
        writer.u32(self.rows_a_minute);
        writer.fixed(&self.identity);
        writer.fixed(&self.draft);
        writer.fixed(&self.semantic);
        writer.u32(self.window);
        self.planes.encode(writer);
        writer.string(&self.route);
        writer.string(&self.build);
        writer.list(&self.parts, |writer, part| {
            writer.string(&part.name);
            writer.string(&part.shown);
            writer.fixed(&part.digest);
        });
        writer.fixed(&self.knows.0);
        writer.fixed(&self.next_key.0);
        writer.fixed(&self.next_proof);
    }

    pub(super) fn decode(of: &mut Reader<'_>) -> Result<Self, Refusal> {
        let version = of.u16("version")?;
        if version != VERSION {
            return Err(Refusal::Version { expected: VERSION, found: version });
        }
        let connection = Nonce(of.array("connection")?);
        let (stream, streams) = (of.u8("stream")?, of.u8("streams")?);
        if streams == 0 || streams > MAX_STREAMS {
            return Err(Refusal::Malformed { field: "streams", found: u64::from(streams) });
        }
        if stream >= MAX_STREAMS {
            return Err(Refusal::Malformed { field: "stream", found: u64::from(stream) });
        }
        let serves = of.u8("serves")?;
        if serves > 3 {
            return Err(Refusal::Malformed { field: "serves", found: u64::from(serves) });
        }
        let hello = Self {
            connection,
            stream,
            streams,
            serves_prefill: serves & 1 != 0,
            serves_sessions: serves & 2 != 0,
            max_positions: of.u32("max_positions")?,
            max_transfers: of.u16("max_transfers")?,
            rows_a_minute: of.u32("rows_a_minute")?,
            identity: of.array("identity")?,
            draft: of.array("draft")?,
            semantic: of.array("semantic")?,
            window: of.u32("window")?,
            planes: Planes::decode(of)?,
            route: of.string("route", MAX_NAME)?,
            build: of.string("build", MAX_NAME)?,
            parts: of.list("parts", MAX_PARTS, 34, |of| {
                Ok(Part {
                    name: of.string("part name", MAX_NAME)?,
                    shown: of.string("part shown", MAX_SHOWN)?,
                    digest: of.array("part digest")?,
                })
            })?,
            knows: NodeKey(of.array("knows")?),
            next_key: NodeKey(of.array("next_key")?),
            next_proof: of.array("next_proof")?,
        };
        if hello.planes.has_draft() != (hello.draft != [0; 32]) {
            return Err(Refusal::Malformed { field: "draft", found: 0 });
        }
        if hello.next_key == NodeKey([0; 32]) && hello.next_proof != [0; 64] {
            return Err(Refusal::Malformed { field: "next_proof", found: 0 });
        }
        Ok(hello)
    }

    /// Is it of somebody who only looks, and has no engine?
    pub fn is_visit(&self) -> bool {
        self.identity == [0; 32]
    }

    /// The first part of the identity in which two nodes differ: what would have to change for them to fit.
    pub fn first_difference<'a>(&'a self, other: &'a Self) -> Option<(&'a Part, Option<&'a Part>)> {
        self.parts.iter().find_map(|part| {
            let theirs = other.parts.iter().find(|theirs| theirs.name == part.name);
            (theirs.map(|theirs| theirs.digest) != Some(part.digest)).then_some((part, theirs))
        })
    }
}
