//! A bounded position in untrusted bytes.
//!
//! Invariant: nothing is returned, and no length is believed, beyond the end of the slice. Faults are plain strings; the
//! caller adds the path and what it was reading.

/// What is wrong, without the path.
pub(crate) type Fault = String;

#[derive(Clone, Copy)]
pub(crate) struct Cursor<'a> {
    bytes: &'a [u8],
    pos: usize,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(bytes: &'a [u8], pos: usize) -> Cursor<'a> {
        Cursor { bytes, pos: pos.min(bytes.len()) }
    }

    pub(crate) fn pos(&self) -> usize {
        self.pos
    }

    pub(crate) fn left(&self) -> usize {
        self.bytes.len() - self.pos
    }

    /// The next `len` bytes; `what` names them in the fault.
    #[inline]
    pub(crate) fn take(&mut self, len: u64, what: &str) -> Result<&'a [u8], Fault> {
        if len > self.left() as u64 {
            return Err(self.short(len, what));
        }
        let start = self.pos;
        self.pos += len as usize;
        Ok(&self.bytes[start..self.pos])
    }

    /// The next `len` bytes from here, leaving this position alone.
    pub(crate) fn peek(&self, len: u64) -> Result<&'a [u8], Fault> {
        let mut copy = *self;
        copy.take(len, "a range")
    }

    #[cold]
    fn short(&self, len: u64, what: &str) -> Fault {
        format!("{what} of {len} bytes at byte {} does not fit: {} bytes are left", self.pos, self.left())
    }

    #[inline]
    pub(crate) fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], Fault> {
        let slice = self.take(N as u64, what)?;
        let mut out = [0; N];
        out.copy_from_slice(slice);
        Ok(out)
    }

    #[inline]
    pub(crate) fn u32(&mut self, what: &str) -> Result<u32, Fault> {
        self.array(what).map(u32::from_le_bytes)
    }

    #[inline]
    pub(crate) fn u64(&mut self, what: &str) -> Result<u64, Fault> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// The bytes of a length-prefixed string.
    #[inline]
    pub(crate) fn string(&mut self, what: &str) -> Result<&'a [u8], Fault> {
        let len = self.u64("a string length")?;
        self.take(len, what)
    }

    /// The same, as text.
    pub(crate) fn text(&mut self, what: &str) -> Result<&'a str, Fault> {
        let start = self.pos;
        std::str::from_utf8(self.string(what)?)
            .map_err(|e| format!("{what} at byte {start} is not UTF-8: {e}"))
    }
}
