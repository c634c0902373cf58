//! What a test run says at its end: the slowest tests, and those that lacked something and did not run.

use std::path::Path;

/// Tests that are named.
const SLOWEST: usize = 10;
/// What a test writes to stderr that returns early because something is not there.
const SKIPPED: &str = "SKIPPED";

/// Prints the report of nextest's JUnit file; nothing where there is none.
pub(crate) fn print(file: &Path) {
    let Ok(text) = std::fs::read_to_string(file) else { return };
    let mut tests: Vec<(f64, &str, &str)> = text
        .split("<testcase ")
        .skip(1)
        .filter_map(|case| {
            let seconds = attribute(case, "time")?.parse().ok()?;
            Some((seconds, attribute(case, "classname")?, attribute(case, "name")?))
        })
        .collect();
    tests.sort_by(|a, b| b.0.total_cmp(&a.0));
    println!("slowest tests:");
    for (seconds, group, name) in tests.iter().take(SLOWEST) {
        println!("  {seconds:6.1} s  {group} {name}");
    }
    let mut skipped: Vec<&str> =
        text.lines().filter_map(|line| Some(line[line.find(SKIPPED)?..].trim_end())).collect();
    skipped.sort_unstable();
    skipped.dedup();
    println!("not run here: {}", if skipped.is_empty() { "nothing" } else { "" });
    skipped.iter().for_each(|line| println!("  {line}"));
}

/// The value of an attribute of a test case's opening tag.
fn attribute<'a>(case: &'a str, name: &str) -> Option<&'a str> {
    let tag = &case[..case.find('>')?];
    tag.split("\" ").find_map(|pair| pair.strip_prefix(name)?.strip_prefix("=\"")?.split('"').next())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_of_a_case() {
        let case = r#"classname="muser-kv" name="a::b" timestamp="2026-11-30T00:00:00" time="1.250"><system-err>x</system-err>"#;
        assert_eq!(attribute(case, "time"), Some("1.250"));
        assert_eq!(attribute(case, "classname"), Some("muser-kv"));
        assert_eq!(attribute(case, "name"), Some("a::b"));
        assert_eq!(attribute(case, "absent"), None);
    }
}
