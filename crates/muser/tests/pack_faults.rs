//! Stores that are foreign, tampered with, full, read-only, too small or gone, met by the real command and the real server:
//! each is refused in words at the start or costs the time of an ordinary prompt, and the text is the same.

mod support;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::served::Served;
use support::{Home, muse_tiny};

/// Some 800 tokens.
fn story(about: &str) -> String {
    let sentences: Vec<String> =
        (0..60).map(|i| format!("The {about} saw {i} birds in the tree and went on. ")).collect();
    sentences.concat()
}

fn number(answer: &Value, name: &str) -> u64 {
    answer[name].as_u64().unwrap_or_else(|| panic!("{name} in {answer}"))
}

fn complete(served: &Served, prompt: &str) -> (String, u64) {
    let answer = served
        .post("/v1/completions", &json!({"prompt": prompt, "temperature": 0, "max_tokens": 12, "seed": 1}));
    let details = &answer["usage"]["prompt_tokens_details"];
    (answer["choices"][0]["text"].as_str().expect("text").to_owned(), number(details, "cached_tokens"))
}

fn wait_for_packs(served: &Served) {
    let begun = Instant::now();
    while served.metric("muser:packs", "") < 1.0 {
        assert!(begun.elapsed() < Duration::from_mins(1), "nothing was published");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Every file below a folder with its bytes, by path.
fn files(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            found.extend(files(&path));
        } else {
            let bytes = std::fs::read(&path).expect("readable");
            found.push((path, bytes));
        }
    }
    found.sort();
    found
}

/// A home whose store has been filled by a server that was killed; what the server said.
fn filled() -> (Home, String) {
    let home = Home::new();
    let first = Served::start(&home, &[]);
    let (text, cached) = complete(&first, &story("fox"));
    assert_eq!(cached, 0);
    wait_for_packs(&first);
    first.kill();
    (home, text)
}

#[test]
fn a_server_with_a_foreign_key_file_says_so_and_ends() {
    let (home, text) = filled();
    let other = home.path("other.key");
    let other = other.to_str().expect("a path");
    let refused = home.run(["serve", "--port", "0", "--packs", "--pack-key-file", other]);
    let error = refused.failure(1);
    assert!(error.contains("foreign key"), "{error}");
    let again = Served::start(&home, &[]);
    let (same, cached) = complete(&again, &story("fox"));
    assert!(same == text && cached > 256, "nothing was harmed");
}

#[test]
fn a_pack_of_another_model_is_not_found() {
    let home = Home::new();
    let ours = std::fs::read(muse_tiny()).expect("the bundled model");
    let mut others = ours.clone();
    // One bit of the last tensor's values.
    let last = others.len() - 100;
    others[last] ^= 1;
    let (ours, others) = (home.file("ours.gguf", ours), home.file("others.gguf", others));
    let prompt = story("fox");
    let run = |model: &Path, more: &[&str]| {
        let model = model.to_str().expect("a path");
        home.run_json(&[&[&prompt, "--raw", "--temp", "0", "-n", "8", "--model", model], more].concat())
    };
    run(&ours, &["--pack"]);
    let other = run(&others, &["--pack"]);
    assert_eq!(number(&other, "cached_tokens"), 0);
    assert_eq!(other["token_ids"], run(&others, &[])["token_ids"]);
    for model in [&ours, &others] {
        let again = run(model, &["--pack", "--pack-read-only"]);
        assert_eq!(number(&again, "restored_tokens"), number(&again, "prompt_tokens") - 1);
    }
}

#[test]
fn segments_in_each_others_places_are_computed_around() {
    let (home, text) = filled();
    let segments = files(&home.path("packs").join("segments"));
    // Each gets the bytes of another one of its size.
    let mut swapped = 0;
    for (path, bytes) in &segments {
        let other = segments.iter().find(|(_, other)| other.len() == bytes.len() && other != bytes);
        if let Some((_, other)) = other {
            std::fs::write(path, other).expect("writable");
            swapped += 1;
        }
    }
    assert!(swapped >= 4, "{swapped} of {}", segments.len());
    let served = Served::start(&home, &[]);
    assert_eq!(complete(&served, &story("fox")), (text, 0));
    assert!(served.metric("muser:pack_refusals_total", "\"swapped\"") >= 1.0);
    assert!(served.metric("muser:restores_failed_total", "\"invalid\"") >= 1.0);
}

