//! The watch that runs on the engine's thread allocates nothing after it was made: counted by the allocator, for this thread,
//! over chats with reasoning, answers, headers, tool calls of every kind and stop strings that nearly come. And templates that are
//! made to fill memory end before they have.

use std::sync::Arc;
use std::time::{Duration, Instant};

use muser_gguf::GgufFile;
use muser_testkit::{CountingAllocator, allocations, most_held};
use muser_text::{
    ChatInput, ChatTemplate, Markers, OutputDecoder, OutputMode, OutputOptions, Specials, StopMatcher,
    Tokenizer, normalise_messages, normalise_tools,
};
use serde_json::json;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn tokenizer() -> Arc<Tokenizer> {
    let path = muser_testkit::muse_tiny();
    let file = GgufFile::open(path).expect("the bundled model opens");
    Arc::new(Tokenizer::from_gguf(&file).expect("it has a vocabulary"))
}

fn call(parameters: &str) -> String {
    format!(
        " to=write_file<|message|><atem:function_calls>\n<atem:invoke name=\"write_file\">\n{parameters}</atem:invoke>\n</atem:function_calls>"
    )
}

fn parameter(key: &str, value: &str) -> String {
    format!("<atem:parameter name=\"{key}\">{value}</atem:parameter>\n")
}

/// Turns that meet every state of the machine.
fn outputs() -> Vec<String> {
    let long = "A line of text with é, 界 and 🙂, and some more of it. STO\n".repeat(400);
    let next = "<|eom|><|start|>assistant";
    let many: String =
        (0..40).map(|key| parameter(&format!("key_{key}"), "{\"a\": [1, 2, \"x\"]}")).collect();
    vec![
        format!(" to=self<|message|>{long}{next} to=user<|message|>{long}"),
        long.repeat(2),
        format!(
            " to=self<|message|>go to=x y to=read {long}{next} to=user<|message|> to=f<|message|>and {long}"
        ),
        format!("{}{next} to=user<|message|>{long}", call(&parameter("path", "/tmp/a b"))),
        format!("{}{next}{}", call(&many), call(&parameter("content", &long))),
        call(
            &(parameter("mode", &format!("{{\"text\": \"{long}\"}}"))
                + "stray text "
                + &parameter("path", "x")),
        ),
        call(&(parameter("path", "x") + &parameter("path", "a second one"))),
        call(&parameter("mode", "{\"closing\": \"</atem:parameter>\"}")),
        call(&parameter("mode", "{\"open: </atem:parameter>")),
        format!(" to=write_file<|message|>no block at all {long}"),
        format!(" to=self<|message|>x to=write_file<|message|><atem:function_calls>{long}"),
    ]
}

/// Allocations of a watch over all outputs, and of the decoder over the same ones.
fn counts(options: &OutputOptions, one_call: bool) -> (u64, u64) {
    let tokenizer = tokenizer();
    let (mut watching, mut decoding) = (0, 0);
    for output in outputs() {
        let ids = tokenizer.encode(&output, Specials::Parse);
        let watch = StopMatcher::new(Arc::clone(&tokenizer), options, one_call).expect("good options");
        // As the engine has it: a copy for one choice.
        let mut watch = watch.expect("installed").clone();
        let mut decoder = OutputDecoder::new(Arc::clone(&tokenizer), options).expect("good options");
        for id in ids {
            let mut ended = false;
            let of_watch = allocations(|| ended = watch.push(id));
            watching += of_watch;
            decoding += allocations(|| drop(decoder.push(id)));
            assert_eq!(
                of_watch,
                0,
                "{:?} in {output:.80}",
                tokenizer.token_bytes(id).map(String::from_utf8_lossy)
            );
            assert!(!ended || one_call, "these outputs end nowhere: {output:.80}");
        }
    }
    (watching, decoding)
}

#[test]
fn the_watch_allocates_nothing() {
    let object = |properties| json!({"type": "object", "properties": properties});
    let tools = normalise_tools(&[json!({"name": "write_file", "parameters": object(json!({
        "path": {"type": "string"}, "content": {"type": "string"}, "mode": {"type": "object"}}))})]);
    let tools = tools.expect("a good tool");
    let stop = vec!["STOP".to_owned(), "text and nothing".into(), " to=nobody".into(), "\n\n".into()];
    for mode in [OutputMode::Chat, OutputMode::ChatAnswer, OutputMode::Raw(Markers::Show)] {
        for (stop, one_call) in
            [(stop.clone(), false), (stop.clone(), true), (Vec::new(), true), (Vec::new(), false)]
        {
            if stop.is_empty() && matches!(mode, OutputMode::Raw(_)) {
                continue;
            }
            let one_call = one_call || mode == OutputMode::ChatAnswer;
            let (watching, decoding) = counts(&OutputOptions { mode, tools: tools.clone(), stop }, one_call);
            assert_eq!(watching, 0);
            assert!(decoding > 1000, "the counter counts what a decoder makes: {decoding}");
        }
    }
}

