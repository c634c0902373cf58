//! Code for other processors (`simd/neon.rs`) and for Metal at least compiles, on a machine that has none of them.
//!
//! The crates below the engine need no C compiler for the target; those above do, and are left out.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};

const TARGET: &str = "aarch64-apple-darwin";
const CRATES: [&str; 6] =
    ["muser-gguf", "muser-kv", "muser-model", "muser-backend", "muser-cpu", "muser-wgpu"];

/// Checks [`CRATES`] for [`TARGET`]; says so and passes where the target is not installed.
pub(crate) fn check(root: &Path) -> Result<()> {
    if !is_installed()? {
        println!("SKIPPED: `rustup target add {TARGET}` has not been run");
        return Ok(());
    }
    let mut command = Command::new("cargo");
    command.current_dir(root).args(["check", "--locked", "--quiet", "--target", TARGET]);
    // Its NEON code is C.
    command.args(["--features", "blake3/no_neon"]).env("RUSTFLAGS", "-D warnings");
    for name in CRATES {
        command.args(["-p", name]);
    }
    crate::run(&mut command)
}

fn is_installed() -> Result<bool> {
    let output = Command::new("rustc")
        .args(["--print", "target-libdir", "--target", TARGET])
        .output()
        .context("cannot start rustc")?;
    Ok(output.status.success() && Path::new(String::from_utf8_lossy(&output.stdout).trim()).is_dir())
}
