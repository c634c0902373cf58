//! What no peer of this make sends, each with the name of its refusal.

use std::time::Duration;

use super::{IDENTITY, LIMITS, facts, fetch_of, give, hello_of, links, load, refusals, sends, series};
use crate::frame::{
    Abort, Ack, Begin, Frame, HEADER_BYTES, Header, Kind, Nack, Progress, Quote, Quoted, Seal, StageEnd,
};
use crate::link::Link;
use crate::{Nonce, RangeSet, Reason, Refusal, TransferId};

const T: TransferId = TransferId(1);

/// One frame of each kind, as the golden file has them.
pub(super) fn samples() -> Vec<(&'static str, Frame, Vec<u8>)> {
    let now = Duration::ZERO;
    let (mut consumer, mut producer) = links(true, true);
    let mut wanted = series(520, &[256, 512], true, |_, block| block == 0);
    wanted.received = [11..13, 15..16].into_iter().collect();
    let (transfer, request) = consumer.fetch(fetch_of(wanted), Nonce([1; 16]), now).expect("a transfer");
    producer.frame(request.clone(), now);
    let begun = producer.with_producer(transfer, |producer| producer.begin(&[512], Nonce([2; 16]), now));
    let begin = sends(&begun).remove(0);
    let mut all = vec![
        ("hello", Frame::Hello(Box::new(hello_of(&facts(true)))), vec![]),
        ("load", consumer.say_load(load(), Duration::from_millis(77)), vec![]),
        (
            "quote",
            Frame::Quote(Quote {
                question: 3,
                identity: IDENTITY,
                positions: 700,
                held: 256,
                hashes: vec![[4; 32]; 2],
            }),
            vec![],
        ),
        (
            "quoted",
            Frame::Quoted(Quoted { question: 3, known: 512, wait_ms: 10, compute_ms: 250, refused: None }),
            vec![],
        ),
        (
            "quoted busy",
            Frame::Quoted(Quoted {
                question: 4,
                known: 0,
                wait_ms: 0,
                compute_ms: 0,
                refused: Some(Reason::Busy),
            }),
            vec![],
        ),
        ("request", request, vec![]),
        ("begin", begin.clone(), vec![]),
    ];
    for credit in sends(&consumer.frame(begin, now)) {
        producer.frame(credit.clone(), now);
        all.push(("progress of the consumer", credit, vec![]));
    }
    let mut ends = Vec::new();
    let mut chunk = None;
    for number in 0..producer.producer(transfer).expect("it goes on").plan().chunks() {
        let (given, doing) = give(&mut producer, transfer, number);
        // The shortest: rows of the tail.
        if let Some((head, rows)) = given
            && chunk.as_ref().is_none_or(|(_, shortest): &(Frame, Vec<u8>)| rows.len() < shortest.len())
        {
            chunk = Some((Frame::Chunk(head), rows));
        }
        ends.extend(sends(&doing));
    }
    let (head, rows) = chunk.expect("a chunk");
    all.push(("chunk", head, rows));
    for end in ends {
        all.push((if matches!(end, Frame::Seal(_)) { "seal" } else { "stage" }, end, vec![]));
    }
    let rows = Progress::Producer { transfer, rows: 512, rest_ms: Some(90) };
    all.push(("progress of the producer", Frame::Progress(rows), vec![]));
    all.push(("ack", Frame::Ack(Ack { transfer, root: [6; 32] }), vec![]));
    let nack = Nack { transfer, refusal: Refusal::ChunkDigest.number() as u16 };
    all.push(("nack", Frame::Nack(nack), vec![]));
    let abort = Abort { transfer, by_consumer: true, reason: Reason::Cancelled };
    all.push(("abort", Frame::Abort(abort), vec![]));
    all
}

/// Header and body as a stream's reader takes them.
fn read(bytes: &[u8]) -> Result<Frame, Refusal> {
    let (header, body) = bytes.split_at(HEADER_BYTES);
    let header = Header::decode(header.try_into().expect("8 bytes"))?;
    let body = body.get(..header.body as usize).ok_or(Refusal::Truncated { field: "body" })?;
    Frame::decode(header.kind, body).map(|(frame, _)| frame)
}

