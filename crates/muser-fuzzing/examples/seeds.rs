//! `seeds FOLDER`: the seeds of each target as FOLDER/NAME/seed-N, its dictionary as FOLDER/NAME.dict, and a line of numbers for
//! whoever starts the programs: name, longest input.

#![expect(clippy::print_stdout, reason = "a command-line tool")]
#![allow(
    clippy::format_push_string,
    clippy::format_collect,
    reason = "words are put together piece by piece"
)]

fn main() -> std::io::Result<()> {
    let folder = std::path::PathBuf::from(std::env::args_os().nth(1).unwrap_or_else(|| "corpus".into()));
    for target in muser_fuzzing::TARGETS {
        let own = folder.join(target.name);
        std::fs::create_dir_all(&own)?;
        for (index, seed) in (target.seeds)().iter().enumerate() {
            std::fs::write(own.join(format!("seed-{index:03}")), seed)?;
        }
        for (index, (_, bytes)) in target.regressions().iter().enumerate() {
            std::fs::write(own.join(format!("found-{index:03}")), bytes)?;
        }
        let words =
            target.words.iter().enumerate().map(|(index, word)| format!("w{index}=\"{}\"\n", quoted(word)));
        std::fs::write(folder.join(format!("{}.dict", target.name)), words.collect::<String>())?;
        println!("{} {}", target.name, target.max_len);
    }
    Ok(())
}

/// Words are written as libFuzzer reads them: `\xAB`, `\\` and `\"` are its own escapes.
fn quoted(word: &str) -> String {
    let escaped = word.replace("\\n", "\\x0a").replace("\\r", "\\x0d");
    let mut out = String::new();
    let mut before = ' ';
    for c in escaped.chars() {
        match c {
            '"' if before != '\\' => out.push_str("\\\""),
            c if c.is_ascii_graphic() || c == ' ' => out.push(c),
            c => c.to_string().bytes().for_each(|byte| out.push_str(&format!("\\x{byte:02x}"))),
        }
        before = c;
    }
    out
}
