//! The real vocabulary of 202,048 tokens against published encodings.
//!
//! The expectations are encodings made with the released ranks and pre-split pattern.

mod support;

use muser_text::{
    ChatInput, ChatTemplate, Markers, Specials, Tokenizer, normalise_messages, normalise_tools,
};
use serde_json::{Value, json};
use std::sync::LazyLock;
use support::{RealVocabulary, cache_folder, real_vocabulary, sha256};

static VOCABULARY: LazyLock<Option<RealVocabulary>> = LazyLock::new(real_vocabulary);

static TOKENIZER: LazyLock<Option<Tokenizer>> = LazyLock::new(|| {
    VOCABULARY.as_ref().map(|vocabulary| Tokenizer::from_source(&vocabulary.source()).expect("it is valid"))
});

fn ids(text: &str) -> Vec<u32> {
    text.split_whitespace().map(|id| id.parse().expect("an id")).collect()
}

#[test]
fn tokens_and_merges_are_the_released_ones() {
    let Some(vocabulary) = VOCABULARY.as_ref() else { return };
    assert_eq!(
        sha256(vocabulary.tokens[..200_000].join("\n").as_bytes()),
        "06ff752604c98fb1fbff44a9cb4d7cd049616d1426ef323ca66c15c6c878ae8f"
    );
    assert_eq!(vocabulary.merges.len(), 439_802);
    assert_eq!(
        sha256(vocabulary.merges.join("\n").as_bytes()),
        "c764d0b89fe342cb9c0fe69cd027ef70b0318fd9ce80a6c8fedb98c848768f51"
    );
}

#[test]
fn published_encodings() {
    let Some(tokenizer) = TOKENIZER.as_ref() else { return };
    let plain = [
        (
            "The quick brown fox jumps over the lazy dog.",
            "954 7202 27756 92637 67072 1278 290 37463 10877 26",
        ),
        ("don't we'll I'm they've he'd she's it'll", "127161 31519 8542 87152 119114 67917 107478"),
        (
            "Don't mix It's o'clock rock'n'roll can'tt 'standalone' 'S 'T 'RE",
            "55624 11391 11680 289 187149 14914 18745 19 1622 12337 96 481 165728 19 481 63 481 64 481 1109",
        ),
        ("x!\r\n/y", "100 13 13266 27 101"),
        ("  leading spaces", "220 10855 15174"),
        ("a  b   c    d", "77 220 297 256 271 277 269"),
        (" \n \n  x\n", "51410 220 831 198"),
        ("你好世界，这是一个测试。", "5098 4219 14287 12847 32057 25317 693"),
        (
            "ЁЖЗ ёжз Привет мир МОСКВА москва",
            "167476 14892 5108 53922 649 468 6920 3524 33701 66788 22055 26597 168423 739",
        ),
        (
            "नमस्ते हिन्दी สวัสดี ไทย marks on base letters",
            "1479 2511 23194 790 154812 98999 15244 39174 2585 26361 163480 19610 436 3306 16508",
        ),
        (
            "git diff --stat HEAD~1..HEAD -- src/vllm/tokenizer/*.cpp",
            "15228 6754 2024 1805 75990 106 29 396 63744 2024 3749 6716 744 89 115948 5135 50476 36315",
        ),
        (
            "not a real token: <|not_a_token|> <| |> <|>",
            "2452 262 1776 7233 38 440 104 2452 10790 14778 159276 440 104 48923 440 159276",
        ),
        ("<atem:function_calls>\n", "40 33255 50337 123688 460"),
        ("Hello,", "19873 24"),
        (" I", "372"),
        ("The capital of France is", "954 7963 323 11698 373"),
        (
            " Paris. It is the most populous city in France and",
            "13796 26 1573 373 290 2167 26899 1212 6996 310 11698 341",
        ),
        ("system", "15651"),
        ("user", "1556"),
        ("assistant", "140680"),
        ("tool", "21188"),
        (" to", "328"),
        ("=self", "19669"),
        ("=user", "76976"),
    ];
    for (text, expected) in plain {
        assert_eq!(tokenizer.encode(text, Specials::Plain), ids(expected), "{text:?}");
        assert_eq!(tokenizer.decode(&ids(expected), Markers::Hide), text);
    }
    let parsed = [
        (
            "prefix <|start|> role <|message|> content <|eot|> suffix",
            "25858 220 200022 5811 220 200023 3664 220 200008 41319",
        ),
        (" to=self<|message|>", "328 19669 200023"),
        (
            "<|eom|><|start|>assistant to=get_weather<|message|>",
            "200007 200022 140680 328 61320 191381 200023",
        ),
    ];
    for (text, expected) in parsed {
        assert_eq!(tokenizer.encode(text, Specials::Parse), ids(expected), "{text:?}");
        assert_eq!(tokenizer.decode(&ids(expected), Markers::Show), text);
    }
    assert_eq!(tokenizer.stop_ids(), [200_001, 200_008]);
    assert_eq!(tokenizer.bos(), Some(200_000));
}

