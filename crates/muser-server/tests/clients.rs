//! Real client libraries, agents and a real browser against the bundled model. `MUSER_TEST_CLIENTS=1 cargo test -p
//! muser-server --test clients` runs what installs in a minute; `MUSER_TEST_CLIENTS=all`, for the nightly run, also what takes
//! gigabytes: coding agents and lm-eval. Needs Python and Node, and package indexes the first time; the page also needs chromium
//! and chromedriver. Skipped, and said so, without the variable or without what it needs.

mod support;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use muser_engine::EngineConfig;
use muser_server::config::Limits;
use muser_server::dashboard::{Bandwidth, Machine};
use muser_server::{LiveEngine, ServerConfig};
use support::Running;
use support::tiny::{spawn_from, spawn_with_packs};

fn target() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target")
}

fn works(command: &mut Command) -> bool {
    command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

fn scripts() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients")
}

/// What is wanted of the runs that need clients.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Extent {
    Nothing,
    /// What installs in a minute.
    Light,
    /// Everything.
    All,
}

/// Whether this much is wanted; says so if not.
fn wanted(extent: Extent) -> bool {
    let set = match std::env::var("MUSER_TEST_CLIENTS").as_deref() {
        Ok("all") => Extent::All,
        Ok(_) => Extent::Light,
        Err(_) => Extent::Nothing,
    };
    if set < extent {
        let value = if extent == Extent::All { "all" } else { "1" };
        eprintln!("SKIPPED: set MUSER_TEST_CLIENTS={value} to run these clients");
    }
    set >= extent
}

/// A Python with the packages of a list, each checked against its hash, if one can be had.
fn python(home: &str, list: &str, imports: &str) -> Option<PathBuf> {
    let home = target().join(home);
    let python = home.join("bin/python");
    let has_all = |python: &Path| works(Command::new(python).args(["-c", imports]));
    if has_all(&python) {
        return Some(python);
    }
    let list = scripts().join(list);
    let install = ["-m", "pip", "install", "-q", "--no-deps", "--require-hashes", "-r"];
    let made = works(Command::new("python3").arg("-m").arg("venv").arg(&home))
        && works(Command::new(&python).args(install).arg(list));
    if !(made && has_all(&python)) {
        muser_testkit::skip(
            muser_testkit::Need::Python,
            "no Python with what is needed, and it could not be installed",
        );
        return None;
    }
    Some(python)
}

/// A folder with the packages of a lock file, each checked against the hash there, if they can be had.
fn packages(home: &str, list: &str, probe: &str) -> Option<PathBuf> {
    let home = target().join(home);
    let install = || {
        std::fs::create_dir_all(&home).ok()?;
        for file in ["package.json", "package-lock.json"] {
            std::fs::copy(scripts().join(list).join(file), home.join(file)).ok()?;
        }
        // Not `ci`: it wants the programs of all platforms in the lock file, which one platform's npm does not write there.
        works(
            Command::new("npm").args(["install", "--no-save", "--no-audit", "--no-fund"]).current_dir(&home),
        )
        .then_some(())
    };
    if !home.join(probe).exists() && (install().is_none() || !home.join(probe).exists()) {
        muser_testkit::skip(muser_testkit::Need::Node, "no npm, or what is needed could not be installed");
        return None;
    }
    home.canonicalize().ok()
}

async fn run(mut command: Command) {
    let status = tokio::task::spawn_blocking(move || command.status());
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

fn script(interpreter: impl AsRef<std::ffi::OsStr>, name: &str, server: &Running) -> Command {
    let mut command = Command::new(interpreter);
    command.arg(scripts().join(name)).arg(format!("http://{}", server.address));
    command
}

#[tokio::test(flavor = "multi_thread")]
async fn client_libraries() {
    const NEEDED: &str =
        "import openai, anthropic, ollama, langchain_openai, langchain_anthropic, schemathesis, pydantic_ai";
    if !wanted(Extent::Light) {
        return;
    }
    let Some(python) = python("clients-venv", "requirements.txt", NEEDED) else { return };
    let (server, _store) = serve_with_packs().await;
    run(script(python, "clients.py", &server)).await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ai_sdk() {
    if !wanted(Extent::Light) {
        return;
    }
    let Some(folder) = packages("clients-node", "node", "node_modules/ai") else { return };
    let (server, _store) = serve_with_packs().await;
    let mut command = script("node", "node/ai_sdk.mjs", &server);
    command.current_dir(folder);
    run(command).await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn page_in_a_browser() {
    page("page.py", "page", &[]).await;
}

/// The same, seen through a proxy that has the server below a path: nothing on the page names anything from the root.
#[tokio::test(flavor = "multi_thread")]
async fn page_behind_a_path_prefix() {
    page("page.py", "page-prefix", &["/some/llm"]).await;
}

/// Figures of real work, by keyboard, in both colour schemes and on a phone.
#[tokio::test(flavor = "multi_thread")]
async fn dashboard_in_a_browser() {
    page("dashboard.py", "dashboard", &[]).await;
}

async fn page(name: &str, pictures: &str, more: &[&str]) {
    if !wanted(Extent::Light) {
        return;
    }
    if !works(Command::new("chromedriver").arg("--version")) {
        muser_testkit::skip(muser_testkit::Need::Browser, "no chromedriver");
        return;
    }
    let folder = target().join(pictures);
    std::fs::create_dir_all(&folder).expect("a folder for pictures");
    let (server, _store) = serve_with_packs().await;
    server.app.attach_machine(Machine::new(18 << 20, Bandwidth::WhenIdle(Box::new(|| Some(2e10)))));
    let mut command = script("python3", name, &server);
    command.arg(folder).args(more);
    run(command).await;
    server.stop().await;
}

/// Log-likelihoods as the most used evaluation tool asks for them, compared with decoding.
#[tokio::test(flavor = "multi_thread")]
async fn lm_eval() {
    if !wanted(Extent::All) {
        return;
    }
    let Some(python) = python("clients-lm-eval", "lm_eval/requirements.txt", "import lm_eval") else {
        return;
    };
    let (server, _store) = serve_with_packs().await;
    run(script(python, "lm_eval/likelihoods.py", &server)).await;
    server.stop().await;
}

/// Coding agents, unmodified. Their prompts have tens of thousands of tokens, so the model is a copy with a longer context.
#[tokio::test(flavor = "multi_thread")]
async fn coding_agents() {
    if !wanted(Extent::All) {
        return;
    }
    let Some(folder) = packages("clients-agents", "agents", "node_modules/.bin/codex") else { return };
    let model = tempfile::tempdir().expect("folder");
    let long = model.path().join("muse-tiny-long.gguf");
    let mut copy = Command::new("python3");
    copy.arg(scripts().join("long_context.py")).args([support::model_path(), long.clone()]).arg("65536");
    assert!(works(&mut copy), "a copy of the model with a longer context");
    let (engine, facts) = spawn_from(&long, EngineConfig::default());
    let limits = Limits { default_output_tokens: Some(400), ..Limits::default() };
    let server = Running::empty(ServerConfig { limits, ..ServerConfig::default() }).await;
    server.app.load(facts, support::text(), Arc::new(LiveEngine::new(engine, "cpu".into())));
    let mut command = script("python3", "agents.py", &server);
    command.arg(folder.join("node_modules/.bin"));
    run(command).await;
    server.stop().await;
}
