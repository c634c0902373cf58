//! `docs/benchmarks.md` from the receipts, and the rule that no document quotes a figure which no receipt carries.
//!
//! A receipt is a JSON object with `name`, `date`, `commit`, `command`, `withdrawn` (null, or why its figures must not be
//! quoted any more), and what was measured: either a `report` as `muser bench` writes it, or any other fields with a
//! `device` and a list of `tests`. In `README.md` and `docs/`, a line with a figure in tok/s, GB/s or TB/s, or a ratio
//! such as 1.5×, names its receipt as `[r:NAME]`, and a number of that receipt must round to the figure.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use crate::step_picture;

const PAGE: &str = "docs/benchmarks.md";
/// The picture beside it.
const PICTURE: &str = "docs/step-time.svg";

/// One receipt.
pub(crate) struct Receipt {
    name: String,
    json: Value,
}

/// Writes the page anew.
pub(crate) fn write(root: &Path) -> Result<()> {
    let page = render(&load(root)?);
    std::fs::create_dir_all(root.join("docs"))?;
    std::fs::write(root.join(PAGE), page).context(PAGE)?;
    std::fs::write(root.join(PICTURE), picture(&load(root)?)?).context(PICTURE)
}

/// The picture of a step's time, from its receipt.
fn picture(receipts: &[Receipt]) -> Result<String> {
    let receipt = receipts.iter().find(|receipt| receipt.name == step_picture::RECEIPT);
    let picture = receipt.and_then(|receipt| step_picture::draw(body(&receipt.json)));
    picture.with_context(|| format!("receipts/{}.json has no steps to draw", step_picture::RECEIPT))
}

/// Checks that the page is current and every quoted figure has a receipt.
pub(crate) fn check(root: &Path) -> Result<()> {
    let receipts = load(root)?;
    let page = std::fs::read_to_string(root.join(PAGE)).unwrap_or_default();
    if page != render(&receipts) {
        bail!("{PAGE} is not what the receipts give: run cargo xtask bench-report");
    }
    if std::fs::read_to_string(root.join(PICTURE)).unwrap_or_default() != picture(&receipts)? {
        bail!("{PICTURE} is not what the receipts give: run cargo xtask bench-report");
    }
    let mut faults = Vec::new();
    for path in documents(root)? {
        let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let shown = path.strip_prefix(root).unwrap_or(&path).display().to_string();
        faults.extend(
            check_text(&text, &receipts).into_iter().map(|(line, fault)| format!("{shown}:{line}: {fault}")),
        );
    }
    if !faults.is_empty() {
        bail!("figures without a receipt:\n  {}", faults.join("\n  "));
    }
    Ok(())
}

/// All receipts, newest first.
fn load(root: &Path) -> Result<Vec<Receipt>> {
    let mut receipts = Vec::new();
    let folder = root.join("receipts");
    let entries = match std::fs::read_dir(&folder) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(receipts),
        Err(e) => return Err(e).context("receipts"),
    };
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "json") {
            receipts.push(parse(&path).with_context(|| path.display().to_string())?);
        }
    }
    receipts.sort_by(|a, b| text(&b.json, "date").cmp(&text(&a.json, "date")).then(a.name.cmp(&b.name)));
    Ok(receipts)
}

fn parse(path: &Path) -> Result<Receipt> {
    let json: Value = serde_json::from_str(&std::fs::read_to_string(path)?)?;
    let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '.';
    if !stem.chars().all(fits) {
        bail!("a receipt's name has lower-case letters, digits, '-' and '.'");
    }
    for key in ["name", "date", "commit", "command", "withdrawn"] {
        if json.get(key).is_none() {
            bail!("the receipt has no \"{key}\"");
        }
    }
    if json["name"] != stem.as_str() {
        bail!("the receipt is named {}, its file {stem}", json["name"]);
    }
    if !(json["withdrawn"].is_null() || json["withdrawn"].as_str().is_some_and(|reason| !reason.is_empty())) {
        bail!("\"withdrawn\" is null or a reason");
    }
    if body(&json)["tests"].as_array().is_none_or(Vec::is_empty) {
        bail!("the receipt has no tests");
    }
    Ok(Receipt { name: stem, json })
}

/// Where the measurements are.
fn body(json: &Value) -> &Value {
    json.get("report").unwrap_or(json)
}

fn text(json: &Value, key: &str) -> String {
    match &json[key] {
        Value::String(text) => text.clone(),
        Value::Array(words) => words.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(" "),
        Value::Null => "unknown".to_owned(),
        other => other.to_string(),
    }
}

