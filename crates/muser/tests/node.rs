//! `muser node` as people type it.

mod support;

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use support::Home;
use support::served::Served;

/// A small engine.
const SMALL: [&str; 6] = ["--backend", "cpu", "--threads", "1", "--ctx", "1024"];

fn run(home: &Home, args: &[&str]) -> Output {
    home.command(["node"].iter().chain(args)).output().expect("it starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_key_an_invitation_and_a_list() {
    let home = Home::new();
    let key = text(&run(&home, &["key"]).stdout);
    assert_eq!(key.trim().len(), 64);
    assert_eq!(text(&run(&home, &["key"]).stdout), key, "made once");
    let code = run(&home, &["invite"]);
    assert_eq!(text(&code.stdout).trim().len(), 59);
    assert!(text(&code.stderr).contains("10 minutes"));
    // Its own code, a slip of the pen, nobody there.
    let own = run(&home, &["add", "box", "127.0.0.1:9", text(&code.stdout).trim()]);
    assert_eq!(own.status.code(), Some(2), "{}", text(&own.stderr));
    assert!(text(&own.stderr).contains("this node's own"));
    let other = Home::new();
    let slip = run(&other, &["add", "box", "127.0.0.1:9", &text(&code.stdout).trim()[1..]]);
    assert_eq!(slip.status.code(), Some(2), "{}", text(&slip.stderr));
    let nobody = run(&other, &["add", "box", "127.0.0.1:9", text(&code.stdout).trim()]);
    assert_eq!(nobody.status.code(), Some(1), "{}", text(&nobody.stderr));
    assert!(text(&nobody.stderr).contains("127.0.0.1:9"));
    assert_eq!(text(&run(&home, &["list", "--json"]).stdout).trim(), "[]");
    // Alone it changes its key at once.
    assert_eq!(run(&home, &["rotate"]).status.code(), Some(0));
    assert_ne!(text(&run(&home, &["key"]).stdout), key);
}

#[test]
fn words_that_mean_nothing_are_usage() {
    let home = Home::new();
    let cases: [(&[&str], &str); 5] = [
        (&["add", "box", "host", "code"], "HOST:PORT"),
        (&["add", "box", "host:0", "code"], "HOST:PORT"),
        (&["invite", "--may", "everything"], "everything"),
        (&["remove", "box"], "muser node add"),
        (&["add", "box", "host:1", "code"], "muser node invite"),
    ];
    for (args, word) in cases {
        let said = run(&home, args);
        assert_eq!(said.status.code(), Some(2), "{args:?}: {}", text(&said.stderr));
        assert!(text(&said.stderr).contains(word), "{args:?}: {}", text(&said.stderr));
    }
    let registry = home.path("nodes.toml");
    std::fs::write(&registry, "[[node]]\nname = 3\n").expect("written");
    #[cfg(unix)]
    {
        let loose = run(&home, &["list"]);
        assert_eq!(loose.status.code(), Some(1));
        assert!(text(&loose.stderr).contains("chmod 600"), "{}", text(&loose.stderr));
        let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(&registry, private).expect("chmod");
    }
    let line = run(&home, &["list"]);
    assert_eq!(line.status.code(), Some(1));
    assert!(text(&line.stderr).contains("nodes.toml line 2"), "{}", text(&line.stderr));
}

/// `muser node serve`, which ends with this value.
struct Node {
    child: Child,
    address: String,
}

impl Node {
    fn start(home: &Home) -> Self {
        let args = [&["node", "serve", "--node-listen", "127.0.0.1:0"][..], &SMALL].concat();
        let mut child = home.command(args).stdout(Stdio::null()).spawn().expect("it starts");
        let mut lines = BufReader::new(child.stderr.take().expect("piped")).lines();
        let mut address = String::new();
        for line in lines.by_ref().map_while(Result::ok) {
            if let Some((_, rest)) = line.split_once("hand prompts over at ") {
                rest.split(';').next().unwrap_or_default().clone_into(&mut address);
            }
            if line.contains("ready") {
                break;
            }
        }
        std::thread::spawn(move || lines.for_each(drop));
        Self { child, address }
    }

    /// Makes it known to another home.
    fn make_known_to(&self, own: &Home, other: &Home, more: &[&str]) -> Output {
        let code = text(&run(own, &["invite"]).stdout);
        run(other, &[&["add", "box", &self.address, code.trim()], more].concat())
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn listed(home: &Home) -> Value {
    let said = run(home, &["list", "--json"]);
    assert!(said.status.success(), "{}", text(&said.stderr));
    serde_json::from_slice::<Value>(&said.stdout).expect("JSON")[0].take()
}

fn doctor(home: &Home) -> Value {
    let said = home.command(["doctor", "--json", "--no-self-test"]).output().expect("it starts");
    assert!(said.status.success(), "{}", text(&said.stderr));
    serde_json::from_slice(&said.stdout).expect("JSON")
}

/// Waits until a server says of its node that it is in a state.
fn wait_for(server: &Served, state: &str) {
    let until = Instant::now() + Duration::from_mins(1);
    while server.metric("muser:node_state", &format!("state=\"{state}\"")) < 1.0 {
        assert!(Instant::now() < until, "never {state}: {}", server.said());
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The bundled model with one quant changed.
fn other_weights(home: &Home) -> std::path::PathBuf {
    let mut bytes = std::fs::read(support::muse_tiny()).expect("it is there");
    let at = bytes.len() - 40;
    bytes[at] ^= 0x11;
    home.file("other.gguf", bytes)
}

#[test]
fn a_node_is_shown_to_be_equal_when_it_is_added_and_by_a_server_that_finds_no_note() {
    let (theirs, ours) = (Home::new(), Home::new());
    let node = Node::start(&theirs);
    let added = node.make_known_to(&theirs, &ours, &SMALL);
    assert!(added.status.success(), "{}", text(&added.stderr));
    assert!(text(&added.stderr).contains("every byte of 600 positions is equal"), "{}", text(&added.stderr));
    let one = listed(&ours);
    assert_eq!(
        (&one["state"], &one["fits"], &one["shown_equal"]),
        (&"ready".into(), &true.into(), &true.into())
    );
    assert_eq!((&one["why"], &one["places"]), (&Value::Null, &16.into()), "{one}");
    assert_eq!(doctor(&ours)["nodes"][0]["state"], "ready");

    // What was found is of these programs: of another one it says nothing, and a server finds out by itself.
    let notes = ours.path("nodes-seen.json");
    let spoil = |from: &str, to: &str| {
        let kept = std::fs::read_to_string(&notes).expect("notes");
        assert!(kept.contains(from), "{kept}");
        std::fs::write(&notes, kept.replace(from, to)).expect("written");
    };
    let build = concat!("muser ", env!("CARGO_PKG_VERSION"));
    spoil(&format!("\"theirs\":\"{build}\""), "\"theirs\":\"muser 0.0.1\"");
    assert_eq!(listed(&ours)["state"], "unproven");
    let server = Served::start(&ours, &[&["--nodes"], &SMALL[..]].concat());
    wait_for(&server, "ready");
    assert!(server.metric("muser:node_prompt_tokens_given", "") < 1.0);
    server.kill();
    assert_eq!(listed(&ours)["state"], "ready");

    // One that gave other bits is put aside for every process, until it is shown to be equal.
    spoil("\"equal\":true", "\"equal\":false");
    let one = listed(&ours);
    assert_eq!(one["state"], "aside");
    assert!(one["why"].as_str().is_some_and(|why| why.contains("muser node test box")), "{one}");
    let server = Served::start(&ours, &[&["--nodes"], &SMALL[..]].concat());
    wait_for(&server, "aside");
    let tested = run(&ours, &[&["test", "box"], &SMALL[..]].concat());
    assert!(tested.status.success(), "{}", text(&tested.stderr));
    wait_for(&server, "ready");
    server.kill();
}

#[test]
fn what_is_wrong_with_a_node_is_said() {
    let (theirs, ours) = (Home::new(), Home::new());
    let node = Node::start(&theirs);
    let other = other_weights(&ours);
    let path = |path: &Path| path.display().to_string();
    let added = node.make_known_to(&theirs, &ours, &[&["--model", &path(&other)], &SMALL[..]].concat());
    assert!(added.status.success(), "known all the same: {}", text(&added.stderr));
    assert!(text(&added.stderr).contains("unlike in its weights"), "{}", text(&added.stderr));
    let one = listed(&ours);
    assert_eq!(
        (&one["state"], &one["fits"], &one["differs"]["part"]),
        (&"unlike".into(), &false.into(), &"weights".into())
    );
    assert!(one["why"].as_str().is_some_and(|why| why.contains("the same model file")), "{one}");
    let server = Served::start(&ours, &[&["--nodes", "--model", &path(&other)], &SMALL[..]].concat());
    wait_for(&server, "unlike");
    server.kill();
    drop(node);
    let one = &doctor(&ours)["nodes"][0];
    assert_eq!((&one["name"], &one["state"]), (&"box".into(), &"unreachable".into()));
    #[cfg(unix)]
    {
        let loose = std::os::unix::fs::PermissionsExt::from_mode(0o644);
        std::fs::set_permissions(ours.path("nodes.toml"), loose).expect("chmod");
        let said = doctor(&ours);
        assert!(said["nodes_fault"].as_str().is_some_and(|fault| fault.contains("chmod 600")), "{said}");
    }
}
