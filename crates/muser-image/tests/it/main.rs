//! Equality with the reference, the kinds that are decoded, and what hostile files do.

mod decoding;
mod golden;
mod hostile;
mod mutations;
mod resampling;

use std::fmt::Write;
use std::path::{Path, PathBuf};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn read(name: &str) -> Vec<u8> {
    std::fs::read(golden(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// The fields of the lines of a table.
fn table(name: &str) -> Vec<Vec<String>> {
    let text = String::from_utf8(read(name)).expect("a table is text");
    text.lines().map(|line| line.split('\t').map(str::to_owned).collect()).collect()
}

fn sha256(bytes: &[u8]) -> String {
    let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, bytes);
    digest.as_ref().iter().fold(String::new(), |mut hex, byte| {
        write!(hex, "{byte:02x}").expect("writing to a string");
        hex
    })
}

/// A PNG of these chunks.
fn png(chunks: &[(&[u8; 4], &[u8])]) -> Vec<u8> {
    let mut out = b"\x89PNG\r\n\x1a\n".to_vec();
    for (kind, data) in chunks {
        out.extend((data.len() as u32).to_be_bytes());
        let from = out.len();
        out.extend(*kind);
        out.extend(*data);
        let mut crc = flate2::Crc::new();
        crc.update(&out[from..]);
        out.extend(crc.sum().to_be_bytes());
    }
    out
}

/// Contents of `IHDR`: 8 bits of `colour`.
fn ihdr(width: u32, height: u32, colour: u8) -> Vec<u8> {
    let mut out = width.to_be_bytes().to_vec();
    out.extend(height.to_be_bytes());
    out.extend([8, colour, 0, 0, 0]);
    out
}

fn deflated(bytes: &[u8]) -> Vec<u8> {
    use std::io::Write;
    let mut encoder = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::best());
    encoder.write_all(bytes).expect("writing to memory");
    encoder.finish().expect("writing to memory")
}
