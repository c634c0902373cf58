//! A node's private key, and the file that it never leaves.
//!
//! ```text
//!  0  8  magic "MUSRNODE"      12 32  seed of the key
//!  8  2  version, 1            44 32  seed of the next key while keys change, zeros otherwise
//! 10  2  zeros                 76 32  D("muser node v1 key file", everything before)
//! ```

use std::path::{Path, PathBuf};

use aws_lc_rs::signature::{ED25519, Ed25519KeyPair, KeyPair as _, UnparsedPublicKey};
use zeroize::Zeroizing;

use crate::NodeError;
use crate::ids::NodeKey;
use crate::private;

const MAGIC: &[u8; 8] = b"MUSRNODE";
const VERSION: u16 = 1;
const BYTES: usize = 108;
const NEXT_DOMAIN: &[u8] = b"muser node next key v1";

/// An Ed25519 key.
pub struct Secret {
    seed: Zeroizing<[u8; 32]>,
    pair: Ed25519KeyPair,
    key: NodeKey,
}

impl Secret {
    /// A fresh one.
    pub fn generate() -> Result<Self, NodeError> {
        let mut seed = Zeroizing::new([0; 32]);
        aws_lc_rs::rand::fill(&mut seed[..]).map_err(|_| NodeError::System("no random bytes".into()))?;
        Self::from_seed(seed)
    }

    fn from_seed(seed: Zeroizing<[u8; 32]>) -> Result<Self, NodeError> {
        let pair = Ed25519KeyPair::from_seed_unchecked(&seed[..])
            .map_err(|error| NodeError::System(format!("the node's key is none: {error}")))?;
        let mut key = NodeKey([0; 32]);
        key.0.copy_from_slice(pair.public_key().as_ref());
        Ok(Self { seed, pair, key })
    }

    /// The public key.
    pub fn key(&self) -> NodeKey {
        self.key
    }

    /// A digest that nobody else can make.
    pub(crate) fn digest(&self, domain: &str, bytes: &[u8]) -> [u8; 32] {
        let mut key = blake3::derive_key(domain, &self.seed[..]);
        let digest = *blake3::keyed_hash(&key, bytes).as_bytes();
        zeroize::Zeroize::zeroize(&mut key);
        digest
    }

    /// PKCS#8 version 1, as TLS wants it.
    pub(crate) fn pkcs8(&self) -> Zeroizing<Vec<u8>> {
        const HEAD: [u8; 16] = [0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20];
        let mut bytes = Zeroizing::new(Vec::with_capacity(48));
        bytes.extend_from_slice(&HEAD);
        bytes.extend_from_slice(&self.seed[..]);
        bytes
    }

    /// That whoever has this key makes it the next one of `present`.
    pub(crate) fn prove_next_of(&self, present: NodeKey) -> [u8; 64] {
        let mut proof = [0; 64];
        proof.copy_from_slice(self.pair.sign(&next_statement(present, self.key)).as_ref());
        proof
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Secret of {}", self.key)
    }
}

/// Is this a proof that `present` is to become `next`, by whoever has `next`?
pub(crate) fn is_next_of(present: NodeKey, next: NodeKey, proof: &[u8; 64]) -> bool {
    UnparsedPublicKey::new(&ED25519, next.0).verify(&next_statement(present, next), proof).is_ok()
}

fn next_statement(present: NodeKey, next: NodeKey) -> Vec<u8> {
    [NEXT_DOMAIN, &present.0, &next.0].concat()
}

/// The file's content: the key in use, and the next one while keys change.
#[derive(Debug)]
pub struct Secrets {
    /// The key in use.
    pub current: Secret,
    /// The one that peers are being told of.
    pub next: Option<Secret>,
}

impl Secrets {
    /// Where a node's key lies in muser's folder.
    pub fn path(home: &Path) -> PathBuf {
        home.join("keys").join("node.key")
    }

    /// Reads a node's key, or makes one.
    pub fn open_or_create(home: &Path) -> Result<Self, NodeError> {
        let path = Self::path(home);
        let _lock = private::lock(&path)?;
        if let Some(secrets) = Self::read(&path)? {
            return Ok(secrets);
        }
        let secrets = Self { current: Secret::generate()?, next: None };
        secrets.write(&path)?;
        Ok(secrets)
    }

    /// Makes the next key, which peers are told of from now on. The one that is being told of stays if there is one.
    pub fn begin_rotation(home: &Path) -> Result<NodeKey, NodeError> {
        Self::change(home, |secrets| {
            if secrets.next.is_none() {
                secrets.next = Some(Secret::generate()?);
            }
            Ok(())
        })
        .map(|secrets| secrets.next.as_ref().map_or(secrets.current.key(), Secret::key))
    }

    /// The next key takes the present one's place, which is gone then.
    pub fn end_rotation(home: &Path) -> Result<NodeKey, NodeError> {
        Self::change(home, |secrets| {
            if let Some(next) = secrets.next.take() {
                secrets.current = next;
            }
            Ok(())
        })
        .map(|secrets| secrets.current.key())
    }

    fn change(
        home: &Path,
        change: impl FnOnce(&mut Self) -> Result<(), NodeError>,
    ) -> Result<Self, NodeError> {
        drop(Self::open_or_create(home)?);
        let path = Self::path(home);
        let _lock = private::lock(&path)?;
        let secrets = Self::read(&path)?;
        let mut secrets = secrets.ok_or_else(|| NodeError::file(&path, "it has just been removed"))?;
        change(&mut secrets)?;
        secrets.write(&path)?;
        Ok(secrets)
    }

    fn write(&self, path: &Path) -> Result<(), NodeError> {
        let mut bytes = Zeroizing::new(Vec::with_capacity(BYTES));
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&[0; 2]);
        bytes.extend_from_slice(&self.current.seed[..]);
        bytes.extend_from_slice(self.next.as_ref().map_or(&[0; 32][..], |next| &next.seed[..]));
        let code = blake3::derive_key("muser node v1 key file", &bytes);
        bytes.extend_from_slice(&code);
        private::write(path, &bytes)
    }

    fn read(path: &Path) -> Result<Option<Self>, NodeError> {
        let Some(bytes) = private::read(path, BYTES as u64)? else { return Ok(None) };
        let malformed = |reason: &str| NodeError::file(path, reason);
        if bytes.len() != BYTES || !bytes.starts_with(MAGIC) {
            return Err(malformed("it is not a node's key"));
        }
        if bytes[8..12] != [VERSION.to_le_bytes(), [0; 2]].concat() {
            return Err(malformed("it is of another version"));
        }
        if blake3::derive_key("muser node v1 key file", &bytes[..76]) != bytes[76..] {
            return Err(malformed("it is damaged"));
        }
        let seed = |at: usize| {
            let mut seed = Zeroizing::new([0; 32]);
            seed.copy_from_slice(&bytes[at..at + 32]);
            seed
        };
        let next = if bytes[44..76] == [0; 32] { None } else { Some(Secret::from_seed(seed(44))?) };
        Ok(Some(Self { current: Secret::from_seed(seed(12))?, next }))
    }
}
