//! A fuzzer with a fixed seed: good files with changed, cut, doubled and inserted bytes never panic the caller, never exceed the
//! limits and decode the same way twice.

use std::panic::{self, catch_unwind};

use muser_image::{decode, probe};

use crate::{golden, png};

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
}

fn mutate(bytes: &mut Vec<u8>, random: &mut Random) {
    for _ in 0..=random.below(4) {
        // Headers are short: half of the changes go into the first 64 bytes.
        let reach = if random.below(2) == 0 { bytes.len().min(64) } else { bytes.len() };
        let at = random.below(reach);
        match random.below(6) {
            0 => bytes[at] ^= 1 << random.below(8),
            1 => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][random.below(5)],
            2 => bytes[at] = random.next() as u8,
            3 => bytes.truncate(at.max(1)),
            4 => {
                let end = (at + random.below(40)).min(bytes.len());
                let part = bytes[at..end].to_vec();
                bytes.splice(at..at, part);
            }
            _ => drop(bytes.drain(at..(at + random.below(8)).min(bytes.len()))),
        }
        if bytes.is_empty() {
            bytes.push(0);
        }
    }
}

/// Gives the chunks of a PNG sums that fit, or no changed byte would be seen behind the first.
fn mend_sums(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut rest = bytes.strip_prefix(b"\x89PNG\r\n\x1a\n")?;
    let mut chunks: Vec<(&[u8; 4], &[u8])> = Vec::new();
    while let Some((length, after)) = rest.split_first_chunk::<4>() {
        let length = u32::from_be_bytes(*length) as usize;
        let (kind, after) = after.split_first_chunk::<4>()?;
        let data = &after[..length.min(after.len())];
        chunks.push((kind, data));
        rest = after.get(data.len() + 4..).unwrap_or_default();
    }
    Some(png(&chunks))
}

#[test]
fn no_change_to_a_file_panics_or_exceeds_the_limits() {
    let quiet = panic::take_hook();
    panic::set_hook(Box::new(|_| {}));
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut decoded = 0;
    for entry in std::fs::read_dir(golden("decode")).expect("a folder") {
        let path = entry.expect("readable").path();
        let good = std::fs::read(&path).expect("readable");
        for round in 0..150 {
            let mut bytes = good.clone();
            mutate(&mut bytes, &mut random);
            if round % 2 == 0 {
                bytes = mend_sums(&bytes).unwrap_or(bytes);
            }
            let run =
                || probe(&bytes).ok().filter(|h| h.width * h.height < 1 << 22).map(|h| (h, decode(&bytes)));
            let first = catch_unwind(run).unwrap_or_else(|_| panic!("{}: {bytes:02x?}", path.display()));
            let Some((header, Ok(picture))) = first else { continue };
            decoded += 1;
            assert_eq!((header.width, header.height), (picture.width, picture.height));
            assert_eq!(picture.rgb.len(), (picture.width * picture.height * 3) as usize);
            assert_eq!(decode(&bytes), Ok(picture));
        }
    }
    panic::set_hook(quiet);
    assert!(decoded > 500, "{decoded}: the changes are too rough to test anything behind the headers");
}
