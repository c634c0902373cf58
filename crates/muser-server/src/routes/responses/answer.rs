//! Answers of `/v1/responses`, whole and as events.
//!
//! A turn is a list of output items: reasoning, a message, function calls. [`Items`] keeps the one item that is open,
//! numbers every event, and remembers what it said, so that the last event can repeat all of it.

use serde_json::{Value, json};

use crate::answer::{Answer, Finish, Outcome, Piece, Usage};
use crate::sse::Event;

/// What is the same in all parts of one answer.
#[derive(Debug, Clone)]
pub struct Head {
    /// The answer's id.
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    /// The model's name.
    pub model: String,
    /// Fields of the request that the response repeats.
    pub request: Value,
}

impl Head {
    fn response(&self, status: &str, output: &[Value], outcome: Option<&Outcome>) -> Value {
        let asked = |name: &str, default: Value| match self.request.get(name) {
            None | Some(Value::Null) => default,
            Some(value) => value.clone(),
        };
        let incomplete = (status == "incomplete").then(|| json!({"reason": "max_output_tokens"}));
        json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": false,
            "error": null,
            "incomplete_details": incomplete,
            "instructions": asked("instructions", Value::Null),
            "max_output_tokens": asked("max_output_tokens", Value::Null),
            "metadata": asked("metadata", json!({})),
            "model": self.model,
            "output": output,
            "parallel_tool_calls": asked("parallel_tool_calls", true.into()),
            "previous_response_id": null,
            "reasoning": asked("reasoning", json!({"effort": null, "summary": null})),
            "store": false,
            "temperature": asked("temperature", 1.0.into()),
            "text": asked("text", json!({"format": {"type": "text"}})),
            "tool_choice": asked("tool_choice", "auto".into()),
            "tools": asked("tools", json!([])),
            "top_p": asked("top_p", 0.95.into()),
            "truncation": "disabled",
            "usage": outcome.map(|outcome| usage(outcome.usage)),
        })
    }

    /// The whole answer.
    pub fn whole(&self, answer: &Answer) -> Value {
        let mut items = Items::new(self.clone());
        let mut events = Vec::new();
        if !answer.reasoning.is_empty() {
            items.piece(Piece::Reasoning(answer.reasoning.clone()), &mut events);
        }
        if !answer.content.is_empty() || answer.tool_calls.is_empty() {
            items.piece(Piece::Content(answer.content.clone()), &mut events);
        }
        for (index, call) in answer.tool_calls.iter().enumerate() {
            let (id, name) = (call.id.clone(), call.name.clone());
            items.piece(Piece::ToolCall { index, id, name }, &mut events);
            items.piece(Piece::ToolArguments { index, fragment: call.arguments.clone() }, &mut events);
        }
        items.close("completed", &mut events);
        self.response(status(&answer.outcome.finish), &items.done, Some(&answer.outcome))
    }
}

fn status(finish: &Finish) -> &'static str {
    match finish {
        Finish::Length | Finish::Cancelled => "incomplete",
        _ => "completed",
    }
}

