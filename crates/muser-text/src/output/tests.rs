use super::*;
use crate::special_tokens::Segment;
use crate::test_support::tiny_tokenizer;
use crate::{Markers, Specials, normalise_tools};
use muser_testkit::Rng;
use proptest::prelude::*;
use serde_json::{Value, json};

const START: &str = "<|start|>assistant";
const CALL: &str = concat!(
    "<atem:function_calls>\n<atem:invoke name=\"get_weather\">\n",
    "<atem:parameter name=\"city\">Paris</atem:parameter>\n<atem:parameter name=\"days\">2</atem:parameter>\n",
    "</atem:invoke>\n</atem:function_calls>"
);

fn tools() -> Vec<Value> {
    let schema = |properties: Value| json!({"type": "object", "properties": properties});
    normalise_tools(&[
        json!({"name": "get_weather", "parameters": schema(
            json!({"city": {"type": "string"}, "days": {"type": "integer"}, "any": {}}))}),
        json!({"name": "read", "parameters": schema(json!({"filePath": {"type": "string"}}))}),
        json!({"name": "ns.Do-It_1", "parameters": schema(json!({"x": {"type": "array"}}))}),
        json!({"name": "set_x"}),
    ])
    .expect("valid")
}

fn options(mode: OutputMode, stop: &[&str]) -> OutputOptions {
    OutputOptions { mode, tools: tools(), stop: stop.iter().map(ToString::to_string).collect() }
}

/// Everything that came out, joined by kind, in a form that is easy to compare.
#[derive(Debug, Default, PartialEq, Eq, Clone)]
struct Seen {
    reasoning: String,
    content: String,
    /// Name, arguments, complete?
    calls: Vec<(String, String, bool)>,
    end: Option<OutputEnd>,
}

