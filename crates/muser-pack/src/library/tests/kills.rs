//! A process that publishes and deletes is killed, at random moments and at named places: what was acknowledged is whole, what
//! was not is absent or whole, the store opens without help and its count of bytes is right.
//!
//! Ten random kills and one at each place by default; with `MUSER_TEST_LONG=1` 200 and 70 at each.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use super::*;
use crate::{Area, DirStore, KeyFile, kill_point};

const FOLDER: &str = "MUSER_TEST_PACK_FOLDER";
const FIRST: &str = "MUSER_TEST_FIRST";
/// Blocks take longer to write: a random moment falls into it.
const LARGE: &str = "MUSER_TEST_LARGE_BLOCKS";

fn sized(large: bool) -> (Identity, u64) {
    let mut identity = identity();
    if large {
        let representation = &mut identity.representation;
        representation.row_bytes = 512;
        (representation.full_block_bytes, representation.sliding_block_bytes) = (256 << 10, 512 << 10);
    }
    (identity, if large { 24 << 20 } else { 700_000 })
}

fn open(folder: &Path, large: bool) -> (Library, Scope) {
    let keys = KeyFile::open_or_create(&folder.join("keys").join("packs.key")).expect("keys");
    let (identity, budget_bytes) = sized(large);
    let store = DirStore::open(folder.join("packs"), Some(budget_bytes)).expect("the folder");
    let options =
        LibraryOptions { anchor: Some(folder.join("keys").join("seen")), ..LibraryOptions::default() };
    let library = Library::open(Arc::new(store), keys, options).expect("the store opens unaided");
    let scope = library.scope(identity, "");
    (library, scope)
}

/// Prompts share their beginnings, as those of a conversation do.
fn numbered(number: u64) -> Vec<PositionKey> {
    prompt(300 + (number % 5) as usize * 200, 256, number + 1)
}

/// Every pack of the store is whole, and a lookup restores what was computed; no process has the store open.
fn check(folder: &Path, large: bool, acknowledged: Option<u64>, begun: u64, about: &str) {
    let (library, scope) = open(folder, large);
    let refused: Vec<_> =
        library.counters().snapshot().refused().filter(|(name, _)| *name != "replayed").collect();
    assert!(refused.is_empty(), "{about}: {refused:?}");
    let usage = library.store().usage().expect("usage");
    let area = |area| library.store().list(area).expect("list").iter().map(|one| one.bytes).sum::<u64>();
    let there: u64 = Area::ALL.into_iter().map(area).sum();
    assert_eq!(usage.held_bytes, there, "{about}: bytes are miscounted");
    assert!(usage.budget_bytes >= Some(usage.held_bytes), "{about}: {usage:?}");
    for number in acknowledged.into_iter().chain([begun]) {
        let units = numbered(number);
        let mut plan = library.longest(&scope, &units, units.len(), false);
        if acknowledged == Some(number) {
            // A process that another test is just starting has our locks until it is another program.
            for _ in 0..100 {
                if plan.is_some() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(20));
                plan = library.longest(&scope, &units, units.len(), false);
            }
            let found = plan.as_ref().map(|plan| plan.positions);
            assert_eq!(found, Some(units.len()), "{about}: prompt {number}");
        }
        if let Some(plan) = plan {
            restore(&library, &scope, &units, &plan).expect("whole");
        }
    }
    for pack in library.packs() {
        let report = library.verify(pack.id, &mut |_| {}).expect("readable");
        assert_eq!(report.refused, [], "{about}");
    }
}