/// A frame with its body cut off or changed, and the length that goes with it.
fn with_body(frame: &Frame, change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut body = frame.encode(0).split_off(HEADER_BYTES);
    change(&mut body);
    let header = Header { kind: frame.kind(), body: body.len() as u32 };
    [&header.encode()[..], &body].concat()
}

#[test]
fn frames_cut_anywhere_or_with_something_behind_are_refused() {
    let mut cases = 0;
    for (name, frame, _) in samples() {
        let len = frame.encode(0).len() - HEADER_BYTES;
        for cut in 0..len {
            let refused = read(&with_body(&frame, |body| body.truncate(cut))).expect_err(name);
            assert_eq!(refused.name(), "truncated", "{name} cut at {cut}");
            cases += 1;
        }
        if frame.kind() != Kind::Chunk {
            let refused = read(&with_body(&frame, |body| body.push(0))).expect_err(name);
            assert_eq!(refused.name(), "trailing", "{name}");
        }
        assert_eq!(read(&frame.encode(0)), Ok(frame));
    }
    assert!(cases > 1000, "{cases}");
}

#[test]
fn headers_that_nobody_writes() {
    let header = |kind: u16, zero: [u8; 2], body: u32| {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..2].copy_from_slice(&kind.to_le_bytes());
        bytes[2..4].copy_from_slice(&zero);
        bytes[4..].copy_from_slice(&body.to_le_bytes());
        Header::decode(bytes)
    };
    for kind in [0, 14, 15, 255, 256, 0x4547, u16::MAX] {
        assert_eq!(header(kind, [0; 2], 0), Err(Refusal::Kind { found: kind }));
    }
    for kind in 1..=13 {
        for zero in [[1, 0], [0, 1], [255, 255]] {
            assert_eq!(header(kind, zero, 0), Err(Refusal::Reserved));
        }
        let limit = header(kind, [0; 2], 0).expect("a kind").kind.limit();
        assert!(header(kind, [0; 2], limit as u32).is_ok());
        for found in [limit as u32 + 1, u32::MAX] {
            assert_eq!(header(kind, [0; 2], found).expect_err("too long").name(), "length");
        }
    }
    // HTTP, TLS and SSH on the port.
    for start in [*b"GET / HT", [0x16, 3, 1, 2, 0, 1, 0, 1], *b"SSH-2.0-"] {
        assert_eq!(Header::decode(start).expect_err("no frame").name(), "kind");
    }
}

/// A field of a frame: where it lies, what is put there, and what is said of it.
type Case = (&'static str, usize, &'static [u8], &'static str, &'static str);

