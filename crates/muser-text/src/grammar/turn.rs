//! A constraint over a whole turn of the model: headers, reasoning, answer, tool calls.
//!
//! Reasoning stays free. What is constrained is the structure (whom a message may be for, and that the turn does not end
//! before there is what was asked for), the answer by its grammar, and the arguments of calls by their tools' schemas.
//! Tokens of headers follow from the allowed header texts; a grammar works only inside bodies, from their first token.

use super::{Grammar, GrammarEngine, TokenConstraint, tool_calls};
use crate::error::TextError;
use crate::{ChannelTokens, TokenKind};
use llguidance::api::TopLevelGrammar;
use serde_json::Value;
use std::sync::Arc;

/// What the answer may be.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum AnswerRule {
    /// Any text.
    #[default]
    Free,
    /// Text that follows a grammar.
    Grammar(Grammar),
    /// No answer: the turn must be a call.
    Forbidden,
}

/// Where generation begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TurnStart {
    /// After `<|start|>assistant`.
    #[default]
    Header,
    /// In the answer: the prompt opened it, or there are no messages at all.
    Answer,
}

/// Rules of a turn.
#[derive(Clone, Debug, Default)]
pub struct TurnRules {
    /// Where generation begins.
    pub start: TurnStart,
    /// Rule of the answer.
    pub answer: AnswerRule,
    /// The tools that may be called, as [`crate::normalise_tools`] gives them; none is an empty list.
    pub tools: Vec<Value>,
    /// May more than one call be made?
    pub parallel_calls: bool,
}

/// Follows one turn. [`Self::mask`] and [`Self::commit`] take turns.
pub struct TurnConstraint {
    engine: Arc<GrammarEngine>,
    channels: Option<ChannelTokens>,
    end: u32,
    answer: AnswerRule,
    tools: Vec<(String, Value)>,
    parallel_calls: bool,
    calls: usize,
    state: State,
}

impl std::fmt::Debug for TurnConstraint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TurnConstraint").field("state", &self.state).finish_non_exhaustive()
    }
}

#[derive(Debug)]
enum State {
    /// `<|start|>` must come.
    Opening,
    /// In a header. `opened`: after `<|start|>`, so that the role is part of it.
    Header {
        opened: bool,
        text: Vec<u8>,
    },
    Reasoning,
    FreeAnswer,
    Answer(Box<TokenConstraint>),
    Call(Box<TokenConstraint>),
    Ended,
}

const SELF: &str = "self";
const USER: &str = "user";

impl TurnConstraint {
    /// A constraint for one turn. All grammars of the rules are compiled once, so that a bad one shows here.
    pub fn new(engine: Arc<GrammarEngine>, rules: TurnRules) -> Result<TurnConstraint, TextError> {
        let channels = engine.tokenizer.channels();
        let header = rules.start == TurnStart::Header;
        if header && channels.is_none() {
            return Err(TextError::vocabulary(
                "tokenizer.ggml.tokens",
                "the markers <|start|>, <|message|>, <|eom|> and <|eot|>",
                "a vocabulary without them",
            ));
        }
        let tools: Vec<(String, Value)> = rules
            .tools
            .iter()
            .filter_map(|tool| {
                let function = tool.get("function").unwrap_or(tool);
                let parameters = function.get("parameters").cloned().unwrap_or(Value::Null);
                Some((function.get("name")?.as_str()?.to_owned(), parameters))
            })
            .collect();
        if rules.answer == AnswerRule::Forbidden && (tools.is_empty() || !header) {
            return Err(TextError::request("tool_choice", "tools to choose from", "none"));
        }
        let Some(end) = channels.map(|channels| channels.end_of_turn).or(engine.tokenizer.eos()) else {
            return Err(TextError::vocabulary(
                "tokenizer.ggml.eos_token_id",
                "a token that ends text",
                "no such key",
            ));
        };
        for (name, parameters) in &tools {
            call_constraint(&engine, name, parameters)?;
        }
        if let AnswerRule::Grammar(grammar) = &rules.answer {
            engine.constraint(grammar)?;
        }
        let mut constraint = TurnConstraint {
            engine,
            channels,
            end,
            answer: rules.answer,
            tools,
            parallel_calls: rules.parallel_calls,
            calls: 0,
            state: State::Header { opened: false, text: Vec::new() },
        };
        if !header {
            constraint.open_answer()?;
        }
        Ok(constraint)
    }

