//! `muser run` with the bundled model.

mod support;

use std::io::Read as _;

use serde_json::{Value, json};
use support::{Home, muse_tiny};

const FOX: &str = "Write a short story about a fox.";

fn text(answer: &Value) -> &str {
    answer["text"].as_str().expect("text is a string")
}

fn ids(answer: &Value) -> Vec<u64> {
    answer["token_ids"].as_array().expect("an array").iter().map(|id| id.as_u64().expect("an id")).collect()
}

#[test]
fn one_json_object_with_every_field() {
    let answer = Home::new().run_json(&[FOX, "--temp", "0", "-n", "24"]);
    assert_eq!(ids(&answer).len(), 24);
    assert!(!text(&answer).is_empty());
    assert!(!text(&answer).contains("<|") && !text(&answer).contains("to=user"), "{answer}");
    assert_eq!(answer["reasoning"], "");
    assert_eq!(answer["tool_calls"], json!([]));
    assert_eq!(answer["finish_reason"], "length");
    assert_eq!(answer["cached_tokens"], 0);
    assert!(answer["prompt_tokens"].as_u64() > Some(8), "{answer}");
    assert!(answer["seed"].is_u64());
    assert!(answer["tokens_per_target_pass"].as_f64() >= Some(1.0), "{answer}");
    for name in ["load_ms", "prefill_ms", "decode_ms", "prompt_tok_s", "tok_s", "ttft_ms"] {
        assert!(answer["timings"][name].as_f64() > Some(0.0), "{name}: {answer}");
    }
}

#[test]
fn temperature_zero_repeats_itself_and_streams_the_same_text() {
    let home = Home::new();
    let args = [FOX, "--temp", "0", "-n", "32"];
    let first = home.run_json(&args);
    let second = home.run_json(&args);
    assert_eq!(ids(&first), ids(&second));
    let streamed = home.run([&["run"], &args[..]].concat()).success();
    assert_eq!(streamed, format!("{}\n", text(&first)));
    let tiny_by_name = home.run_json(&[FOX, "--temp", "0", "-n", "32", "--model", "muse-tiny"]);
    let tiny_by_path =
        home.run_json(&[FOX, "--temp", "0", "-n", "32", "--model", &muse_tiny().display().to_string()]);
    assert_eq!(ids(&first), ids(&tiny_by_name));
    assert_eq!(ids(&first), ids(&tiny_by_path));
}

#[test]
fn a_draft_changes_no_token_greedy_or_sampled() {
    let home = Home::new();
    for sampling in [["--temp", "0"], ["--seed", "11"]] {
        let run = |draft: &[&str]| home.run_json(&[&[FOX, "-n", "64"], &sampling[..], draft].concat());
        let plain = run(&["--draft", "off"]);
        assert!(plain["draft"].is_null() && plain["tokens_per_target_pass"] == 1.0, "{plain}");
        for length in ["auto", "1", "7"] {
            let drafted = run(&["--draft-len", length]);
            assert_eq!(ids(&drafted), ids(&plain), "{sampling:?} {length}");
            assert!(drafted["draft"]["model"].is_string(), "{drafted}");
            if length != "auto" {
                assert!(drafted["draft"]["accepted"].as_u64() > Some(0), "{drafted}");
                assert!(drafted["tokens_per_target_pass"].as_f64() > Some(1.1), "{drafted}");
                let places = drafted["draft"]["acceptance_by_position"].as_array().expect("an array");
                assert_eq!(places.len().to_string(), length);
            }
        }
    }
    let wrong = home.run(["run", FOX, "--draft", &muse_tiny().display().to_string()]).failure(1);
    assert!(wrong.contains("muse-tiny-Q4_K_M.gguf"), "{wrong}");
}

#[test]
fn the_number_of_threads_changes_nothing() {
    let home = Home::new();
    let run = |threads| ids(&home.run_json(&[FOX, "--temp", "0", "-n", "32", "--threads", threads]));
    assert_eq!(run("1"), run("3"));
}

#[test]
fn the_prompt_may_come_from_a_pipe() {
    let home = Home::new();
    let by_argument = home.run_json(&["Hello there", "--temp", "0", "-n", "12"]);
    for args in [
        &["run", "--json", "--temp", "0", "-n", "12"][..],
        &["run", "-", "--json", "--temp", "0", "-n", "12"],
    ] {
        let piped = home.run_with_input(args, "Hello there\n").success();
        let piped: Value = serde_json::from_str(&piped).expect("one JSON object");
        assert_eq!(ids(&by_argument), ids(&piped));
        assert_eq!(by_argument["prompt_tokens"], piped["prompt_tokens"]);
    }
}

