//! Small values with a meaning.

use std::fmt;

use crate::Refusal;
use crate::encode::Reader;

/// A BLAKE3 digest.
pub type Digest = [u8; 32];

/// 128 random bits, used once.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Nonce(pub [u8; 16]);

impl Nonce {
    /// A fresh one; `None` where the system gives no random bytes.
    pub fn fresh() -> Option<Self> {
        let mut bytes = [0; 16];
        aws_lc_rs::rand::fill(&mut bytes).ok()?;
        Some(Self(bytes))
    }
}

impl fmt::Debug for Nonce {
    // Whoever reads a log must not be able to answer a request.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Nonce(..)")
    }
}

/// A transfer on one connection, chosen by the consumer; 0 is the connection itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TransferId(pub u32);

impl TransferId {
    /// That of a transfer, which is never 0.
    pub(crate) fn decode(of: &mut Reader<'_>) -> Result<Self, Refusal> {
        match of.u32("transfer")? {
            0 => Err(Refusal::Malformed { field: "transfer", found: 0 }),
            id => Ok(Self(id)),
        }
    }
}

/// A node's Ed25519 public key: what it is known by.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeKey(pub [u8; 32]);

impl fmt::Display for NodeKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for NodeKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NodeKey({self})")
    }
}

impl std::str::FromStr for NodeKey {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let digit = |byte: u8| match byte {
            b'0'..=b'9' => Some(byte - b'0'),
            b'a'..=b'f' => Some(byte - b'a' + 10),
            _ => None,
        };
        let mut key = [0; 32];
        if text.len() != 64 {
            return Err("a node's key has 64 hexadecimal digits");
        }
        for (byte, pair) in key.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            let (Some(high), Some(low)) = (digit(pair[0]), digit(pair[1])) else {
                return Err("a node's key has hexadecimal digits in small letters");
            };
            *byte = high << 4 | low;
        }
        Ok(Self(key))
    }
}