    /// The tokens that may come next: bit `i % 32` of word `i / 32` is token `i`.
    pub fn mask(&mut self) -> Result<Vec<u32>, TextError> {
        let mut ids = Vec::new();
        match &mut self.state {
            State::Reasoning => return Ok(self.engine.reasoning.clone()),
            State::FreeAnswer => return Ok(self.engine.answer.clone()),
            State::Answer(constraint) => return constraint.mask(),
            State::Call(constraint) => {
                let mut mask = constraint.mask()?;
                if let Some(channels) = self.channels.filter(|_| self.parallel_calls && constraint.can_end())
                {
                    allow(&mut mask, channels.end_of_message);
                }
                return Ok(mask);
            }
            State::Ended => ids.push(self.end),
            State::Opening => ids.extend(self.channels.map(|channels| channels.start)),
            State::Header { .. } => {}
        }
        if let State::Header { opened, text } = &self.state {
            for (header, _) in self.headers(*opened) {
                let Some(rest) = header.as_bytes().strip_prefix(text.as_slice()) else { continue };
                if rest.is_empty() {
                    ids.extend(self.channels.map(|channels| channels.message));
                }
                let vocabulary = self.engine.tokenizer.vocabulary();
                ids.extend((1..=rest.len()).filter_map(|len| vocabulary.find(&rest[..len])));
            }
        }
        let mut mask = vec![0; self.engine.tokenizer.vocab_size().div_ceil(32)];
        for id in ids {
            allow(&mut mask, id);
        }
        Ok(mask)
    }

    /// Takes the token that was chosen. One that the mask does not allow is an error.
    pub fn commit(&mut self, id: u32) -> Result<(), TextError> {
        let is =
            |marker: fn(ChannelTokens) -> u32| self.channels.is_some_and(|channels| marker(channels) == id);
        let (is_start, is_message) = (is(|channels| channels.start), is(|channels| channels.message));
        let is_end_of_message = is(|channels| channels.end_of_message);
        let is_end = id == self.end;
        let is_text = self.engine.tokenizer.token_kind(id) == Some(TokenKind::Normal);
        match &mut self.state {
            State::Opening if is_start => self.state = State::Header { opened: true, text: Vec::new() },
            State::Header { opened, text } if is_message => {
                let (opened, text) = (*opened, std::mem::take(text));
                let headers = self.headers(opened);
                let Some((_, recipient)) = headers.iter().find(|(header, _)| header.as_bytes() == text)
                else {
                    return Err(not_allowed(id));
                };
                let recipient = recipient.clone();
                self.open_body(&recipient)?;
            }
            State::Header { opened, text } if is_text => {
                text.extend_from_slice(self.engine.tokenizer.token_bytes(id).unwrap_or_default());
                let (opened, text) = (*opened, text.clone());
                if !self.headers(opened).iter().any(|(header, _)| header.as_bytes().starts_with(&text)) {
                    return Err(not_allowed(id));
                }
            }
            State::Reasoning if is_end_of_message => self.state = State::Opening,
            State::Reasoning | State::FreeAnswer if is_text => {}
            State::FreeAnswer if is_end => self.state = State::Ended,
            State::Answer(constraint) if is_end => {
                if !constraint.can_end() {
                    return Err(not_allowed(id));
                }
                self.state = State::Ended;
            }
            State::Call(constraint) if is_end || (is_end_of_message && self.parallel_calls) => {
                if !constraint.can_end() {
                    return Err(not_allowed(id));
                }
                self.calls += 1;
                self.state = if is_end { State::Ended } else { State::Opening };
            }
            State::Answer(constraint) | State::Call(constraint) if is_text => constraint.commit(id)?,
            State::Ended => {}
            _ => return Err(not_allowed(id)),
        }
        Ok(())
    }

