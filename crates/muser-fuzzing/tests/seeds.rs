//! Each target over its seeds, over changed seeds, and over what was once found.

#![expect(clippy::unwrap_used, reason = "a test may fail that way")]

use muser_fuzzing::{TARGETS, Target, remember_panics};
use muser_testkit::{CountingAllocator, Rng, long_or};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// A seed with some bytes changed, moved, taken away.
fn changed(seed: &[u8], rng: &mut Rng, most: usize) -> Vec<u8> {
    let mut bytes = seed.to_vec();
    for _ in 0..=rng.below(3) {
        let at = rng.below(bytes.len() + 1);
        match rng.below(4) {
            0 if at < bytes.len() => bytes[at] = rng.next_u64() as u8,
            1 => bytes.truncate(at),
            2 => bytes.insert(at, [0, 1, 255, b'"', b'<'][rng.below(5)]),
            _ => {
                let end = (at + rng.below(9)).min(bytes.len());
                let part = bytes[at..end].to_vec();
                bytes.splice(at..at, part);
            }
        }
    }
    bytes.truncate(most);
    bytes
}

fn run(name: &str) {
    let target: &Target = muser_fuzzing::target(name).unwrap();
    remember_panics();
    target.warm();
    let fail = |data: &[u8], what: &str, finding: String| {
        panic!("{what}: {finding}\n{}", data.escape_ascii());
    };
    for (path, data) in target.regressions() {
        if let Err(finding) = target.check(&data) {
            fail(&data, &path.display().to_string(), finding);
        }
    }
    let seeds = (target.seeds)();
    assert!(!seeds.is_empty() && seeds.iter().any(|seed| !seed.is_empty()), "{name} has seeds");
    let mut rng = Rng(21);
    let rounds = long_or(200, 1);
    for seed in &seeds {
        if let Err(finding) = target.check(seed) {
            fail(seed, "a seed", finding);
        }
        for _ in 0..rounds {
            let data = changed(seed, &mut rng, target.max_len);
            if let Err(finding) = target.check(&data) {
                fail(&data, "a changed seed", finding);
            }
        }
    }
}

macro_rules! targets {
    ($($name:ident),* $(,)?) => {
        $(#[test]
        fn $name() {
            run(stringify!($name));
        })*

        #[test]
        fn every_target_is_tested_and_has_its_program() {
            let tested = [$(stringify!($name)),*];
            let programs = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/fuzz_targets");
            let mut found: Vec<String> = std::fs::read_dir(programs)
                .unwrap()
                .map(|entry| entry.unwrap().path().file_stem().unwrap().to_string_lossy().into_owned())
                .collect();
            found.sort();
            let mut names: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
            names.sort_unstable();
            assert_eq!(found, names, "a program of fuzz/ for each target");
            let mut tested = tested.to_vec();
            tested.sort_unstable();
            assert_eq!(tested, names);
        }
    };
}

targets!(
    gguf,
    model_headers,
    safetensors,
    checkpoint,
    images,
    pack_manifest,
    pack_object,
    pack_catalog,
    pack_bundle,
    key_file,
    frames,
    link,
    node_text,
    tokenizer,
    output,
    histories,
    templates,
    grammar,
    schema,
    hub_text,
    hub_answers,
    bucket_answers,
    requests,
    http_heads,
);
