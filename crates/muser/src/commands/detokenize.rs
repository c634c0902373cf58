//! `muser detokenize`: ids to text.

use std::io::Write as _;

use anyhow::Context as _;
use muser_text::{Markers, Tokenizer};

use crate::cli::DetokenizeArgs;
use crate::ids;
use crate::model_file::ModelSource;
use crate::output::{Console, sanitize};

/// Runs the command.
pub fn run(args: DetokenizeArgs, console: &Console) -> anyhow::Result<()> {
    let list = if args.ids.is_empty() { ids::read_stdin("token ids")? } else { args.ids.join(" ") };
    let list = ids::parse_ids(&list)?;
    let source = ModelSource::choose(args.model.as_deref(), console)?;
    let tokenizer = Tokenizer::from_gguf(&*source.open()?).with_context(|| source.label())?;
    if let Some(at) = list.iter().position(|&id| tokenizer.token_bytes(id).is_none()) {
        anyhow::bail!("id {at} is {}, the vocabulary ends at {}", list[at], tokenizer.vocab_size() - 1);
    }
    let markers = if args.special { Markers::Show } else { Markers::Hide };
    let text = tokenizer.decode(&list, markers);
    let mut out = std::io::stdout().lock();
    if args.json {
        serde_json::to_writer(&mut out, &serde_json::json!({ "text": text }))?;
        writeln!(out)?;
    } else if console.stdout_is_terminal() {
        writeln!(out, "{}", sanitize(&text))?;
    } else {
        // Byte for byte, so that a pipe through tokenize and detokenize changes nothing.
        out.write_all(text.as_bytes())?;
    }
    out.flush()?;
    Ok(())
}
