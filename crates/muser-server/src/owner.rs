//! Whose request is being answered.
//!
//! What one key has (cached prefixes, packs, sessions, slots) is not there for another: it is neither found, counted nor
//! timed. The owner is told by the guard of routes and travels with the task that answers, so that no route can forget
//! it; a route outside of that task has no owner and fails.

use muser_kv::CacheScope;

use crate::error::ApiError;

tokio::task_local! {
    static OWNER: Owner;
}

/// Whoever has one key, or everybody.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Owner(CacheScope);

impl Owner {
    /// Everybody: where no key is asked for, or all share.
    pub const EVERYBODY: Self = Self(CacheScope::EVERYBODY);

    /// The holder of the key with this digest, the same after a restart.
    pub fn of_key(digest: &[u8; 32]) -> Self {
        Self(CacheScope::of(&[b"api key", digest]))
    }

    /// Who is being answered.
    pub fn current() -> Result<Self, ApiError> {
        OWNER.try_with(|owner| *owner).map_err(|_| ApiError::internal("Nobody knows whose request this is"))
    }

    /// Answers for this owner.
    pub async fn answering<T>(self, answer: impl Future<Output = T>) -> T {
        OWNER.scope(self, answer).await
    }

    /// Everybody?
    pub fn is_everybody(self) -> bool {
        self.0.is_default()
    }

    /// Whose prefixes its requests may reuse; a salt narrows that.
    pub fn scope(self, salt: Option<&str>) -> CacheScope {
        match salt {
            Some(salt) => CacheScope::of(&[b"salt", self.0.as_bytes(), salt.as_bytes()]),
            None => self.0,
        }
    }

    /// A name space of its own for each owner's records of a kind.
    pub(crate) fn record_kind(self, kind: &str) -> String {
        use std::fmt::Write as _;
        let mut name = kind.to_owned();
        if !self.is_everybody() {
            name.push(' ');
            for byte in self.0.as_bytes() {
                let _ = write!(name, "{byte:02x}");
            }
        }
        name
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_owner_is_known_while_answering_and_only_then() {
        assert!(Owner::current().is_err());
        let (a, b) = (Owner::of_key(&[1; 32]), Owner::of_key(&[2; 32]));
        assert_eq!(a.answering(async { Owner::current() }).await, Ok(a));
        assert_ne!(a, b);
        let scopes = [
            a.scope(None),
            b.scope(None),
            a.scope(Some("x")),
            b.scope(Some("x")),
            Owner::EVERYBODY.scope(Some("x")),
        ];
        for (i, one) in scopes.iter().enumerate() {
            assert!(!one.is_default() && !scopes[..i].contains(one));
        }
        assert!(Owner::EVERYBODY.scope(None).is_default());
        assert_ne!(a.record_kind("session"), b.record_kind("session"));
        assert_eq!(Owner::EVERYBODY.record_kind("session"), "session");
    }
}