fn render(receipts: &[Receipt]) -> String {
    let mut page = String::from(
        "# Benchmarks\n\nGenerated from `receipts/` by `cargo xtask bench-report`; do not edit. Each section is one receipt: one run of one\n\
         command. Speeds are medians over the repetitions; `of memory` is the share of the read bandwidth that the same\n\
         program probed right before and after each repetition; `quiet` counts repetitions during which other processes\n\
         and the host used less than 5 % of the machine. Ratios come from runs in turn on the same machine. Machines\n\
         differ and drift: compare within a receipt, not between receipts.\n",
    );
    let (current, withdrawn): (Vec<_>, Vec<_>) = receipts.iter().partition(|r| r.json["withdrawn"].is_null());
    if current.is_empty() {
        page.push_str("\nThere are no receipts yet.\n");
    }
    for receipt in current {
        render_one(&mut page, receipt);
    }
    if !withdrawn.is_empty() {
        page.push_str("\n## Withdrawn\n\nFigures of these receipts must not be quoted any more.\n\n");
        for receipt in withdrawn {
            let (date, reason) = (text(&receipt.json, "date"), text(&receipt.json, "withdrawn"));
            let _ = writeln!(page, "- `{}` ({date}): {reason}", receipt.name);
        }
    }
    page
}

// Writing to a string cannot fail, so results of `writeln!` are dropped here.
fn render_one(page: &mut String, receipt: &Receipt) {
    let (json, report) = (&receipt.json, body(&receipt.json));
    let _ = writeln!(page, "\n## {}\n", receipt.name);
    let model = match &report["model"] {
        Value::Object(model) => text(&Value::Object(model.clone()), "file"),
        _ => text(report, "model"),
    };
    let _ = writeln!(page, "- Device: {}", text(report, "device"));
    let _ = writeln!(page, "- Model: {model}");
    let tree = if json["tree"] == "modified" { ", with uncommitted changes" } else { "" };
    let _ = writeln!(page, "- Commit {}{tree}, {}", text(json, "commit"), text(json, "date"));
    let _ = writeln!(page, "- Command: `{}`", text(json, "command").replace('`', "'"));
    if let Some(bandwidth) = report["bandwidth"].as_f64() {
        let load = report["load_average"]
            .as_array()
            .map(|l| format!("; load average {} before, {} after", l[0], l[l.len() - 1]));
        let _ = writeln!(page, "- Memory reads at {bandwidth} GB/s{}", load.unwrap_or_default());
    }
    for note in report["notes"].as_array().or_else(|| json["notes"].as_array()).into_iter().flatten() {
        let _ = writeln!(page, "- {}", note.as_str().unwrap_or_default());
    }
    page.push_str(&table(report["tests"].as_array().map_or(&[], Vec::as_slice)));
    let compare = &report["compare"];
    if let Some(ratios) = compare["ratios"].as_array() {
        let command = text(compare, "command").replace('`', "'");
        let _ = writeln!(
            page,
            "\nIn turn with `{command}`:\n\n| test | muser | other | ratio | range |\n|---|---|---|---|---|"
        );
        for ratio in ratios {
            let range = &ratio["range"];
            let _ = writeln!(
                page,
                "| {} | {} | {} | {}× | {} to {} |",
                text(ratio, "test"),
                ratio["ours_tok_s"],
                ratio["theirs_tok_s"],
                ratio["ratio"],
                range[0],
                range[1]
            );
        }
    }
}

/// The tests of a receipt, without columns in which nothing was measured.
fn table(tests: &[Value]) -> String {
    const COLUMNS: [&str; 7] = ["test", "tok/s", "ms", "spread", "GB/s", "of memory", "quiet"];
    const NOTHING: &str = "–";
    let row = |test: &Value| {
        let number = |key: &str| test[key].as_f64().map_or(NOTHING.to_owned(), |v| v.to_string());
        let percent =
            |key: &str| test[key].as_f64().map_or(NOTHING.to_owned(), |v| format!("{:.1} %", 100.0 * v));
        let reps = test["reps"].as_array().map_or(0, Vec::len);
        let quiet = test["quiet_reps"].as_u64().map_or(NOTHING.to_owned(), |q| format!("{q} of {reps}"));
        let (speed, time, rate) = (number("tok_s"), number("median_ms"), number("gb_s"));
        [text(test, "test"), speed, time, percent("spread"), rate, percent("of_bandwidth"), quiet]
    };
    let rows: Vec<_> = tests.iter().map(row).collect();
    let shown: Vec<usize> =
        (0..COLUMNS.len()).filter(|at| *at == 0 || rows.iter().any(|row| row[*at] != NOTHING)).collect();
    let line = |cells: &dyn Fn(usize) -> String| {
        let cells: Vec<String> = shown.iter().map(|at| cells(*at)).collect();
        format!("| {} |\n", cells.join(" | "))
    };
    let mut table = format!("\n{}|{}\n", line(&|at| COLUMNS[at].to_owned()), "---|".repeat(shown.len()));
    rows.iter().for_each(|row| table.push_str(&line(&|at| row[at].clone())));
    table
}

