//! How fast the tokenizer loads and encodes, on one core, with the real vocabulary:
//! `cargo bench -p muser-bench --bench tokenizer_speed -- FILE...`
//!
//! Prints the load time and, for each text file and each section of the test corpus, megabytes per second (best of
//! twenty) and bytes per token.

#![allow(clippy::print_stdout, reason = "it is a report")]

#[path = "../../muser-text/tests/support/corpus.rs"]
mod corpus;
#[path = "../../muser-text/tests/support/mod.rs"]
mod support;

use muser_text::{Specials, Tokenizer};
use std::time::Instant;

fn main() {
    let Some(vocabulary) = support::real_vocabulary() else { return };
    let source = vocabulary.source();
    let mut loads: Vec<f64> = (0..10)
        .map(|_| {
            let start = Instant::now();
            let tokenizer = Tokenizer::from_source(&source);
            let elapsed = start.elapsed().as_secs_f64() * 1e3;
            drop(tokenizer);
            elapsed
        })
        .collect();
    loads.sort_by(f64::total_cmp);
    println!("load: best {:.0} ms, median {:.0} ms of {}", loads[0], loads[loads.len() / 2], loads.len());
    let tokenizer = match Tokenizer::from_source(&source) {
        Ok(tokenizer) => tokenizer,
        Err(error) => return println!("{error}"),
    };
    let mut texts: Vec<(String, String)> = Vec::new();
    for path in muser_bench::arguments() {
        match std::fs::read(&path) {
            Ok(bytes) => texts.push((path, String::from_utf8_lossy(&bytes).into_owned())),
            Err(error) => return println!("{path}: {error}"),
        }
    }
    texts.extend(corpus::sections().into_iter().map(|section| (section.name.to_owned(), section.text)));
    for (name, text) in texts {
        let mut best = f64::INFINITY;
        let mut tokens = 0;
        for _ in 0..20 {
            let start = Instant::now();
            tokens = tokenizer.encode(&text, Specials::Plain).len();
            best = best.min(start.elapsed().as_secs_f64());
        }
        println!(
            "{name}: {} bytes, {:.1} MB/s, {:.2} bytes per token",
            text.len(),
            text.len() as f64 / best / 1e6,
            text.len() as f64 / tokens as f64
        );
    }
}
