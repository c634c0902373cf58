//! Tells the program which commit it was built from. Outside a git checkout it says `unknown` and changes nothing else.

use std::path::Path;
use std::process::Command;

fn main() {
    let git = |args: &[&str]| {
        let out = Command::new("git").args(args).output().ok().filter(|out| out.status.success())?;
        let text = String::from_utf8(out.stdout).ok()?.trim().to_owned();
        (!text.is_empty()).then_some(text)
    };
    let commit = git(&["rev-parse", "--short=12", "HEAD"]).unwrap_or_else(|| "unknown".to_owned());
    println!("cargo:rustc-env=MUSER_COMMIT={commit}");
    println!("cargo:rerun-if-changed=build.rs");
    // The reflog of HEAD is written by every commit, checkout and rebase.
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]).filter(|log| Path::new(log).exists()) {
        println!("cargo:rerun-if-changed={log}");
    }
}
