//! The local model store: one folder of files, and for each file that was proven a small record of what it was.
//!
//! A record names size, modification time and SHA-256; a file that no longer has that size and time counts as
//! unverified. Records live in `.verified/`, so that the folder itself shows models only.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::catalog::{self, KnownFile, Role};
use crate::digest::Sha256;
use crate::error::HubError;
use crate::part::write_atomically;

/// The folder where models are kept.
#[derive(Clone, Debug)]
pub struct ModelStore {
    dir: PathBuf,
}

/// What is known about a file of the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verified {
    /// Its SHA-256 was checked against what was expected of it, and it has not been touched since.
    Yes(Sha256),
    /// It was hashed while it arrived, but nobody said what to expect.
    HashedOnly(Sha256),
    /// It has another size or time than when it was checked.
    ChangedSince,
    /// It was never checked.
    No,
}

/// One file of the store.
#[derive(Clone, Debug)]
pub struct StoredModel {
    /// File name.
    pub name: String,
    /// Where it is.
    pub path: PathBuf,
    /// Bytes.
    pub size: u64,
    /// What it is for, from the catalog or guessed from its name.
    pub role: Role,
    /// Was it checked?
    pub verified: Verified,
    /// The official file that it is, by its checked hash.
    pub known: Option<&'static KnownFile>,
    /// Where it came from, without the query.
    pub url: Option<String>,
    /// Bytes of an unfinished pull; the file itself is not there then.
    pub unfinished: bool,
}

#[derive(Debug, Serialize, Deserialize)]
struct Record {
    size: u64,
    modified_ns: u64,
    sha256: String,
    /// Was the hash compared with one that was expected?
    checked: bool,
    url: Option<String>,
}

impl ModelStore {
    /// The store in `home`, or in `MUSER_HOME`, or in `~/.muser`; its models are in the folder `models` there.
    ///
    /// Nothing is created before the first pull.
    pub fn open(home: Option<&Path>) -> Result<Self, HubError> {
        let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let home = match home {
            Some(home) => home.to_owned(),
            None => set("MUSER_HOME")
                .or_else(|| set("HOME").or_else(|| set("USERPROFILE")).map(|h| h.join(".muser")))
                .ok_or(HubError::NoHome)?,
        };
        Ok(Self { dir: home.join("models") })
    }

