//! `muser run --pack`: what one process read and wrote, the next one does not read again.

mod support;

use std::path::{Path, PathBuf};

use serde_json::Value;
use support::Home;

/// Some hundred tokens.
fn prompt() -> String {
    let sentences: Vec<String> =
        (0..60).map(|i| format!("The fox saw {i} birds in the tree and went on. ")).collect();
    sentences.concat()
}

fn number(answer: &Value, name: &str) -> u64 {
    answer[name].as_u64().expect("a number")
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).expect("the folder is there") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            found.extend(files(&path));
        } else {
            found.push(path);
        }
    }
    found
}

#[test]
fn a_second_process_restores_what_the_first_one_computed() {
    let home = Home::new();
    let prompt = prompt();
    let args = [prompt.as_str(), "--raw", "--temp", "0", "-n", "16"];
    let with_packs = [&args[..], &["--pack"]].concat();
    let plain = home.run_json(&args);
    let tokens = number(&plain, "prompt_tokens");
    assert!(tokens > 600, "{plain}");
    assert_eq!((number(&plain, "cached_tokens"), number(&plain, "restored_tokens")), (0, 0));
    assert!(!home.path("packs").exists(), "without the flag nothing is kept");

    let first = home.run_json(&with_packs);
    assert_eq!(first["token_ids"], plain["token_ids"]);
    assert_eq!(number(&first, "cached_tokens"), 0);
    let second = home.run_json(&with_packs);
    assert_eq!(second["token_ids"], plain["token_ids"]);
    // All but the row that must be computed to have logits.
    assert_eq!(number(&second, "cached_tokens"), tokens - 1);
    assert_eq!(number(&second, "restored_tokens"), tokens - 1);
    assert!(second["timings"]["restore_ms"].as_f64() > Some(0.0), "{second}");

    // The same beginning, another end.
    let other = format!("{}Then it slept.", &prompt[..prompt.len() - 100]);
    let other_args = [other.as_str(), "--raw", "--temp", "0", "-n", "16"];
    let expected = home.run_json(&other_args);
    let restored = home.run_json(&[&other_args[..], &["--pack", "--pack-read-only"]].concat());
    assert_eq!(restored["token_ids"], expected["token_ids"]);
    assert!(number(&restored, "cached_tokens") >= 512, "{restored}");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt as _;
        let key = std::fs::metadata(home.path("keys/packs.key")).expect("the key file is there");
        assert_eq!(key.permissions().mode() & 0o777, 0o600);
    }
}

#[test]
fn damaged_packs_are_computed_around() {
    let home = Home::new();
    let prompt = prompt();
    let folder = home.path("elsewhere");
    let flag = format!("--pack={}", folder.display());
    let args = [prompt.as_str(), "--raw", "--temp", "0", "-n", "8", &flag];
    let first = home.run_json(&args);
    let mut damaged = 0;
    for path in files(&folder) {
        let mut bytes = std::fs::read(&path).expect("a file of the store");
        if bytes.len() > 100_000 {
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            std::fs::write(&path, bytes).expect("a file of the store");
            damaged += 1;
        }
    }
    assert!(damaged >= 4, "{damaged} segments");
    let second = home.run_json(&args);
    assert_eq!(second["token_ids"], first["token_ids"]);
    assert_eq!(number(&second, "cached_tokens"), 0);
    // Each process puts the damage aside that it meets and publishes those segments anew.
    let healed = (0..8).any(|_| {
        let again = home.run_json(&args);
        assert_eq!(again["token_ids"], first["token_ids"]);
        number(&again, "cached_tokens") > 600
    });
    assert!(healed);
}

#[test]
fn a_store_of_another_key_is_refused_before_anything_is_computed() {
    let home = Home::new();
    let args = ["run", "--raw", "x", "-n", "1", "--pack"];
    home.run(args).success();
    let other = home.path("other.key");
    let flag = other.display().to_string();
    let refused = home.run([&args[..], &["--pack-key-file", &flag]].concat());
    let error = refused.failure(1);
    assert!(error.contains("key"), "{error}");
    // A file in the place of the folder.
    let file = home.file("file", "x");
    home.run(["run", "--raw", "x", "-n", "1", &format!("--pack={}", file.display())]).failure(1);
}

/// What a draft has computed lies in the same blocks: packs are its own.
#[test]
fn a_pack_belongs_to_the_draft_it_was_made_with() {
    let home = Home::new();
    let prompt = prompt();
    let args = [prompt.as_str(), "--raw", "--temp", "0", "-n", "8", "--pack"];
    let draft = muser_testkit::muse_tiny_draft();
    let draft = draft.to_str().expect("a path");
    let with_draft = [&args[..], &["--draft", draft]].concat();
    let without = [&args[..], &["--draft", "off"]].concat();
    let first = home.run_json(&with_draft);
    let shown: Vec<Value> =
        serde_json::from_str(&home.run(["pack", "ls", "--json"]).success()).expect("an array");
    let id = shown[0]["id"].as_str().expect("a name");
    let shown = home.run(["pack", "show", "--json", id]).success();
    let shown: Value = serde_json::from_str(&shown).expect("an object");
    let named = shown["computed_with"]["draft model"].as_str().expect("text");
    assert!(named.len() == 16 && named != "none", "{shown}");
    let other = home.run_json(&without);
    assert_eq!((number(&other, "cached_tokens"), &other["token_ids"]), (0, &first["token_ids"]));
    for args in [with_draft, without] {
        let again = home.run_json(&args);
        assert_eq!(number(&again, "restored_tokens"), number(&again, "prompt_tokens") - 1, "{again}");
        assert_eq!(again["token_ids"], first["token_ids"]);
    }
}
