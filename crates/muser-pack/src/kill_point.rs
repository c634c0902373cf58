//! Named places at which a test kills its process, as a power cut of that process alone would. Outside this crate's own
//! tests there is nothing here.
//!
//! `MUSER_TEST_KILL_AT=NAME:N` kills at the `N`th time that the place is reached.

/// The process is at a place where dying must be harmless.
#[cfg(not(test))]
#[inline]
pub(crate) fn reached(_name: &'static str) {}

/// Dies here if this is the place and the time.
#[cfg(test)]
pub(crate) fn reached(name: &'static str) {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    static TARGET: OnceLock<Option<(String, AtomicUsize)>> = OnceLock::new();
    let target = TARGET.get_or_init(|| {
        let asked = std::env::var("MUSER_TEST_KILL_AT").ok()?;
        let (name, count) = asked.split_once(':')?;
        Some((name.to_owned(), AtomicUsize::new(count.parse().ok()?)))
    });
    let Some((wanted, count)) = target else { return };
    if wanted == name && count.fetch_sub(1, SeqCst) == 1 {
        #[cfg(unix)]
        {
            let killed =
                rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
            killed.expect("a process may kill itself");
        }
        loop {
            std::thread::park();
        }
    }
}

/// Every place, in the order of a publication.
#[cfg(test)]
pub(crate) const ALL: [&str; 15] = [
    "partial created",
    "bytes counted",
    "a part written",
    "object written",
    "object synced",
    "object linked",
    "partial unlinked",
    "before folders are synced",
    "a folder synced",
    "catalog record written",
    "catalog record synced",
    "new catalog written",
    "catalog replaced",
    "object deleted",
    "deletion counted",
];
