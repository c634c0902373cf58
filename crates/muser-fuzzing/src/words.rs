//! Vocabularies, and what a model's output means.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::{Arc, LazyLock};

use muser_gguf::GgufFile;
use muser_text::{
    Detokenizer, Markers, OutputDecoder, OutputEnd, OutputEvent, OutputMode, OutputOptions, Specials,
    StopMatcher, TokenKind, Tokenizer, VocabSource, normalise_tools, spell_bytes,
};
use serde_json::{Value, json};

use crate::{Input, Target, check_message};

/// The bundled model's file.
pub(crate) static FILE: LazyLock<GgufFile> =
    LazyLock::new(|| GgufFile::open(muser_testkit::muse_tiny()).expect("the bundled model opens"));
/// Its vocabulary.
pub(crate) static TINY: LazyLock<Arc<Tokenizer>> =
    LazyLock::new(|| Arc::new(Tokenizer::from_gguf(&FILE).expect("its vocabulary is whole")));

/// A made-up vocabulary, and texts under it and under the bundled one.
pub const TOKENIZER: Target = Target {
    name: "tokenizer",
    about: "made-up vocabularies: bytes survive, pieces of a stream are the whole, a naive merge of words agrees",
    run: tokenizer,
    seeds: tokenizer_seeds,
    words: &["<|start|>", "<|eot|>", "\u{120}", "th", "in", "ing", "'s", "123", "\u{301}", "你好"],
    max_len: 1024,
    memory: (4 << 20, 4096),
    millis: (200, 50),
};

fn tokenizer(data: &[u8]) {
    let mut input = Input::new(data);
    // Bytes that a piece of a token may have: few, so that tokens meet.
    let letters = b"abcd ein\n";
    let mut tokens: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    let mut merges: Vec<(usize, usize)> = Vec::new();
    for _ in 0..input.below(32) {
        let (left, right) = (input.below(tokens.len() + 8), input.below(tokens.len() + 8));
        let side = |at: usize| {
            if at < tokens.len() && at >= 256 { at } else { usize::from(letters[at % letters.len()]) }
        };
        let (left, right) = (side(left), side(right));
        let joined = [&tokens[left][..], &tokens[right]].concat();
        if joined.len() <= 12 && !tokens.contains(&joined) {
            tokens.push(joined);
            merges.push((left, right));
        }
    }
    let mut spelled: Vec<Vec<u8>> = tokens.iter().map(|token| spell_bytes(token).into_bytes()).collect();
    let mut types = vec![1_i64; spelled.len()];
    for special in ["<|start|>", "<|message|>", "<|eom|>", "<|eot|>"] {
        spelled.push(special.as_bytes().to_vec());
        types.push(3);
    }
    let extra = input.below(4);
    for _ in 0..extra {
        spelled.push(input.bytes(12).to_vec());
        types.push(input.number());
    }
    let lines: Vec<Vec<u8>> = merges
        .iter()
        .map(|(left, right)| [&spelled[*left][..], b" ", &spelled[*right]].concat())
        .chain((0..input.below(3)).map(|_| input.clone().bytes(8).to_vec()))
        .collect();
    let id = |input: &mut Input<'_>| input.flag().then(|| input.number() as u64);
    let source = VocabSource {
        pre: input.pick(&["llama4", "gpt-4o", "other"]).to_owned(),
        tokens: spelled.iter().map(Vec::as_slice).collect(),
        token_types: types,
        merges: lines.iter().map(Vec::as_slice).collect(),
        bos: id(&mut input),
        eos: id(&mut input),
        eot: id(&mut input),
        padding: id(&mut input),
        add_bos: input.flag(),
    };
    let text = String::from_utf8_lossy(input.rest()).into_owned();
    round_trip(&TINY, &text);
    match Tokenizer::from_source(&source) {
        Ok(made) => {
            let made = Arc::new(made);
            round_trip(&made, &text);
            let word: Vec<u8> = text.bytes().filter(u8::is_ascii_lowercase).take(200).collect();
            if extra == 0 && lines.len() == merges.len() && !word.is_empty() {
                let ids = made.encode(&String::from_utf8_lossy(&word), Specials::Plain);
                assert_eq!(ids, naive(&tokens, &merges, &word), "{:?}", String::from_utf8_lossy(&word));
            }
        }
        Err(error) => check_message(&error.to_string()),
    }
}

/// Byte pairs as the rule is written down: of all pairs the lowest rank, leftmost first.
fn naive(tokens: &[Vec<u8>], merges: &[(usize, usize)], word: &[u8]) -> Vec<u32> {
    if let Some(whole) = tokens.iter().position(|token| token == word) {
        return vec![whole as u32];
    }
    let mut ids: Vec<usize> = word.iter().map(|byte| usize::from(*byte)).collect();
    loop {
        let rank = |pair: &[usize]| merges.iter().position(|merge| *merge == (pair[0], pair[1]));
        let best = ids.windows(2).enumerate().filter_map(|(at, pair)| Some((rank(pair)?, at))).min();
        let Some((rank, at)) = best else { break };
        ids.splice(at..at + 2, [256 + rank]);
    }
    ids.into_iter().map(|id| id as u32).collect()
}