/// Offsets in the bodies of [`samples`], as `docs/formats/handoff.md` has them.
const FIELDS: &[Case] = &[
    ("hello", 0, &[0, 0], "version", ""),
    ("hello", 0, &[2, 0], "version", ""),
    ("hello", 18, &[8], "malformed", "stream"),
    ("hello", 19, &[0], "malformed", "streams"),
    ("hello", 19, &[9], "malformed", "streams"),
    ("hello", 20, &[4], "malformed", "serves"),
    ("hello", 20, &[255], "malformed", "serves"),
    ("hello", 63, &[0; 32], "malformed", "draft"),
    ("hello", 131, &[0, 0, 0, 0], "malformed", "planes"),
    ("hello", 131, &[5, 0, 0, 0], "over_limit", "planes"),
    ("hello", 131, &[255; 4], "over_limit", "planes"),
    ("hello", 135, &[2], "malformed", "group"),
    ("hello", 136, &[2], "malformed", "component"),
    ("hello", 137, &[0, 0], "malformed", "layers"),
    ("hello", 137, &[1, 4], "malformed", "layers"),
    ("hello", 139, &[0, 0], "malformed", "heads"),
    ("hello", 139, &[65, 0], "malformed", "heads"),
    ("hello", 141, &[0, 0], "malformed", "dim"),
    ("hello", 141, &[6, 0], "malformed", "dim"),
    ("hello", 141, &[4, 4], "malformed", "dim"),
    ("hello", 143, &[0, 0], "malformed", "digits"),
    ("hello", 143, &[3, 0], "malformed", "digits"),
    // The second plane is the first one again, or comes before it.
    ("hello", 145, &[0], "malformed", "planes"),
    ("hello", 135, &[1], "malformed", "planes"),
    ("hello", 165, &[49], "over_limit", "route"),
    ("hello", 166, &[0], "malformed", "route"),
    ("hello", 166, &[0x1b], "malformed", "route"),
    ("hello", 166, &[0xff], "malformed", "route"),
    ("hello", 177, &[200], "over_limit", "build"),
    ("hello", 178, b"\n", "malformed", "build"),
    ("hello", 188, &[33, 0, 0, 0], "over_limit", "parts"),
    ("hello", 188, &[32, 0, 0, 0], "truncated", "parts"),
    ("hello", 192, &[49], "over_limit", "part name"),
    ("hello", 193, &[7], "malformed", "part name"),
    ("hello", 200, &[97], "over_limit", "part shown"),
    ("hello", 297, &[1], "malformed", "next_proof"),
    ("load", 28, &[2], "malformed", "draining"),
    ("load", 29, &[17, 0, 0, 0], "over_limit", "rates"),
    ("load", 29, &[16, 0, 0, 0], "truncated", "rates"),
    ("load", 29, &[255; 4], "over_limit", "rates"),
    ("load", 41, &[0, 0, 0, 0], "malformed", "rates"),
    ("quote", 36, &[0; 4], "malformed", "positions"),
    ("quote", 36, &[255; 4], "malformed", "positions"),
    ("quote", 40, &[188, 2, 0, 0], "malformed", "held"),
    ("quote", 40, &[255; 4], "malformed", "held"),
    ("quote", 36, &[100, 1, 0, 0], "malformed", "hashes"),
    ("quote", 44, &[1, 16, 0, 0], "over_limit", "hashes"),
    ("quote", 44, &[3, 0, 0, 0], "truncated", "hashes"),
    ("quote", 44, &[1, 0, 0, 0], "trailing", ""),
    ("quoted", 16, &[15], "malformed", "reason"),
    ("quoted", 16, &[255], "malformed", "reason"),
    ("request", 0, &[0; 4], "malformed", "transfer"),
    ("request", 132, &[0; 4], "malformed", "window"),
    ("request", 132, &[255; 4], "malformed", "window"),
    ("request", 136, &[0; 4], "malformed", "budget_ms"),
    ("request", 141, &[65, 0, 0, 0], "over_limit", "stages"),
    ("request", 141, &[255; 4], "over_limit", "stages"),
    ("request", 145, &[0, 0, 0, 0], "malformed", "stage"),
    ("request", 145, &[1, 1, 0, 0], "malformed", "stage"),
    ("request", 145, &[0, 2, 0, 0], "malformed", "stage"),
    ("request", 149, &[0, 1, 0, 0], "malformed", "stage"),
    ("request", 149, &[0, 3, 0, 0], "malformed", "stage"),
    ("request", 149, &[8, 2, 0, 0], "malformed", "stage"),
    ("request", 153, &[1, 32, 0, 0], "over_limit", "own"),
    ("request", 153, &[255; 4], "over_limit", "own"),
    ("request", 161, &[0, 0, 0, 0], "malformed", "own"),
    ("request", 165, &[0, 0, 0, 0], "malformed", "own"),
    ("request", 165, &[2, 0, 0, 0], "malformed", "own"),
    ("request", 173, &[1, 32, 0, 0], "over_limit", "received"),
    ("request", 177, &[22, 0, 0, 0], "malformed", "received"),
    ("request", 177, &[0, 0, 0, 0], "malformed", "received"),
    ("request", 185, &[13, 0, 0, 0], "malformed", "received"),
    ("request", 189, &[15, 0, 0, 0], "malformed", "received"),
    ("request", 193, &[1, 0, 0, 0], "over_limit", "image spans"),
    ("request", 193, &[255; 4], "over_limit", "image spans"),
    ("request", 197, &[255; 4], "over_limit", "ids"),
    ("request", 197, &[1, 0, 16, 0], "over_limit", "ids"),
    ("request", 197, &[9, 2, 0, 0], "truncated", "ids"),
    ("request", 197, &[7, 2, 0, 0], "trailing", ""),
    ("begin", 0, &[0; 4], "malformed", "transfer"),
    ("begin", 136, &[65, 0, 0, 0], "over_limit", "stages"),
    ("begin", 136, &[255; 4], "over_limit", "stages"),
    ("begin", 144, &[0, 0, 0, 0], "malformed", "planes"),
    ("begin", 144, &[5, 0, 0, 0], "over_limit", "planes"),
    ("begin", 148, &[9], "malformed", "group"),
    ("begin", 149, &[9], "malformed", "component"),
    ("begin", 150, &[0, 0], "malformed", "layers"),
    ("begin", 152, &[0, 0], "malformed", "heads"),
    ("begin", 154, &[1, 0], "malformed", "dim"),
    ("begin", 156, &[9, 0], "malformed", "digits"),
    ("chunk", 0, &[0; 4], "malformed", "transfer"),
    ("chunk", 4, &[2], "malformed", "group"),
    ("chunk", 4, &[255], "malformed", "group"),
    ("chunk", 5, &[2], "malformed", "component"),
    ("chunk", 5, &[255], "malformed", "component"),
    ("stage", 0, &[0; 4], "malformed", "transfer"),
    ("seal", 0, &[0; 4], "malformed", "transfer"),
    ("progress of the consumer", 0, &[0; 4], "malformed", "transfer"),
    ("progress of the consumer", 4, &[0], "trailing", ""),
    ("progress of the consumer", 4, &[2], "malformed", "side"),
    ("progress of the producer", 4, &[1], "truncated", "verified"),
    ("progress of the producer", 4, &[255], "malformed", "side"),
    ("ack", 0, &[0; 4], "malformed", "transfer"),
    ("nack", 0, &[0; 4], "malformed", "transfer"),
    ("nack", 4, &[255, 0], "malformed", "refusal"),
    ("nack", 4, &[255, 255], "malformed", "refusal"),
    ("abort", 0, &[0; 4], "malformed", "side"),
    ("abort", 4, &[2], "malformed", "side"),
    ("abort", 5, &[0], "malformed", "reason"),
    ("abort", 5, &[15], "malformed", "reason"),
    ("abort", 5, &[255], "malformed", "reason"),
];

