//! Saved, process ended, another process started, restored: the same tokens and the same logits as if nothing had stopped.
//!
//! Every case is two processes on one folder: the first computes a prompt, keeps it and exits (or aborts, when it has been
//! told that all is written); the second gets a prompt that shares a random part with it. This process runs the same
//! prompts without packs and without reuse and compares tokens, hashes of all logits, counted rows and, with a draft,
//! what it proposed and what was accepted.
//!
//! Four cases of each kind by default; with `MUSER_TEST_LONG=1` 200 without a draft and 100 with one
//! (`MUSER_TEST_LONG=1 cargo test --release -p muser-kv-connector --test restarts`; nextest would end it after five minutes).

mod support;

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use muser_engine::{EngineHandle, Request, SamplingParams, Usage};
use muser_kv_connector::PackOptions;
use muser_pack::{DirStore, KeyFile, Library, LibraryOptions};
use support::{Rng, alone_with, ask, config, request, start_on};

/// The folder in which a child finds its store and its job.
const FOLDER: &str = "MUSER_TEST_RESTART_FOLDER";
const BLOCK: usize = 256;

/// What a process is to compute.
#[derive(Clone, Debug)]
struct Job {
    with_draft: bool,
    greedy: bool,
    /// Dies without a destructor once everything is published.
    aborts: bool,
    tokens: u32,
    prompt: Vec<u32>,
}

/// What it found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Outcome {
    cached: usize,
    restored: usize,
    /// Rows of prompts that its engine computed.
    computed: usize,
    /// Rounds, proposals, accepted ones.
    drafts: [u32; 3],
    tokens: Vec<(u32, u64)>,
}

impl Outcome {
    fn of(tokens: Vec<(u32, u64)>, usage: Usage, computed: u64) -> Self {
        Self {
            cached: usage.cached_tokens as usize,
            restored: usage.restored_tokens as usize,
            computed: computed as usize,
            drafts: [usage.decode_steps, usage.drafted_tokens, usage.accepted_tokens],
            tokens,
        }
    }

    fn write(&self, path: &Path) {
        let [rounds, drafted, accepted] = self.drafts;
        let mut text = format!("{} {} {}", self.cached, self.restored, self.computed);
        write!(text, " {rounds} {drafted} {accepted}").expect("a string grows");
        for (id, hash) in &self.tokens {
            write!(text, " {id} {hash}").expect("a string grows");
        }
        std::fs::write(path, text).expect("written");
    }

    fn read(path: &Path) -> Self {
        let numbers = numbers(path);
        let [cached, restored, computed, rounds, drafted, accepted] = numbers[..6] else { unreachable!() };
        let pairs = numbers[6..].chunks_exact(2);
        Self {
            cached: cached as usize,
            restored: restored as usize,
            computed: computed as usize,
            drafts: [rounds as u32, drafted as u32, accepted as u32],
            tokens: pairs.map(|pair| (pair[0] as u32, pair[1])).collect(),
        }
    }
}

fn numbers(path: &Path) -> Vec<u64> {
    let text = std::fs::read_to_string(path).expect("the child has written it");
    text.split_whitespace().map(|number| number.parse().expect("a number")).collect()
}

impl Job {
    fn write(&self, path: &Path) {
        let flags = [self.with_draft, self.greedy, self.aborts].map(u32::from);
        let numbers = flags.iter().chain([&self.tokens]).chain(&self.prompt);
        let text: Vec<String> = numbers.map(u32::to_string).collect();
        std::fs::write(path, text.join(" ")).expect("written");
    }

    fn read(path: &Path) -> Self {
        let numbers = numbers(path);
        Self {
            with_draft: numbers[0] == 1,
            greedy: numbers[1] == 1,
            aborts: numbers[2] == 1,
            tokens: numbers[3] as u32,
            prompt: numbers[4..].iter().map(|&id| id as u32).collect(),
        }
    }

    /// In a process of its own, which has exited when this returns.
    fn run(&self, folder: &Path) -> Outcome {
        self.write(&folder.join("job"));
        let _ = std::fs::remove_file(folder.join("outcome"));
        let ended = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "child", "--nocapture"])
            .env(FOLDER, folder)
            .output()
            .expect("the child starts");
        assert_eq!(ended.status.success(), !self.aborts, "{}", String::from_utf8_lossy(&ended.stderr));
        Outcome::read(&folder.join("outcome"))
    }

    /// Here, without packs and without reuse.
    fn run_uninterrupted(&self, engine: &EngineHandle) -> Outcome {
        let before = engine.metrics().prefill_rows;
        let request = Request { cache: false, ..request(&self.prompt, self.tokens, self.greedy) };
        let (tokens, usage) = ask(engine, request);
        Outcome::of(tokens, usage, engine.metrics().prefill_rows - before)
    }
}

/// One process of a case; does nothing unless it was started for one.
#[test]
fn child() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    let folder = Path::new(&folder);
    let job = Job::read(&folder.join("job"));
    let keys = KeyFile::open_or_create(&folder.join("keys").join("packs.key")).expect("keys");
    let store = DirStore::open(folder.join("packs"), None).expect("a folder");
    let library = Library::open(Arc::new(store), keys, LibraryOptions::default()).expect("it opens");
    let running = start_on(library, job.with_draft, config(), PackOptions::default(), |_| {});
    let (tokens, usage) = ask(&running.engine, request(&job.prompt, job.tokens, job.greedy));
    let metrics = running.engine.metrics();
    assert_eq!(metrics.external_hits, u64::from(usage.restored_tokens));
    assert_eq!((metrics.requests_failed, metrics.step_errors, metrics.step_panics), (0, 0, 0));
    let outcome = Outcome::of(tokens, usage, metrics.prefill_rows);
    if job.aborts {
        assert!(running.packs.flush(std::time::Duration::from_mins(1)), "publishing ends");
        outcome.write(&folder.join("outcome"));
        std::process::abort();
    }
    running.stop();
    outcome.write(&folder.join("outcome"));
}