/// A template comes from a downloaded file: one that doubles a string, a list or what it writes ends with an error, soon and
/// while it has little memory, when the file is loaded and when a conversation is rendered.
#[test]
fn a_hostile_template_takes_bounded_memory() {
    let doubled = |start: &str, double: &str| {
        format!(
            "{{% set ns = namespace(x={start}) %}}{{% for i in range(64) %}}{{% set ns.x = {double} %}}{{% endfor %}}{{{{ ns.x }}}}"
        )
    };
    let tokenizer = tokenizer();
    for source in [
        doubled("'0123456789abcdef'", "ns.x + ns.x"),
        doubled("'0123456789abcdef'", "ns.x ~ ns.x"),
        "{{ (['0123456789abcdef'] * 1000000000) | tojson }}".to_owned(),
        doubled("'0123456789abcdef'", "(ns.x ~ 'a') | replace('a', 'aaaaaaaa')"),
        doubled("'0123456789abcdef'", "[ns.x, ns.x] | join('x')"),
        doubled("'0123456789abcdef'", "[ns.x, ns.x] | tojson"),
        "{% for i in range(90000) %}{% for j in range(90000) %}0123456789abcdef{% endfor %}{% endfor %}"
            .to_owned(),
        "{{ messages[0].content * 100000000 }}".to_owned(),
        // Lists that share their parts are small until something walks them.
        doubled("['0123456789abcdef']", "ns.x + ns.x"),
        doubled("['0123456789abcdef']", "ns.x * 2"),
        doubled("['0123456789abcdef']", "2 * ns.x + [1]"),
        doubled("['0123456789abcdef']", "[ns.x, ns.x]"),
        doubled("['0123456789abcdef']", "(ns.x, ns.x)"),
        doubled("['0123456789abcdef']", "{'a': ns.x, 'b': ns.x}"),
        doubled("['0123456789abcdef']", "dict(a=ns.x, b=ns.x)"),
        doubled("['0123456789abcdef']", "ns.x | chain(ns.x)"),
        doubled("['0123456789abcdef']", "ns.x | zip(ns.x)"),
        doubled("['0123456789abcdef']", "namespace(a=ns.x, b=ns.x)"),
        doubled("['0123456789abcdef']", "[ns, ns]"),
        "{{ ((['0123456789abcdef'] * 100000000) ~ '') | length }}".to_owned(),
        "{{ (((['0123456789abcdef'] * 10000) * (2 * 5000)) ~ '') | length }}".to_owned(),
        "{{ ((([1] * 10000) | map('chain', [1] * 10000)) ~ '') | length }}".to_owned(),
        "{% macro m(l, n) %}{{ m(l + l, n + 1) if n < 60 else l ~ '' }}{% endmacro %}{{ m([1], 0) }}".to_owned(),
        // Compared often, and deep in each other.
        "{% set a = range(90000) | list %}{% set b = range(90000) | list %}{% for i in range(90000) %}{% for j in range(90000) %}{% if a != b %}x{% endif %}{% endfor %}{% endfor %}".to_owned(),
        "{% set a = [range(90000) | list] %}{% for i in range(90000) %}{% if a | select('eq', [] + a[0]) | list %}x{% endif %}{% endfor %}".to_owned(),
        "{% set ns = namespace(x=[]) %}{% for i in range(90000) %}{% set ns.x = [ns.x] %}{% endfor %}".to_owned(),
        "{% set ns = namespace(x=[1]) %}{% for i in range(90000) %}{% set ns.x = ns.x * 1 %}{% set ns.x = ns.x[0:] | reverse %}{% endfor %}{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}".to_owned(),
        "{% set ns = namespace(x=1) %}{% for i in range(90000) %}{% set n = namespace() %}{% set n.x = ns.x %}{% set ns.x = n %}{% endfor %}".to_owned(),
    ] {
        let begun = Instant::now();
        let (outcome, most) = most_held(|| {
            let template = ChatTemplate::compile(&source).expect("its syntax is right");
            let user = json!({"role": "user", "content": "Hello."});
            let messages = normalise_messages(&[user]).expect("valid");
            template.encode(&tokenizer, &ChatInput { messages, ..ChatInput::default() })
        });
        let took = begun.elapsed();
        let most = most >> 20;
        println!("{most} MiB, {took:?}: {source}");
        assert!(outcome.is_err(), "{source}");
        assert!(most < 400, "{most} MiB: {source}");
        // Seconds on a busy machine.
        assert!(took < Duration::from_secs(20), "{took:?}: {source}");
    }
}
