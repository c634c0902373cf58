//! Packs for the commands that compute: the store in a folder, its keys, and the bridge to the engine.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use muser_backend::ExecutorInfo;
use muser_engine::KvConnector;
use muser_kv_connector::{PackOptions, PackSource, PackUse, WeightsFiles, identity_of, weights_root};
use muser_model::{Draft, Model};
use muser_pack::store::open_place;
use muser_pack::{FingerprintCache, KeyFile, KeyRing, Library, LibraryOptions};

use crate::cli::PackStoreArgs;
use crate::env_vars;
use crate::output::{Console, HintExt as _, usage_error};

/// Weights from this size on take long enough to hash that silence would look like a hang.
const SLOW_HASH_BYTES: u64 = 1 << 30;

/// How long a command waits at its end for what is being published.
pub const FLUSH_LIMIT: Duration = Duration::from_secs(30);

/// Which folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PackFolder {
    /// `packs` in `MUSER_HOME`.
    Default,
    /// Another one.
    At(PathBuf),
}

impl PackFolder {
    /// What a flag says: `default` (also when it was given without a value) or a folder.
    pub fn from_flag(flag: PathBuf) -> Self {
        if flag.as_os_str() == "default" { Self::Default } else { Self::At(flag) }
    }
}

/// The folder's packs and the keys they are sealed with. Makes both if they do not exist.
pub fn open_library(folder: &PackFolder, args: &PackStoreArgs) -> anyhow::Result<(Library, KeyRing)> {
    let home = env_vars::muser_home();
    let key_path = match (&args.pack_key_file, &home) {
        (Some(path), _) => path.clone(),
        (None, Some(home)) => KeyFile::default_path(home),
        (None, None) => {
            return Err(usage_error("no place for the packs' keys: set MUSER_HOME or give --pack-key-file"));
        }
    };
    let dir = match (folder, &home) {
        (PackFolder::At(dir), _) => dir.clone(),
        (PackFolder::Default, Some(home)) => home.join("packs"),
        (PackFolder::Default, None) => {
            return Err(usage_error("no place for packs: set MUSER_HOME or name a folder"));
        }
    };
    let keys = KeyFile::open_or_create(&key_path)
        .hint("packs are sealed with this key file: keep it private and do not lose it")?;
    let store = open_place(&dir, Some(args.pack_mib << 20)).with_context(|| dir.display().to_string())?;
    let options = LibraryOptions {
        encrypt: !args.pack_plain,
        // Beside the keys: what was last seen of every store that is sealed with them.
        anchor: Some(key_path.with_extension("seen")),
        key_file: Some(key_path),
        ..LibraryOptions::default()
    };
    let library =
        Library::open(store, keys.clone(), options).with_context(|| dir.display().to_string()).hint(
            "`muser pack ls` and `muser pack verify` say more; other packs may be kept in another folder",
        )?;
    Ok((library, keys))
}

/// What an engine needs to work with packs.
pub struct Packs {
    /// For [`muser_engine::Engine::spawn_with`].
    pub source: Box<dyn KvConnector>,
    /// For [`muser_engine::EngineConfig::identity`].
    pub identity: Vec<u8>,
    /// The handle.
    pub handle: PackUse,
}

/// Opens the packs for what an executor with these facts computes with this model and this draft.
pub fn open(
    folder: &PackFolder,
    args: &PackStoreArgs,
    model: &Model,
    draft: Option<&Draft>,
    info: &ExecutorInfo,
    console: &Console,
) -> anyhow::Result<Packs> {
    let (library, keys) = open_library(folder, args)?;
    if let Some(reason) = library.suspended() {
        console.warning(format!("no packs are used or kept: {reason}"));
    } else if library.damaged_records() > 0 {
        console.warning(format!(
            "{} records of the packs' catalog are damaged; `muser pack recover` rebuilds it",
            library.damaged_records()
        ));
    }
    let cache = env_vars::muser_home().map(|home| FingerprintCache::new(home.join("fingerprints"), &keys));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let say = |bytes: u64| {
        if bytes > SLOW_HASH_BYTES {
            console.note(format!("hashing {:.1} GB of weights, once", bytes as f64 / 1e9));
        }
    };
    // Looked at before they are hashed: whoever writes later is noticed.
    let mut weights: Vec<_> = WeightsFiles::of(&model.file).map(Arc::new).into_iter().collect();
    weights.extend(draft.and_then(|draft| WeightsFiles::of(&draft.file)).map(Arc::new));
    let root = weights_root(&model.file, cache.as_ref(), threads, say);
    let draft = draft.map(|draft| (draft, weights_root(&draft.file, cache.as_ref(), threads, say)));
    let identity = identity_of(model, root, draft, info)?;
    let scope = library.scope(identity, "");
    let identity = scope.digest().to_vec();
    let options = PackOptions { publish: !args.pack_read_only, weights, ..PackOptions::default() };
    let (source, handle) = PackSource::start(library, scope, options)?;
    Ok(Packs { source: Box::new(source), identity, handle })
}