/// Prompts that the released template gives, as ids.
const PROMPT_A: &str = concat!(
    "200000 200022 15651 200023 4662 583 262 19933 12133 43910 335 111198 67059 38 220 837 34 25 1761 25 2468 335 8048 ",
    "4282 38 220 837 34 25 2834 25 738 1574 34956 300 9762 38 2244 1574 15 14757 73965 38 392 2540 706 392 1556 4205 ",
    "200008 200022 1556 200023 19873 24 5342 36886 13 200008 200022 140680",
);
const PROMPT_D: &str = concat!(
    "200000 200022 15651 200023 3654 81080 1574 34956 300 9762 38 4463 1574 15 14757 73965 38 392 2540 706 392 1556 4205 ",
    "200008 200022 1556 200023 25181 200008 200022 140680 328 76976 200023 19873 13 200008 200022 1556 200023 1887 81 ",
    "200008 200022 140680",
);

#[test]
fn published_prompts_are_their_own_encoding() {
    let Some(tokenizer) = TOKENIZER.as_ref() else { return };
    for (name, prompt, len_bytes, sha) in [
        ("A", PROMPT_A, 265, "37f3d0b54fb0a715e83c2d103ab65d972e58c633901baf40d1544c2ae8dd864e"),
        ("D", PROMPT_D, 259, "ce3e04cb63a36ddc55797ce139cfe1003bad187256ef13c4cc960ad4ea814094"),
    ] {
        let text = tokenizer.decode(&ids(prompt), Markers::Show);
        assert_eq!(text.len(), len_bytes, "{name}: {text}");
        assert_eq!(sha256(text.as_bytes()), sha, "{name}");
        assert_eq!(tokenizer.encode_prompt(&text, Specials::Parse), ids(prompt), "{name}");
    }
}

