//! How fast packs are restored, beside plain reads of the same files and beside what a restore is made of:
//! `pack_speed FOLDER [BLOCKS [CHUNK_KIB]]`.
//!
//! Blocks have the size of the full-size model; of the sliding group only the window at the end is stored. Files are in the
//! page cache. All ways are taken in turn, in nine rounds; a line of JSON a figure, with median, lowest and highest:
//!
//! - `read`: into memory as large as what is restored; `read_cached`: into a buffer that stays in the caches,
//! - `open`, `authenticate`: AES-256-GCM of a cached chunk into a cached buffer, and its authentication alone,
//! - `copy`: a cached chunk into memory as large as what is restored,
//! - `restore_sealed`, `restore_plain`: all of it.

use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use aws_lc_rs::aead;
use muser_kv::{KvGroup, PositionKey};
use muser_pack::{DirStore, Identity, KeyRing, Library, LibraryOptions, Plan, Scope};

const ROUNDS: usize = 9;
const CHUNK: usize = 256 << 10;

struct Case {
    library: Library,
    scope: Scope,
    plan: Plan,
    files: Vec<PathBuf>,
}

fn prepare(
    folder: &Path,
    blocks: usize,
    options: LibraryOptions,
) -> Result<Case, Box<dyn std::error::Error>> {
    let store = Arc::new(DirStore::open(folder, None)?);
    let encrypt = options.encrypt;
    let library = Library::open(store, KeyRing::generate()?, options)?;
    let scope = library.scope(Identity::example_full_size(), "");
    let units: Vec<_> = (0..blocks * 256).map(|i| PositionKey::token(i as u32)).collect();
    let started = Instant::now();
    let mut publication = library.begin_publish(&scope, &units)?;
    let mut bytes = vec![0; scope.block_bytes(KvGroup::Sliding)];
    let mut reader = blake3::Hasher::new().update(b"rows").finalize_xof();
    let mut written = 0;
    let first_sliding = scope.first_sliding_block(units.len());
    for wanted in publication.wanted() {
        if wanted.group == KvGroup::Sliding && wanted.index < first_sliding {
            continue;
        }
        let bytes = &mut bytes[..scope.block_bytes(wanted.group)];
        reader.fill(bytes);
        publication.put(wanted.group, wanted.index, bytes)?;
        written += bytes.len();
    }
    publication.commit(false)?;
    let seconds = started.elapsed().as_secs_f64();
    let name = if encrypt { "publish_sealed" } else { "publish_plain" };
    say(name, 1, &mut [written as f64 / seconds / 1e9])?;
    let plan = library.longest(&scope, &units, units.len(), true).ok_or("the pack is not found")?;
    let file = |segment: &muser_pack::Segment| {
        let hex = segment.id.to_string();
        folder.join("segments").join(&hex[..2]).join(hex)
    };
    let files = plan.segments.iter().map(file).collect();
    Ok(Case { library, scope, plan, files })
}

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn restore(case: &Case, memory: &mut [u8], threads: usize) -> Outcome {
    by_segments(case, memory, threads, |at, out| {
        let fetched = case.library.fetch(&case.scope, &case.plan.segments[at], out);
        fetched.map_err(std::io::Error::other)
    })
}

/// Cuts `memory` into the segments' parts and works on them with some threads.
fn by_segments(
    case: &Case,
    memory: &mut [u8],
    threads: usize,
    work: impl Fn(usize, &mut [u8]) -> std::io::Result<()> + Sync,
) -> Outcome {
    let mut parts = Vec::new();
    let mut rest = memory;
    for segment in &case.plan.segments {
        let (out, left) = rest.split_at_mut(segment.bytes);
        rest = left;
        parts.push(std::sync::Mutex::new(out));
    }
    let next = AtomicUsize::new(0);
    let failed = AtomicBool::new(false);
    let run = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(part) = parts.get(at) else { break };
            if !part.lock().is_ok_and(|mut out| work(at, &mut out).is_ok()) {
                failed.store(true, Ordering::Relaxed);
                break;
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(run);
        }
        run();
    });
    if failed.into_inner() { Err("a part failed".into()) } else { Ok(()) }
}

/// The same bytes into the same memory, in reads of the same size, unchecked.
fn read(case: &Case, memory: &mut [u8], threads: usize) -> Outcome {
    by_segments(case, memory, threads, |at, out| {
        let file = std::fs::File::open(&case.files[at])?;
        let mut chunks = out.chunks_mut(CHUNK).enumerate();
        chunks.try_for_each(|(i, chunk)| file.read_exact_at(chunk, 4096 + (i * CHUNK) as u64))
    })
}

fn read_cached(case: &Case, memory: &mut [u8], threads: usize) -> Outcome {
    by_segments(case, memory, threads, |at, out| {
        let file = std::fs::File::open(&case.files[at])?;
        with_buffer(|buffer| {
            let mut chunks = out.chunks(CHUNK).enumerate();
            chunks.try_for_each(|(i, chunk)| {
                file.read_exact_at(&mut buffer[..chunk.len()], 4096 + (i * CHUNK) as u64)
            })
        })
    })
}

