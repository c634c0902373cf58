//! What packs cost and save on this machine, in three parts that each take a minute or two with the 1B model:
//!
//! ```text
//! cargo bench -p muser-bench --bench pack_bench -- PART MODEL.gguf [TOKENS] [FOLDER]
//! ```
//!
//! - `restore`: prefill against restore; restore against plain reading of the same files, sealed and authenticated only, all
//!   in turn. Plain reading is given twice: into memory of the size of what is restored, which is what a restore has to do
//!   at least, and into a buffer that is used again and never leaves the processor's caches.
//! - `decode`: what publishing takes from decoding.
//! - `first`: whether publishing delays a first token.
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
use muser_bench::middle;
use muser_cpu::{CpuExecutor, CpuOptions};
use muser_engine::{Engine, EngineConfig, EngineHandle, Event, Finished, Request, SamplingParams};
use muser_kv_connector::{PackOptions, PackSource, PackUse, identity_of, weights_root};
use muser_model::Model;
use muser_pack::{DirStore, Identity, KeyRing, Library, LibraryOptions};

const REPETITIONS: usize = 5;
/// Restores and plain reads take milliseconds.
const RESTORES: usize = 15;
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
    fn start(&self, encrypt: bool, publish: bool) -> Result<Running, Fault> {
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
        let (source, packs) =
            PackSource::start(library, scope, PackOptions { publish, ..PackOptions::default() })?;
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
}

