//! The `packages` step: everything is packed from the executable at hand, installed as a user would into a folder for that, and
//! answers from there.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};

use anyhow::{Context as _, Result, bail};

use super::options::Options;
use super::{Care, contents};
use crate::tools;

pub(crate) fn check(root: &Path) -> Result<()> {
    // The one that `first-run` has built.
    crate::cargo(&["build", "--release", "--locked", "--quiet"])?;
    let executable = crate::target_dir().join(format!("release/muser{}", std::env::consts::EXE_SUFFIX));
    let work = Work::new()?;
    let out = work.folder("packages")?;
    let options = Options::parse(&[])?;
    super::pack(root, &options, &executable, &out, Care::ForTest)?;
    // The same once more, elsewhere: no byte comes from the clock or the folder.
    let again = work.folder("again")?;
    super::pack(root, &options, &executable, &again, Care::ForTest)?;
    if std::fs::read(out.join("SHA256SUMS"))? != std::fs::read(again.join("SHA256SUMS"))? {
        bail!("packed twice, the files differ");
    }
    std::fs::remove_dir_all(&again)?;
    installed(root, &work, &out, Care::ForTest)
}

/// The same with files that were packed already.
pub(crate) fn check_packed(root: &Path, out: &Path, care: Care) -> Result<()> {
    installed(root, &Work::new()?, &std::path::absolute(out)?, care)
}

fn installed(root: &Path, work: &Work, out: &Path, care: Care) -> Result<()> {
    script(work, out)?;
    debian(root, work, out, care)?;
    wheel(root, work, out)?;
    bill(root, out)?;
    readable(work)
}

/// A folder that goes with this run.
struct Work(PathBuf);

impl Work {
    fn new() -> Result<Self> {
        // Below the folder for builds, which is on a disk with room for programs.
        let folder =
            std::path::absolute(crate::target_dir())?.join(format!("packages-check-{}", std::process::id()));
        std::fs::create_dir_all(&folder)?;
        Ok(Self(folder))
    }

    fn folder(&self, name: &str) -> Result<PathBuf> {
        let folder = self.0.join(name);
        std::fs::create_dir_all(&folder)?;
        Ok(folder)
    }