fn copy(case: &Case, memory: &mut [u8], threads: usize) -> Outcome {
    by_segments(case, memory, threads, |_, out| {
        with_buffer(|buffer| {
            out.chunks_mut(CHUNK).for_each(|chunk| chunk.copy_from_slice(&buffer[..chunk.len()]));
            Ok(())
        })
    })
}

/// Without reading and without the memory: as if the bytes were always in the caches.
fn open(case: &Case, memory: &mut [u8], threads: usize) -> Outcome {
    let key = key()?;
    let mut stored = vec![1; CHUNK];
    let tag = key.seal_in_place_separate_tag(nonce(), aead::Aad::empty(), &mut stored);
    let tag = tag.map_err(|_| "not sealed")?;
    chunks(case, memory, threads, |opened| {
        key.open_separate_gather(nonce(), aead::Aad::empty(), &stored, tag.as_ref(), opened).is_ok()
    })
}

fn authenticate(case: &Case, memory: &mut [u8], threads: usize) -> Outcome {
    let key = key()?;
    let stored = vec![1; CHUNK];
    let tag = key.seal_in_place_separate_tag(nonce(), aead::Aad::from(&stored), &mut []);
    let tag = tag.map_err(|_| "not sealed")?;
    chunks(case, memory, threads, |_| {
        key.open_separate_gather(nonce(), aead::Aad::from(&stored), &[], tag.as_ref(), &mut []).is_ok()
    })
}

/// Calls `work` for each chunk with a cached buffer of its size; segments of these blocks are whole chunks.
fn chunks(
    case: &Case,
    memory: &mut [u8],
    threads: usize,
    work: impl Fn(&mut [u8]) -> bool + Sync,
) -> Outcome {
    by_segments(case, memory, threads, |_, out| {
        let good = with_buffer(|buffer| out.chunks(CHUNK).all(|chunk| work(&mut buffer[..chunk.len()])));
        if good { Ok(()) } else { Err(std::io::ErrorKind::InvalidData.into()) }
    })
}

fn key() -> Result<aead::LessSafeKey, &'static str> {
    let key = aead::UnboundKey::new(&aead::AES_256_GCM, &[7; 32]).map_err(|_| "no key")?;
    Ok(aead::LessSafeKey::new(key))
}

fn nonce() -> aead::Nonce {
    aead::Nonce::assume_unique_for_key([0; 12])
}

/// A chunk of this thread.
fn with_buffer<T>(work: impl FnOnce(&mut [u8]) -> T) -> T {
    thread_local! {
        static BUFFER: std::cell::RefCell<Vec<u8>> = std::cell::RefCell::new(vec![1; CHUNK]);
    }
    BUFFER.with_borrow_mut(|buffer| work(buffer))
}

fn say(name: &str, threads: usize, speeds: &mut [f64]) -> std::io::Result<()> {
    speeds.sort_by(f64::total_cmp);
    let (median, low) = (speeds[speeds.len() / 2], speeds[0]);
    let high = speeds[speeds.len() - 1];
    writeln!(
        std::io::stdout(),
        "{{\"test\":\"{name}, {threads} threads\",\"gb_s\":{median:.3},\"lowest\":{low:.3},\"highest\":{high:.3}}}"
    )
}

fn main() -> Outcome {
    let mut args = std::env::args_os().skip(1);
    let folder = PathBuf::from(args.next().ok_or("usage: pack_speed FOLDER [BLOCKS [CHUNK_KIB]]")?);
    let blocks = match args.next() {
        Some(blocks) => blocks.to_string_lossy().parse()?,
        None => 16,
    };
    let mut options = LibraryOptions::default();
    if let Some(chunk_kib) = args.next() {
        options.chunk_bytes = chunk_kib.to_string_lossy().parse::<u32>()? << 10;
    }
    let sealed = prepare(&folder.join("sealed"), blocks, options.clone())?;
    let plain = prepare(&folder.join("plain"), blocks, LibraryOptions { encrypt: false, ..options })?;
    let mut memory = vec![1_u8; sealed.plan.bytes()];
    type Way = fn(&Case, &mut [u8], usize) -> Outcome;
    let ways: [(&str, &Case, Way); 7] = [
        ("read", &sealed, read),
        ("restore_sealed", &sealed, restore),
        ("restore_plain", &plain, restore),
        ("read_cached", &sealed, read_cached),
        ("open", &sealed, open),
        ("authenticate", &sealed, authenticate),
        ("copy", &sealed, copy),
    ];
    for threads in [1, 2] {
        let mut speeds = [const { Vec::new() }; 7];
        for round in 0..=ROUNDS {
            for (speeds, (_, case, way)) in speeds.iter_mut().zip(&ways) {
                let started = Instant::now();
                way(case, &mut memory, threads)?;
                let speed = memory.len() as f64 / started.elapsed().as_secs_f64() / 1e9;
                // The first round warms up.
                if round > 0 {
                    speeds.push(speed);
                }
            }
        }
        for (mut speeds, (name, ..)) in speeds.into_iter().zip(ways) {
            say(name, threads, &mut speeds)?;
        }
    }
    Ok(std::fs::remove_dir_all(folder)?)
}
