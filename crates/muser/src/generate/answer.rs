//! One answer: the engine's events, decoded and collected, with figures about how long it took.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use muser_engine::{Event, FinishReason, Finished, Request, SamplingParams, StopWatch, StopWatchFactory};
use muser_text::{OutputDecoder, OutputEvent, OutputOptions, StopMatcher};
use serde::Serialize;

use super::{Prompt, Session};
use crate::cli::SamplingArgs;
use crate::interrupt::Interrupt;

/// How often a reader that waits looks whether Ctrl-C was pressed.
const POLL: Duration = Duration::from_millis(50);

/// A tool call of the model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ToolCall {
    /// Which tool.
    pub name: String,
    /// Its arguments, a JSON object.
    pub arguments: serde_json::Value,
}

/// All that came of a request.
#[derive(Clone, Debug, Serialize)]
pub struct Answer {
    /// The answer.
    pub text: String,
    /// The thoughts before it.
    pub reasoning: String,
    /// Tools that the model wants called.
    pub tool_calls: Vec<ToolCall>,
    /// What was generated, without the token that ended it.
    pub token_ids: Vec<u32>,
    /// Tokens read.
    pub prompt_tokens: u32,
    /// Of these, known from earlier turns or from packs.
    pub cached_tokens: u32,
    /// Tokens whose state came from packs.
    pub restored_tokens: u32,
    /// Of these, tokens that other nodes read.
    pub handed_tokens: u32,
    /// `stop`, `tool_calls`, `length`, `context`, `interrupted`, `deadline`.
    pub finish_reason: &'static str,
    /// Tokens for each pass of the model over its weights, after the first: 1 unless a draft's proposals count.
    pub tokens_per_target_pass: f64,
    /// The draft and how its proposals fared; null without one.
    pub draft: Option<DraftFigures>,
    /// Seed in use: the same prompt with it gives the same answer.
    pub seed: u64,
    /// How long it took.
    pub timings: Timings,
    /// Name of the call that is being written.
    #[serde(skip)]
    call_name: String,
}

/// How a draft's proposals fared.
#[derive(Clone, Debug, Serialize)]
pub struct DraftFigures {
    /// What messages call the draft.
    pub model: String,
    /// Proposals verified.
    pub proposed: u32,
    /// Proposals accepted.
    pub accepted: u32,
    /// For each place in a round: share of the proposals made there that were accepted. Of all answers of this session.
    pub acceptance_by_position: Vec<f64>,
}

/// Milliseconds and rates of one answer.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Timings {
    /// Opening the model and starting the engine.
    pub load_ms: f64,
    /// Reading the prompt, up to the first token.
    pub prefill_ms: f64,
    /// Of this, bringing state from packs.
    pub restore_ms: f64,
    /// From the first token to the end.
    pub decode_ms: f64,
    /// Prompt tokens read in a second, known ones not counted.
    pub prompt_tok_s: f64,
    /// Tokens written in a second after the first.
    pub tok_s: f64,
    /// From handing the request in to having its first token.
    pub ttft_ms: f64,
}

/// What is shown of an answer while it comes.
pub trait Sink {
    /// A piece of thought.
    fn reasoning(&mut self, text: &str) -> io::Result<()>;
    /// A piece of the answer.
    fn answer(&mut self, text: &str) -> io::Result<()>;
    /// A complete tool call.
    fn tool_call(&mut self, call: &ToolCall) -> io::Result<()>;
}

/// Shows nothing.
impl Sink for () {
    fn reasoning(&mut self, _: &str) -> io::Result<()> {
        Ok(())
    }

    fn answer(&mut self, _: &str) -> io::Result<()> {
        Ok(())
    }

    fn tool_call(&mut self, _: &ToolCall) -> io::Result<()> {
        Ok(())
    }
}

impl Session {
    /// Answers `prompt`, showing pieces on `sink` as they come. Ctrl-C ends the answer; what exists by then is returned.
    pub fn answer(
        &self,
        prompt: &Prompt,
        sampling: &SamplingArgs,
        interrupt: &Interrupt,
        sink: &mut dyn Sink,
    ) -> anyhow::Result<Answer> {
        let output = OutputOptions { stop: sampling.stop.clone(), ..prompt.output_options()? };
        let mut decoder = OutputDecoder::new(Arc::clone(&self.tokenizer), &output)?;
        let mut request = Request::new(prompt.encode(self)?, self.tokenizer.stop_ids().to_vec());
        request.max_tokens = sampling.max_tokens;
        request.seed = sampling.seed;
        request.sampling = sampling_params(sampling);
        request.stop_watch = StopMatcher::new(Arc::clone(&self.tokenizer), &output, false)?.map(|matcher| {
            Box::new(move |_| Box::new(Watch(matcher.clone())) as Box<dyn StopWatch>) as StopWatchFactory
        });
        let submitted = Instant::now();
        let mut submission = self.engine.submit(request)?;
        let mut answer = Answer::empty(submission.seed(), self.load_time);
        let mut first_token = None;
        loop {
            if interrupt.pressed() {
                submission.cancel();
            }
            let Ok(event) = submission.recv_timeout(POLL) else { continue };
            match event {
                Some(Event::Token(token)) => {
                    first_token.get_or_insert_with(|| submitted.elapsed());
                    answer.token_ids.push(token.id);
                    answer.take(decoder.push(token.id), sink)?;
                }
                Some(Event::Finished(finished)) => {
                    if let FinishReason::Stop(id) = finished.reason {
                        answer.take(decoder.push(id), sink)?;
                    }
                    answer.take(decoder.finish(), sink)?;
                    answer.finish(&finished, first_token);
                    answer.draft = self.draft_figures(&finished);
                }
                Some(Event::Failed(error)) => return Err(error.into()),
                Some(_) => {}
                None => return Ok(answer),
            }
        }
    }
}

