//! Keys, the registry and invitations.

use std::path::Path;
use std::sync::Arc;

use crate::{
    Code, Entry, Facts, Load, Node, NodeConfig, NodeError, NodeKey, Outlet, Peer, Quote, Registry, Request,
    Rights, Secrets, Serving,
};

fn home() -> tempfile::TempDir {
    tempfile::tempdir().expect("a folder")
}

#[cfg(unix)]
fn chmod(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode)).expect("chmod");
}

fn registry_of(text: &str) -> Result<Registry, NodeError> {
    let home = home();
    let path = Registry::path(home.path());
    std::fs::write(&path, text).expect("written");
    #[cfg(unix)]
    chmod(&path, 0o600);
    Registry::read(home.path())
}

#[test]
fn a_registry_is_written_and_read_again() {
    let home = home();
    let key = |byte| NodeKey([byte; 32]);
    let rights = |prefill, sessions| Rights { prefill, sessions };
    let mut second = Entry::new("laptop-2.home_x", None, key(2), rights(false, false));
    second.next_key = Some(key(3));
    second.told_key = Some(key(4));
    (second.transfers, second.rows_a_minute, second.streams) = (1, 70_000, 8);
    let first = Entry::new("box", Some("[::1]:7788".into()), key(1), rights(true, true));
    Registry::update(home.path(), |registry| {
        registry.add(first.clone())?;
        registry.add(second.clone())
    })
    .expect("added");
    assert_eq!(Registry::read(home.path()).expect("read").nodes, [first, second]);
    let read = Registry::read(home.path()).expect("read");
    assert_eq!(read.by_key(&key(3)).map(|node| node.name.as_str()), Some("laptop-2.home_x"));
    assert!(read.named("nobody").expect_err("unknown").to_string().contains("box, laptop-2.home_x"));
    #[cfg(unix)]
    {
        let path = Registry::path(home.path());
        let mode =
            std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&path).expect("there").permissions());
        assert_eq!(mode & 0o777, 0o600);
        chmod(&path, 0o640);
        let refused = Registry::read(home.path()).expect_err("loose").to_string();
        assert!(refused.contains("640") && refused.contains("chmod 600"), "{refused}");
        std::fs::remove_file(&path).expect("removed");
        std::os::unix::fs::symlink("/dev/null", &path).expect("a link");
        assert!(Registry::read(home.path()).is_err());
    }
}

#[test]
fn lines_that_mean_nothing_are_named() {
    let key = "0a".repeat(32);
    let node = |more: &str| format!("[[node]]\nname = \"a\"\nkey = \"{key}\"\n{more}\n");
    let good = node("# a comment\nmay = [\"prefill\"] # and another\ntransfers = 3 # three\n");
    assert_eq!(registry_of(&good).expect("good").nodes[0].transfers, 3);
    assert_eq!(registry_of("").expect("no nodes").nodes, []);
    let cases = [
        ("name = \"a\"\n".to_owned(), 1, "[[node]]"),
        (node("colour = 3"), 4, "colour"),
        (node("may = [\"all\"]"), 4, "all"),
        (node("may = \"prefill\""), 4, "list"),
        (node("transfers = 65"), 4, "65"),
        (node("transfers = -1"), 4, "-1"),
        (node("streams = 0"), 4, "streams"),
        (node("streams = 9"), 4, "9"),
        (node("rows_a_minute = many"), 4, "many"),
        (node("name = \"b\""), 4, "twice"),
        (node("address = \"box\""), 1, "HOST:PORT"),
        (node("address = \"box:0\""), 1, "HOST:PORT"),
        (node("address = \"::1:99\""), 1, "HOST:PORT"),
        (node("address = box:99"), 4, "quotation"),
        (node("what"), 4, "what"),
        (node("next_key = \"00\""), 4, "64"),
        ("[[node]]\nname = \"a\"\n".to_owned(), 1, "key"),
        (format!("[[node]]\nkey = \"{key}\"\n"), 1, "name"),
        (format!("[[node]]\nname = \"a b\"\nkey = \"{key}\"\n"), 1, "a b"),
        (format!("[[node]]\nname = \"off\"\nkey = \"{key}\"\n"), 1, "off"),
        (node(&node("")), 4, "taken"),
        (node(&node("").replace("\"a\"", "\"b\"")), 4, "key"),
        (format!("[[node]]\nname = \"a\"\nkey = \"{}\"\n", key.to_uppercase()), 3, "small"),
    ];
    for (text, line, word) in cases {
        match registry_of(&text) {
            Err(NodeError::Registry { line: found, reason, .. }) => {
                assert_eq!(found, line, "{text}: {reason}");
                assert!(reason.contains(word), "{text}: {reason}");
            }
            other => panic!("{text}: {other:?}"),
        }
    }
}

