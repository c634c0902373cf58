//! Answers of `/v1/responses`, whole and as events.
//!
//! A turn is a list of output items: reasoning, a message, calls. [`Items`] keeps the one item that is open, numbers every
//! event, and remembers what it said, so that the last event can repeat all of it.

use std::sync::Arc;

use muser_text::OutputEvent;
use serde_json::{Map, Value, json};

use super::history::encoded;
use super::request::Shows;
use super::tools::{Called, Toolbox};
use crate::answer::{Answer, Finish, Outcome, TokenLogprob, Usage, is_whole};
use crate::custom_tools::InputText;
use crate::routes::chat::answer::logprobs;
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
    /// What the called tools are to the client.
    pub tools: Arc<Toolbox>,
    /// What the answer shows.
    pub shows: Shows,
    /// Whether the response is kept.
    pub store: bool,
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
            "previous_response_id": asked("previous_response_id", Value::Null),
            "reasoning": asked("reasoning", json!({"effort": null, "summary": null})),
            "store": self.store,
            "temperature": asked("temperature", 1.0.into()),
            "text": asked("text", json!({"format": {"type": "text"}})),
            "tool_choice": asked("tool_choice", "auto".into()),
            "tools": asked("tools", json!([])),
            "top_logprobs": asked("top_logprobs", 0.into()),
            "top_p": asked("top_p", 0.95.into()),
            "truncation": asked("truncation", "disabled".into()),
            "usage": outcome.map(|outcome| usage(outcome.usage)),
        })
    }

    /// The whole answer.
    pub fn whole(&self, answer: &Answer) -> Value {
        let mut items = Items::new(self.clone());
        let mut events = Vec::new();
        if !answer.reasoning.is_empty() {
            items.piece(OutputEvent::Reasoning(answer.reasoning.clone()), &[], &mut events);
        }
        if !answer.content.is_empty() || answer.tool_calls.is_empty() {
            items.piece(OutputEvent::Content(answer.content.clone()), &answer.logprobs, &mut events);
        }
        for (index, call) in answer.tool_calls.iter().enumerate() {
            let (id, name) = (call.id.clone(), call.name.clone());
            items.piece(OutputEvent::ToolCallStart { index, id, name }, &[], &mut events);
            let fragment = call.arguments.clone();
            items.piece(OutputEvent::ToolCallArguments { index, json_delta: fragment }, &[], &mut events);
        }
        items.finish(&answer.outcome, &mut events)
    }
}

fn status(finish: &Finish) -> &'static str {
    match finish {
        Finish::Length => "incomplete",
        _ => "completed",
    }
}

