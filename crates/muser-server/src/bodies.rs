//! The bytes of a body before they are JSON: content codings undone, and what the values will cost in memory.

use std::io::Read;

use axum::http::{HeaderMap, header};

use crate::error::ApiError;

/// Most JSON values of a body. A conversation has some thousands, a list of token ids as many as a context holds.
const MAX_VALUES: usize = 1 << 20;

/// What a JSON value takes while it is parsed, lists being grown by doubling.
const VALUE_BYTES: usize = 160;

/// A content coding that is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Coding {
    Gzip,
    Deflate,
    Zstd,
    Brotli,
}

/// The codings of a body, in the order in which they were applied.
pub(crate) fn codings(headers: &HeaderMap) -> Result<Vec<Coding>, ApiError> {
    let mut codings = Vec::new();
    for value in headers.get_all(header::CONTENT_ENCODING) {
        for word in value.to_str().unwrap_or("?").split(',').map(str::trim) {
            codings.push(match word.to_ascii_lowercase().as_str() {
                "" | "identity" => continue,
                "gzip" | "x-gzip" => Coding::Gzip,
                "deflate" => Coding::Deflate,
                "zstd" => Coding::Zstd,
                "br" => Coding::Brotli,
                _ => return Err(ApiError::unknown_encoding(word)),
            });
        }
    }
    // Nobody encodes twice; whoever does it again and again wants to keep us busy.
    if codings.len() > 2 { Err(ApiError::bad("The body was encoded more than twice")) } else { Ok(codings) }
}

/// Undoes the codings; no step may give more than `limit` bytes.
pub(crate) fn decode(mut bytes: Vec<u8>, codings: &[Coding], limit: usize) -> Result<Vec<u8>, ApiError> {
    for coding in codings.iter().rev() {
        let source = bytes.as_slice();
        bytes = match coding {
            Coding::Gzip => read_all(flate2::read::MultiGzDecoder::new(source), limit, "gzip"),
            // The name means zlib's format, whose first byte is told from the bare one's; some clients send that.
            Coding::Deflate if source.first().is_none_or(|first| first & 0x0f == 8) => {
                read_all(flate2::read::ZlibDecoder::new(source), limit, "deflate")
            }
            Coding::Deflate => read_all(flate2::read::DeflateDecoder::new(source), limit, "deflate"),
            Coding::Zstd => match ruzstd::decoding::StreamingDecoder::new(source) {
                Ok(decoder) => read_all(decoder, limit, "zstd"),
                Err(error) => Err(damaged("zstd", &error)),
            },
            Coding::Brotli => read_all(brotli_decompressor::Decompressor::new(source, 4096), limit, "br"),
        }?;
    }
    Ok(bytes)
}

fn read_all(decoder: impl Read, limit: usize, coding: &str) -> Result<Vec<u8>, ApiError> {
    let mut out = Vec::new();
    // One byte more than is allowed tells too long from just right.
    match decoder.take(limit as u64 + 1).read_to_end(&mut out) {
        Ok(_) if out.len() > limit => Err(ApiError::body_too_large(limit)),
        Ok(_) => Ok(out),
        Err(error) => Err(damaged(coding, &error)),
    }
}

fn damaged(coding: &str, error: &dyn std::fmt::Display) -> ApiError {
    ApiError::bad(format!("The body is not valid {coding}, which its Content-Encoding says it is ({error})"))
}

