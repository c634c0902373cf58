//! What other nodes send, and what is typed about them.

use std::collections::HashSet;
use std::time::Duration;

use muser_backend::arith::attention::Digits;
use muser_handoff::frame::{Frame, HEADER_BYTES, Header, Kind};
use muser_handoff::link::{Doing, Link};
use muser_handoff::{
    Code, Component, Facts, Fetch, Limits, NodeKey, Nonce, Part, Plane, Planes, Rights, Series, Span, Wanted,
    check_address, fuzzing,
};
use muser_kv::KvGroup;
use std::sync::{Arc, LazyLock};

use crate::{Input, Target, check_message, golden};

/// A frame: what is read has one encoding.
pub const FRAMES: Target = Target {
    name: "frames",
    about: "header and body of every kind: what is read is written as the same bytes",
    run: frames,
    seeds: frame_seeds,
    words: &["\\x01\\x00\\x00\\x00", "\\x06\\x00\\x00\\x00", "\\x07\\x00\\x00\\x00", "\\xff\\xff\\xff\\xff"],
    max_len: 2048,
    memory: (64 << 10, 64),
    millis: (50, 10),
};

fn frames(data: &[u8]) {
    let Some((header, body)) = data.split_first_chunk::<HEADER_BYTES>() else { return };
    // A fuzzer rarely finds the length: any header with a kind stands for the one that fits.
    let kind = (1..=13_u16).find(|kind| kind.to_le_bytes() == header[..2]);
    let decoded = Header::decode(*header);
    if let Ok(header) = decoded {
        assert_eq!(Header::decode(header.encode()), Ok(header));
        assert!(header.body as usize <= header.kind.limit());
    }
    let fitting = kind.and_then(|kind| {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..2].copy_from_slice(&kind.to_le_bytes());
        Header::decode(bytes).ok()
    });
    let Some(Header { kind, .. }) = fitting else { return };
    let body = &body[..body.len().min(kind.limit())];
    match Frame::decode(kind, body) {
        Ok((frame, rows)) => {
            assert!(rows.is_empty() || kind == Kind::Chunk);
            let again = frame.encode(rows.len());
            assert_eq!(&again[HEADER_BYTES..], &body[..body.len() - rows.len()], "one encoding of {kind:?}");
            assert_eq!(Frame::decode(kind, &again[HEADER_BYTES..]), Ok((frame, &[][..])));
        }
        Err(refusal) => check_message(&refusal.to_string()),
    }
}

/// The frames of the format's golden file.
fn golden_frames() -> Vec<Vec<u8>> {
    let text = String::from_utf8(golden("muser-handoff/tests/golden/handoff-v1.txt")).unwrap_or_default();
    let digits = text.lines().filter_map(|line| line.split_once(": "));
    digits
        .map(|(_, hex)| {
            let pair = |at: usize| u8::from_str_radix(hex.get(at..at + 2).unwrap_or("00"), 16).unwrap_or(0);
            (0..hex.len() / 2).map(|i| pair(2 * i)).collect()
        })
        .collect()
}

fn frame_seeds() -> Vec<Vec<u8>> {
    golden_frames()
}

/// A connection's state machine under any frames: it ends at the first that belongs to nothing, and tells each end once.
pub const LINK: Target = Target {
    name: "link",
    about: "any frames in any order: no state is left behind a close, transfers end once",
    run: link,
    seeds: link_seeds,
    words: &[],
    max_len: 4096,
    memory: (2 << 20, 512),
    millis: (200, 50),
};

const LIMITS: Limits = Limits { may_prefill: true, transfers: 16, rows_a_minute: 0 };

static FACTS: LazyLock<Arc<Facts>> = LazyLock::new(|| {
    let plane = |group, component, layers, heads| Plane {
        group,
        component,
        layers,
        heads,
        dim: 4,
        digits: Digits::One,
    };
    let planes = vec![
        plane(KvGroup::Full, Component::Target, 2, 1),
        plane(KvGroup::Sliding, Component::Target, 3, 1),
        plane(KvGroup::Sliding, Component::Draft, 1, 2),
    ];
    Arc::new(Facts {
        serves_prefill: true,
        serves_sessions: false,
        max_positions: 100_000,
        identity: [7; 32],
        draft: [8; 32],
        semantic: [9; 32],
        window: 300,
        planes: Planes::new(planes).expect("a table"),
        route: "exact-1/kv8".into(),
        build: "muser test".into(),
        parts: vec![Part { name: "weights".into(), shown: String::new(), digest: [1; 32] }],
    })
});

fn link(data: &[u8]) {
    let mut input = Input::new(data);
    let facts = Arc::clone(&FACTS);
    let mut link = Link::new(Arc::clone(&facts), LIMITS, Duration::ZERO);
    let mut now = Duration::ZERO;
    let (mut over, mut closed) = (HashSet::new(), false);
    if input.flag() {
        let hello = facts.hello(Nonce([3; 16]), (0, 1), LIMITS, NodeKey([5; 32]));
        note(link.frame(Frame::Hello(Box::new(hello)), now), &mut over, &mut closed);
    }
    while !input.is_empty() {
        now += Duration::from_millis(u64::from(input.byte()));
        let kind = u16::from(input.byte() % 16);
        let doing = match kind {
            0 => link.tick(now),
            14 | 15 => start(&mut link, now),
            _ => {
                let mut header = [0; HEADER_BYTES];
                header[..2].copy_from_slice(&kind.to_le_bytes());
                let Ok(Header { kind, .. }) = Header::decode(header) else { continue };
                let body = input.bytes(kind.limit().min(600));
                match Frame::decode(kind, body) {
                    Ok((frame, _)) => link.frame(frame, now),
                    Err(refusal) => link.close_for(refusal),
                }
            }
        };
        let was_closed = closed;
        assert!(!was_closed || doing.is_empty(), "after its end a connection does nothing");
        note(doing, &mut over, &mut closed);
        assert_eq!(closed, link.is_closed());
        let (taken, given) = link.transfers();
        assert!(taken + given <= 64 * 2 && (!closed || taken + given == 0), "{taken} {given} {closed}");
    }
}

