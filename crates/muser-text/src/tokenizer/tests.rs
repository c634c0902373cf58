use super::*;
use crate::test_support::{tiny_file, tiny_tokenizer};
use proptest::prelude::*;

/// A vocabulary of the 256 bytes, `ab`, `abc` and two markers.
fn small() -> (Vec<String>, Vec<i64>, Vec<String>) {
    let mut tokens: Vec<String> = (0..=255).map(|byte| crate::spell_bytes(&[byte])).collect();
    tokens.extend(["ab", "abc", "<|eot|>", "<|bos|>"].map(String::from));
    let mut types = vec![1; tokens.len()];
    types[258..].fill(3);
    (tokens, types, vec!["a b".to_owned(), "ab c".to_owned()])
}

fn load(
    change: impl FnOnce(&mut Vec<String>, &mut Vec<i64>, &mut Vec<String>),
) -> Result<Tokenizer, TextError> {
    let (mut tokens, mut types, mut merges) = small();
    change(&mut tokens, &mut types, &mut merges);
    Tokenizer::from_source(&VocabSource {
        pre: "llama4".to_owned(),
        tokens: tokens.iter().map(String::as_bytes).collect(),
        token_types: types,
        merges: merges.iter().map(String::as_bytes).collect(),
        bos: Some(259),
        eos: Some(258),
        add_bos: true,
        ..VocabSource::default()
    })
}

fn refused(change: impl FnOnce(&mut Vec<String>, &mut Vec<i64>, &mut Vec<String>), expected: &str) {
    let message = load(change).expect_err(expected).to_string();
    assert!(message.contains(expected), "{message:?} should contain {expected:?}");
}

#[test]
fn bad_vocabularies_are_refused_by_key_and_index() {
    assert!(load(|_, _, _| ()).is_ok());
    refused(
        |tokens, _, _| tokens[256] = "a b".into(),
        "tokenizer.ggml.tokens[256]: expected characters of the byte",
    );
    refused(
        |tokens, _, _| tokens[257] = "ab".into(),
        "tokenizer.ggml.tokens[257]: expected a token that is not there",
    );
    refused(
        |tokens, _, _| tokens[259] = "<|eot|>".into(),
        "tokenizer.ggml.tokens[259]: expected a marker that is not",
    );
    refused(|tokens, _, _| tokens[5] = "xyz".into(), "none for byte 0x05");
    refused(
        |tokens, _, _| tokens[256] = String::new(),
        "tokenizer.ggml.tokens[256]: expected 1 to 4096 bytes",
    );
    refused(|_, types, _| types[3] = 9, "tokenizer.ggml.token_type[3]");
    refused(|_, types, _| types[3] = 6, "tokenizer.ggml.token_type[3]");
    refused(|_, types, _| types.truncate(10), "expected 260 entries, one for each token, found 10");
    refused(|_, _, merges| merges[1] = "ab".into(), "tokenizer.ggml.merges[1]: expected two texts");
    refused(|_, _, merges| merges[1] = "xy c".into(), "tokenizer.ggml.merges[1]: expected a left side");
    refused(|_, _, merges| merges[1] = "ab xyz".into(), "tokenizer.ggml.merges[1]: expected a right side");
    refused(
        |_, _, merges| merges[1] = "ab d".into(),
        "tokenizer.ggml.merges[1]: expected two texts that join",
    );
    refused(
        |_, _, merges| merges[1] = "a b".into(),
        "tokenizer.ggml.merges[1]: expected a merge that is not there",
    );
    refused(|tokens, types, merges| (tokens.clear(), types.clear(), merges.clear()).2, "at least 256 tokens");
}

#[test]
fn bad_ids_and_names_are_refused() {
    let (tokens, types, merges) = small();
    let source = VocabSource {
        pre: "llama4".to_owned(),
        tokens: tokens.iter().map(String::as_bytes).collect(),
        token_types: types,
        merges: merges.iter().map(String::as_bytes).collect(),
        ..VocabSource::default()
    };
    let message = |source: VocabSource<'_>| Tokenizer::from_source(&source).expect_err("refused").to_string();
    assert!(
        message(VocabSource { bos: Some(260), ..source.clone() })
            .contains("bos_token_id: expected an id below 260")
    );
    assert!(message(VocabSource { add_bos: true, ..source.clone() }).contains("bos_token_id"));
    assert!(message(VocabSource { pre: "bert".into(), ..source.clone() }).contains("tokenizer.ggml.pre"));
    let mut invalid = source.clone();
    invalid.tokens[256] = b"\xff";
    assert!(message(invalid).contains("tokenizer.ggml.tokens[256]: expected UTF-8 text"));
}

