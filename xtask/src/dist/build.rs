//! Builds the executable that is shipped: stripped, without paths of this machine, bound to an old C library.
//!
//! On Linux the linker is zig's, through cargo-zigbuild, which has the symbols of every glibc (both are in `.ci/packages/dist.txt`).
//! Without them the system's is used, and `Contents::check` says if its C library is too new.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use super::options::Target;
use crate::tools;

/// Draft and projector are not among them: they are files beside the executable.
pub(crate) const FEATURES: &str = "mimalloc,bundled-model,cuda,wgpu,object-store";

/// The C library that a release runs with, of 2018.
pub(crate) const GLIBC: (u32, u32) = (2, 28);

pub(crate) fn executable(root: &Path, target: &Target) -> Result<PathBuf> {
    let root = root.canonicalize()?;
    let mut cargo = Command::new("cargo");
    let zigbuild = target.debian.and_then(|_| tools::find(&root, "cargo-zigbuild"));
    let triple = if let Some(tool) = &zigbuild {
        // cargo finds it as its own command where its folder is searched.
        let folder = tool.parent().unwrap_or(Path::new("."));
        let path = std::env::var_os("PATH").unwrap_or_default();
        let path =
            std::env::join_paths(std::iter::once(folder.to_owned()).chain(std::env::split_paths(&path)))?;
        cargo.arg("zigbuild").env("PATH", path);
        if let Some(zig) = tools::find(&root, "python-zig") {
            cargo.env("CARGO_ZIGBUILD_ZIG_PATH", zig);
        }
        format!("{}.{}.{}", target.triple, GLIBC.0, GLIBC.1)
    } else {
        println!("the system's linker is used: cargo-zigbuild is neither in PATH nor in .venv/bin");
        cargo.arg("build");
        target.triple.to_owned()
    };
    cargo.args(["--locked", "--profile", "dist", "--package", "muser", "--no-default-features"]);
    cargo.args(["--features", FEATURES, "--target", &triple]);
    let maps = path_maps(&root)?;
    let rust: Vec<String> = maps.iter().map(|map| format!("--remap-path-prefix={map}")).collect();
    cargo.env_remove("RUSTFLAGS").env("CARGO_ENCODED_RUSTFLAGS", rust.join("\u{1f}"));
    let c: Vec<String> = maps.iter().map(|map| format!("-ffile-prefix-map={map}")).collect();
    cargo.env("CFLAGS", c.join(" ")).env("CXXFLAGS", c.join(" "));
    cargo.env("CARGO_INCREMENTAL", "0");
    crate::run(&mut cargo)?;
    Ok(crate::target_dir().join(target.triple).join("dist/muser"))
}

/// `FROM=TO` for every folder whose name would otherwise be in the executable; of nested ones the last that fits counts.
fn path_maps(root: &Path) -> Result<Vec<String>> {
    let (home, target) = (cargo_home()?, std::path::absolute(crate::target_dir())?);
    let map = |from: &Path, to: &str| format!("{}={to}", from.display());
    Ok(vec![map(root, "/muser"), map(&home, "/cargo"), map(&target, "/target")])
}

fn cargo_home() -> Result<PathBuf> {
    if let Some(home) = std::env::var_os("CARGO_HOME") {
        return Ok(std::path::absolute(home)?);
    }
    Ok(PathBuf::from(std::env::var_os("HOME").context("neither CARGO_HOME nor HOME is set")?).join(".cargo"))
}

/// Folders whose names must not be in what is shipped.
pub(crate) fn machine_paths(root: &Path) -> Result<Vec<String>> {
    let mut paths = vec![root.canonicalize()?, cargo_home()?, std::path::absolute(crate::target_dir())?];
    paths.extend(std::env::var_os("HOME").map(PathBuf::from));
    // A home of `/` is in everything.
    let names = paths.into_iter().map(|path| path.display().to_string()).filter(|name| name.len() > 2);
    Ok(names.collect())
}