impl Session {
    fn draft_figures(&self, finished: &Finished) -> Option<DraftFigures> {
        let metrics = self.engine.metrics();
        let places = metrics.accepted_by_place.iter().zip(&metrics.drafted_by_place);
        let share = |(&accepted, &drafted): (&u64, &u64)| {
            (accepted as f64 / drafted as f64 * 1000.0).round() / 1000.0
        };
        Some(DraftFigures {
            model: self.draft.clone()?,
            proposed: finished.usage.drafted_tokens,
            accepted: finished.usage.accepted_tokens,
            acceptance_by_position: places.take_while(|place| *place.1 > 0).map(share).collect(),
        })
    }
}

/// Ends the request where the output ends, so that no token is computed in vain.
struct Watch(StopMatcher);

impl StopWatch for Watch {
    fn push(&mut self, token: u32) -> bool {
        self.0.push(token)
    }
}

impl Answer {
    /// Counts and rates in a line.
    pub fn speed(&self) -> String {
        let written = self.token_ids.len();
        let cached = match self.cached_tokens {
            0 => String::new(),
            cached => format!(" ({cached} known)"),
        };
        let rate = |rate: f64| if rate >= 10.0 { format!("{rate:.0}") } else { format!("{rate:.1}") };
        let per_pass = match &self.draft {
            Some(draft) if draft.proposed > 0 => format!(", {:.2} a pass", self.tokens_per_target_pass),
            _ => String::new(),
        };
        format!(
            "{} tokens read{cached} at {}/s, {written} written at {}/s{per_pass}",
            self.prompt_tokens,
            rate(self.timings.prompt_tok_s),
            rate(self.timings.tok_s)
        )
    }

    fn empty(seed: u64, load_time: Duration) -> Self {
        Self {
            text: String::new(),
            reasoning: String::new(),
            tool_calls: Vec::new(),
            token_ids: Vec::new(),
            prompt_tokens: 0,
            cached_tokens: 0,
            restored_tokens: 0,
            handed_tokens: 0,
            finish_reason: "interrupted",
            tokens_per_target_pass: 1.0,
            draft: None,
            seed,
            timings: Timings { load_ms: milliseconds(load_time), ..Timings::default() },
            call_name: String::new(),
        }
    }

    fn take(&mut self, events: Vec<OutputEvent>, sink: &mut dyn Sink) -> io::Result<()> {
        for event in events {
            match event {
                OutputEvent::Reasoning(text) => {
                    sink.reasoning(&text)?;
                    self.reasoning += &text;
                }
                OutputEvent::Content(text) => {
                    sink.answer(&text)?;
                    self.text += &text;
                }
                OutputEvent::ToolCallStart { name, .. } => self.call_name = name,
                OutputEvent::ToolCallArguments { .. } => {}
                OutputEvent::ToolCallEnd { arguments, .. } => {
                    let arguments =
                        serde_json::from_str(&arguments).unwrap_or(serde_json::Value::String(arguments));
                    let call = ToolCall { name: std::mem::take(&mut self.call_name), arguments };
                    sink.tool_call(&call)?;
                    self.tool_calls.push(call);
                }
            }
        }
        Ok(())
    }

    fn finish(&mut self, finished: &Finished, first_token: Option<Duration>) {
        let usage = finished.usage;
        self.prompt_tokens = usage.prompt_tokens;
        self.cached_tokens = usage.cached_tokens;
        self.restored_tokens = usage.restored_tokens;
        self.handed_tokens = usage.handed_tokens;
        self.finish_reason = match finished.reason {
            FinishReason::Stop(_) | FinishReason::StopWatch if !self.tool_calls.is_empty() => "tool_calls",
            FinishReason::Stop(_) | FinishReason::StopWatch => "stop",
            FinishReason::Length => "length",
            FinishReason::Context => "context",
            FinishReason::Deadline => "deadline",
            FinishReason::Cancelled | FinishReason::SlowReader => "interrupted",
        };
        let read = usage.prompt_tokens.saturating_sub(usage.cached_tokens);
        let written = usage.completion_tokens.saturating_sub(1);
        // The first token comes with the prompt.
        if usage.decode_steps > 1 {
            let passes = f64::from(usage.decode_steps - 1);
            self.tokens_per_target_pass = (f64::from(written) / passes * 1000.0).round() / 1000.0;
        }
        self.timings.prefill_ms = milliseconds(finished.timings.prefill);
        self.timings.restore_ms = milliseconds(finished.timings.restore);
        self.timings.decode_ms = milliseconds(finished.timings.decode);
        self.timings.prompt_tok_s = rate(read, finished.timings.prefill);
        self.timings.tok_s = rate(written, finished.timings.decode);
        self.timings.ttft_ms = first_token.map_or(0.0, milliseconds);
    }
}

fn sampling_params(args: &SamplingArgs) -> SamplingParams {
    SamplingParams {
        temperature: args.temp,
        top_k: args.top_k,
        top_p: args.top_p,
        min_p: args.min_p,
        repetition_penalty: args.repeat_penalty,
        presence_penalty: args.presence_penalty,
        frequency_penalty: args.frequency_penalty,
        logit_bias: Vec::new(),
    }
}

/// Milliseconds with three decimals: microseconds are all that the clock is good for.
fn milliseconds(time: Duration) -> f64 {
    time.as_micros() as f64 / 1000.0
}

fn rate(count: u32, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { (f64::from(count) / time.as_secs_f64() * 100.0).round() / 100.0 }
}
