//! The terminal while `muser top` has it: alternate screen, no echo, no line editing; and as it was afterwards, whatever ends the
//! program: `q`, Ctrl-C, SIGTERM, an error or a panic.
//!
//! Plain sequences and the system's own calls: a library for screens would bring more code than it saves here.

use std::io::{self, IsTerminal as _, Write};
use std::sync::{Mutex, Once, PoisonError};

use rustix::termios::{self, LocalModes, OptionalActions, SpecialCodeIndex, Termios};

use super::frame::Line;

const ENTER: &str = "\x1b[?1049h\x1b[?25l\x1b[2J";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";

/// What has to be put right, while something has.
static SAVED: Mutex<Option<Saved>> = Mutex::new(None);

struct Saved {
    /// Of standard input, if that is a terminal.
    termios: Option<Termios>,
    out: Box<dyn Write + Send>,
}

/// The screen; leaving is dropping it.
pub struct Screen {
    out: io::Stdout,
}

/// Is there a terminal that can be drawn on?
pub fn is_possible() -> bool {
    io::stdout().is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

impl Screen {
    /// Takes the terminal.
    pub fn enter() -> io::Result<Self> {
        Self::enter_on(Box::new(io::stdout()), termios::tcgetattr(io::stdin()).ok())
    }

    fn enter_on(mut out: Box<dyn Write + Send>, termios: Option<Termios>) -> io::Result<Self> {
        restore_on_panic();
        if let Some(before) = &termios {
            let mut quiet = before.clone();
            // Ctrl-C stays a signal.
            quiet.local_modes.remove(LocalModes::ICANON | LocalModes::ECHO);
            quiet.special_codes[SpecialCodeIndex::VMIN] = 1;
            quiet.special_codes[SpecialCodeIndex::VTIME] = 0;
            termios::tcsetattr(io::stdin(), OptionalActions::Now, &quiet)?;
        }
        out.write_all(ENTER.as_bytes())?;
        out.flush()?;
        *SAVED.lock().unwrap_or_else(PoisonError::into_inner) = Some(Saved { termios, out });
        Ok(Self { out: io::stdout() })
    }

    /// Columns and rows.
    pub fn size(&self) -> (usize, usize) {
        match termios::tcgetwinsize(&self.out) {
            Ok(size) if size.ws_col > 0 && size.ws_row > 0 => (size.ws_col.into(), size.ws_row.into()),
            _ => (80, 24),
        }
    }

    /// Shows a frame in place of the one before.
    pub fn draw(&self, lines: &[Line], color: bool) -> io::Result<()> {
        let mut text = String::from("\x1b[H");
        for (at, line) in lines.iter().enumerate() {
            text.push_str(if at == 0 { "" } else { "\r\n" });
            text.push_str(&line.ansi(color));
            text.push_str("\x1b[K");
        }
        text.push_str("\x1b[J");
        let mut out = self.out.lock();
        out.write_all(text.as_bytes())?;
        out.flush()
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        restore();
    }
}

/// Puts the terminal right; the second time there is nothing to do.
fn restore() {
    let saved = SAVED.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(mut saved) = saved {
        // The screen last: whoever sees it leave finds the terminal as it was.
        if let Some(termios) = &saved.termios {
            let _ = termios::tcsetattr(io::stdin(), OptionalActions::Now, termios);
        }
        let _ = saved.out.write_all(LEAVE.as_bytes());
        let _ = saved.out.flush();
    }
}

/// A panic's message belongs on the screen that stays.
fn restore_on_panic() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            restore();
            before(panic);
        }));
    });
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().expect("lock").write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// In one test, because there is one terminal in a process.
    #[test]
    fn the_terminal_is_put_right_once_whatever_ends_it() {
        let out = Shared::default();
        let written = || String::from_utf8(out.0.lock().expect("lock").split_off(0)).expect("UTF-8");
        let screen = Screen::enter_on(Box::new(out.clone()), None).expect("entered");
        assert_eq!(written(), ENTER);
        drop(screen);
        assert_eq!(written(), LEAVE);
        let panicked = std::panic::catch_unwind(|| {
            let _screen = Screen::enter_on(Box::new(out.clone()), None).expect("entered");
            // By the hook, before the message and before anything unwinds.
            panic!("a panic that a test makes");
        });
        assert!(panicked.is_err());
        assert_eq!(written(), format!("{ENTER}{LEAVE}"));
        restore();
        assert_eq!(written(), "");
    }
}
