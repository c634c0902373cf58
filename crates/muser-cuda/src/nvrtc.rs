//! The run-time compiler: finding it, compiling a kernel file to machine code, keeping the result on disk.
//!
//! A cubin is cached under the hash of everything it depends on: source, headers, options, compiler version and
//! architecture. A cache file carries its own hash, so a torn write is compiled again, never loaded. If the compiler does
//! not know the card yet, PTX of the newest architecture it knows is made instead and the driver finishes the job.
#![allow(unsafe_code, reason = "foreign functions of libnvrtc, called through cudarc's bindings")]

use std::borrow::Cow;
use std::ffi::{CString, c_char};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cudarc::nvrtc::sys;

use crate::CudaError;
use crate::kernels::{HEADERS, KernelFile};

/// Environment variable with a folder that holds `libnvrtc` (searched first).
pub const NVRTC_DIR_VAR: &str = "MUSER_NVRTC_DIR";
/// Environment variable with the folder of compiled kernels; an empty value turns the cache off.
pub const CACHE_DIR_VAR: &str = "MUSER_CUDA_CACHE_DIR";

/// Environment variable with a folder whose files replace the built-in kernel sources of the same name: variants can be
/// compared without building the program again. For development.
pub const KERNEL_DIR_VAR: &str = "MUSER_CUDA_KERNELS";

/// What the assembler reports about one kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Kernel name.
    pub kernel: String,
    /// Registers per thread.
    pub registers: u32,
    /// Bytes of registers written to and read from local memory because there were too few.
    pub spill_bytes: u32,
}

/// Machine code of one kernel file.
pub struct Compiled {
    /// Cubin, or PTX with its final zero.
    pub image: Vec<u8>,
    /// Per kernel; empty when the image came from the cache.
    pub usage: Vec<Usage>,
}

/// Loads the compiler; `Err` says where it was looked for.
pub fn find() -> Result<(), CudaError> {
    static FOUND: OnceLock<Result<(), String>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        let folders = folders();
        for folder in &folders {
            preload(folder);
        }
        // SAFETY: only tries to open libraries by name.
        if unsafe { sys::is_culib_present() } {
            return Ok(());
        }
        Err(format!(
            "install the CUDA toolkit or the Python package nvidia-cuda-nvrtc, or set {NVRTC_DIR_VAR}; looked on the \
             loader's path and in {}",
            folders.iter().map(|f| f.display().to_string()).collect::<Vec<_>>().join(", ")
        ))
    });
    found
        .clone()
        .map_err(|hint| CudaError::LibraryMissing { library: "libnvrtc (CUDA run-time compiler)", hint })
}

/// Compiler version, such as 13.0. Call [`find`] first.
pub fn version() -> Result<(i32, i32), CudaError> {
    find()?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: `find` made sure that the library is there; both pointers are valid for the call.
    check("nvrtcVersion", unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) })?;
    Ok((major, minor))
}

/// Compiles one kernel file for `arch` (90 is compute capability 9.0), or takes it from the cache.
pub fn compile_cached(file: &KernelFile, arch: u32) -> Result<Compiled, CudaError> {
    let Some(folder) = cache_folder() else { return compile(file, arch) };
    let (major, minor) = version()?;
    let mut hasher = blake3::Hasher::new();
    let source = text_of(&format!("{}.cu", file.name), file.source);
    for part in [&*source, &format!("nvrtc {major}.{minor} sm_{arch}"), &file.options(arch).join(" ")] {
        hasher.update(&(part.len() as u64).to_le_bytes()).update(part.as_bytes());
    }
    for (name, text) in HEADERS {
        let text = text_of(name, text);
        hasher.update(name.as_bytes()).update(&(text.len() as u64).to_le_bytes()).update(text.as_bytes());
    }
    let path = folder.join(format!("{}-sm{arch}-{}.bin", file.name, &hasher.finalize().to_hex()[..32]));
    if let Ok(bytes) = std::fs::read(&path)
        && let Some((hash, image)) = bytes.split_at_checked(32)
        && blake3::hash(image).as_bytes() == hash
    {
        return Ok(Compiled { image: image.to_vec(), usage: Vec::new() });
    }
    let compiled = compile(file, arch)?;
    if let Err(error) = store(&path, &compiled.image) {
        tracing::warn!(path = %path.display(), %error, "compiled kernels cannot be cached");
    }
    Ok(compiled)
}

