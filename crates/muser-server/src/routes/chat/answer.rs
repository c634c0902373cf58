//! Answers of `/v1/chat/completions`, whole and in chunks.

use std::collections::HashMap;

use muser_text::OutputEvent;
use serde_json::{Map, Value, json};

use crate::answer::{Answer, Outcome, PromptToken, TokenLogprob, ToolCall, Usage};
use crate::custom_tools::{InputText, input_of};

/// What is the same in all parts of one answer.
#[derive(Debug, Clone)]
pub struct Head {
    /// The answer's id.
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    /// The model's name.
    pub model: String,
    /// The seed in use; repeating the request with it gives the same text.
    pub seed: u64,
    /// Names of the tools whose one input is text.
    pub custom: Vec<String>,
}

/// The calls of custom tools that a stream has open, by choice.
#[derive(Debug, Default)]
pub struct CustomCalls(HashMap<u32, (usize, InputText)>);

impl Head {
    fn object(&self, kind: &str) -> Value {
        json!({
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": concat!("muser-", env!("CARGO_PKG_VERSION")),
        })
    }

    /// The whole answer.
    pub fn completion(&self, answers: &[Answer], with_logprobs: bool) -> Value {
        let mut usage = Usage::default();
        let choices: Vec<Value> = answers
            .iter()
            .enumerate()
            .map(|(index, answer)| {
                usage.add_choice(answer.outcome.usage);
                json!({
                    "index": index,
                    "message": self.message(answer),
                    "logprobs": if with_logprobs { logprobs(&answer.logprobs) } else { Value::Null },
                    "finish_reason": answer.outcome.finish.openai(),
                })
            })
            .collect();
        let mut object = self.object("chat.completion");
        object["choices"] = choices.into();
        object["usage"] = usage.openai();
        object["seed"] = self.seed.into();
        if let Some(prompt) = answers.first().and_then(|answer| answer.prompt.as_deref()) {
            object["prompt_logprobs"] = prompt_logprobs(prompt);
        }
        if let [only] = answers {
            object["timings"] = only.outcome.timings();
        }
        object
    }

