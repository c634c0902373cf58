//! Golden frames, and the second decoder over them. `MUSER_UPDATE_GOLDEN=1` writes them anew, which is right only with a new
//! version of the protocol.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use muser_testkit::{Need, Rng, long_or, skip};

use super::malformed::samples;
use crate::frame::{Frame, HEADER_BYTES, Header, Kind};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/handoff-v1.txt")
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// One line a frame: name, bytes.
fn lines() -> String {
    samples().into_iter().fold(String::new(), |mut text, (name, frame, rows)| {
        let _ = writeln!(text, "{name}: {}{}", hex(&frame.encode(rows.len())), hex(&rows));
        text
    })
}

#[test]
fn frames_are_those_of_the_format() {
    if std::env::var_os("MUSER_UPDATE_GOLDEN").is_some() {
        std::fs::create_dir_all(golden().parent().expect("a folder")).expect("made");
        std::fs::write(golden(), lines()).expect("written");
    }
    assert_eq!(lines(), std::fs::read_to_string(golden()).expect("the golden frames"));
}

#[test]
fn a_decoder_in_another_language_agrees() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/formats/handoff_decode.py");
    let mut python = std::process::Command::new("python3");
    let decoded = match python.arg("-B").arg(script).arg(golden()).output() {
        Ok(decoded) => decoded,
        Err(error) => return skip(Need::Python, format!("python3 does not start: {error}")),
    };
    assert!(decoded.status.success(), "{}", String::from_utf8_lossy(&decoded.stderr));
    let said = String::from_utf8(decoded.stdout).expect("text");
    assert_eq!(said.lines().count(), samples().len() + 1, "{said}");
    assert!(said.contains("chunk, seal and prefix digests agree"), "{said}");
    // And it refuses what we refuse.
    for (name, frame, _) in samples() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("cut.txt");
        let mut bytes = frame.encode(0);
        bytes.truncate(bytes.len() - 1);
        let body = bytes.len() - HEADER_BYTES;
        bytes[..HEADER_BYTES].copy_from_slice(&Header { kind: frame.kind(), body: body as u32 }.encode());
        std::fs::write(&path, format!("{name}: {}\n", hex(&bytes))).expect("written");
        let mut python = std::process::Command::new("python3");
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/formats/handoff_decode.py");
        let refused = python.arg("-B").arg(script).arg(&path).output().expect("it started before");
        assert!(!refused.status.success(), "{name}");
    }
}

#[test]
fn the_page_names_every_refusal_and_reason_and_the_script_counts_them() {
    let formats = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/formats");
    let page = std::fs::read_to_string(formats.join("handoff.md")).expect("the page");
    for name in crate::Refusal::NAMES {
        assert!(page.contains(&format!("| `{name}` |")), "{name}");
    }
    for (number, reason) in crate::Reason::ALL.iter().enumerate() {
        assert!(page.contains(&format!("{} `{}`", number + 1, reason.label())), "{reason:?}");
    }
    let script = std::fs::read_to_string(formats.join("handoff_decode.py")).expect("the script");
    assert!(
        script.contains(&format!("REFUSALS = {}\n", crate::Refusal::NAMES.len())),
        "{}",
        crate::Refusal::NAMES.len()
    );
}

/// What is read is written as the same bytes, whatever came.
fn check(bytes: &[u8]) {
    let Some((header, body)) = bytes.split_at_checked(HEADER_BYTES) else { return };
    let Ok(header) = Header::decode(header.try_into().expect("8 bytes")) else { return };
    let body = &body[..body.len().min(header.body as usize)];
    if let Ok((frame, rows)) = Frame::decode(header.kind, body) {
        let again = frame.encode(rows.len());
        assert_eq!(
            &again[HEADER_BYTES..],
            &body[..body.len() - rows.len()],
            "one encoding of {:?}",
            frame.kind()
        );
    }
}

#[test]
fn fuzzed_frames_are_refused_or_have_one_encoding_within_16_mib() {
    let samples: Vec<Vec<u8>> =
        samples().into_iter().map(|(_, frame, rows)| [frame.encode(rows.len()), rows].concat()).collect();
    let mut rng = Rng(16);
    let ((), held) = muser_testkit::most_held(|| {
        for _ in 0..long_or(10_000_000, 200_000) {
            let mut bytes = samples[rng.below(samples.len())].clone();
            if rng.one_in(8) {
                // A made-up frame of some kind.
                bytes.truncate(HEADER_BYTES + rng.below(200));
                bytes[0] = rng.below(15) as u8;
            }
            for _ in 0..rng.below(4) {
                let at = rng.below(bytes.len());
                bytes[at] = if rng.one_in(2) { rng.next_u64() as u8 } else { [0, 1, 255][rng.below(3)] };
            }
            if rng.one_in(3) {
                bytes.truncate(rng.below(bytes.len() + 1));
                if let Some(length) = bytes.len().checked_sub(HEADER_BYTES) {
                    bytes[4..8].copy_from_slice(&(length as u32).to_le_bytes());
                }
            }
            check(&bytes);
        }
        // The longest bodies, and counts that promise more than there is.
        for kind in 1..=13_u16 {
            let header = [&kind.to_le_bytes()[..], &[0; 6]].concat();
            let Ok(Header { kind, .. }) = Header::decode(header.try_into().expect("8 bytes")) else {
                continue;
            };
            for fill in [0_u8, 1, 255] {
                let body = vec![fill; kind.limit()];
                let _ = Frame::decode(kind, &body);
            }
            assert!(kind == Kind::Request || kind.limit() < 1 << 20);
        }
    });
    assert!(held <= 16 << 20, "{held} bytes at once");
}