fn start(link: &mut Link, now: Duration) -> Vec<Doing> {
    if link.theirs().is_none() || link.is_closed() {
        return Vec::new();
    }
    let wanted = Wanted {
        identity: [7; 32],
        draft: [8; 32],
        tenant: [0; 32],
        ids: (0..520).collect(),
        planes: FACTS.planes.clone(),
        span: Span { cut: 520, stages: vec![256, 512], window: 300 },
    };
    let Ok(series) = Series::new(Nonce([11; 16]), wanted, |_, block| block == 0) else { return Vec::new() };
    let fetch = Fetch { series, budget: Duration::from_hours(1), priority: 128 };
    let _ = link.fetch(fetch, Nonce([1; 16]), now);
    Vec::new()
}

fn note(doing: Vec<Doing>, over: &mut HashSet<u32>, closed: &mut bool) {
    assert!(doing.len() <= 400, "{} things to do for one frame", doing.len());
    for one in doing {
        match one {
            Doing::Over(transfer, ..) => assert!(over.insert(transfer.0), "{transfer:?} is over twice"),
            Doing::Close(_) => *closed = true,
            Doing::Refused(refusal) => check_message(&refusal.to_string()),
            Doing::Send(frame) => assert!(frame.encode(0).len() <= frame.kind().limit() + HEADER_BYTES),
            _ => {}
        }
    }
}

fn link_seeds() -> Vec<Vec<u8>> {
    let one = |frame: &Vec<u8>| {
        let body = &frame[HEADER_BYTES..];
        let len = body.len().min(600) as u16;
        let mut bytes = vec![1, frame[0]];
        bytes.extend(len.to_be_bytes());
        bytes.extend(&body[..usize::from(len)]);
        bytes
    };
    let all: Vec<Vec<u8>> = golden_frames()
        .iter()
        .filter(|frame| frame.len() > HEADER_BYTES && frame.len() < 600)
        .map(one)
        .collect();
    let mut seeds: Vec<Vec<u8>> = all.iter().map(|bytes| [&[1][..], bytes].concat()).collect();
    seeds.push([&[1][..], &[1, 14], &all.concat()].concat());
    seeds
}

/// What is typed or read about nodes: codes, rights, addresses, the registry.
pub const NODE_TEXT: Target = Target {
    name: "node_text",
    about: "codes, rights, addresses and nodes.toml: what is read is written as what reads the same",
    run: node_text,
    seeds: text_seeds,
    words: &[
        "[[node]]\\n",
        "name = \\\"a\\\"\\n",
        "key = \\\"",
        "may = [\\\"prefill\\\"]\\n",
        "address = \\\"h:1\\\"\\n",
        "streams = 8\\n",
        "told_key",
        "sessions",
    ],
    max_len: 2048,
    memory: (64 << 10, 128),
    millis: (50, 20),
};

fn node_text(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    match fuzzing::registry(&text) {
        Ok(registry) => {
            let written = fuzzing::text(&registry);
            let again = fuzzing::registry(&written).expect("what is written is read");
            assert_eq!(fuzzing::text(&again), written);
            assert_eq!(again.nodes.len(), registry.nodes.len());
            for (a, b) in again.nodes.iter().zip(&registry.nodes) {
                assert_eq!((&a.name, &a.address, &a.key, a.rights), (&b.name, &b.address, &b.key, b.rights));
                assert!(registry.named(&a.name).is_ok() && registry.by_key(&a.key).is_some());
            }
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    let line = text.lines().next().unwrap_or_default();
    if let Ok(code) = line.parse::<Code>() {
        let shown = code.to_string();
        assert!(shown.parse::<Code>().is_ok_and(|again| again == code));
        assert!(shown.replace('-', "").eq_ignore_ascii_case(&line.replace('-', "")));
    }
    if let Ok(rights) = Rights::parse(line) {
        let words: Vec<_> = rights.words().collect();
        assert_eq!(Rights::parse(&words.join(",")).ok(), Some(rights));
    }
    if check_address(line).is_ok() {
        let (host, port) = line.rsplit_once(':').expect("host and port");
        assert!(!host.is_empty() && port.parse::<u16>().is_ok(), "{line:?}");
    }
}

fn text_seeds() -> Vec<Vec<u8>> {
    let key = "0123456789abcdef".repeat(4);
    let node = |name: &str, key: &str| {
        format!(
            "[[node]]\nname = \"{name}\"\naddress = \"box.example:7788\"\nkey = \"{key}\"\nmay = [\"prefill\", \"sessions\"]\ntransfers = 4\nrows_a_minute = 0\nstreams = 1\n"
        )
    };
    let two = [
        node("box", &key),
        node("other", &key.replace('0', "f")),
        format!("next_key = \"{}\"\n", key.replace('1', "2")),
    ]
    .concat();
    [&*two, &node("a", &key), "prefill,sessions", "box.example:7788", "[::1]:80", "none"]
        .map(|text| text.as_bytes().to_vec())
        .to_vec()
}
