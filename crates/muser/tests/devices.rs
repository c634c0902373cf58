//! `--devices` and `muser fit`: layers shared among devices, which never shows in a text, and plans for machines that are not here.
//!
//! `cpu:0,cpu:1` are two executors on one processor.

mod support;

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;

use serde_json::Value;
use support::{Home, muse_tiny, read_npy};

/// Some hundred tokens.
fn prompt() -> String {
    (0..60).fold(String::new(), |text, i| text + &format!("The fox saw {i} birds in the tree and went on. "))
}

fn number(answer: &Value, name: &str) -> u64 {
    answer[name].as_u64().expect("a number")
}

#[test]
fn the_text_does_not_change_with_the_devices() {
    let home = Home::new();
    let args = ["Tell me of a fox.", "--temp", "0", "-n", "24", "--threads", "1"];
    for draft in [&["--draft", "off"][..], &["--draft", "auto"]] {
        let with = |more: &[&str]| home.run_json(&[&args[..], draft, more].concat())["token_ids"].clone();
        let expected = with(&["--backend", "cpu"]);
        assert!(expected.as_array().is_some_and(|ids| ids.len() > 4), "{expected}");
        for devices in ["cpu", "cpu:0=3,cpu:1", "cpu:1=1,cpu:0=7", "cpu:0,cpu:1,cpu:2"] {
            assert_eq!(with(&["--devices", devices]), expected, "{devices}, {draft:?}");
        }
    }
}

#[test]
fn logits_are_the_same_at_every_cut() {
    let home = Home::new();
    let ids = home.file("ids.json", format!("{:?}", (0..40).map(|i| i * 37 % 4000).collect::<Vec<u32>>()));
    let logits = |name: &str, more: &[&str]| {
        let out = home.path(name);
        let (ids, out) = (ids.to_str().expect("a path"), out.to_str().expect("a path"));
        let args = ["logits", "--ids", ids, "--out", out, "--chunk", "16", "--threads", "1"];
        home.run([&args[..], more].concat()).success();
        read_npy(&home.path(name)).2.iter().map(|value| value.to_bits()).collect::<Vec<_>>()
    };
    let expected = logits("whole.npy", &["--backend", "cpu"]);
    for first in 1..8 {
        let devices = format!("cpu:0={first},cpu:1={}", 8 - first);
        assert!(logits("cut.npy", &["--devices", &devices]) == expected, "{devices}");
    }
}

#[test]
fn packs_of_one_split_are_read_under_another() {
    let home = Home::new();
    let prompt = prompt();
    let args = [prompt.as_str(), "--raw", "--temp", "0", "-n", "8", "--pack", "--threads", "1"];
    let with = |devices: &str| home.run_json(&[&args[..], &["--devices", devices]].concat());
    let first = with("cpu:0=2,cpu:1=6");
    assert_eq!(number(&first, "cached_tokens"), 0);
    for devices in ["cpu:0=5,cpu:1=3", "cpu", "cpu:0=1,cpu:1=1,cpu:2=6"] {
        let next = with(devices);
        assert_eq!(next["token_ids"], first["token_ids"], "{devices}");
        assert_eq!(number(&next, "restored_tokens"), number(&next, "prompt_tokens") - 1, "{devices}: {next}");
    }
}

#[test]
fn the_plan_is_said_in_three_lines() {
    let home = Home::new();
    let ran = home.run(["run", "Hi", "-n", "1", "--threads", "1", "--devices", "cpu:0=5,cpu:1"]);
    ran.success();
    let said = ran.stderr();
    for part in ["layers 0 to 4 on cpu (", "layers 5 to 7 on cpu:1 (", "expected: ", "what would change it: "]
    {
        assert!(said.contains(part), "{part}: {said}");
    }
    let ran = home.run(["run", "Hi", "-n", "1", "--threads", "1", "--devices", "auto", "--quiet"]);
    ran.success();
    assert_eq!(ran.stderr(), "", "--quiet");
}

#[test]
fn devices_that_cannot_be_are_wrong_usage() {
    let home = Home::new();
    let check = |args: &[&str], expected: &str| {
        let error = home.run([&["run", "Hi", "-n", "1"], args].concat()).failure(2);
        assert!(error.contains(expected), "{args:?}: {error}");
    };
    check(&["--devices", "cpu,cpu"], "cpu is there twice");
    check(&["--devices", "rocm:0,cpu"], "`rocm:0`");
    check(&["--devices", ""], "found nothing");
    check(&["--devices", "cpu:0=0,cpu:1"], "expected a number from 1, found `0`");
    check(&["--devices", "cpu:0=4,cpu:1=5"], "9 layers are shared out, the model has 8");
    check(&["--devices", "cpu=9"], "9 layers are shared out, the model has 8");
    check(&["--devices", "cpu:0=8,cpu:1"], "8 layers and one for each of 1 other");
    check(&["--devices", "cuda:63"], "--devices: cuda:63: ");
    check(&["--devices", "wgpu:63,cpu"], "--devices: wgpu:63: ");
    check(&["--devices", "cpu", "--backend", "cpu"], "cannot be used with");
    check(&["--devices", "cpu", "--kv", "f16"], "--kv f16");
}