    /// A command in a home of its own.
    fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("MUSER_"))
        {
            command.env_remove(name);
        }
        command.env("HOME", &self.0).env("MUSER_HOME", self.0.join("home")).current_dir(&self.0);
        command
    }

    /// The program below a prefix says its version and answers, and its completions and pages are there.
    fn answers(&self, prefix: &Path) -> Result<()> {
        let program = prefix.join(contents::EXECUTABLE);
        let version = succeed(self.command(&program).arg("--version"))?;
        if !version.starts_with("muser ") {
            bail!("{} --version said {version:?}", program.display());
        }
        let prompt = "Write a short story about a fox.";
        let answer = succeed(self.command(&program).args(["run", "-q", "-n", "16", "--temp", "0", prompt]))?;
        if answer.split_whitespace().count() < 5 {
            bail!("{} answered {answer:?}", program.display());
        }
        for place in ["share/man/man1/muser-run.1", "share/bash-completion/completions/muser"] {
            let (plain, zipped) = (prefix.join(place), prefix.join(format!("{place}.gz")));
            if !plain.is_file() && !zipped.is_file() {
                bail!("{} is not installed", plain.display());
            }
        }
        Ok(())
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        // What is left of a failed run is below `target`.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The install script, over HTTP from this machine: installs, upgrades, refuses what was changed, and takes all of it away again.
fn script(work: &Work, out: &Path) -> Result<()> {
    let served = Served::start(out)?;
    let prefix = work.0.join("with blanks/prefix");
    let run = |arguments: &[&str]| -> Result<Output> {
        let mut command = work.command("sh");
        command.arg(out.join("install.sh")).args(["--prefix"]).arg(&prefix).args(arguments);
        command.output().context("cannot start sh")
    };
    let from = served.address.clone();
    let install = || run(&["--from", &from]);
    let must = |output: Output| -> Result<()> {
        if !output.status.success() {
            bail!("install.sh ended with {}: {}", output.status, String::from_utf8_lossy(&output.stderr));
        }
        Ok(())
    };
    let must_refuse = |output: Output, word: &str| -> Result<()> {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        if output.status.success() || !said.contains(word) {
            bail!("install.sh should have refused with {word:?}: {}: {said}", output.status);
        }
        if prefix.exists() {
            bail!("install.sh refused ({word}) and installed something all the same");
        }
        Ok(())
    };
    let archive = served.name_of(".tar.gz")?;
    for (name, change, word) in changes(&archive) {
        served.set(Some((name, change)));
        must_refuse(install()?, word)?;
    }
    served.set(None);
    must_refuse(run(&["--from", "http://host.invalid"])?, "only https")?;
    must_refuse(run(&["--from", "ftp://host.invalid"])?, "only https")?;
    must_refuse(run(&["--from", &from, "--version", "9.9.9"])?, "names no archive")?;
    must_refuse(run(&["--uninstall"])?, "nothing of this script's")?;
    must(install()?)?;
    work.answers(&prefix)?;
    // An upgrade removes what the version before had and this one has not.
    let list = prefix.join("share/muser/installed-files");
    let (old, kept) = (prefix.join("share/muser/old"), prefix.join("share/muser/of-the-user"));
    std::fs::write(&old, "")?;
    std::fs::write(&kept, "")?;
    std::fs::write(&list, std::fs::read_to_string(&list)? + "share/muser/old\n")?;
    // From the folder of the script, which needs no network.
    must(run(&[])?)?;
    work.answers(&prefix)?;
    if old.exists() || !kept.exists() {
        bail!("an upgrade removes what was installed before and nothing else");
    }
    std::fs::remove_file(&kept)?;
    must(run(&["--uninstall"])?)?;
    if prefix.join("bin").exists() || prefix.join("share").exists() {
        bail!("install.sh --uninstall left something behind");
    }
    println!("install.sh: installs, upgrades, refuses, uninstalls");
    Ok(())
}

type Change = fn(Vec<u8>) -> Vec<u8>;

/// What may happen to a file on its way, and what has to be said of it.
fn changes(archive: &str) -> Vec<(String, Change, &'static str)> {
    let flip: Change = |mut bytes| {
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        bytes
    };
    let cut: Change = |mut bytes| {
        bytes.truncate(bytes.len() - 1);
        bytes
    };
    let none: Change = |_| Vec::new();
    let no_page: Change = |_| b"<html>not found</html>\n".to_vec();
    // Hashes of the right form, of other files.
    let other_hashes: Change = |bytes| {
        let turned =
            |line: &str| format!("{}{}\n", if line.starts_with('0') { '1' } else { '0' }, &line[1..]);
        String::from_utf8_lossy(&bytes).lines().map(turned).collect::<String>().into_bytes()
    };
    let sums = || "SHA256SUMS".to_owned();
    vec![
        (archive.to_owned(), flip, "is not the file that SHA256SUMS names"),
        (archive.to_owned(), cut, "is not the file that SHA256SUMS names"),
        (archive.to_owned(), none, "is not the file that SHA256SUMS names"),
        (sums(), none, "names no archive"),
        (sums(), no_page, "names no archive"),
        (sums(), other_hashes, "is not the file that SHA256SUMS names"),
    ]
}

fn debian(root: &Path, work: &Work, out: &Path, care: Care) -> Result<()> {
    let Some(tool) = tools::find(root, "dpkg-deb") else {
        println!("SKIPPED: the Debian package was not unpacked: dpkg-deb is not installed");
        return Ok(());
    };
    let package = file_with(out, ".deb")?;
    let info = succeed(work.command(&tool).arg("--info").arg(&package))?;
    if !info.contains("Package: muser") {
        bail!("dpkg-deb --info said {info:?}");
    }
    let folder = work.folder("deb")?;
    succeed(work.command(&tool).arg("--extract").arg(&package).arg(&folder))?;
    // Sums as dpkg checks them, and every one of them.
    succeed(work.command(&tool).arg("--control").arg(&package).arg(folder.join("DEBIAN")))?;
    succeed(
        work.command("md5sum")
            .args(["--check", "--quiet", "--strict", "DEBIAN/md5sums"])
            .current_dir(&folder),
    )?;
    work.answers(&folder.join("usr"))?;
    let unit = std::fs::read_to_string(folder.join("usr/lib/systemd/system/muser.service"))?;
    if !unit.contains("ExecStart=/usr/bin/muser ") {
        bail!("the unit starts something else than the package's program");
    }
    println!("{}: unpacks and answers", package.file_name().unwrap_or_default().display());
    let Some(lintian) = tools::find(root, "lintian") else {
        println!("SKIPPED: lintian is not installed");
        return Ok(());
    };
    let suppressed = format!("--suppress-tags={}", findings_expected(care).join(","));
    succeed(work.command(lintian).args(["--fail-on=error,warning", &suppressed]).arg(&package)).map(drop)
}

/// What Debian's own checker may find.
fn findings_expected(care: Care) -> Vec<&'static str> {
    let mut tags = vec![
        // C libraries are parts of the program, as every dependency is.
        "embedded-library",
        "statically-linked-binary",
        // The file may have a hub's token, or name one.
        "non-standard-file-perm",
        // Only who installed it starts the unit, with systemctl; so it is undone.
        "maintainer-script-calls-systemctl",
    ];
    if care == Care::ForTest {
        // A release is stripped by its profile; the executable of a release build keeps its names for stack traces.
        tags.push("unstripped-binary-or-object");
    }
    tags
}