    /// The folder with the files.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Everything that is there, by name; unfinished pulls come with their final name.
    pub fn list(&self) -> Result<Vec<StoredModel>, HubError> {
        let entries = match std::fs::read_dir(&self.dir) {
            Ok(entries) => entries,
            // Accounts of services have a home that is no folder.
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                return Ok(Vec::new());
            }
            Err(source) => return Err(HubError::Io { path: self.dir.clone(), source }),
        };
        let mut models = Vec::new();
        for entry in entries {
            let entry = entry.map_err(HubError::io(&self.dir))?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            let path = entry.path();
            // Links to files elsewhere count; what vanishes while we look does not.
            let Ok(metadata) = std::fs::metadata(&path) else { continue };
            if !metadata.is_file() {
                continue;
            }
            if name.strip_suffix(".gguf").is_some() {
                models.push(self.describe(name, path, &metadata));
            } else if let Some(name) = name.strip_suffix(".part") {
                models.push(StoredModel {
                    name: name.to_owned(),
                    role: Role::guess(name),
                    path,
                    size: metadata.len(),
                    verified: Verified::No,
                    known: None,
                    url: None,
                    unfinished: true,
                });
            }
        }
        models.sort_by(|a, b| a.name.cmp(&b.name).then(a.unfinished.cmp(&b.unfinished)));
        Ok(models)
    }

    /// The path of a complete file: by short name, file name (with or without `.gguf`), or a unique beginning of one.
    pub fn find(&self, name: &str) -> Result<PathBuf, HubError> {
        let all: Vec<_> = self.list()?.into_iter().filter(|model| !model.unfinished).collect();
        let lower = name.to_ascii_lowercase();
        let stem = |model: &StoredModel| model.name.to_ascii_lowercase().trim_end_matches(".gguf").to_owned();
        let exact = |model: &&StoredModel| {
            model.name == name
                || stem(model) == lower.trim_end_matches(".gguf")
                || catalog::by_name(name).is_some_and(|known| known.file == model.name)
                || model.known.is_some_and(|known| known.names.contains(&lower.as_str()))
        };
        if let Some(model) = all.iter().find(exact) {
            return Ok(model.path.clone());
        }
        let fitting: Vec<_> =
            all.iter().filter(|model| !lower.is_empty() && stem(model).starts_with(&lower)).collect();
        match fitting.as_slice() {
            [one] => Ok(one.path.clone()),
            [] => {
                let names: Vec<_> = all.iter().map(|m| m.name.as_str()).collect();
                let available = if names.is_empty() { "nothing yet".to_owned() } else { names.join(", ") };
                Err(HubError::NoSuchModel { name: name.to_owned(), dir: self.dir.clone(), available })
            }
            several => {
                let names: Vec<_> = several.iter().map(|m| m.name.as_str()).collect();
                Err(HubError::Ambiguous { name: name.to_owned(), candidates: names.join(" and ") })
            }
        }
    }

    /// The model to use when none is named: the official one if it is there, else the only or newest text model.
    pub fn default_model(&self) -> Result<Option<PathBuf>, HubError> {
        let models: Vec<_> = self
            .list()?
            .into_iter()
            .filter(|m| !m.unfinished && m.role == Role::Model && is_first_of_set(&m.name))
            .collect();
        for known in catalog::CATALOG.iter().filter(|known| known.role == Role::Model) {
            if let Some(model) = models.iter().find(|m| m.name == known.file) {
                return Ok(Some(model.path.clone()));
            }
        }
        let modified =
            |m: &StoredModel| std::fs::metadata(&m.path).and_then(|x| x.modified()).unwrap_or(UNIX_EPOCH);
        Ok(models.into_iter().max_by_key(modified).map(|m| m.path))
    }

    /// Notes that a file was hashed, and whether the hash is the expected one.
    pub(crate) fn record(
        &self,
        name: &str,
        sha256: &Sha256,
        checked: bool,
        url: Option<&str>,
    ) -> Result<(), HubError> {
        let path = self.dir.join(name);
        let metadata = std::fs::metadata(&path).map_err(HubError::io(&path))?;
        let record = Record {
            size: metadata.len(),
            modified_ns: modified_ns(&metadata),
            sha256: sha256.to_string(),
            checked,
            url: url.map(str::to_owned),
        };
        let folder = self.dir.join(".verified");
        std::fs::create_dir_all(&folder).map_err(HubError::io(&folder))?;
        let text = serde_json::to_vec_pretty(&record).expect("a struct of strings and numbers");
        write_atomically(&folder.join(format!("{name}.json")), &text)
    }

    /// Hashes a stored file now and notes the result; `seen` hears the bytes done.
    pub fn verify(&self, model: &StoredModel, seen: &mut dyn FnMut(u64)) -> Result<Verified, HubError> {
        let sha256 = Sha256::of_file(&model.path, seen)?;
        let earlier = self.read_record(&model.name);
        let official = catalog::by_content(model.size, &sha256).is_some();
        if let Some(record) = earlier.as_ref().filter(|r| r.sha256 != sha256.to_string()) {
            return Err(HubError::WrongHash {
                name: model.name.clone(),
                expected: record.sha256.clone(),
                found: sha256.to_string(),
            });
        }
        let checked = official || earlier.as_ref().is_some_and(|r| r.checked);
        self.record(&model.name, &sha256, checked, earlier.as_ref().and_then(|r| r.url.as_deref()))?;
        Ok(if checked { Verified::Yes(sha256) } else { Verified::HashedOnly(sha256) })
    }

    pub(crate) fn describe_file(&self, name: &str) -> Option<StoredModel> {
        let path = self.dir.join(name);
        let metadata = std::fs::metadata(&path).ok()?;
        Some(self.describe(name.to_owned(), path, &metadata))
    }

    fn describe(&self, name: String, path: PathBuf, metadata: &std::fs::Metadata) -> StoredModel {
        let record = self.read_record(&name);
        let url = record.as_ref().and_then(|r| r.url.clone());
        let verified = match record {
            None => Verified::No,
            Some(r) if r.size != metadata.len() || r.modified_ns != modified_ns(metadata) => {
                Verified::ChangedSince
            }
            Some(r) => match Sha256::from_hex(&r.sha256) {
                Some(sha256) if r.checked => Verified::Yes(sha256),
                Some(sha256) => Verified::HashedOnly(sha256),
                None => Verified::No,
            },
        };
        let known = match &verified {
            Verified::Yes(sha256) | Verified::HashedOnly(sha256) => {
                catalog::by_content(metadata.len(), sha256)
            }
            _ => None,
        };
        let role = known.map_or_else(|| Role::guess(&name), |k| k.role);
        StoredModel { name, path, size: metadata.len(), role, verified, known, url, unfinished: false }
    }

    fn read_record(&self, name: &str) -> Option<Record> {
        let path = self.dir.join(".verified").join(format!("{name}.json"));
        serde_json::from_slice(&std::fs::read(path).ok()?).ok()
    }
}