fn field_of(refusal: &Refusal) -> &'static str {
    match refusal {
        Refusal::Malformed { field, .. }
        | Refusal::OverLimit { field, .. }
        | Refusal::Truncated { field } => field,
        _ => "",
    }
}

#[test]
fn fields_that_nobody_writes() {
    let samples = samples();
    for (number, (name, at, bytes, refusal, field)) in FIELDS.iter().enumerate() {
        let (_, frame, _) = samples.iter().find(|(sample, ..)| sample == name).expect("a sample");
        let changed = with_body(frame, |body| body[*at..at + bytes.len()].copy_from_slice(bytes));
        let refused = read(&changed).expect_err(name);
        assert_eq!((refused.name(), field_of(&refused)), (*refusal, *field), "case {number}: {name} at {at}");
        assert!(!refused.to_string().is_empty());
    }
    assert!(FIELDS.len() >= 100, "{}", FIELDS.len());
}

/// A consumer that waits for BEGIN, and that BEGIN.
fn waiting() -> (Link, Begin) {
    let now = Duration::ZERO;
    let (mut consumer, mut producer) = links(false, false);
    let has = |_, block| block == 0;
    let (transfer, request) = consumer
        .fetch(fetch_of(series(700, &[256, 512], false, has)), Nonce([1; 16]), now)
        .expect("a transfer");
    producer.frame(request, now);
    let begun = producer.with_producer(transfer, |producer| producer.begin(&[256, 512], Nonce([2; 16]), now));
    let Frame::Begin(begin) = sends(&begun).remove(0) else { panic!("BEGIN") };
    (consumer, *begin)
}