#[test]
fn the_bundled_model_and_the_device_are_announced_in_a_line_each() {
    let home = Home::new();
    let stderr = |args: &[&str]| home.run([&["run", "Hi", "-n", "1"], args].concat()).stderr();
    let said = stderr(&[]);
    let lines: Vec<_> = said.lines().collect();
    assert!(lines.len() == 2 && lines[0].contains("bundled Muse Tiny"), "{said}");
    assert!(lines[1].starts_with("computing on "), "{said}");
    assert_eq!(stderr(&["--quiet"]), "");
    assert_eq!(stderr(&["--model", "muse-tiny"]), format!("{}\n", lines[1]), "which device, and no more");
    assert_eq!(stderr(&["--model", "muse-tiny", "--backend", "cpu"]), "", "who has chosen is not told");
}

#[test]
fn max_tokens_is_exact() {
    let home = Home::new();
    for n in [0, 1, 2] {
        let answer = home.run_json(&["--raw", "a", "-n", &n.to_string()]);
        assert_eq!(ids(&answer).len(), n, "{answer}");
        assert_eq!(answer["finish_reason"], "length");
        // These tokens are the header ` to=user`, of which nothing belongs to the answer.
        let chat = home.run_json(&[FOX, "-n", &n.to_string(), "--temp", "0"]);
        assert_eq!((ids(&chat).len(), text(&chat)), (n, ""), "{chat}");
    }
}

#[test]
fn a_seed_repeats_an_answer_and_another_gives_another() {
    let home = Home::new();
    let with = |seed: &str| home.run_json(&[FOX, "-n", "24", "--seed", seed]);
    let first = with("7");
    assert_eq!(first["seed"], 7);
    assert_eq!(ids(&first), ids(&with("7")));
    assert_ne!(ids(&first), ids(&with("8")));
    // A seed that was drawn is reported, and repeats its answer too.
    let drawn = home.run_json(&[FOX, "-n", "24"]);
    assert_eq!(ids(&drawn), ids(&with(&drawn["seed"].to_string())));
}

#[test]
fn sampling_filters_reach_the_sampler() {
    let home = Home::new();
    let greedy = ids(&home.run_json(&[FOX, "-n", "16", "--temp", "0"]));
    for filter in [&["--top-k", "1"][..], &["--top-p", "0"], &["--min-p", "1"], &["--temp", "0.0000001"]] {
        assert_eq!(greedy, ids(&home.run_json(&[&[FOX, "-n", "16"], filter].concat())), "{filter:?}");
    }
    let penalised = ids(&home.run_json(&[FOX, "-n", "64", "--temp", "0", "--frequency-penalty", "100"]));
    let mut unique = penalised.clone();
    unique.sort_unstable();
    unique.dedup();
    assert_eq!(unique.len(), penalised.len(), "a penalty of 100 per use leaves no token twice");
}

#[test]
fn a_stop_string_ends_the_answer_before_it() {
    let home = Home::new();
    let whole = home.run_json(&[FOX, "--temp", "0", "-n", "40"]);
    let stop: String = text(&whole).chars().skip(20).take(9).collect();
    let before = &text(&whole)[..text(&whole).find(&stop).expect("it is part of the text")];
    let cut = home.run_json(&[FOX, "--temp", "0", "-n", "40", "--stop", "never to be seen", "--stop", &stop]);
    assert_eq!(text(&cut), before);
    assert_eq!(cut["finish_reason"], "stop");
    assert!(ids(&cut).len() < ids(&whole).len());
}

#[test]
fn reasoning_is_apart_from_the_answer() {
    let home = Home::new();
    let args = [FOX, "--temp", "0", "-n", "120"];
    let thinking = home.run_json(&[&args[..], &["--reasoning", "low"]].concat());
    let thought = thinking["reasoning"].as_str().expect("a string");
    assert!(!thought.is_empty(), "{thinking}");
    assert!(!text(&thinking).contains(thought));
    let streamed = home.run([&["run"], &args[..], &["--reasoning", "low"]].concat());
    assert!(streamed.success().starts_with(text(&thinking)));
    assert!(streamed.stderr().contains(thought));
    let direct = home.run_json(&[&args[..], &["--reasoning", "none"]].concat());
    assert_eq!(direct["reasoning"], "");
    assert!(!text(&direct).is_empty());
}