fn usage(usage: Usage) -> Value {
    json!({
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    })
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Kind {
    Reasoning,
    Message,
    Call { index: usize, call_id: String, name: String },
}

#[derive(Debug)]
struct Open {
    kind: Kind,
    id: String,
    text: String,
}

impl Open {
    /// The item as it is now.
    fn item(&self, status: &str) -> Value {
        match &self.kind {
            Kind::Reasoning => {
                let content: &[Value] = &[json!({"type": "reasoning_text", "text": self.text})];
                let content = if self.text.is_empty() { &[] } else { content };
                json!({"id": self.id, "type": "reasoning", "status": status, "summary": [], "content": content})
            }
            Kind::Message => {
                let part =
                    json!({"type": "output_text", "text": self.text, "annotations": [], "logprobs": []});
                let content = if status == "in_progress" { json!([]) } else { json!([part]) };
                json!({"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content})
            }
            Kind::Call { call_id, name, .. } => json!({
                "id": self.id, "type": "function_call", "status": status,
                "call_id": call_id, "name": name, "arguments": self.text,
            }),
        }
    }
}

/// The state of a stream.
#[derive(Debug)]
pub struct Items {
    head: Head,
    sequence: u64,
    open: Option<Open>,
    done: Vec<Value>,
}

impl Items {
    /// A stream that has said nothing.
    pub fn new(head: Head) -> Self {
        Self { head, sequence: 0, open: None, done: Vec::new() }
    }

    fn say(&mut self, name: &'static str, mut payload: Value, events: &mut Vec<Event>) {
        payload["type"] = name.into();
        payload["sequence_number"] = self.sequence.into();
        self.sequence += 1;
        events.push(Event::Named(name, payload));
    }

    /// The events that open the stream.
    pub fn start(&mut self, events: &mut Vec<Event>) {
        let response = self.head.response("in_progress", &[], None);
        self.say("response.created", json!({"response": response}), events);
        self.say("response.in_progress", json!({"response": response}), events);
    }

    /// The events for a piece.
    pub fn piece(&mut self, piece: Piece, events: &mut Vec<Event>) {
        match piece {
            Piece::Reasoning(text) => {
                self.enter(Kind::Reasoning, events);
                self.delta("response.reasoning_text.delta", &text, events);
            }
            Piece::Content(text) => {
                self.enter(Kind::Message, events);
                self.delta("response.output_text.delta", &text, events);
            }
            Piece::ToolCall { index, id, name } => {
                self.enter(Kind::Call { index, call_id: id, name }, events);
            }
            Piece::ToolArguments { fragment, .. } => {
                self.delta("response.function_call_arguments.delta", &fragment, events);
            }
        }
    }

    /// The events that end the stream.
    pub fn finish(&mut self, outcome: &Outcome, events: &mut Vec<Event>) {
        let status = status(&outcome.finish);
        if self.open.is_none() && self.done.is_empty() {
            self.enter(Kind::Message, events);
        }
        self.close(status, events);
        let response = self.head.response(status, &self.done, Some(outcome));
        let name = if status == "completed" { "response.completed" } else { "response.incomplete" };
        self.say(name, json!({"response": response}), events);
    }

    /// The event for a fault of the server.
    pub fn fail(&mut self, message: &str, events: &mut Vec<Event>) {
        let mut response = self.head.response("failed", &self.done, None);
        response["error"] = json!({"code": "server_error", "message": message});
        self.say("response.failed", json!({"response": response}), events);
    }

    fn enter(&mut self, kind: Kind, events: &mut Vec<Event>) {
        if self.open.as_ref().is_some_and(|open| open.kind == kind) {
            return;
        }
        self.close("completed", events);
        let prefix = match kind {
            Kind::Reasoning => "rs",
            Kind::Message => "msg",
            Kind::Call { .. } => "fc",
        };
        let output_index = self.done.len();
        // Unique within the response, whose own id is unique.
        let id = format!("{prefix}_{}_{output_index}", self.head.id.trim_start_matches("resp_"));
        let open = Open { kind, id, text: String::new() };
        let payload = json!({"output_index": output_index, "item": open.item("in_progress")});
        let part = match open.kind {
            Kind::Reasoning => Some(json!({"type": "reasoning_text", "text": ""})),
            Kind::Message => {
                Some(json!({"type": "output_text", "text": "", "annotations": [], "logprobs": []}))
            }
            Kind::Call { .. } => None,
        };
        let item_id = open.id.clone();
        self.open = Some(open);
        self.say("response.output_item.added", payload, events);
        if let Some(part) = part {
            let payload =
                json!({"item_id": item_id, "output_index": output_index, "content_index": 0, "part": part});
            self.say("response.content_part.added", payload, events);
        }
    }

    fn delta(&mut self, name: &'static str, text: &str, events: &mut Vec<Event>) {
        let output_index = self.done.len();
        let Some(open) = &mut self.open else { return };
        open.text.push_str(text);
        let mut payload = json!({"item_id": open.id, "output_index": output_index, "delta": text});
        if !matches!(open.kind, Kind::Call { .. }) {
            payload["content_index"] = 0.into();
        }
        if open.kind == Kind::Message {
            payload["logprobs"] = json!([]);
        }
        self.say(name, payload, events);
    }

    fn close(&mut self, status: &str, events: &mut Vec<Event>) {
        let Some(open) = self.open.take() else { return };
        let output_index = self.done.len();
        let place = json!({"item_id": open.id, "output_index": output_index});
        let with = |pairs: Value| {
            let mut payload = place.clone();
            if let (Some(payload), Value::Object(pairs)) = (payload.as_object_mut(), pairs) {
                payload.extend(pairs);
            }
            payload
        };
        match &open.kind {
            Kind::Reasoning => {
                let done = with(json!({"content_index": 0, "text": open.text}));
                self.say("response.reasoning_text.done", done, events);
                let part = json!({"type": "reasoning_text", "text": open.text});
                self.say(
                    "response.content_part.done",
                    with(json!({"content_index": 0, "part": part})),
                    events,
                );
            }
            Kind::Message => {
                let done = with(json!({"content_index": 0, "text": open.text, "logprobs": []}));
                self.say("response.output_text.done", done, events);
                let part =
                    json!({"type": "output_text", "text": open.text, "annotations": [], "logprobs": []});
                self.say(
                    "response.content_part.done",
                    with(json!({"content_index": 0, "part": part})),
                    events,
                );
            }
            Kind::Call { name, .. } => {
                let done = with(json!({"arguments": open.text, "name": name}));
                self.say("response.function_call_arguments.done", done, events);
            }
        }
        let item = open.item(status);
        self.say("response.output_item.done", json!({"output_index": output_index, "item": item}), events);
        self.done.push(item);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head() -> Head {
        Head { id: "resp_1".into(), created: 5, model: "m".into(), request: json!({"metadata": {"a": "b"}}) }
    }

    #[test]
    fn events_come_in_order_and_are_numbered() {
        let mut items = Items::new(head());
        let mut events = Vec::new();
        items.start(&mut events);
        items.piece(Piece::Content("a".into()), &mut events);
        items.piece(Piece::Content("b".into()), &mut events);
        items.piece(Piece::ToolCall { index: 0, id: "call_1".into(), name: "f".into() }, &mut events);
        items.piece(Piece::ToolArguments { index: 0, fragment: "{}".into() }, &mut events);
        let mut outcome = Answer::default().outcome;
        outcome.finish = Finish::ToolCalls;
        items.finish(&outcome, &mut events);
        let mut names = Vec::new();
        for (number, event) in events.iter().enumerate() {
            let Event::Named(name, payload) = event else { panic!("{event:?}") };
            assert_eq!(payload["sequence_number"], number);
            assert_eq!(payload["type"], **name);
            names.push(*name);
        }
        assert_eq!(
            names,
            [
                "response.created",
                "response.in_progress",
                "response.output_item.added",
                "response.content_part.added",
                "response.output_text.delta",
                "response.output_text.delta",
                "response.output_text.done",
                "response.content_part.done",
                "response.output_item.done",
                "response.output_item.added",
                "response.function_call_arguments.delta",
                "response.function_call_arguments.done",
                "response.output_item.done",
                "response.completed",
            ]
        );
        let Some(Event::Named(_, last)) = events.last() else { panic!("last") };
        assert_eq!(last["response"]["output"][0]["content"][0]["text"], "ab");
        assert_eq!(last["response"]["output"][1]["arguments"], "{}");
    }

    #[test]
    fn the_whole_answer_has_the_items_of_the_stream() {
        let answer = Answer { reasoning: "hm".into(), content: "a".into(), ..Answer::default() };
        let whole = head().whole(&answer);
        assert_eq!(whole["output"][0]["type"], "reasoning");
        assert_eq!(whole["output"][1]["content"][0]["text"], "a");
        assert_eq!(whole["status"], "completed");
        assert_eq!(whole["metadata"], json!({"a": "b"}));
    }
}
