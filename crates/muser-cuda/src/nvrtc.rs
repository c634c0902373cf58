//! The run-time compiler: finding it, compiling a kernel file to machine code, keeping the result on disk.
//!
//! A cubin is cached under the hash of everything it depends on: source, headers, options, compiler version and
//! architecture (`cache`). If the compiler does not know the card yet, PTX of the newest architecture it knows is made
//! instead and the driver finishes the job.
#![allow(unsafe_code, reason = "calls functions of libnvrtc")]

mod cache;
mod library;
mod trust;

use std::borrow::Cow;
use std::ffi::{CStr, CString, c_char};
use std::path::Path;

use crate::CudaError;
use crate::kernels::{HEADERS, KernelFile};
use library::{Api, ProgramHandle, ReadInto, SizeOf, Status};

pub use cache::CACHE_DIR_VAR;
pub use library::NVRTC_DIR_VAR;

/// Environment variable with a folder whose files replace the built-in kernel sources of the same name: variants can be
/// compared without building the program again. Only in builds with the feature `kernel-dir`.
#[cfg(feature = "kernel-dir")]
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
    /// Shared memory besides what a launch asks for.
    pub shared_bytes: u32,
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
    library::api().map(drop)
}

/// The file that the compiler was loaded from.
pub fn path() -> Result<&'static Path, CudaError> {
    Ok(&library::api()?.path)
}

/// Compiler version, such as 13.0.
pub fn version() -> Result<(i32, i32), CudaError> {
    let api = library::api()?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both pointers are valid for the call.
    check(api, "nvrtcVersion", unsafe { (api.version)(&raw mut major, &raw mut minor) })?;
    Ok((major, minor))
}

/// Compiles one kernel file for `arch` (90 is compute capability 9.0), or takes it from the cache.
pub fn compile_cached(file: &KernelFile, arch: u32) -> Result<Compiled, CudaError> {
    let Some(folder) = cache::folder() else { return compile(file, arch) };
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
    let name = format!("{}-sm{arch}-{}.bin", file.name, &hasher.finalize().to_hex()[..32]);
    if let Some(image) = cache::load(&folder, &name) {
        return Ok(Compiled { image, usage: Vec::new() });
    }
    let compiled = compile(file, arch)?;
    if let Err(error) = cache::store(&folder, &name, &compiled.image) {
        tracing::warn!(folder = %folder.display(), %error, "compiled kernels cannot be cached");
    }
    Ok(compiled)
}

/// Compiles one kernel file for `arch`.
pub fn compile(file: &KernelFile, arch: u32) -> Result<Compiled, CudaError> {
    let api = library::api()?;
    let (mut target, machine_code) = target(api, arch)?;
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

    let mut program = Program { api, handle: std::ptr::null_mut() };
    // SAFETY: all strings live to the end of this function, the counts are those of the arrays.
    check(api, "nvrtcCreateProgram", unsafe {
        (api.create)(
            &raw mut program.handle,
            source.as_ptr(),
            name.as_ptr(),
            headers.len() as i32,
            header_text.as_ptr(),
            header_names.as_ptr(),
        )
    })?;
    // SAFETY: the program was made above, the options live.
    let result = unsafe { (api.compile)(program.handle, option_text.len() as i32, option_text.as_ptr()) };
    let log = read(api.log_size, api.log, &program)?;
    let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned();
    if result != SUCCESS {
        return Err(CudaError::Compile { file: file.name.to_owned(), arch: target, log });
    }
    let image = if machine_code {
        read(api.cubin_size, api.cubin, &program)?
    } else {
        read(api.ptx_size, api.ptx, &program)?
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
            usage.push(Usage { kernel, registers: 0, spill_bytes: 0, shared_bytes: 0 });
        } else if let Some(last) = usage.last_mut() {
            if line.contains("bytes spill stores") {
                last.spill_bytes +=
                    number_before(line, " bytes spill stores") + number_before(line, " bytes spill loads");
            } else if line.contains(" registers") && line.contains("Used ") {
                last.registers = number_before(line, " registers");
                if line.contains(" bytes smem") {
                    last.shared_bytes = number_before(line, " bytes smem");
                }
            }
        }
    }
    usage
}

