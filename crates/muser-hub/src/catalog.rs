//! The official files: names, sizes and hashes as published with the model.
//!
//! A file that is not listed is never an error: it is pulled with what the server says of it and listed as unknown.

use crate::digest::Sha256;

/// What a file is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A text model.
    Model,
    /// A DFlash draft, used beside a text model.
    Draft,
    /// A vision projector, used beside a text model.
    Projector,
}

impl Role {
    /// In a word.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::Draft => "draft",
            Self::Projector => "projector",
        }
    }

    /// A guess from a file name, for files that are not in the catalog.
    pub fn guess(file_name: &str) -> Self {
        let name = file_name.to_ascii_lowercase();
        if name.contains("mmproj") {
            Self::Projector
        } else if name.contains("dflash") || name.contains("draft") {
            Self::Draft
        } else {
            Self::Model
        }
    }
}

/// One official file.
#[derive(Clone, Copy, Debug)]
pub struct KnownFile {
    /// Short names, the first one preferred; empty for files that a later revision replaced.
    pub names: &'static [&'static str],
    /// `owner/repo` on the hub.
    pub repo: &'static str,
    /// Name in the repository and in the store.
    pub file: &'static str,
    /// Bytes.
    pub size: u64,
    /// SHA-256, hexadecimal.
    pub sha256: &'static str,
    /// What it is for.
    pub role: Role,
    /// In words, for people.
    pub about: &'static str,
}

impl KnownFile {
    /// The hash as bytes.
    pub fn digest(&self) -> Sha256 {
        Sha256::from_hex(self.sha256).expect("a test parses every hash of the catalog")
    }
}

/// The name that `muser pull` without an argument means.
pub const DEFAULT_NAME: &str = "muse-glimmer-30b";

const REPO: &str = "meta-models/Muse-Glimmer-30B-GGUF";

/// All official files, the preferred ones first.
pub const CATALOG: &[KnownFile] = &[
    KnownFile {
        names: &["muse-glimmer-30b", "30b"],
        repo: REPO,
        file: "Muse-Glimmer-30B-KQuant-17GB-Q4_K_M.gguf",
        size: 16_756_683_904,
        sha256: "4cc57c0f51040a226e5a72cc47b7613f7772950e460a665f7083de89f183f60e",
        role: Role::Model,
        about: "Muse Glimmer 30B, official K-quant of 17 GB",
    },
    KnownFile {
        names: &["muse-glimmer-30b-dynamic", "30b-dynamic"],
        repo: REPO,
        file: "Muse-Glimmer-30B-KQuant-Dynamic-Q4_K_XL.gguf",
        size: 19_653_960_832,
        sha256: "ac7023d6a4c704eb9af54ab53e476a66b7f5b6c0ef2fc4a8dde5253c291a6c38",
        role: Role::Model,
        about: "Muse Glimmer 30B, official dynamic K-quant of 20 GB",
    },
    KnownFile {
        names: &["muse-glimmer-30b-dflash", "30b-dflash", "dflash"],
        repo: REPO,
        file: "dflash-Muse-Glimmer-30B-Q4_K_M.gguf",
        size: 1_631_208_128,
        sha256: "b2e808bf656086fe86bd0d0bd990f01d33e377537a07c02d45371517c8b264ef",
        role: Role::Draft,
        about: "DFlash draft of Muse Glimmer 30B",
    },
    KnownFile {
        names: &["muse-glimmer-30b-mmproj", "30b-mmproj", "mmproj"],
        repo: REPO,
        file: "mmproj-Muse-Glimmer-30B-Q4_K_M.gguf",
        size: 1_400_328_928,
        sha256: "f48b452316f9b213758e8659444029b961a24a07f99a1abb2a9f88b06f7c00c6",
        role: Role::Projector,
        about: "vision projector of Muse Glimmer 30B",
    },
    // The first revision. Its files were renamed in place, so they are recognised and have no short name.
    KnownFile {
        names: &[],
        repo: REPO,
        file: "muse-glimmer-30b-kquant-17gb.gguf",
        size: 16_756_681_056,
        sha256: "7e9b74b7c8875e9e265695df9613bf6290f2392e479ce740495a129019c488d8",
        role: Role::Model,
        about: "Muse Glimmer 30B, official K-quant of 17 GB, first revision",
    },
    KnownFile {
        names: &[],
        repo: REPO,
        file: "muse-glimmer-30B-kquant-dynamic.gguf",
        size: 19_653_957_984,
        sha256: "513109c8319115f69eb09fb7b118c97c8167d15bc014fd7670d2e30489bf106c",
        role: Role::Model,
        about: "Muse Glimmer 30B, official dynamic K-quant of 20 GB, first revision",
    },
    KnownFile {
        names: &[],
        repo: REPO,
        file: "dflash-kquant.gguf",
        size: 1_631_205_312,
        sha256: "27d9a805fa29b943cfb6ad4843367cd4eaaaf06bd452d8cc3e00a2cd18a677bc",
        role: Role::Draft,
        about: "DFlash draft of Muse Glimmer 30B, first revision",
    },
    KnownFile {
        names: &[],
        repo: REPO,
        file: "mmproj-kquant.gguf",
        size: 1_400_328_928,
        sha256: "f48b452316f9b213758e8659444029b961a24a07f99a1abb2a9f88b06f7c00c6",
        role: Role::Projector,
        about: "vision projector of Muse Glimmer 30B, first revision",
    },
];

/// The official file that a short name means.
pub fn by_name(name: &str) -> Option<&'static KnownFile> {
    CATALOG.iter().find(|file| file.names.iter().any(|n| n.eq_ignore_ascii_case(name)))
}

/// The official file with exactly this content.
pub fn by_content(size: u64, sha256: &Sha256) -> Option<&'static KnownFile> {
    CATALOG.iter().find(|known| known.size == size && known.digest() == *sha256)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_hash_parses_and_names_are_unique() {
        let mut names: Vec<_> = CATALOG.iter().flat_map(|f| f.names).collect();
        for file in CATALOG {
            assert_eq!(file.digest().to_string(), file.sha256);
        }
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
        assert_eq!(by_name(DEFAULT_NAME).map(|f| f.size), Some(16_756_683_904));
        assert_eq!(by_name("MMPROJ").map(|f| f.role), Some(Role::Projector));
        assert!(by_name("").is_none());
    }
}