#[test]
fn a_key_is_made_once_kept_and_changed() {
    let home = home();
    let first = Secrets::open_or_create(home.path()).expect("made");
    assert_eq!(Secrets::open_or_create(home.path()).expect("read").current.key(), first.current.key());
    let next = Secrets::begin_rotation(home.path()).expect("begun");
    assert_eq!(Secrets::begin_rotation(home.path()).expect("the same"), next);
    let both = Secrets::open_or_create(home.path()).expect("read");
    assert_eq!(
        (both.current.key(), both.next.as_ref().map(crate::Secret::key)),
        (first.current.key(), Some(next))
    );
    let proof = both.next.as_ref().expect("there").prove_next_of(first.current.key());
    assert!(crate::secret::is_next_of(first.current.key(), next, &proof));
    assert!(!crate::secret::is_next_of(next, next, &proof));
    assert!(!crate::secret::is_next_of(first.current.key(), first.current.key(), &proof));
    assert_eq!(Secrets::end_rotation(home.path()).expect("ended"), next);
    assert!(Secrets::open_or_create(home.path()).expect("read").next.is_none());
    let path = Secrets::path(home.path());
    let good = std::fs::read(&path).expect("read");
    for at in [0, 8, 10, 20, 50, 107] {
        let mut bad = good.clone();
        bad[at] ^= 1;
        std::fs::write(&path, &bad).expect("written");
        assert!(Secrets::open_or_create(home.path()).is_err(), "{at}");
    }
    for len in [0, 40, 107] {
        std::fs::write(&path, &good[..len]).expect("written");
        assert!(Secrets::open_or_create(home.path()).is_err(), "{len}");
    }
    std::fs::write(&path, &good).expect("written");
    #[cfg(unix)]
    {
        chmod(&path, 0o644);
        assert!(Secrets::open_or_create(home.path()).expect_err("loose").to_string().contains("644"));
    }
    assert!(!format!("{both:?}").contains("seed"));
}

#[test]
fn codes_are_typed_and_slips_are_found() {
    let home = home();
    let code = crate::invite(home.path(), Rights::default()).expect("a code");
    let text = code.to_string();
    assert_eq!((text.len(), text.matches('-').count()), (59, 4));
    assert_eq!(text.parse::<Code>().expect("itself"), code);
    assert_eq!(text.to_uppercase().replace('-', "").parse::<Code>().expect("as well"), code);
    for at in 0..text.len() {
        let mut slip = text.clone().into_bytes();
        if slip[at] == b'-' {
            continue;
        }
        slip[at] = if slip[at] == b'a' { b'b' } else { b'a' };
        let slip = String::from_utf8(slip).expect("text");
        assert!(slip.parse::<Code>().is_err(), "{at}");
        let shown = slip.parse::<Code>().expect_err("a slip").to_string();
        assert!(!shown.contains(&slip), "a code is a secret");
    }
    for bad in ["", "abc", &text[1..], &format!("{text}a"), "0".repeat(55).as_str()] {
        assert!(bad.parse::<Code>().is_err(), "{bad}");
    }
}

struct Idle;

impl Serving for Idle {
    fn facts(&self) -> Facts {
        Facts::clone(&super::facts(false))
    }

    fn load(&self) -> Load {
        Load::default()
    }

    fn quote(&self, _: &Peer, _: Quote, _: crate::Answer) {}

    fn request(&self, _: &Peer, _: Arc<Request>, outlet: Arc<dyn Outlet>) {
        outlet.give_up(crate::Reason::Busy);
    }
}