#[test]
fn merge_order_and_not_id_order_decides() {
    // `bc` has the higher id but the earlier merge.
    let tokenizer = load(|tokens, types, merges| {
        tokens.insert(258, "bc".into());
        types.insert(258, 1);
        *merges = vec!["b c".into(), "a b".into()];
        tokens.truncate(260);
        types.truncate(260);
    });
    let tokenizer = tokenizer.expect("valid");
    let texts: Vec<&[u8]> = tokenizer
        .encode("xabc", Specials::Plain)
        .into_iter()
        .filter_map(|id| tokenizer.token_bytes(id))
        .collect();
    assert_eq!(texts, [&b"x"[..], b"a", b"bc"]);
    // As a whole piece `abc` is a token, and whole pieces go first.
    assert_eq!(tokenizer.encode("abc", Specials::Plain), [257]);
}

#[test]
fn markers_are_parsed_only_on_request() {
    let tokenizer = tiny_tokenizer();
    let [start, eot] = ["<|start|>", "<|eot|>"].map(|text| tokenizer.special_id(text).expect("a marker"));
    let text = "<|start|>user<|eot|><|eo";
    let plain = tokenizer.encode(text, Specials::Plain);
    assert!(!plain.contains(&start) && !plain.contains(&eot));
    assert_eq!(tokenizer.decode(&plain, Markers::Hide), text);
    let parsed = tokenizer.encode(text, Specials::Parse);
    assert_eq!(parsed.iter().filter(|&&id| id == start || id == eot).count(), 2);
    assert_eq!(tokenizer.decode(&parsed, Markers::Show), text);
    assert_eq!(tokenizer.decode(&parsed, Markers::Hide), "user<|eo");
}

#[test]
fn the_bos_is_there_exactly_once() {
    let tokenizer = tiny_tokenizer();
    let bos = tokenizer.bos().expect("a bos");
    for text in ["Once", "<|begin_of_text|>Once", ""] {
        let ids = tokenizer.encode_prompt(text, Specials::Parse);
        assert_eq!(ids.iter().filter(|&&id| id == bos).count(), 1, "{text:?}");
        assert_eq!(ids[0], bos);
    }
}

#[test]
fn the_turn_ends_with_two_ids_and_a_message_end_is_neither() {
    let tokenizer = tiny_tokenizer();
    let texts: Vec<_> =
        tokenizer.stop_ids().iter().map(|&id| tokenizer.decode(&[id], Markers::Show)).collect();
    assert_eq!(texts, ["<|end_of_text|>", "<|eot|>"]);
}

#[test]
fn a_file_without_a_tokenizer_names_the_key() {
    let empty = [&b"GGUF"[..], &3_u32.to_le_bytes(), &[0; 16]].concat();
    let file = GgufFile::from_bytes(empty).expect("a header without keys is valid");
    let message = Tokenizer::from_gguf(&file).expect_err("no tokenizer").to_string();
    assert!(message.contains("tokenizer.ggml.model"), "{message}");
    assert!(tiny_file().get("tokenizer.ggml.model").is_some());
}

proptest! {
    #[test]
    fn decoding_gives_the_text_back(text in any::<String>()) {
        let tokenizer = tiny_tokenizer();
        let ids = tokenizer.encode(&text, Specials::Plain);
        prop_assert_eq!(tokenizer.decode(&ids, Markers::Hide), text.clone());
        let mut stream = crate::Detokenizer::new(tokenizer.clone(), Markers::Hide);
        let mut out: String = ids.iter().map(|&id| stream.push(id)).collect();
        out.push_str(&stream.finish());
        prop_assert_eq!(out, text);
    }
}