    /// A copy that goes on by itself, to look ahead with.
    #[must_use]
    pub fn fork(&self) -> TurnConstraint {
        let state = match &self.state {
            State::Opening => State::Opening,
            State::Header { opened, text } => State::Header { opened: *opened, text: text.clone() },
            State::Reasoning => State::Reasoning,
            State::FreeAnswer => State::FreeAnswer,
            State::Answer(constraint) => State::Answer(Box::new(constraint.fork())),
            State::Call(constraint) => State::Call(Box::new(constraint.fork())),
            State::Ended => State::Ended,
        };
        TurnConstraint {
            engine: Arc::clone(&self.engine),
            channels: self.channels,
            end: self.end,
            answer: self.answer.clone(),
            tools: self.tools.clone(),
            parallel_calls: self.parallel_calls,
            calls: self.calls,
            state,
        }
    }

    /// Has the turn ended?
    pub fn is_done(&self) -> bool {
        matches!(self.state, State::Ended)
    }

    /// The headers that may be written now, with their recipients.
    fn headers(&self, opened: bool) -> Vec<(String, String)> {
        let mut recipients = vec![SELF];
        // After a call there is no answer in the same turn.
        if self.answer != AnswerRule::Forbidden && self.calls == 0 {
            recipients.push(USER);
        }
        recipients.extend(self.tools.iter().map(|(name, _)| name.as_str()));
        let role = if opened { "assistant" } else { "" };
        recipients
            .into_iter()
            .map(|recipient| (format!("{role} to={recipient}"), recipient.to_owned()))
            .collect()
    }

    fn open_body(&mut self, recipient: &str) -> Result<(), TextError> {
        match recipient {
            SELF => self.state = State::Reasoning,
            USER => self.open_answer()?,
            tool => {
                let parameters =
                    self.tools.iter().find(|(name, _)| name == tool).map(|(_, parameters)| parameters);
                let constraint = call_constraint(&self.engine, tool, parameters.unwrap_or(&Value::Null))?;
                self.state = State::Call(Box::new(constraint));
            }
        }
        Ok(())
    }

    fn open_answer(&mut self) -> Result<(), TextError> {
        self.state = match &self.answer {
            AnswerRule::Grammar(grammar) => State::Answer(Box::new(self.engine.constraint(grammar)?)),
            AnswerRule::Free | AnswerRule::Forbidden => State::FreeAnswer,
        };
        Ok(())
    }
}

fn call_constraint(
    engine: &GrammarEngine,
    name: &str,
    parameters: &Value,
) -> Result<TokenConstraint, TextError> {
    super::check_schema(parameters)?;
    let grammar = TopLevelGrammar::from_lark(tool_calls::grammar(name, parameters));
    let kind = "the schema of a tool";
    let matcher = engine.matcher(kind, grammar).map_err(|error| match error {
        TextError::Grammar { kind, what } => TextError::Grammar { kind, what: format!("{name}: {what}") },
        other => other,
    })?;
    let relaxed = engine.relaxed(kind, parameters, |parameters| {
        Some(TopLevelGrammar::from_lark(tool_calls::grammar(name, parameters)))
    });
    Ok(TokenConstraint::new(kind, matcher, relaxed))
}

fn not_allowed(id: u32) -> TextError {
    TextError::Grammar { kind: "the turn", what: format!("token {id} may not come here") }
}

fn allow(mask: &mut [u32], id: u32) {
    if let Some(word) = mask.get_mut(id as usize / 32) {
        *word |= 1 << (id % 32);
    }
}
