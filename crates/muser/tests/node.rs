//! `muser node` as people type it.

mod support;

use std::process::Output;

use support::Home;

fn run(home: &Home, args: &[&str]) -> Output {
    home.command(["node"].iter().chain(args)).output().expect("it starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_key_an_invitation_and_a_list() {
    let home = Home::new();
    let key = text(&run(&home, &["key"]).stdout);
    assert_eq!(key.trim().len(), 64);
    assert_eq!(text(&run(&home, &["key"]).stdout), key, "made once");
    let code = run(&home, &["invite"]);
    assert_eq!(text(&code.stdout).trim().len(), 59);
    assert!(text(&code.stderr).contains("10 minutes"));
    // Its own code, a slip of the pen, nobody there.
    let own = run(&home, &["add", "box", "127.0.0.1:9", text(&code.stdout).trim()]);
    assert_eq!(own.status.code(), Some(2), "{}", text(&own.stderr));
    assert!(text(&own.stderr).contains("this node's own"));
    let other = Home::new();
    let slip = run(&other, &["add", "box", "127.0.0.1:9", &text(&code.stdout).trim()[1..]]);
    assert_eq!(slip.status.code(), Some(2), "{}", text(&slip.stderr));
    let nobody = run(&other, &["add", "box", "127.0.0.1:9", text(&code.stdout).trim()]);
    assert_eq!(nobody.status.code(), Some(1), "{}", text(&nobody.stderr));
    assert!(text(&nobody.stderr).contains("127.0.0.1:9"));
    assert_eq!(text(&run(&home, &["list", "--json"]).stdout).trim(), "[]");
    // Alone it changes its key at once.
    assert_eq!(run(&home, &["rotate"]).status.code(), Some(0));
    assert_ne!(text(&run(&home, &["key"]).stdout), key);
}

#[test]
fn words_that_mean_nothing_are_usage() {
    let home = Home::new();
    let cases: [(&[&str], &str); 5] = [
        (&["add", "box", "host", "code"], "HOST:PORT"),
        (&["add", "box", "host:0", "code"], "HOST:PORT"),
        (&["invite", "--may", "everything"], "everything"),
        (&["remove", "box"], "muser node add"),
        (&["add", "box", "host:1", "code"], "muser node invite"),
    ];
    for (args, word) in cases {
        let said = run(&home, args);
        assert_eq!(said.status.code(), Some(2), "{args:?}: {}", text(&said.stderr));
        assert!(text(&said.stderr).contains(word), "{args:?}: {}", text(&said.stderr));
    }
    let registry = home.path("nodes.toml");
    std::fs::write(&registry, "[[node]]\nname = 3\n").expect("written");
    #[cfg(unix)]
    {
        let loose = run(&home, &["list"]);
        assert_eq!(loose.status.code(), Some(1));
        assert!(text(&loose.stderr).contains("chmod 600"), "{}", text(&loose.stderr));
        let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(&registry, private).expect("chmod");
    }
    let line = run(&home, &["list"]);
    assert_eq!(line.status.code(), Some(1));
    assert!(text(&line.stderr).contains("nodes.toml line 2"), "{}", text(&line.stderr));
}
