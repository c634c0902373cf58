//! What is done with a fuzzer's bytes: one function for each thing that reads from outside, its seeds, the words of its
//! dictionary and what it may cost.
//!
//! The functions assert more than that nothing panics: encodings have one form, two ways give one result, memory and time
//! are bounded by the length of what came. `fuzz/` makes a program of each for libFuzzer; the tests of this crate run each over its
//! seeds and over what was once found (`fuzz/regressions/NAME/`).
#![allow(clippy::missing_panics_doc, reason = "to panic is how a finding is told")]
#![allow(clippy::unwrap_used, reason = "as in tests")]
#![allow(
    clippy::format_push_string,
    clippy::format_collect,
    reason = "answers are put together piece by piece"
)]

#[cfg(feature = "text")]
mod chat;
mod files;
#[cfg(feature = "text")]
mod grammar;
mod images;
mod input;
mod model_files;
#[cfg(feature = "net")]
mod net;
mod nodes;
mod packs;
#[cfg(feature = "server")]
mod requests;
#[cfg(feature = "server")]
mod scripted;
#[cfg(feature = "text")]
mod words;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

#[cfg(feature = "text")]
pub use chat::{HISTORIES, TEMPLATES};
pub use files::{GGUF, SAFETENSORS};
#[cfg(feature = "text")]
pub use grammar::{GRAMMAR, SCHEMA};
pub use images::IMAGES;
pub use input::Input;
pub use model_files::{CHECKPOINT, HEADERS as MODEL_HEADERS};
#[cfg(feature = "net")]
pub use net::{BUCKET_ANSWERS, HUB_ANSWERS, HUB_TEXT};
pub use nodes::{FRAMES, LINK, NODE_TEXT};
pub use packs::{KEY_FILE, PACK_BUNDLE, PACK_CATALOG, PACK_MANIFEST, PACK_OBJECT};
#[cfg(feature = "server")]
pub use requests::{HTTP_HEADS, REQUESTS};
#[cfg(feature = "text")]
pub use words::{OUTPUT, TOKENIZER};

/// One thing that reads from outside.
#[derive(Debug)]
pub struct Target {
    /// Its name, also of its program and of its folders.
    pub name: &'static str,
    /// What it holds against what.
    pub about: &'static str,
    /// Takes the bytes; panics if something is wrong.
    pub run: fn(&[u8]),
    /// Where a fuzzer begins.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Words that are put in as a whole.
    pub words: &'static [&'static str],
    /// Longest input that a fuzzer makes.
    pub max_len: usize,
    /// Bytes that may be held at once: for any input, and more for each of its bytes.
    pub memory: (u64, u64),
    /// Time of a processor: for any input, and more for each KiB of it. Far above what it takes, far below what is quadratic.
    pub millis: (u64, u64),
}

/// All of them.
pub const TARGETS: &[&Target] = &[
    &GGUF,
    &MODEL_HEADERS,
    &SAFETENSORS,
    &CHECKPOINT,
    &IMAGES,
    &PACK_MANIFEST,
    &PACK_OBJECT,
    &PACK_CATALOG,
    &PACK_BUNDLE,
    &KEY_FILE,
    &FRAMES,
    &LINK,
    &NODE_TEXT,
    #[cfg(feature = "text")]
    &TOKENIZER,
    #[cfg(feature = "text")]
    &OUTPUT,
    #[cfg(feature = "text")]
    &HISTORIES,
    #[cfg(feature = "text")]
    &TEMPLATES,
    #[cfg(feature = "text")]
    &GRAMMAR,
    #[cfg(feature = "text")]
    &SCHEMA,
    #[cfg(feature = "net")]
    &HUB_TEXT,
    #[cfg(feature = "net")]
    &HUB_ANSWERS,
    #[cfg(feature = "net")]
    &BUCKET_ANSWERS,
    #[cfg(feature = "server")]
    &REQUESTS,
    #[cfg(feature = "server")]
    &HTTP_HEADS,
];

/// The target of a name.
pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().copied().find(|target| target.name == name)
}

/// Where and why the last panic was, and how many checks run.
static LAST_PANIC: Mutex<String> = Mutex::new(String::new());
static CHECKS: AtomicUsize = AtomicUsize::new(0);

/// Panics during a check are remembered and not printed: the product itself takes those of image decoders for a damaged file.
pub fn remember_panics() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if CHECKS.load(Ordering::SeqCst) == 0 {
            return before(info);
        }
        *LAST_PANIC.lock().unwrap_or_else(PoisonError::into_inner) = info.to_string();
    }));
}

fn caught(target: &Target, data: &[u8]) -> Result<(), String> {
    CHECKS.fetch_add(1, Ordering::SeqCst);
    let outcome = catch_unwind(AssertUnwindSafe(|| (target.run)(data)));
    CHECKS.fetch_sub(1, Ordering::SeqCst);
    outcome.map_err(|_| {
        let last = std::mem::take(&mut *LAST_PANIC.lock().unwrap_or_else(PoisonError::into_inner));
        format!("{}: {last}", target.name)
    })
}

impl Target {
    /// Runs it and looks at what that cost. A finding is an `Err` with the reason.
    ///
    /// Memory is looked at where [`muser_testkit::CountingAllocator`] is installed.
    pub fn check(&self, data: &[u8]) -> Result<(), String> {
        let before = processor_time();
        let (outcome, held) = muser_testkit::most_held(|| caught(self, data));
        outcome?;
        let (took, len) = (processor_time().saturating_sub(before), data.len() as u64);
        let most = self.memory.0 + self.memory.1 * len;
        if held > most {
            return Err(format!("{}: {held} bytes held at once for {len}, at most {most}", self.name));
        }
        let most = Duration::from_millis(self.millis.0 + self.millis.1 * len.div_ceil(1024));
        if took > most {
            return Err(format!(
                "{}: {took:?} of processor time for {len} bytes, at most {most:?}",
                self.name
            ));
        }
        Ok(())
    }

    /// What is once made before anything is measured: vocabularies, files of the tree.
    pub fn warm(&self) {
        for seed in (self.seeds)().iter().take(3) {
            let _ = caught(self, seed);
        }
    }

    /// What was once found.
    pub fn regressions(&self) -> Vec<(PathBuf, Vec<u8>)> {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/regressions").join(self.name);
        let files = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
        files.filter_map(|path| std::fs::read(&path).ok().map(|bytes| (path, bytes))).collect()
    }
}

/// What this thread has computed: other processes do not count.
fn processor_time() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// The body of each program of `fuzz/`.
pub fn fuzz(target: &'static Target, data: &[u8]) {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        remember_panics();
        target.warm();
    });
    if let Err(finding) = target.check(data) {
        let _ = std::io::Write::write_all(&mut std::io::stderr(), format!("FINDING {finding}\n").as_bytes());
        std::process::abort();
    }
}

/// A file of a crate of the tree, for seeds.
fn golden(path: &str) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..").join(path);
    std::fs::read(&path).unwrap_or_default()
}

/// A message for people: one line, not without end.
fn check_message(text: &str) {
    assert!(!text.is_empty() && text.len() < 4096, "a message of {} bytes", text.len());
    assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "{text:?}");
}

/// A folder in memory where the system has such a thing.
fn folder() -> tempfile::TempDir {
    let memory = std::path::Path::new("/dev/shm");
    let made = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    made.expect("a folder")
}
