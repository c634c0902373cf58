//! Keys: one base secret that never changes, and one secret for each epoch.
//!
//! Names (prefixes, contents, packs) are derived from the base secret, so that rotating keys changes no name.
//! Authentication and encryption are derived from an epoch's secret: destroying that secret makes everything sealed in
//! the epoch unreadable for good. Each purpose has a key of its own:
//!
//! | derived from | label | for |
//! |---|---|---|
//! | base | `key id` | the public id by which a foreign key is recognised |
//! | base, tenant | `tenant` | the public id of a tenant |
//! | base, tenant | `prefix` | hash chain over the tokens |
//! | base, tenant | `content` | names of segments |
//! | base | `content chunk` | leaves of the content hash |
//! | base, tenant | `pack id` | names of packs |
//! | base | `namespace` | names of records |
//! | base | `catalog` | authentication of the catalog's records |
//! | epoch | `authentication` | authentication of headers |
//! | epoch | `manifest encryption`, `segment encryption`, `record encryption` | HKDF secret of the data keys |
//!
//! Labels are BLAKE3 derive-key contexts `muser pack v1 LABEL`. The data key of an object is
//! HKDF-SHA256(salt of the object, secret, label and name of the object), so that no key meets two objects.

use aws_lc_rs::rand::{SecureRandom as _, SystemRandom};
use aws_lc_rs::{aead, hkdf};
use zeroize::{Zeroize as _, Zeroizing};

use crate::kind::Kind;
use crate::{PackError, Refusal};

/// A secret or a derived key; wiped when dropped.
pub(crate) type Secret = Zeroizing<[u8; 32]>;

/// Most epochs of a key file.
pub const MAX_EPOCHS: usize = 1024;

/// The secrets of a store. See [`crate::KeyFile`] for where they are kept.
#[derive(Clone)]
pub struct KeyRing {
    pub(crate) base: Secret,
    /// Ascending; the last one seals.
    pub(crate) epochs: Vec<Epoch>,
    pub(crate) minimum_epoch: u32,
    derived: Derived,
    open: Vec<Option<EpochKeys>>,
}

/// One epoch of a key ring.
#[derive(Clone)]
pub(crate) struct Epoch {
    pub(crate) number: u32,
    pub(crate) created_unix_s: u64,
    /// `None`: revoked, the secret is destroyed.
    pub(crate) secret: Option<Secret>,
}

/// What may be said about an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EpochInfo {
    /// Its number.
    pub number: u32,
    /// When it was made, in seconds since 1970.
    pub created_unix_s: u64,
    /// Its secret is destroyed.
    pub revoked: bool,
    /// Objects sealed in it may be read.
    pub readable: bool,
}

#[derive(Clone)]
struct Derived {
    key_id: [u8; 16],
    chunk: Secret,
    namespace: Secret,
    catalog: Secret,
}

#[derive(Clone)]
pub(crate) struct EpochKeys {
    authentication: Secret,
    manifest: Secret,
    segment: Secret,
    record: Secret,
}

/// The names' keys of one tenant.
#[derive(Clone)]
pub(crate) struct TenantKeys {
    pub(crate) id: [u8; 16],
    pub(crate) prefix: Secret,
    pub(crate) content: Secret,
    pub(crate) pack: Secret,
}

impl KeyRing {
    /// Fresh secrets, in memory only.
    pub fn generate() -> Result<Self, PackError> {
        let first = Epoch { number: 1, created_unix_s: now_unix_s(), secret: Some(random_secret()?) };
        Ok(Self::from_parts(random_secret()?, vec![first], 1))
    }

    pub(crate) fn from_parts(base: Secret, epochs: Vec<Epoch>, minimum_epoch: u32) -> Self {
        let id = derive("muser pack v1 key id", &[&base[..]]);
        let mut key_id = [0; 16];
        key_id.copy_from_slice(&id[..16]);
        let derived = Derived {
            key_id,
            chunk: derive("muser pack v1 content chunk", &[&base[..]]),
            namespace: derive("muser pack v1 namespace", &[&base[..]]),
            catalog: derive("muser pack v1 catalog", &[&base[..]]),
        };
        let open = epochs
            .iter()
            .map(|epoch| {
                let secret = &epoch.secret.as_ref()?[..];
                Some(EpochKeys {
                    authentication: derive("muser pack v1 authentication", &[secret]),
                    manifest: derive("muser pack v1 manifest encryption", &[secret]),
                    segment: derive("muser pack v1 segment encryption", &[secret]),
                    record: derive("muser pack v1 record encryption", &[secret]),
                })
            })
            .collect();
        Self { base, epochs, minimum_epoch, derived, open }
    }

    /// The public id of the base secret, in hexadecimal.
    pub fn id(&self) -> String {
        crate::name::hex(&self.derived.key_id)
    }

    /// The epoch that seals now.
    pub fn current_epoch(&self) -> u32 {
        self.epochs.last().map_or(0, |epoch| epoch.number)
    }

    /// The oldest epoch that may be read.
    pub fn minimum_epoch(&self) -> u32 {
        self.minimum_epoch
    }

    /// All epochs, oldest first.
    pub fn epochs(&self) -> Vec<EpochInfo> {
        let info = |epoch: &Epoch| EpochInfo {
            number: epoch.number,
            created_unix_s: epoch.created_unix_s,
            revoked: epoch.secret.is_none(),
            readable: epoch.secret.is_some() && epoch.number >= self.minimum_epoch,
        };
        self.epochs.iter().map(info).collect()
    }

