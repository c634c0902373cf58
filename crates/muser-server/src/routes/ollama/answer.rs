//! Lines of Ollama's streams, and the same as one object.

use std::time::Instant;

use muser_text::OutputEvent;
use serde_json::{Value, json};

use crate::answer::{Answer, Finish, Outcome, TokenLogprob, ToolCall, call_input};
use crate::routes::chat::answer::logprobs;

/// Which route's shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// A `message` object.
    Chat,
    /// A `response` text.
    Generate,
}

/// The state of a stream.
#[derive(Debug, Clone)]
pub struct Lines {
    shape: Shape,
    model: String,
    arrived: Instant,
    call: Option<ToolCall>,
    /// Calls given out.
    calls: usize,
}

impl Lines {
    /// A stream that has said nothing.
    pub fn new(shape: Shape, model: String, arrived: Instant) -> Self {
        Self { shape, model, arrived, call: None, calls: 0 }
    }

    fn line(&self, content: &str, thinking: &str, calls: &[Value]) -> Value {
        let mut line = json!({"model": self.model, "created_at": muser_text::utc_now()});
        match self.shape {
            Shape::Chat => {
                let mut message = json!({"role": "assistant", "content": content});
                if !thinking.is_empty() {
                    message["thinking"] = thinking.into();
                }
                if !calls.is_empty() {
                    message["tool_calls"] = calls.into();
                }
                line["message"] = message;
            }
            Shape::Generate => {
                line["response"] = content.into();
                if !thinking.is_empty() {
                    line["thinking"] = thinking.into();
                }
            }
        }
        line["done"] = false.into();
        line
    }

    /// The lines for a piece.
    pub fn piece(&mut self, piece: OutputEvent, tokens: &[TokenLogprob], out: &mut Vec<Value>) {
        if is_empty(&piece) && tokens.is_empty() {
            return;
        }
        match piece {
            OutputEvent::ToolCallArguments { json_delta: fragment, .. } => {
                if let Some(call) = &mut self.call {
                    call.arguments.push_str(&fragment);
                }
            }
            OutputEvent::ToolCallStart { id, name, .. } => {
                self.flush_call(out);
                self.call = Some(ToolCall { id, name, arguments: String::new() });
            }
            OutputEvent::Content(text) => {
                self.flush_call(out);
                let mut line = self.line(&text, "", &[]);
                tell(&mut line, tokens);
                out.push(line);
            }
            OutputEvent::Reasoning(text) => {
                self.flush_call(out);
                out.push(self.line("", &text, &[]));
            }
            OutputEvent::ToolCallEnd { .. } => {}
        }
    }

    /// The last lines.
    pub fn finish(&mut self, outcome: &Outcome, out: &mut Vec<Value>) {
        self.flush_call(out);
        let mut last = self.line("", "", &[]);
        self.end(&mut last, outcome);
        out.push(last);
    }

    /// The whole answer as one object.
    pub fn whole(&mut self, answer: Answer) -> Value {
        let calls: Vec<Value> =
            answer.tool_calls.iter().enumerate().map(|(index, made)| call(index, made)).collect();
        let mut line = self.line(&answer.content, &answer.reasoning, &calls);
        tell(&mut line, &answer.logprobs);
        self.end(&mut line, &answer.outcome);
        line
    }

    /// A line that says nothing.
    pub fn empty(&self) -> Value {
        self.line("", "", &[])
    }

    /// The answer to a request that says nothing: the model is there.
    pub fn loaded(&self) -> Value {
        let mut line = self.line("", "", &[]);
        line["done"] = true.into();
        line["done_reason"] = "load".into();
        line
    }

    fn flush_call(&mut self, out: &mut Vec<Value>) {
        if let Some(made) = self.call.take() {
            out.push(self.line("", "", &[call(self.calls, &made)]));
            self.calls += 1;
        }
    }

    fn end(&self, line: &mut Value, outcome: &Outcome) {
        let nanoseconds = |seconds: f64| Value::from((seconds * 1e9) as u64);
        line["done"] = true.into();
        line["done_reason"] = match outcome.finish {
            Finish::Length => "length".into(),
            _ => "stop".into(),
        };
        line["total_duration"] = nanoseconds(self.arrived.elapsed().as_secs_f64());
        line["load_duration"] = 0.into();
        line["prompt_eval_count"] = outcome.usage.prompt.into();
        line["prompt_eval_duration"] = nanoseconds(outcome.seconds.prefill);
        line["eval_count"] = outcome.usage.completion.into();
        line["eval_duration"] = nanoseconds(outcome.seconds.decode);
    }
}

fn call(index: usize, made: &ToolCall) -> Value {
    let arguments = call_input(&made.arguments);
    json!({"id": made.id, "function": {"index": index, "name": made.name, "arguments": arguments}})
}

/// Adds log-probabilities, if there are any.
fn tell(line: &mut Value, tokens: &[TokenLogprob]) {
    if !tokens.is_empty() {
        line["logprobs"] = logprobs(tokens)["content"].take();
    }
}

/// Whether a piece shows something; the empty ones are not worth a line.
fn is_empty(piece: &OutputEvent) -> bool {
    matches!(piece, OutputEvent::Reasoning(text) | OutputEvent::Content(text) if text.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_given_out_whole() {
        let mut lines = Lines::new(Shape::Chat, "m".into(), Instant::now());
        let mut out = Vec::new();
        lines.piece(
            OutputEvent::ToolCallStart { index: 0, id: "call_1".into(), name: "f".into() },
            &[],
            &mut out,
        );
        lines.piece(OutputEvent::ToolCallArguments { index: 0, json_delta: "{\"a\"".into() }, &[], &mut out);
        lines.piece(OutputEvent::ToolCallArguments { index: 0, json_delta: ":1}".into() }, &[], &mut out);
        assert!(out.is_empty());
        lines.finish(&Answer::default().outcome, &mut out);
        assert_eq!(
            out[0]["message"]["tool_calls"],
            json!([{"id": "call_1", "function": {"index": 0, "name": "f", "arguments": {"a": 1}}}])
        );
        assert_eq!(out[0]["done"], false);
        assert_eq!(out[1]["done"], true);
    }

    #[test]
    fn a_call_that_was_cut_is_no_whole_one() {
        let mut lines = Lines::new(Shape::Chat, "m".into(), Instant::now());
        let mut out = Vec::new();
        lines.piece(
            OutputEvent::ToolCallStart { index: 0, id: "call_1".into(), name: "f".into() },
            &[],
            &mut out,
        );
        lines.piece(
            OutputEvent::ToolCallArguments { index: 0, json_delta: "{\"a\":\"Par".into() },
            &[],
            &mut out,
        );
        let mut outcome = Answer::default().outcome;
        outcome.finish = Finish::Length;
        lines.finish(&outcome, &mut out);
        let arguments = &out[0]["message"]["tool_calls"][0]["function"]["arguments"];
        assert_eq!(arguments, &json!({"partial_json": "{\"a\":\"Par"}));
        assert_eq!(out[1]["done_reason"], "length");
    }
}