impl Seen {
    fn add(&mut self, events: Vec<OutputEvent>) {
        for event in events {
            match event {
                OutputEvent::Reasoning(text) => self.reasoning.push_str(&text),
                OutputEvent::Content(text) => self.content.push_str(&text),
                OutputEvent::ToolCallStart { index, id, name } => {
                    assert_eq!((index, id), (self.calls.len(), format!("call_{index}")));
                    self.calls.push((name, String::new(), false));
                }
                OutputEvent::ToolCallArguments { index, json_delta } => {
                    assert_eq!(index + 1, self.calls.len(), "only the last call grows");
                    assert!(!self.calls[index].2, "a call that ended does not grow");
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

/// Runs output given as text with markers, the text between markers cut into pieces of `size` bytes.
fn run(options: &OutputOptions, output: &str, size: usize) -> Seen {
    let tokenizer = tiny_tokenizer();
    let mut decoder = OutputDecoder::new(tokenizer.clone(), options).expect("valid options");
    let mut seen = Seen::default();
    for segment in tokenizer.specials().segments(output) {
        match segment {
            Segment::Special(id) => seen.add(decoder.push(id)),
            Segment::Plain(text) => {
                for piece in text.as_bytes().chunks(size) {
                    seen.add(decoder.with(|machine, events| machine.push_bytes(piece, events)));
                }
            }
        }
    }
    seen.add(decoder.finish());
    assert_eq!(decoder.finish(), [], "the end comes once");
    seen.end = decoder.end();
    seen
}

/// All ways of cutting give the expected result, and so do the tokens of the bundled model.
fn check_with(options: &OutputOptions, output: &str, expected: &Seen) {
    for size in (1..9).chain([16, 33, 1000]) {
        assert_eq!(&run(options, output, size), expected, "{output:?} by {size}");
    }
    let tokenizer = tiny_tokenizer();
    let mut decoder = OutputDecoder::new(tokenizer.clone(), options).expect("valid options");
    let mut matcher = StopMatcher::new(tokenizer.clone(), options, false).expect("valid options");
    let mut seen = Seen::default();
    for id in tokenizer.encode(output, Specials::Parse) {
        seen.add(decoder.push(id));
        let ended = matcher.as_mut().is_some_and(|matcher| matcher.push(id));
        assert_eq!(ended, decoder.end().is_some(), "engine and server see the end at the same id");
    }
    seen.add(decoder.finish());
    seen.end = decoder.end();
    assert_eq!(&seen, expected, "{output:?} by tokens");
}

fn check(output: &str, reasoning: &str, content: &str, calls: &[(&str, &str)]) {
    let ended = output.ends_with("<|eot|>") || output.ends_with("<|end_of_text|>");
    let expected = Seen {
        reasoning: reasoning.into(),
        content: content.into(),
        calls: calls
            .iter()
            .map(|(name, arguments)| (name.to_string(), arguments.to_string(), true))
            .collect(),
        end: ended.then_some(OutputEnd::EndOfTurn),
    };
    check_with(&options(OutputMode::Chat, &[]), output, &expected);
}

const PARIS: (&str, &str) = ("get_weather", r#"{"city":"Paris","days":2}"#);

#[test]
fn reasoning_then_answer() {
    check(
        &format!(" to=self<|message|>Hm, 5 < 6.<|eom|>{START} to=user<|message|>Hi 🙂<|eot|>"),
        "Hm, 5 < 6.",
        "Hi 🙂",
        &[],
    );
    check(" to=user<|message|>Hi<|end_of_text|>", "", "Hi", &[]);
    check("<|message|>Hi<|eot|>", "", "Hi", &[]);
}

#[test]
fn reasoning_then_call() {
    check(
        &format!(" to=self<|message|>Call.<|eom|>{START} to=get_weather<|message|>{CALL}<|eot|>"),
        "Call.",
        "",
        &[PARIS],
    );
    // Without a thought before.
    let call = CALL.replace("get_weather", "set_x");
    check(
        &format!(" to=set_x<|message|>{call}<|eot|>"),
        "",
        "",
        &[("set_x", r#"{"city":"Paris","days":2}"#)],
    );
}

#[test]
fn parallel_calls() {
    let two =
        CALL.replace("</atem:invoke>\n", "</atem:invoke>\n<atem:invoke name=\"read\">\n</atem:invoke>\n");
    check(
        &format!(" to=get_weather<|message|>{CALL}<|eom|>{START} to=get_weather<|message|>{two}<|eot|>"),
        "",
        "",
        &[PARIS, PARIS, ("read", "{}")],
    );
}

#[test]
fn no_markup_is_the_answer() {
    check("Hello there", "", "Hello there", &[]);
    check("Hello there<|eot|>", "", "Hello there", &[]);
    check("assistants help<|eot|>", "", "assistants help", &[]);
    check(" to=5 is wrong<|eot|>", "", " to=5 is wrong", &[]);
    check(" to=x<|eot|>", "", " to=x", &[]);
    check(" to=self<|message|>R<|eom|>Answer<|eot|>", "R", "Answer", &[]);
    check(&format!(" to=self<|message|>R<|eom|>{START} Answer<|eot|>"), "R", "Answer", &[]);
}

#[test]
fn repeated_and_missing_openings_are_accepted() {
    check(
        &format!("{START} to=self<|message|>R<|eom|>{START}{START} to=user<|message|>A<|eot|>"),
        "R",
        "A",
        &[],
    );
    check(" to=self<|message|>R<|eom|> to=user<|message|>A<|eot|>", "R", "A", &[]);
    check("assistant to=self<|message|>R<|eom|>assistant to=user<|message|>A<|eot|>", "R", "A", &[]);
    // A new opening ends the message before.
    check(&format!(" to=self<|message|>R{START} to=user<|message|>A<|eot|>"), "R", "A", &[]);
    let empty = "<atem:function_calls>\n<atem:invoke name=\"read\">\n</atem:invoke>\n</atem:function_calls>";
    check(
        &format!(" to=self<|message|>R<|eom|> to=read<|message|>{empty}<|eot|>"),
        "R",
        "",
        &[("read", "{}")],
    );
}

#[test]
fn a_header_inside_reasoning_splits_only_before_a_block() {
    check(&format!(" to=self<|message|>R to=get_weather<|message|>{CALL}<|eot|>"), "R", "", &[PARIS]);
    check(" to=self<|message|>R to=user<|message|>A<|eot|>", "R", "A", &[]);
    check(" to=self<|message|>R to=f<|message|>x to=<|eom|>", "R to=fx to=", "", &[]);
    check(" to=self<|message|>R to=f<|message|><atem<|eot|>", "R to=f<atem", "", &[]);
    check(" to=self<|message|>R to=f<|message|><atem to=user<|message|>A<|eot|>", "R to=f<atem", "A", &[]);
    check(" to=self<|message|>R to=f x<|message|>y<|eot|>", "R to=f xy", "", &[]);
    check(" to=self<|message|>R t<|eom|>", "R t", "", &[]);
}

#[test]
fn a_block_in_text_is_text() {
    check(&format!(" to=user<|message|>{CALL}<|eot|>"), "", CALL, &[]);
    check(&format!(" to=self<|message|>{CALL}<|eot|>"), CALL, "", &[]);
}

#[test]
fn bodies_of_a_kind_are_joined_by_line_breaks() {
    check(
        &format!(
            " to=self<|message|>a<|eom|>{START} to=self<|message|>b<|eom|>{START} to=user<|message|>c<|eot|>"
        ),
        "a\nb",
        "c",
        &[],
    );
    let two_answers = format!(" to=user<|message|>a<|eom|>{START} to=user<|message|>b<|eot|>");
    check(&two_answers, "", "a\nb", &[]);
    // A stop string is looked for in what the reader sees.
    let expected = Seen { end: Some(OutputEnd::StopString(0)), ..Seen::default() };
    check_with(&options(OutputMode::Chat, &["a\nb"]), &two_answers, &expected);
}

#[test]
fn someone_elses_message_ends_the_turn() {
    let expected = Seen { content: "A".into(), end: Some(OutputEnd::EndOfTurn), ..Seen::default() };
    let output = " to=user<|message|>A<|eom|><|start|>user<|message|>And you?<|eot|>";
    check_with(&options(OutputMode::Chat, &[]), output, &expected);
}

fn block(calls: &str) -> String {
    format!("<atem:function_calls>\n{calls}\n</atem:function_calls>")
}

fn check_block(block: &str, content: &str, calls: &[(&str, &str)]) {
    check(&format!(" to=get_weather<|message|>{block}<|eot|>"), "", content, calls);
}

#[test]
fn values_are_typed_by_the_schema() {
    let value = |key: &str, value: &str| {
        block(&format!(
            "<atem:invoke name=\"get_weather\">\n<atem:parameter name=\"{key}\">{value}</atem:parameter>\n</atem:invoke>"
        ))
    };
    check_block(&value("city", "123"), "", &[("get_weather", r#"{"city":"123"}"#)]);
    check_block(&value("city", " \"q\"\n</a> é\\"), "", &[("get_weather", r#"{"city":" \"q\"\n</a> é\\"}"#)]);
    check_block(&value("city", ""), "", &[("get_weather", r#"{"city":""}"#)]);
    check_block(&value("days", "3"), "", &[("get_weather", r#"{"days":3}"#)]);
    check_block(&value("days", "three"), "", &[("get_weather", r#"{"days":"three"}"#)]);
    check_block(&value("any", "{\"a\": [1]}"), "", &[("get_weather", r#"{"any":{"a": [1]}}"#)]);
    check_block(&value("new\"k", "x"), "", &[("get_weather", r#"{"new\"k":"x"}"#)]);
}

#[test]
fn sloppy_blocks_are_calls() {
    // No line breaks, no block tags, a doubled name, a namespace, a marker in the name, a missing end.
    check_block(&CALL.replace('\n', ""), "", &[PARIS]);
    let bare = "<atem:invoke name=\"get_weather\"></atem:invoke>";
    check_block(bare, "", &[("get_weather", "{}")]);
    check_block(&CALL.replace("get_weather", "get_weather.get_weather"), "", &[PARIS]);
    check_block(&CALL.replace("get_weather", "functions.get_weather"), "", &[PARIS]);
    check_block(&CALL.replace("get_weather", "get_<|message|>weather"), "", &[PARIS]);
    check_block(&CALL.replace("get_weather", "weather"), "", &[PARIS]);
    let call = CALL.replace("get_weather", "ns.Do-It_1");
    check_block(&call, "", &[("ns.Do-It_1", PARIS.1)]);
    check_block(&CALL.replace("</atem:invoke>\n</atem:function_calls>", ""), "", &[PARIS]);
    check_block(&CALL.replace("</atem:invoke>\n", ""), "", &[PARIS]);
    check_block(&CALL.replace("</atem:function_calls>", "</atem:func"), "", &[PARIS]);
    check_block(
        &CALL.replace("2</atem:parameter>\n</atem:invoke>\n</atem:function_calls>", "2</atem:para"),
        "",
        &[PARIS],
    );
}

#[test]
fn unknown_tools_are_calls_under_their_own_name() {
    let name = "x".repeat(64);
    let call = CALL.replace("get_weather", &name);
    check(&format!(" to={name}<|message|>{call}<|eot|>"), "", "", &[(&name, PARIS.1)]);
}

#[test]
fn what_is_no_call_is_shown_as_text() {
    let bad = [
        "just text",
        "<atem:function_calls>",
        "<atem:function_calls>\n</atem:function_calls>",
        "<atem:function_calls>\nhello\n</atem:function_calls>",
        "<atem:invoke name=\"read.filePath\">/tmp/x</atem:parameter>",
        "<atem:function_calls>\n<atem:invoke name=\"read\">\n</atem:function_calls>",
        "<atem:function_calls>\n<atem:invoke name=\"re\nad\">\n</atem:invoke></atem:function_calls>",
        "<atem:function_calls>\n<atem:invoke name=\"read\">\n<atem:param",
        " {\"city\": \"Paris\"} ",
    ];
    for text in bad {
        let shown = text.to_owned();
        check_block(text, &shown, &[]);
    }
    check_block("  \n", "", &[]);
}

#[test]
fn strays_stand_beside_the_call() {
    check_block(
        &CALL.replace("<atem:parameter name=\"days\">", "oh <b> no <atem:parameter name=\"days\">"),
        "oh <b> no ",
        &[PARIS],
    );
    check_block(
        &CALL.replace("</atem:invoke>", "<atem:parameter name=\"city\">Rome</atem:parameter></atem:invoke>"),
        "<atem:parameter name=\"city\">Rome</atem:parameter>",
        &[PARIS],
    );
    check_block(&format!("{CALL}and more"), "and more", &[PARIS]);
}

/// The format has no way to write it in raw text: the first closing tag ends the value, the call is whole without the rest, and
/// the rest is shown.
#[test]
fn a_raw_value_ends_at_its_first_closing_tag() {
    let with = |city: &str| CALL.replace("Paris", city);
    let call = |city: &str| format!(r#"{{"city":"{city}","days":2}}"#);
    check_block(&with("Par</atem:parameter>is"), "is</atem:parameter>\n", &[("get_weather", &call("Par"))]);
    check_block(
        &with("a</atem:parameter>\n<atem:parameter name=\"any\">b"),
        "",
        &[("get_weather", r#"{"city":"a","any":"b","days":2}"#)],
    );
}

#[test]
fn a_call_that_is_cut_off_does_not_end() {
    let cut = |output: &str, calls: &[(&str, &str)], content: &str| {
        let expected = Seen {
            calls: calls.iter().map(|(name, json)| (name.to_string(), json.to_string(), false)).collect(),
            content: content.into(),
            ..Seen::default()
        };
        check_with(
            &options(OutputMode::Chat, &[]),
            &format!(" to=get_weather<|message|>{output}"),
            &expected,
        );
    };
    let upto = |end: &str| CALL.split(end).next().unwrap_or_default().to_owned();
    cut(&upto("ris</"), &[("get_weather", r#"{"city":"Pa"#)], "");
    cut(&format!("{}</atem", upto("</atem:parameter")), &[("get_weather", r#"{"city":"Paris"#)], "");
    cut(&upto("</atem:invoke"), &[("get_weather", r#"{"city":"Paris","days":2"#)], "");
    cut(&upto("<atem:parameter"), &[], "");
    cut(&upto("get_"), &[], "");
    cut("not a call", &[], "not a call");
}

#[test]
fn stops_apply_to_the_answer() {
    let stopped = |output: &str, stops: &[&str], reasoning: &str, content: &str, end| {
        let expected = Seen { reasoning: reasoning.into(), content: content.into(), end, ..Seen::default() };
        check_with(&options(OutputMode::Chat, stops), output, &expected);
    };
    let output = format!(" to=self<|message|>x DEF y<|eom|>{START} to=user<|message|>ABCDEFGHIJK<|eot|>");
    stopped(&output, &["DEF"], "x DEF y", "ABC", Some(OutputEnd::StopString(0)));
    stopped(&output, &["zzz", "K"], "x DEF y", "ABCDEFGHIJ", Some(OutputEnd::StopString(1)));
    stopped(&output, &["KL"], "x DEF y", "ABCDEFGHIJK", Some(OutputEnd::EndOfTurn));
    stopped(" to=user<|message|>{\"a\":\n1}", &["\n"], "", "{\"a\":", Some(OutputEnd::StopString(0)));
    stopped(" to=user<|message|>tail\n", &["\n\n"], "", "tail\n", None);
    stopped("plain END text", &["END"], "", "plain ", Some(OutputEnd::StopString(0)));
    // A stop string that looks like the beginning of a header.
    stopped(" to=user<|message|>go to=x y", &[" to="], "", "go", Some(OutputEnd::StopString(0)));

    let expected = Seen { calls: vec![(PARIS.0.into(), PARIS.1.into(), true)], ..Seen::default() };
    let output = format!(" to=get_weather<|message|>{CALL}");
    check_with(&options(OutputMode::Chat, &["Paris"]), &output, &expected);
}

#[test]
fn raw_mode_shows_everything() {
    let output = " to=self<|message|>a<|eom|>b 🙂 to=";
    let expected = Seen { content: " to=selfab 🙂 to=".into(), ..Seen::default() };
    check_with(&options(OutputMode::Raw(Markers::Hide), &[]), output, &expected);
    let expected = Seen { content: output.into(), ..Seen::default() };
    check_with(&options(OutputMode::Raw(Markers::Show), &[]), output, &expected);
    let expected = Seen { content: " to=".into(), end: Some(OutputEnd::StopString(0)), ..Seen::default() };
    check_with(&options(OutputMode::Raw(Markers::Hide), &["self"]), output, &expected);
}

#[test]
fn a_direct_answer_starts_in_the_answer() {
    let expected = Seen { content: "Hi".into(), end: Some(OutputEnd::EndOfTurn), ..Seen::default() };
    check_with(&options(OutputMode::ChatAnswer, &[]), "Hi<|eot|>", &expected);
    let decoder = OutputDecoder::new(tiny_tokenizer().clone(), &options(OutputMode::ChatAnswer, &[]));
    assert!(decoder.expect("valid").in_answer_channel());
}

#[test]
fn half_characters_are_replaced_at_the_end() {
    let mut decoder =
        OutputDecoder::new(tiny_tokenizer().clone(), &options(OutputMode::ChatAnswer, &[])).expect("valid");
    let mut seen = Seen::default();
    for byte in "ok 🙂".as_bytes().iter().take(6) {
        seen.add(decoder.with(|machine, events| machine.push_bytes(&[*byte], events)));
    }
    seen.add(decoder.finish());
    assert_eq!(seen.content, "ok \u{fffd}");
}

#[test]
fn channels_and_tokens_are_counted() {
    let tokenizer = tiny_tokenizer();
    let mut decoder = OutputDecoder::new(tokenizer.clone(), &options(OutputMode::Chat, &[])).expect("valid");
    assert_eq!(decoder.channel(), OutputChannel::Header);
    for (text, channel) in [
        (" to=self<|message|>", OutputChannel::Reasoning),
        ("word", OutputChannel::Reasoning),
        ("<|eom|><|start|>assistant to=f", OutputChannel::Header),
        ("<|message|>", OutputChannel::Tool),
        ("<|eom|><|start|>assistant to=user<|message|>", OutputChannel::Answer),
        ("answer<|eot|>", OutputChannel::Ended),
    ] {
        for id in tokenizer.encode(text, Specials::Parse) {
            decoder.push(id);
        }
        assert_eq!(decoder.channel(), channel, "{text}");
    }
    let words = tokenizer.encode("word", Specials::Plain).len();
    assert_eq!(decoder.reasoning_tokens(), words + 1, "the end marker is one of them");
}

/// Everything that means something to the state machine.
const WILD_PARTS: [&str; 38] = [
    "<|start|>",
    "<|message|>",
    "<|eom|>",
    "<|eot|>",
    "<|patch|>",
    "assistant",
    " to=self",
    " to=user",
    " to=get_weather",
    " to=",
    " ",
    "\n",
    "<",
    "<atem:",
    "<atem:function_calls>",
    "</atem:function_calls>",
    "<atem:invoke name=\"",
    "<atem:invoke name=\"get_weather\">",
    "</atem:invoke>",
    "<atem:parameter name=\"city\">",
    "<atem:parameter name=\"days\">",
    "</atem:parameter>",
    "\">",
    "</atem",
    "12",
    "é🙂",
    "STOP",
    "ST",
    "OP",
    "user",
    "<atem:parameter name=\"any\">",
    "{\"a\": \"",
    "\"}",
    "\\\"",
    "<atem:invoke name=\"read\">",
    "</",
    "text ",
    "<|end_of_text|>",
];

/// Output made of everything that means something to the state machine, in any order.
fn wild_output() -> impl Strategy<Value = String> {
    proptest::collection::vec(proptest::sample::select(WILD_PARTS.to_vec()), 0..24)
        .prop_map(|parts| parts.concat())
}

fn cases() -> ProptestConfig {
    let long = muser_testkit::is_long();
    ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(if long { 200_000 } else { 3000 })
    }
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn the_events_do_not_depend_on_the_cuts(output in wild_output(), size in 1..7_usize, chat in any::<bool>()) {
        let mode = if chat { OutputMode::Chat } else { OutputMode::ChatAnswer };
        for stop in [&[][..], &["STOP"], &["\n", "12é"]] {
            let options = options(mode, stop);
            let whole = run(&options, &output, usize::MAX);
            prop_assert_eq!(&run(&options, &output, size), &whole);
            prop_assert_eq!(&run(&options, &output, 1), &whole);
            for marker in ["<|start|>", "<|message|>", "<|eom|>", "<|eot|>", "<|patch|>"] {
                prop_assert!(!whole.content.contains(marker) && !whole.reasoning.contains(marker));
            }
            // Around a call the texts are apart.
            for stop in stop.iter().filter(|_| whole.calls.is_empty()) {
                prop_assert!(!whole.content.contains(stop), "{:?}", whole);
            }
        }
    }
}

/// FNV-1a over texts.
struct Digest(u64);

impl Digest {
    fn add(&mut self, text: &str) {
        for byte in text.bytes().chain([0xff]) {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }

    fn add_events(&mut self, events: &[OutputEvent]) {
        for event in events {
            match event {
                OutputEvent::Reasoning(text) => self.add(&format!("R{text}")),
                OutputEvent::Content(text) => self.add(&format!("C{text}")),
                OutputEvent::ToolCallStart { index, name, .. } => self.add(&format!("S{index} {name}")),
                OutputEvent::ToolCallArguments { index, json_delta } => {
                    self.add(&format!("A{index} {json_delta}"));
                }
                OutputEvent::ToolCallEnd { index, arguments } => self.add(&format!("E{index} {arguments}")),
            }
        }
        self.add("|");
    }
}

/// A random text of what means something to the state machine.
fn random_output(numbers: &mut Rng) -> String {
    let count = numbers.below(28);
    (0..count).map(|_| WILD_PARTS[numbers.below(WILD_PARTS.len())]).collect()
}

/// What came out of the decoder for 20,000 random outputs, piece by piece, as it was recorded before the decoder and the
/// stop watch became one machine: a changed event, end or cut anywhere changes it.
#[test]
fn events_are_those_that_were_recorded() {
    let tokenizer = tiny_tokenizer();
    let mut numbers = Rng(22);
    let mut digest = Digest(0xcbf2_9ce4_8422_2325);
    for case in 0..20_000 {
        let output = random_output(&mut numbers);
        let mode = [
            OutputMode::Chat,
            OutputMode::ChatAnswer,
            OutputMode::Raw(Markers::Hide),
            OutputMode::Raw(Markers::Show),
        ][case % 4];
        let stops: &[&str] =
            [&[][..], &["STOP"], &["\n", "12é"], &[" to=", "ty\">", "OPSTO"]][numbers.below(4)];
        let mut decoder = OutputDecoder::new(tokenizer.clone(), &options(mode, stops)).expect("valid");
        let size = 1 + numbers.below(8);
        for segment in tokenizer.specials().segments(&output) {
            match segment {
                Segment::Special(id) => digest.add_events(&decoder.push(id)),
                Segment::Plain(text) => {
                    for piece in text.as_bytes().chunks(size) {
                        digest.add_events(&decoder.with(|machine, events| machine.push_bytes(piece, events)));
                    }
                }
            }
            digest.add(&format!("{:?} {:?}", decoder.end(), decoder.channel()));
        }
        digest.add_events(&decoder.finish());
        digest.add(&format!("{:?} {}", decoder.end(), decoder.tool_calls()));
    }
    assert_eq!(digest.0, 171_176_423_050_453_944);
}

/// A turn with a call in which parts are missing, doubled or foreign.
fn random_call(numbers: &mut Rng) -> String {
    let mut output = String::from(" to=get_weather<|message|>");
    for part in
        CALL.split_inclusive('>').chain(["<|eom|>", "<|start|>", "assistant", " to=user<|message|>STOP"])
    {
        match numbers.below(16) {
            0 => {}
            1 => output.push_str(&part.repeat(2)),
            2 => output.push_str(WILD_PARTS[numbers.below(WILD_PARTS.len())]),
            _ => output.push_str(part),
        }
    }
    output
}

/// The ids of an output in which the text between markers is cut at random: tokens of any length, also halves of characters.
fn random_cuts(numbers: &mut Rng, output: &str) -> Vec<u32> {
    let tokenizer = tiny_tokenizer();
    let mut ids = Vec::new();
    for segment in tokenizer.specials().segments(output) {
        match segment {
            Segment::Special(id) => ids.push(id),
            Segment::Plain(mut text) => {
                while !text.is_empty() {
                    let mut end = 1 + numbers.below(text.len());
                    while !text.is_char_boundary(end) {
                        end += 1;
                    }
                    ids.extend(tokenizer.encode(&text[..end], Specials::Plain));
                    text = &text[end..];
                }
            }
        }
    }
    ids
}

/// The engine's watch ends every text at the id where the decoder ends it, and where a call ends if that is asked for.
#[test]
fn the_watch_ends_where_the_decoder_ends() {
    let tokenizer = tiny_tokenizer();
    let mut numbers = Rng(23);
    let mut ends = [0; 4];
    let long = muser_testkit::is_long();
    for case in 0..if long { 400_000 } else { 20_000 } {
        let has_call = numbers.below(2) == 0;
        let output = if has_call { random_call(&mut numbers) } else { random_output(&mut numbers) };
        let mode = [OutputMode::Chat, OutputMode::ChatAnswer, OutputMode::Raw(Markers::Hide)][case % 3];
        let stops: &[&str] =
            [&[][..], &["STOP"], &["\n", "12é"], &[" to=", "ty\">", "OPSTO"]][numbers.below(4)];
        let options = options(mode, stops);
        let one_call = numbers.below(2) == 0;
        let mut decoder = OutputDecoder::new(tokenizer.clone(), &options).expect("valid");
        let watch = StopMatcher::new(tokenizer.clone(), &options, one_call).expect("valid");
        let mut watch = watch.clone();
        assert_eq!(watch.is_none(), stops.is_empty() && matches!(mode, OutputMode::Raw(_)));
        for (at, &id) in random_cuts(&mut numbers, &output).iter().enumerate() {
            let events = decoder.push(id);
            let called = events.iter().any(|event| matches!(event, OutputEvent::ToolCallEnd { .. }));
            let expected = decoder.end().is_some() || (one_call && called);
            let ended = watch.as_mut().is_some_and(|watch| watch.push(id));
            assert_eq!(ended, expected, "{output:?} {mode:?} {stops:?} one call: {one_call}, id {at}");
            if ended {
                ends[match decoder.end() {
                    None => 0,
                    Some(OutputEnd::StopString(_)) => 1,
                    Some(OutputEnd::EndOfTurn) if output.contains("<|eot|>") => 2,
                    Some(OutputEnd::EndOfTurn) => 3,
                }] += 1;
                break;
            }
        }
    }
    assert!(ends.iter().all(|&count| count > 50), "every way to end is met: {ends:?}");
}

/// What each kind of request installs.
#[test]
fn a_watch_is_there_if_more_than_ids_can_end_the_text() {
    let installed = |mode, stops: &[&str]| {
        let options = options(mode, stops);
        StopMatcher::new(tiny_tokenizer().clone(), &options, false).expect("valid").is_some()
    };
    assert!(!installed(OutputMode::Raw(Markers::Hide), &[]));
    assert!(installed(OutputMode::Raw(Markers::Hide), &["a"]));
    assert!(installed(OutputMode::Chat, &[]) && installed(OutputMode::ChatAnswer, &[]));
    let useless = options(OutputMode::Raw(Markers::Hide), &[""]);
    assert!(StopMatcher::new(tiny_tokenizer().clone(), &useless, false).is_err());
}

/// A stop string is not put together from text before a call and text behind it.
#[test]
fn text_around_a_call_makes_no_stop() {
    let output = format!("{CALL}B");
    let output = format!(
        " to=user<|message|>A<|eom|>{START} to=get_weather<|message|>{}<|eot|>",
        output.replace("</atem:invoke>", "A</atem:invoke>")
    );
    let expected = Seen {
        content: "A\nAB".into(),
        calls: vec![(PARIS.0.into(), PARIS.1.into(), true)],
        end: Some(OutputEnd::EndOfTurn),
        ..Seen::default()
    };
    check_with(&options(OutputMode::Chat, &["AxB", "A\nB"]), &output, &expected);
    // The text in front of a call is apart from that behind it.
    let output = format!(" to=user<|message|>x<|eom|>{START} to=get_weather<|message|>{CALL}y<|eot|>");
    let expected = Seen { content: "x\ny".into(), ..expected };
    check_with(&options(OutputMode::Chat, &["x\ny"]), &output, &expected);
}
