//! The real vocabulary for tests: fetched once, never committed.

#![allow(dead_code, reason = "every test program uses a part of it")]

use std::collections::HashMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::Command;

use muser_text::{VocabSource, spell_bytes};

/// Names of the used special tokens; the others are reserved ones.
const SPECIALS: [(usize, &str); 15] = [
    (200_000, "<|begin_of_text|>"),
    (200_001, "<|end_of_text|>"),
    (200_007, "<|eom|>"),
    (200_008, "<|eot|>"),
    (200_018, "<|finetune_right_pad|>"),
    (200_022, "<|start|>"),
    (200_023, "<|message|>"),
    (200_080, "<|image_start|>"),
    (200_081, "<|image_end|>"),
    (200_082, "<|vid_start|>"),
    (200_083, "<|vid_end|>"),
    (200_087, "<|vid_frame_separator|>"),
    (200_090, "<|image|>"),
    (200_091, "<|video|>"),
    (200_092, "<|patch|>"),
];

/// Tokens and merges as the released model files hold them.
pub(crate) struct RealVocabulary {
    /// Text of every id.
    pub(crate) tokens: Vec<String>,
    /// Merges by priority.
    pub(crate) merges: Vec<String>,
}

/// Where fetched files are kept.
pub(crate) fn cache_folder() -> PathBuf {
    match std::env::var_os("MUSER_TEST_CACHE") {
        Some(folder) => PathBuf::from(folder),
        None => PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../target/test-cache"),
    }
}

/// The real vocabulary, or `None` where it cannot be fetched, which is said.
pub(crate) fn real_vocabulary() -> Option<RealVocabulary> {
    let cache = cache_folder();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fetch_vocab.sh");
    let fetched = Command::new("sh").arg(script).arg(&cache).status();
    if !fetched.is_ok_and(|status| status.success()) {
        muser_testkit::skip(
            muser_testkit::Need::Network,
            "the real vocabulary could not be fetched; nothing was checked",
        );
        return None;
    }
    let ranks = std::fs::read_to_string(cache.join("llama4.tiktoken")).expect("the script wrote it");
    Some(from_ranks(&ranks))
}

/// SHA-256 in hexadecimal.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    let mut out = String::new();
    for byte in aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, bytes).as_ref() {
        write!(out, "{byte:02x}").expect("writing to a string cannot fail");
    }
    out
}

fn from_ranks(ranks: &str) -> RealVocabulary {
    let mut tokens: Vec<Vec<u8>> = Vec::new();
    for line in ranks.lines() {
        let (text, rank) = line.split_once(' ').expect("text and rank");
        assert_eq!(rank.parse::<usize>().expect("a rank"), tokens.len(), "ranks are in order");
        tokens.push(base64(text));
    }
    let by_bytes: HashMap<&[u8], usize> =
        tokens.iter().enumerate().map(|(rank, token)| (token.as_slice(), rank)).collect();
    let spelled: Vec<String> = tokens.iter().map(|token| spell_bytes(token)).collect();
    let mut merges = Vec::new();
    for token in &tokens {
        let mut splits: Vec<(usize, usize)> = (1..token.len())
            .filter_map(|middle| Some((*by_bytes.get(&token[..middle])?, *by_bytes.get(&token[middle..])?)))
            .collect();
        splits.sort_unstable();
        merges.extend(splits.iter().map(|(left, right)| format!("{} {}", spelled[*left], spelled[*right])));
    }
    let mut all = spelled;
    for id in 200_000..202_048 {
        let name = SPECIALS.iter().find(|(special, _)| *special == id).map(|(_, name)| (*name).to_owned());
        all.push(name.unwrap_or_else(|| format!("<|reserved_special_token_{}|>", id - 200_000)));
    }
    RealVocabulary { tokens: all, merges }
}

impl RealVocabulary {
    /// As the metadata of the released files.
    pub(crate) fn source(&self) -> VocabSource<'_> {
        let mut token_types = vec![1; 200_000];
        token_types.resize(202_048, 3);
        VocabSource {
            pre: "llama4".to_owned(),
            tokens: self.tokens.iter().map(String::as_bytes).collect(),
            token_types,
            merges: self.merges.iter().map(String::as_bytes).collect(),
            bos: Some(200_000),
            eos: Some(200_001),
            eot: Some(200_008),
            padding: Some(200_018),
            add_bos: true,
        }
    }
}

fn base64(text: &str) -> Vec<u8> {
    let mut out = Vec::new();
    let mut bits = 0_u32;
    let mut count = 0;
    for c in text.bytes().filter(|c| *c != b'=') {
        let value = match c {
            b'A'..=b'Z' => c - b'A',
            b'a'..=b'z' => c - b'a' + 26,
            b'0'..=b'9' => c - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            other => panic!("{other} is not base64"),
        };
        bits = bits << 6 | u32::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            out.push((bits >> count) as u8);
        }
    }
    out
}