/// `README.md` and everything below `docs/` but the generated page.
fn documents(root: &Path) -> Result<Vec<PathBuf>> {
    let mut found = vec![root.join("README.md")];
    let mut folders = vec![root.join("docs")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "md") && path != root.join(PAGE) {
                found.push(path);
            }
        }
    }
    found.retain(|path| path.exists());
    found.sort();
    Ok(found)
}

/// Line numbers and what is wrong there.
fn check_text(text: &str, receipts: &[Receipt]) -> Vec<(usize, String)> {
    let mut faults = Vec::new();
    let mut header: Vec<Option<&'static str>> = Vec::new();
    for (at, line) in text.lines().enumerate() {
        let mut figures = figures(line);
        let cells: Vec<&str> = line.trim().trim_matches('|').split('|').collect();
        if line.trim_start().starts_with('|') {
            if header.is_empty() {
                header =
                    cells.iter().map(|cell| UNITS.iter().copied().find(|unit| cell.contains(unit))).collect();
            } else {
                // A unit in a column's head belongs to every number below it.
                for (cell, unit) in cells.iter().zip(&header) {
                    if let Some(unit) = unit {
                        figures.extend(numbers(cell).into_iter().map(|(shown, _)| (shown, *unit)));
                    }
                }
            }
        } else {
            header.clear();
        }
        if figures.is_empty() {
            continue;
        }
        let names = references(line);
        if names.is_empty() {
            faults.push((at + 1, format!("{} {} has no [r:NAME]", figures[0].0, figures[0].1)));
            continue;
        }
        let mut carried = Vec::new();
        for name in names {
            match receipts.iter().find(|r| r.name == name) {
                None => faults.push((at + 1, format!("there is no receipt {name}"))),
                Some(r) if !r.json["withdrawn"].is_null() => {
                    faults.push((at + 1, format!("receipt {name} is withdrawn")));
                }
                Some(r) => collect_numbers(&r.json, &mut carried),
            }
        }
        for (shown, unit) in figures {
            let factor = if unit == "TB/s" { 1e-3 } else { 1.0 };
            if !carried.iter().any(|carried| rounds_to(carried * factor, &shown)) {
                faults.push((at + 1, format!("no number of the receipt rounds to {shown} {unit}")));
            }
        }
    }
    faults
}

const UNITS: &[&str] = &["tok/s", "tokens/s", "GB/s", "TB/s", "×"];

/// Numbers of a line that are followed by a unit, and the unit.
fn figures(line: &str) -> Vec<(String, &'static str)> {
    let unit_of = |rest: &str| -> Option<&'static str> {
        let spaced = rest.trim_start();
        let unit = UNITS.iter().copied().find(|unit| spaced.starts_with(unit));
        match unit {
            // `64 × 512` is a product, `1.5×` a ratio.
            Some("×") => {
                let after = spaced.trim_start_matches('×').trim_start();
                (!after.starts_with(|c: char| c.is_ascii_digit())).then_some("×")
            }
            Some(unit) => Some(unit),
            None => {
                let after = rest.strip_prefix('x')?;
                (!after.starts_with(|c: char| c.is_alphanumeric() || c == '_')).then_some("×")
            }
        }
    };
    numbers(line).into_iter().filter_map(|(shown, rest)| Some((shown, unit_of(rest)?))).collect()
}

