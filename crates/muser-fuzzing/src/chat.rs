//! Histories through the chat template, and templates of strangers.

use std::sync::LazyLock;

use muser_text::{
    ChatInput, ChatTemplate, Clock, Markers, TokenKind, Tokenizer, normalise_messages, normalise_tools,
};
use serde_json::{Map, Value, json};

use crate::words::{FILE, TINY};
use crate::{Input, Target, check_message};

static TEMPLATE: LazyLock<ChatTemplate> =
    LazyLock::new(|| ChatTemplate::from_gguf(&FILE).expect("it compiles").expect("the model has one"));

/// Any history of a conversation.
pub const HISTORIES: Target = Target {
    name: "histories",
    about: "any history: user text never becomes a control token, the prompt's ids are its text",
    run: histories,
    seeds: history_seeds,
    words: &["<|eot|>", "<|start|>", "<|message|>", "<|image_start|>"],
    max_len: 512,
    memory: (4 << 20, 65_536),
    millis: (400, 1000),
};

/// Messages and tools as clients send them, most of them well-formed.
pub(crate) fn history(input: &mut Input<'_>) -> (Vec<Value>, Vec<Value>) {
    let mut tools = Vec::new();
    for index in 0..input.below(3) {
        let schema = match input.below(4) {
            0 => json!({}),
            1 => {
                json!({"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": ["integer", "null"]}}, "required": ["city"]})
            }
            2 => json!({"type": "object", "properties": {input.text(8): input.json(2)}}),
            _ => input.json(3),
        };
        let name = if input.below(8) == 0 { input.text(8) } else { format!("tool_{index}") };
        tools.push(if input.flag() {
            json!({"type": "function", "function": {"name": name, "description": input.text(20), "parameters": schema}})
        } else {
            json!({"name": name, "parameters": schema})
        });
    }
    let mut messages = Vec::new();
    for _ in 0..=input.below(6) {
        messages.push(message(input));
    }
    (messages, tools)
}

fn message(input: &mut Input<'_>) -> Value {
    let content = match input.below(8) {
        0 => Value::Null,
        1 => json!([{"type": "text", "text": input.text(30)}, {"type": "text", "text": input.text(30)}]),
        2 => input.json(2),
        _ => input.text(60).into(),
    };
    match input.below(10) {
        0 => json!({"role": "system", "content": content}),
        1 => json!({"role": "developer", "content": content}),
        2 | 3 => {
            let arguments = match input.below(3) {
                0 => json!("{\"city\": \"Paris\"}"),
                1 => json!({"city": input.text(12), "n": input.number()}),
                _ => input.json(2),
            };
            let call = json!({"id": "call_0", "type": "function", "function": {"name": "tool_0", "arguments": arguments}});
            json!({"role": "assistant", "content": content, "tool_calls": [call]})
        }
        4 => json!({"role": "assistant", "content": content, "reasoning_content": input.text(30)}),
        5 => json!({"role": "assistant", "content": content}),
        6 => json!({"role": "tool", "tool_call_id": "call_0", "content": content}),
        7 => {
            let mut any = json!({"role": input.text(8), "content": content});
            input.change(&mut any);
            any
        }
        _ => json!({"role": "user", "content": content, "name": "a"}),
    }
}

fn histories(data: &[u8]) {
    let mut input = Input::new(data);
    let (messages, tools) = history(&mut input);
    let (add_generation_prompt, answer_directly) = (input.flag(), input.flag());
    let answer_prefix = if answer_directly { input.text(20) } else { String::new() };
    let mut variables = Map::new();
    if input.flag() {
        variables.insert("reasoning_strength".into(), input.pick(&["low", "high", "none", "<|eot|>"]).into());
    }
    if input.below(4) == 0 {
        variables.insert(input.text(12), input.json(2));
    }
    let normal = normalise_messages(&messages).and_then(|messages| Ok((messages, normalise_tools(&tools)?)));
    let (messages, tools) = match normal {
        Ok(both) => both,
        Err(error) => return check_message(&error.to_string()),
    };
    let chat =
        ChatInput { messages, tools, variables, add_generation_prompt, answer_directly, answer_prefix };
    let ids = match TEMPLATE.encode(&TINY, &chat) {
        Ok(ids) => ids,
        Err(error) => return check_message(&error.to_string()),
    };
    let shown = TEMPLATE.render(&TINY, &chat).expect("it was encoded");
    let decoded = TINY.decode(&ids, Markers::Show);
    assert!(decoded == shown || decoded.ends_with(&shown), "{decoded:?}\n{shown:?}");
    // The same with every beginning of a marker broken: as many control tokens, in the same order.
    let harmless = ChatInput {
        messages: chat.messages.iter().map(broken).collect(),
        tools: chat.tools.iter().map(broken).collect(),
        variables: chat.variables.iter().map(|(name, value)| (name.clone(), broken(value))).collect(),
        answer_prefix: chat.answer_prefix.replace("<|", "<:"),
        ..chat
    };
    if let Ok(other) = TEMPLATE.encode(&TINY, &harmless) {
        assert_eq!(controls(&TINY, &ids), controls(&TINY, &other), "{shown:?}");
    }
}