#[test]
fn a_deleted_pack_that_is_put_back_is_replayed_and_not_used() {
    let (home, text) = filled();
    let kept: Vec<_> =
        ["packs", "segments"].iter().flat_map(|area| files(&home.path("packs").join(area))).collect();
    let second = Served::start(&home, &[]);
    let (_, packs) = second.ask("GET", "/v1/packs", &Value::Null);
    for pack in packs["data"].as_array().expect("a list") {
        let path = format!("/v1/packs/{}", pack["id"].as_str().expect("a name"));
        assert_eq!(second.ask("DELETE", &path, &Value::Null).0, 200);
    }
    assert_eq!(files(&home.path("packs").join("segments")), [], "deleting erases");
    second.kill();
    for (path, bytes) in &kept {
        std::fs::write(path, bytes).expect("writable");
    }
    let third = Served::start(&home, &[]);
    assert_eq!(complete(&third, &story("fox")), (text, 0));
    assert!(third.metric("muser:pack_refusals_total", "\"replayed\"") >= 1.0);
}

#[test]
fn a_store_that_vanishes_under_a_server_costs_time_only() {
    let (home, text) = filled();
    let served = Served::start(&home, &[]);
    std::fs::remove_dir_all(home.path("packs")).expect("removed");
    assert_eq!(complete(&served, &story("fox")), (text.clone(), 0));
    // Memory goes on as ever, and what cannot be kept is not.
    let (again, cached) = complete(&served, &story("fox"));
    assert!(again == text && cached > 256, "{cached}");
    complete(&served, &story("hen"));
    served.kill();
    let next = Served::start(&home, &[]);
    assert_eq!(complete(&next, &story("fox")), (text, 0));
}

#[test]
fn a_budget_smaller_than_a_pack_keeps_nothing() {
    let home = Home::new();
    let prompt = story("fox");
    let args = [prompt.as_str(), "--raw", "--temp", "0", "-n", "8"];
    let small = [&args[..], &["--pack", "--pack-mib", "1"]].concat();
    let expected = home.run_json(&args);
    for _ in 0..2 {
        let answer = home.run_json(&small);
        assert_eq!((&answer["token_ids"], number(&answer, "cached_tokens")), (&expected["token_ids"], 0));
    }
    assert_eq!(home.run(["pack", "ls", "--json"]).success(), "[]\n");
    let said = home.run([&["run"], &small[..]].concat());
    assert!(said.stderr().contains("something was not kept"), "{}", said.stderr());
    said.success();
}

/// Limits and mounts that only Linux has.
#[cfg(target_os = "linux")]
mod linux {
    use super::*;

    /// May this user mount in a namespace of his own?
    fn can_mount(home: &Home) -> bool {
        let tried =
            home.run_behind("mount -t tmpfs tmpfs \"$MUSER_HOME\"; exec \"$@\"", true, &["--version"]);
        if tried.code() != Some(0) {
            muser_testkit::skip(muser_testkit::Need::Mounts, tried.stderr());
        }
        tried.code() == Some(0)
    }

    fn run(home: &Home, script: &str, in_namespace: bool, prompt: &str) -> (Value, String) {
        let args = ["run", "--json", prompt, "--raw", "--temp", "0", "-n", "8", "--pack"];
        let ran = home.run_behind(&format!("{script}; exec \"$@\""), in_namespace, &args);
        let said = ran.stderr();
        (serde_json::from_str(&ran.success()).expect("an object"), said)
    }

    fn check_full(script: &str, in_namespace: bool) {
        let home = Home::new();
        let prompt = story("fox");
        let expected = home.run_json(&[&prompt, "--raw", "--temp", "0", "-n", "8"]);
        std::fs::create_dir_all(home.path("packs")).expect("a folder");
        let (answer, said) = run(&home, script, in_namespace, &prompt);
        assert_eq!(answer["token_ids"], expected["token_ids"]);
        assert!(said.contains("something was not kept"), "{said}");
    }

    #[test]
    fn a_file_that_may_not_grow_is_a_full_store() {
        // 256 KiB, less than any segment.
        check_full("trap '' XFSZ; ulimit -f 512", false);
    }

    #[test]
    fn a_disk_that_is_full_is_a_full_store() {
        if can_mount(&Home::new()) {
            check_full("mount -t tmpfs -o size=2m tmpfs \"$MUSER_HOME/packs\"", true);
        }
    }

    #[test]
    fn a_read_only_folder_is_read() {
        if !can_mount(&Home::new()) {
            return;
        }
        let read_only = "mount --bind \"$MUSER_HOME/packs\" \"$MUSER_HOME/packs\"; mount -o remount,bind,ro \"$MUSER_HOME/packs\"";
        let home = Home::new();
        let (first, _) = run(&home, "true", false, &story("fox"));
        let before = files(&home.path("packs"));
        let (second, _) = run(&home, read_only, true, &story("fox"));
        assert_eq!(second["token_ids"], first["token_ids"]);
        assert_eq!(number(&second, "restored_tokens"), number(&second, "prompt_tokens") - 1);
        // Another prompt is answered and cannot be kept.
        let (other, said) = run(&home, read_only, true, &story("hen"));
        assert_eq!(number(&other, "cached_tokens"), 0);
        assert!(said.contains("something was not kept"), "{said}");
        assert_eq!(files(&home.path("packs")), before);
    }
}
