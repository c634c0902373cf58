//! A corpus of over a megabyte in many scripts against an independent tokenizer.
//!
//! `tests/data/corpus-hashes.txt` holds, for every section and both vocabularies, the SHA-256 of the ids that the Python
//! package `tokenizers` gives; `tests/corpus_oracle.py` made it. With the bundled vocabulary the comparison needs no
//! network.

#[path = "support/corpus.rs"]
mod corpus;
mod support;

use muser_gguf::GgufFile;
use muser_text::{Markers, Specials, Tokenizer};
use support::sha256;

const HASHES: &str = include_str!("data/corpus-hashes.txt");

fn check(vocabulary: &str, tokenizer: &Tokenizer) {
    let sections = corpus::sections();
    assert!(sections.iter().map(|section| section.text.len()).sum::<usize>() > 1_000_000);
    let mut wrong = Vec::new();
    for section in &sections {
        let ids = tokenizer.encode(&section.text, Specials::Plain);
        assert_eq!(tokenizer.decode(&ids, Markers::Hide), section.text, "{}", section.name);
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let line = format!(
            "{vocabulary} {} {} {} {}",
            section.name,
            sha256(section.text.as_bytes()),
            ids.len(),
            sha256(&bytes)
        );
        if !HASHES.lines().any(|expected| expected == line) {
            wrong.push(line);
        }
    }
    assert!(wrong.is_empty(), "these differ from tests/data/corpus-hashes.txt:\n{}", wrong.join("\n"));
}

#[test]
fn the_bundled_vocabulary_encodes_as_the_oracle() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/muse-tiny-Q4_K_M.gguf");
    let file = GgufFile::open(path).expect("the bundled model is in the repository");
    check("tiny", &Tokenizer::from_gguf(&file).expect("it is valid"));
}

#[test]
fn the_real_vocabulary_encodes_as_the_oracle() {
    let Some(vocabulary) = support::real_vocabulary() else { return };
    check("real", &Tokenizer::from_source(&vocabulary.source()).expect("it is valid"));
}

/// Writes what the oracle reads: the sections, and both vocabularies.
#[test]
#[ignore = "only to make tests/data/corpus-hashes.txt anew"]
fn write_oracle_input() {
    let folder = support::cache_folder().join("oracle");
    std::fs::create_dir_all(&folder).expect("the cache is writable");
    let write =
        |name: String, text: String| std::fs::write(folder.join(name), text).expect("the cache is writable");
    for section in corpus::sections() {
        write(format!("{}.section", section.name), section.text);
    }
    let real = support::real_vocabulary().expect("needed here");
    write("real.tokens".into(), real.tokens[..200_000].join("\n"));
    write("real.merges".into(), real.merges.join("\n"));
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/muse-tiny-Q4_K_M.gguf");
    let file = GgufFile::open(path).expect("the bundled model is in the repository");
    let strings = |key: &str| -> Vec<&str> { file.strings(key).expect("it has them") };
    let types: Vec<i64> = file.integers("tokenizer.ggml.token_type").expect("it has them");
    let tokens: Vec<&str> = strings("tokenizer.ggml.tokens")
        .into_iter()
        .zip(types)
        .filter(|(_, ty)| *ty == 1)
        .map(|(text, _)| text)
        .collect();
    write("tiny.tokens".into(), tokens.join("\n"));
    write("tiny.merges".into(), strings("tokenizer.ggml.merges").join("\n"));
}