#[test]
fn begins_that_answer_something_else() {
    type Change = fn(&mut Begin);
    let planes = super::planes;
    let cases: &[(&str, Change)] = &[
        ("unsolicited", |begin| begin.transfer = TransferId(2)),
        ("unsolicited", |begin| begin.transfer = TransferId(u32::MAX)),
        ("nonce", |begin| begin.nonce.0[0] ^= 1),
        ("nonce", |begin| begin.nonce = begin.producer_nonce),
        ("nonce", |begin| begin.nonce = Nonce([0; 16])),
        ("identity", |begin| begin.identity[31] ^= 1),
        ("identity", |begin| begin.identity = [0; 32]),
        ("prefix", |begin| begin.prefix[0] ^= 1),
        ("prefix", |begin| begin.prefix = begin.identity),
        ("cut", |begin| begin.cut += 1),
        ("cut", |begin| begin.cut -= 1),
        ("cut", |begin| begin.cut = 0),
        ("cut", |begin| begin.cut = u32::MAX),
        ("holdings", |begin| begin.holdings[7] ^= 1),
        ("holdings", |begin| {
            begin.holdings = crate::frame::holdings_digest(&RangeSet::default(), &RangeSet::default());
        }),
        ("planes", |begin| begin.planes = super::planes(true)),
        ("planes", |begin| {
            let mut planes = begin.planes.as_slice().to_vec();
            planes.pop();
            begin.planes = crate::Planes::new(planes).expect("planes");
        }),
        ("planes", |begin| {
            let mut planes = begin.planes.as_slice().to_vec();
            planes[0].layers += 1;
            begin.planes = crate::Planes::new(planes).expect("planes");
        }),
        ("planes", |begin| {
            let mut planes = begin.planes.as_slice().to_vec();
            planes[1].digits = muser_backend::arith::attention::Digits::Two;
            begin.planes = crate::Planes::new(planes).expect("planes");
        }),
        ("stages", |begin| begin.stages = vec![512, 256]),
        ("stages", |begin| begin.stages = vec![256, 256]),
        ("stages", |begin| begin.stages = vec![384]),
        ("stages", |begin| begin.stages = vec![256, 512, 768]),
        ("stages", |begin| begin.stages = vec![700]),
        ("stages", |begin| begin.stages = vec![0]),
        ("totals", |begin| begin.chunks += 1),
        ("totals", |begin| begin.chunks -= 1),
        ("totals", |begin| begin.chunks = 0),
        ("totals", |begin| begin.chunks = u32::MAX),
        ("totals", |begin| begin.bytes += 1),
        ("totals", |begin| begin.bytes = 0),
        ("totals", |begin| begin.bytes = u64::MAX),
    ];
    assert!(planes(true) != planes(false));
    for (number, (name, change)) in cases.iter().enumerate() {
        let (mut consumer, mut begin) = waiting();
        change(&mut begin);
        let frame = Frame::Begin(Box::new(begin));
        let (doing, held) = muser_testkit::most_held(|| consumer.frame(frame, Duration::ZERO));
        assert!(held < 1 << 20, "case {number} holds {held} bytes");
        assert_eq!(refusals(&doing), [*name], "case {number}");
    }
    let (mut consumer, begin) = waiting();
    assert_eq!(refusals(&consumer.frame(Frame::Begin(Box::new(begin)), Duration::ZERO)), [""; 0]);
}

