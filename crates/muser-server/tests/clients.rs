//! Real client libraries and a real browser against the bundled model: `MUSER_TEST_CLIENTS=1 cargo test -p muser-server
//! --test clients`. Needs Python and, the first time, a package index; the page also needs chromium and chromedriver.
//! Skipped, and said so, without the variable or without what it needs.

mod support;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use muser_engine::EngineConfig;
use muser_server::config::Limits;
use muser_server::{LiveEngine, ServerConfig};
use support::Running;
use support::tiny::{spawn_from, spawn_with_packs};

fn target() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target")
}

fn works(command: &mut Command) -> bool {
    command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

/// A Python with the client libraries, if one can be had.
fn python() -> Option<PathBuf> {
    let home = target().join("clients-venv");
    let python = home.join("bin/python");
    let has_all =
        |python: &Path| {
            works(Command::new(python).args([
                "-c",
                "import openai, anthropic, ollama, langchain_openai, schemathesis, pydantic_ai",
            ]))
        };
    if has_all(&python) {
        return Some(python);
    }
    let list = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients/requirements.txt");
    let made = works(Command::new("python3").arg("-m").arg("venv").arg(&home))
        && works(Command::new(&python).args(["-m", "pip", "install", "-q", "-r"]).arg(list));
    (made && has_all(&python)).then_some(python)
}

fn wanted() -> bool {
    let wanted = std::env::var_os("MUSER_TEST_CLIENTS").is_some();
    if !wanted {
        eprintln!("SKIPPED: set MUSER_TEST_CLIENTS=1 to run the client libraries and the browser");
    }
    wanted
}

async fn run(python: PathBuf, script: &str, arguments: Vec<String>) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients").join(script);
    let status =
        tokio::task::spawn_blocking(move || Command::new(python).arg(script).args(arguments).status());
    assert!(status.await.expect("ran").expect("started").success(), "the lines above say what failed");
}

/// With packs, so that the fuzzing client and the page see sessions too.
async fn serve_with_packs() -> (Running, tempfile::TempDir) {
    let store = tempfile::tempdir().expect("folder");
    let (engine, facts, packs) = spawn_with_packs(store.path(), EngineConfig::default());
    let server = Running::empty(ServerConfig::default()).await;
    server.app.attach_packs(packs);
    server.app.load(facts, support::text(), Arc::new(LiveEngine::new(engine, "cpu".into())));
    (server, store)
}

#[tokio::test(flavor = "multi_thread")]
async fn client_libraries() {
    if !wanted() {
        return;
    }
    let Some(python) = python() else {
        eprintln!("SKIPPED: no Python with the client libraries, and none could be installed");
        return;
    };
    let (server, _store) = serve_with_packs().await;
    run(python, "clients.py", vec![format!("http://{}", server.address)]).await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn page_in_a_browser() {
    if !wanted() {
        return;
    }
    if !works(Command::new("chromedriver").arg("--version")) {
        eprintln!("SKIPPED: no chromedriver");
        return;
    }
    let folder = target().join("page");
    std::fs::create_dir_all(&folder).expect("a folder for pictures");
    let (server, _store) = serve_with_packs().await;
    let arguments = vec![format!("http://{}", server.address), folder.display().to_string()];
    run("python3".into(), "page.py", arguments).await;
    server.stop().await;
}

/// Coding agents, unmodified. They are large to install and their prompts take minutes to read on few cores, so this is for
/// the nightly run: `MUSER_TEST_LONG=1`, with the folder of the agents' commands in `MUSER_AGENTS` if they are not to be
/// installed here.
#[tokio::test(flavor = "multi_thread")]
async fn coding_agents() {
    if std::env::var_os("MUSER_TEST_LONG").is_none() {
        eprintln!("SKIPPED: set MUSER_TEST_LONG=1 to run coding agents");
        return;
    }
    let Some(commands) = agents() else {
        eprintln!("SKIPPED: no npm, or the agents could not be installed");
        return;
    };
    let folder = tempfile::tempdir().expect("folder");
    let long = folder.path().join("muse-tiny-long.gguf");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients/long_context.py");
    let made =
        works(Command::new("python3").arg(script).args([support::model_path(), long.clone()]).arg("65536"));
    assert!(made, "a copy of the model with a longer context");
    let (engine, facts) = spawn_from(&long, EngineConfig::default());
    let limits = Limits { default_output_tokens: Some(400), ..Limits::default() };
    let server = Running::empty(ServerConfig { limits, ..ServerConfig::default() }).await;
    server.app.load(facts, support::text(), Arc::new(LiveEngine::new(engine, "cpu".into())));
    let arguments = vec![format!("http://{}", server.address), commands.display().to_string()];
    run("python3".into(), "agents.py", arguments).await;
    server.stop().await;
}

/// The folder with the agents' commands.
fn agents() -> Option<PathBuf> {
    if let Some(folder) = std::env::var_os("MUSER_AGENTS") {
        return Some(folder.into());
    }
    let home = target().join("clients-agents");
    let commands = home.join("node_modules/.bin");
    let names = ["@openai/codex", "@anthropic-ai/claude-code", "opencode-ai"];
    if !commands.join("codex").exists() {
        std::fs::create_dir_all(&home).ok()?;
        works(
            Command::new("npm")
                .args(["install", "--no-audit", "--no-fund", "--prefix"])
                .arg(&home)
                .args(names),
        );
    }
    commands.join("codex").exists().then_some(commands)
}
