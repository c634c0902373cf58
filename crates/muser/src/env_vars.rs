//! The environment variables of users: those that this crate reads by a name of its own, and the table that the generated
//! reference prints, with what other crates read. (`cargo xtask tidy` compares documents and code.)

/// Folder of models, chat history and receipts. Default: `~/.muser`.
pub const MUSER_HOME: &str = "MUSER_HOME";
/// Default for `--config`.
pub const MUSER_CONFIG: &str = "MUSER_CONFIG";
/// Default for `--model`.
pub const MUSER_MODEL: &str = "MUSER_MODEL";
/// Default for `--url` of `muser top`.
pub const MUSER_URL: &str = "MUSER_URL";
/// The key that `muser top` shows to the server.
pub const MUSER_API_KEY: &str = "MUSER_API_KEY";
/// Log filter, such as `debug` or `muser_engine=trace`; stronger than `--verbose`.
pub const MUSER_LOG: &str = "MUSER_LOG";
/// Set to anything: no progress bars.
pub const MUSER_NO_PROGRESS: &str = "MUSER_NO_PROGRESS";
/// Set to anything: no colour (the convention of no-color.org).
pub const NO_COLOR: &str = "NO_COLOR";
/// Default for `--hub`.
pub const MUSER_HUB_URL: &str = "MUSER_HUB_URL";
/// The hub, under the name that its own tools use; weaker than `MUSER_HUB_URL`.
pub const HF_ENDPOINT: &str = "HF_ENDPOINT";
/// Token for the hub; sent to the hub's host only, never logged.
pub const MUSER_HUB_TOKEN: &str = "MUSER_HUB_TOKEN";
/// The token, under the name that the public hub's own tools use; weaker than `MUSER_HUB_TOKEN`.
pub const HF_TOKEN: &str = "HF_TOKEN";
/// PEM file with certificate authorities to trust besides the built-in ones.
pub const SSL_CERT_FILE: &str = "SSL_CERT_FILE";

/// Folder that holds `libnvrtc`, CUDA's run-time compiler.
#[cfg(test)]
const MUSER_NVRTC_DIR: &str = "MUSER_NVRTC_DIR";
/// Folder of compiled kernels.
#[cfg(test)]
const MUSER_CUDA_CACHE_DIR: &str = "MUSER_CUDA_CACHE_DIR";
/// Folder of compiled pipelines.
#[cfg(test)]
const MUSER_WGPU_CACHE_DIR: &str = "MUSER_WGPU_CACHE_DIR";

/// Name and meaning of each variable, for the reference.
#[cfg(test)]
pub const TABLE: &[(&str, &str)] = &[
    (MUSER_HOME, "Folder of models, chat history and receipts (default `~/.muser`)"),
    (MUSER_CONFIG, "Default for `--config`; `off` reads no file"),
    (MUSER_MODEL, "Default for `--model`"),
    (MUSER_LOG, "Log filter, such as `debug` or `muser_engine=trace`; stronger than `--verbose`"),
    (MUSER_URL, "Default for `--url` of `muser top`"),
    (MUSER_API_KEY, "The key that `muser top` shows to the server; weaker than `--key-file`"),
    (MUSER_NO_PROGRESS, "Set to anything: no progress bars"),
    (MUSER_HUB_URL, "Default for `--hub` of `muser pull`"),
    (HF_ENDPOINT, "The same; weaker than `MUSER_HUB_URL`"),
    (MUSER_HUB_TOKEN, "Token for the hub; sent to the hub's host only, never logged"),
    (HF_TOKEN, "The same; weaker than `MUSER_HUB_TOKEN`"),
    (SSL_CERT_FILE, "PEM file with certificate authorities to trust besides the built-in ones"),
    (
        "HTTPS_PROXY",
        "Proxy of `muser pull` for https (`http://[USER:PASSWORD@]HOST:PORT`); also `https_proxy`, and `all_proxy` or \
         `ALL_PROXY` for everything; `http_proxy` for plain http",
    ),
    (
        "NO_PROXY",
        "Hosts, addresses and address ranges that are asked directly, separated by commas, or `*`; also `no_proxy`",
    ),
    (NO_COLOR, "Set to anything: no colour"),
    (
        MUSER_NVRTC_DIR,
        "Folder (absolute) that holds `libnvrtc`, CUDA's run-time compiler; without it `CUDA_HOME`, `CUDA_PATH` and \
         `VIRTUAL_ENV` are looked at, then the program's own folder, `LD_LIBRARY_PATH` and the system's folders. A file \
         or folder that another user could write is refused",
    ),
    (
        MUSER_CUDA_CACHE_DIR,
        "Folder (absolute) of compiled kernels (default `~/.cache/muser/cuda`); set to nothing: kernels are compiled anew",
    ),
    (
        MUSER_WGPU_CACHE_DIR,
        "Folder (absolute) of the driver's compiled pipelines for `--backend wgpu` (default `~/.cache/muser/wgpu`); set to \
         nothing: none are kept",
    ),
    (
        "MUSER_CPU",
        "Instruction set of the CPU backend, such as `scalar` (default: the fastest that `muser doctor` lists)",
    ),
];

/// The folder of models, history and receipts; `None` when neither `MUSER_HOME` nor a home folder is known.
pub fn muser_home() -> Option<std::path::PathBuf> {
    match std::env::var_os(MUSER_HOME) {
        Some(home) if !home.is_empty() => Some(home.into()),
        _ => std::env::home_dir().filter(|home| !home.as_os_str().is_empty()).map(|home| home.join(".muser")),
    }
}

/// Is a switch variable set (to anything but the empty string)?
pub fn is_set(name: &str) -> bool {
    std::env::var_os(name).is_some_and(|value| !value.is_empty())
}