/// Frames at times when they cannot come, to a consumer that receives and a producer that gives.
#[test]
fn frames_at_the_wrong_time() {
    let now = Duration::ZERO;
    let other = TransferId(9);
    let rows = |transfer, rows| Frame::Progress(Progress::Producer { transfer, rows, rest_ms: None });
    let says = |transfer, credit, verified, installed| {
        Frame::Progress(Progress::Consumer { transfer, credit, verified, installed })
    };
    let stage = |transfer, boundary| Frame::Stage(StageEnd { transfer, boundary, root: [0; 32] });
    let seal = |transfer| Frame::Seal(Seal { transfer, chunks: 0, bytes: 0, root: [0; 32], code: [0; 32] });
    let before_begin: Vec<(&str, Vec<Frame>)> = vec![
        ("order", vec![rows(T, 1)]),
        ("order", vec![stage(T, 256)]),
        ("order", vec![seal(T)]),
        ("unsolicited", vec![stage(other, 256)]),
        ("unsolicited", vec![seal(other)]),
        ("unsolicited", vec![rows(other, 1)]),
        ("unsolicited", vec![says(T, 1, 0, 0)]),
        ("unsolicited", vec![Frame::Ack(Ack { transfer: T, root: [0; 32] })]),
        ("unsolicited", vec![Frame::Nack(Nack { transfer: T, refusal: 0 })]),
        (
            "unsolicited",
            vec![Frame::Quoted(Quoted { question: 1, known: 0, wait_ms: 0, compute_ms: 0, refused: None })],
        ),
        ("order", vec![Frame::Hello(Box::new(hello_of(&facts(false))))]),
    ];
    for (name, frames) in before_begin {
        let (mut consumer, _) = waiting();
        let doing: Vec<_> = frames.into_iter().flat_map(|frame| consumer.frame(frame, now)).collect();
        assert_eq!(refusals(&doing), [name], "{doing:?}");
    }
    let receiving: Vec<(&str, Vec<Frame>)> = vec![
        ("backwards", vec![rows(T, 500), rows(T, 499)]),
        ("beyond", vec![rows(T, 701)]),
        ("beyond", vec![rows(T, u32::MAX)]),
        ("stage", vec![stage(T, 0)]),
        ("stage", vec![stage(T, 300)]),
        ("stage", vec![stage(T, 700)]),
        ("stage", vec![stage(T, 512), stage(T, 512)]),
        ("seal_totals", vec![seal(T)]),
    ];
    for (name, frames) in receiving {
        let (mut consumer, begin) = waiting();
        consumer.frame(Frame::Begin(Box::new(begin)), now);
        let doing: Vec<_> = frames.into_iter().flat_map(|frame| consumer.frame(frame, now)).collect();
        assert_eq!(refusals(&doing), [name], "{doing:?}");
    }
    let giving: Vec<(&str, bool, Vec<Frame>)> = vec![
        ("order", false, vec![says(T, 1, 0, 0)]),
        ("ack", false, vec![Frame::Ack(Ack { transfer: T, root: [0; 32] })]),
        ("ack", true, vec![Frame::Ack(Ack { transfer: T, root: [0; 32] })]),
        ("backwards", true, vec![says(T, 5, 0, 0), says(T, 4, 0, 0)]),
        ("backwards", true, vec![says(T, 5, 0, 256), says(T, 5, 0, 0)]),
        ("beyond", true, vec![says(T, 5, 1000, 0)]),
        ("beyond", true, vec![says(T, 5, 0, 701)]),
        ("unsolicited", true, vec![says(other, 5, 0, 0)]),
        ("unsolicited", true, vec![Frame::Ack(Ack { transfer: other, root: [0; 32] })]),
        ("unsolicited", true, vec![Frame::Nack(Nack { transfer: other, refusal: 0 })]),
        (
            "unsolicited",
            true,
            vec![Frame::Abort(Abort { transfer: other, by_consumer: true, reason: Reason::Late })],
        ),
        ("unsolicited", true, vec![stage(T, 256)]),
        ("unsolicited", true, vec![seal(T)]),
    ];
    for (name, begun, frames) in giving {
        let (mut consumer, mut producer) = links(false, false);
        let wanted = series(700, &[256], false, |_, _| false);
        let (_, request) = consumer.fetch(fetch_of(wanted), Nonce([1; 16]), now).expect("a transfer");
        producer.frame(request, now);
        if begun {
            producer.with_producer(T, |producer| producer.begin(&[256], Nonce([2; 16]), now));
        }
        let doing: Vec<_> = frames.into_iter().flat_map(|frame| producer.frame(frame, now)).collect();
        assert_eq!(refusals(&doing), [name], "{doing:?}");
    }
}