    /// Adds an epoch, which seals from now on. Names do not change.
    pub fn rotate(&mut self) -> Result<u32, PackError> {
        if self.epochs.len() >= MAX_EPOCHS {
            return Err(PackError::Caller {
                what: "epochs of a key file",
                expected: format!("at most {MAX_EPOCHS}"),
                found: format!("{} already", self.epochs.len()),
            });
        }
        let number = self.current_epoch() + 1;
        let mut epochs = self.epochs.clone();
        epochs.push(Epoch { number, created_unix_s: now_unix_s(), secret: Some(random_secret()?) });
        *self = Self::from_parts(self.base.clone(), epochs, self.minimum_epoch);
        Ok(number)
    }

    /// Destroys an epoch's secret: what was sealed in it can never be read again. The current epoch must be rotated
    /// away first.
    pub fn revoke(&mut self, number: u32) -> Result<(), PackError> {
        let mut epochs = self.epochs.clone();
        let old = epochs.iter_mut().find(|epoch| epoch.number == number && number != self.current_epoch());
        let Some(epoch) = old else {
            return Err(PackError::Caller {
                what: "epoch to revoke",
                expected: "an epoch older than the current one".into(),
                found: number.to_string(),
            });
        };
        if let Some(mut secret) = epoch.secret.take() {
            secret.zeroize();
        }
        *self = Self::from_parts(self.base.clone(), epochs, self.minimum_epoch);
        Ok(())
    }

    /// From now on nothing older than epoch `number` is read.
    pub fn set_minimum_epoch(&mut self, number: u32) -> Result<(), PackError> {
        if number < self.minimum_epoch || number > self.current_epoch() {
            return Err(PackError::Caller {
                what: "oldest readable epoch",
                expected: format!("{} to {}", self.minimum_epoch, self.current_epoch()),
                found: number.to_string(),
            });
        }
        self.minimum_epoch = number;
        Ok(())
    }

    pub(crate) fn key_id(&self) -> &[u8; 16] {
        &self.derived.key_id
    }

    pub(crate) fn chunk_key(&self) -> &[u8; 32] {
        &self.derived.chunk
    }

    pub(crate) fn namespace_key(&self) -> &[u8; 32] {
        &self.derived.namespace
    }

    pub(crate) fn catalog_key(&self) -> &[u8; 32] {
        &self.derived.catalog
    }

    /// Keys of an epoch, if it may be read.
    pub(crate) fn epoch(&self, number: u32) -> Result<&EpochKeys, Refusal> {
        let Ok(at) = self.epochs.binary_search_by_key(&number, |epoch| epoch.number) else {
            return Err(Refusal::UnknownEpoch { epoch: number });
        };
        let Some(keys) = &self.open[at] else { return Err(Refusal::RevokedKey { epoch: number }) };
        if number < self.minimum_epoch {
            return Err(Refusal::EpochTooOld { epoch: number, minimum: self.minimum_epoch });
        }
        Ok(keys)
    }

    pub(crate) fn tenant(&self, label: &str) -> TenantKeys {
        let base = &self.base[..];
        let label = label.as_bytes();
        let mut id = [0; 16];
        id.copy_from_slice(&derive("muser pack v1 tenant", &[base, label])[..16]);
        TenantKeys {
            id,
            prefix: derive("muser pack v1 prefix", &[base, label]),
            content: derive("muser pack v1 content", &[base, label]),
            pack: derive("muser pack v1 pack id", &[base, label]),
        }
    }
}

impl std::fmt::Debug for KeyRing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KeyRing").field("id", &self.id()).field("epoch", &self.current_epoch()).finish()
    }
}

impl EpochKeys {
    pub(crate) fn authentication(&self) -> &[u8; 32] {
        &self.authentication
    }

    #[cfg(test)]
    pub(crate) fn secrets_for_tests(&self) -> [[u8; 32]; 3] {
        [*self.manifest, *self.segment, *self.record]
    }

    /// The key that encrypts one object and no other.
    pub(crate) fn data_key(&self, kind: Kind, name: &[u8; 32], salt: &[u8; 32]) -> aead::LessSafeKey {
        let (secret, label) = match kind {
            Kind::Manifest => (&self.manifest, b"manifest"),
            Kind::Full | Kind::Sliding => (&self.segment, b"segment_"),
            Kind::Record => (&self.record, b"record__"),
        };
        let secret = hkdf::Salt::new(hkdf::HKDF_SHA256, salt).extract(&secret[..]);
        let info = [b"muser pack v1 data key".as_slice(), label, name];
        // HKDF-SHA256 gives up to 8,160 bytes; 32 are asked for.
        let okm = secret.expand(&info, &aead::AES_256_GCM).expect("32 bytes are within HKDF's limit");
        aead::LessSafeKey::new(aead::UnboundKey::from(okm))
    }
}

/// BLAKE3's key derivation over the parts: the first is fixed-length, so the concatenation has one reading.
pub(crate) fn derive(context: &str, parts: &[&[u8]]) -> Secret {
    let mut hasher = Zeroizing::new(blake3::Hasher::new_derive_key(context));
    for part in parts {
        hasher.update(part);
    }
    let hash = Zeroizing::new(hasher.finalize());
    Zeroizing::new(*hash.as_bytes())
}

pub(crate) fn random_secret() -> Result<Secret, PackError> {
    let mut secret = Zeroizing::new([0; 32]);
    SystemRandom::new().fill(&mut secret[..]).map_err(|_| PackError::Random)?;
    Ok(secret)
}

pub(crate) fn now_unix_s() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs())
}