/// What a body costs beside its bytes when it is parsed. Values are counted by what separates and opens them, which is right
/// for JSON and fast enough for megabytes; text that is no JSON is refused when it is parsed.
pub(crate) fn cost(bytes: &[u8]) -> Result<usize, ApiError> {
    let (mut values, mut inside, mut escaped) = (1, false, false);
    for byte in bytes {
        match (inside, byte) {
            (true, _) if escaped => escaped = false,
            (true, b'\\') => escaped = true,
            (_, b'"') => inside = !inside,
            (false, b',' | b'[' | b'{') => values += 1,
            _ => {}
        }
    }
    if values > MAX_VALUES {
        return Err(ApiError::bad(format!(
            "The body holds more than {MAX_VALUES} JSON values, which no request needs"
        )));
    }
    Ok(bytes.len() + values * VALUE_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    const TEXT: &[u8] = b"{\"prompt\": \"Once upon a time, upon a time, upon a time\"}";

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        encoder.write_all(bytes).expect("memory");
        encoder.finish().expect("memory")
    }

    fn zlib(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::default());
        encoder.write_all(bytes).expect("memory");
        encoder.finish().expect("memory")
    }

    /// [`TEXT`] as the reference encoders write it.
    const ZSTD: &[u8] = include_bytes!("../tests/data/text.zst");
    const BROTLI: &[u8] = include_bytes!("../tests/data/text.br");

    #[test]
    fn every_coding_is_undone_within_the_limit() {
        let check = |bytes: &[u8], codings: &[Coding]| {
            assert_eq!(decode(bytes.to_vec(), codings, TEXT.len()).expect("decodes"), TEXT, "{codings:?}");
            let short = decode(bytes.to_vec(), codings, TEXT.len() - 1).expect_err("too long");
            assert_eq!(short.status.as_u16(), 413, "{codings:?}");
        };
        check(&gzip(TEXT), &[Coding::Gzip]);
        check(&zlib(TEXT), &[Coding::Deflate]);
        check(ZSTD, &[Coding::Zstd]);
        check(BROTLI, &[Coding::Brotli]);
        assert_eq!(decode(gzip(&zlib(TEXT)), &[Coding::Deflate, Coding::Gzip], 1000).expect("decodes"), TEXT);
        for coding in [Coding::Gzip, Coding::Deflate, Coding::Zstd, Coding::Brotli] {
            for wrong in [TEXT, b"", b"\x1f\x8b", &gzip(TEXT)[..20]] {
                // A bare stream has no mark: text may be read as one, and is then no JSON.
                if coding == Coding::Deflate && wrong == TEXT {
                    continue;
                }
                let outcome = decode(wrong.to_vec(), &[coding], 1000).map_err(|fault| fault.status.as_u16());
                assert!(
                    matches!(outcome, Err(400)) || (wrong.is_empty() && outcome == Ok(vec![])),
                    "{coding:?} {wrong:?} {outcome:?}"
                );
            }
        }
    }

    #[test]
    fn a_small_bomb_is_stopped_at_the_limit() {
        let bomb = gzip(&vec![b' '; 64 << 20]);
        assert!(bomb.len() < 100_000);
        assert_eq!(decode(bomb, &[Coding::Gzip], 1 << 20).expect_err("too long").status.as_u16(), 413);
    }

    #[test]
    fn codings_are_read_as_they_are_written() {
        let read = |text: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::CONTENT_ENCODING, text.parse().expect("a value"));
            codings(&headers).map_err(|fault| fault.status.as_u16())
        };
        assert_eq!(read("gzip"), Ok(vec![Coding::Gzip]));
        assert_eq!(read("Deflate, identity ,GZIP"), Ok(vec![Coding::Deflate, Coding::Gzip]));
        assert_eq!(read("identity"), Ok(vec![]));
        assert_eq!(read("zstd"), Ok(vec![Coding::Zstd]));
        assert_eq!(read("compress"), Err(415));
        assert_eq!(read("br, br, br"), Err(400));
        assert_eq!(codings(&HeaderMap::new()), Ok(vec![]));
    }

    #[test]
    fn values_are_counted_outside_of_strings() {
        assert_eq!(cost(br#"{"a": [1, 2, "x,y,[\"{"]}"#), Ok(25 + 5 * VALUE_BYTES));
        // The list and its items, the first of which follows no comma.
        let list = |commas: usize| cost(format!("[{}0]", "0,".repeat(commas)).as_bytes());
        assert!(list(MAX_VALUES - 2).is_ok() && list(MAX_VALUES - 1).is_err());
        assert!(cost(format!("\"{}\"", ",".repeat(MAX_VALUES)).as_bytes()).is_ok());
    }
}
