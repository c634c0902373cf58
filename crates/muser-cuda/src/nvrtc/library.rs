//! The compiler's library: which file it is, whether it may be trusted, and the functions that are called in it.
//!
//! Loading a library runs its code, so a file counts only where nobody but this user and root can have put it: folders come
//! from variables that the user set, from beside the program, and from the system; never from the working folder or from
//! one above it. One file is opened, by its absolute path.
#![allow(unsafe_code, reason = "loads libnvrtc and calls its functions")]

use std::ffi::{c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use super::trust;
use crate::CudaError;

/// Environment variable with the folder that holds `libnvrtc`; with it no other is looked at.
pub const NVRTC_DIR_VAR: &str = "MUSER_NVRTC_DIR";
/// Root of a CUDA toolkit, or of a Python environment: by the names that their own tools give them.
const ROOT_VARS: [&str; 3] = ["CUDA_HOME", "CUDA_PATH", "VIRTUAL_ENV"];

/// A program in the making.
pub(super) type ProgramHandle = *mut c_void;
/// 0 is success.
pub(super) type Status = c_int;
pub(super) type SizeOf = unsafe extern "C" fn(ProgramHandle, *mut usize) -> Status;
pub(super) type ReadInto = unsafe extern "C" fn(ProgramHandle, *mut c_char) -> Status;
type Strings = *const *const c_char;

/// The functions, valid as long as the process: the library is never unloaded.
pub(super) struct Api {
    pub(super) path: PathBuf,
    pub(super) version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status,
    pub(super) error_string: unsafe extern "C" fn(Status) -> *const c_char,
    pub(super) create: unsafe extern "C" fn(
        *mut ProgramHandle,
        *const c_char,
        *const c_char,
        c_int,
        Strings,
        Strings,
    ) -> Status,
    pub(super) destroy: unsafe extern "C" fn(*mut ProgramHandle) -> Status,
    pub(super) compile: unsafe extern "C" fn(ProgramHandle, c_int, Strings) -> Status,
    pub(super) log_size: SizeOf,
    pub(super) log: ReadInto,
    pub(super) cubin_size: SizeOf,
    pub(super) cubin: ReadInto,
    pub(super) ptx_size: SizeOf,
    pub(super) ptx: ReadInto,
    pub(super) arch_count: unsafe extern "C" fn(*mut c_int) -> Status,
    pub(super) archs: unsafe extern "C" fn(*mut c_int) -> Status,
}

/// The library, loaded once; `Err` says where it was looked for and what was refused.
pub(super) fn api() -> Result<&'static Api, CudaError> {
    static FOUND: OnceLock<Result<Api, String>> = OnceLock::new();
    let missing = |hint: &String| CudaError::LibraryMissing {
        library: "libnvrtc (CUDA run-time compiler)",
        hint: hint.clone(),
    };
    FOUND
        .get_or_init(|| choose(&Surroundings::of_this_process()).and_then(|found| load(&found)))
        .as_ref()
        .map_err(missing)
}

/// What decides where is looked.
#[derive(Clone, Debug, Default)]
struct Surroundings {
    /// [`NVRTC_DIR_VAR`].
    explicit: Option<PathBuf>,
    /// Roots from other variables.
    roots: Vec<PathBuf>,
    /// Folder of the program.
    own: Option<PathBuf>,
    /// `LD_LIBRARY_PATH`.
    loader: Vec<PathBuf>,
    /// The system's.
    system: Vec<PathBuf>,
}

impl Surroundings {
    fn of_this_process() -> Self {
        let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        let loader = set("LD_LIBRARY_PATH");
        Self {
            explicit: set(NVRTC_DIR_VAR).map(PathBuf::from),
            roots: ROOT_VARS.iter().filter_map(|name| set(name)).map(PathBuf::from).collect(),
            own: std::env::current_exe()
                .ok()
                .and_then(|exe| Some(exe.canonicalize().ok()?.parent()?.to_owned())),
            loader: loader.map_or_else(Vec::new, |paths| std::env::split_paths(&paths).collect()),
            system: system_folders(),
        }
    }

    /// All folders, best first. Relative ones are left out: they would mean another folder wherever the program is started.
    fn folders(&self) -> Vec<PathBuf> {
        if let Some(explicit) = &self.explicit {
            return vec![explicit.clone()];
        }
        let mut folders: Vec<PathBuf> = self.roots.iter().flat_map(|root| below_root(root)).collect();
        folders.extend(self.own.clone());
        folders.extend(self.loader.iter().cloned());
        folders.extend(self.system.iter().cloned());
        folders.retain(|folder| folder.is_absolute() && folder.is_dir());
        folders
    }
}

/// Where a toolkit and a Python environment keep their libraries.
fn below_root(root: &Path) -> Vec<PathBuf> {
    let mut folders = vec![root.join("lib64"), root.join("targets/x86_64-linux/lib"), root.join("bin")];
    for python in children(&root.join("lib"), "python3") {
        for package in ["cu13/lib", "cuda_nvrtc/lib"] {
            folders.push(python.join("site-packages/nvidia").join(package));
        }
    }
    folders
}

