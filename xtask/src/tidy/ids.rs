//! Ids of requirements and reports: each one that the tree names has its text in the tree, and each text is named.

use std::collections::BTreeSet;

use crate::tree::{File, cells, words};

const REPORTS: &str = "docs/reports.md";
const CONTRACT: &str = "ARCHITECTURE.md";
const STATUS: &str = "docs/formats/kvpack-status.md";
const REQUIREMENTS: &str = "docs/formats/kvpack-requirements.md";

pub(super) fn faults(files: &[File]) -> Vec<String> {
    let text = |name: &str| files.iter().find(|file| file.name == name).map_or("", |file| file.text.as_str());
    let mut faults = reports(files, &first_cells(text(REPORTS)), &first_cells(text(CONTRACT)));
    let (state, asked) = (first_cells(text(STATUS)), first_cells(text(REQUIREMENTS)));
    let ids = |cells: &BTreeSet<&str>| cells.iter().any(|cell| is_requirement(cell));
    if !ids(&state) || !ids(&asked) {
        faults.push(format!("no requirements are found in {STATUS} and {REQUIREMENTS}"));
    }
    for id in state.symmetric_difference(&asked).filter(|cell| is_requirement(cell)) {
        let (has, lacks) = if asked.contains(id) { (REQUIREMENTS, STATUS) } else { (STATUS, REQUIREMENTS) };
        faults.push(format!("{lacks}: lacks {id}, which {has} has"));
    }
    faults
}

/// Documentation comments of tests that name a report (`C13`) or a rule of the contract (`E3`).
fn reports(files: &[File], reports: &BTreeSet<&str>, contract: &BTreeSet<&str>) -> Vec<String> {
    let mut faults = Vec::new();
    let mut named = BTreeSet::new();
    let tests = files.iter().filter(|file| {
        file.has_extension(&["rs"]) && (file.name.contains("/tests/") || file.name.ends_with("tests.rs"))
    });
    for file in tests {
        let comments = file.text.lines().filter_map(|line| line.trim_start().strip_prefix("///"));
        for id in comments.flat_map(|line| words(line, &['-'])).filter(|word| is_report(word)) {
            named.insert(id);
            let (page, known) = if id.starts_with('E') { (CONTRACT, contract) } else { (REPORTS, reports) };
            if !known.contains(id) {
                faults.push(format!("{}: a test is about {id}, which {page} does not have", file.name));
            }
        }
    }
    for id in reports.iter().filter(|cell| is_report(cell) && !named.contains(*cell)) {
        faults.push(format!("{REPORTS}: no test's comment names {id}"));
    }
    faults
}

fn first_cells(page: &str) -> BTreeSet<&str> {
    page.lines().filter_map(cells).map(|row| row[0]).collect()
}

/// A letter and one or two digits. F16, F32 and the like are types, not reports.
fn is_report(word: &str) -> bool {
    let Some(number) = word.strip_prefix(|c: char| c.is_ascii_uppercase()) else { return false };
    let is_id = (1..=2).contains(&number.len()) && number.bytes().all(|b| b.is_ascii_digit());
    is_id && !word.starts_with(['F', 'Q', 'U', 'I'])
}

/// Capitals, a hyphen, a number.
fn is_requirement(cell: &str) -> bool {
    cell.split_once('-').is_some_and(|(group, number)| {
        (2..=4).contains(&group.len())
            && group.bytes().all(|b| b.is_ascii_uppercase())
            && number.parse::<u8>().is_ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_told_from_types() {
        for id in ["A1", "C13", "E7"] {
            assert!(is_report(id), "{id}");
        }
        for other in ["F16", "Q4", "C", "C133", "c1", "BF16", "S3-compatible", "A1x"] {
            assert!(!is_report(other), "{other}");
        }
        assert!(is_requirement("ID-1") && is_requirement("PERF-7"));
        assert!(!is_requirement("id-1") && !is_requirement("ID-x") && !is_requirement("X-1"));
    }

    #[test]
    fn an_id_without_a_text_is_a_fault_and_a_text_without_a_test_too() {
        let check = |comment: &str, status: &str, faulty: &[&str]| {
            let file = |name: &str, text: &str| File { name: name.to_owned(), text: text.to_owned() };
            let found = faults(&[
                file(REPORTS, "| id |\n|---|\n| A1 | x |\n"),
                file(CONTRACT, "| E1 | x |\n"),
                file(REQUIREMENTS, "| ID-1 | x |\n"),
                file(STATUS, status),
                file("crates/a/tests/x.rs", comment),
                file("crates/a/src/x.rs", "/// Z9"),
            ]);
            assert_eq!(found.len(), faulty.len(), "{comment} {status}: {found:?}");
            for (fault, part) in found.iter().zip(faulty) {
                assert!(fault.contains(part), "{fault}");
            }
        };
        check("/// A1: x, as E1 says", "| ID-1 |", &[]);
        check("// A1", "| ID-1 |", &["no test's comment names A1"]);
        check("/// A1, A2", "| ID-1 |", &["about A2"]);
        check("/// A1 E2", "| ID-1 |", &["about E2"]);
        check("/// A1", "| ID-1 |\n| ID-2 |", &["requirements.md: lacks ID-2"]);
        check("/// A1", "", &["no requirements", "status.md: lacks ID-1"]);
    }
}