#[test]
fn requests_that_may_not_be_made() {
    let now = Duration::ZERO;
    let request = |change: fn(&mut crate::Request)| {
        let (mut consumer, _) = links(false, false);
        let wanted = series(700, &[256], false, |_, _| false);
        let (_, request) = consumer.fetch(fetch_of(wanted), Nonce([1; 16]), now).expect("a transfer");
        let Frame::Request(mut request) = request else { panic!("REQUEST") };
        change(&mut request);
        Frame::Request(request)
    };
    let answer = |doing: &[crate::link::Doing]| {
        sends(doing)
            .into_iter()
            .find_map(|frame| if let Frame::Abort(abort) = frame { Some(abort.reason) } else { None })
    };
    let cases: Vec<(&[&str], Option<Reason>, Frame)> = vec![
        (&["identity"], Some(Reason::Unlike), request(|request| request.identity[0] ^= 1)),
        (&["identity"], Some(Reason::Unlike), request(|request| request.draft = [3; 32])),
        (&["holdings"], Some(Reason::Refused), request(|request| request.own = RangeSet::from(0..10_000))),
        (
            &["holdings"],
            Some(Reason::Refused),
            request(|request| request.received = RangeSet::from(999..1000)),
        ),
        (
            &[],
            Some(Reason::TooLong),
            request(|request| {
                request.ids = super::ids(100_001);
                request.span.cut = 100_001;
            }),
        ),
    ];
    for (names, reason, frame) in cases {
        let (_, mut producer) = links(false, false);
        let doing = producer.frame(frame, now);
        assert_eq!((refusals(&doing), answer(&doing)), (names.to_vec(), reason), "{doing:?}");
        assert!(!producer.is_closed(), "only the transfer is refused");
    }
    // Without the right not even the frame's body is read.
    let limits = crate::Limits { may_prefill: false, ..LIMITS };
    let mut closed = Link::new(facts(false), limits, now);
    closed.frame(Frame::Hello(Box::new(hello_of(&facts(false)))), now);
    for kind in [Kind::Request, Kind::Quote] {
        assert_eq!(closed.expects(kind), Err(Refusal::NotAllowed { right: "prefill" }));
    }
    // Before HELLO nothing is.
    let silent = Link::new(facts(false), LIMITS, now);
    for kind in
        [Kind::Load, Kind::Quote, Kind::Quoted, Kind::Request, Kind::Begin, Kind::Chunk, Kind::Progress]
    {
        assert_eq!(silent.expects(kind), Err(Refusal::Order { frame: kind.name() }));
    }
    // The same transfer twice, too many, too many rows.
    let (_, mut producer) = links(false, false);
    producer.frame(request(|_| {}), now);
    assert_eq!(refusals(&producer.frame(request(|_| {}), now)), ["transfer_in_use"]);
    let few = crate::Limits { transfers: 1, ..LIMITS };
    let slow = crate::Limits { rows_a_minute: 1000, ..LIMITS };
    for limits in [few, slow] {
        let mut producer = Link::new(facts(false), limits, now);
        producer.frame(Frame::Hello(Box::new(hello_of(&facts(false)))), now);
        assert_eq!(refusals(&producer.frame(request(|_| {}), now)), [""; 0]);
        let doing = producer.frame(request(|request| request.transfer = TransferId(2)), now);
        assert_eq!((refusals(&doing), answer(&doing)), (vec!["limit"], Some(Reason::Limit)));
        producer.with_producer(T, |producer| producer.give_up(Reason::Busy));
        let later = Duration::from_mins(1);
        let doing = producer.frame(request(|request| request.transfer = TransferId(3)), later);
        assert_eq!(refusals(&doing), [""; 0], "room again");
    }
}

