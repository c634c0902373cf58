//! The licences of all that is in the executable, with their texts, each once.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context as _, Result, bail};

use super::dependencies::Package;

/// Beginnings of names of files that have a licence or say whose work it is.
const NAMES: [&str; 6] = ["license", "licence", "copying", "notice", "copyright", "unlicense"];

pub(crate) fn text(root: &Path, packages: &[Package]) -> Result<String> {
    let mut page = String::from(
        "The executable of muser contains work of others. Its own licence is Apache-2.0 or MIT, at your choice; below are the packages \
         that it is built of, with their licences, then the texts.\n\n",
    );
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for package in packages.iter().filter(|package| !package.ours) {
        let name = format!("{} {}", package.name, package.version);
        let _ = writeln!(page, "{name}: {}", package.licence);
        let mut found = texts_of(&package.folder)?;
        if found.is_empty() {
            found = sibling(package, packages)?;
        }
        if found.is_empty() {
            found.push(standard(root, package)?);
        }
        for text in found {
            texts.entry(text).or_default().push(name.clone());
        }
    }
    let mut groups: Vec<_> = texts.into_iter().collect();
    groups.sort_by(|a, b| a.1.cmp(&b.1).then_with(|| a.0.cmp(&b.0)));
    for (text, mut names) in groups {
        names.dedup();
        let _ = write!(page, "\n{}\n{}\n\n{text}\n", "-".repeat(78), names.join(", "));
    }
    Ok(page)
}

/// Texts in the package's folder and in folders for licences.
fn texts_of(folder: &Path) -> Result<Vec<String>> {
    let mut texts = Vec::new();
    let entries = std::fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    paths.sort();
    for path in paths {
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
        if !NAMES.iter().any(|beginning| name.starts_with(beginning)) {
            continue;
        }
        if path.is_dir() {
            for entry in std::fs::read_dir(&path)? {
                texts.extend(readable(&entry?.path()));
            }
        } else if Path::new(&name).extension().is_none_or(|end| end != "rs") {
            texts.extend(readable(&path));
        }
    }
    texts.sort();
    Ok(texts)
}

/// Without what differs between editors: ends of lines, blanks before them, empty lines around.
fn readable(path: &Path) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
    Some(lines.join("\n").trim_matches('\n').to_owned()).filter(|text| !text.is_empty())
}

/// The texts of another package of the same people under the same licence: parts of one project that left it out.
fn sibling(package: &Package, packages: &[Package]) -> Result<Vec<String>> {
    let alike = |other: &&Package| {
        !other.ours
            && other.licence == package.licence
            && other.authors == package.authors
            && !other.authors.is_empty()
    };
    for other in packages.iter().filter(alike) {
        let texts = texts_of(&other.folder)?;
        if !texts.is_empty() {
            return Ok(texts);
        }
    }
    Ok(Vec::new())
}

/// The text of a package that has none in its archive, where one that may be chosen has a text without a name in it.
fn standard(root: &Path, package: &Package) -> Result<String> {
    let (name, file) = if package.licence.contains("Apache-2.0") {
        ("Apache-2.0", "LICENSE-APACHE")
    } else if package.licence.contains("MIT") {
        ("MIT", "LICENSE-MIT")
    } else {
        bail!("{} {} ({}) has no text of its licence", package.name, package.version, package.licence);
    };
    let text = readable(&root.join(file)).with_context(|| format!("{file} cannot be read"))?;
    let text = text.split("Permission is hereby").last().map_or(text.clone(), |rest| {
        if name == "MIT" { format!("Permission is hereby{rest}") } else { text.clone() }
    });
    Ok(format!("{name} (the package has no text of it; copyright by its authors)\n\n{text}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(name: &str, licence: &str, folder: &Path) -> Package {
        Package {
            name: name.to_owned(),
            version: "1.0.0".to_owned(),
            authors: String::new(),
            licence: licence.to_owned(),
            folder: folder.to_owned(),
            ours: false,
            sha256: None,
            needs: std::collections::BTreeSet::new(),
        }
    }

    #[test]
    fn a_text_stands_once_and_nothing_is_left_out() {
        let folder = tempfile::tempdir().expect("a folder");
        let place = |name: &str| folder.path().join(name);
        for name in ["a", "b", "c", "d"] {
            std::fs::create_dir(place(name)).expect("a folder");
        }
        std::fs::write(place("a/LICENSE"), "Text of A \r\nline\n").expect("written");
        std::fs::write(place("b/COPYING.txt"), "\nText of A\nline\n\n").expect("written");
        std::fs::create_dir(place("b/LICENSES")).expect("a folder");
        std::fs::write(place("b/LICENSES/BSD.txt"), "Text of B").expect("written");
        std::fs::write(place("b/license.rs"), "fn no() {}").expect("written");
        let root = crate::root();
        let list = [
            package("a", "MIT", &place("a")),
            package("b", "ISC", &place("b")),
            package("c", "MIT", &place("c")),
        ];
        let page = text(&root, &list).expect("a page");
        assert_eq!(page.matches("Text of A\nline").count(), 1);
        assert!(page.contains("a 1.0.0, b 1.0.0\n\nText of A") && page.contains("Text of B"));
        assert!(!page.contains("fn no"));
        // No text of its own: the standard one, without our name in it.
        assert!(
            page.contains("c 1.0.0\n\nMIT (the package") && page.contains("Permission is hereby granted")
        );
        assert!(!page.to_lowercase().contains("copyright (c)"));
        let lacking = package("d", "Zlib", &place("d"));
        assert!(text(&root, std::slice::from_ref(&lacking)).is_err());
        // Its people have given the text with another package.
        let [mut lacking, mut other] = [lacking, package("a", "Zlib", &place("a"))];
        assert!(text(&root, &[lacking.clone(), other.clone()]).is_err());
        (lacking.authors, other.authors) = ("X <x@y.invalid>".to_owned(), "X <x@y.invalid>".to_owned());
        let page = text(&root, &[lacking, other]).expect("a page");
        assert!(
            page.contains("a 1.0.0, d 1.0.0\n\nText of A") || page.contains("d 1.0.0, a 1.0.0\n\nText of A")
        );
    }
}
