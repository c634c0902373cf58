//! The loop of `muser top` on a terminal: looks, keys, a change of size, and the signals that end or suspend a program.

use std::io::Read as _;
use std::time::Duration;

use anyhow::Result;
use rustix::process::{Signal, getpid, kill_process};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use super::frame::{self, Shown};
use super::look::{Look, Trouble};
use super::past::Past;
use super::screen::Screen;
use crate::output::{Console, interrupted};

/// What a key asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Key {
    Quit,
    Next,
    Before,
}

/// Watches until somebody has seen enough.
pub async fn watch(mut look: Look, every: Duration, console: &Console) -> Result<()> {
    let place = look.place();
    let (mut past, mut report, mut trouble, mut page) = (Past::default(), None, None, 0);
    let (told, mut looks) = mpsc::channel(1);
    let (want, mut wanted) = mpsc::channel(1);
    let asking = tokio::spawn(async move {
        while let Some(row) = wanted.recv().await {
            if told.send(look.ask(row).await).await.is_err() {
                break;
            }
        }
    });
    let mut keys = keys();
    let mut resized = signal(SignalKind::window_change())?;
    let mut stop = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut suspend = signal(SignalKind::from_raw(Signal::TSTP.as_raw()))?;
    let mut tick = tokio::time::interval(every);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut screen = Screen::enter()?;
    let outcome = loop {
        let shown =
            Shown { place: &place, report: report.as_ref(), past: &past, trouble: trouble.as_deref() };
        let (lines, pages) = frame::screen(&shown, screen.size(), page);
        screen.draw(&lines, console.color())?;
        page = page.min(pages - 1);
        tokio::select! {
            // A look that is still going on is waited for, rather than another one begun.
            _ = tick.tick() => drop(want.try_send(past.since())),
            Some(found) = looks.recv() => match found {
                Ok(new) => {
                    past.take(&new);
                    (report, trouble) = (Some(new), None);
                }
                // What will not pass by itself is an error, unless it worked before.
                Err(Trouble::Lasting(error)) if report.is_none() => break Err(error),
                Err(why) => trouble = Some(format!("trying again every {} s: {why}", every.as_secs())),
            },
            Some(key) = keys.recv() => match key {
                Key::Quit => break Ok(()),
                Key::Next => page = (page + 1).min(pages - 1),
                Key::Before => page = page.saturating_sub(1),
            },
            _ = resized.recv() => {}
            _ = stop.recv() => break Err(interrupted()),
            _ = terminate.recv() => break Ok(()),
            _ = suspend.recv() => {
                drop(screen);
                let _ = kill_process(getpid(), Signal::STOP);
                // Here again after `fg`.
                screen = Screen::enter()?;
            }
        }
    };
    drop(screen);
    asking.abort();
    outcome
}

/// Keys, read by a thread of its own: it ends with the process, or with standard input.
fn keys() -> mpsc::Receiver<Key> {
    let (pressed, keys) = mpsc::channel(16);
    let read = move || {
        let mut bytes = [0; 64];
        while let Ok(n @ 1..) = std::io::stdin().lock().read(&mut bytes) {
            for key in meanings(&bytes[..n]) {
                if pressed.blocking_send(key).is_err() {
                    return;
                }
            }
        }
        // The channel stays open: an end of input is no key.
        std::mem::forget(pressed);
    };
    let _ = std::thread::Builder::new().name("keys".into()).spawn(read);
    keys
}

/// What some bytes of a terminal ask for.
fn meanings(bytes: &[u8]) -> Vec<Key> {
    let (mut keys, mut rest) = (Vec::new(), bytes);
    while let Some(first) = rest.first() {
        let sequences: [(&[u8], Key); 6] = [
            (b"\x1b[B", Key::Next),
            (b"\x1bOB", Key::Next),
            (b"\x1b[6~", Key::Next),
            (b"\x1b[A", Key::Before),
            (b"\x1bOA", Key::Before),
            (b"\x1b[5~", Key::Before),
        ];
        if let Some((sequence, key)) = sequences.iter().find(|(sequence, _)| rest.starts_with(sequence)) {
            keys.push(*key);
            rest = &rest[sequence.len()..];
            continue;
        }
        match first {
            b'q' | b'Q' => keys.push(Key::Quit),
            b'j' | b' ' => keys.push(Key::Next),
            b'k' => keys.push(Key::Before),
            // An unknown sequence means nothing, its letters included.
            0x1b => return keys,
            _ => {}
        }
        rest = &rest[1..];
    }
    keys
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_their_meanings() {
        let check = |bytes: &[u8], expected: &[Key]| assert_eq!(meanings(bytes), expected, "{bytes:?}");
        check(b"q", &[Key::Quit]);
        check(b"jk", &[Key::Next, Key::Before]);
        check(b"\x1b[B\x1b[6~\x1b[Aq", &[Key::Next, Key::Next, Key::Before, Key::Quit]);
        check(b"\x1b[15~q", &[]);
        check(b"x\r\n", &[]);
    }
}
