//! The engine inside a program of one's own: weights, executor, engine, request, tokens to text.
//!
//! ```text
//! cargo run --release -p muser-engine --example embed -- [MODEL.gguf]
//! ```

use std::{error::Error, path::PathBuf, sync::Arc};

use muser_cpu::{CpuExecutor, CpuOptions};
use muser_engine::{Engine, EngineConfig, Event, Request, SamplingParams};
use muser_model::Model;
use muser_text::{Specials, Tokenizer, Utf8Joiner};

#[expect(clippy::print_stdout, reason = "it is the result")]
fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).map_or_else(muser_testkit::muse_tiny, PathBuf::from);
    let model = Model::load(path)?;
    let tokenizer = Arc::new(Tokenizer::from_gguf(&model.file)?);
    let geometry = model.geometry.clone();
    let executor = CpuExecutor::new(model, CpuOptions::default())?;
    let engine = Engine::spawn(Box::new(executor), geometry, EngineConfig::default())?;

    let prompt = tokenizer.encode_prompt("Once upon a time", Specials::Plain);
    let sampling = SamplingParams::greedy();
    let request = Request { max_tokens: Some(48), sampling, ..Request::new(prompt, Vec::new()) };
    let mut submission = engine.submit(request)?;
    let (mut joiner, mut text) = (Utf8Joiner::default(), String::new());
    while let Some(event) = submission.recv() {
        match event {
            Event::Token(token) => {
                joiner.push(tokenizer.token_bytes(token.id).unwrap_or_default(), &mut text);
            }
            Event::Finished(end) => println!("{text}\n{:?}, {:?}", end.reason, end.usage),
            Event::Failed(error) => return Err(error.into()),
            _ => {}
        }
    }
    Ok(())
}
