//! LOAD, QUOTE, QUOTED, REQUEST: what is asked before anything is sent.

use std::sync::Arc;

use crate::encode::{Reader, Writer};
use crate::frame::transfer::Reason;
use crate::ids::{Digest, Nonce, TransferId};
use crate::plan::{MAX_POSITIONS, MAX_STAGES, Span};
use crate::ranges::MAX_RANGES;
use crate::{RangeSet, Refusal};

const MAX_RATES: usize = 16;
const MAX_HASHES: usize = (MAX_POSITIONS / 256) as usize;

/// How busy a node is. Sent every second while there is work, every five without, and after a change: also the sign of life of
/// a connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// The speaker's clock in milliseconds, for the peer to send back.
    pub stamp_ms: u32,
    /// The peer's last stamp; 0 without one.
    pub echo_ms: u32,
    /// How long that one lay here.
    pub held_ms: u32,
    /// Rows that wait or are being computed.
    pub queued_rows: u32,
    /// Sequences that run.
    pub running: u16,
    /// Places for them.
    pub places: u16,
    /// Bytes that KV blocks could still take.
    pub free_bytes: u64,
    /// Rows a second of a prompt, at ascending depths.
    pub rates: Vec<(u32, u32)>,
    /// Takes nothing new.
    pub draining: bool,
}

impl Load {
    pub(super) fn encode(&self, writer: &mut Writer) {
        writer.u32(self.stamp_ms);
        writer.u32(self.echo_ms);
        writer.u32(self.held_ms);
        writer.u32(self.queued_rows);
        writer.u16(self.running);
        writer.u16(self.places);
        writer.u64(self.free_bytes);
        writer.u8(u8::from(self.draining));
        writer.list(&self.rates, |writer, &(depth, rate)| {
            writer.u32(depth);
            writer.u32(rate);
        });
    }

    pub(super) fn decode(of: &mut Reader<'_>) -> Result<Self, Refusal> {
        let mut load = Self {
            stamp_ms: of.u32("stamp_ms")?,
            echo_ms: of.u32("echo_ms")?,
            held_ms: of.u32("held_ms")?,
            queued_rows: of.u32("queued_rows")?,
            running: of.u16("running")?,
            places: of.u16("places")?,
            free_bytes: of.u64("free_bytes")?,
            draining: flag(of, "draining")?,
            rates: Vec::new(),
        };
        load.rates = of.list("rates", MAX_RATES, 8, |of| Ok((of.u32("depth")?, of.u32("rate")?)))?;
        if !load.rates.is_sorted_by(|a, b| a.0 < b.0) {
            return Err(Refusal::Malformed { field: "rates", found: load.rates.len() as u64 });
        }
        Ok(load)
    }
}

/// How soon would a prefix be there? Hashes and counts, no ids: the tokens go to the chosen node alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quote {
    /// The asker's number for the question.
    pub question: u32,
    /// What must have computed it.
    pub identity: Digest,
    /// Positions wanted.
    pub positions: u32,
    /// Positions that the asker has.
    pub held: u32,
    /// Chain hashes of the whole blocks, so that the node sees what it has; those of one tenant are none of another's.
    pub hashes: Vec<Digest>,
}

impl Quote {
    pub(super) const MAX_BYTES: usize = 64 + 32 * MAX_HASHES;

    pub(super) fn encode(&self, writer: &mut Writer) {
        writer.u32(self.question);
        writer.fixed(&self.identity);
        writer.u32(self.positions);
        writer.u32(self.held);
        writer.list(&self.hashes, |writer, hash| writer.fixed(hash));
    }

    pub(super) fn decode(of: &mut Reader<'_>) -> Result<Self, Refusal> {
        let quote = Self {
            question: of.u32("question")?,
            identity: of.array("identity")?,
            positions: of.u32("positions")?,
            held: of.u32("held")?,
            hashes: of.list("hashes", MAX_HASHES, 32, |of| of.array("hash"))?,
        };
        if quote.positions == 0 || quote.positions > MAX_POSITIONS {
            return Err(Refusal::Malformed { field: "positions", found: u64::from(quote.positions) });
        }
        if quote.held >= quote.positions {
            return Err(Refusal::Malformed { field: "held", found: u64::from(quote.held) });
        }
        if quote.hashes.len() > quote.positions as usize / 256 {
            return Err(Refusal::Malformed { field: "hashes", found: quote.hashes.len() as u64 });
        }
        Ok(quote)
    }
}

/// The answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quoted {
    /// The question's number.
    pub question: u32,
    /// Positions that the node has, and need not compute.
    pub known: u32,
    /// Milliseconds until it could begin.
    pub wait_ms: u32,
    /// Milliseconds of computing what lacks.
    pub compute_ms: u32,
    /// Why it would not, if it would not.
    pub refused: Option<Reason>,
}

