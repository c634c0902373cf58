//! `muser tokenize`: text to ids.

use std::io::{BufWriter, Write as _};

use anyhow::Context as _;
use muser_text::{Specials, Tokenizer};

use crate::cli::TokenizeArgs;
use crate::ids;
use crate::model_file::ModelSource;
use crate::output::{Console, sanitize};

/// Runs the command.
pub fn run(args: TokenizeArgs, console: &Console) -> anyhow::Result<()> {
    let text = match args.text {
        Some(text) => text,
        None => ids::read_stdin("text")?,
    };
    let source = ModelSource::choose(args.model.as_deref(), console)?;
    let tokenizer = Tokenizer::from_gguf(&*source.open()?).with_context(|| source.label())?;
    let specials = if args.special { Specials::Parse } else { Specials::Plain };
    let ids = tokenizer.encode(&text, specials);
    let mut out = BufWriter::new(std::io::stdout().lock());
    if args.json {
        serde_json::to_writer(&mut out, &ids)?;
        writeln!(out)?;
    } else {
        for id in ids {
            let bytes = tokenizer.token_bytes(id).unwrap_or_default();
            writeln!(out, "{id:>7}  {}", show(bytes))?;
        }
    }
    out.flush()?;
    Ok(())
}

/// A token's bytes in quotes; what is not text shows as escapes.
fn show(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => sanitize(&format!("{text:?}")).into_owned(),
        Err(_) => format!("\"{}\"", bytes.escape_ascii()),
    }
}
