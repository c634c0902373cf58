//! A narrow door for fuzzers: decoders that are otherwise reached only behind a key, and codes made good, so that what lies
//! behind them is reached with bytes that nobody has written.

use crate::keys::{Epoch, KeyRing, Secret};
use crate::manifest::Manifest;
use crate::object::{OpenedObject, mend};
use crate::store::ReadAt;
use crate::{Area, ObjectName, PackError, Refusal, key_file};

/// The same keys in every process.
pub fn keys() -> KeyRing {
    let epoch = Epoch { number: 1, created_unix_s: 0, secret: Some(Secret::new([2; 32])) };
    KeyRing::from_parts(Secret::new([1; 32]), vec![epoch], 1)
}

/// A manifest's encoding after it was read.
pub fn manifest(bytes: &[u8]) -> Result<Vec<u8>, Refusal> {
    Manifest::decode(bytes).map(|manifest| manifest.encode())
}

/// A key file's encoding after it was read.
pub fn key_file(bytes: &[u8]) -> Result<Vec<u8>, Refusal> {
    key_file::decode(bytes).map(|keys| key_file::encode(&keys).to_vec())
}

/// A key file of [`keys`].
pub fn example_key_file() -> Vec<u8> {
    key_file::encode(&keys()).to_vec()
}

/// A key file's code made good.
pub fn mend_key_file(bytes: &mut [u8]) {
    key_file::mend(bytes);
}

/// The payload of an object of this area under [`keys`]; its key id, name and header's code are made good before.
pub fn object(area: Area, mut bytes: Vec<u8>) -> Result<Vec<u8>, PackError> {
    let id = mend(&keys(), &mut bytes);
    let name = ObjectName { area, id };
    OpenedObject::open(&keys(), false, name, Box::new(Bytes(bytes)))?.read_all()
}

/// The codes of a catalog's records under [`keys`] made good, one after the other.
pub fn mend_catalog(bytes: &mut [u8]) {
    crate::library::mend_catalog(&keys(), bytes);
}

struct Bytes(Vec<u8>);

impl ReadAt for Bytes {
    fn len(&self) -> Result<u64, PackError> {
        Ok(self.0.len() as u64)
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), PackError> {
        let from = self.0.get(offset as usize..).and_then(|rest| rest.get(..out.len()));
        let from = from.ok_or_else(|| {
            PackError::refused(
                "bytes",
                Refusal::Truncated { expected: offset + out.len() as u64, found: self.0.len() as u64 },
            )
        })?;
        out.copy_from_slice(from);
        Ok(())
    }
}
