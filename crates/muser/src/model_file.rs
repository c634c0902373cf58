//! Which model file a command works on, and how it is opened.
//!
//! `--model` is a path, the name of a pulled file, or `muse-tiny`. Without it the pulled model is taken, and where nothing
//! was pulled Muse Tiny, which is part of the executable (feature `bundled-model`): one file answers on any machine. The
//! executable is itself mapped by the system, so the 20 MB cost a copy of a few milliseconds and no file beside it.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;
use muser_gguf::{GgufError, GgufFile};
use muser_hub::ModelStore;
use muser_model::{Model, ModelError};

use crate::env_vars;
use crate::output::{Console, HintExt as _};

/// The name under which the bundled model is always to be had.
pub const BUNDLED_NAME: &str = "muse-tiny";

/// Where a model comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelSource {
    /// A file (of a split set: any of its parts).
    File(PathBuf),
    /// Muse Tiny.
    Bundled,
}

impl ModelSource {
    /// Finds the model that `named` means, or the default one; says on the console when that is the bundled one.
    pub fn choose(named: Option<&str>, console: &Console) -> anyhow::Result<Self> {
        if let Some(named) = named {
            return Self::named(named);
        }
        if let Some(path) = pulled_default()? {
            return Ok(Self::File(path));
        }
        console.note(
            "using the bundled Muse Tiny, a toy of 31.5 M parameters; `muser pull` brings the 30B model",
        );
        Ok(Self::Bundled)
    }

    /// What `named` means if it is here: a file, a pulled model, or Muse Tiny.
    pub fn find(named: &str) -> anyhow::Result<Option<Self>> {
        let path = Path::new(named);
        let looks_like_a_file = path.exists() || path.extension().is_some() && !named.contains("://");
        if named.is_empty() || looks_like_a_file || named.eq_ignore_ascii_case(BUNDLED_NAME) {
            let is_of_a_hub = !path.exists() && named.matches('/').count() > 1;
            return if is_of_a_hub { Ok(None) } else { Self::named(named).map(Some) };
        }
        Ok(store()?.find(named).ok().map(Self::File))
    }

    /// The pulled model that is taken where none is named, if there is one.
    pub fn pulled_default() -> anyhow::Result<Option<Self>> {
        Ok(pulled_default()?.map(Self::File))
    }

    /// Opens the file over a memory map.
    pub fn open(&self) -> anyhow::Result<Arc<GgufFile>> {
        let file = match self {
            Self::File(path) => GgufFile::open(path).map_err(anyhow::Error::new),
            Self::Bundled => bundled(),
        };
        file.map(Arc::new)
            .hint("a model file is one GGUF file or a whole split set; `muser pull` brings a good one")
    }

    /// Opens the file and binds its weights.
    pub fn load(&self) -> anyhow::Result<Model> {
        Model::from_gguf(self.open()?)
            .with_context(|| self.label())
            .hint("`muser inspect FILE` says what is in a model file and what is odd about it")
    }

    /// What messages call it.
    pub fn label(&self) -> String {
        match self {
            Self::File(path) => path.display().to_string(),
            Self::Bundled => format!("{BUNDLED_NAME} (bundled)"),
        }
    }

    fn named(named: &str) -> anyhow::Result<Self> {
        if named.is_empty() {
            return Err(crate::output::usage_error("--model is empty"));
        }
        let path = Path::new(named);
        if path.exists() {
            return Ok(Self::File(path.to_owned()));
        }
        if named.eq_ignore_ascii_case(BUNDLED_NAME) {
            return Ok(Self::Bundled);
        }
        if named.contains(['/', '\\']) {
            return Err(anyhow::anyhow!("{named}: no such file"))
                .hint("give the path of a GGUF file or the name of a pulled one");
        }
        pulled(named)
    }
}

fn store() -> anyhow::Result<ModelStore> {
    Ok(ModelStore::open(env_vars::muser_home().as_deref())?)
}

fn pulled(name: &str) -> anyhow::Result<ModelSource> {
    let path = store()?
        .find(name)
        .hint("give the path of a GGUF file or the name of a pulled model; `muser pull` brings more")?;
    Ok(ModelSource::File(path))
}

/// Nothing pulled and no home at all come to the same.
fn pulled_default() -> anyhow::Result<Option<PathBuf>> {
    match env_vars::muser_home() {
        Some(_) => Ok(store()?.default_model()?),
        None => Ok(None),
    }
}

/// Opens a file that belongs to the bundled model.
pub type OpenFile = Box<dyn FnOnce() -> Result<GgufFile, ModelError>>;

/// The draft of the bundled model, where this build has one.
#[cfg(feature = "bundled-companions")]
#[expect(clippy::unnecessary_wraps, reason = "a build without bundled companions may have none")]
pub fn bundled_draft() -> Option<OpenFile> {
    const BYTES: &[u8] =
        include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/muse-tiny-dflash-Q8_0.gguf.zst"));
    Some(Box::new(|| unpacked("the bundled draft", BYTES)))
}

/// The draft of the bundled model, if it lies where files of this program do.
#[cfg(not(feature = "bundled-companions"))]
pub fn bundled_draft() -> Option<OpenFile> {
    companion("muse-tiny-dflash-Q8_0.gguf")
}

