//! Finding the vision projector of a model and handing it to the executor.
//!
//! `auto` takes one that lies beside the model and fits it. One that is missing or damaged never keeps text from being served: what is
//! wrong with it is said when a picture comes, with the name of the file.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;
use muser_backend::Executor;
use muser_backend::arith::vision::PositionRule;
use muser_gguf::GgufFile;
use muser_model::{Geometry, ModelError, Projector};

use crate::cli::{CompanionChoice, ProjectorArgs};
use crate::model_file::{self, ModelSource};
use crate::output::HintExt as _;

/// What became of the search.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Attached {
    /// What messages call the projector in use.
    pub label: Option<String>,
    /// Why there is none, if there is more to say than that none lies beside the model.
    pub fault: Option<String>,
}

/// Finds the projector that the arguments mean and attaches it. Called before the engine takes the executor.
pub fn attach(args: &ProjectorArgs, source: &ModelSource, executor: &mut dyn Executor) -> Attached {
    let rule = args.image_positions.into();
    match &args.mmproj {
        CompanionChoice::Off => Attached::default(),
        CompanionChoice::File(path) => {
            let label = path.display().to_string();
            let projector = load(path);
            take(projector, label, rule, executor)
        }
        CompanionChoice::Auto => match source {
            ModelSource::Bundled => match model_file::bundled_projector() {
                Some(open) => {
                    let label = format!("{}-mmproj (bundled)", model_file::BUNDLED_NAME);
                    take(open_projector(open), label, rule, executor)
                }
                None => Attached::default(),
            },
            ModelSource::File(path) => beside(path, rule, executor),
        },
    }
}

/// The projector that a model would be given, for whoever wants its figures.
pub fn of_model(
    choice: &CompanionChoice,
    source: &ModelSource,
    target: &Geometry,
) -> anyhow::Result<Projector> {
    let fits = |projector: Projector| projector.check_target(target).map(|()| projector);
    let found = match (choice, source) {
        (CompanionChoice::Off, _) => None,
        (CompanionChoice::File(path), _) => {
            let projector = load(path).and_then(fits);
            return projector.with_context(|| path.display().to_string());
        }
        (CompanionChoice::Auto, ModelSource::Bundled) => {
            model_file::bundled_projector().map(|open| open_projector(open).and_then(fits)).transpose()?
        }
        (CompanionChoice::Auto, ModelSource::File(path)) => {
            let mut beside = model_file::beside(path, "mmproj").into_iter();
            beside.find_map(|path| load(&path).and_then(fits).ok())
        }
    };
    found
        .ok_or_else(|| anyhow::anyhow!("no projector lies beside {}", source.label()))
        .hint("--mmproj PATH names one; `muser pull mmproj` brings the official one")
}

fn load(path: &Path) -> Result<Projector, ModelError> {
    open_projector(|| model_file::open_companion(path))
}

fn open_projector(open: impl FnOnce() -> Result<GgufFile, ModelError>) -> Result<Projector, ModelError> {
    open().and_then(|file| Projector::from_gguf(Arc::new(file)))
}

fn take(
    projector: Result<Projector, ModelError>,
    label: String,
    rule: PositionRule,
    executor: &mut dyn Executor,
) -> Attached {
    let reason = match projector.map(|projector| executor.attach_projector(projector, rule)) {
        Ok(Ok(())) => return Attached { label: Some(label), fault: None },
        Ok(Err(error)) => error.to_string(),
        Err(error) => error.to_string(),
    };
    let fault =
        format!("Images cannot be shown to this model: {label} is not usable as its projector: {reason}");
    Attached { label: None, fault: Some(fault) }
}

/// The first file beside the model that is called a projector and fits; else what was wrong with the likeliest.
fn beside(model: &Path, rule: PositionRule, executor: &mut dyn Executor) -> Attached {
    let mut outcome = Attached::default();
    for path in model_file::beside(model, "mmproj") {
        let tried = take(load(&path), path.display().to_string(), rule, executor);
        if tried.label.is_some() {
            return tried;
        }
        outcome.fault = outcome.fault.or(tried.fault);
    }
    outcome
}

#[cfg(test)]
mod tests {
    use muser_backend::TowerExecutor as _;
    use std::path::PathBuf;

    use muser_backend::{KvType, ReferenceExecutor};

    use super::*;
    use crate::cli::PositionChoice;

    fn models() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models")
    }

    fn try_attach(choice: CompanionChoice, source: &ModelSource) -> (Attached, bool) {
        let model = source.load().expect("the model loads");
        let mut executor = ReferenceExecutor::new(model, KvType::F32).expect("it runs everything");
        let args =
            ProjectorArgs { mmproj: choice, image_max_tokens: 4096, image_positions: PositionChoice::Raster };
        let outcome = attach(&args, source, &mut executor);
        (outcome, executor.tower().is_some())
    }

    #[test]
    fn the_bundled_model_and_its_file_have_a_projector() {
        let file = ModelSource::File(models().join("muse-tiny-Q4_K_M.gguf"));
        for source in [ModelSource::Bundled, file] {
            let (outcome, attached) = try_attach(CompanionChoice::Auto, &source);
            assert!(attached && outcome.label.is_some() && outcome.fault.is_none(), "{outcome:?}");
            assert_eq!(try_attach(CompanionChoice::Off, &source), (Attached::default(), false));
        }
    }

    #[test]
    fn a_file_that_is_no_projector_is_named_and_text_goes_on() {
        let folder = tempfile::tempdir().expect("a folder");
        let model = folder.path().join("model.gguf");
        std::fs::copy(models().join("muse-tiny-Q4_K_M.gguf"), &model).expect("a copy");
        let source = ModelSource::File(model.clone());
        assert_eq!(try_attach(CompanionChoice::Auto, &source), (Attached::default(), false));
        let bad = folder.path().join("mmproj-bad.gguf");
        std::fs::write(&bad, b"GGUF and nothing else").expect("written");
        for choice in [CompanionChoice::Auto, CompanionChoice::File(bad.clone())] {
            let (outcome, attached) = try_attach(choice, &source);
            let fault = outcome.fault.expect("said");
            assert!(!attached && fault.contains(&bad.display().to_string()), "{fault}");
        }
        // A model is no projector, and nothing is nothing.
        for path in [model, folder.path().join("none.gguf")] {
            let (outcome, attached) = try_attach(CompanionChoice::File(path.clone()), &source);
            assert!(
                !attached && outcome.fault.is_some_and(|fault| fault.contains(&path.display().to_string()))
            );
        }
        let good = folder.path().join("mmproj-muse.gguf");
        std::fs::copy(muser_testkit::muse_tiny_projector(), &good).expect("a copy");
        let (outcome, attached) = try_attach(CompanionChoice::Auto, &source);
        assert!(attached && outcome.label == Some(good.display().to_string()), "{outcome:?}");
    }
}