/// The released template is not in the repository. Where someone has put it into the test cache, its prompts are
/// compared with the published hashes.
#[test]
fn the_released_template_gives_the_published_prompts() {
    let Some(tokenizer) = TOKENIZER.as_ref() else { return };
    let path = cache_folder().join("muse-glimmer-chat-template.jinja");
    let Ok(source) = std::fs::read_to_string(&path) else {
        muser_testkit::skip(
            muser_testkit::Need::Data,
            format!("{} is not there; no released template was checked", path.display()),
        );
        return;
    };
    let second = match sha256(source.as_bytes()).as_str() {
        "114f55ebdc1804c1af371197b9fdf2d6bb925966c9dfe46b73782a71bc07965e" => false,
        "cfc67e5f349f37690dfd31ed1f18bc4442a9dd32fe39a648f993cb4eb3cae678" => true,
        other => panic!("{} is not a released template: {other}", path.display()),
    };
    let template = ChatTemplate::compile(&source).expect("it compiles");
    let check = |name: &str,
                 messages: Value,
                 variables: Value,
                 tools: bool,
                 tokens: usize,
                 len: usize,
                 sha: &str| {
        let tool = json!({"type": "function", "function": {
            "name": "get_weather", "description": "Get the weather.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                           "required": ["city"]}}});
        let input = ChatInput {
            messages: normalise_messages(messages.as_array().expect("a list")).expect("valid"),
            tools: normalise_tools(if tools { std::slice::from_ref(&tool) } else { &[] }).expect("valid"),
            variables: variables.as_object().cloned().unwrap_or_default(),
            ..ChatInput::default()
        };
        let text = template.render(tokenizer, &input).expect("renders");
        assert_eq!((text.len(), sha256(text.as_bytes()).as_str()), (len, sha), "{name}: {text}");
        let encoded = template.encode(tokenizer, &input).expect("encodes");
        assert_eq!(encoded.len(), tokens, "{name}");
        encoded
    };
    let date = json!({"current_date": "2026-08-12"});
    let user = |text: &str| json!({"role": "user", "content": text});
    let system = json!({"role": "system", "content": "Be concise."});
    let a = check(
        "A",
        json!([user("Hello, Glimmer!")]),
        date.clone(),
        false,
        61,
        265,
        "37f3d0b54fb0a715e83c2d103ab65d972e58c633901baf40d1544c2ae8dd864e",
    );
    assert_eq!(a, ids(PROMPT_A));
    check(
        "B",
        json!([user("Weather in Paris?")]),
        date,
        true,
        405,
        1792,
        "a102f99fc9365b568ca035d4712ade53e6ea5fd234bebb1abc1481236025d700",
    );
    check(
        "C",
        json!([
            system,
            user("Weather in Paris?"),
            {"role": "assistant", "reasoning_content": "Call the tool.", "content": null, "tool_calls": [
                {"id": "c1", "type": "function",
                 "function": {"name": "get_weather", "arguments": "{\"city\": \"Paris\", \"days\": 2}"}}]},
            {"role": "tool", "tool_call_id": "c1", "content": "{\"t\": 14}"},
        ]),
        json!({}),
        true,
        472,
        2115,
        "ef73c19d169578965c38d190fac67f8636536200c58e4c30d14c89ffc3354b3f",
    );
    let d = check(
        "D",
        json!([system, user("Hi"), {"role": "assistant", "content": "Hello!"}, user("Bye")]),
        json!({"reasoning_strength": "low"}),
        false,
        45,
        259,
        "ce3e04cb63a36ddc55797ce139cfe1003bad187256ef13c4cc960ad4ea814094",
    );
    assert_eq!(d, ids(PROMPT_D));
    let image = json!([{"type": "image_url", "image_url": {"url": "data:"}}, {"type": "text", "text": "What is this?"}]);
    check(
        "E",
        json!([system, {"role": "user", "content": image}]),
        json!({}),
        false,
        35,
        196,
        "77aa8b620984f0fa22a5b9c94f73635e74b01d35839df582ea947f4fff590c2f",
    );
    let (tokens, len, sha) = if second {
        (31, 174, "ef6d22e071046f0874552b6342d1dc7062acfeaa6d5868f46e24d1c9e1bd6166")
    } else {
        (37, 199, "d697158154d71735769324fd01671996621c5b8b309498256b0c3784f24c4871")
    };
    let effort = json!({"role": "system", "content": "Be concise.\nReasoning effort: low."});
    check("F", json!([effort, user("Hi")]), json!({}), false, tokens, len, sha);
}

/// J5: with 200,000 tokens a string of up to 100,000 characters still costs under a tenth of a millisecond a token.
#[test]
#[cfg(feature = "grammar")]
fn a_mask_inside_a_long_string_is_cheap() {
    use muser_text::grammar::{Grammar, GrammarEngine};
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    let Some(vocabulary) = VOCABULARY.as_ref() else { return };
    let tokenizer = Arc::new(Tokenizer::from_source(&vocabulary.source()).expect("it is valid"));
    let engine = GrammarEngine::new(tokenizer.clone()).expect("builds");
    let schema = json!({"type": "object", "properties": {"text": {"type": "string", "maxLength": 100_000}}, "required": ["text"]});
    let mut constraint = engine.constraint(&Grammar::JsonSchema(schema)).expect("usable");
    let text = format!("{{\"text\": \"{}", "The harbour was quiet, and the boats came home. ".repeat(24));
    let mut times = Vec::new();
    for id in tokenizer.encode(&text, Specials::Plain) {
        let start = Instant::now();
        let mask = constraint.mask().expect("a mask");
        constraint.commit(id).expect("allowed");
        times.push(start.elapsed());
        assert!(mask[id as usize / 32] >> (id % 32) & 1 == 1);
    }
    times.sort();
    assert!(times.len() > 260, "{} tokens", times.len());
    // The median: single turns are disturbed by whatever else the machine does.
    assert!(times[times.len() / 2] < Duration::from_micros(100), "{:?}", times[times.len() / 2]);
}
