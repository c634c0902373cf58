use std::path::Path;

use clap::CommandFactory as _;

use super::*;
use crate::cli::Cli;

/// What a line means with a file of this text: the value of one flag, where it came from.
struct Case {
    folder: tempfile::TempDir,
}

impl Case {
    fn new(text: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("muser.toml"), text).expect("a file");
        Self { folder }
    }

    fn read(&self, line: &str) -> Result<Configured, String> {
        let file = self.folder.path().join("muser.toml");
        let words = ["muser".into(), "--config".into(), file.into_os_string()];
        let words: Vec<OsString> = words.into_iter().chain(line.split_whitespace().map(Into::into)).collect();
        read(&Cli::command(), &words, true).map_err(|error| match error {
            ConfigError::File(what) => what
                .strip_prefix(&self.folder.path().join("muser.toml").display().to_string())
                .unwrap_or(&what)
                .to_owned(),
            ConfigError::Usage(error) => error.render().to_string(),
        })
    }

    fn values(&self, line: &str, id: &str) -> Vec<String> {
        let configured = self.read(line).expect("it can be read");
        let (_, matches) = leaf(&configured.matches);
        let raw = matches.get_raw(id).into_iter().flatten();
        raw.map(|value| value.to_string_lossy().into_owned()).collect()
    }

    fn refusal(&self) -> String {
        self.read("doctor").err().expect("a refusal")
    }
}

#[test]
fn flags_win_over_the_file_and_the_file_over_what_is_built_in() {
    let case = Case::new("port = 9000\n[serve]\nqueue = 7\nallowed_host = [\"a\", \"b\"]\n");
    assert_eq!(case.values("serve", "port"), ["9000"]);
    assert_eq!(case.values("serve", "queue"), ["7"]);
    assert_eq!(case.values("serve", "drain"), ["30"]);
    assert_eq!(case.values("serve", "allowed_host"), ["a", "b"]);
    assert_eq!(case.values("serve --port 1 --allowed-host c", "port"), ["1"]);
    assert_eq!(case.values("serve --port 1 --allowed-host c", "allowed_host"), ["c"]);
}

#[test]
fn the_nearest_section_wins() {
    let case = Case::new("threads = 3\n[run]\nthreads = 5\n");
    assert_eq!(case.values("run hello", "threads"), ["5"]);
    assert_eq!(case.values("chat", "threads"), ["3"]);
    let configured = case.read("run hello").expect("it can be read");
    assert_eq!(configured.sources.line(&["run".into()], "threads"), Some(3));
    assert_eq!(configured.sources.line(&["chat".into()], "threads"), Some(1));
}

#[test]
fn switches_can_be_set_and_taken_back() {
    let case = Case::new("quiet = true\nverbose = 2\n[serve]\ncontext-shift = true\ninsecure = false\n");
    assert_eq!(case.values("serve", "context_shift"), ["true"]);
    assert_eq!(case.values("serve --context-shift=false", "context_shift"), ["false"]);
    assert_eq!(case.values("serve --context-shift", "context_shift"), ["true"]);
    assert_eq!(case.values("serve", "insecure"), ["false"]);
    assert_eq!(case.values("serve --insecure", "insecure"), ["true"]);
    let configured = case.read("serve").expect("it can be read");
    assert_eq!(configured.matches.get_one::<bool>("quiet"), Some(&true));
    assert_eq!(configured.matches.get_one::<u8>("verbose"), Some(&2));
}

/// What usually holds gives way to what was said for this run, if they cannot be together.
#[test]
fn a_flag_takes_away_what_it_conflicts_with() {
    let case = Case::new("[run]\nsystem = \"Be brief.\"\n");
    assert_eq!(case.values("run hello", "system"), ["Be brief."]);
    assert_eq!(case.values("run --raw hello", "system"), Vec::<String>::new());
    let both = Case::new("[run]\nsystem = \"Be brief.\"\nraw = true\n");
    let refusal = both.read("run hello").err().expect("a refusal");
    assert_eq!(refusal, ", line 3: raw cannot be together with system of line 2");
}

