//! Finding a draft model for a model and handing it to the executor.
//!
//! `auto` never fails: it takes a draft that lies beside the model and fits, and says what it passed over. A file that was
//! named must fit. A file is a candidate by its name (`dflash` in it); that it fits is decided by what is in it.

use std::sync::Arc;

use anyhow::{Context as _, Result};
use muser_backend::{ExecError, Executor};
use muser_gguf::GgufFile;
use muser_model::{Draft, Model, ModelError};

use crate::cli::CompanionChoice;
use crate::model_file::{self, ModelSource};
use crate::output::HintExt as _;

/// What became of the search, in words for the user.
#[derive(Debug, Default)]
pub struct Attached {
    /// The draft in use.
    pub draft: Option<Draft>,
    /// What messages call it.
    pub label: Option<String>,
    /// Files that look like drafts and were passed over, with reasons.
    pub passed_over: Vec<String>,
}

/// Finds the draft that `choice` means and attaches it. Called before the engine allocates its KV.
pub fn attach(
    choice: &CompanionChoice,
    source: &ModelSource,
    model: &Model,
    executor: &mut dyn Executor,
) -> Result<Attached> {
    match choice {
        CompanionChoice::Off => Ok(Attached::default()),
        CompanionChoice::File(path) => {
            let label = path.display().to_string();
            let file = model_file::open_companion(path).and_then(|file| Draft::from_gguf(Arc::new(file)));
            let draft = file.map_err(anyhow::Error::new).and_then(|draft| {
                draft.check_target(model)?;
                executor.attach_draft(draft.clone())?;
                Ok(draft)
            });
            let draft = draft.with_context(|| label.clone()).hint(
                "--draft wants a DFlash file that was made for this model; `--draft off` does without",
            )?;
            Ok(Attached { draft: Some(draft), label: Some(label), passed_over: Vec::new() })
        }
        CompanionChoice::Auto => Ok(attach_any(candidates(source), model, executor)),
    }
}

/// Attaches the first of these that fits.
fn attach_any(candidates: Vec<Candidate>, model: &Model, executor: &mut dyn Executor) -> Attached {
    let mut outcome = Attached::default();
    for Candidate { label, open } in candidates {
        let draft = open().and_then(|file| Draft::from_gguf(Arc::new(file)));
        let fits = draft.and_then(|draft| draft.check_target(model).map(|()| draft));
        // The norms are all that a copy copies.
        let reason = match fits.map(|draft| executor.attach_draft(draft.clone()).map(|()| draft)) {
            Ok(Ok(draft)) => {
                (outcome.draft, outcome.label) = (Some(draft), Some(label));
                return outcome;
            }
            // Not every backend drafts: nothing is wrong with the file.
            Ok(Err(ExecError::Unsupported { backend, what })) => {
                tracing::info!(backend, what, "no draft");
                return outcome;
            }
            Ok(Err(error)) => error.to_string(),
            Err(error) => error.to_string(),
        };
        outcome.passed_over.push(format!("{label} is not used as a draft: {reason}"));
    }
    outcome
}

struct Candidate {
    label: String,
    open: Box<dyn FnOnce() -> Result<GgufFile, ModelError>>,
}

/// Drafts that may belong to a model, the likeliest first.
fn candidates(source: &ModelSource) -> Vec<Candidate> {
    match source {
        ModelSource::Bundled => model_file::bundled_draft()
            .map(|open| Candidate { label: format!("{}-dflash (bundled)", model_file::BUNDLED_NAME), open })
            .into_iter()
            .collect(),
        ModelSource::File(path) => model_file::beside(path, "dflash")
            .into_iter()
            .map(|path| Candidate {
                label: path.display().to_string(),
                open: Box::new(move || model_file::open_companion(&path)),
            })
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use muser_backend::{KvType, ReferenceExecutor};

    use super::*;

    fn models() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models")
    }

    fn try_attach(choice: &CompanionChoice, source: &ModelSource) -> (Result<Attached>, bool) {
        let model = source.load().expect("the model loads");
        let mut executor = ReferenceExecutor::new(model.clone(), KvType::F32).expect("it runs everything");
        let outcome = attach(choice, source, &model, &mut executor);
        (outcome, executor.info().draft.is_some())
    }

    #[test]
    fn the_bundled_model_and_its_file_have_a_draft() {
        let file = ModelSource::File(models().join("muse-tiny-Q4_K_M.gguf"));
        for source in [ModelSource::Bundled, file] {
            let (outcome, attached) = try_attach(&CompanionChoice::Auto, &source);
            let outcome = outcome.expect("auto never fails");
            assert!(attached && outcome.label.is_some() && outcome.passed_over.is_empty(), "{outcome:?}");
            assert!(!try_attach(&CompanionChoice::Off, &source).1);
        }
    }

    #[test]
    fn what_does_not_fit_is_passed_over_or_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let model = folder.path().join("model.gguf");
        std::fs::copy(models().join("muse-tiny-Q4_K_M.gguf"), &model).expect("a copy");
        let source = ModelSource::File(model.clone());
        let bad = folder.path().join("bad-dflash.gguf");
        std::fs::write(&bad, b"GGUF and nothing else").expect("written");
        let (outcome, attached) = try_attach(&CompanionChoice::Auto, &source);
        assert!(!attached && outcome.expect("auto never fails").passed_over.len() == 1);
        let good = folder.path().join("dflash-muse.gguf");
        std::fs::copy(muser_testkit::muse_tiny_draft(), &good).expect("a copy");
        let (outcome, attached) = try_attach(&CompanionChoice::Auto, &source);
        let outcome = outcome.expect("auto never fails");
        assert!(attached && outcome.label == Some(good.display().to_string()), "{outcome:?}");
        // A named file must be one: a model is no draft, and nothing is nothing.
        for path in [model, bad, folder.path().join("none.gguf")] {
            let (outcome, attached) = try_attach(&CompanionChoice::File(path.clone()), &source);
            let message = format!("{:#}", outcome.expect_err("it is no draft"));
            assert!(!attached && message.contains(&path.display().to_string()), "{message}");
        }
    }

    #[test]
    fn the_likeliest_name_comes_first() {
        let folder = tempfile::tempdir().expect("a folder");
        for name in ["a-dflash.gguf", "big-30b-dflash-Q8_0.gguf", "DFlash.gguf", "dflash.txt", "big-30b.gguf"]
        {
            std::fs::write(folder.path().join(name), b"").expect("written");
        }
        let found = model_file::beside(&folder.path().join("big-30b-Q4.gguf"), "dflash");
        let names: Vec<_> = found.iter().filter_map(|path| path.file_name()?.to_str()).collect();
        assert_eq!(names, ["big-30b-dflash-Q8_0.gguf", "DFlash.gguf", "a-dflash.gguf"]);
    }
}
