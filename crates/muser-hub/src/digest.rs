//! SHA-256 as a value, and of files.

use std::fmt;
use std::io::Read;
use std::path::Path;

use aws_lc_rs::digest::{Context, SHA256};

use crate::HubError;

/// A SHA-256 hash.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Sha256([u8; 32]);

impl Sha256 {
    /// From 64 hexadecimal digits.
    pub fn from_hex(text: &str) -> Option<Self> {
        let text = text.as_bytes();
        if text.len() != 64 {
            return None;
        }
        let mut out = [0; 32];
        for (byte, pair) in out.iter_mut().zip(text.chunks_exact(2)) {
            let digit = |c: u8| (c as char).to_digit(16);
            *byte = (digit(pair[0])? * 16 + digit(pair[1])?) as u8;
        }
        Some(Self(out))
    }

    /// Of a running hash, which can go on afterwards.
    pub(crate) fn of_context(context: &Context) -> Self {
        let digest = context.clone().finish();
        let mut out = [0; 32];
        out.copy_from_slice(digest.as_ref());
        Self(out)
    }

    /// Of bytes in memory.
    pub fn of_bytes(bytes: &[u8]) -> Self {
        let mut context = Context::new(&SHA256);
        context.update(bytes);
        Self::of_context(&context)
    }

    /// Of a whole file; `seen` hears how many bytes are done after each piece of 4 MiB.
    pub fn of_file(path: &Path, seen: &mut dyn FnMut(u64)) -> Result<Self, HubError> {
        let mut file = std::fs::File::open(path).map_err(HubError::io(path))?;
        let mut context = Context::new(&SHA256);
        let found = hash_exactly(&mut file, u64::MAX, &mut context, seen).map_err(HubError::io(path))?;
        let _ = found;
        Ok(Self::of_context(&context))
    }
}

impl fmt::Display for Sha256 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Sha256 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Feeds up to `limit` bytes of `reader` into `context`; returns how many there were.
pub(crate) fn hash_exactly(
    reader: &mut dyn Read,
    limit: u64,
    context: &mut Context,
    seen: &mut dyn FnMut(u64),
) -> std::io::Result<u64> {
    let mut buffer = vec![0; 4 << 20];
    let mut done = 0;
    while done < limit {
        let want = buffer.len().min(usize::try_from(limit - done).unwrap_or(usize::MAX));
        let got = match reader.read(&mut buffer[..want]) {
            Ok(0) => break,
            Ok(got) => got,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(e),
        };
        context.update(&buffer[..got]);
        done += got as u64;
        seen(done);
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hex_round_trip_and_refusals() {
        // FIPS 180-2, the empty message.
        let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(Sha256::of_context(&Context::new(&SHA256)).to_string(), empty);
        assert_eq!(Sha256::from_hex(empty).map(|d| d.to_string()).as_deref(), Some(empty));
        assert_eq!(Sha256::from_hex(&empty.to_uppercase()), Sha256::from_hex(empty));
        for bad in ["", "abc", &empty[1..], &empty.replace('e', "g"), &"é".repeat(32)] {
            assert_eq!(Sha256::from_hex(bad), None, "{bad}");
        }
    }
}
