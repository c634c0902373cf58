//! What several tests of this crate need.

#![allow(dead_code, reason = "each test uses its part")]

use std::path::Path;

/// A safetensors file.
pub(crate) struct Tensors {
    header: serde_json::Value,
    data: Vec<u8>,
}

impl Tensors {
    /// Reads a whole file.
    pub(crate) fn open(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        Self { header: serde_json::from_slice(&bytes[8..8 + len]).unwrap(), data: bytes[8 + len..].to_vec() }
    }

    fn get<T, const N: usize>(&self, name: &str, dtype: &str, read: fn([u8; N]) -> T) -> Vec<T> {
        let info = &self.header[name];
        assert_eq!(info["dtype"], dtype, "{name}");
        let at = |i: usize| info["data_offsets"][i].as_u64().unwrap() as usize;
        self.data[at(0)..at(1)].as_chunks::<N>().0.iter().map(|bytes| read(*bytes)).collect()
    }

    /// Is there a tensor of this name?
    pub(crate) fn has(&self, name: &str) -> bool {
        !self.header[name].is_null()
    }

    /// All values of an f64 tensor.
    pub(crate) fn f64(&self, name: &str) -> Vec<f64> {
        self.get(name, "F64", f64::from_le_bytes)
    }

    /// All values of an i64 tensor.
    pub(crate) fn i64(&self, name: &str) -> Vec<i64> {
        self.get(name, "I64", i64::from_le_bytes)
    }

    /// All bytes of a u8 tensor.
    pub(crate) fn u8(&self, name: &str) -> Vec<u8> {
        self.get(name, "U8", |[byte]| byte)
    }

    /// All values of an f32 tensor.
    pub(crate) fn f32(&self, name: &str) -> Vec<f32> {
        self.get(name, "F32", f32::from_le_bytes)
    }

    /// All values of an i32 tensor of ids.
    pub(crate) fn u32(&self, name: &str) -> Vec<u32> {
        self.get(name, "I32", u32::from_le_bytes)
    }
}
