//! What packs cost and save on this machine: prefill against restore, restore against plain reading of the same files,
//! sealing, and what publishing takes from decoding.
//!
//! ```text
//! cargo run --release -p muser-prefix --example pack_bench -- MODEL.gguf [TOKENS] [FOLDER]
//! ```
//!
//! Prints one JSON object, the `report` of a receipt. The folder should lie on the disk that is meant; the files are in the
//! page cache when they are read.

use std::{
    io::Read as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use muser_backend::Executor as _;
use muser_cpu::{CpuExecutor, CpuOptions};
use muser_engine::{Engine, EngineConfig, EngineHandle, Event, Finished, Request, SamplingParams};
use muser_model::Model;
use muser_pack::{DirStore, Identity, KeyRing, Library, LibraryOptions};
use muser_prefix::{PackOptions, PackSource, PackUse, identity_of, weights_root};

const REPETITIONS: usize = 5;
const DECODE_TOKENS: u32 = 160;

type Fault = Box<dyn std::error::Error>;

struct Bench {
    model: Model,
    keys: KeyRing,
    folder: PathBuf,
    context: usize,
}

struct Running {
    engine: EngineHandle,
    packs: PackUse,
}

impl Bench {
    fn start(&self, encrypt: bool) -> Result<Running, Fault> {
        let executor = CpuExecutor::new(self.model.clone(), CpuOptions::default())?;
        let root = weights_root(&self.model.file, None, 2, |_| {});
        let identity: Identity = identity_of(&self.model, root, None, executor.info())?;
        let store = Arc::new(DirStore::open(self.store(encrypt), None)?);
        let options = LibraryOptions { encrypt, ..LibraryOptions::default() };
        let library = Library::open(store, self.keys.clone(), options)?;
        let scope = library.scope(identity, "");
        let config = EngineConfig {
            parallel: 1,
            context: Some(self.context),
            identity: scope.digest().to_vec(),
            ..EngineConfig::default()
        };
        let (source, packs) = PackSource::start(library, scope, PackOptions::default())?;
        let geometry = self.model.geometry.clone();
        let engine = Engine::spawn_with(Box::new(executor), geometry, config, Some(Box::new(source)))?;
        Ok(Running { engine, packs })
    }

    fn store(&self, encrypt: bool) -> PathBuf {
        self.folder.join(if encrypt { "sealed" } else { "plain" })
    }
}

impl Running {
    /// Time to the first token, the engine's figures at the end, and seconds from the first token to the last.
    fn ask(&self, prompt: &[u32], tokens: u32) -> Result<(Duration, Finished, f64), Fault> {
        let request = Request {
            max_tokens: Some(tokens),
            sampling: SamplingParams::greedy(),
            ..Request::new(prompt.to_vec(), Vec::new())
        };
        let submitted = Instant::now();
        let mut submission = self.engine.submit(request)?;
        let mut first = None;
        while let Some(event) = submission.recv() {
            match event {
                Event::Token(_) => {
                    first.get_or_insert_with(|| submitted.elapsed());
                }
                Event::Finished(finished) => {
                    let first = first.ok_or("no token")?;
                    return Ok((first, finished, submitted.elapsed().saturating_sub(first).as_secs_f64()));
                }
                Event::Failed(error) => return Err(error.into()),
                _ => {}
            }
        }
        Err("the engine stopped".into())
    }

    fn forget(&self) -> Result<(), Fault> {
        let (done, wait) = std::sync::mpsc::channel();
        self.engine.with_cache(move |mut cache| {
            cache.kv().clear();
            let _ = done.send(());
        })?;
        wait.recv()?;
        Ok(())
    }
}

/// Reads the files with plain `read`, `threads` at a time, into buffers that are used again.
fn read_plainly(files: &[PathBuf], threads: usize) -> Result<(f64, u64), Fault> {
    let began = Instant::now();
    let work = |part: usize| -> std::io::Result<u64> {
        let mut buffer = vec![0; 4 << 20];
        let mut bytes = 0;
        for path in files.iter().skip(part).step_by(threads) {
            let mut file = std::fs::File::open(path)?;
            loop {
                let n = file.read(&mut buffer)?;
                if n == 0 {
                    break;
                }
                bytes += n as u64;
            }
        }
        Ok(bytes)
    };
    let bytes: u64 = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|part| scope.spawn(move || work(part))).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().map_or(Ok(0), |read| read))
            .sum::<std::io::Result<u64>>()
    })?;
    Ok((began.elapsed().as_secs_f64(), bytes))
}

