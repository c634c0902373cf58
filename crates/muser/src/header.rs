//! The header of a model that is not here, fetched by range from where `muser pull` would fetch the file.

use std::path::PathBuf;

use anyhow::Context as _;
use muser_gguf::GgufFile;
use muser_hub::{DEFAULT_BASE, Hub, Proxies, PullOptions, Source, Token, beginning};
use muser_model::Geometry;

use crate::env_vars;
use crate::output::{Console, HintExt as _, usage_error};

/// Bytes that are fetched first (the released model's header has 13 MB), and at most.
const FIRST: u64 = 16 << 20;
const MOST: u64 = 256 << 20;

/// The file that `given` names for `muser pull`, with its header and zeros for its weights.
pub fn fetch(given: &str, console: &Console) -> anyhow::Result<(String, GgufFile, Geometry)> {
    let text = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let base = text(env_vars::MUSER_HUB_URL).or_else(|| text(env_vars::HF_ENDPOINT));
    let hub = Hub::new(&base.unwrap_or(DEFAULT_BASE.to_owned()))?;
    let sources = Source::parse(given, &hub).map_err(usage_error)?;
    let [source] = sources.as_slice() else {
        return Err(usage_error(format!("{given} is a set of {} files: pull it first", sources.len())));
    };
    let options = PullOptions {
        token: text(env_vars::MUSER_HUB_TOKEN)
            .or_else(|| text(env_vars::HF_TOKEN))
            .and_then(|t| Token::new(&t)),
        proxies: Proxies::from_env(text)?,
        extra_roots: text(env_vars::SSL_CERT_FILE).map(Into::into),
        ..PullOptions::default()
    };
    let mut bytes = FIRST;
    loop {
        console.note(format!("{given} is not here; fetching the first {} MB of it", bytes >> 20));
        let found = beginning(&hub, source, &options, bytes)
            .hint("a model that is here, or none, needs no network")?;
        let all = found.bytes.len() as u64 == found.total;
        match open(&found.bytes, found.total) {
            Ok((file, geometry)) => return Ok((source.file_name.clone(), file, geometry)),
            Err(error) if all || bytes >= MOST => return Err(error.context(source.file_name.clone())),
            // It may go on behind these bytes.
            Err(_) => bytes *= 4,
        }
    }
}

/// Opens a file of `total` bytes of which only the first are known, as a file with a hole behind them.
fn open(bytes: &[u8], total: u64) -> anyhow::Result<(GgufFile, Geometry)> {
    let scratch = Scratch::new()?;
    std::fs::write(&scratch.0, bytes).with_context(|| scratch.0.display().to_string())?;
    let file = std::fs::File::options().write(true).open(&scratch.0)?;
    file.set_len(total).with_context(|| scratch.0.display().to_string())?;
    let file = GgufFile::open(&scratch.0)?;
    let geometry = Geometry::from_gguf(&file)?;
    Ok((file, geometry))
}

/// A file that goes when it is dropped; what is mapped stays mapped.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> anyhow::Result<Self> {
        let name = format!("muser-header-{}.gguf", std::process::id());
        let path = std::env::temp_dir().join(name);
        // Somebody else's file, or a link, is not followed.
        std::fs::File::options()
            .write(true)
            .create_new(true)
            .open(&path)
            .with_context(|| path.display().to_string())?;
        Ok(Self(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model_file::ModelSource;

    #[test]
    fn a_header_is_enough_and_half_of_one_is_not() {
        let file = ModelSource::Bundled.open().expect("bundled");
        let (bytes, start) = (file.shard_bytes(0), file.data_start(0));
        let expected = Geometry::from_gguf(&file).expect("a model");
        let (opened, geometry) = open(&bytes[..start], bytes.len() as u64).expect("the header");
        assert_eq!(geometry, expected);
        assert_eq!(opened.tensors().len(), file.tensors().len());
        open(&bytes[..start / 2], bytes.len() as u64).expect_err("half a header");
        open(&bytes[..start], start as u64).expect_err("no room for the weights");
    }
}