/// How far a prompt can be resumed after these units were kept: whole blocks, and any place in the unfinished block at the
/// end. Less than a block is not kept.
fn resumable(kept: &[u32], prompt: &[u32]) -> usize {
    if kept.len() < PackOptions::default().least_positions {
        return 0;
    }
    let common = kept.iter().zip(prompt).take_while(|(a, b)| a == b).count();
    let most = common.min(prompt.len() - 1);
    let whole = most / BLOCK * BLOCK;
    if whole == kept.len() / BLOCK * BLOCK { most } else { whole }
}

/// Text of the model's own, where drafts are accepted now and then.
fn own_text(engine: &EngineHandle, tokens: u32) -> Vec<u32> {
    let mut text = Vec::new();
    let mut rng = Rng(4);
    while text.len() < tokens as usize {
        let request = Request {
            max_tokens: Some(400),
            seed: Some(text.len() as u64),
            hash_logits: true,
            sampling: SamplingParams::default(),
            ..Request::new(rng.tokens(4), Vec::new())
        };
        text.extend(ask(engine, request).0.iter().map(|(id, _)| *id));
    }
    text
}

/// `cases` restarts; what was restored on the way, and tokens and rounds of what followed.
fn check(cases: usize, with_draft: bool) {
    let engine = alone_with(with_draft);
    let text = own_text(&engine, if cases > 10 { 6000 } else { 800 });
    let mut rng = Rng(if with_draft { 2 } else { 1 });
    let slice = |rng: &mut Rng, len: usize| -> Vec<u32> {
        let mut slice = Vec::with_capacity(len);
        while slice.len() < len {
            let from = rng.below(text.len() - 1);
            let end = (from + 1 + rng.below(300)).min(text.len()).min(from + len - slice.len());
            slice.extend(&text[from..end]);
        }
        slice
    };
    let folder = tempfile::tempdir().expect("a folder");
    let (mut restored, mut computed, mut mid_block, mut beyond_window) = (0, 0, 0, 0);
    let mut drafts = [0; 3];
    let began = Instant::now();
    for case in 0..cases {
        // Short ones as often as long ones.
        let most = [300, 700, 1400, 3000][rng.below(4)];
        let len = 2 + rng.below(most);
        // Every third case without a text of the model's own.
        let first = if case % 3 == 2 { rng.tokens(len) } else { slice(&mut rng, len) };
        let greedy = rng.below(2) == 0;
        let save = Job {
            with_draft,
            greedy,
            aborts: case % 4 == 1,
            tokens: 1 + rng.below(24) as u32,
            prompt: first.clone(),
        };
        let saved = save.run(folder.path());
        let about = format!("case {case}, {save:?}");
        assert_eq!(saved.computed + saved.cached, first.len(), "{about}");
        assert_eq!(saved.tokens, save.run_uninterrupted(&engine).tokens, "{about}");

        let said: Vec<u32> = first.iter().copied().chain(saved.tokens.iter().map(|(id, _)| *id)).collect();
        // The last token was said and never read.
        let kept = &said[..said.len() - 1];
        let prompt = match rng.below(3) {
            // The conversation goes on from where it was.
            0 => said.clone(),
            // With more text.
            1 => [&said[..], &slice(&mut rng, 1 + most / 5)].concat(),
            // Another text from a random place on.
            _ => {
                let other = 1 + rng.below(300);
                [&said[..=rng.below(said.len())], &rng.tokens(other)].concat()
            }
        };
        let resume = Job { aborts: false, tokens: 24, prompt, ..save };
        let found = resume.run(folder.path());
        let expected = resume.run_uninterrupted(&engine);
        let about = format!("case {case}, kept {}, {resume:?}", kept.len());
        assert_eq!(found.tokens, expected.tokens, "{about}");
        assert_eq!(found.drafts, expected.drafts, "{about}");
        assert_eq!(expected.computed, resume.prompt.len(), "{about}");
        assert_eq!(found.cached, found.restored, "nothing else is there to have it from: {about}");
        assert_eq!(found.cached + found.computed, resume.prompt.len(), "{about}");
        // Another case may have left even more of it.
        let least = resumable(kept, &resume.prompt);
        assert!(found.cached >= least, "{} of {least}: {about}", found.cached);
        restored += found.restored;
        computed += found.computed;
        mid_block += usize::from(!found.restored.is_multiple_of(BLOCK));
        beyond_window += usize::from(found.restored > 512);
        for (sum, count) in drafts.iter_mut().zip(found.drafts) {
            *sum += count;
        }
    }
    assert!(restored > 0 && (cases < 10 || mid_block > 0 && beyond_window > 0));
    let [rounds, drafted, accepted] = drafts;
    assert_eq!(drafted > 0 && accepted > 0, with_draft);
    eprintln!(
        "{cases} cases{}: {restored} positions restored, {computed} computed; {mid_block} resumed inside a block, \
         {beyond_window} beyond 512 positions; {} tokens in {rounds} rounds, {accepted} of {drafted} proposals accepted; \
         {:.0} s",
        if with_draft { " with a draft" } else { "" },
        24 * cases,
        began.elapsed().as_secs_f64()
    );
}

fn long() -> bool {
    muser_testkit::is_long()
}

#[test]
fn what_a_process_kept_the_next_one_continues_exactly() {
    check(if long() { 200 } else { 4 }, false);
}

#[test]
fn a_restored_draft_proposes_and_is_accepted_as_one_that_never_stopped() {
    check(if long() { 100 } else { 4 }, true);
}
