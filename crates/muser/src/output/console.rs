//! The terminal as the commands know it: is there one, may it be coloured, does the user want to hear anything.

use std::borrow::Cow;
use std::fmt::Display;
use std::io::{IsTerminal as _, Write as _};

use crate::cli::{ColorChoice, GlobalArgs};
use crate::env_vars;

/// Facts about the streams, found once at start, and the ways to say something on standard error.
#[derive(Clone, Debug)]
pub struct Console {
    color: bool,
    stdout_is_terminal: bool,
    stderr_is_terminal: bool,
    quiet: bool,
    progress: bool,
}

impl Console {
    /// Looks at the streams, the flags and the environment. Flags are stronger than the environment.
    pub fn from_environment(global: &GlobalArgs) -> Self {
        let stdout_is_terminal = std::io::stdout().is_terminal();
        let stderr_is_terminal = std::io::stderr().is_terminal();
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        let color = match global.color {
            ColorChoice::Always => true,
            ColorChoice::Never => false,
            ColorChoice::Auto => stderr_is_terminal && !dumb && !env_vars::is_set(env_vars::NO_COLOR),
        };
        let progress =
            stderr_is_terminal && !dumb && !global.quiet && !env_vars::is_set(env_vars::MUSER_NO_PROGRESS);
        Self { color, stdout_is_terminal, stderr_is_terminal, quiet: global.quiet, progress }
    }

    /// May standard error be coloured?
    pub fn color(&self) -> bool {
        self.color
    }

    /// Does a person look at standard output directly?
    pub fn stdout_is_terminal(&self) -> bool {
        self.stdout_is_terminal
    }

    /// Does a person look at standard error directly?
    pub fn stderr_is_terminal(&self) -> bool {
        self.stderr_is_terminal
    }

    /// Does the user want results and problems only?
    pub fn quiet(&self) -> bool {
        self.quiet
    }

    /// Are moving progress bars welcome?
    pub fn progress(&self) -> bool {
        self.progress
    }

    /// A remark that is no problem; silent with `--quiet`.
    pub fn note(&self, message: impl Display) {
        if !self.quiet {
            line(&self.dim(&sanitize(&message.to_string())));
        }
    }

    /// Something the user should know although the work goes on.
    pub fn warning(&self, message: impl Display) {
        line(&format!("{}: {}", self.paint("warning", "1;33"), sanitize(&message.to_string())));
    }

    /// Why the command failed.
    pub fn error(&self, message: impl Display) {
        line(&format!("{}: {}", self.paint("error", "1;31"), sanitize(&message.to_string())));
    }

    /// What to do about the error above.
    pub fn hint(&self, message: impl Display) {
        line(&format!("{}: {}", self.paint("hint", "1;36"), sanitize(&message.to_string())));
    }

    /// Text in the faint style, for figures and reasoning.
    pub fn dim<'a>(&self, text: &'a str) -> Cow<'a, str> {
        self.paint(text, "2")
    }

    fn paint<'a>(&self, text: &'a str, code: &str) -> Cow<'a, str> {
        if self.color { Cow::Owned(format!("\x1b[{code}m{text}\x1b[0m")) } else { Cow::Borrowed(text) }
    }
}

fn line(text: &str) {
    // Nobody is left to tell when standard error is gone.
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

/// Text that is safe to show on a terminal: control characters other than newline and tab are made visible, so that
/// neither a file's metadata nor a model's answer can move the cursor, retitle the window or hide what came before.
pub fn sanitize(text: &str) -> Cow<'_, str> {
    let harmful = |c: char| {
        (c.is_control() && c != '\n' && c != '\t')
            || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    if !text.contains(harmful) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        if harmful(c) {
            shown.extend(c.escape_default());
        } else {
            shown.push(c);
        }
    }
    Cow::Owned(shown)
}

#[cfg(test)]
mod tests {
    use super::sanitize;

    #[test]
    fn control_characters_become_visible() {
        fn check(input: &str, expected: &str) {
            assert_eq!(sanitize(input), expected, "{input:?}");
        }
        check("plain\ttext\nwith é and 狐", "plain\ttext\nwith é and 狐");
        check("\x1b[2J\x1b]0;owned\x07", "\\u{1b}[2J\\u{1b}]0;owned\\u{7}");
        check("a\rb\u{9b}c", "a\\rb\\u{9b}c");
        check("file\u{202e}fugg", "file\\u{202e}fugg");
    }
}