/// Reads the files with plain `read` and `threads` threads. Each thread has its share of `memory`: as much as its files
/// have, one after the other, or less, which is then used again and again.
fn read_plainly(files: &[PathBuf], memory: &mut [u8], again: bool, threads: usize) -> Result<f64, Fault> {
    const PIECE: usize = 256 << 10;
    let began = Instant::now();
    let work = |part: usize, memory: &mut [u8]| -> std::io::Result<()> {
        let mut at = 0;
        for path in files.iter().skip(part).step_by(threads) {
            let mut file = std::fs::File::open(path)?;
            loop {
                if at == memory.len() || again {
                    at = 0;
                }
                let end = memory.len().min(at + PIECE);
                let n = file.read(&mut memory[at..end])?;
                if n == 0 {
                    break;
                }
                at += n;
            }
        }
        Ok(())
    };
    let share = memory.len() / threads;
    std::thread::scope(|scope| {
        let shares = memory.chunks_exact_mut(share).take(threads).enumerate();
        let threads: Vec<_> = shares.map(|(part, memory)| scope.spawn(move || work(part, memory))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().unwrap_or(Ok(())))
    })?;
    Ok(began.elapsed().as_secs_f64())
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

fn test(name: &str, ms: &[f64], more: &str) -> String {
    let list: Vec<String> = ms.iter().map(|ms| format!("{ms:.3}")).collect();
    let median = middle(ms);
    format!("{{\"test\": \"{name}\", \"reps\": [{}], \"median_ms\": {median:.3}{more}}}", list.join(", "))
}

#[expect(clippy::print_stdout, reason = "it is the result")]
fn main() -> Result<(), Fault> {
    const USAGE: &str = "usage: pack_bench restore|decode|first MODEL.gguf [TOKENS] [FOLDER]";
    let mut args = muser_bench::arguments();
    let part = args.next().ok_or(USAGE)?;
    let path = args.next().ok_or(USAGE)?;
    let tokens: usize = args.next().map_or(Ok(4096), |tokens| tokens.parse())?;
    let folder = args.next().map_or_else(|| std::env::temp_dir().join("muser-pack-bench"), PathBuf::from);
    let model = Model::load(&path)?;
    let context = tokens + DECODE_TOKENS as usize + 64;
    let bench = Bench { model, keys: KeyRing::generate()?, folder, context };
    let tests = match part.as_str() {
        "restore" => bench.restores(tokens),
        "decode" => bench.decoding(tokens),
        "first" => bench.first_tokens(tokens),
        _ => Err(USAGE.into()),
    }?;
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    println!(
        "{{\"device\": \"CPU, {cores} threads\", \"model\": \"{}\", \"tests\": [\n{}\n]}}",
        Path::new(&path).file_name().unwrap_or_default().to_string_lossy(),
        tests.join(",\n")
    );
    std::fs::remove_dir_all(&bench.folder)?;
    Ok(())
}

impl Bench {
    /// One more than whole blocks: a row must be computed to have logits.
    fn prompt(&self, tokens: usize, seed: u32) -> Vec<u32> {
        let vocab = self.model.geometry.vocab as u32;
        (0..=tokens as u32)
            .map(|i| (i.wrapping_add(seed << 16).wrapping_mul(2_654_435_761) >> 7) % (vocab / 2))
            .collect()
    }

    fn restores(&self, tokens: usize) -> Result<Vec<String>, Fault> {
        let prompt = self.prompt(tokens, 0);
        let threads = PackOptions::default().fetch_threads;
        let mut tests = Vec::new();
        let mut modes = Vec::new();
        for encrypt in [true, false] {
            let running = self.start(encrypt, true)?;
            let label = if encrypt { "sealed" } else { "authenticated only" };
            let (first, finished, _) = running.ask(&prompt, 1)?;
            if finished.usage.cached_tokens > 0 {
                return Err("the folder has packs already".into());
            }
            tests.push(test(&format!("prefill {tokens} to first token ({label})"), &[ms(first)], ""));
            let began = Instant::now();
            running.packs.flush(Duration::from_mins(2));
            let took = ms(began.elapsed());
            let rate = running.packs.library().counters().snapshot().published_bytes as f64 / took / 1e6;
            tests.push(test(
                &format!("publish, {label}, idle engine"),
                &[took],
                &format!(", \"gb_s\": {rate:.3}"),
            ));
            let mut files = Vec::new();
            large_files(&self.store(encrypt), &mut files)?;
            let mut on_disk = 0;
            for file in &files {
                on_disk += std::fs::metadata(file)?.len();
            }
            modes.push((label, running, files, on_disk, ms(first)));
        }
        // Touched before it is measured, as the engine's own memory has been.
        let mut memory = vec![1_u8; modes.iter().map(|mode| mode.3 as usize).max().unwrap_or(0)];
        let mut cached = vec![1_u8; threads * (256 << 10)];
        let mut samples: Vec<[Vec<f64>; 6]> = modes.iter().map(|_| Default::default()).collect();
        let mut fetched = 0;
        for repetition in 0..=RESTORES {
            for ((_, running, files, ..), samples) in modes.iter().zip(&mut samples) {
                running.engine.forget_prefixes();
                let before = running.engine.metrics().external_bytes;
                let (first, finished, _) = running.ask(&prompt, 1)?;
                if finished.usage.restored_tokens as usize != tokens {
                    return Err(format!("restored {:?}", finished.usage).into());
                }
                fetched = running.engine.metrics().external_bytes - before;
                running.packs.flush(Duration::from_mins(2));
                let seconds = [
                    first.as_secs_f64(),
                    finished.timings.restore.as_secs_f64(),
                    read_plainly(files, &mut memory, false, 1)?,
                    read_plainly(files, &mut memory, false, threads)?,
                    read_plainly(files, &mut cached[..256 << 10], true, 1)?,
                    read_plainly(files, &mut cached, true, threads)?,
                ];
                // The first one warms up.
                if repetition > 0 {
                    for (samples, seconds) in samples.iter_mut().zip(seconds) {
                        samples.push(seconds * 1e3);
                    }
                }
            }
        }
        let mut restored_ms = Vec::new();
        for ((label, _, _, on_disk, prefill_ms), samples) in modes.iter().zip(&samples) {
            let [first, restore, place_one, place_all, cached_one, cached_all] = samples;
            let speed = |bytes: u64, ms: &[f64]| bytes as f64 / middle(ms) / 1e6;
            let restored = speed(fetched, restore);
            restored_ms.push(middle(restore));
            tests.push(test(
                &format!("restore {tokens}, {label}, to first token"),
                first,
                &format!(", \"faster_than_prefill\": {:.1}", prefill_ms / middle(first)),
            ));
            tests.push(test(
                &format!("restore {tokens}, {label}, {threads} threads"),
                restore,
                &format!(
                    ", \"gb_s\": {restored:.3}, \"bytes\": {fetched}, \"of_plain_read_into_as_much_memory\": {:.3}, \"of_plain_read_into_a_cached_buffer\": {:.3}",
                    restored / speed(*on_disk, place_all),
                    restored / speed(*on_disk, cached_all)
                ),
            ));
            for (name, threads, samples) in [
                ("as much memory", 1, place_one),
                ("as much memory", threads, place_all),
                ("a cached buffer", 1, cached_one),
                ("a cached buffer", threads, cached_all),
            ] {
                tests.push(test(
                    &format!("plain read, {label}, into {name}, {threads} threads"),
                    samples,
                    &format!(", \"gb_s\": {:.3}", speed(*on_disk, samples)),
                ));
            }
        }
        let differences: Vec<f64> = samples[0][1].iter().zip(&samples[1][1]).map(|(a, b)| a - b).collect();
        let adds = restored_ms[0] / restored_ms[1] - 1.0;
        tests.push(test(
            "restore, sealed less authenticated only",
            &differences,
            &format!(", \"sealing_adds\": {adds:.3}"),
        ));
        Ok(tests)
    }

    fn decoding(&self, tokens: usize) -> Result<Vec<String>, Fault> {
        let running = self.start(true, true)?;
        let prompt = self.prompt(tokens, 0);
        running.ask(&prompt, 1)?;
        running.packs.flush(Duration::from_mins(2));
        decode_beside_publishing(&running, &prompt)
    }

    /// Prompts that nobody has seen, in turn with and without publishing.
    fn first_tokens(&self, tokens: usize) -> Result<Vec<String>, Fault> {
        let (with, without) = (self.start(true, true)?, self.start(false, false)?);
        let mut samples = [Vec::new(), Vec::new()];
        for repetition in 0..=REPETITIONS {
            let prompt = self.prompt(tokens, 1 + repetition as u32);
            // Who is first changes: the machine may get slower while it works.
            let mut order = [(&with, 0), (&without, 1)];
            order.rotate_left(repetition % 2);
            for (running, which) in order {
                running.engine.forget_prefixes();
                let (first, finished, _) = running.ask(&prompt, 2)?;
                if finished.usage.cached_tokens > 0 {
                    return Err(format!("not computed: {:?}", finished.usage).into());
                }
                if repetition > 0 {
                    samples[which].push(ms(first));
                }
                running.packs.flush(Duration::from_mins(2));
            }
        }
        let cost = middle(&samples[0]) / middle(&samples[1]) - 1.0;
        let figures = with.packs.figures();
        if figures.published == 0 {
            return Err(format!("nothing was published: {figures:?}").into());
        }
        Ok(vec![
            test(
                &format!("first token of {tokens}, publishing"),
                &samples[0],
                &format!(", \"slower_by\": {cost:.4}"),
            ),
            test(&format!("first token of {tokens}, not publishing"), &samples[1], ""),
        ])
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
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
    let cost = middle(&publishing) / middle(&quiet) - 1.0;
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
