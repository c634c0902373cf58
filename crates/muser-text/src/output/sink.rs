//! Who listens to the state machine: somebody who shows the text, or nobody.

use super::event::OutputEvent;

/// Takes what the machine finds.
pub(super) trait Sink {
    /// Whether anybody reads: else no text is kept for showing and no JSON is made.
    const READS: bool;
    /// Text of the reasoning.
    fn reasoning(&mut self, text: &str);
    /// Text of the answer.
    fn content(&mut self, text: &str);
    /// A tool call begins.
    fn call_start(&mut self, index: usize, name: &str);
    /// A piece of its arguments.
    fn call_arguments(&mut self, index: usize, json: &str);
    /// The call is complete.
    fn call_end(&mut self, index: usize, arguments: &str);
}

/// Events in a list; text of a kind that follows text of that kind makes no new one.
pub(super) struct Events<'a> {
    pub(super) list: Vec<OutputEvent>,
    call_prefix: &'a str,
}

impl Events<'_> {
    pub(super) fn new(call_prefix: &str) -> Events<'_> {
        Events { list: Vec::new(), call_prefix }
    }
}

impl Sink for Events<'_> {
    const READS: bool = true;

    fn reasoning(&mut self, text: &str) {
        match self.list.last_mut() {
            _ if text.is_empty() => {}
            Some(OutputEvent::Reasoning(last)) => last.push_str(text),
            _ => self.list.push(OutputEvent::Reasoning(text.to_owned())),
        }
    }

    fn content(&mut self, text: &str) {
        match self.list.last_mut() {
            _ if text.is_empty() => {}
            Some(OutputEvent::Content(last)) => last.push_str(text),
            _ => self.list.push(OutputEvent::Content(text.to_owned())),
        }
    }

    fn call_start(&mut self, index: usize, name: &str) {
        let id = format!("{}_{index}", self.call_prefix);
        self.list.push(OutputEvent::ToolCallStart { index, id, name: name.to_owned() });
    }

    fn call_arguments(&mut self, index: usize, json: &str) {
        match self.list.last_mut() {
            Some(OutputEvent::ToolCallArguments { json_delta, .. }) => json_delta.push_str(json),
            _ => self.list.push(OutputEvent::ToolCallArguments { index, json_delta: json.to_owned() }),
        }
    }

    fn call_end(&mut self, index: usize, arguments: &str) {
        self.list.push(OutputEvent::ToolCallEnd { index, arguments: arguments.to_owned() });
    }
}

/// Nobody. It remembers whether a call became complete.
#[derive(Default)]
pub(super) struct Nobody {
    pub(super) called: bool,
}

impl Sink for Nobody {
    const READS: bool = false;

    fn reasoning(&mut self, _: &str) {}

    fn content(&mut self, _: &str) {}

    fn call_start(&mut self, _: usize, _: &str) {}

    fn call_arguments(&mut self, _: usize, _: &str) {}

    fn call_end(&mut self, _: usize, _: &str) {
        self.called = true;
    }
}