#[test]
fn what_is_wrong_is_said_with_its_line() {
    for (text, said) in [
        ("prot = 1\n", "line 1: prot is not a flag of any command; did you mean port?"),
        ("\n[serve]\nprot = 1\n", "line 3: prot is not a flag of muser serve; did you mean port?"),
        ("[serv]\nport = 1\n", "line 2: [serv] is not the name of a command; did you mean serve?"),
        ("[run]\nport = 1\n", "line 2: port is not a flag of run; it is one of [serve]"),
        ("[run]\nquiet = true\n", "line 2: quiet is a flag of every command: it stands above the sections"),
        ("[serve]\nport = 70000\n", "line 2: invalid value '70000' for '--port <PORT>'"),
        ("[serve]\nport = \"http\"\n", "line 2: invalid value 'http' for '--port <PORT>'"),
        ("[serve]\nport = true\n", "line 2: port: expected <PORT>, found true"),
        ("[serve]\nport = [1, 2]\n", "line 2: port: expected <PORT>, found a list"),
        ("[serve]\ninsecure = 1\n", "line 2: insecure: expected true or false"),
        ("verbose = 300\n", "line 1: verbose: expected a number from 0 to 255, found 300"),
        ("[serve]\nport = 1\nport = 2\n", "line 3: duplicate key"),
        ("[serve]\nkv-mib = 1\nkv_mib = 2\n", "line 3: kv-mib is set in line 2 already"),
        (
            "[serve]\nport = 1979-05-27\n",
            "line 2: port: expected a number, a text or a list of these, found a",
        ),
        ("[serve\nport = 1\n", "line 1: "),
        ("config = \"other.toml\"\n", "line 1: config is not a flag of any command"),
        ("help = true\n", "line 1: help is not a flag of any command"),
    ] {
        let refusal = Case::new(text).refusal();
        assert!(refusal.starts_with(&format!(", {said}")), "{text:?}: {refusal}");
    }
}

#[test]
fn files_that_cannot_be_trusted_or_read_are_named() {
    let case = Case::new("");
    let file = case.folder.path().join("muser.toml");
    std::fs::write(&file, b"port = \"\xff\"").expect("a file");
    assert_eq!(case.refusal(), ": byte 8 is not UTF-8");
    std::fs::write(&file, " ".repeat((1 << 20) + 1)).expect("a file");
    assert!(case.refusal().contains("longer than 1048576 bytes"));
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt as _;
        std::fs::write(&file, "").expect("a file");
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o646)).expect("rights");
        assert!(case.refusal().contains("anyone may write it (mode 646)"));
    }
    std::fs::remove_file(&file).expect("it was there");
    assert!(case.refusal().contains("No such file"), "{}", case.refusal());
    assert_eq!(file::read(Path::new("/proc/no/such/muser.toml"), false), Ok(None));
}

/// Every flag of every command can be set in a file: its own default, or `true`.
#[test]
fn every_flag_can_be_set() {
    let mut root = Cli::command();
    root.build();
    let mut tried = 0;
    let mut open: Vec<(Vec<String>, Command)> = vec![(Vec::new(), root)];
    while let Some((path, command)) = open.pop() {
        for below in command.get_subcommands().filter(|below| below.get_name() != "help") {
            open.push(([path.clone(), vec![below.get_name().into()]].concat(), below.clone()));
        }
        for arg in command.get_arguments().filter(|arg| !arg.is_global_set() && arg.get_long().is_some()) {
            let id = arg.get_id().as_str();
            if id == "help" || id == "version" {
                continue;
            }
            let value = match arg.get_default_values().first() {
                _ if !arg.get_action().takes_values() => "true".to_owned(),
                Some(default) => format!("{:?}", default.to_string_lossy()),
                None => continue,
            };
            let text = format!("[{}]\n{} = {value}\n", path.join("."), arg.get_long().expect("filtered"));
            let read = Case::new(&text).read("doctor");
            assert!(read.is_ok(), "{text}: {:?}", read.err());
            tried += 1;
        }
    }
    assert!(tried > 80, "{tried}");
}