struct Program {
    api: &'static Api,
    handle: ProgramHandle,
}

impl Drop for Program {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: made by nvrtcCreateProgram and destroyed once.
            unsafe { (self.api.destroy)(&raw mut self.handle) };
        }
    }
}

const SUCCESS: Status = 0;

fn check(api: &Api, call: &'static str, result: Status) -> Result<(), CudaError> {
    if result == SUCCESS {
        return Ok(());
    }
    // SAFETY: the library returns a text of its own, with a final zero, for every number.
    let text = unsafe {
        let text = (api.error_string)(result);
        if text.is_null() { c"no reason given" } else { CStr::from_ptr(text) }
    };
    Err(CudaError::Call { call, what: text.to_string_lossy().into_owned() })
}

fn read(size_of: SizeOf, read_into: ReadInto, program: &Program) -> Result<Vec<u8>, CudaError> {
    let mut size = 0;
    // SAFETY: the program is alive, `size` is valid for the call.
    check(program.api, "nvrtc size query", unsafe { size_of(program.handle, &raw mut size) })?;
    let mut bytes = vec![0u8; size];
    // SAFETY: the buffer has the size that the library asked for.
    check(program.api, "nvrtc read", unsafe { read_into(program.handle, bytes.as_mut_ptr().cast()) })?;
    Ok(bytes)
}

/// A kernel source: the built-in one unless `KERNEL_DIR_VAR` has another.
#[cfg(feature = "kernel-dir")]
fn text_of(name: &str, built_in: &'static str) -> Cow<'static, str> {
    std::env::var_os(KERNEL_DIR_VAR)
        .and_then(|folder| std::fs::read_to_string(Path::new(&folder).join(name)).ok())
        .filter(|text| !text.contains('\0'))
        .map_or(Cow::Borrowed(built_in), Cow::Owned)
}

/// A kernel source: the built-in one.
#[cfg(not(feature = "kernel-dir"))]
fn text_of(_: &str, built_in: &'static str) -> Cow<'static, str> {
    Cow::Borrowed(built_in)
}

/// Target name and whether machine code can be had for it.
fn target(api: &Api, arch: u32) -> Result<(String, bool), CudaError> {
    let mut count = 0;
    // SAFETY: `count` is valid for the call.
    check(api, "nvrtcGetNumSupportedArchs", unsafe { (api.arch_count)(&raw mut count) })?;
    let mut archs = vec![0i32; usize::try_from(count).unwrap_or(0)];
    // SAFETY: the buffer has as many entries as the library said.
    check(api, "nvrtcGetSupportedArchs", unsafe { (api.archs)(archs.as_mut_ptr()) })?;
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

#[cfg(test)]
mod tests {
    use super::{Usage, parse_usage};

    #[test]
    fn the_assemblers_log_is_read() {
        let log = "ptxas info    : Compiling entry function 'few_q4k_1' for 'sm_90'\n\
                   ptxas info    : Function properties for few_q4k_1\n    8 bytes stack frame, 28 bytes spill stores, \
                   12 bytes spill loads\nptxas info    : Used 128 registers, used 1 barriers, 1024 bytes smem\n\
                   ptxas info    : Compiling entry function 'tap_rows' for 'sm_90'\n\
                   ptxas info    : Used 10 registers, used 0 barriers";
        let usage = |kernel: &str, registers, spill_bytes, shared_bytes| Usage {
            kernel: kernel.to_owned(),
            registers,
            spill_bytes,
            shared_bytes,
        };
        let expected = [usage("few_q4k_1", 128, 40, 1024), usage("tap_rows", 10, 0, 0)];
        assert_eq!(parse_usage(log), expected);
    }
}