#[test]
fn tools_are_called_with_arguments() {
    let home = Home::new();
    let tools = json!([{
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather.",
            "parameters": { "type": "object", "properties": { "city": { "type": "string" } }, "required": ["city"] },
        },
    }]);
    let file = home.file("tools.json", tools.to_string());
    let file = file.display().to_string();
    let answer =
        home.run_json(&["What is the weather in Paris?", "--tools", &file, "--temp", "0", "-n", "200"]);
    assert_eq!(answer["finish_reason"], "tool_calls", "{answer}");
    assert_eq!(answer["tool_calls"][0]["name"], "get_weather");
    assert!(answer["tool_calls"][0]["arguments"]["city"].is_string(), "{answer}");
    let shown = home
        .run(["run", "What is the weather in Paris?", "--tools", &file, "--temp", "0", "-n", "200"])
        .success();
    assert!(shown.contains("get_weather({\"city\":"), "{shown}");
    for (content, why) in [("{", "EOF"), ("[1]", "tools[0]"), ("7", "array of tools")] {
        let broken = home.file("broken.json", content).display().to_string();
        let error = home.run(["run", "Hi", "--tools", &broken]).failure(1);
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn a_raw_prompt_is_continued_and_may_hold_markers() {
    let home = Home::new();
    let plain = home.run_json(&["--raw", "Once upon a time", "--temp", "0", "-n", "12"]);
    // BOS and four words.
    assert_eq!(plain["prompt_tokens"], 5);
    let marked = "<|start|>user<|message|>Hello there<|eot|><|start|>assistant";
    let by_hand = home.run_json(&["--raw", marked, "--temp", "0", "-n", "12"]);
    let by_template = home.run_json(&["Hello there", "--temp", "0", "-n", "12"]);
    assert_eq!(ids(&by_hand), ids(&by_template));
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let home = Home::new();
    let mut child =
        home.command(["run", FOX, "-n", "400", "--temp", "0"]).spawn().expect("the binary starts");
    let mut stdout = child.stdout.take().expect("a pipe");
    let mut byte = [0];
    stdout.read_exact(&mut byte).expect("the first byte of the answer");
    drop(stdout);
    let ran = support::Ran(child.wait_with_output().expect("the binary ends"));
    assert_eq!(ran.code(), Some(0), "{}", ran.stderr());
    assert!(!ran.stderr().contains("error"), "{}", ran.stderr());
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_with_130_and_keeps_what_was_said() {
    let home = Home::new();
    let mut child = home
        .command(["run", "--json", FOX, "--temp", "0", "--stop", "never to be seen", "--backend", "scalar"])
        .spawn()
        .expect("the binary starts");
    std::thread::sleep(std::time::Duration::from_millis(1200));
    let killed = std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status();
    assert!(killed.expect("kill is there").success());
    let mut text = String::new();
    child.stdout.take().expect("a pipe").read_to_string(&mut text).expect("UTF-8");
    assert_eq!(child.wait().expect("the binary ends").code(), Some(130));
    let answer: Value = serde_json::from_str(&text).expect("one JSON object");
    assert_eq!(answer["finish_reason"], "interrupted", "{answer}");
}

/// Services and containers have no home, an empty one, or one that cannot be written to.
#[test]
fn without_a_home_it_runs_all_the_same() {
    let home = Home::new();
    let no_folder = home.file("a file", "");
    for value in [None, Some(""), Some("/proc/nowhere"), no_folder.to_str()] {
        let mut command = home.command(["run", "--json", FOX, "-n", "4"]);
        command.env_remove("MUSER_HOME").env_remove("XDG_CACHE_HOME");
        match value {
            Some(value) => command.env("HOME", value),
            None => command.env_remove("HOME"),
        };
        let out = command.output().expect("the binary starts");
        assert!(out.status.success(), "{value:?}: {}", String::from_utf8_lossy(&out.stderr));
        let answer: Value = serde_json::from_slice(&out.stdout).expect("one JSON object");
        assert_eq!(ids(&answer).len(), 4, "{value:?}");
    }
}
