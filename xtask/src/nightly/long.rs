//! The long form of tests: everything that looks at `MUSER_TEST_LONG`, in parts of less than an hour.

use anyhow::Result;
use serde_json::Value;

use super::job::Job;
use super::{Context, Outcome};

/// Tests that are run together.
pub(super) struct Proof {
    pub(super) name: &'static str,
    pub(super) what: &'static str,
    /// For each run of cargo: the crate, `lib` or the name of a test, and what is given to the tests.
    runs: &'static [(&'static str, &'static str, &'static [&'static str])],
}

const ALONE: &[&str] = &["--test-threads=1"];

pub(super) const PROOFS: &[Proof] = &[
    Proof {
        name: "long-formats",
        what: "changed files, frames and outputs by the million, lives of the KV cache",
        runs: &[
            ("muser-gguf", "mutations", &[]),
            ("muser-kv", "lib", &[]),
            ("muser-text", "lib", &["output"]),
            ("muser-handoff", "lib", &[]),
            ("muser-fuzzing", "seeds", ALONE),
        ],
    },
    Proof {
        name: "long-pack",
        what: "kills, every bit of packs, ten million changed encodings, 8 GiB in little memory",
        runs: &[("muser-pack", "lib", ALONE), ("muser-pack", "memory", &[])],
    },
    Proof {
        name: "long-prefix",
        what: "exact continuation, faults, pictures, memory of prefixes from packs",
        runs: &[
            ("muser-kv-connector", "exact", &[]),
            ("muser-kv-connector", "faults", &[]),
            ("muser-kv-connector", "memory", &[]),
            ("muser-kv-connector", "pictures", &[]),
        ],
    },
    Proof {
        name: "long-restarts",
        what: "restarts with and without a draft",
        runs: &[("muser-kv-connector", "restarts", &[])],
    },
    Proof {
        name: "long-engine",
        what: "schedules, sampling, Muse Tiny in every arrangement, memory of drafts",
        runs: &[
            ("muser-engine", "lib", &[]),
            ("muser-engine", "muse_tiny", &[]),
            ("muser-engine", "dflash_memory", &[]),
        ],
    },
    Proof {
        name: "long-drafts",
        what: "500 prompts with and without a draft",
        runs: &[("muser-engine", "dflash_cpu", &[])],
    },
    Proof {
        name: "long-executors",
        what: "random steps on the CPU executor, faults on wgpu",
        runs: &[
            ("muser-cpu", "lib", &["executor"]),
            ("muser-split", "conformance", &[]),
            ("muser-wgpu", "faults", &[]),
        ],
    },
    Proof {
        name: "long-node",
        what: "hand-off: equal text, faults on the way",
        runs: &[("muser-node", "handoff", ALONE)],
    },
    Proof {
        name: "long-server",
        what: "requests that are made to keep the server busy, a minute of rough handling",
        runs: &[("muser-server", "hostile", ALONE), ("muser-server", "load", ALONE)],
    },
    Proof {
        name: "long-command",
        what: "a thousand prompts and no word of them where it does not belong",
        runs: &[("muser", "serve_restart", &[])],
    },
];

pub(super) fn run(context: &Context, proof: &Proof) -> Result<Outcome> {
    let mut all = Vec::new();
    for (krate, test, more) in proof.runs {
        let mut job = Job::cargo(context, &format!("{}-{krate}-{test}", proof.name));
        job.env("MUSER_TEST_LONG", "1");
        // As packages set them: what threads leave behind is not kept apart for each.
        job.env("MALLOC_ARENA_MAX", "2").env("MALLOC_MMAP_THRESHOLD_", "262144");
        job.args(["test", "--profile", &context.profile, "-p", krate]);
        match *test {
            "lib" => job.args(["--lib"]),
            name => job.args(["--test", name]),
        };
        job.args(["--", "--nocapture"]).args(*more);
        all.push(serde_json::json!({ "of": format!("{krate} {test}"), "said": job.run()?.tests() }));
    }
    Ok(Outcome::Passed(Value::Array(all)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_test_that_has_a_long_form_is_in_a_part() {
        let tree = crate::tree::read(&crate::root()).expect("the tree");
        let words = ["is_long(", "long_or(", concat!("\"MUSER_TEST", "_LONG\"")];
        let mut found = 0;
        for file in tree.files.iter().filter(|file| file.has_extension(&["rs"])) {
            let parts: Vec<&str> = file.name.split('/').collect();
            let ["crates", krate, place, rest @ ..] = parts.as_slice() else { continue };
            if *krate == "muser-testkit" || !words.iter().any(|word| file.text.contains(word)) {
                continue;
            }
            found += 1;
            let test = match (*place, rest.first()) {
                ("tests", Some(name)) => name.trim_end_matches(".rs"),
                _ => "lib",
            };
            let covered =
                PROOFS.iter().flat_map(|proof| proof.runs).any(|run| run.0 == *krate && run.1 == test);
            assert!(covered, "{}: no part runs {krate} {test}", file.name);
        }
        assert!(found > 20, "{found}");
    }
}