/// The usage object.
pub fn usage(usage: Usage) -> Value {
    let mut object = json!({
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    });
    if usage.images > 0 {
        object["input_tokens_details"]["image_tokens"] = usage.images.into();
    }
    object
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Kind {
    Reasoning,
    Message,
    Call { index: usize, call_id: String, called: Called },
}

#[derive(Debug)]
struct Open {
    kind: Kind,
    id: String,
    text: String,
    /// Takes the text out of the arguments of a custom tool.
    input: InputText,
    /// Those arguments as they came: whether the call is whole is theirs to tell.
    arguments: String,
    logprobs: Vec<Value>,
}

impl Open {
    /// The item as it is now.
    fn item(&self, status: &str, shows: Shows) -> Value {
        match &self.kind {
            Kind::Reasoning => {
                let parts = |kind: &str| {
                    let part = json!({"type": kind, "text": self.text});
                    if self.text.is_empty() { json!([]) } else { json!([part]) }
                };
                let summary = if shows.summary { parts("summary_text") } else { json!([]) };
                let mut item = json!({
                    "id": self.id, "type": "reasoning", "status": status, "summary": summary,
                    "content": parts("reasoning_text"),
                });
                if shows.encrypted {
                    item["encrypted_content"] = encoded(&self.text).into();
                }
                item
            }
            Kind::Message => {
                let part = self.text_part();
                let content = if status == "in_progress" { json!([]) } else { json!([part]) };
                json!({"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content})
            }
            Kind::Call { call_id, called, .. } => {
                let (kind, key) = if called.custom {
                    ("custom_tool_call", "input")
                } else {
                    ("function_call", "arguments")
                };
                let mut item = json!({
                    "id": self.id, "type": kind, "status": status, "call_id": call_id, "name": called.name,
                    key: self.text,
                });
                if let Some(namespace) = &called.namespace {
                    item["namespace"] = namespace.as_str().into();
                }
                item
            }
        }
    }

    fn text_part(&self) -> Value {
        json!({"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs})
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

    /// Says something about the item that is open.
    fn say_of(&mut self, id: &str, name: &'static str, payload: Value, events: &mut Vec<Event>) {
        let mut fields = Map::new();
        fields.insert("item_id".into(), id.into());
        fields.insert("output_index".into(), self.done.len().into());
        if let Value::Object(payload) = payload {
            fields.extend(payload);
        }
        self.say(name, fields.into(), events);
    }

    /// The events that open the stream.
    pub fn start(&mut self, events: &mut Vec<Event>) {
        let response = self.head.response("in_progress", &[], None);
        self.say("response.created", json!({"response": response}), events);
        self.say("response.in_progress", json!({"response": response}), events);
    }

    /// The events for a piece.
    pub fn piece(&mut self, piece: OutputEvent, tokens: &[TokenLogprob], events: &mut Vec<Event>) {
        match piece {
            OutputEvent::Reasoning(text) => {
                self.enter(Kind::Reasoning, events);
                self.delta("response.reasoning_text.delta", &text, json!({"content_index": 0}), events);
                if self.head.shows.summary
                    && let Some(id) = self.open.as_ref().map(|open| open.id.clone())
                {
                    let payload = json!({"summary_index": 0, "delta": text});
                    self.say_of(&id, "response.reasoning_summary_text.delta", payload, events);
                }
            }
            OutputEvent::Content(text) => {
                // Nothing is begun for tokens without text.
                if text.is_empty()
                    && self.open.as_ref().is_none_or(|open| open.kind != Kind::Message)
                    && !tokens.is_empty()
                {
                    return;
                }
                self.enter(Kind::Message, events);
                let told = if self.head.shows.logprobs { told(tokens) } else { Vec::new() };
                if let Some(open) = &mut self.open {
                    open.logprobs.extend(told.iter().cloned());
                }
                let more = json!({"content_index": 0, "logprobs": told});
                self.delta("response.output_text.delta", &text, more, events);
            }
            OutputEvent::ToolCallStart { index, id, name } => {
                let called = self.head.tools.called(&name);
                self.enter(Kind::Call { index, call_id: id, called }, events);
            }
            OutputEvent::ToolCallArguments { json_delta: fragment, .. } => self.arguments(&fragment, events),
            OutputEvent::ToolCallEnd { .. } => {}
        }
    }

    fn arguments(&mut self, fragment: &str, events: &mut Vec<Event>) {
        match &mut self.open {
            Some(Open { kind: Kind::Call { called, .. }, input, arguments, .. }) if called.custom => {
                arguments.push_str(fragment);
                let text = input.push(fragment);
                if !text.is_empty() {
                    self.delta("response.custom_tool_call_input.delta", &text, json!({}), events);
                }
            }
            _ => self.delta("response.function_call_arguments.delta", fragment, json!({}), events),
        }
    }

    /// The events that end the stream, and the response.
    pub fn finish(&mut self, outcome: &Outcome, events: &mut Vec<Event>) -> Value {
        let status = status(&outcome.finish);
        if self.open.is_none() && self.done.is_empty() {
            self.enter(Kind::Message, events);
        }
        self.close(status, events);
        let response = self.head.response(status, &self.done, Some(outcome));
        let name = if status == "completed" { "response.completed" } else { "response.incomplete" };
        self.say(name, json!({"response": response}), events);
        response
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
        let prefix = match &kind {
            Kind::Reasoning => "rs",
            Kind::Message => "msg",
            Kind::Call { called, .. } if called.custom => "ctc",
            Kind::Call { .. } => "fc",
        };
        let output_index = self.done.len();
        // Unique within the response, whose own id is unique.
        let id = format!("{prefix}_{}_{output_index}", self.head.id.trim_start_matches("resp_"));
        let open = Open {
            kind,
            id: id.clone(),
            text: String::new(),
            input: InputText::default(),
            arguments: String::new(),
            logprobs: Vec::new(),
        };
        let payload =
            json!({"output_index": output_index, "item": open.item("in_progress", self.head.shows)});
        let part = match open.kind {
            Kind::Reasoning => Some(json!({"type": "reasoning_text", "text": ""})),
            Kind::Message => Some(open.text_part()),
            Kind::Call { .. } => None,
        };
        let summed_up = open.kind == Kind::Reasoning && self.head.shows.summary;
        self.open = Some(open);
        self.say("response.output_item.added", payload, events);
        if let Some(part) = part {
            let payload = json!({"content_index": 0, "part": part});
            self.say_of(&id, "response.content_part.added", payload, events);
        }
        if summed_up {
            let payload = json!({"summary_index": 0, "part": {"type": "summary_text", "text": ""}});
            self.say_of(&id, "response.reasoning_summary_part.added", payload, events);
        }
    }

    fn delta(&mut self, name: &'static str, text: &str, mut more: Value, events: &mut Vec<Event>) {
        let Some(open) = &mut self.open else { return };
        open.text.push_str(text);
        let id = open.id.clone();
        more["delta"] = text.into();
        self.say_of(&id, name, more, events);
    }

    fn close(&mut self, status: &str, events: &mut Vec<Event>) {
        let rest = self.open.as_mut().map(|open| open.input.finish()).unwrap_or_default();
        if !rest.is_empty() {
            self.delta("response.custom_tool_call_input.delta", &rest, json!({}), events);
        }
        let Some(open) = self.open.take() else { return };
        let (id, text) = (open.id.as_str(), open.text.as_str());
        let status = match &open.kind {
            // Of the end of a call its arguments tell, whatever came after it.
            Kind::Call { called, .. } if is_whole(if called.custom { &open.arguments } else { text }) => {
                "completed"
            }
            Kind::Call { .. } => "incomplete",
            _ => status,
        };
        let output_index = self.done.len();
        match &open.kind {
            Kind::Reasoning => {
                let done = json!({"content_index": 0, "text": text});
                self.say_of(id, "response.reasoning_text.done", done, events);
                let part = json!({"content_index": 0, "part": {"type": "reasoning_text", "text": text}});
                self.say_of(id, "response.content_part.done", part, events);
                if self.head.shows.summary {
                    let done = json!({"summary_index": 0, "text": text});
                    self.say_of(id, "response.reasoning_summary_text.done", done, events);
                    let part = json!({"summary_index": 0, "part": {"type": "summary_text", "text": text}});
                    self.say_of(id, "response.reasoning_summary_part.done", part, events);
                }
            }
            Kind::Message => {
                let done = json!({"content_index": 0, "text": text, "logprobs": open.logprobs});
                self.say_of(id, "response.output_text.done", done, events);
                let part = json!({"content_index": 0, "part": open.text_part()});
                self.say_of(id, "response.content_part.done", part, events);
            }
            // A call that was cut off is not done.
            Kind::Call { .. } if status != "completed" => {}
            Kind::Call { called, .. } if called.custom => {
                self.say_of(id, "response.custom_tool_call_input.done", json!({"input": text}), events);
            }
            Kind::Call { called, .. } => {
                let done = json!({"arguments": text, "name": called.name});
                self.say_of(id, "response.function_call_arguments.done", done, events);
            }
        }
        let item = open.item(status, self.head.shows);
        self.say("response.output_item.done", json!({"output_index": output_index, "item": item}), events);
        self.done.push(item);
    }
}

/// The entries of tokens, as chat completions have them.
fn told(tokens: &[TokenLogprob]) -> Vec<Value> {
    match logprobs(tokens)["content"].take() {
        Value::Array(entries) => entries,
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head() -> Head {
        let tools = json!([
            {"type": "custom", "name": "patch"},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "g"}]},
        ]);
        Head {
            id: "resp_1".into(),
            created: 5,
            model: "m".into(),
            request: json!({"metadata": {"a": "b"}}),
            tools: Arc::new(Toolbox::of(tools.as_array().expect("list")).expect("valid")),
            shows: Shows::default(),
            store: true,
        }
    }

    #[test]
    fn events_come_in_order_and_are_numbered() {
        let mut items = Items::new(head());
        let mut events = Vec::new();
        items.start(&mut events);
        items.piece(OutputEvent::Content("a".into()), &[], &mut events);
        items.piece(OutputEvent::Content("b".into()), &[], &mut events);
        items.piece(
            OutputEvent::ToolCallStart { index: 0, id: "call_1".into(), name: "f".into() },
            &[],
            &mut events,
        );
        items.piece(OutputEvent::ToolCallArguments { index: 0, json_delta: "{}".into() }, &[], &mut events);
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
    fn what_was_cut_is_incomplete_whole_and_streamed() {
        let mut outcome = Answer::default().outcome;
        outcome.finish = Finish::Length;
        let call = |arguments: &str| crate::answer::ToolCall {
            id: "call_1".into(),
            name: "f".into(),
            arguments: arguments.into(),
        };
        for (content, arguments, statuses) in [
            ("", Some("{\"city\":\"Par"), vec!["incomplete"]),
            ("", Some(""), vec!["incomplete"]),
            ("a", Some("{\"city\":"), vec!["completed", "incomplete"]),
            ("", Some("{\"city\":\"Paris\"}"), vec!["completed"]),
            ("half a sen", None, vec!["incomplete"]),
        ] {
            let answer = Answer {
                content: content.into(),
                tool_calls: arguments.map(call).into_iter().collect(),
                outcome: outcome.clone(),
                ..Answer::default()
            };
            let whole = head().whole(&answer);
            let seen = |response: &Value| -> Vec<String> {
                let items = response["output"].as_array().expect("items").iter();
                items.map(|item| item["status"].as_str().expect("a status").to_owned()).collect()
            };
            assert_eq!(
                (seen(&whole), &whole["status"]),
                (statuses.iter().map(|s| (*s).to_owned()).collect(), &json!("incomplete"))
            );
            let mut items = Items::new(head());
            let mut events = Vec::new();
            if !content.is_empty() {
                items.piece(OutputEvent::Content(content.into()), &[], &mut events);
            }
            if let Some(arguments) = arguments {
                items.piece(
                    OutputEvent::ToolCallStart { index: 0, id: "call_1".into(), name: "f".into() },
                    &[],
                    &mut events,
                );
                items.piece(
                    OutputEvent::ToolCallArguments { index: 0, json_delta: arguments.into() },
                    &[],
                    &mut events,
                );
            }
            items.finish(&outcome, &mut events);
            let Some(Event::Named("response.incomplete", last)) = events.last() else { panic!("{events:?}") };
            assert_eq!(seen(&last["response"]), statuses);
            let done =
                |event: &&Event| matches!(event, Event::Named("response.function_call_arguments.done", _));
            let whole_calls = arguments.is_some_and(is_whole);
            assert_eq!(events.iter().filter(done).count(), usize::from(whole_calls));
        }
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
    fn played(head: Head, pieces: Vec<OutputEvent>, finish: Finish) -> (Vec<(String, Value)>, Value) {
        let mut items = Items::new(head);
        let mut events = Vec::new();
        pieces.into_iter().for_each(|piece| items.piece(piece, &[], &mut events));
        let mut outcome = Answer::default().outcome;
        outcome.finish = finish;
        let response = items.finish(&outcome, &mut events);
        let named = events.into_iter().map(|event| match event {
            Event::Named(name, payload) => (name.to_owned(), payload),
            other => panic!("{other:?}"),
        });
        (named.collect(), response)
    }

    #[test]
    fn calls_come_back_as_the_client_knows_their_tools() {
        let call = |index: usize, name: &str| OutputEvent::ToolCallStart {
            index,
            id: format!("call_{index}"),
            name: name.into(),
        };
        let more =
            |index: usize, text: &str| OutputEvent::ToolCallArguments { index, json_delta: text.into() };
        let pieces = vec![
            call(0, "patch"),
            more(0, "{\"input\":\"*** B"),
            more(0, "egin\\n\""),
            more(0, "}"),
            call(1, "n.g"),
            more(1, "{\"a\":1}"),
        ];
        let (events, response) = played(head(), pieces, Finish::ToolCalls);
        let of = |name: &str| {
            events
                .iter()
                .filter(|(event, _)| event == name)
                .map(|(_, payload)| payload.clone())
                .collect::<Vec<_>>()
        };
        let deltas: String = of("response.custom_tool_call_input.delta")
            .iter()
            .filter_map(|event| event["delta"].as_str())
            .collect();
        assert_eq!(deltas, "*** Begin\n");
        assert_eq!(of("response.custom_tool_call_input.done")[0]["input"], "*** Begin\n");
        assert_eq!(of("response.function_call_arguments.delta").len(), 1);
        let output = &response["output"];
        assert_eq!(output[0]["type"], "custom_tool_call");
        assert_eq!((&output[0]["name"], &output[0]["input"]), (&json!("patch"), &json!("*** Begin\n")));
        assert_eq!(output[0].get("arguments"), None);
        assert_eq!((&output[1]["name"], &output[1]["namespace"]), (&json!("g"), &json!("n")));
        assert_eq!(output[1]["arguments"], "{\"a\":1}");
        assert_eq!((&output[0]["status"], &output[1]["status"]), (&json!("completed"), &json!("completed")));
    }

    #[test]
    fn a_custom_call_that_was_cut_is_not_done() {
        for arguments in ["", "{\"input\":\"*** B"] {
            let pieces = vec![
                OutputEvent::ToolCallStart { index: 0, id: "call_0".into(), name: "patch".into() },
                OutputEvent::ToolCallArguments { index: 0, json_delta: arguments.into() },
            ];
            let (events, response) = played(head(), pieces, Finish::Length);
            assert_eq!(response["output"][0]["status"], "incomplete");
            assert!(events.iter().all(|(name, _)| name != "response.custom_tool_call_input.done"));
        }
    }

    #[test]
    fn a_summary_and_the_encoded_text_are_given_when_asked_for() {
        let shows = Shows { summary: true, encrypted: true, logprobs: false };
        let pieces = vec![
            OutputEvent::Reasoning("H".into()),
            OutputEvent::Reasoning("m".into()),
            OutputEvent::Content("a".into()),
        ];
        let (events, response) = played(Head { shows, ..head() }, pieces, Finish::Stop);
        let names: Vec<&str> =
            events.iter().map(|(name, _)| name.as_str()).filter(|name| name.contains("summary")).collect();
        assert_eq!(
            names,
            [
                "response.reasoning_summary_part.added",
                "response.reasoning_summary_text.delta",
                "response.reasoning_summary_text.delta",
                "response.reasoning_summary_text.done",
                "response.reasoning_summary_part.done",
            ]
        );
        let item = &response["output"][0];
        assert_eq!(item["summary"], json!([{"type": "summary_text", "text": "Hm"}]));
        assert_eq!(item["content"][0]["text"], "Hm");
        assert_eq!(item["encrypted_content"], encoded("Hm"));
    }

    #[test]
    fn what_was_cut_is_said_to_be_incomplete() {
        let call = vec![
            OutputEvent::ToolCallStart { index: 0, id: "call_0".into(), name: "f".into() },
            OutputEvent::ToolCallArguments { index: 0, json_delta: "{\"a".into() },
        ];
        for pieces in [call, vec![OutputEvent::Content("a".into())], vec![OutputEvent::Reasoning("a".into())]]
        {
            let (events, response) = played(head(), pieces, Finish::Length);
            assert_eq!(response["status"], "incomplete");
            assert_eq!(response["output"][0]["status"], "incomplete");
            assert_eq!(events.last().map(|(name, _)| name.as_str()), Some("response.incomplete"));
        }
    }
}
