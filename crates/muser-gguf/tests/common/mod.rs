//! Bytes of GGUF files written by hand, so that they can also be wrong.
#![allow(dead_code, reason = "each test program uses a part")]

use muser_gguf::GgufFile;

/// Id of the string type in metadata.
pub(crate) const STRING: u32 = 8;

/// Bytes under construction.
pub(crate) struct Raw(Vec<u8>);

impl Raw {
    pub(crate) fn with_version(version: u32) -> Raw {
        Raw(b"GGUF".to_vec()).u32(version).u64(0).u64(0)
    }

    pub(crate) fn header(tensors: u64, keys: u64) -> Raw {
        Raw(b"GGUF".to_vec()).u32(3).u64(tensors).u64(keys)
    }

    pub(crate) fn raw(mut self, bytes: &[u8]) -> Raw {
        self.0.extend(bytes);
        self
    }

    pub(crate) fn u32(self, value: u32) -> Raw {
        self.raw(&value.to_le_bytes())
    }

    pub(crate) fn u64(self, value: u64) -> Raw {
        self.raw(&value.to_le_bytes())
    }

    pub(crate) fn string(self, text: &str) -> Raw {
        self.u64(text.len() as u64).raw(text.as_bytes())
    }

    pub(crate) fn tensor(self, name: &str, dims: &[u64], ty: u32, offset: u64) -> Raw {
        let mut raw = self.string(name).u32(dims.len() as u32);
        for dim in dims {
            raw = raw.u64(*dim);
        }
        raw.u32(ty).u64(offset)
    }

    pub(crate) fn zeros(mut self, count: usize) -> Raw {
        self.0.resize(self.0.len() + count, 0);
        self
    }

    pub(crate) fn pad(mut self, alignment: usize) -> Raw {
        self.0.resize(self.0.len().next_multiple_of(alignment), 0);
        self
    }

    pub(crate) fn bytes(self) -> Vec<u8> {
        self.0
    }
}

/// The file is refused with exactly this message.
#[track_caller]
pub(crate) fn check_refused(what: &str, bytes: Vec<u8>, expected: &str) {
    match GgufFile::from_bytes(bytes) {
        Ok(_) => panic!("{what}: the file was accepted"),
        Err(error) => assert_eq!(error.to_string(), format!("(in memory): {expected}"), "{what}"),
    }
}