fn large_files(dir: &Path, found: &mut Vec<PathBuf>) -> std::io::Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            large_files(&entry.path(), found)?;
        } else if entry.metadata()?.len() > 64 << 10 {
            found.push(entry.path());
        }
    }
    Ok(())
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

fn test(name: &str, ms: &[f64], more: &str) -> String {
    let list: Vec<String> = ms.iter().map(|ms| format!("{ms:.3}")).collect();
    let median = median(ms);
    format!("{{\"test\": \"{name}\", \"reps\": [{}], \"median_ms\": {median:.3}{more}}}", list.join(", "))
}

#[expect(clippy::print_stdout, reason = "it is the result")]
fn main() -> Result<(), Fault> {
    let mut args = std::env::args().skip(1);
    let path = args.next().ok_or("usage: pack_bench MODEL.gguf [TOKENS] [FOLDER]")?;
    let tokens: usize = args.next().map_or(Ok(4096), |tokens| tokens.parse())?;
    let folder = args.next().map_or_else(|| std::env::temp_dir().join("muser-pack-bench"), PathBuf::from);
    let model = Model::load(&path)?;
    let vocab = model.geometry.vocab as u32;
    let context = tokens + DECODE_TOKENS as usize + 64;
    let bench = Bench { model, keys: KeyRing::generate()?, folder, context };
    // One more than whole blocks: a row must be computed to have logits.
    let prompt: Vec<u32> =
        (0..=tokens as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 7) % (vocab / 2)).collect();
    let mut tests = Vec::new();
    let threads = PackOptions::default().fetch_threads;
    let mut restore_medians = Vec::new();
    let mut prefill_ms = 0.0;
    for encrypt in [true, false] {
        let running = bench.start(encrypt)?;
        let label = if encrypt { "sealed" } else { "authenticated only" };
        let (first, finished, _) = running.ask(&prompt, 1)?;
        if finished.usage.cached_tokens > 0 {
            return Err("the folder has packs already".into());
        }
        if encrypt {
            prefill_ms = first.as_secs_f64() * 1e3;
            tests.push(test(&format!("prefill {tokens} to first token"), &[prefill_ms], ""));
        }
        let began = Instant::now();
        running.packs.flush(Duration::from_mins(2));
        let counters = running.packs.library().counters().snapshot();
        let publish_ms = began.elapsed().as_secs_f64() * 1e3;
        let rate = counters.published_bytes as f64 / publish_ms / 1e6;
        tests.push(test(
            &format!("publish, {label}, idle engine"),
            &[publish_ms],
            &format!(", \"gb_s\": {rate:.3}"),
        ));
        let mut files = Vec::new();
        large_files(&bench.store(encrypt), &mut files)?;
        let (mut to_first, mut restore, mut plain_one, mut plain_all) = (vec![], vec![], vec![], vec![]);
        let (mut fetched, mut on_disk) = (0, 0);
        for repetition in 0..=REPETITIONS {
            running.forget()?;
            let before = running.engine.metrics().external_bytes;
            let (first, finished, _) = running.ask(&prompt, 1)?;
            if finished.usage.restored_tokens as usize != tokens {
                return Err(format!("restored {:?}", finished.usage).into());
            }
            fetched = running.engine.metrics().external_bytes - before;
            running.packs.flush(Duration::from_mins(2));
            let (one, bytes) = read_plainly(&files, 1)?;
            let (all, _) = read_plainly(&files, threads)?;
            on_disk = bytes;
            // The first one warms up.
            if repetition > 0 {
                to_first.push(first.as_secs_f64() * 1e3);
                restore.push(finished.timings.restore.as_secs_f64() * 1e3);
                plain_one.push(one * 1e3);
                plain_all.push(all * 1e3);
            }
        }
        let gb_s = |bytes: u64, ms: &[f64]| bytes as f64 / median(ms) / 1e6;
        let speed = gb_s(fetched, &restore);
        let (one, all) = (gb_s(on_disk, &plain_one), gb_s(on_disk, &plain_all));
        restore_medians.push(median(&restore));
        tests.push(test(
            &format!("restore {tokens}, {label}, to first token"),
            &to_first,
            &format!(", \"faster_than_prefill\": {:.1}", prefill_ms / median(&to_first)),
        ));
        tests.push(test(
            &format!("restore {tokens}, {label}, {threads} threads"),
            &restore,
            &format!(
                ", \"gb_s\": {speed:.3}, \"bytes\": {fetched}, \"of_plain_read_one_thread\": {:.3}, \"of_plain_read_same_threads\": {:.3}",
                speed / one,
                speed / all
            ),
        ));
        tests.push(test(
            &format!("plain read, {label}, 1 thread"),
            &plain_one,
            &format!(", \"gb_s\": {one:.3}"),
        ));
        tests.push(test(
            &format!("plain read, {label}, {threads} threads"),
            &plain_all,
            &format!(", \"gb_s\": {all:.3}"),
        ));
        if encrypt {
            tests.extend(decode_beside_publishing(&running, &prompt)?);
        }
    }
    let sealing = restore_medians[0] / restore_medians[1] - 1.0;
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    println!(
        "{{\"device\": \"CPU, {cores} threads\", \"model\": \"{}\", \"sealing_adds_to_restore\": {sealing:.3}, \"tests\": [\n{}\n]}}",
        Path::new(&path).file_name().unwrap_or_default().to_string_lossy(),
        tests.join(",\n")
    );
    std::fs::remove_dir_all(&bench.folder)?;
    Ok(())
}

