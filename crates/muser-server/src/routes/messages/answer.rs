//! Answers of `/v1/messages`, whole and as events.
//!
//! Text, thinking and calls are blocks with an index; a stream opens a block, fills it and closes it before the next
//! one opens. [`Blocks`] keeps that order whatever order the pieces come in.

use muser_text::OutputEvent;
use serde_json::{Value, json};

use crate::answer::{Answer, Finish, Outcome, Usage, call_input};
use crate::sse::Event;

/// What is the same in all parts of one answer.
#[derive(Debug, Clone)]
pub struct Head {
    /// The answer's id.
    pub id: String,
    /// The model's name.
    pub model: String,
}

impl Head {
    fn message(&self, content: &[Value], finish: Option<&Finish>, usage: Usage) -> Value {
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": finish.map(Finish::anthropic),
            "stop_sequence": stop_sequence(finish),
            "usage": usage.anthropic(),
        })
    }

    /// The whole answer.
    pub fn whole(&self, answer: &Answer) -> Value {
        let mut content = Vec::new();
        if !answer.reasoning.is_empty() {
            content.push(json!({"type": "thinking", "thinking": answer.reasoning, "signature": ""}));
        }
        if !answer.content.is_empty() {
            content.push(json!({"type": "text", "text": answer.content}));
        }
        for call in &answer.tool_calls {
            let input = call_input(&call.arguments);
            content.push(
                json!({"type": "tool_use", "id": tool_id(&call.id), "name": call.name, "input": input}),
            );
        }
        self.message(&content, Some(&answer.outcome.finish), answer.outcome.usage)
    }

    /// The event that opens a stream.
    pub fn start(&self, prompt_tokens: u32, cached_tokens: u32) -> Event {
        let usage = Usage { prompt: prompt_tokens, cached: cached_tokens, ..Usage::default() };
        Event::Named(
            "message_start",
            json!({"type": "message_start", "message": self.message(&[], None, usage)}),
        )
    }
}

fn stop_sequence(finish: Option<&Finish>) -> Value {
    match finish {
        Some(Finish::StopString(stop)) => stop.as_str().into(),
        _ => Value::Null,
    }
}

/// The id in the family's spelling, so that clients recognise it.
fn tool_id(id: &str) -> String {
    id.strip_prefix("call_").map_or_else(|| id.to_owned(), |rest| format!("toolu_{rest}"))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Block {
    Thinking,
    Text,
    Tool(usize),
}

/// The state of a stream's blocks.
#[derive(Debug, Default)]
pub struct Blocks {
    open: Option<Block>,
    next_index: usize,
}

impl Blocks {
    /// The events for a piece.
    pub fn piece(&mut self, piece: OutputEvent, events: &mut Vec<Event>) {
        match piece {
            OutputEvent::Reasoning(text) => {
                self.enter(
                    Block::Thinking,
                    || json!({"type": "thinking", "thinking": "", "signature": ""}),
                    events,
                );
                self.delta(json!({"type": "thinking_delta", "thinking": text}), events);
            }
            OutputEvent::Content(text) => {
                self.enter(Block::Text, || json!({"type": "text", "text": ""}), events);
                self.delta(json!({"type": "text_delta", "text": text}), events);
            }
            OutputEvent::ToolCallStart { index, id, name } => {
                let block = || json!({"type": "tool_use", "id": tool_id(&id), "name": name, "input": {}});
                self.enter(Block::Tool(index), block, events);
            }
            OutputEvent::ToolCallArguments { json_delta: fragment, .. } => {
                self.delta(json!({"type": "input_json_delta", "partial_json": fragment}), events);
            }
            OutputEvent::ToolCallEnd { .. } => {}
        }
    }

    /// The events that end a stream.
    pub fn finish(&mut self, outcome: &Outcome, events: &mut Vec<Event>) {
        self.close(events);
        let finish = Some(&outcome.finish);
        events.push(Event::Named(
            "message_delta",
            json!({
                "type": "message_delta",
                "delta": {"stop_reason": outcome.finish.anthropic(), "stop_sequence": stop_sequence(finish)},
                "usage": outcome.usage.anthropic(),
            }),
        ));
        events.push(Event::Named("message_stop", json!({"type": "message_stop"})));
    }

    fn enter(&mut self, block: Block, start: impl FnOnce() -> Value, events: &mut Vec<Event>) {
        if self.open == Some(block) {
            return;
        }
        self.close(events);
        self.open = Some(block);
        let object =
            json!({"type": "content_block_start", "index": self.next_index, "content_block": start()});
        events.push(Event::Named("content_block_start", object));
    }

    fn delta(&self, delta: Value, events: &mut Vec<Event>) {
        let object = json!({"type": "content_block_delta", "index": self.next_index, "delta": delta});
        events.push(Event::Named("content_block_delta", object));
    }

    fn close(&mut self, events: &mut Vec<Event>) {
        if self.open.take().is_some() {
            let object = json!({"type": "content_block_stop", "index": self.next_index});
            events.push(Event::Named("content_block_stop", object));
            self.next_index += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_was_cut_is_no_whole_one() {
        let head = Head { id: "msg_1".into(), model: "m".into() };
        for (arguments, input) in [
            ("", json!({"partial_json": ""})),
            ("{\"city\":\"Par", json!({"partial_json": "{\"city\":\"Par"})),
            ("{\"city\":\"Paris\"}", json!({"city": "Paris"})),
        ] {
            let call = crate::answer::ToolCall {
                id: "call_7".into(),
                name: "f".into(),
                arguments: arguments.into(),
            };
            let mut answer = Answer { tool_calls: vec![call], ..Answer::default() };
            answer.outcome.finish = Finish::Length;
            let whole = head.whole(&answer);
            assert_eq!(
                (&whole["content"][0]["input"], &whole["stop_reason"]),
                (&input, &json!("max_tokens"))
            );
        }
    }

    #[test]
    fn blocks_open_and_close_in_order() {
        let mut blocks = Blocks::default();
        let mut events = Vec::new();
        for piece in [
            OutputEvent::Reasoning("a".into()),
            OutputEvent::Reasoning("b".into()),
            OutputEvent::Content("c".into()),
            OutputEvent::ToolCallStart { index: 0, id: "call_7".into(), name: "f".into() },
            OutputEvent::ToolCallArguments { index: 0, json_delta: "{}".into() },
            OutputEvent::ToolCallStart { index: 1, id: "call_8".into(), name: "g".into() },
        ] {
            blocks.piece(piece, &mut events);
        }
        blocks.finish(&Answer::default().outcome, &mut events);
        let seen: Vec<(String, Option<u64>)> = events
            .iter()
            .map(|event| match event {
                Event::Named(name, value) => {
                    assert_eq!(value["type"], **name, "the payload repeats the event's name");
                    ((*name).to_owned(), value["index"].as_u64())
                }
                other => panic!("{other:?}"),
            })
            .collect();
        let expected = [
            ("content_block_start", Some(0)),
            ("content_block_delta", Some(0)),
            ("content_block_delta", Some(0)),
            ("content_block_stop", Some(0)),
            ("content_block_start", Some(1)),
            ("content_block_delta", Some(1)),
            ("content_block_stop", Some(1)),
            ("content_block_start", Some(2)),
            ("content_block_delta", Some(2)),
            ("content_block_stop", Some(2)),
            ("content_block_start", Some(3)),
            ("content_block_stop", Some(3)),
            ("message_delta", None),
            ("message_stop", None),
        ];
        assert_eq!(seen, expected.map(|(name, index)| (name.to_owned(), index)));
    }
}
