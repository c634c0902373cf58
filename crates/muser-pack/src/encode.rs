//! The one binary encoding of everything that is hashed, authenticated or stored: fixed-width little-endian integers,
//! byte strings with their length in front, nothing optional, nothing padded silently.
//!
//! Two writers given the same values produce the same bytes, and a reader accepts only those: every length is compared
//! with what is left *before* memory for it is taken, and [`Reader::finish`] refuses what is left over.

use crate::Refusal;

/// Appends values to a buffer.
#[derive(Debug, Default)]
pub(crate) struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    /// An empty buffer whose first bytes say what it is, so that no two kinds of content can have equal bytes.
    pub(crate) fn for_domain(domain: &str) -> Self {
        let mut writer = Self::default();
        writer.string(domain);
        writer
    }

    pub(crate) fn u8(&mut self, value: u8) {
        self.bytes.push(value);
    }

    pub(crate) fn u16(&mut self, value: u16) {
        self.bytes.extend_from_slice(&value.to_le_bytes());
    }

    pub(crate) fn u32(&mut self, value: u32) {
        self.bytes.extend_from_slice(&value.to_le_bytes());
    }

    pub(crate) fn u64(&mut self, value: u64) {
        self.bytes.extend_from_slice(&value.to_le_bytes());
    }

    /// Bytes whose number is fixed by the format.
    pub(crate) fn fixed(&mut self, value: &[u8]) {
        self.bytes.extend_from_slice(value);
    }

    /// Bytes with their number (u32) in front.
    pub(crate) fn bytes(&mut self, value: &[u8]) {
        self.u32(value.len() as u32);
        self.fixed(value);
    }

    pub(crate) fn string(&mut self, value: &str) {
        self.bytes(value.as_bytes());
    }

    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}

/// Takes values off the front of a slice.
#[derive(Debug)]
pub(crate) struct Reader<'a> {
    left: &'a [u8],
    total: u64,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { left: bytes, total: bytes.len() as u64 }
    }

    pub(crate) fn fixed(&mut self, len: usize) -> Result<&'a [u8], Refusal> {
        let Some((value, left)) = self.left.split_at_checked(len) else {
            let read = self.total - self.left.len() as u64;
            return Err(Refusal::Truncated { expected: read + len as u64, found: self.total });
        };
        self.left = left;
        Ok(value)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], Refusal> {
        let mut value = [0; N];
        value.copy_from_slice(self.fixed(N)?);
        Ok(value)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, Refusal> {
        Ok(self.array::<1>()?[0])
    }

    pub(crate) fn u16(&mut self) -> Result<u16, Refusal> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Refusal> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Refusal> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// Bytes with their number in front.
    pub(crate) fn bytes(&mut self) -> Result<&'a [u8], Refusal> {
        let len = self.u32()?;
        self.fixed(len as usize)
    }

    pub(crate) fn string(&mut self, field: &'static str) -> Result<&'a str, Refusal> {
        let bytes = self.bytes()?;
        let malformed = |_| Refusal::Malformed { field, found: bytes.len() as u64 };
        std::str::from_utf8(bytes).map_err(malformed)
    }

    /// A count of items of at least `item_bytes` each: refused when the bytes left cannot hold so many.
    pub(crate) fn count(
        &mut self,
        field: &'static str,
        limit: u32,
        item_bytes: usize,
    ) -> Result<usize, Refusal> {
        let count = self.u32()?;
        if count > limit {
            return Err(Refusal::OverLimit { field, limit: u64::from(limit), found: u64::from(count) });
        }
        let needed = count as u64 * item_bytes as u64;
        if needed > self.left.len() as u64 {
            let read = self.total - self.left.len() as u64;
            return Err(Refusal::Truncated { expected: read + needed, found: self.total });
        }
        Ok(count as usize)
    }

    /// Nothing may be left.
    pub(crate) fn finish(self) -> Result<(), Refusal> {
        if self.left.is_empty() {
            return Ok(());
        }
        Err(Refusal::Trailing { expected: self.total - self.left.len() as u64, found: self.total })
    }
}
