//! The one binary encoding of everything on the wire: fixed-width little-endian integers, lists with their count in front,
//! nothing optional, nothing padded silently.
//!
//! Equal values have equal bytes, and a reader accepts only those: a count is compared with its limit and with what is left
//! *before* memory for it is taken, and [`Reader::finish`] refuses what is left over.

use crate::Refusal;

/// Appends values to a buffer.
#[derive(Debug, Default)]
pub(crate) struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    pub(crate) fn u8(&mut self, value: u8) {
        self.bytes.push(value);
    }

    pub(crate) fn u16(&mut self, value: u16) {
        self.fixed(&value.to_le_bytes());
    }

    pub(crate) fn u32(&mut self, value: u32) {
        self.fixed(&value.to_le_bytes());
    }

    pub(crate) fn u64(&mut self, value: u64) {
        self.fixed(&value.to_le_bytes());
    }

    /// Bytes whose number is fixed by the format.
    pub(crate) fn fixed(&mut self, value: &[u8]) {
        self.bytes.extend_from_slice(value);
    }

    /// Text with its bytes (u8) in front.
    pub(crate) fn string(&mut self, value: &str) {
        self.u8(value.len() as u8);
        self.fixed(value.as_bytes());
    }

    /// Items with their number (u32) in front.
    pub(crate) fn list<T>(&mut self, items: &[T], mut item: impl FnMut(&mut Self, &T)) {
        self.u32(items.len() as u32);
        items.iter().for_each(|value| item(self, value));
    }

    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}

/// Takes values off the front of a slice.
#[derive(Debug)]
pub(crate) struct Reader<'a> {
    left: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { left: bytes }
    }

    pub(crate) fn fixed(&mut self, field: &'static str, len: usize) -> Result<&'a [u8], Refusal> {
        let (value, left) = self.left.split_at_checked(len).ok_or(Refusal::Truncated { field })?;
        self.left = left;
        Ok(value)
    }

    pub(crate) fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], Refusal> {
        let mut value = [0; N];
        value.copy_from_slice(self.fixed(field, N)?);
        Ok(value)
    }

    pub(crate) fn u8(&mut self, field: &'static str) -> Result<u8, Refusal> {
        Ok(self.array::<1>(field)?[0])
    }

    pub(crate) fn u16(&mut self, field: &'static str) -> Result<u16, Refusal> {
        Ok(u16::from_le_bytes(self.array(field)?))
    }

    pub(crate) fn u32(&mut self, field: &'static str) -> Result<u32, Refusal> {
        Ok(u32::from_le_bytes(self.array(field)?))
    }

    pub(crate) fn u64(&mut self, field: &'static str) -> Result<u64, Refusal> {
        Ok(u64::from_le_bytes(self.array(field)?))
    }

    /// Printable ASCII of at most `limit` bytes: it is shown to people.
    pub(crate) fn string(&mut self, field: &'static str, limit: usize) -> Result<String, Refusal> {
        let len = usize::from(self.u8(field)?);
        if len > limit {
            return Err(Refusal::OverLimit { field, limit: limit as u64, found: len as u64 });
        }
        let bytes = self.fixed(field, len)?;
        match std::str::from_utf8(bytes) {
            Ok(text) if bytes.iter().all(|byte| matches!(byte, b' '..=b'~')) => Ok(text.to_owned()),
            _ => Err(Refusal::Malformed { field, found: len as u64 }),
        }
    }

    /// Items of `item_bytes` each, at most `limit`: refused before memory is taken when the bytes left cannot hold so many.
    pub(crate) fn list<T>(
        &mut self,
        field: &'static str,
        limit: usize,
        item_bytes: usize,
        mut item: impl FnMut(&mut Self) -> Result<T, Refusal>,
    ) -> Result<Vec<T>, Refusal> {
        let count = self.u32(field)? as usize;
        if count > limit {
            return Err(Refusal::OverLimit { field, limit: limit as u64, found: count as u64 });
        }
        if count.saturating_mul(item_bytes) > self.left.len() {
            return Err(Refusal::Truncated { field });
        }
        let mut items = Vec::with_capacity(count);
        for _ in 0..count {
            items.push(item(self)?);
        }
        Ok(items)
    }

    /// All that is left.
    pub(crate) fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.left)
    }

    /// Nothing may be left.
    pub(crate) fn finish(self) -> Result<(), Refusal> {
        if self.left.is_empty() { Ok(()) } else { Err(Refusal::Trailing { found: self.left.len() as u64 }) }
    }
}
