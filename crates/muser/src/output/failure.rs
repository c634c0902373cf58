//! How a command ends: exit codes, hints, broken pipes.
//!
//! Commands return `anyhow::Result<()>`. An error prints as one line (its chain joined by `: `), below it a hint when
//! one was attached with [`HintExt::hint`]. A broken pipe is success: `muser run ... | head -1` got what it wanted.

use std::fmt;
use std::process::ExitCode;

use super::Console;

/// Something failed while running: a file, a device, the network, the model.
pub const EXIT_FAILURE: u8 = 1;
/// The command line was wrong.
pub const EXIT_USAGE: u8 = 2;
/// Stopped by Ctrl-C (128 + SIGINT, as shells expect).
pub const EXIT_INTERRUPTED: u8 = 130;

/// An error whose fault is the command line's: exit code 2.
pub fn usage_error(message: impl fmt::Display) -> anyhow::Error {
    anyhow::Error::new(Usage(message.to_string()))
}

/// The user pressed Ctrl-C: exit code 130, nothing printed.
pub fn interrupted() -> anyhow::Error {
    anyhow::Error::new(Interrupted)
}

/// Attaches a line of advice to an error.
pub trait HintExt<T> {
    /// The error prints as before, with `hint: ...` below it.
    fn hint(self, hint: impl fmt::Display) -> anyhow::Result<T>;
}

impl<T, E: Into<anyhow::Error>> HintExt<T> for Result<T, E> {
    fn hint(self, hint: impl fmt::Display) -> anyhow::Result<T> {
        self.map_err(|error| anyhow::Error::new(Hinted { error: error.into(), hint: hint.to_string() }))
    }
}

/// Prints the outcome and turns it into the process's exit code.
pub fn exit_code(outcome: anyhow::Result<()>, console: &Console) -> ExitCode {
    let Err(error) = outcome else { return ExitCode::SUCCESS };
    if is_broken_pipe(&error) {
        return ExitCode::SUCCESS;
    }
    if find::<Interrupted>(&error).is_some() {
        return ExitCode::from(EXIT_INTERRUPTED);
    }
    console.error(one_line(&error));
    if let Some(hinted) = find::<Hinted>(&error) {
        console.hint(&hinted.hint);
    }
    ExitCode::from(if find::<Usage>(&error).is_some() { EXIT_USAGE } else { EXIT_FAILURE })
}

/// Ends the process from a thread that has nobody to return to.
pub fn abandon(code: u8) -> ! {
    #[expect(clippy::exit, reason = "a second Ctrl-C means: now")]
    std::process::exit(i32::from(code))
}

/// The chain of causes in one line, without the repetitions of errors that print their source themselves.
fn one_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain() {
        let text = cause.to_string();
        if line.is_empty() {
            line = text;
        } else if !text.is_empty() && !line.contains(&text) {
            line.push_str(": ");
            line.push_str(&text);
        }
    }
    line.replace('\n', " ")
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    find::<std::io::Error>(error).is_some_and(|io| io.kind() == std::io::ErrorKind::BrokenPipe)
}

/// The first error of this type in the chain; looks inside [`Hinted`], whose content is not part of the chain.
fn find<E: std::error::Error + Send + Sync + 'static>(error: &anyhow::Error) -> Option<&E> {
    error.chain().find_map(|cause| match cause.downcast_ref::<E>() {
        Some(found) => Some(found),
        None => cause.downcast_ref::<Hinted>().and_then(|hinted| find(&hinted.error)),
    })
}

#[derive(Debug)]
struct Usage(String);

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

#[derive(Debug)]
struct Interrupted;

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

/// Prints as the error it holds.
#[derive(Debug)]
struct Hinted {
    error: anyhow::Error,
    hint: String,
}

impl fmt::Display for Hinted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&one_line(&self.error))
    }
}

impl std::error::Error for Hinted {}

#[cfg(test)]
mod tests {
    use anyhow::Context as _;

    use super::*;

    fn io_error(kind: std::io::ErrorKind) -> anyhow::Error {
        anyhow::Error::new(std::io::Error::new(kind, "the cause"))
    }

    #[test]
    fn chains_print_in_one_line_without_repetition() {
        let error = io_error(std::io::ErrorKind::NotFound)
            .context("cannot open model.gguf: the cause")
            .context("loading");
        assert_eq!(one_line(&error), "loading: cannot open model.gguf: the cause");
    }

    #[test]
    fn hints_keep_message_and_kind() {
        let error =
            Err::<(), _>(usage_error("bad flag")).hint("try another").context("outer").expect_err("an error");
        assert_eq!(one_line(&error), "outer: bad flag");
        assert_eq!(find::<Hinted>(&error).expect("a hint").hint, "try another");
        assert!(find::<Usage>(&error).is_some());
    }

    #[test]
    fn broken_pipe_is_found_below_contexts_and_hints() {
        let broken = Err::<(), _>(io_error(std::io::ErrorKind::BrokenPipe))
            .hint("h")
            .context("writing")
            .expect_err("an error");
        assert!(is_broken_pipe(&broken));
        assert!(!is_broken_pipe(&io_error(std::io::ErrorKind::NotFound)));
    }
}