/// Publishes, and now and then removes, and says what it has published; run by the tests below in a process of its own.
#[test]
fn publisher() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    let large = std::env::var_os(LARGE).is_some();
    let (library, scope) = open(Path::new(&folder), large);
    let first: u64 = std::env::var(FIRST).expect("a number").parse().expect("a number");
    let mut earlier = None;
    // A place that is not reached in so many rounds is not there.
    for number in first..first + 1000 {
        match publish(&library, &scope, &numbered(number)) {
            // The test reads this line: from here on the pack must survive.
            Ok(published) => {
                println!("published {number}");
                let last = earlier.replace(published.id);
                if let Some(last) = last.filter(|_| number % 3 == 0) {
                    match library.remove(last) {
                        Ok(()) => {}
                        Err(error) => assert!(matches!(error, PackError::NotFound { .. }), "{error}"),
                    }
                }
            }
            Err(error) => assert_eq!(error.counter_name(), "full", "{error}"),
        }
    }
}

fn spawn(folder: &Path, first: u64, large: bool, kill_at: Option<&str>) -> (Child, BufReader<ChildStdout>) {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command
        .args(["--exact", "library::tests::kills::publisher", "--nocapture"])
        .env(FOLDER, folder)
        .env(FIRST, first.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit());
    large.then(|| command.env(LARGE, "1"));
    kill_at.map(|place| command.env("MUSER_TEST_KILL_AT", place));
    let mut child = command.spawn().expect("the publisher starts");
    let output = BufReader::new(child.stdout.take().expect("a pipe"));
    (child, output)
}

/// Numbers that a publisher has acknowledged. The harness prints its own words before the first.
fn acknowledged(output: BufReader<ChildStdout>) -> impl Iterator<Item = u64> {
    let lines = output.lines().map_while(Result::ok);
    lines.filter_map(|line| line.split_once("published ")?.1.trim().parse().ok())
}

fn at_the_end(folder: &Path, large: bool) {
    let (library, _) = open(folder, large);
    library.collect_garbage().expect("nobody is active");
    assert!(!library.packs().is_empty());
    let partial = std::fs::read_dir(folder.join("packs").join("partial")).expect("list").count();
    assert_eq!(partial, 0);
}

fn long() -> bool {
    muser_testkit::is_long()
}

#[test]
fn killed_publishers_never_harm_what_was_published() {
    let kills = if long() { 200 } else { 10 };
    let folder = tempfile::tempdir().expect("a folder");
    let mut next = 0;
    for kill in 0..kills {
        let (mut child, output) = spawn(folder.path(), next, true, None);
        let (send, receive) = std::sync::mpsc::channel();
        let reader = std::thread::spawn(move || {
            for number in acknowledged(output) {
                let _ = send.send(number);
            }
        });
        let mut last = receive.recv_timeout(Duration::from_mins(1)).expect("something is published");
        std::thread::sleep(Duration::from_micros(crate::testing::mix(kill) & 0xffff));
        child.kill().expect("killed");
        child.wait().expect("gone");
        reader.join().expect("no panic");
        last = receive.try_iter().last().unwrap_or(last);
        check(folder.path(), true, Some(last), last + 1, &format!("kill {kill}"));
        next = last + 1;
    }
    at_the_end(folder.path(), true);
}

#[test]
fn killed_at_each_place_the_store_has_the_old_state_or_the_new_one() {
    use std::os::unix::process::ExitStatusExt as _;
    let rounds = if long() { 70 } else { 1 };
    let folder = tempfile::tempdir().expect("a folder");
    let (mut next, mut last) = (0, None);
    for round in 0..rounds {
        for place in kill_point::ALL {
            // The first time that the place is reached, and at random later times. Rewriting the catalog is rare.
            let times = if ["new catalog written", "catalog replaced"].contains(&place) { 2 } else { 24 };
            let time = if round == 0 { 1 } else { 1 + crate::testing::mix(round * 31 + next) % times };
            let kill_at = format!("{place}:{time}");
            let (mut child, output) = spawn(folder.path(), next, false, Some(&kill_at));
            last = acknowledged(output).last().or(last);
            let status = child.wait().expect("gone");
            assert_eq!(status.signal(), Some(9), "{kill_at} was never reached");
            let begun = last.map_or(0, |last| last + 1).max(next);
            check(folder.path(), false, last, begun, &kill_at);
            next = begun;
        }
    }
    at_the_end(folder.path(), false);
}
