//! Runs the real binary in a home of its own, without the caller's environment.

#![allow(dead_code, unreachable_pub, reason = "each test program uses its part")]

pub mod served;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// A fresh `MUSER_HOME`, removed at the end.
pub struct Home {
    folder: tempfile::TempDir,
}

impl Home {
    pub fn new() -> Self {
        Self { folder: tempfile::tempdir().expect("a temporary folder") }
    }

    /// A path inside it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes a file into it.
    pub fn file(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, content).expect("a temporary file");
        path
    }

    /// The binary with these arguments, standard input empty.
    pub fn command<S: AsRef<std::ffi::OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_muser"));
        command
            .args(args)
            .env("MUSER_HOME", self.folder.path())
            // Vulkan drivers write to the terminal where it is missing.
            .env("XDG_RUNTIME_DIR", self.folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        for name in [
            "MUSER_MODEL",
            "MUSER_LOG",
            "MUSER_URL",
            "MUSER_API_KEY",
            "NO_COLOR",
            "MUSER_CPU",
            "RUST_BACKTRACE",
        ] {
            command.env_remove(name);
        }
        command
    }

    /// The binary with these arguments, started by a shell after this script, which ends with `exec "$@"`, in a mount
    /// namespace of its own if `in_namespace`.
    #[cfg(target_os = "linux")]
    pub fn run_behind(&self, script: &str, in_namespace: bool, args: &[&str]) -> Ran {
        let shell = ["sh", "-ec", script, "sh", env!("CARGO_BIN_EXE_muser")];
        let before: &[&str] = if in_namespace { &["unshare", "--mount", "--map-root-user"] } else { &[] };
        let words = [before, &shell, args].concat();
        let mut command = Command::new(words[0]);
        command
            .args(&words[1..])
            .env("MUSER_HOME", self.folder.path())
            .env_remove("MUSER_MODEL")
            .stdin(Stdio::null());
        Ran(command.output().expect("a shell"))
    }

    /// Runs to the end.
    pub fn run<S: AsRef<std::ffi::OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Ran {
        Ran(self.command(args).output().expect("the binary starts"))
    }

    /// Runs to the end with this on standard input.
    pub fn run_with_input<S: AsRef<std::ffi::OsStr>>(
        &self,
        args: impl IntoIterator<Item = S>,
        input: impl AsRef<[u8]>,
    ) -> Ran {
        let mut child = self.command(args).stdin(Stdio::piped()).spawn().expect("the binary starts");
        let mut stdin = child.stdin.take().expect("a pipe");
        // A command that fails early does not read; that is what the test then looks at.
        let _ = stdin.write_all(input.as_ref());
        drop(stdin);
        Ran(child.wait_with_output().expect("the binary ends"))
    }

    /// `muser run --json` with more arguments, parsed.
    pub fn run_json(&self, args: &[&str]) -> Value {
        let ran = self.run([&["run", "--json"], args].concat());
        serde_json::from_str(&ran.success()).expect("one JSON object")
    }
}

/// What a run left behind.
pub struct Ran(pub Output);

impl Ran {
    pub fn code(&self) -> Option<i32> {
        self.0.status.code()
    }

    pub fn stdout(&self) -> String {
        String::from_utf8(self.0.stdout.clone()).expect("UTF-8 on standard output")
    }

    pub fn stderr(&self) -> String {
        String::from_utf8(self.0.stderr.clone()).expect("UTF-8 on standard error")
    }

    /// Standard output of a run that must have worked.
    pub fn success(&self) -> String {
        assert_eq!(self.code(), Some(0), "{}", self.stderr());
        self.stdout()
    }

    /// The one error line of a run that must have failed with this code and printed no result.
    pub fn failure(&self, code: i32) -> String {
        let stderr = self.stderr();
        assert_eq!(self.code(), Some(code), "{stderr}");
        assert_eq!(self.stdout(), "", "a failed command prints no result");
        let errors: Vec<&str> = stderr.lines().filter(|line| line.starts_with("error: ")).collect();
        assert_eq!(errors.len(), 1, "expected one error line: {stderr}");
        assert!(!stderr.contains("panicked"), "{stderr}");
        errors[0].to_owned()
    }
}

/// The bundled model as a file.
pub fn muse_tiny() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/muse-tiny-Q4_K_M.gguf")
}

/// Shape and values of a `.npy` file of f32.
pub fn read_npy(path: &Path) -> (usize, usize, Vec<f32>) {
    let bytes = std::fs::read(path).expect("the .npy file");
    assert_eq!(&bytes[..8], b"\x93NUMPY\x01\x00");
    let end = 10 + usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    let header = std::str::from_utf8(&bytes[10..end]).expect("a text header");
    assert!(header.contains("'descr': '<f4'") && header.contains("'fortran_order': False"), "{header}");
    let shape =
        header.split_once("'shape': (").and_then(|(_, rest)| rest.split_once(')')).expect("a shape").0;
    let (rows, columns) = shape.split_once(", ").expect("two dimensions");
    let (rows, columns) = (rows.parse().expect("a number"), columns.parse().expect("a number"));
    let values: Vec<f32> =
        bytes[end..].chunks_exact(4).map(|v| f32::from_le_bytes(v.try_into().expect("four bytes"))).collect();
    assert_eq!(values.len(), rows * columns);
    (rows, columns, values)
}