#[test]
fn a_span_and_questions_may_be_as_large_as_the_limits_say() {
    let span = |cut, window, stages: u32| crate::Span {
        cut,
        window,
        stages: (1..=stages).map(|stage| 256 * stage).collect(),
    };
    assert_eq!(span(1 << 20, 1 << 20, 64).check(), Ok(()));
    for more in [span((1 << 20) + 1, 1, 0), span(1, (1 << 20) + 1, 0), span(1 << 20, 1, 65)] {
        assert!(more.check().is_err(), "{more:?}");
    }
    let (mut consumer, _) = links(false, false);
    let quote = Quote { question: 0, identity: IDENTITY, positions: 1, held: 0, hashes: vec![] };
    let asked = (0..65).filter_map(|_| consumer.ask(quote.clone(), Duration::ZERO)).count();
    assert_eq!(asked, 64);
}

#[test]
fn a_frame_belongs_to_a_limit_before_memory_is_taken() {
    for kind in [Kind::Hello, Kind::Load, Kind::Quoted, Kind::Begin, Kind::Seal, Kind::Abort] {
        assert!(kind.limit() <= 8 << 10);
    }
    assert!(Kind::Chunk.limit() < 512 << 10 && Kind::Quote.limit() < 256 << 10);
    assert!(Kind::Request.limit() < 5 << 20);
}

/// Frames that can be read, changed and in any order, to every kind of state: nothing panics, nothing is ready that was not
/// sealed, and memory stays small.
#[test]
fn whatever_can_be_read_ends_in_a_refusal_or_nothing() {
    let now = Duration::ZERO;
    let frames: Vec<Vec<u8>> = samples().into_iter().map(|(_, frame, _)| frame.encode(0)).collect();
    let (consumer, begin) = waiting();
    let mut receiving = consumer.clone();
    receiving.frame(Frame::Begin(Box::new(begin)), now);
    let (_, mut giving) = links(true, true);
    let request = samples().swap_remove(5).1;
    giving.frame(request, now);
    let mut begun = giving.clone();
    begun.with_producer(T, |producer| producer.begin(&[512], Nonce([2; 16]), now));
    let states =
        [Link::new(facts(true), LIMITS, now), links(true, true).0, consumer, receiving, giving, begun];
    let mut rng = muser_testkit::Rng(13);
    let ((), held) = muser_testkit::most_held(|| {
        for _ in 0..muser_testkit::long_or(2_000_000, 20_000) {
            let mut link = states[rng.below(states.len())].clone();
            for step in 1..=rng.below(6) as u64 {
                let mut bytes = frames[rng.below(frames.len())].clone();
                for _ in 0..rng.below(3) {
                    let at = HEADER_BYTES + rng.below((bytes.len() - HEADER_BYTES).min(64));
                    bytes[at] =
                        if rng.one_in(2) { rng.next_u64() as u8 } else { [0, 1, 2, 255][rng.below(4)] };
                }
                let Ok(frame) = read(&bytes) else { continue };
                let now = Duration::from_millis(step * 400);
                let doing = match frame {
                    Frame::Chunk(head) => link.admit(&head, rng.below(4000), now).err().unwrap_or_default(),
                    frame => link.frame(frame, now),
                };
                let is_ready = |one: &crate::link::Doing| {
                    matches!(one, crate::link::Doing::Tell(_, crate::consumer::Event::Ready(_)))
                };
                assert!(!doing.iter().any(is_ready), "{doing:?}");
                link.tick(now);
            }
        }
    });
    assert!(held <= 16 << 20, "{held} bytes at once");
}