async fn serve(home: &Path) -> Arc<Node> {
    let listen = vec!["127.0.0.1:0".parse().expect("an address")];
    Node::start(NodeConfig { home: home.to_owned(), listen, dial: true }, Arc::new(Idle))
        .await
        .expect("a node")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_code_is_good_once_and_pins_both() {
    use crate::Peers as _;
    let (there, here) = (home(), home());
    let node = serve(there.path()).await;
    let address = node.addresses()[0].to_string();
    let may = Rights { prefill: true, sessions: false };
    let add = async |home: &Path, name: &str, code: &Code| {
        crate::add(home, name, &address, code, "laptop", Rights::default()).await
    };
    let code = crate::invite(there.path(), may).expect("a code");
    // Another code of the same node, of another node, one's own.
    let mut wrong = code.clone();
    wrong.break_secret();
    assert!(matches!(add(here.path(), "box", &wrong).await, Err(NodeError::Code { .. })));
    let foreign = crate::invite(home().path(), may).expect("a code");
    assert!(matches!(add(here.path(), "box", &foreign).await, Err(NodeError::WrongKey { .. })));
    let own = crate::invite(here.path(), may).expect("a code");
    assert!(add(here.path(), "box", &own).await.expect_err("own").is_usage());
    assert!(add(here.path(), "b ox", &code).await.expect_err("a name").is_usage());
    assert!(crate::add(here.path(), "box", "box", &code, "x", may).await.expect_err("no port").is_usage());
    // The right one.
    let key = add(here.path(), "box", &code).await.expect("it is taken");
    assert_eq!(key, node.key());
    let ours = Registry::read(here.path()).expect("read").nodes;
    let theirs = Registry::read(there.path()).expect("read").nodes;
    assert_eq!((ours.len(), ours[0].key, ours[0].rights), (1, key, Rights::default()));
    assert_eq!((theirs.len(), theirs[0].name.as_str(), theirs[0].rights), (1, "laptop", may));
    assert_eq!(theirs[0].key, Secrets::open_or_create(here.path()).expect("read").current.key());
    assert_eq!(node.enrolled(), 1);
    // Not a second time: with no code open nobody is asked who they are.
    assert!(add(home().path(), "box", &code).await.is_err());
    let another = crate::invite(there.path(), may).expect("a code");
    assert!(matches!(add(home().path(), "box", &code).await, Err(NodeError::Code { .. })));
    assert!(add(here.path(), "box", &another).await.expect_err("taken").is_usage());
    assert!(matches!(add(here.path(), "box2", &another).await, Err(NodeError::Code { .. })));
    // The same name there is told apart; wrong tries use a code up.
    let third = home();
    let another = crate::invite(there.path(), may).expect("a code");
    add(third.path(), "box", &another).await.expect("it is taken");
    let names: Vec<String> =
        Registry::read(there.path()).expect("read").nodes.into_iter().map(|node| node.name).collect();
    assert!(names.len() == 2 && names[1].starts_with("laptop-"), "{names:?}");
    let code = crate::invite(there.path(), may).expect("a code");
    let mut wrong = code.clone();
    wrong.break_secret();
    for _ in 0..5 {
        let _ = add(home().path(), "box", &wrong).await;
    }
    assert!(add(home().path(), "box", &code).await.is_err(), "void after five tries");
    // And they talk.
    let laptop = serve(here.path()).await;
    let began = std::time::Instant::now();
    while !laptop.list()[0].connected {
        assert!(began.elapsed().as_secs() < 10, "{:?}", laptop.list());
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_is_looked_at_without_an_engine() {
    use crate::Peers as _;
    let (there, here) = (home(), home());
    let node = serve(there.path()).await;
    let address = node.addresses()[0].to_string();
    let code = crate::invite(there.path(), Rights { prefill: true, sessions: false }).expect("a code");
    crate::add(here.path(), "box", &address, &code, "laptop", Rights::default()).await.expect("it is taken");
    let time = std::time::Duration::from_secs(5);
    let entry = Registry::read(here.path()).expect("read").nodes.remove(0);
    let visit = crate::visit(here.path(), &entry, time).await.expect("it answers");
    assert_eq!((visit.hello.identity, visit.hello.serves_prefill), (super::IDENTITY, true));
    assert!(visit.round_trip < time);
    // Whoever looks takes no connection's place.
    assert!(!node.list()[0].connected && node.list()[0].hello.is_none());
    let stranger = crate::visit(home().path(), &entry, time).await.expect_err("a stranger");
    assert!(stranger.to_string().contains("does not know this node"), "{stranger}");
    node.stop();
    assert!(matches!(crate::visit(here.path(), &entry, time).await, Err(NodeError::Unreachable { .. })));
    let silent = Entry { address: None, ..entry };
    assert!(crate::visit(here.path(), &silent, time).await.is_err());
}

#[test]
fn as_many_codes_are_open_and_nodes_known_as_the_limit_says() {
    let home = home();
    for open in 0..16 {
        assert!(crate::invite(home.path(), Rights::default()).is_ok(), "{open} are open");
    }
    let refused = crate::invite(home.path(), Rights::default()).expect_err("one too many");
    assert!(refused.is_usage() && refused.to_string().contains("at most 16"), "{refused}");
    let mut registry = Registry::default();
    let mut add = |n: u16| {
        let mut key = [7; 32];
        key[..2].copy_from_slice(&n.to_le_bytes());
        registry.add(Entry::new(&format!("n{n}"), None, NodeKey(key), Rights::default()))
    };
    (0..256).for_each(|n| add(n).expect("within the limit"));
    assert!(add(256).expect_err("one too many").to_string().contains("at most 256"));
}

/// A code of which ten minutes are over, and one whose ten minutes have not begun: the clock was turned back.
#[tokio::test]
async fn a_code_is_void_outside_of_its_time() {
    for late in [true, false] {
        a_code_is_void(late).await;
    }
}

async fn a_code_is_void(late: bool) {
    let (there, here) = (home(), home());
    let node = serve(there.path()).await;
    let code = crate::invite(there.path(), Rights::default()).expect("a code");
    // As if it had been made ten minutes ago, or were to be made in a minute.
    let path = there.path().join("keys").join("node.invitations");
    let mut bytes = std::fs::read(&path).expect("read");
    let mut until = [0; 8];
    until.copy_from_slice(&bytes[32..40]);
    let until = u64::from_le_bytes(until);
    let until = if late { until - crate::CODE_TIME.as_secs() } else { until + 60 };
    bytes[32..40].copy_from_slice(&until.to_le_bytes());
    std::fs::write(&path, bytes).expect("written");
    let address = node.addresses()[0].to_string();
    assert!(crate::add(here.path(), "box", &address, &code, "laptop", Rights::default()).await.is_err());
    assert!(Registry::read(here.path()).expect("read").nodes.is_empty());
    assert!(Registry::read(there.path()).expect("read").nodes.is_empty());
}
