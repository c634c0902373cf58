//! Token ids and prompts as people write them: in files, on the command line, on standard input.

use std::io::{IsTerminal as _, Read as _};
use std::path::Path;

use anyhow::Context as _;

use crate::output::{HintExt as _, usage_error};

/// Ids from a JSON array or separated by white space or commas.
pub fn parse_ids(text: &str) -> anyhow::Result<Vec<u32>> {
    let inner = text.trim();
    let inner = match inner.strip_prefix('[') {
        Some(rest) => rest.strip_suffix(']').context("a JSON array of ids does not end with `]`")?,
        None => inner,
    };
    inner
        .split(|c: char| c.is_whitespace() || c == ',')
        .filter(|word| !word.is_empty())
        .enumerate()
        .map(|(index, word)| {
            word.parse().map_err(|_| {
                let shown: String = word.chars().take(24).collect();
                anyhow::anyhow!("id {index}: expected a whole number below 2^32, found {shown:?}")
            })
        })
        .collect()
}

/// Ids from a file; `-` is standard input.
pub fn read_ids(path: &Path) -> anyhow::Result<Vec<u32>> {
    let (name, text) = if path == Path::new("-") {
        ("standard input".to_owned(), read_stdin("token ids")?)
    } else {
        let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
        (path.display().to_string(), text)
    };
    parse_ids(&text).context(name)
}

/// Most that is read from standard input: far more than any context, and no more than fits in memory.
const MAX_STDIN_BYTES: u64 = 256 << 20;

/// All of standard input as text. `what` is asked for when a person sits there instead of a pipe.
pub fn read_stdin(what: &str) -> anyhow::Result<String> {
    let stdin = std::io::stdin().lock();
    if stdin.is_terminal() {
        return Err(usage_error(format!("no {what} given")))
            .hint("give it as an argument or pipe it to standard input");
    }
    let mut bytes = Vec::new();
    stdin.take(MAX_STDIN_BYTES + 1).read_to_end(&mut bytes).context("standard input")?;
    if bytes.len() as u64 > MAX_STDIN_BYTES {
        return Err(usage_error(format!(
            "standard input: more than {} MiB, which no context holds",
            MAX_STDIN_BYTES >> 20
        )));
    }
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        anyhow::anyhow!(
            "standard input: expected UTF-8 text, found byte {:#04x} at {at}",
            error.as_bytes()[at]
        )
    })
}

#[cfg(test)]
mod tests {
    use super::parse_ids;

    fn check(text: &str, expected: Option<&[u32]>) {
        assert_eq!(parse_ids(text).ok().as_deref(), expected, "{text:?}");
    }

    #[test]
    fn ids_in_every_notation() {
        check("[1, 2,3]", Some(&[1, 2, 3]));
        check(" 1 2\n3\t4,5 ", Some(&[1, 2, 3, 4, 5]));
        check("", Some(&[]));
        check("[]", Some(&[]));
        check("4294967295", Some(&[u32::MAX]));
        check("4294967296", None);
        check("-1", None);
        check("[1, 2", None);
        check("1.5", None);
        check("[[1]]", None);
    }
}