/// Decoding after a prompt that memory knows: in turn with nothing to publish, and with all of it to publish.
fn decode_beside_publishing(running: &Running, prompt: &[u32]) -> Result<Vec<String>, Fault> {
    let (mut quiet, mut publishing, mut published) = (Vec::new(), Vec::new(), 0);
    for repetition in 0..=REPETITIONS {
        for publish in [false, true] {
            if publish {
                for pack in running.packs.library().packs() {
                    running.packs.library().remove(pack.id)?;
                }
            }
            let before = running.packs.library().counters().snapshot().published_bytes;
            let (_, finished, seconds) = running.ask(prompt, DECODE_TOKENS)?;
            let during = running.packs.library().counters().snapshot().published_bytes - before;
            running.packs.flush(Duration::from_mins(2));
            let per_token = seconds * 1e3 / f64::from(finished.usage.completion_tokens - 1);
            if repetition > 0 {
                if publish {
                    publishing.push(per_token);
                    published += during;
                } else {
                    quiet.push(per_token);
                }
            }
        }
    }
    let cost = median(&publishing) / median(&quiet) - 1.0;
    let export = running.engine.metrics().export_time;
    let mean_ms = export.sum_s * 1e3 / export.count().max(1) as f64;
    Ok(vec![
        test("decode, nothing to publish, per token", &quiet, ""),
        test(
            "decode while publishing, per token",
            &publishing,
            &format!(
                ", \"slower_by\": {cost:.4}, \"published_bytes_meanwhile\": {}, \"copy_of_a_block_ms\": {mean_ms:.3}",
                published / REPETITIONS as u64
            ),
        ),
    ])
}
