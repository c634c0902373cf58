//! `muser models`: what is in the store, and what of it is proven.

use std::io::Write as _;

use anyhow::Result;
use muser_hub::{ModelStore, StoredModel, Verified};

use crate::cli::ModelsArgs;
use crate::env_vars;
use crate::output::{Console, Progress, sanitize};

/// Runs the command.
pub fn run(args: ModelsArgs, console: &Console) -> Result<()> {
    let ModelsArgs { verify, json } = args;
    let store = ModelStore::open(env_vars::muser_home().as_deref())?;
    let mut models = store.list()?;
    if verify {
        for model in models.iter().filter(|m| !m.unfinished) {
            if matches!(model.verified, Verified::Yes(_) | Verified::HashedOnly(_)) {
                continue;
            }
            let bar = Progress::bytes(console, &model.name, model.size);
            let outcome = store.verify(model, &mut |done| bar.set(done));
            bar.finish();
            if let Err(error) = outcome {
                console.warning(error);
            }
        }
        // Official files are recognised by the hash that is known now.
        models = store.list()?;
    }
    let mut out = std::io::stdout().lock();
    if json {
        let list: Vec<_> = models.iter().map(as_json).collect();
        writeln!(out, "{}", serde_json::to_string_pretty(&list)?)?;
        return Ok(());
    }
    if models.is_empty() {
        console.note(format!("no models in {}; `muser pull` brings the official one", store.dir().display()));
    }
    let width = models.iter().map(|m| m.name.chars().count()).max().unwrap_or(0);
    for model in &models {
        let name = sanitize(&model.name);
        let short = model.known.and_then(|k| k.names.first()).map_or(String::new(), |n| format!(" [{n}]"));
        let size = model.size as f64 / 1e9;
        writeln!(out, "{name:width$}  {size:7.2} GB  {:9}  {}{short}", model.role.as_str(), state(model))?;
    }
    Ok(())
}

fn state(model: &StoredModel) -> &'static str {
    if model.unfinished {
        return "unfinished: pull it again to go on";
    }
    match (&model.verified, model.known) {
        (Verified::Yes(_), Some(known)) => known.about,
        (Verified::Yes(_), None) => "verified",
        (Verified::HashedOnly(_), _) => "unknown weights, intact since the pull",
        (Verified::ChangedSince, _) => "changed since it was verified",
        (Verified::No, _) => "not verified",
    }
}

fn as_json(model: &StoredModel) -> serde_json::Value {
    let (verified, sha256) = match &model.verified {
        Verified::Yes(sha256) => ("yes", Some(*sha256)),
        Verified::HashedOnly(sha256) => ("hashed only", Some(*sha256)),
        Verified::ChangedSince => ("changed since", None),
        Verified::No => ("no", None),
    };
    serde_json::json!({
        "name": model.name,
        "path": model.path,
        "size": model.size,
        "role": model.role.as_str(),
        "official": model.known.map(|k| k.about),
        "short_names": model.known.map(|k| k.names),
        "verified": verified,
        "sha256": sha256.map(|s| s.to_string()),
        "url": model.url,
        "unfinished": model.unfinished,
    })
}
