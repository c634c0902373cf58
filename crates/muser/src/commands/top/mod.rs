//! `muser top`: the dashboard in a terminal, against a local or remote server.
//!
//! The server computes every figure; here they are laid out. Only `muser_server::dashboard` knows the shape of the answer.

mod frame;
mod look;
mod past;
#[cfg(unix)]
mod screen;
#[cfg(unix)]
mod watch;
mod words;

use std::io::Write as _;

use anyhow::Result;

use self::frame::Shown;
use self::look::{Look, Trouble};
use self::past::Past;
use crate::cli::TopArgs;
use crate::output::{Console, HintExt as _};

/// Columns of plain text.
const PLAIN_WIDTH: usize = 110;

/// Runs the command.
pub fn run(args: TopArgs, console: &Console) -> Result<()> {
    let look = Look::new(&args)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let outcome = runtime.block_on(act(&args, look, console));
    // A look that is going on has nobody to tell.
    runtime.shutdown_background();
    outcome
}

async fn act(args: &TopArgs, mut look: Look, console: &Console) -> Result<()> {
    #[cfg(unix)]
    if !args.once && !args.json && screen::is_possible() {
        let every = std::time::Duration::from_secs(args.interval.into());
        return watch::watch(look, every, console).await;
    }
    let _ = console;
    if args.json {
        let body = seen(look.body(0).await)?;
        let mut out = std::io::stdout().lock();
        out.write_all(body.trim_ascii())?;
        return Ok(writeln!(out)?);
    }
    let report = seen(look.ask(0).await)?;
    let mut past = Past::default();
    past.take(&report);
    let place = look.place();
    let shown = Shown { place: &place, report: Some(&report), past: &past, trouble: None };
    let mut out = std::io::stdout().lock();
    for line in frame::whole(&shown, PLAIN_WIDTH) {
        writeln!(out, "{}", line.plain())?;
    }
    Ok(())
}

fn seen<T>(found: Result<T, Trouble>) -> Result<T> {
    match found {
        Ok(found) => Ok(found),
        Err(Trouble::Lasting(error)) => Err(error),
        Err(Trouble::Passing(why)) => {
            Err(anyhow::anyhow!(why)).hint("muser serve starts a server; --url says where it is")
        }
    }
}