fn fit(home: &Home, args: &[&str]) -> Value {
    let ran = home.run([&["fit", "--json"], args].concat());
    serde_json::from_str(&ran.success()).expect("one JSON object")
}

#[test]
fn plans_for_machines_that_are_not_here() {
    let home = Home::new();
    let layers = |args: &[&str], device: &str| {
        let plan = fit(&home, args);
        let parts = plan["parts"].as_array().expect("parts").clone();
        let total: u64 = parts.iter().map(|part| number(part, "layers")).sum();
        assert_eq!(total, 52, "the released model where none is pulled: {plan}");
        parts.iter().filter(|part| part["device"] == device).map(|part| number(part, "layers")).sum::<u64>()
    };
    let on_card: Vec<u64> = ["8g", "12g", "16g", "24g", "141g"]
        .iter()
        .map(|size| layers(&["--memory", size, "--ram", "32g"], "cuda:0"))
        .collect();
    assert!(on_card.is_sorted() && on_card[0] > 10 && on_card[4] == 52, "{on_card:?}");
    assert_eq!(layers(&["--memory", "none", "--ram", "32g"], "cpu"), 52);
    assert_eq!(layers(&["--card", "RTX 4090"], "cuda:0"), 52);
    let rate = |args: &[&str]| fit(&home, args)["tok_s_one"].as_f64().expect("a rate");
    assert!(rate(&["--memory", "24g", "--read", "2000"]) > 1.5 * rate(&["--memory", "24g", "--read", "900"]));
    assert!(rate(&["--ram", "64g", "--ram-read", "200"]) > 2.0 * rate(&["--ram", "64g", "--ram-read", "60"]));
    let little = fit(&home, &["--memory", "none", "--ram", "12g"]);
    assert!(number(&little, "from_file_bytes") > 5_000_000_000 && little["tok_s_one"].as_f64() < Some(0.5));
    // A file is read by its header; this machine is meant where no other is named.
    let tiny = muse_tiny();
    let here = home.run(["fit", tiny.to_str().expect("a path")]).success();
    assert!(here.contains("layers 0 to 7 on ") && here.lines().count() == 4, "{here}");
}

#[test]
fn sizes_that_are_none_and_plans_that_do_not_fit_are_wrong_usage() {
    let home = Home::new();
    let check = |args: &[&str], expected: &str| {
        let error = home.run([&["fit"], args].concat()).failure(2);
        assert!(error.contains(expected), "{args:?}: {error}");
    };
    check(&["--memory", "12"], "such as 12g or 512m, found `12`");
    check(&["--ram=-4g"], "found `-4g`");
    check(&["--memory", "0g"], "found `0g`");
    check(&["--ram-read", "NaN"], "found `NaN`");
    check(&["--card", "Voodoo 2"], "no known card");
    check(&["--card", "RTX 4090", "--memory", "none"], "one of the two");
    check(&["--read", "900"], "--card or --memory");
    check(&["--memory", "24g", "--ctx", "1000000"], "more than the model's context of 131072");
    check(&["--memory", "24g", "--kv", "f16"], "have 16 and 8");
    // Keys and values alone are too much for both, with figures and what would fit.
    let args = ["--memory", "8g", "--ram", "4g", "--ctx", "131072", "--parallel", "64"];
    check(&args, "are missing");
    check(&args, "would fit, at ");
}

/// The address of a server that has one file and answers ranges from its beginning.
fn ranges(content: Vec<u8>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { continue };
            let mut reader = BufReader::new(stream.try_clone().expect("a copy"));
            let mut end = content.len();
            loop {
                let mut line = String::new();
                if reader.read_line(&mut line).is_err() || line.trim().is_empty() {
                    break;
                }
                if let Some(last) = line.to_lowercase().trim().strip_prefix("range: bytes=0-") {
                    end = end.min(last.parse::<usize>().expect("a number") + 1);
                }
            }
            let total = content.len();
            let head = format!(
                "HTTP/1.1 206 Partial Content\r\nConnection: close\r\nContent-Length: {end}\r\n\
                 Content-Range: bytes 0-{}/{total}\r\n\r\n",
                end - 1
            );
            // Whoever has read enough goes away.
            let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&content[..end]));
        }
    });
    format!("http://{address}")
}

#[test]
fn a_model_that_is_not_here_is_looked_up_by_its_header() {
    let home = Home::new();
    let bytes = std::fs::read(muse_tiny()).expect("the bundled model");
    let server = ranges(bytes);
    let mut command = home.command(["fit", "some/repo/muse.gguf", "--json", "--memory", "8g"]);
    command.env("MUSER_HUB_URL", server);
    let out = command.output().expect("the binary starts");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let plan: Value = serde_json::from_slice(&out.stdout).expect("an object");
    assert_eq!(number(&plan["parts"][0], "layers"), 8, "{plan}");
    // Nobody there.
    let mut command = home.command(["fit", "some/repo/muse.gguf"]);
    command.env("MUSER_HUB_URL", "http://127.0.0.1:9");
    assert_eq!(command.output().expect("the binary starts").status.code(), Some(1));
}
