//! A folder as Hugging Face publishes it: settings in JSON, tensors in one file or in shards with an index.

use std::collections::{BTreeSet, HashMap};
use std::io::Read as _;
use std::path::{Component, Path, PathBuf};

use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::ConvertError;
use crate::error::{io, wrong};
use crate::safetensors::{Dtype, Entry, Shard};

/// Most bytes of a settings file and of an index.
const MAX_SETTINGS: u64 = 16 << 20;
/// Most shards.
const MAX_SHARDS: usize = 4096;

/// An open checkpoint.
pub(crate) struct Checkpoint {
    pub(crate) folder: PathBuf,
    shards: Vec<Shard>,
    tensors: HashMap<String, Entry>,
    /// `config.json`.
    pub(crate) config: Value,
}

/// What is read of an index.
#[derive(serde::Deserialize)]
struct Index {
    weight_map: HashMap<String, String>,
}

impl Checkpoint {
    /// Opens a folder and checks the tables of all of its shards.
    pub(crate) fn open(folder: &Path) -> Result<Checkpoint, ConvertError> {
        let config = read_json(&folder.join("config.json"), MAX_SETTINGS)?.ok_or_else(|| {
            let place = folder.display().to_string();
            wrong(place, "a checkpoint's folder with a config.json", "no such file")
        })?;
        let index: Option<Index> = read_json(&folder.join("model.safetensors.index.json"), MAX_SETTINGS)?;
        let mut names = BTreeSet::new();
        match &index {
            Some(index) => names.extend(index.weight_map.values().cloned()),
            None => {
                names.insert("model.safetensors".to_owned());
            }
        }
        if names.len() > MAX_SHARDS {
            let expected = format!("at most {MAX_SHARDS} shards");
            return Err(wrong(folder.display().to_string(), expected, names.len().to_string()));
        }
        let mut open =
            Checkpoint { folder: folder.to_owned(), shards: Vec::new(), tensors: HashMap::new(), config };
        for name in &names {
            open.add_shard(name)?;
        }
        if let Some(index) = index {
            open.check_index(&index)?;
        }
        Ok(open)
    }

    fn add_shard(&mut self, name: &str) -> Result<(), ConvertError> {
        let path = Path::new(name);
        let mut parts = path.components();
        let plain =
            matches!((parts.next(), parts.next()), (Some(Component::Normal(part)), None) if part == path);
        if !plain || name.contains('\\') || path.extension().is_none_or(|ext| ext != "safetensors") {
            return Err(wrong(
                self.folder.display().to_string(),
                "shards that are files of this folder, *.safetensors",
                format!("{name:?} in the index"),
            ));
        }
        let path = self.folder.join(name);
        let (shard, entries) = Shard::open(&path, self.shards.len())?;
        self.shards.push(shard);
        for entry in entries {
            if let Some(before) = self.tensors.get(&entry.name) {
                let other = self.shards[before.shard].path.display().to_string();
                let place = format!("{}: tensor {}", path.display(), entry.name);
                return Err(wrong(place, "a tensor that no other shard has", format!("the same in {other}")));
            }
            self.tensors.insert(entry.name.clone(), entry);
        }
        Ok(())
    }

    /// Every tensor of the index is in its shard.
    fn check_index(&self, index: &Index) -> Result<(), ConvertError> {
        let mut names: Vec<_> = index.weight_map.iter().collect();
        names.sort();
        for (name, file) in names {
            let found = self.tensors.get(name).map(|entry| &self.shards[entry.shard].path);
            if found.is_none_or(|path| path.file_name().is_none_or(|found| found != file.as_str())) {
                let found =
                    found.map_or("no such tensor".to_owned(), |path| format!("it in {}", path.display()));
                return Err(wrong(
                    format!("tensor {name}"),
                    format!("it in {file}, as the index says"),
                    found,
                ));
            }
        }
        Ok(())
    }

    /// A tensor by its name.
    pub(crate) fn get(&self, name: &str) -> Option<&Entry> {
        self.tensors.get(name)
    }

    /// A tensor that must be there.
    pub(crate) fn entry(&self, name: &str) -> Result<&Entry, ConvertError> {
        self.get(name)
            .ok_or_else(|| wrong(format!("tensor {name}"), "it in the checkpoint", "no such tensor"))
    }

    /// All names.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Reads bytes of a tensor.
    pub(crate) fn read(&self, entry: &Entry, at: u64, out: &mut [u8]) -> Result<(), ConvertError> {
        self.shards[entry.shard].read(entry, at, out)
    }

    /// All values of a small tensor of floats. The caller has looked at its shape.
    pub(crate) fn floats(&self, entry: &Entry) -> Result<Vec<f32>, ConvertError> {
        let mut bytes = vec![0; entry.len as usize];
        self.read(entry, 0, &mut bytes)?;
        let mut values = vec![0.0; entry.shape.iter().product::<u64>() as usize];
        decode_floats(entry, &bytes, 0, &mut values)?;
        Ok(values)
    }

    /// A settings file that may be missing.
    pub(crate) fn settings(&self, name: &str) -> Result<Option<Value>, ConvertError> {
        read_json(&self.folder.join(name), MAX_SETTINGS)
    }
}

/// Widens floats of a tensor exactly. `first` is the number of the first of them in it, for messages.
pub(crate) fn decode_floats(
    entry: &Entry,
    bytes: &[u8],
    first: u64,
    out: &mut [f32],
) -> Result<(), ConvertError> {
    match entry.dtype {
        Dtype::F32 => {
            for (value, bytes) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                *value = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            }
        }
        Dtype::F16 => {
            for (value, bytes) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *value = half::f16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
            }
        }
        Dtype::BF16 => {
            for (value, bytes) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *value = f32::from_bits(u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << 16);
            }
        }
        _ => {
            return Err(wrong(format!("tensor {}", entry.name), "type F32, F16 or BF16", entry.describe()));
        }
    }
    check_finite(&entry.name, first, out)
}

/// Refuses what no product can use.
pub(crate) fn check_finite(name: &str, first: u64, values: &[f32]) -> Result<(), ConvertError> {
    // Without a branch in the loop, so that it runs at the speed of memory.
    let worst = values.iter().fold(0u32, |worst, value| worst.max(value.to_bits() & 0x7fff_ffff));
    if worst < f32::INFINITY.to_bits() {
        return Ok(());
    }
    let at = values.iter().position(|value| !value.is_finite()).unwrap_or(0);
    let found = format!("{} at index {}", values[at], first + at as u64);
    Err(wrong(format!("tensor {name}"), "finite numbers", found))
}

/// A JSON file of at most `limit` bytes, `None` if there is none.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path, limit: u64) -> Result<Option<T>, ConvertError> {
    let Some(bytes) = read_limited(path, limit)? else { return Ok(None) };
    let place = path.display().to_string();
    serde_json::from_slice(&bytes)
        .map(Some)
        .map_err(|error| wrong(place, "JSON of its kind", error.to_string()))
}

/// A file of at most `limit` bytes, `None` if there is none.
pub(crate) fn read_limited(path: &Path, limit: u64) -> Result<Option<Vec<u8>>, ConvertError> {
    let file = match std::fs::File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(io(path, source)),
    };
    let mut bytes = Vec::new();
    file.take(limit + 1).read_to_end(&mut bytes).map_err(|source| io(path, source))?;
    if bytes.len() as u64 > limit {
        let place = path.display().to_string();
        return Err(wrong(place, format!("at most {limit} bytes"), "more"));
    }
    Ok(Some(bytes))
}