/// Decimal numbers of a text as they are shown, each with what follows it.
fn numbers(text: &str) -> Vec<(String, &str)> {
    let mut found = Vec::new();
    let mut rest = text;
    let mut before = ' ';
    while let Some(first) = rest.chars().next() {
        if first.is_ascii_digit() && !before.is_alphanumeric() && before != '.' && before != '_' {
            let part_of = |(i, c): (usize, char)| {
                let next_is_digit = rest[i + c.len_utf8()..].starts_with(|c: char| c.is_ascii_digit());
                !(c.is_ascii_digit() || (matches!(c, '.' | ',') && next_is_digit))
            };
            let end = rest.char_indices().find(|&at| part_of(at)).map_or(rest.len(), |(i, _)| i);
            found.push((rest[..end].to_owned(), &rest[end..]));
            before = '0';
            rest = &rest[end..];
        } else {
            before = first;
            rest = &rest[first.len_utf8()..];
        }
    }
    found
}

/// Names in `[r:NAME]`.
fn references(line: &str) -> Vec<&str> {
    line.split("[r:").skip(1).filter_map(|rest| rest.split(']').next()).collect()
}

fn collect_numbers(json: &Value, into: &mut Vec<f64>) {
    match json {
        Value::Number(number) => into.extend(number.as_f64()),
        Value::Array(values) => values.iter().for_each(|value| collect_numbers(value, into)),
        Value::Object(fields) => fields.values().for_each(|value| collect_numbers(value, into)),
        _ => {}
    }
}

/// Is `shown` what is left of `number` at its own precision?
fn rounds_to(number: f64, shown: &str) -> bool {
    let plain = shown.replace(',', "");
    let digits = plain.split_once('.').map_or(0, |(_, fraction)| fraction.len());
    format!("{number:.digits$}") == plain
}

#[cfg(test)]
mod tests {
    use super::*;

    fn receipt(name: &str, withdrawn: Option<&str>) -> Receipt {
        let json = serde_json::json!({
            "name": name, "date": "2026-01-02T03:04:05Z", "commit": "abc", "command": ["muser", "bench"],
            "withdrawn": withdrawn,
            "report": {
                "device": "a machine", "model": {"file": "m.gguf"}, "bandwidth": 25.04, "load_average": [0.1, 0.2],
                "tests": [{"test": "tg@0", "tok_s": 46.04, "median_ms": 21.7, "gb_s": 1408.0, "reps": []}],
                "compare": {"command": "other", "ratios": [{"test": "tg@0", "ratio": 1.084, "range": [1.0, 1.2]}]}
            }
        });
        Receipt { name: name.to_owned(), json }
    }

    fn check(text: &str) -> Vec<String> {
        let receipts = [receipt("good", None), receipt("old", Some("the clock was wrong"))];
        check_text(text, &receipts).into_iter().map(|(line, fault)| format!("{line}: {fault}")).collect()
    }

    #[test]
    fn this_repository_quotes_only_what_receipts_carry() {
        super::check(&Path::new(env!("CARGO_MANIFEST_DIR")).join("..")).unwrap();
    }

    #[test]
    fn carried_figures_pass() {
        for good in [
            "46.0 tok/s, 1.08× the other at 25 GB/s [r:good]",
            "reads at 1.41 TB/s [r:good]",
            "1,408 GB/s [r:good]",
            "a 64 × 512 tile, 0x10, v2x, 16 MB/s, 3 tokens",
            "| test | tok/s | rows |\n|---|---|---|\n| tg | 46 [r:good] | 7 |",
        ] {
            assert!(check(good).is_empty(), "{good}: {:?}", check(good));
        }
    }

    #[test]
    fn other_figures_are_refused() {
        for (bad, fault) in [
            ("fast: 46.0 tok/s", "1: 46.0 tok/s has no [r:NAME]"),
            ("47 tok/s [r:good]", "1: no number of the receipt rounds to 47 tok/s"),
            ("up to 3x slower", "1: 3 × has no [r:NAME]"),
            ("1.1× [r:nowhere]", "1: there is no receipt nowhere"),
            ("46 tok/s [r:old]", "1: receipt old is withdrawn"),
            ("x\n| test | GB/s |\n|---|---|\n| a | 31 |", "4: 31 GB/s has no [r:NAME]"),
        ] {
            assert_eq!(check(bad).first().map(String::as_str), Some(fault), "{bad}");
        }
    }

    #[test]
    fn the_page_lists_withdrawn_receipts_with_their_reason() {
        let page = render(&[receipt("good", None), receipt("old", Some("the clock was wrong"))]);
        assert!(page.contains("| tg@0 | 46.04 | 21.7 |"), "{page}");
        assert!(page.contains("1.084×"), "{page}");
        assert!(page.contains("- `old` (2026-01-02T03:04:05Z): the clock was wrong"), "{page}");
        assert!(!page.contains("## old"));
    }
}