impl Quoted {
    pub(super) fn encode(&self, writer: &mut Writer) {
        writer.u32(self.question);
        writer.u32(self.known);
        writer.u32(self.wait_ms);
        writer.u32(self.compute_ms);
        writer.u8(self.refused.map_or(0, Reason::number));
    }

    pub(super) fn decode(of: &mut Reader<'_>) -> Result<Self, Refusal> {
        Ok(Self {
            question: of.u32("question")?,
            known: of.u32("known")?,
            wait_ms: of.u32("wait_ms")?,
            compute_ms: of.u32("compute_ms")?,
            refused: match of.u8("refused")? {
                0 => None,
                number => Some(Reason::decode(number)?),
            },
        })
    }
}

/// Compute a prefix and send what is not held. Full, delta and resumption are this message with different holdings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Number of the transfer, of no other one that the consumer has on this connection.
    pub transfer: TransferId,
    /// Fresh; the answer must repeat it.
    pub nonce: Nonce,
    /// Drawn once for a prefix and repeated in every request for it, of whichever node.
    pub series: Nonce,
    /// What must have computed it.
    pub identity: Digest,
    /// Are a draft's rows wanted as well? Then its digest, else zeros.
    pub draft: Digest,
    /// Whose prompt it is at the consumer ([`crate::Peers::tenant`]), so that a node keeps apart what the consumer keeps apart;
    /// zeros: everybody's there.
    pub tenant: Digest,
    /// The ids; as many as the cut has positions.
    pub ids: Arc<[u32]>,
    /// Cut, stages, window.
    pub span: Span,
    /// Milliseconds after which nobody wants it any more, from now.
    pub budget_ms: u32,
    /// Smaller is sooner; 128 is a client's.
    pub priority: u8,
    /// Chunks that the consumer had before: no part of roots.
    pub own: RangeSet,
    /// Chunks that came in this series: not sent again, and part of roots.
    pub received: RangeSet,
}

impl Request {
    pub(super) const MAX_BYTES: usize =
        256 + 4 * MAX_POSITIONS as usize + 4 * MAX_STAGES + 2 * 8 * MAX_RANGES;

    /// Are a draft's rows wanted?
    pub fn wants_draft(&self) -> bool {
        self.draft != [0; 32]
    }

    pub(super) fn encode(&self, writer: &mut Writer) {
        writer.u32(self.transfer.0);
        writer.fixed(&self.nonce.0);
        writer.fixed(&self.series.0);
        writer.fixed(&self.identity);
        writer.fixed(&self.draft);
        writer.fixed(&self.tenant);
        writer.u32(self.span.window);
        writer.u32(self.budget_ms);
        writer.u8(self.priority);
        writer.list(&self.span.stages, |writer, stage| writer.u32(*stage));
        self.own.encode(writer);
        self.received.encode(writer);
        // Spans of images, of which version 1 has none.
        writer.u32(0);
        writer.list(&self.ids, |writer, id| writer.u32(*id));
    }

    pub(super) fn decode(of: &mut Reader<'_>) -> Result<Self, Refusal> {
        let transfer = TransferId::decode(of)?;
        let (nonce, series) = (Nonce(of.array("nonce")?), Nonce(of.array("series")?));
        let (identity, draft) = (of.array("identity")?, of.array("draft")?);
        let tenant = of.array("tenant")?;
        let window = of.u32("window")?;
        let budget_ms = of.u32("budget_ms")?;
        let priority = of.u8("priority")?;
        let stages = of.list("stages", MAX_STAGES, 4, |of| of.u32("stage"))?;
        let own = RangeSet::decode(of, "own")?;
        let received = RangeSet::decode(of, "received")?;
        of.list("image spans", 0, 1, |_| Ok(()))?;
        let ids: Arc<[u32]> = of.list("ids", MAX_POSITIONS as usize, 4, |of| of.u32("id"))?.into();
        let span = Span { cut: ids.len() as u32, stages, window };
        span.check()?;
        if budget_ms == 0 {
            return Err(Refusal::Malformed { field: "budget_ms", found: 0 });
        }
        if own.minus(&received) != own {
            return Err(Refusal::Malformed { field: "received", found: received.len() });
        }
        Ok(Self {
            transfer,
            nonce,
            series,
            identity,
            draft,
            tenant,
            ids,
            span,
            budget_ms,
            priority,
            own,
            received,
        })
    }
}

fn flag(of: &mut Reader<'_>, field: &'static str) -> Result<bool, Refusal> {
    match of.u8(field)? {
        0 => Ok(false),
        1 => Ok(true),
        found => Err(Refusal::Malformed { field, found: u64::from(found) }),
    }
}
