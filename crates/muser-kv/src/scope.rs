//! Who may reuse what.

use std::fmt;

/// Whose prefixes a sequence may reuse and who may reuse its own: equal tokens in different scopes have nothing in common.
/// The default is the scope of everybody who names none.
///
/// It enters the root of the hash chain, so every block of a prefix belongs to one scope, and what one scope has cannot be
/// found, counted or timed from another.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct CacheScope([u8; 32]);

impl CacheScope {
    /// The scope of everybody who names none.
    pub const EVERYBODY: Self = Self([0; 32]);

    /// The scope that `parts` name together; each part with its length, so that no two lists name the same one.
    pub fn of(parts: &[&[u8]]) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("muser kv cache scope v1");
        for part in parts {
            hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
        }
        Self(*hasher.finalize().as_bytes())
    }

    /// Is it the scope of everybody?
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Its bytes; zeros of the default.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Debug for CacheScope {
    // Not the bytes: they may be made from a secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_default() { "CacheScope(everybody)" } else { "CacheScope(..)" })
    }
}
