//! `muser inspect`: what is in a model file and what is odd about it.
//!
//! A file that opens is described even when muser cannot run it; the reason is then part of the description.

use std::io::Write as _;

use muser_model::Model;

use crate::cli::InspectArgs;
use crate::inspect::{self, Report, TensorLine};
use crate::model_file::ModelSource;
use crate::output::{Console, Progress, sanitize};

/// Runs the command.
pub fn run(args: InspectArgs, console: &Console) -> anyhow::Result<()> {
    let source = ModelSource::choose(Some(&args.model), console)?;
    let file = source.open()?;
    let model = Model::from_gguf(std::sync::Arc::clone(&file));
    let mut report = Report::new(source.label(), &file, &model);
    if args.verify {
        let progress = Progress::bytes(console, "reading", report.file_bytes);
        let hashes = inspect::hash(&file, source != ModelSource::Bundled, &mut |done| progress.set(done));
        progress.finish();
        let hashes = hashes?;
        report.identity = inspect::identify(&file, Some(&hashes));
        report.sha256 = hashes.iter().map(ToString::to_string).collect();
    }
    if args.tensors {
        report.tensor_list = Some(Report::list_tensors(&file));
    }
    let mut out = std::io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &report)?;
        writeln!(out)?;
    } else {
        print(&report, &mut out)?;
    }
    Ok(())
}

fn print(report: &Report, out: &mut impl std::io::Write) -> std::io::Result<()> {
    let mut line = |label: &str, value: String| writeln!(out, "{label:<14}{}", sanitize(&value));
    line("file", report.path.clone())?;
    if report.files > 1 {
        line("", format!("a set of {} files", report.files))?;
    }
    line("size", format!("{} ({})", bytes(report.file_bytes), report.file_bytes))?;
    let name = report.name.as_deref().unwrap_or("no name");
    let architecture = report.architecture.as_deref().unwrap_or("no architecture");
    line("model", format!("{name}, {architecture}, GGUF version {}", report.gguf_version))?;
    line("identity", report.identity.clone())?;
    for hash in &report.sha256 {
        line("sha256", hash.clone())?;
    }
    line(
        "weights",
        format!(
            "{} parameters in {} tensors, {}",
            count(report.parameters),
            report.tensors,
            bytes(report.tensor_bytes)
        ),
    )?;
    let types: Vec<_> = report
        .types
        .iter()
        .map(|share| format!("{} {} ({})", share.tensors, share.ty, bytes(share.bytes)))
        .collect();
    let file_type = report.file_type.as_ref().map(|name| format!("{name}: ")).unwrap_or_default();
    line("types", file_type + &types.join(", "))?;
    if let Some(g) = &report.geometry {
        if let Some(name) = g.shape_of {
            line("shape", format!("that of {name}"))?;
        }
        line(
            "layers",
            format!(
                "{} ({} full, {} sliding with a window of {})",
                g.layers,
                g.full_layers.len(),
                g.layers - g.full_layers.len(),
                g.window
            ),
        )?;
        line("widths", format!("hidden {}, feed-forward {}, vocabulary {}", g.hidden, g.ffn, g.vocab))?;
        line("attention", format!("{} query and {} key heads of {}", g.heads, g.kv_heads, g.head_dim))?;
        line(
            "constants",
            format!(
                "rope theta {}, norm eps {:e} (post-norms {:e}), logit scale {}, soft cap {}",
                g.rope_theta,
                g.rms_eps,
                g.post_norm_eps,
                g.logit_scale,
                g.softcap.map_or("none".into(), |cap| cap.to_string())
            ),
        )?;
        line(
            "context",
            format!(
                "{} positions; keys and values take {} for all of them, {} for each beyond the window",
                g.context,
                bytes(g.kv_bytes_context),
                bytes(g.kv_bytes_per_position)
            ),
        )?;
        if let Some(per_token) = g.bytes_per_token {
            line("per token", format!("{} of weights are read ({per_token})", bytes(per_token)))?;
        }
    }
    if let Some(t) = &report.tokenizer {
        let id = |id: Option<u32>| id.map_or("none".to_owned(), |id| id.to_string());
        line(
            "tokenizer",
            format!(
                "{} ({}), {} tokens, {} merges, bos {}, eos {}, end of turn {}",
                t.model.as_deref().unwrap_or("unknown"),
                t.pre.as_deref().unwrap_or("no pre-split"),
                t.tokens,
                t.merges,
                id(t.bos),
                id(t.eos),
                id(t.eot)
            ),
        )?;
        let template = t.chat_template_bytes.map_or("none".to_owned(), |bytes| format!("{bytes} bytes"));
        line("chat template", template)?;
    }
    match &report.cannot_run {
        Some(reason) => line("runs", format!("no: {reason}"))?,
        None => line("runs", "yes".into())?,
    }
    for (index, finding) in report.odd.iter().enumerate() {
        line(if index == 0 { "odd" } else { "" }, finding.clone())?;
    }
    for TensorLine { name, ty, dims, bytes: size, offset } in report.tensor_list.iter().flatten() {
        let dims: Vec<_> = dims.iter().map(ToString::to_string).collect();
        line("tensor", format!("{name:<36} {ty:<6} {:<16} {size:>12} at {offset}", dims.join(" x ")))?;
    }
    Ok(())
}

/// Bytes for people: three digits and a unit.
fn bytes(count: u64) -> String {
    scaled(count, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB"])
}

/// A count for people.
fn count(count: u64) -> String {
    scaled(count, 1000.0, &["", "thousand", "million", "billion", "trillion"])
}

fn scaled(count: u64, step: f64, units: &[&str]) -> String {
    let (mut value, mut unit) = (count as f64, 0);
    while value >= step && unit + 1 < units.len() {
        value /= step;
        unit += 1;
    }
    let digits = if unit == 0 || value >= 100.0 {
        0
    } else if value >= 10.0 {
        1
    } else {
        2
    };
    format!("{value:.digits$} {}", units[unit]).trim_end().to_owned()
}