/// Of a split set only the first file is opened by name.
fn is_first_of_set(name: &str) -> bool {
    let stem = name.trim_end_matches(".gguf");
    match stem.rsplit_once("-of-") {
        Some((front, count)) if count.len() == 5 && count.bytes().all(|b| b.is_ascii_digit()) => {
            front.ends_with("-00001")
        }
        _ => true,
    }
}

fn modified_ns(metadata: &std::fs::Metadata) -> u64 {
    let since =
        metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH).duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store(files: &[&str]) -> (tempfile::TempDir, ModelStore) {
        let home = tempfile::tempdir().unwrap();
        let store = ModelStore::open(Some(home.path())).unwrap();
        std::fs::create_dir_all(store.dir()).unwrap();
        for file in files {
            std::fs::write(store.dir().join(file), file).unwrap();
        }
        (home, store)
    }

    fn found(store: &ModelStore, name: &str) -> Option<String> {
        Some(store.find(name).ok()?.file_name()?.to_str()?.to_owned())
    }

    #[test]
    fn an_empty_home_has_no_models() {
        let home = tempfile::tempdir().unwrap();
        let store = ModelStore::open(Some(&home.path().join("nowhere"))).unwrap();
        assert!(store.list().unwrap().is_empty());
        assert_eq!(store.default_model().unwrap(), None);
        let message = store.find("x").unwrap_err().to_string();
        assert!(message.contains("nothing yet"), "{message}");
        // A home that is a file, such as a service's /dev/null, has none either.
        let file = home.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert!(ModelStore::open(Some(&file)).unwrap().list().unwrap().is_empty());
    }

    #[test]
    fn files_are_found_by_every_name_they_have() {
        let official = catalog::by_name("30b").unwrap().file;
        let (_home, store) =
            store(&[official, "alpha-Q8_0.gguf", "alpha-F16.gguf", "beta.gguf", "beta-2.gguf", "notes.txt"]);
        assert_eq!(found(&store, "30b").as_deref(), Some(official));
        assert_eq!(found(&store, "MUSE-GLIMMER-30B").as_deref(), Some(official));
        assert_eq!(found(&store, "alpha-q8").as_deref(), Some("alpha-Q8_0.gguf"));
        assert_eq!(found(&store, "beta").as_deref(), Some("beta.gguf"));
        assert_eq!(found(&store, "beta.gguf").as_deref(), Some("beta.gguf"));
        assert!(matches!(store.find("alpha"), Err(HubError::Ambiguous { .. })));
        assert!(matches!(store.find(""), Err(HubError::NoSuchModel { .. })));
        assert!(matches!(store.find("notes"), Err(HubError::NoSuchModel { .. })));
        assert!(store.default_model().unwrap().unwrap().ends_with(official));
    }

    #[test]
    fn drafts_projectors_and_parts_are_no_default() {
        let (_home, store) = store(&[
            "dflash-x.gguf",
            "mmproj-x.gguf",
            "y.gguf.part",
            "z-00002-of-00002.gguf",
            "z-00001-of-00002.gguf",
        ]);
        assert!(store.default_model().unwrap().unwrap().ends_with("z-00001-of-00002.gguf"));
        let parts: Vec<_> =
            store.list().unwrap().into_iter().filter(|m| m.unfinished).map(|m| m.name).collect();
        assert_eq!(parts, ["y.gguf"]);
        assert!(store.find("y").is_err());
    }

    #[test]
    fn a_touched_file_is_no_longer_verified() {
        let (_home, store) = store(&["a.gguf"]);
        let state = || store.list().unwrap().remove(0).verified;
        assert_eq!(state(), Verified::No);
        let sha256 = Sha256::of_file(&store.dir().join("a.gguf"), &mut |_| {}).unwrap();
        store.record("a.gguf", &sha256, true, None).unwrap();
        assert_eq!(state(), Verified::Yes(sha256));
        std::fs::write(store.dir().join("a.gguf"), "another content").unwrap();
        assert_eq!(state(), Verified::ChangedSince);
        let model = store.list().unwrap().remove(0);
        assert!(matches!(store.verify(&model, &mut |_| {}), Err(HubError::WrongHash { .. })));
        std::fs::write(store.dir().join("a.gguf"), "a.gguf").unwrap();
        let model = store.list().unwrap().remove(0);
        assert_eq!(store.verify(&model, &mut |_| {}).unwrap(), Verified::Yes(sha256));
    }
}
