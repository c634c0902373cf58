//! An answer as a person reads it while it is written: thoughts faint on standard error, the answer on standard output.

use std::io::{self, Write as _};

use super::{Sink, ToolCall};
use crate::output::{Console, sanitize};

/// Writes pieces of an answer as they come and keeps the two streams from running into each other on a terminal.
pub struct Printer<'a> {
    console: &'a Console,
    reasoning: Place,
    answer: Place,
}

/// Where the cursor is on a stream.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Untouched,
    LineStart,
    InLine,
}

impl Place {
    fn after(self, text: &str) -> Self {
        match text.as_bytes().last() {
            None => self,
            Some(b'\n') => Self::LineStart,
            Some(_) => Self::InLine,
        }
    }
}

impl Sink for Printer<'_> {
    fn reasoning(&mut self, text: &str) -> io::Result<()> {
        if text.is_empty() || self.console.quiet() {
            return Ok(());
        }
        let shown = if self.console.stderr_is_terminal() { sanitize(text) } else { text.into() };
        let mut err = io::stderr().lock();
        // Each piece is faint by itself, so that no interruption leaves the terminal so.
        write!(err, "{}", self.console.dim(&shown))?;
        err.flush()?;
        self.reasoning = self.reasoning.after(text);
        Ok(())
    }

    fn answer(&mut self, text: &str) -> io::Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        self.end_reasoning()?;
        let shown = if self.console.stdout_is_terminal() { sanitize(text) } else { text.into() };
        let mut out = io::stdout().lock();
        out.write_all(shown.as_bytes())?;
        out.flush()?;
        self.answer = self.answer.after(text);
        Ok(())
    }

    /// On a line of its own.
    fn tool_call(&mut self, call: &ToolCall) -> io::Result<()> {
        self.end_reasoning()?;
        self.end_line()?;
        self.answer(&format!("{}({})\n", call.name, call.arguments))
    }
}

impl<'a> Printer<'a> {
    /// Nothing was written yet.
    pub fn new(console: &'a Console) -> Self {
        Self { console, reasoning: Place::Untouched, answer: Place::Untouched }
    }

    /// The answer is over: the cursor goes to the start of a line.
    pub fn finish(mut self) -> io::Result<()> {
        self.end_reasoning()?;
        self.end_line()
    }

    fn end_line(&mut self) -> io::Result<()> {
        if self.answer == Place::InLine {
            let mut out = io::stdout().lock();
            out.write_all(b"\n")?;
            out.flush()?;
            self.answer = Place::LineStart;
        }
        Ok(())
    }

    fn end_reasoning(&mut self) -> io::Result<()> {
        let line_ends = match self.reasoning {
            Place::Untouched => return Ok(()),
            Place::LineStart => 1,
            Place::InLine => 2,
        };
        // On a terminal an empty line between thought and answer; in a log a plain line end.
        let count = if self.console.stderr_is_terminal() { line_ends } else { line_ends - 1 };
        let mut err = io::stderr().lock();
        for _ in 0..count {
            err.write_all(b"\n")?;
        }
        err.flush()?;
        self.reasoning = Place::Untouched;
        Ok(())
    }
}