/// Compiles one kernel file for `arch`.
pub fn compile(file: &KernelFile, arch: u32) -> Result<Compiled, CudaError> {
    find()?;
    let (mut target, machine_code) = target(arch)?;
    if file.only_for.is_some() {
        target.push('a');
    }
    let mut options = file.options(arch);
    options.push(format!("--gpu-architecture={target}"));
    let c = |s: &str| CString::new(s).expect("kernel sources and options hold no zero byte");
    let source = text_of(&format!("{}.cu", file.name), file.source);
    let (source, name) = (c(&source), c(file.name));
    let options: Vec<CString> = options.iter().map(|o| c(o)).collect();
    let headers: Vec<(CString, CString)> = HEADERS.iter().map(|(n, t)| (c(n), c(&text_of(n, t)))).collect();
    let pointers =
        |list: &mut dyn Iterator<Item = &CString>| list.map(|s| s.as_ptr()).collect::<Vec<*const c_char>>();
    let header_text = pointers(&mut headers.iter().map(|h| &h.1));
    let header_names = pointers(&mut headers.iter().map(|h| &h.0));
    let option_text = pointers(&mut options.iter());

    let mut program = Program(std::ptr::null_mut());
    // SAFETY: all strings live to the end of this function, the counts are those of the arrays.
    check("nvrtcCreateProgram", unsafe {
        sys::nvrtcCreateProgram(
            &raw mut program.0,
            source.as_ptr(),
            name.as_ptr(),
            headers.len() as i32,
            header_text.as_ptr(),
            header_names.as_ptr(),
        )
    })?;
    // SAFETY: the program was made above, the options live.
    let result =
        unsafe { sys::nvrtcCompileProgram(program.0, option_text.len() as i32, option_text.as_ptr()) };
    let log = read(sys::nvrtcGetProgramLogSize, sys::nvrtcGetProgramLog, &program)?;
    let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned();
    if result != sys::nvrtcResult::NVRTC_SUCCESS {
        return Err(CudaError::Compile { file: file.name.to_owned(), arch: target, log });
    }
    let image = if machine_code {
        read(sys::nvrtcGetCUBINSize, sys::nvrtcGetCUBIN, &program)?
    } else {
        read(sys::nvrtcGetPTXSize, sys::nvrtcGetPTX, &program)?
    };
    Ok(Compiled { image, usage: parse_usage(&log) })
}

/// Registers and spills per kernel, out of the assembler's verbose log.
fn parse_usage(log: &str) -> Vec<Usage> {
    let number_before = |line: &str, what: &str| -> u32 {
        let head = line.split(what).next().unwrap_or("").trim_end();
        head.rsplit(|c: char| !c.is_ascii_digit()).next().and_then(|n| n.parse().ok()).unwrap_or(0)
    };
    let mut usage: Vec<Usage> = Vec::new();
    for line in log.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            let kernel = rest.split('\'').next().unwrap_or("").to_owned();
            usage.push(Usage { kernel, registers: 0, spill_bytes: 0 });
        } else if let Some(last) = usage.last_mut() {
            if line.contains("bytes spill stores") {
                last.spill_bytes +=
                    number_before(line, " bytes spill stores") + number_before(line, " bytes spill loads");
            } else if line.contains(" registers") && line.contains("Used ") {
                last.registers = number_before(line, " registers");
            }
        }
    }
    usage
}

struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: made by nvrtcCreateProgram and destroyed once.
            unsafe { sys::nvrtcDestroyProgram(&raw mut self.0) };
        }
    }
}

fn check(call: &'static str, result: sys::nvrtcResult) -> Result<(), CudaError> {
    if result == sys::nvrtcResult::NVRTC_SUCCESS {
        return Ok(());
    }
    Err(CudaError::Call { call, what: format!("{result:?}") })
}

type SizeOf = unsafe fn(sys::nvrtcProgram, *mut usize) -> sys::nvrtcResult;
type ReadInto = unsafe fn(sys::nvrtcProgram, *mut c_char) -> sys::nvrtcResult;

fn read(size_of: SizeOf, read_into: ReadInto, program: &Program) -> Result<Vec<u8>, CudaError> {
    let mut size = 0;
    // SAFETY: the program is alive, `size` is valid for the call.
    check("nvrtc size query", unsafe { size_of(program.0, &raw mut size) })?;
    let mut bytes = vec![0u8; size];
    // SAFETY: the buffer has the size that the library asked for.
    check("nvrtc read", unsafe { read_into(program.0, bytes.as_mut_ptr().cast()) })?;
    Ok(bytes)
}

