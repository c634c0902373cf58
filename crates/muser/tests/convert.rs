//! `muser convert` as a user meets it: a checkpoint becomes a file that other commands take, and what is wrong is said in a line.

mod support;

use muser_convert::synth::{self, SynthKind};
use muser_gguf::GgufFile;
use muser_model::synth::Preset;
use serde_json::{Map, Value, json};
use support::Home;

/// A checkpoint, with the vocabulary of a synthetic file of its size.
fn checkpoint(home: &Home, name: &str, kind: SynthKind) -> String {
    let folder = home.path(name);
    synth::write(&folder, &Preset::Tiny.geometry(), kind, 7, &mut |_, _| {}).expect("a checkpoint");
    let words = home.path("words.gguf");
    home.run(["synth", "--preset", "tiny", words.to_str().expect("UTF-8")]).success();
    let file = GgufFile::open(&words).expect("a model");
    let strings = |key: &str| file.strings(&format!("tokenizer.ggml.{key}")).expect("a list");
    let vocab: Map<_, _> =
        (0..).zip(strings("tokens")).map(|(id, text)| (text.into(), Value::from(id))).collect();
    let special = vocab.iter().filter(|(text, _)| text.starts_with("<|"));
    let added: Vec<_> =
        special.map(|(text, id)| json!({"id": id, "content": text, "special": true})).collect();
    let tokenizer =
        json!({"model": {"type": "BPE", "vocab": vocab, "merges": strings("merges")}, "added_tokens": added});
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).expect("written");
    std::fs::remove_file(&words).expect("removed");
    folder.to_str().expect("UTF-8").to_owned()
}

fn inspect(home: &Home, path: &str) -> Value {
    let text = home.run(["inspect", "--json", path]).success();
    serde_json::from_str(&text).expect("one JSON object")
}

#[test]
fn a_checkpoint_becomes_a_model_that_writes() {
    let home = Home::new();
    let from = checkpoint(&home, "My-Tiny", SynthKind::Nvfp4);
    let out = home.path("a.gguf");
    let out = out.to_str().expect("UTF-8");
    let ran = home.run(["convert", &from, "--out", out]);
    assert_eq!(ran.success(), "", "what it says of itself is no result");
    assert!(ran.stderr().contains("a.gguf: ") && ran.stderr().contains(" tensors, "), "{}", ran.stderr());
    let report = inspect(&home, out);
    assert_eq!(report["name"], "My-Tiny", "{report}");
    let shown = home.run(["inspect", out]).success();
    assert!(shown.contains("NVFP4") && shown.contains("runs          yes"), "{shown}");
    // The same file whenever it is made.
    let again = home.path("b.gguf");
    let again = again.to_str().expect("UTF-8");
    home.run(["convert", &from, "-o", again, "--name", "My-Tiny"]).success();
    assert!(std::fs::read(out).expect("there") == std::fs::read(again).expect("there"));
    let ran = home.run_json(&["-m", out, "--raw", "--max-tokens", "6", "--temp", "0", "hello"]);
    let ids = ran["token_ids"].as_array().expect("ids");
    assert!((1..=6).contains(&ids.len()), "{ran}");
}

#[test]
fn types_and_names_are_those_asked_for() {
    let home = Home::new();
    let from = checkpoint(&home, "from", SynthKind::Bf16);
    for (flags, wanted, unwanted) in [
        (&["--type", "q8_0", "--rest", "q8_0"][..], "Q8_0", "BF16"),
        (&["--type", "nvfp4"], "NVFP4", "Q8_0"),
        (&[], "BF16", "NVFP4"),
    ] {
        let out = home.path("out.gguf");
        let out = out.to_str().expect("UTF-8");
        let words = [&["convert", &from, "-o", out, "--force", "--name", "Named so"], flags].concat();
        home.run(words).success();
        let shown = home.run(["inspect", out]).success();
        assert!(shown.contains(wanted) && !shown.contains(unwanted), "{flags:?}: {shown}");
        assert_eq!(inspect(&home, out)["name"], "Named so");
    }
}

#[test]
fn what_is_wrong_is_said_and_nothing_is_left() {
    let home = Home::new();
    let from = checkpoint(&home, "from", SynthKind::Nvfp4);
    let out = home.file("out.gguf", "precious");
    let out = out.to_str().expect("UTF-8");
    let check = |words: &[&str], code: i32, parts: &[&str]| {
        let ran = home.run([&["convert"], words].concat());
        let said = ran.failure(code);
        for part in parts {
            assert!(said.contains(part), "{words:?}: {part} in {said}");
        }
        assert_eq!(std::fs::read(out).expect("there"), b"precious", "{words:?}");
        let files = std::fs::read_dir(home.path("")).expect("the home");
        let parts = files.filter(|file| file.as_ref().expect("a file").file_name() == "out.gguf.part");
        assert_eq!(parts.count(), 0, "{words:?}");
    };
    check(&[&from, "-o", out], 1, &["out.gguf: the file is already there"]);
    let empty = home.path("empty");
    std::fs::create_dir(&empty).expect("a folder");
    check(&[empty.to_str().expect("UTF-8"), "-o", out, "--force"], 1, &["config.json", "found no such file"]);
    check(
        &[&from, "-o", out, "--force", "--mmproj"],
        1,
        &["expected a vision_config", "this checkpoint has no tower"],
    );
    check(&[&from, "-o", out, "--force", "--type", "q2_k"], 2, &["invalid value 'q2_k'"]);
    check(&[&from], 2, &["required arguments"]);
    let gone = home.path("no-folder/x.gguf");
    check(&[&from, "-o", gone.to_str().expect("UTF-8")], 1, &["no-folder", "No such file or directory"]);
    // A matrix whose factor has another name.
    let name = b"weight_global_scale";
    let files = std::fs::read_dir(&from).expect("the checkpoint").map(|file| file.expect("a file").path());
    let shards = files.filter(|path| path.extension().is_some_and(|end| end == "safetensors"));
    let found = shards.map(|path| (std::fs::read(&path).expect("there"), path)).find_map(|(bytes, path)| {
        bytes.windows(name.len()).position(|window| window == name).map(|at| (path, bytes, at))
    });
    let (path, mut bytes, at) = found.expect("a factor");
    bytes[at..at + 6].copy_from_slice(b"wrongs");
    std::fs::write(&path, bytes).expect("written");
    check(
        &[&from, "-o", out, "--force"],
        1,
        &["weight_global_scale: expected it in", "found no such tensor"],
    );
}