fn wheel(root: &Path, work: &Work, out: &Path) -> Result<()> {
    let python = tools::find(root, "python3").or_else(|| tools::find(root, "python"));
    let Some(python) = python else {
        println!("SKIPPED: the wheel was not installed: no Python");
        return Ok(());
    };
    let folder = work.0.join("python");
    let made = work.command(&python).args(["-m", "venv"]).arg(&folder).output()?;
    if !made.status.success() {
        println!("SKIPPED: the wheel was not installed: {} makes no environments", python.display());
        return Ok(());
    }
    let wheel = file_with(out, ".whl")?;
    let pip = || {
        let mut pip = work.command(folder.join("bin/python"));
        pip.args(["-m", "pip", "--quiet", "--disable-pip-version-check"]);
        pip
    };
    succeed(pip().args(["install", "--no-index", "--no-deps"]).arg(&wheel))?;
    work.answers(&folder)?;
    succeed(pip().args(["uninstall", "--yes", "muser"]))?;
    for place in [contents::EXECUTABLE, "share/muser", "share/man/man1/muser.1"] {
        if folder.join(place).exists() {
            bail!("pip uninstall left {place}: it is not in RECORD");
        }
    }
    println!("{}: installs, answers, uninstalls", wheel.file_name().unwrap_or_default().display());
    Ok(())
}

/// The bill of materials against its schema, of which a Python package has a copy, with those that it names.
fn bill(root: &Path, out: &Path) -> Result<()> {
    const SCRIPT: &str = "\
import json, pathlib, sys
from jsonschema import Draft7Validator
from referencing import Registry, Resource
read = lambda path: json.loads(pathlib.Path(path).read_text())
known = {path.name: read(path) for path in pathlib.Path(sys.argv[1]).glob('*.schema.json')}
schema = known['bom-1.6.SNAPSHOT.schema.json']
# They name each other by file, from wherever they say they are.
names = [(base + name, one) for name, one in known.items() for base in ('', schema['$id'].rsplit('/', 1)[0] + '/')]
registry = Registry().with_resources((name, Resource.from_contents(one)) for name, one in names)
found = list(Draft7Validator(schema, registry=registry).iter_errors(read(sys.argv[2])))
sys.exit('\\n'.join(f'{error.json_path}: {error.message[:500]}' for error in found) or 0)
";
    let python = root.join(".venv/bin/python");
    let Some(schemas) = schemas(root) else {
        println!("SKIPPED: the bill of materials was not compared with its schema: no cyclonedx-python-lib");
        return Ok(());
    };
    let document = file_with(out, ".cdx.json")?;
    succeed(Command::new(python).args(["-c", SCRIPT]).args([&schemas, &document]))?;
    println!("{}: is CycloneDX 1.6", document.file_name().unwrap_or_default().display());
    Ok(())
}

