//! The released files, recognised by size and proved by SHA-256.
//!
//! Recognition is a courtesy, never a condition: a file that is not in the table is "unknown weights", and may be as
//! good.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use muser_gguf::GgufError;

use crate::ModelError;

/// What a file is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The text model.
    Text,
    /// The draft model for speculative decoding.
    Draft,
    /// The vision projector.
    Projector,
}

impl Role {
    /// Name for tables.
    pub fn name(self) -> &'static str {
        match self {
            Role::Text => "text model",
            Role::Draft => "draft model",
            Role::Projector => "vision projector",
        }
    }
}

/// A released file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KnownFile {
    /// Name in its repository.
    pub name: &'static str,
    /// Size.
    pub bytes: u64,
    /// SHA-256, lower-case hexadecimal.
    pub sha256: &'static str,
    /// What it is for.
    pub role: Role,
    /// Which revision of the repository: 1 has the first chat template, 2 the second; the tensors are the same.
    pub revision: u32,
}

/// The repository of the released files.
pub const RELEASED_REPOSITORY: &str = "meta-models/Muse-Glimmer-30B-GGUF";

/// All released files, of the newer revision first.
pub const KNOWN_FILES: [KnownFile; 8] = [
    known(
        "Muse-Glimmer-30B-KQuant-17GB-Q4_K_M.gguf",
        16_756_683_904,
        "4cc57c0f51040a226e5a72cc47b7613f7772950e460a665f7083de89f183f60e",
        Role::Text,
        2,
    ),
    known(
        "Muse-Glimmer-30B-KQuant-Dynamic-Q4_K_XL.gguf",
        19_653_960_832,
        "ac7023d6a4c704eb9af54ab53e476a66b7f5b6c0ef2fc4a8dde5253c291a6c38",
        Role::Text,
        2,
    ),
    known(
        "dflash-Muse-Glimmer-30B-Q4_K_M.gguf",
        1_631_208_128,
        "b2e808bf656086fe86bd0d0bd990f01d33e377537a07c02d45371517c8b264ef",
        Role::Draft,
        2,
    ),
    known(
        "mmproj-Muse-Glimmer-30B-Q4_K_M.gguf",
        1_400_328_928,
        "f48b452316f9b213758e8659444029b961a24a07f99a1abb2a9f88b06f7c00c6",
        Role::Projector,
        2,
    ),
    known(
        "muse-glimmer-30b-kquant-17gb.gguf",
        16_756_681_056,
        "7e9b74b7c8875e9e265695df9613bf6290f2392e479ce740495a129019c488d8",
        Role::Text,
        1,
    ),
    known(
        "muse-glimmer-30B-kquant-dynamic.gguf",
        19_653_957_984,
        "513109c8319115f69eb09fb7b118c97c8167d15bc014fd7670d2e30489bf106c",
        Role::Text,
        1,
    ),
    known(
        "dflash-kquant.gguf",
        1_631_205_312,
        "27d9a805fa29b943cfb6ad4843367cd4eaaaf06bd452d8cc3e00a2cd18a677bc",
        Role::Draft,
        1,
    ),
    known(
        "mmproj-kquant.gguf",
        1_400_328_928,
        "f48b452316f9b213758e8659444029b961a24a07f99a1abb2a9f88b06f7c00c6",
        Role::Projector,
        1,
    ),
];

const fn known(name: &'static str, bytes: u64, sha256: &'static str, role: Role, revision: u32) -> KnownFile {
    KnownFile { name, bytes, sha256, role, revision }
}

/// The released file of this size, if there is one; the size says nothing about the content, see [`verify`].
pub fn identify_size(bytes: u64) -> Option<&'static KnownFile> {
    KNOWN_FILES.iter().find(|known| known.bytes == bytes)
}

/// The released file that has the size of this one.
pub fn identify(path: impl AsRef<Path>) -> Result<Option<&'static KnownFile>, ModelError> {
    let path = path.as_ref();
    let metadata = std::fs::metadata(path).map_err(|source| io_error(path, source))?;
    Ok(identify_size(metadata.len()))
}

/// What [`verify`] found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verification {
    /// Size of the file.
    pub bytes: u64,
    /// Its SHA-256, lower-case hexadecimal.
    pub sha256: String,
    /// The released file that it is, to the bit.
    pub known: Option<&'static KnownFile>,
    /// The released file that has its size but other content: damaged or made by somebody else.
    pub same_size: Option<&'static KnownFile>,
}

/// Reads the whole file and hashes it. `progress` is given bytes done and bytes in total.
pub fn verify(
    path: impl AsRef<Path>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Verification, ModelError> {
    let path = path.as_ref();
    let mut file = File::open(path).map_err(|source| io_error(path, source))?;
    let total = file.metadata().map_err(|source| io_error(path, source))?.len();
    let mut context = ring::digest::Context::new(&ring::digest::SHA256);
    let mut buffer = vec![0; 1 << 20];
    let mut done = 0_u64;
    progress(done, total);
    loop {
        let count = file.read(&mut buffer).map_err(|source| io_error(path, source))?;
        if count == 0 {
            break;
        }
        context.update(&buffer[..count]);
        done += count as u64;
        progress(done, total.max(done));
    }
    let mut sha256 = String::with_capacity(64);
    for byte in context.finish().as_ref() {
        for nibble in [byte >> 4, byte & 15] {
            sha256.extend(char::from_digit(nibble.into(), 16));
        }
    }
    let known = KNOWN_FILES.iter().find(|known| known.sha256 == sha256 && known.bytes == done);
    let same_size = identify_size(done).filter(|_| known.is_none());
    Ok(Verification { bytes: done, sha256, known, same_size })
}

fn io_error(path: &Path, source: std::io::Error) -> ModelError {
    ModelError::Gguf(GgufError::Io { path: path.display().to_string(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_well_formed() {
        for known in KNOWN_FILES {
            assert_eq!(known.sha256.len(), 64, "{}", known.name);
            assert!(
                known.sha256.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)),
                "{}",
                known.name
            );
        }
        assert_eq!(identify_size(16_756_681_056).map(|known| known.revision), Some(1));
        assert_eq!(identify_size(16_756_683_904).map(|known| known.role), Some(Role::Text));
        // One file has two names; the newer counts.
        assert_eq!(identify_size(1_400_328_928).map(|known| known.revision), Some(2));
        assert_eq!(identify_size(0), None);
    }

    #[test]
    fn hashes_are_those_of_the_standard() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("abc");
        std::fs::write(&path, b"abc").expect("written");
        let mut calls = Vec::new();
        let found = verify(&path, &mut |done, total| calls.push((done, total))).expect("read");
        assert_eq!(found.sha256, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert_eq!((found.bytes, found.known, found.same_size), (3, None, None));
        assert_eq!(calls, [(0, 3), (3, 3)]);
        assert_eq!(identify(&path).expect("read"), None);
    }

    #[test]
    fn the_size_of_a_released_file_does_not_make_one() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("fake.gguf");
        // A hole of the right size; sizes are what is recognised without reading.
        File::create(&path).and_then(|file| file.set_len(16_756_681_056)).expect("a sparse file");
        let known = identify(&path).expect("read").expect("recognised by size");
        assert_eq!(known.name, "muse-glimmer-30b-kquant-17gb.gguf");
    }
}