/// The projector of the bundled model, where this build has one.
#[cfg(feature = "bundled-companions")]
#[expect(clippy::unnecessary_wraps, reason = "a build without bundled companions may have none")]
pub fn bundled_projector() -> Option<OpenFile> {
    const BYTES: &[u8] =
        include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/mmproj-muse-tiny-Q8_0.gguf.zst"));
    Some(Box::new(|| unpacked("the bundled projector", BYTES)))
}

/// The projector of the bundled model, if it lies where files of this program do.
#[cfg(not(feature = "bundled-companions"))]
pub fn bundled_projector() -> Option<OpenFile> {
    companion("mmproj-muse-tiny-Q8_0.gguf")
}

/// Opens a draft or a projector, compressed (`.zst`, as those of Muse Tiny lie in the tree) or not.
pub fn open_companion(path: &Path) -> Result<GgufFile, ModelError> {
    if !path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("zst")) {
        return Ok(GgufFile::open(path)?);
    }
    let name = path.display().to_string();
    let bytes = std::fs::read(path).map_err(|source| GgufError::Io { path: name.clone(), source })?;
    unpacked(&name, &bytes)
}

/// Longest file that is unpacked into memory.
const MOST_UNPACKED: u64 = 8 << 30;

/// A compressed GGUF file in memory.
fn unpacked(name: &str, bytes: &[u8]) -> Result<GgufFile, ModelError> {
    let fault = |source: std::io::Error| GgufError::Io { path: name.into(), source };
    let invalid = |what: String| fault(std::io::Error::new(std::io::ErrorKind::InvalidData, what));
    let mut file = Vec::with_capacity(bytes.len() + bytes.len() / 4);
    let decoder =
        ruzstd::decoding::StreamingDecoder::new(bytes).map_err(|error| invalid(error.to_string()))?;
    let len = std::io::copy(&mut decoder.take(MOST_UNPACKED + 1), &mut file).map_err(fault)?;
    if len > MOST_UNPACKED {
        return Err(invalid(format!("more than {MOST_UNPACKED} bytes when unpacked")).into());
    }
    Ok(GgufFile::from_bytes(file)?)
}

/// A file that lies where files of this program do, as it is or compressed.
#[cfg(not(feature = "bundled-companions"))]
fn companion(name: &str) -> Option<OpenFile> {
    let path = find_beside(name).or_else(|| find_beside(&format!("{name}.zst")))?;
    Some(Box::new(move || open_companion(&path)))
}

/// Files beside a model that are looked into.
const MOST_CANDIDATES: usize = 32;

/// GGUF files beside a model, compressed ones too, that have `word` in their names; those whose name has most in common with the model's come first.
pub fn beside(model: &Path, word: &str) -> Vec<PathBuf> {
    let folder = match model.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    let ours = name(model);
    // `mmproj-NAME.gguf` belongs to `NAME.gguf` as `NAME-mmproj.gguf` does.
    let bare = |path: &Path| name(path).replacen(&format!("{word}-"), "", 1);
    let alike = |path: &Path| ours.bytes().zip(bare(path).bytes()).take_while(|(a, b)| a == b).count();
    let is_wanted = |path: &PathBuf| {
        let name = name(path);
        let inner = Path::new(name.strip_suffix(".zst").unwrap_or(&name));
        inner.extension().is_some_and(|extension| extension == "gguf") && name.contains(word) && name != ours
    };
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut found: Vec<PathBuf> =
        entries.flatten().map(|entry| entry.path()).filter(is_wanted).take(MOST_CANDIDATES).collect();
    found.sort_by(|a, b| alike(b).cmp(&alike(a)).then_with(|| a.cmp(b)));
    found
}

#[cfg(feature = "bundled-model")]
fn bundled() -> anyhow::Result<GgufFile> {
    const BYTES: &[u8] =
        include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/muse-tiny-Q4_K_M.gguf"));
    GgufFile::from_bytes(BYTES).context("the bundled model")
}

#[cfg(not(feature = "bundled-model"))]
fn bundled() -> anyhow::Result<GgufFile> {
    const NAME: &str = "muse-tiny-Q4_K_M.gguf";
    let Some(path) = find_beside(NAME) else {
        return Err(anyhow::anyhow!(
            "{NAME} is not beside this build of muser, which does not hold it itself"
        ))
        .hint("name a model with --model");
    };
    GgufFile::open(&path).with_context(|| path.display().to_string())
}

/// A file of this program: beside it (a build that was not installed), in `share` of its prefix (an installed one), or in the tree,
/// whose place is known to nobody but builds for tests: what is shipped names no folder of the machine that built it.
#[cfg(not(all(feature = "bundled-model", feature = "bundled-companions")))]
fn find_beside(name: &str) -> Option<PathBuf> {
    let executable = std::env::current_exe().unwrap_or_default();
    let beside = executable.parent().unwrap_or(Path::new("."));
    #[cfg(debug_assertions)]
    let tree = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models");
    #[cfg(not(debug_assertions))]
    let tree = beside.join("../../models");
    let places = [beside.join("models"), beside.join("../share/muser"), tree];
    places.iter().map(|place| place.join(name)).find(|path| path.is_file())
}