/// The toolkit's usual places and what the loader's own configuration names.
fn system_folders() -> Vec<PathBuf> {
    let mut folders = vec![PathBuf::from("/usr/local/cuda/lib64")];
    folders.extend(children(Path::new("/usr/local"), "cuda-").into_iter().map(|folder| folder.join("lib64")));
    for file in children(Path::new("/etc/ld.so.conf.d"), "") {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        folders.extend(text.lines().map(str::trim).filter(|line| line.starts_with('/')).map(PathBuf::from));
    }
    for folder in ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"] {
        folders.push(PathBuf::from(folder));
    }
    folders
}

/// The compiler, and its built-in definitions, which it opens by name when it is first used.
#[derive(Debug, PartialEq, Eq)]
struct Found {
    compiler: PathBuf,
    builtins: Option<PathBuf>,
}

/// The first library that may be trusted. What was passed over, and why, is part of the message.
fn choose(surroundings: &Surroundings) -> Result<Found, String> {
    let folders = surroundings.folders();
    let mut refused = Vec::new();
    for folder in &folders {
        let Some(compiler) = library_in(folder, false) else { continue };
        let checked = trust::check_file(&compiler).and_then(|compiler| {
            let builtins = library_in(folder, true).map(|file| trust::check_file(&file)).transpose()?;
            Ok(Found { compiler, builtins })
        });
        match checked {
            Ok(found) => return Ok(found),
            Err(why) => refused.push(why),
        }
    }
    let looked: Vec<String> = folders.iter().map(|folder| folder.display().to_string()).collect();
    let mut hint = match &surroundings.explicit {
        Some(folder) if !folder.is_absolute() => {
            format!("{NVRTC_DIR_VAR} is {}, an absolute path is expected", folder.display())
        }
        Some(folder) => {
            format!("{NVRTC_DIR_VAR} is {}, which holds no libnvrtc that can be used", folder.display())
        }
        None => format!(
            "install the CUDA toolkit, or the Python package nvidia-cuda-nvrtc and set {NVRTC_DIR_VAR} to its folder; \
             looked in {}",
            looked.join(", ")
        ),
    };
    if !refused.is_empty() {
        hint = format!("{hint}; refused: {}", refused.join("; "));
    }
    Err(hint)
}

/// The newest compiler (or its definitions) in a folder.
fn library_in(folder: &Path, builtins: bool) -> Option<PathBuf> {
    if !folder.is_absolute() {
        return None;
    }
    let prefix = match (cfg!(windows), builtins) {
        (false, false) => "libnvrtc.so.",
        (false, true) => "libnvrtc-builtins.so.",
        (true, false) => "nvrtc64_",
        (true, true) => "nvrtc-builtins64_",
    };
    children(folder, prefix).into_iter().find(|file| file.is_file())
}

/// Entries of a folder whose name begins with `prefix`, last name first.
fn children(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut found: Vec<PathBuf> = entries
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix))
        .map(|entry| entry.path())
        .collect();
    found.sort();
    found.reverse();
    found
}

fn load(found: &Found) -> Result<Api, String> {
    let open = |path: &Path| {
        // SAFETY: running the initialisers of NVIDIA's own library, from a file that nobody but this user and root can write.
        let library = unsafe { libloading::Library::new(path) };
        library.map_err(|error| format!("{} cannot be loaded: {error}", path.display()))
    };
    if let Some(builtins) = &found.builtins {
        // Without it the compiler looks for the file by itself, and says so if that fails.
        open(builtins).map(std::mem::forget).ok();
    }
    let library = open(&found.compiler)?;
    macro_rules! function {
        ($name:literal) => {
            // SAFETY: the types are those of NVIDIA's nvrtc.h, unchanged since CUDA 11.
            *unsafe { library.get(concat!($name, "\0").as_bytes()) }
                .map_err(|error| format!("{} has no {}: {error}", found.compiler.display(), $name))?
        };
    }
    let api = Api {
        path: found.compiler.clone(),
        version: function!("nvrtcVersion"),
        error_string: function!("nvrtcGetErrorString"),
        create: function!("nvrtcCreateProgram"),
        destroy: function!("nvrtcDestroyProgram"),
        compile: function!("nvrtcCompileProgram"),
        log_size: function!("nvrtcGetProgramLogSize"),
        log: function!("nvrtcGetProgramLog"),
        cubin_size: function!("nvrtcGetCUBINSize"),
        cubin: function!("nvrtcGetCUBIN"),
        ptx_size: function!("nvrtcGetPTXSize"),
        ptx: function!("nvrtcGetPTX"),
        arch_count: function!("nvrtcGetNumSupportedArchs"),
        archs: function!("nvrtcGetSupportedArchs"),
    };
    // The functions are used to the end of the process.
    std::mem::forget(library);
    Ok(api)
}

#[cfg(all(test, unix))]
mod tests;