fn controls(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<u32> {
    ids.iter().copied().filter(|id| tokenizer.token_kind(*id) != Some(TokenKind::Normal)).collect()
}

/// The value with markers that are none any more.
fn broken(value: &Value) -> Value {
    match value {
        Value::String(text) => text.replace("<|", "<:").into(),
        Value::Array(items) => items.iter().map(broken).collect(),
        Value::Object(fields) => fields
            .iter()
            .map(|(name, value)| (name.replace("<|", "<:"), broken(value)))
            .collect::<Map<_, _>>()
            .into(),
        other => other.clone(),
    }
}

fn history_seeds() -> Vec<Vec<u8>> {
    let mut seeds =
        vec![vec![0, 0, 3, 2, 9], vec![1, 1, 9, 1, 2, 5, 3, 2, 0, 3, 9, 5, 2, 2, 0, 6, 3, 1, 1, 1, 1]];
    for at in 0..20_u8 {
        seeds.push((0..40).map(|i: u8| at.wrapping_mul(37).wrapping_add(i.wrapping_mul(at + 3))).collect());
    }
    seeds
}

/// A template of a downloaded file.
pub const TEMPLATES: Target = Target {
    name: "templates",
    about: "a stranger's template: compiles and runs within its budget, twice the same",
    run: templates,
    seeds: template_seeds,
    words: &[
        "{{",
        "}}",
        "{%",
        "%}",
        "{%-",
        "-%}",
        "for",
        "endfor",
        "if",
        "elif",
        "else",
        "endif",
        "set",
        "macro",
        "endmacro",
        "in",
        "range(",
        "messages",
        "loop.index0",
        "namespace(",
        "tojson",
        "|",
        "~",
        "*",
        "**",
        "raise_exception(",
        "strftime_now(",
        ".replace(",
        ".split(",
        ".join(",
        "|indent(",
        "|batch(",
        "[::-1]",
        "99999999",
        "generation",
        "endgeneration",
        "break",
        "continue",
        "recursive",
        "loop(",
        "selectattr(",
        "is defined",
        "not",
        "and",
    ],
    max_len: 768,
    memory: (256 << 20, 65_536),
    millis: (4000, 1000),
};

fn templates(data: &[u8]) {
    let source = String::from_utf8_lossy(data);
    let clock = || Clock::fixed(std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_700_000_000));
    let template = match ChatTemplate::compile_with_clock(&source, clock()) {
        Ok(template) => template,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    let messages = normalise_messages(&[
        json!({"role": "system", "content": "be short"}),
        json!({"role": "user", "content": "<|eot|> hello"}),
        json!({"role": "assistant", "content": "hi", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {"a": [1, 2.5, null]}}}]}),
        json!({"role": "tool", "tool_call_id": "c", "content": "12"}),
    ]);
    let chat = ChatInput { messages: messages.expect("valid"), ..ChatInput::default() };
    match template.render(&TINY, &chat) {
        Ok(first) => {
            assert_eq!(template.render(&TINY, &chat).ok().as_ref(), Some(&first), "twice the same");
            let ids = template.encode(&TINY, &chat).expect("it was rendered");
            let decoded = TINY.decode(&ids, Markers::Show);
            assert!(decoded.ends_with(&first), "{decoded:?}\n{first:?}");
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

fn template_seeds() -> Vec<Vec<u8>> {
    [
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|eot|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        "{{ bos_token }}{% set ns = namespace(n=0) %}{% for m in messages if m.role == 'user' %}{% set ns.n = ns.n + 1 %}{{ loop.index0 ~ m.content|upper }}{% endfor %}{{ ns.n }}",
        "{% macro f(x) %}{{ x|tojson }}{% endmacro %}{{ f(messages) }}{{ messages[::-1][0].role }}{{ tools is defined }}",
        "{% for i in range(100000) %}{{ 'x' * 10000 }}{% endfor %}",
        "{%- if messages[0]['role'] == 'system' -%}{{ messages[0]['content'].split(' ')|join('-') }}{%- endif -%}{{ raise_exception('no') }}",
        "{% generation %}{{ strftime_now('%Y') }}{% endgeneration %}{{ ('a' ~ 'b')|indent(4) }}",
    ]
    .map(|text| text.as_bytes().to_vec())
    .to_vec()
}
