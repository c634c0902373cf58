//! Answers of `/v1/chat/completions`, whole and in chunks.

use serde_json::{Map, Value, json};

use crate::answer::{Answer, Outcome, Piece, TokenLogprob, Usage};

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
}

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
                    "message": message(answer),
                    "logprobs": if with_logprobs { logprobs(&answer.logprobs) } else { Value::Null },
                    "finish_reason": answer.outcome.finish.openai(),
                })
            })
            .collect();
        let mut object = self.object("chat.completion");
        object["choices"] = choices.into();
        object["usage"] = usage.openai();
        object["seed"] = self.seed.into();
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

    /// A chunk with a piece.
    pub fn piece(&self, choice: u32, piece: &Piece, logprobs_of: &[TokenLogprob]) -> Value {
        let delta = match piece {
            Piece::Reasoning(text) => json!({"reasoning_content": text}),
            Piece::Content(text) => json!({"content": text}),
            Piece::ToolCall { index, id, name } => json!({"tool_calls": [{
                "index": index, "id": id, "type": "function", "function": {"name": name, "arguments": ""},
            }]}),
            Piece::ToolArguments { index, fragment } => json!({"tool_calls": [{
                "index": index, "function": {"arguments": fragment},
            }]}),
        };
        let logprobs = if logprobs_of.is_empty() { Value::Null } else { logprobs(logprobs_of) };
        self.chunk(choice, delta, logprobs, None)
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

fn message(answer: &Answer) -> Value {
    let mut message = Map::new();
    message.insert("role".into(), "assistant".into());
    let no_text = answer.content.is_empty() && !answer.tool_calls.is_empty();
    message.insert("content".into(), if no_text { Value::Null } else { answer.content.as_str().into() });
    message.insert("refusal".into(), Value::Null);
    if !answer.reasoning.is_empty() {
        message.insert("reasoning_content".into(), answer.reasoning.as_str().into());
    }
    if !answer.tool_calls.is_empty() {
        let calls: Vec<Value> = answer
            .tool_calls
            .iter()
            .map(|call| {
                json!({
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                })
            })
            .collect();
        message.insert("tool_calls".into(), calls.into());
    }
    Value::Object(message)
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
        Head { id: "chatcmpl-1".into(), created: 5, model: "m".into(), seed: 9 }
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
        let start =
            head().piece(0, &Piece::ToolCall { index: 0, id: "call_1".into(), name: "f".into() }, &[]);
        assert_eq!(start["choices"][0]["delta"]["tool_calls"][0]["index"], 0);
        let more = head().piece(0, &Piece::ToolArguments { index: 0, fragment: "{".into() }, &[]);
        let call = &more["choices"][0]["delta"]["tool_calls"][0];
        assert_eq!(call, &json!({"index": 0, "function": {"arguments": "{"}}));
        assert_eq!(head().closing(0, &answer.outcome)["choices"][0]["finish_reason"], "tool_calls");
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
