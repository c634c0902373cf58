//! How fast packs are restored, beside a plain read of the same files: `pack_speed FOLDER [BLOCKS [CHUNK_KIB]]`.
//!
//! Blocks have the size of the full-size model. Each figure is the median of seven rounds over files in the page cache,
//! the three ways taken in turn; one line of JSON a figure.

use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use muser_kv::Unit;
use muser_pack::{
    DirStore, Fetch, Geometry, Identity, KeyRing, LayerKind, Library, LibraryOptions, Plan, Positions,
    Representation, Scope,
};

const ROUNDS: usize = 7;

fn identity() -> Identity {
    let layers: Vec<_> =
        (0..52).map(|i| if i % 4 == 3 { LayerKind::Full } else { LayerKind::Sliding }).collect();
    Identity {
        weights: [0; 32],
        architecture: Vec::new(),
        quantisation: String::new(),
        adapters: Vec::new(),
        tokenizer: [0; 32],
        template: [0; 32],
        positions: Positions {
            rotary_base_bits: 0,
            pairing: String::new(),
            scaling: String::new(),
            rotating: vec![true; 52],
            origin: 0,
        },
        geometry: Geometry { layers, window: 2048, kv_heads: 2, head_dim: 128, block_len: 256 },
        scalars: Vec::new(),
        context_policy: String::new(),
        media: None,
        draft: None,
        representation: Representation {
            route: "speed".into(),
            kv_type: "f16".into(),
            layout: "planes".into(),
            row_bytes: 512,
            full_block_bytes: 13 * 256 * 1024,
            sliding_block_bytes: 39 * 256 * 1024,
        },
    }
}

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
    let scope = library.scope(identity(), "");
    let units: Vec<_> = (0..blocks * 256).map(|i| Unit::token(i as u32)).collect();
    let started = Instant::now();
    let mut publication = library.begin_publish(&scope, &units)?;
    let mut bytes = vec![0; scope.block_bytes(muser_kv::KvGroup::Sliding)];
    let mut reader = blake3::Hasher::new().update(b"rows").finalize_xof();
    let mut written = 0;
    for wanted in publication.wanted() {
        let bytes = &mut bytes[..scope.block_bytes(wanted.group)];
        reader.fill(bytes);
        publication.put(wanted.group, wanted.index, bytes)?;
        written += bytes.len();
    }
    publication.commit(false)?;
    let seconds = started.elapsed().as_secs_f64();
    let name = if encrypt { "publish_sealed" } else { "publish_plain" };
    say(name, 1, written as f64 / seconds / 1e9)?;
    let plan = library.longest(&scope, &units, units.len(), true).ok_or("the pack is not found")?;
    let file = |segment: &muser_pack::Segment| {
        let hex = segment.id.to_string();
        folder.join("segments").join(&hex[..2]).join(hex)
    };
    let files = plan.segments.iter().map(file).collect();
    Ok(Case { library, scope, plan, files })
}

fn restore(case: &Case, memory: &mut [u8], threads: usize) -> Result<(), Box<dyn std::error::Error>> {
    let mut rest = memory;
    let mut jobs = Vec::new();
    for segment in &case.plan.segments {
        let (out, left) = rest.split_at_mut(segment.bytes);
        rest = left;
        jobs.push(Fetch { segment: *segment, out });
    }
    Ok(case.library.fetch_all(&case.scope, jobs, threads, &AtomicBool::new(false))?)
}

/// The same bytes into the same memory, in reads of the same size, unchecked.
fn read(case: &Case, memory: &mut [u8], threads: usize) -> Result<(), Box<dyn std::error::Error>> {
    let mut parts = Vec::new();
    let mut rest = memory;
    for segment in &case.plan.segments {
        let (out, left) = rest.split_at_mut(segment.bytes);
        rest = left;
        parts.push(std::sync::Mutex::new(out));
    }
    let next = AtomicUsize::new(0);
    let failed = AtomicBool::new(false);
    let work = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(part) = parts.get(at) else { break };
            let (Ok(mut out), Ok(file)) = (part.lock(), std::fs::File::open(&case.files[at])) else {
                failed.store(true, Ordering::Relaxed);
                break;
            };
            for (i, chunk) in out.chunks_mut(256 << 10).enumerate() {
                if file.read_exact_at(chunk, 4096 + (i as u64) * (256 << 10)).is_err() {
                    failed.store(true, Ordering::Relaxed);
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(work);
        }
        work();
    });
    if failed.into_inner() { Err("a file could not be read".into()) } else { Ok(()) }
}

fn say(name: &str, threads: usize, gb_per_s: f64) -> std::io::Result<()> {
    writeln!(std::io::stdout(), "{{\"what\":\"{name}\",\"threads\":{threads},\"gb_per_s\":{gb_per_s:.3}}}")
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
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
    let mut memory = vec![0_u8; sealed.plan.bytes()];
    type Way = fn(&Case, &mut [u8], usize) -> Result<(), Box<dyn std::error::Error>>;
    for threads in [1, 2] {
        let ways: [(&str, &Case, Way); 3] = [
            ("read", &sealed, read),
            ("restore_sealed", &sealed, restore),
            ("restore_plain", &plain, restore),
        ];
        let mut speeds = [const { Vec::new() }; 3];
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
        for (speeds, (name, ..)) in speeds.into_iter().zip(ways) {
            say(name, threads, median(speeds))?;
        }
    }
    Ok(())
}