    fn chunk(&self, choice: u32, delta: Value, logprobs: Value, finish: Option<&str>) -> Value {
        let mut object = self.object("chat.completion.chunk");
        object["choices"] =
            json!([{"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish}]);
        object
    }

    /// The first chunk of a choice: it carries the role.
    pub fn opening(&self, choice: u32) -> Value {
        self.chunk(choice, json!({"role": "assistant", "content": ""}), Value::Null, None)
    }

    /// A chunk with a piece, if it says anything.
    pub fn piece(
        &self,
        choice: u32,
        piece: &OutputEvent,
        logprobs_of: &[TokenLogprob],
        custom: &mut CustomCalls,
    ) -> Option<Value> {
        let delta = match piece {
            OutputEvent::Reasoning(text) => json!({"reasoning_content": text}),
            OutputEvent::Content(text) => json!({"content": text}),
            OutputEvent::ToolCallStart { index, id, name } if self.custom.contains(name) => {
                custom.0.insert(choice, (*index, InputText::default()));
                json!({"tool_calls": [{"index": index, "id": id, "type": "custom", "custom": {"name": name, "input": ""}}]})
            }
            OutputEvent::ToolCallStart { index, id, name } => json!({"tool_calls": [{
                "index": index, "id": id, "type": "function", "function": {"name": name, "arguments": ""},
            }]}),
            OutputEvent::ToolCallArguments { index, json_delta: fragment } => match custom.0.get_mut(&choice)
            {
                Some((open, input)) if open == index => {
                    let text = input.push(fragment);
                    if text.is_empty() {
                        return None;
                    }
                    input_delta(*index, &text)
                }
                _ => json!({"tool_calls": [{"index": index, "function": {"arguments": fragment}}]}),
            },
            OutputEvent::ToolCallEnd { .. } => return None,
        };
        let logprobs = if logprobs_of.is_empty() { Value::Null } else { logprobs(logprobs_of) };
        Some(self.chunk(choice, delta, logprobs, None))
    }

    /// What is left of a custom tool's input when the choice ends.
    pub fn last_input(&self, choice: u32, custom: &mut CustomCalls) -> Option<Value> {
        let (index, mut input) = custom.0.remove(&choice)?;
        let text = input.finish();
        (!text.is_empty()).then(|| self.chunk(choice, input_delta(index, &text), Value::Null, None))
    }

    fn message(&self, answer: &Answer) -> Value {
        let mut message = Map::new();
        message.insert("role".into(), "assistant".into());
        let no_text = answer.content.is_empty() && !answer.tool_calls.is_empty();
        message.insert("content".into(), if no_text { Value::Null } else { answer.content.as_str().into() });
        message.insert("refusal".into(), Value::Null);
        if !answer.reasoning.is_empty() {
            message.insert("reasoning_content".into(), answer.reasoning.as_str().into());
        }
        if !answer.tool_calls.is_empty() {
            message
                .insert("tool_calls".into(), answer.tool_calls.iter().map(|call| self.call(call)).collect());
        }
        Value::Object(message)
    }

    fn call(&self, call: &ToolCall) -> Value {
        if self.custom.contains(&call.name) {
            let input = input_of(&call.arguments);
            return json!({"id": call.id, "type": "custom", "custom": {"name": call.name, "input": input}});
        }
        json!({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}})
    }

    /// The last chunk of a choice.
    pub fn closing(&self, choice: u32, outcome: &Outcome) -> Value {
        let mut object = self.chunk(choice, json!({}), Value::Null, Some(outcome.finish.openai()));
        object["timings"] = outcome.timings();
        object["seed"] = self.seed.into();
        object
    }

    /// The chunk with usage, for those who asked.
    pub fn usage(&self, usage: Usage) -> Value {
        let mut object = self.object("chat.completion.chunk");
        object["choices"] = json!([]);
        object["usage"] = usage.openai();
        object
    }
}

fn input_delta(index: usize, text: &str) -> Value {
    json!({"tool_calls": [{"index": index, "custom": {"input": text}}]})
}

/// vLLM's list: an entry for each token of the prompt, none for the first, with alternatives by id.
pub fn prompt_logprobs(prompt: &[PromptToken]) -> Value {
    let entry = |bytes: &[u8], logprob: f32, rank: usize| json!({"logprob": finite(logprob), "rank": rank, "decoded_token": String::from_utf8_lossy(bytes)});
    let of = |token: &PromptToken| {
        let Some((logprob, rank)) = token.known else { return Value::Null };
        let mut object = Map::new();
        for (index, (id, bytes, logprob)) in token.top.iter().enumerate() {
            object.insert(id.to_string(), entry(bytes, *logprob, index + 1));
        }
        object.insert(token.id.to_string(), entry(&token.bytes, logprob, rank as usize));
        Value::Object(object)
    };
    prompt.iter().map(of).collect()
}

/// OpenAI's log-probability object. A token that is not whole characters shows replacement characters as text and its
/// true bytes beside it.
pub fn logprobs(tokens: &[TokenLogprob]) -> Value {
    let entry = |bytes: &[u8], logprob: f32| {
        json!({
            "token": String::from_utf8_lossy(bytes),
            "bytes": bytes,
            "logprob": finite(logprob),
        })
    };
    let content: Vec<Value> = tokens
        .iter()
        .map(|token| {
            let mut object = entry(&token.bytes, token.logprob);
            object["top_logprobs"] =
                token.top.iter().map(|(_, bytes, logprob)| entry(bytes, *logprob)).collect();
            object
        })
        .collect();
    json!({"content": content, "refusal": null})
}

/// JSON has no infinity; clients know OpenAI's stand-in for it.
pub fn finite(logprob: f32) -> f64 {
    if logprob.is_finite() { f64::from(logprob) } else { -9999.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::answer::{Finish, ToolCall};

    fn head() -> Head {
        Head { id: "chatcmpl-1".into(), created: 5, model: "m".into(), seed: 9, custom: vec!["patch".into()] }
    }

    #[test]
    fn a_tool_call_has_the_same_parts_whole_and_in_chunks() {
        let mut answer = Answer {
            tool_calls: vec![ToolCall {
                id: "call_1".into(),
                name: "f".into(),
                arguments: "{\"a\":1}".into(),
            }],
            ..Answer::default()
        };
        answer.outcome.finish = Finish::ToolCalls;
        let whole = head().completion(&[answer.clone()], false);
        let message = &whole["choices"][0]["message"];
        assert_eq!(message["content"], Value::Null);
        assert_eq!(message["tool_calls"][0]["function"]["arguments"], "{\"a\":1}");
        assert_eq!(whole["choices"][0]["finish_reason"], "tool_calls");
        let mut custom = CustomCalls::default();
        let mut piece = |piece: OutputEvent| head().piece(0, &piece, &[], &mut custom).expect("a chunk");
        let start = piece(OutputEvent::ToolCallStart { index: 0, id: "call_1".into(), name: "f".into() });
        assert_eq!(start["choices"][0]["delta"]["tool_calls"][0]["index"], 0);
        let more = piece(OutputEvent::ToolCallArguments { index: 0, json_delta: "{".into() });
        let call = &more["choices"][0]["delta"]["tool_calls"][0];
        assert_eq!(call, &json!({"index": 0, "function": {"arguments": "{"}}));
        assert_eq!(head().closing(0, &answer.outcome)["choices"][0]["finish_reason"], "tool_calls");
    }

    #[test]
    fn a_custom_tools_input_is_text_whole_and_in_chunks() {
        let arguments = "{\"input\":\"a\\n\\u00e9\"}";
        let calls = vec![ToolCall { id: "call_1".into(), name: "patch".into(), arguments: arguments.into() }];
        let whole = head().completion(&[Answer { tool_calls: calls, ..Answer::default() }], false);
        assert_eq!(
            whole["choices"][0]["message"]["tool_calls"],
            json!([{"id": "call_1", "type": "custom", "custom": {"name": "patch", "input": "a\n\u{e9}"}}])
        );
        let mut custom = CustomCalls::default();
        let mut text = String::new();
        let start = OutputEvent::ToolCallStart { index: 0, id: "call_1".into(), name: "patch".into() };
        let pieces =
            arguments.chars().map(|c| OutputEvent::ToolCallArguments { index: 0, json_delta: c.to_string() });
        let chunks = std::iter::once(start)
            .chain(pieces)
            .filter_map(|piece| head().piece(0, &piece, &[], &mut custom));
        for chunk in chunks.collect::<Vec<_>>() {
            let call = &chunk["choices"][0]["delta"]["tool_calls"][0];
            assert_eq!(call.get("function"), None);
            text.push_str(call["custom"]["input"].as_str().expect("text"));
        }
        assert_eq!(text, "a\n\u{e9}");
        assert_eq!(head().last_input(0, &mut custom), None);
    }

    #[test]
    fn a_usage_chunk_has_an_empty_list_of_choices() {
        assert_eq!(head().usage(Usage::default())["choices"], json!([]));
    }

    #[test]
    fn half_a_character_is_shown_with_its_bytes() {
        let token = TokenLogprob { id: 1, bytes: vec![0xf0, 0x9f], logprob: f32::NEG_INFINITY, top: vec![] };
        let object = logprobs(&[token]);
        assert_eq!(object["content"][0]["bytes"], json!([0xf0, 0x9f]));
        assert_eq!(object["content"][0]["token"], "\u{fffd}");
        assert_eq!(object["content"][0]["logprob"], -9999.0);
    }
}
