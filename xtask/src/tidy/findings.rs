//! What reviews found: each finding is shown by tests that exist, or says why what happens is right.

use std::collections::HashSet;

use crate::tree::{File, cells};

const PAGE: &str = "docs/findings.md";

/// Findings of each review.
const AREAS: [(&str, usize); 4] = [("client", 20), ("field", 90), ("hostile", 18), ("security", 22)];

/// A reason has at least so many letters.
const REASON: usize = 60;

pub(super) fn faults(files: &[File]) -> Vec<String> {
    let Some(page) = files.iter().find(|file| file.name == PAGE) else {
        return vec![format!("{PAGE} is missing")];
    };
    let functions = functions(files);
    let (mut faults, mut seen) = (Vec::new(), HashSet::new());
    for row in page.text.lines().filter_map(cells).filter(|row| row[0] != "id") {
        let [ids, found, shown] = row[..] else {
            faults.push(format!("{PAGE}: a row of {} cells: {}", row.len(), row[0]));
            continue;
        };
        for id in ids.split(", ") {
            let known = AREAS.iter().any(|(area, most)| {
                let number =
                    id.strip_prefix(area).and_then(|rest| rest.strip_prefix('-')?.parse::<usize>().ok());
                number.is_some_and(|number| (1..=*most).contains(&number))
            });
            if !known || !seen.insert(id) {
                faults.push(format!("{PAGE}: {id} is no finding, or is there twice"));
            }
        }
        let tests: Vec<&str> = quoted(shown).filter(|word| is_name(word)).collect();
        for test in tests.iter().filter(|test| !functions.contains(*test)) {
            faults.push(format!("{PAGE}: {ids} names {test}, which does not exist"));
        }
        if found.is_empty() || (tests.is_empty() && shown.len() < REASON) {
            faults.push(format!("{PAGE}: {ids} has neither a test nor a reason"));
        }
    }
    for (area, most) in AREAS.iter().filter(|(area, _)| *area != "field") {
        let missing = (1..=*most).filter(|number| !seen.contains(format!("{area}-{number}").as_str()));
        faults.extend(missing.map(|number| format!("{PAGE}: lacks {area}-{number}")));
    }
    faults
}

/// Names of all functions of the tree.
fn functions(files: &[File]) -> HashSet<&str> {
    let sources = files.iter().filter(|file| file.has_extension(&["rs"]));
    let lines = sources.flat_map(|file| file.text.lines());
    lines.filter_map(|line| line.split_once("fn ")?.1.split(['(', '<']).next()).collect()
}

/// What stands in backticks.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

fn is_name(word: &str) -> bool {
    word.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_without_test_or_reason_is_a_fault() {
        let all = |area: &str, most: usize| -> String {
            (1..=most)
                .map(|number| format!("| {area}-{number} | x | `shows_it` |"))
                .collect::<Vec<_>>()
                .join("\n")
        };
        let whole = [all("client", 20), all("hostile", 18), all("security", 22)].join("\n");
        let check = |more: &str, without: &str, faulty: &[&str]| {
            let file = |name: &str, text: &str| File { name: name.to_owned(), text: text.to_owned() };
            let page =
                format!("| id | found | shown by |\n|---|---|---|\n{}\n{more}\n", whole.replace(without, ""));
            let found =
                faults(&[file(PAGE, &page), file("crates/a/src/x.rs", "    async fn shows_it() {}\n")]);
            assert_eq!(found.len(), faulty.len(), "{more}: {found:?}");
            for (fault, part) in found.iter().zip(faulty) {
                assert!(fault.contains(part), "{fault}");
            }
        };
        let never = "never there";
        check("| field-3, field-5 | x | `shows_it`, and `--flag` |", never, &[]);
        check("| field-3 | x | `shows_nothing` |", never, &["shows_nothing, which does not exist"]);
        check("| field-3 | x | so it is |", never, &["neither a test nor a reason"]);
        check(&format!("| field-3 | x | {} |", "a good reason ".repeat(5)), never, &[]);
        check("| field-99 | x | `shows_it` |", never, &["field-99 is no finding"]);
        check("| hostile-1 | x | `shows_it` |", never, &["there twice"]);
        check("| field-3 | x |", never, &["a row of 2 cells"]);
        check("", "| security-7 | x | `shows_it` |", &["lacks security-7"]);
        assert_eq!(faults(&[]).len(), 1);
    }
}
