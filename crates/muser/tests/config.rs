//! `muser.toml` and `muser config`, through the real binary.

mod support;

use support::Home;

#[test]
fn values_come_from_flags_the_environment_the_file_and_what_is_built_in() {
    let home = Home::new();
    home.file(
        "muser.toml",
        "model = \"muse-tiny\"\n[serve]\nport = 9000\ncors-origin = [\"https://a\", \"https://b\"]\n",
    );
    let mut command = home.command(["config", "show", "--json", "serve", "--queue", "5", "--context-shift"]);
    command.env("MUSER_MODEL", "other");
    let output = command.output().expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let shown: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let row = |key: &str| {
        (shown[key]["value"].to_string(), shown[key]["source"].as_str().expect("a source").to_owned())
    };
    assert_eq!(row("queue"), ("5".into(), "flag".into()));
    assert_eq!(row("model"), ("\"other\"".into(), "environment: MUSER_MODEL".into()));
    assert_eq!(row("port"), ("9000".into(), "muser.toml, line 3".into()));
    assert_eq!(row("cors-origin"), ("[\"https://a\",\"https://b\"]".into(), "muser.toml, line 4".into()));
    assert_eq!(row("context-shift"), ("true".into(), "flag".into()));
    assert_eq!(row("drain"), ("30".into(), "built in".into()));
    assert_eq!(row("key-file"), ("null".into(), "not set".into()));
    assert_eq!(row("quiet"), ("false".into(), "built in".into()));
}

/// What `config show` prints is a file that means the same.
#[test]
fn what_is_shown_can_be_used() {
    let home = Home::new();
    home.file("muser.toml", "[serve]\nport = 9000\ncontext-shift = true\nname = \"a \\\"b\\\" \\\\ c\"\n");
    let shown = |home: &Home| {
        let output = home.command(["config", "show", "serve"]).output().expect("it runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("text")
    };
    let first = shown(&home);
    assert!(first.starts_with("[serve]\n") && first.contains("name = \"a \\\"b\\\" \\\\ c\""), "{first}");
    // Flags of every command stand above the sections.
    let without = |text: &str| -> Vec<String> {
        let lines = text
            .lines()
            .filter(|line| !["quiet", "verbose", "color"].iter().any(|key| line.starts_with(key)));
        lines.map(|line| line.split("  # ").next().unwrap_or(line).trim_end().to_owned()).collect()
    };
    home.file("muser.toml", without(&first).join("\n"));
    assert_eq!(without(&shown(&home)), without(&first));
}

#[test]
fn the_file_is_found_named_and_switched_off() {
    let home = Home::new();
    let run = |args: &[&str]| {
        let output = home.command(args).output().expect("it runs");
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
        (output.status.code(), text(output.stdout), text(output.stderr))
    };
    let place = home.path("muser.toml").display().to_string();
    assert_eq!(run(&["config", "path"]), (Some(0), format!("{place}\n"), String::new()));
    assert!(run(&["config", "show"]).1.contains("no configuration file"));
    home.file("muser.toml", "[tokenize]\njson = true\nno-such = 1\n");
    let (code, out, err) = run(&["tokenize", "hello"]);
    assert_eq!((code, out.as_str()), (Some(2), ""));
    assert!(
        err.contains(&format!("error: {place}, line 3: no-such is not a flag of muser tokenize")),
        "{err}"
    );
    // Help is to be had all the same.
    assert_eq!(run(&["tokenize", "--help"]).0, Some(0));
    let (code, out, _) = run(&["--config", "off", "tokenize", "hello"]);
    assert!(code == Some(0) && !out.starts_with('['), "{out}");
    let other = home.file("other.toml", "[tokenize]\njson = true\n").display().to_string();
    let (code, out, _) = run(&["tokenize", "hello", "--config", &other]);
    assert!(code == Some(0) && out.starts_with('['), "{out}");
    let (code, _, err) = run(&["--config", &home.path("none.toml").display().to_string(), "models"]);
    assert!(code == Some(2) && err.contains("none.toml"), "{err}");
    let (code, _, err) = run(&["--config", "off", "config", "show", "nothing"]);
    assert!(code == Some(2) && err.contains("`nothing` is not a command"), "{err}");
}

/// A value of the file is a value like any other: the command acts on it.
#[test]
fn commands_use_what_the_file_says() {
    let home = Home::new();
    home.file("muser.toml", "quiet = true\n[run]\nmax-tokens = 3\ntemp = 0\nraw = true\n");
    let output = home.command(["run", "Once upon a time"]).output().expect("it runs");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && error.is_empty(), "{error}");
    let words = String::from_utf8_lossy(&output.stdout);
    assert!((1..=4).contains(&words.split_whitespace().count()), "{words}");
}