fn schemas(root: &Path) -> Option<PathBuf> {
    let pythons = std::fs::read_dir(root.join(".venv/lib")).ok()?;
    let place = "site-packages/cyclonedx/schema/_res";
    pythons.flatten().map(|python| python.path().join(place)).find(|path| path.is_dir())
}

/// Pages and completions, by the programs that read them.
fn readable(work: &Work) -> Result<()> {
    let share = work.0.join("deb/usr/share");
    let checks: [(&str, &[&str], &str); 3] = [
        ("bash", &["-n"], "bash-completion/completions/muser"),
        ("zsh", &["-n"], "zsh/vendor-completions/_muser"),
        ("fish", &["--no-execute"], "fish/vendor_completions.d/muser.fish"),
    ];
    for (shell, arguments, place) in checks {
        if !share.join(place).is_file() {
            continue;
        }
        match work.command(shell).args(arguments).arg(share.join(place)).output() {
            Ok(out) if out.status.success() => {}
            Ok(out) => bail!("{shell} does not take {place}: {}", String::from_utf8_lossy(&out.stderr)),
            Err(_) => println!("SKIPPED: {shell} is not installed"),
        }
    }
    Ok(())
}

fn succeed(command: &mut Command) -> Result<String> {
    let out = command.output().with_context(|| format!("cannot start {command:?}"))?;
    if !out.status.success() {
        let [stdout, stderr] = [&out.stdout, &out.stderr].map(|bytes| String::from_utf8_lossy(bytes));
        bail!("{command:?} ended with {}:\n{stdout}{stderr}", out.status);
    }
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

fn file_with(folder: &Path, end: &str) -> Result<PathBuf> {
    let paths = std::fs::read_dir(folder)?.flatten().map(|entry| entry.path());
    let mut found = paths.filter(|path| path.to_string_lossy().ends_with(end));
    found.next().with_context(|| format!("no {end} in {}", folder.display()))
}

/// Files of a folder over HTTP on this machine, of which one may be changed on the way.
struct Served {
    address: String,
    folder: PathBuf,
    change: Arc<Mutex<Option<(String, Change)>>>,
}

impl Served {
    fn start(folder: &Path) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = format!("http://{}", listener.local_addr()?);
        let change = Arc::new(Mutex::new(None));
        let (theirs, place) = (Arc::clone(&change), folder.to_owned());
        // Ends with this program.
        std::thread::spawn(move || {
            for connection in listener.incoming().flatten() {
                // A client that hangs up is its own affair; what it lacks shows in what it says.
                let _ = answer(connection, &place, &theirs);
            }
        });
        Ok(Self { address, folder: folder.to_owned(), change })
    }

    fn set(&self, change: Option<(String, Change)>) {
        *self.change.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = change;
    }

    fn name_of(&self, end: &str) -> Result<String> {
        Ok(file_with(&self.folder, end)?.file_name().unwrap_or_default().to_string_lossy().into_owned())
    }
}

fn answer(mut connection: TcpStream, folder: &Path, change: &Mutex<Option<(String, Change)>>) -> Result<()> {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") && head.len() < 8192 && connection.read(&mut byte)? == 1 {
        head.push(byte[0]);
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    let name = head.split_whitespace().nth(1).unwrap_or_default().trim_start_matches('/').to_owned();
    let file =
        Some(folder.join(&name)).filter(|_| !name.contains('/')).and_then(|path| std::fs::read(path).ok());
    let Some(mut bytes) = file else {
        write!(connection, "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")?;
        return Ok(());
    };
    let change = change.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
    if let Some((_, change)) = change.filter(|(changed, _)| *changed == name) {
        bytes = change(bytes);
    }
    write!(connection, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", bytes.len())?;
    connection.write_all(&bytes)?;
    Ok(())
}