fn round_trip(tokenizer: &Arc<Tokenizer>, text: &str) {
    for specials in [Specials::Plain, Specials::Parse] {
        let ids = tokenizer.encode(text, specials);
        let bytes: Vec<u8> = ids
            .iter()
            .flat_map(|id| tokenizer.token_bytes(*id).expect("an id of its own"))
            .copied()
            .collect();
        assert_eq!(bytes, text.as_bytes(), "bytes survive");
        let controls = ids.iter().filter(|id| tokenizer.token_kind(**id) == Some(TokenKind::Control)).count();
        assert!(controls == 0 || matches!(specials, Specials::Parse), "plain text has no control tokens");
        for markers in [Markers::Show, Markers::Hide] {
            let mut stream = Detokenizer::new(Arc::clone(tokenizer), markers);
            let mut pieces: String = ids.iter().map(|id| stream.push(*id)).collect();
            pieces.push_str(&stream.finish());
            assert_eq!(pieces, tokenizer.decode(&ids, markers));
        }
    }
}

fn tokenizer_seeds() -> Vec<Vec<u8>> {
    let texts = [
        "",
        "the quick brown fox's 12345 jumps\n\n  over",
        "abcdabcd einein dcba",
        "<|start|>user<|message|>Hi<|eot|>",
        "你好 e\u{301} 🦊\u{200d}",
    ];
    let mut seeds = Vec::new();
    for (index, text) in texts.iter().enumerate() {
        let mut bytes = vec![if index % 2 == 0 { 4 } else { 12 }];
        bytes.extend((0..if index % 2 == 0 { 8 } else { 24 }).flat_map(|i| [1, i as u8 * 3, 0, i as u8 * 7]));
        bytes.extend([0, 0, (index % 2) as u8, 0, 0, 0, 0, 0]);
        bytes.extend(text.as_bytes());
        seeds.push(bytes);
    }
    seeds
}

/// A model's output, cut into tokens in every way.
pub const OUTPUT: Target = Target {
    name: "output",
    about: "channels, tool calls and stop strings do not depend on how text is cut into tokens; engine and server see one end",
    run: output,
    seeds: output_seeds,
    words: PIECES,
    max_len: 1024,
    memory: (2 << 20, 4096),
    millis: (400, 400),
};

const PIECES: &[&str] = &[
    "<|start|>",
    "<|message|>",
    "<|eom|>",
    "<|eot|>",
    "assistant",
    " to=self",
    " to=user",
    " to=get_weather",
    "<atem:function_calls>",
    "</atem:function_calls>",
    "<atem:invoke name=\"get_weather\">",
    "</atem:invoke>",
    "<atem:parameter name=\"city\">",
    "<atem:parameter name=\"days\">",
    "</atem:parameter>",
    "STOP",
    "{\"city\": \"Paris\"}",
    "\\n",
];

static BY_BYTES: LazyLock<HashMap<&'static [u8], u32>> = LazyLock::new(|| {
    let tokenizer: &'static Tokenizer = &TINY;
    let ids = (0..tokenizer.vocab_size() as u32).rev();
    let normal = ids.filter(|id| tokenizer.token_kind(*id) == Some(TokenKind::Normal));
    normal.filter_map(|id| Some((tokenizer.token_bytes(id)?, id))).collect()
});

static TOOLS: LazyLock<Vec<Value>> = LazyLock::new(|| {
    let schema = |properties: Value| json!({"type": "object", "properties": properties});
    normalise_tools(&[
        json!({"name": "get_weather", "parameters": schema(json!({"city": {"type": "string"}, "days": {"type": "integer"}, "any": {}}))}),
        json!({"name": "read", "parameters": schema(json!({"filePath": {"type": "string"}}))}),
        json!({"name": "set_x"}),
    ])
    .expect("valid")
});

/// Everything that came out, joined by kind.
#[derive(Debug, Default, PartialEq)]
struct Seen {
    reasoning: String,
    content: String,
    calls: Vec<(String, String, bool)>,
    end: Option<OutputEnd>,
}

