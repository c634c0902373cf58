//! Names of objects: 32 keyed bytes, written in hexadecimal. They tell nothing about what they name.

use std::fmt;

/// Where a store keeps an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Area {
    /// Manifests.
    Packs,
    /// Segments.
    Segments,
    /// Named records, such as a session's messages.
    Records,
}

impl Area {
    /// All areas.
    pub const ALL: [Self; 3] = [Self::Packs, Self::Segments, Self::Records];

    /// Name of its folder.
    pub fn folder(self) -> &'static str {
        match self {
            Self::Packs => "packs",
            Self::Segments => "segments",
            Self::Records => "records",
        }
    }
}

/// Name of an object in a store.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectName {
    /// Where it is.
    pub area: Area,
    /// Which one.
    pub id: [u8; 32],
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.area {
            Area::Packs => "pack",
            Area::Segments => "segment",
            Area::Records => "record",
        };
        write!(f, "{kind} {}", hex(&self.id))
    }
}

impl fmt::Debug for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// Name of a pack.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PackId(pub [u8; 32]);

impl PackId {
    /// The object that holds its manifest.
    pub fn object(self) -> ObjectName {
        ObjectName { area: Area::Packs, id: self.0 }
    }

    /// Reads 64 hexadecimal digits.
    pub fn parse(text: &str) -> Option<Self> {
        parse_hex(text).map(Self)
    }
}

impl fmt::Display for PackId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

impl fmt::Debug for PackId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PackId({self})")
    }
}

/// Name of a segment: a keyed hash of its content.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SegmentId(pub [u8; 32]);

impl SegmentId {
    /// The object that holds it.
    pub fn object(self) -> ObjectName {
        ObjectName { area: Area::Segments, id: self.0 }
    }
}

impl fmt::Display for SegmentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

impl fmt::Debug for SegmentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SegmentId({self})")
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

pub(crate) fn parse_hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digits = text.as_bytes();
    if digits.len() != 2 * N {
        return None;
    }
    let value = |digit: u8| match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    };
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = value(pair[0])? << 4 | value(pair[1])?;
    }
    Some(bytes)
}
