//! What goes wrong, and how the command says so: exit codes, one line, a hint.

mod support;

use support::{Home, muse_tiny};

#[test]
fn wrong_usage_is_code_2() {
    let home = Home::new();
    let check = |args: &[&str], expected: &str| {
        let error = home.run(args).failure(2);
        assert!(error.contains(expected), "{args:?}: {error}");
    };
    check(&["run", "Hi", "--nonsense"], "--nonsense");
    check(&["nonsense"], "nonsense");
    check(&["run", "Hi", "--temp", "-1"], "must not be negative");
    check(&["run", "Hi", "--temp", "NaN"], "must be finite");
    check(&["run", "Hi", "--top-p", "1.5"], "from 0 to 1");
    check(&["run", "Hi", "--raw", "--system", "Be brief."], "cannot be used with");
    check(&["run", "Hi", "--ctx", "1000000"], "more than the model's context of 4096");
    check(&["run", "Hi", "--threads", "0"], "0 is not in 1..");
    check(&["synth", "--preset", "tiny", "--mix", "q9", "x.gguf"], "block type");
    check(&["run", "Hi", "--model", ""], "--model is empty");
}

#[test]
fn help_and_version_are_results() {
    let home = Home::new();
    for args in [&["--help"][..], &["run", "--help"], &["--version"]] {
        assert!(!home.run(args).success().is_empty(), "{args:?}");
    }
    assert!(home.run(["--help"]).stdout().contains("Exit codes:"));
}

#[test]
fn a_picture_that_is_not_there_is_named() {
    let error = Home::new().run(["run", "Hi", "--image", "x.png"]).failure(1);
    assert!(error.contains("x.png: No such file"), "{error}");
}

#[test]
fn a_model_that_is_not_there_is_named() {
    let home = Home::new();
    let ran = home.run(["run", "Hi", "--model", "no/such/file.gguf"]);
    assert!(ran.failure(1).contains("no/such/file.gguf"));
    assert!(ran.stderr().contains("hint: "), "{}", ran.stderr());
    assert!(
        home.run(["run", "Hi", "--model", "nothing-by-this-name"])
            .failure(1)
            .contains("nothing-by-this-name")
    );
}

#[test]
fn broken_models_give_one_line() {
    let home = Home::new();
    let good = std::fs::read(muse_tiny()).expect("the bundled model");
    let mut swapped = good.clone();
    swapped[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
    let cases = [
        ("empty.gguf", Vec::new()),
        ("text.gguf", b"this is not a model".to_vec()),
        ("cut-header.gguf", good[..1000].to_vec()),
        ("cut-data.gguf", good[..good.len() / 2].to_vec()),
        ("counts.gguf", swapped),
    ];
    for (name, bytes) in cases {
        let path = home.file(name, bytes);
        for command in [&["run", "Hi", "--model"][..], &["inspect"], &["tokenize", "Hi", "--model"]] {
            let mut args: Vec<_> = command.iter().map(ToString::to_string).collect();
            args.push(path.display().to_string());
            let ran = home.run(&args);
            assert!(ran.failure(1).contains(name), "{args:?}: {}", ran.stderr());
        }
    }
}

#[test]
fn a_prompt_longer_than_the_context_says_both_figures() {
    let home = Home::new();
    let long = "word ".repeat(500);
    let error = home.run(["run", &long, "--ctx", "128"]).failure(1);
    assert!(error.contains("128"), "{error}");
    let full = home.run_json(&["--raw", "Once upon a time", "--ctx", "32", "--temp", "0"]);
    assert_eq!(full["finish_reason"], "context");
    let total = full["prompt_tokens"].as_u64().expect("a count")
        + full["token_ids"].as_array().expect("ids").len() as u64;
    assert!((31..=33).contains(&total), "{full}");
}

#[test]
fn ids_outside_the_vocabulary_are_refused() {
    let home = Home::new();
    assert!(home.run(["detokenize", "4096"]).failure(1).contains("4095"));
    assert!(home.run(["detokenize", "x"]).failure(1).contains("\"x\""));
    let ids = home.file("ids.json", "[1, 4096]").display().to_string();
    let out = home.path("out.npy").display().to_string();
    assert!(home.run(["logits", "--ids", &ids, "--out", &out]).failure(1).contains("4096"));
    let none = home.file("none.json", "[]").display().to_string();
    assert!(home.run(["logits", "--ids", &none, "--out", &out]).failure(2).contains("no ids"));
}

#[test]
fn bytes_that_are_no_text_are_refused_where_they_are() {
    let home = Home::new();
    let error = home.run_with_input(["run"], b"ab\xff").failure(1);
    assert!(error.contains("0xff at 2"), "{error}");
}
