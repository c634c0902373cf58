//! What `cargo xtask dist` is told, and what is known of each target.

use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};

pub(crate) const USAGE: &str = "dist [--target TRIPLE] [--from EXECUTABLE [--describe-with EXECUTABLE]] [--out FOLDER] \
     [--url ADDRESS] [--maintainer 'NAME <MAIL>'] [--check] [--local]";

/// A place to run.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) triple: &'static str,
    /// What Debian calls the processor, on Linux.
    pub(crate) debian: Option<&'static str>,
    /// What Python calls the platform, without the C library's version on Linux.
    pub(crate) python: &'static str,
}

/// glibc on Linux, and no musl: a static program cannot load the drivers of GPUs.
pub(crate) const TARGETS: [Target; 3] = [
    Target { triple: "x86_64-unknown-linux-gnu", debian: Some("amd64"), python: "x86_64" },
    Target { triple: "aarch64-unknown-linux-gnu", debian: Some("arm64"), python: "aarch64" },
    Target { triple: "aarch64-apple-darwin", debian: None, python: "macosx_11_0_arm64" },
];

impl Target {
    pub(crate) fn named(triple: &str) -> Result<&'static Self> {
        TARGETS.iter().find(|target| target.triple == triple).with_context(|| {
            let known = TARGETS.map(|target| target.triple).join(", ");
            format!("--target {triple}: nothing is packed for it; expected one of {known}")
        })
    }

    /// The one that this program runs on.
    pub(crate) fn here() -> Result<&'static Self> {
        let system = match std::env::consts::OS {
            "linux" => "unknown-linux-gnu",
            "macos" => "apple-darwin",
            other => other,
        };
        Self::named(&format!("{}-{system}", std::env::consts::ARCH))
    }
}

/// The command's options.
#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) target: &'static Target,
    /// An executable that exists; without it one is built.
    pub(crate) from: Option<PathBuf>,
    /// One that runs here and says the same of its arguments, where the first does not run here.
    pub(crate) describe_with: Option<PathBuf>,
    pub(crate) out: Option<PathBuf>,
    /// Where the files of this release will be, for the install script.
    pub(crate) url: Option<String>,
    pub(crate) maintainer: String,
    /// Install what was packed, here, and ask it for an answer.
    pub(crate) check: bool,
    /// Pack an executable that was built for this machine alone, as it is.
    pub(crate) local: bool,
}

impl Options {
    pub(crate) fn parse(arguments: &[String]) -> Result<Self> {
        let mut options = Self {
            target: Target::here()?,
            from: None,
            describe_with: None,
            out: None,
            url: None,
            // A name that never resolves: whoever releases says who they are.
            maintainer: "muser maintainers <maintainers@muser.invalid>".to_owned(),
            check: false,
            local: false,
        };
        let mut arguments = arguments.iter();
        while let Some(name) = arguments.next() {
            let mut value =
                || arguments.next().cloned().with_context(|| format!("{name} wants a value\n{USAGE}"));
            match name.as_str() {
                "--target" => options.target = Target::named(&value()?)?,
                "--from" => options.from = Some(value()?.into()),
                "--describe-with" => options.describe_with = Some(value()?.into()),
                "--out" => options.out = Some(value()?.into()),
                "--url" => options.url = Some(value()?),
                "--maintainer" => options.maintainer = value()?,
                "--check" => options.check = true,
                "--local" => options.local = true,
                other => bail!("{other} is not known\nusage: cargo xtask {USAGE}"),
            }
        }
        let mail = options
            .maintainer
            .split_once(" <")
            .filter(|(name, mail)| !name.trim().is_empty() && mail.ends_with('>') && mail.contains('@'));
        if mail.is_none() || options.maintainer.contains('\n') {
            bail!("--maintainer {:?}: expected NAME <MAIL> in one line", options.maintainer);
        }
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Options> {
        Options::parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn options_are_read_or_refused() {
        let options = parse("--target aarch64-apple-darwin --from a --check --local --out b --url https://x")
            .expect("right");
        assert_eq!(options.target.triple, "aarch64-apple-darwin");
        assert!(options.target.debian.is_none() && options.check && options.local);
        assert_eq!((options.from, options.out), (Some("a".into()), Some("b".into())));
        for (line, word) in [
            ("--target", "wants a value"),
            ("--target riscv64gc-unknown-linux-gnu", "x86_64-unknown-linux-gnu"),
            ("--target x86_64-unknown-linux-musl", "nothing is packed"),
            ("--frm a", "--frm is not known"),
            ("a", "a is not known"),
            ("--maintainer me", "NAME <MAIL>"),
        ] {
            let error = format!("{:#}", parse(line).expect_err(line));
            assert!(error.contains(word), "{line}: {error}");
        }
    }
}