impl Seen {
    fn add(&mut self, events: Vec<OutputEvent>) {
        for event in events {
            match event {
                OutputEvent::Reasoning(text) => self.reasoning.push_str(&text),
                OutputEvent::Content(text) => self.content.push_str(&text),
                OutputEvent::ToolCallStart { index, name, .. } => {
                    assert_eq!(index, self.calls.len());
                    self.calls.push((name, String::new(), false));
                }
                OutputEvent::ToolCallArguments { index, json_delta } => {
                    assert!(
                        index + 1 == self.calls.len() && !self.calls[index].2,
                        "only the last call grows"
                    );
                    self.calls[index].1.push_str(&json_delta);
                }
                OutputEvent::ToolCallEnd { index, arguments } => {
                    assert_eq!(self.calls[index].1, arguments, "the pieces are the whole");
                    let parsed: Value = serde_json::from_str(&arguments).expect("arguments are JSON");
                    assert!(parsed.is_object());
                    self.calls[index].2 = true;
                }
            }
        }
    }
}

fn output(data: &[u8]) {
    let mut input = Input::new(data);
    let mode = input.pick(&[
        OutputMode::Chat,
        OutputMode::ChatAnswer,
        OutputMode::Raw(Markers::Show),
        OutputMode::Raw(Markers::Hide),
    ]);
    let mut stop: Vec<String> =
        (0..input.below(3)).map(|_| input.pick(&["STOP", "\n\n", "é", "</", "aab"]).to_owned()).collect();
    stop.dedup();
    let tools = if input.flag() { TOOLS.clone() } else { Vec::new() };
    let options = OutputOptions { mode, tools, stop };
    let cut = usize::from(input.byte());
    let mut text = String::new();
    while !input.is_empty() && text.len() < 4096 {
        match input.byte() {
            choice @ 0..192 => {
                text.push_str(PIECES[usize::from(choice) % PIECES.len()].replace("\\n", "\n").as_str());
            }
            192.. => {
                let _ = write!(text, "{}", String::from_utf8_lossy(input.bytes(20)));
            }
        }
    }
    let whole = TINY.encode(&text, Specials::Parse);
    let expected = run(&options, &whole);
    for size in [1, 2 + cut % 7] {
        assert_eq!(run(&options, &cut_again(&whole, size)), expected, "{text:?} by {size}");
    }
    if let Some(index) = options.stop.iter().position(|stop| expected.content.contains(stop.as_str())) {
        panic!("stop string {index} in the answer {:?}", expected.content);
    }
}

fn run(options: &OutputOptions, ids: &[u32]) -> Seen {
    let mut decoder = OutputDecoder::new(Arc::clone(&TINY), options).expect("valid options");
    let mut matcher = StopMatcher::new(Arc::clone(&TINY), options, false).expect("valid options");
    let mut seen = Seen::default();
    for id in ids {
        seen.add(decoder.push(*id));
        let ended = matcher.as_mut().map(|matcher| matcher.push(*id));
        assert!(ended.is_none_or(|ended| ended == decoder.end().is_some()), "engine and server see one end");
    }
    seen.add(decoder.finish());
    assert_eq!(decoder.finish(), [], "the end comes once");
    assert_eq!(decoder.tool_calls(), seen.calls.len());
    seen.end = decoder.end();
    seen
}

/// The same text in other tokens: the longest of at most `size` bytes that there is.
fn cut_again(ids: &[u32], size: usize) -> Vec<u32> {
    let mut out = Vec::new();
    let mut bytes: Vec<u8> = Vec::new();
    let flush = |bytes: &mut Vec<u8>, out: &mut Vec<u32>| {
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let longest =
                (1..=size.min(rest.len())).rev().find_map(|len| Some((len, *BY_BYTES.get(&rest[..len])?)));
            let (len, id) = longest.expect("every byte is a token");
            out.push(id);
            rest = &rest[len..];
        }
        bytes.clear();
    };
    for id in ids {
        if TINY.token_kind(*id) == Some(TokenKind::Normal) {
            bytes.extend(TINY.token_bytes(*id).unwrap_or_default());
        } else {
            flush(&mut bytes, &mut out);
            out.push(*id);
        }
    }
    flush(&mut bytes, &mut out);
    out
}

fn output_seeds() -> Vec<Vec<u8>> {
    // Numbers of pieces: thought, answer, a call, markup that is broken.
    let turns: [&[u8]; 6] = [
        &[5, 1, 16, 2, 0, 4, 6, 1, 15, 3],
        &[7, 1, 8, 10, 12, 16, 14, 13, 17, 14, 11, 9, 3],
        &[8, 10, 12, 16, 14, 11, 10, 12, 14, 11, 9, 2, 0, 4, 6, 1, 15, 16, 3],
        &[1, 1, 0, 0, 4, 5, 2, 2, 12, 13, 14, 9],
        &[6, 1, 8, 9, 8, 10, 11, 9, 15],
        &[200, 5, b'h', 0xc3, 0xa9, b'l', b'o', 15, 3],
    ];
    let mut seeds = Vec::new();
    for mode in 0..4 {
        for (index, turn) in turns.iter().enumerate() {
            seeds.push([&[mode, index as u8 % 3, 0, 1][..=(index % 3)], &[1, 3], turn].concat());
        }
    }
    seeds
}
