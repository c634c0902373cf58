use super::Pieces;
use proptest::prelude::*;
use std::sync::LazyLock;

const PATTERN: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);

static REGEX: LazyLock<fancy_regex::Regex> =
    LazyLock::new(|| fancy_regex::Regex::new(PATTERN).expect("the pattern is valid"));

fn by_pattern(text: &str) -> Vec<&str> {
    REGEX.find_iter(text).map(|found| found.expect("no backtracking limit here").as_str()).collect()
}

fn check(text: &str, expected: &[&str]) {
    let pieces: Vec<&str> = Pieces::new(text).collect();
    assert_eq!(pieces, expected, "{text:?}");
    assert_eq!(pieces, by_pattern(text), "{text:?}");
}

#[test]
fn known_cuts() {
    check("", &[]);
    check("Hello, world!", &["Hello", ",", " world", "!"]);
    check("HelloWorld HTTPServer", &["Hello", "World", " HTTPServer"]);
    check("don't WE'LL it'ſ x'Re", &["don't", " WE'LL", " it'ſ", " x'Re"]);
    check("12345 ½", &["123", "45", " ", "½"]);
    check("a  b\t\tc", &["a", " ", " b", "\t", "\tc"]);
    check("x!\r\n/y", &["x", "!\r\n/", "y"]);
    check(" \n \n  x\n", &[" \n \n", " ", " x", "\n"]);
    check("end   ", &["end", "   "]);
    check("नमस्ते", &["नमस्ते"]);
    check("\u{301}ABC", &["\u{301}", "ABC"]);
    check("你ABC", &["你", "ABC"]);
    check("ABC你DEF's", &["ABC你", "DEF's"]);
    check("#foo //bar\n\n/x", &["#foo", " //", "bar", "\n\n", "/x"]);
}

/// Characters that meet every branch, mixed at random.
fn tricky() -> impl Strategy<Value = String> {
    let alphabet: Vec<char> =
        "aZzſ'SsTtRrEeVvMmLlDd 09½Ⅷ\r\n\t\u{3000}\u{a0}/_-#é\u{301}\u{93f}ªʰ你ǅßЖж🙂\u{85}\u{200d}"
            .chars()
            .collect();
    proptest::collection::vec(proptest::sample::select(alphabet), 0..24)
        .prop_map(|chars| chars.into_iter().collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn equals_the_pattern_on_tricky_text(text in tricky()) {
        prop_assert_eq!(Pieces::new(&text).collect::<Vec<_>>(), by_pattern(&text));
    }

    #[test]
    fn equals_the_pattern_on_any_text(text in any::<String>()) {
        prop_assert_eq!(Pieces::new(&text).collect::<Vec<_>>(), by_pattern(&text));
    }
}

#[test]
fn every_character_is_classed_as_in_the_pattern() {
    for c in (0..=0x10_ffff).filter_map(char::from_u32) {
        // Between a capital and a small letter, after a blank and before a digit: each class cuts differently.
        let text = format!("B{c}b {c}1");
        assert_eq!(Pieces::new(&text).collect::<Vec<_>>(), by_pattern(&text), "U+{:04X}", c as u32);
    }
}
