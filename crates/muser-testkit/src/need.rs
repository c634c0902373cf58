//! What a test may lack, and how it says so.

use std::fmt::Display;

/// What some tests need besides the toolchain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// An NVIDIA card.
    Card,
    /// NVIDIA's run-time compiler.
    Nvrtc,
    /// A Vulkan device, software or not.
    Vulkan,
    /// A network, or what was fetched through one before.
    Network,
    /// Python, with packages where a test says so.
    Python,
    /// Node, with packages.
    Node,
    /// A browser and its driver.
    Browser,
    /// A server that speaks S3.
    Bucket,
    /// The right to mount in a namespace.
    Mounts,
    /// Files that are not in the tree and that nobody fetches.
    Data,
}

impl Need {
    const ALL: [Self; 10] = [
        Self::Card,
        Self::Nvrtc,
        Self::Vulkan,
        Self::Network,
        Self::Python,
        Self::Node,
        Self::Browser,
        Self::Bucket,
        Self::Mounts,
        Self::Data,
    ];

    /// Its word in `MUSER_TEST_REQUIRE`.
    pub fn word(self) -> &'static str {
        match self {
            Self::Card => "card",
            Self::Nvrtc => "nvrtc",
            Self::Vulkan => "vulkan",
            Self::Network => "network",
            Self::Python => "python",
            Self::Node => "node",
            Self::Browser => "browser",
            Self::Bucket => "bucket",
            Self::Mounts => "mounts",
            Self::Data => "data",
        }
    }
}

/// Says that a test does not run, or a part of it, because something is not there. It should return then.
///
/// # Panics
///
/// Where `MUSER_TEST_REQUIRE` (words with commas between them) names the need, or something that no test knows.
pub fn skip(need: Need, why: impl Display) {
    let required = std::env::var("MUSER_TEST_REQUIRE").unwrap_or_default();
    match is_required(&required, need) {
        Ok(false) => report(need.word(), why),
        Ok(true) => panic!("MUSER_TEST_REQUIRE names {}, and it is not there: {why}", need.word()),
        Err(other) => panic!("MUSER_TEST_REQUIRE names {other:?}: expected {}", words()),
    }
}

/// The line that `cargo xtask test` looks for in what passing tests have written.
#[expect(clippy::print_stderr, reason = "the runner keeps it, and the report prints it")]
fn report(word: &str, why: impl Display) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    let why = why.to_string().replace('\n', " ");
    eprintln!("SKIPPED ({word}) {test}: {why}");
}

fn words() -> String {
    Need::ALL.map(Need::word).join(", ")
}

/// Does a list of words name the need? `Err`: a word that means nothing.
fn is_required(list: &str, need: Need) -> Result<bool, String> {
    let words: Vec<&str> = list.split(',').map(str::trim).filter(|word| !word.is_empty()).collect();
    let unknown = words.iter().find(|word| Need::ALL.iter().all(|need| need.word() != **word));
    match unknown {
        Some(word) => Err((*word).to_owned()),
        None => Ok(words.contains(&need.word())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_needs() {
        assert_eq!(is_required("", Need::Card), Ok(false));
        assert_eq!(is_required("nvrtc, card,", Need::Card), Ok(true));
        assert_eq!(is_required("nvrtc,python", Need::Card), Ok(false));
        // A word that is misspelt would require nothing, and nobody would know.
        assert_eq!(is_required("crad", Need::Card), Err("crad".to_owned()));
        for need in Need::ALL {
            assert_eq!(is_required(&words(), need), Ok(true), "{need:?}");
        }
    }
}