/// A kernel source: the built-in one unless [`KERNEL_DIR_VAR`] has another.
fn text_of(name: &str, built_in: &'static str) -> Cow<'static, str> {
    std::env::var_os(KERNEL_DIR_VAR)
        .and_then(|folder| std::fs::read_to_string(PathBuf::from(folder).join(name)).ok())
        .filter(|text| !text.contains('\0'))
        .map_or(Cow::Borrowed(built_in), Cow::Owned)
}

/// Target name and whether machine code can be had for it.
fn target(arch: u32) -> Result<(String, bool), CudaError> {
    let mut count = 0;
    // SAFETY: `count` is valid for the call.
    check("nvrtcGetNumSupportedArchs", unsafe { sys::nvrtcGetNumSupportedArchs(&raw mut count) })?;
    let mut archs = vec![0i32; count as usize];
    // SAFETY: the buffer has as many entries as the library said.
    check("nvrtcGetSupportedArchs", unsafe { sys::nvrtcGetSupportedArchs(archs.as_mut_ptr()) })?;
    if archs.contains(&(arch as i32)) {
        return Ok((format!("sm_{arch}"), true));
    }
    match archs.iter().filter(|a| **a < arch as i32).max() {
        Some(newest) => Ok((format!("compute_{newest}"), false)),
        None => Err(CudaError::LibraryMissing {
            library: "compiler for this card",
            hint: format!("this NVRTC knows architectures {archs:?}, the card is {arch}"),
        }),
    }
}

fn store(path: &Path, image: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    let mut bytes = blake3::hash(image).as_bytes().to_vec();
    bytes.extend_from_slice(image);
    let partial = path.with_extension(format!("part{}", std::process::id()));
    std::fs::write(&partial, bytes)?;
    std::fs::rename(&partial, path)
}

fn cache_folder() -> Option<PathBuf> {
    if let Some(folder) = std::env::var_os(CACHE_DIR_VAR) {
        return (!folder.is_empty()).then(|| PathBuf::from(folder));
    }
    let base = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")))?;
    Some(base.join("muser").join("cuda"))
}

/// Folders outside the loader's path where the library is commonly found, best first.
fn folders() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = std::env::var_os(NVRTC_DIR_VAR).map(PathBuf::from).into_iter().collect();
    let mut environments: Vec<PathBuf> =
        std::env::var_os("VIRTUAL_ENV").map(PathBuf::from).into_iter().collect();
    // An environment beside the project, seen from any folder inside it.
    let here = std::env::current_dir().unwrap_or_default();
    environments.extend(here.ancestors().map(|folder| folder.join(".venv")));
    for environment in environments {
        for python in children(&environment.join("lib"), "python3") {
            for package in ["cu13/lib", "cuda_nvrtc/lib"] {
                folders.push(python.join("site-packages/nvidia").join(package));
            }
        }
    }
    for name in ["CUDA_HOME", "CUDA_PATH"] {
        folders.extend(std::env::var_os(name).map(|f| PathBuf::from(f).join("lib64")));
    }
    folders.push(PathBuf::from("/usr/local/cuda/lib64"));
    folders.extend(children(Path::new("/usr/local"), "cuda-").into_iter().map(|f| f.join("lib64")));
    folders.retain(|f| f.is_dir());
    folders
}

fn children(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut found: Vec<PathBuf> = entries
        .flatten()
        .filter(|e| e.file_name().to_string_lossy().starts_with(prefix))
        .map(|e| e.path())
        .collect();
    found.sort();
    found.reverse();
    found
}

/// Opens the compiler's libraries in `folder`, so that opening them by their plain name finds them.
///
/// The built-in definitions come first: the compiler opens them by name when it is first used.
fn preload(folder: &Path) {
    for prefix in ["libnvrtc-builtins.so.", "libnvrtc.so."] {
        for library in children(folder, prefix) {
            // SAFETY: running the initialisers of NVIDIA's own libraries is what loading them by name would do too.
            if let Ok(library) = unsafe { libloading::Library::new(&library) } {
                std::mem::forget(library);
                break;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Usage, parse_usage};

    #[test]
    fn the_assemblers_log_is_read() {
        let log = "ptxas info    : Compiling entry function 'few_q4k_1' for 'sm_90'\n\
                   ptxas info    : Function properties for few_q4k_1\n    8 bytes stack frame, 28 bytes spill stores, \
                   12 bytes spill loads\nptxas info    : Used 128 registers, used 1 barriers";
        let expected = [Usage { kernel: "few_q4k_1".to_owned(), registers: 128, spill_bytes: 40 }];
        assert_eq!(parse_usage(log), expected);
    }
}
