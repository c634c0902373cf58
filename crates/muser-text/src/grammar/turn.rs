//! A constraint over a whole turn of the model: headers, reasoning, answer, tool calls.
//!
//! Reasoning stays free. What is constrained is the structure (whom a message may be for, and that the turn does not end
//! before there is what was asked for), the answer by its grammar, and the arguments of calls by their tools' schemas.
//! Tokens of headers follow from the allowed header texts; a grammar works only inside bodies, from their first token.

use super::engine::GrammarEngine;
use super::plan::{PlannedAnswer, TurnPlan, TurnRules, TurnStart};
use super::token_constraint::TokenConstraint;
use crate::error::TextError;
use crate::{ChannelTokens, TokenKind};
use std::sync::Arc;

/// Follows one turn. [`Self::mask`] and [`Self::commit`] take turns.
pub struct TurnConstraint {
    plan: Arc<TurnPlan>,
    /// Tokens so far.
    used: usize,
    /// No answer may follow: one that follows a grammar is there, or would have to wait for what calls give.
    answered: bool,
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
    /// In a header.
    Header(Header),
    Reasoning,
    FreeAnswer,
    Answer(Box<TokenConstraint>),
    Call(Box<TokenConstraint>),
    /// The turn is over but for its last token.
    Ending,
    Ended,
}

#[derive(Clone, Debug, Default)]
struct Header {
    /// After `<|start|>`, so that the role is part of it.
    opened: bool,
    text: Vec<u8>,
    /// Decided where it begins, so that what was begun can be finished.
    may_reason: bool,
}

/// Whom a message is for.
#[derive(Clone, Copy, Debug)]
enum Recipient {
    Itself,
    User,
    /// The tool with this index.
    Tool(usize),
}

const SELF: &str = "self";
const USER: &str = "user";

impl TurnPlan {
    /// A constraint for one turn.
    pub fn begin(self: &Arc<Self>) -> TurnConstraint {
        TurnConstraint::begin(Arc::clone(self))
    }
}

impl TurnConstraint {
    /// A constraint for one turn. All grammars of the rules are compiled here, so that a bad one shows.
    pub fn new(engine: Arc<GrammarEngine>, rules: &TurnRules) -> Result<TurnConstraint, TextError> {
        Ok(TurnConstraint::begin(Arc::new(TurnPlan::new(engine, rules)?)))
    }

    fn begin(plan: Arc<TurnPlan>) -> TurnConstraint {
        let mut constraint = TurnConstraint { plan, used: 0, answered: false, state: State::Opening };
        match constraint.plan.start {
            TurnStart::Header => constraint.open_header(false),
            TurnStart::Answer => constraint.open_body(Recipient::User),
        }
        constraint
    }

    /// The tokens that may come next: bit `i % 32` of word `i / 32` is token `i`.
    pub fn mask(&mut self) -> Result<Vec<u32>, TextError> {
        let goes_on = self.may_go_on();
        let plan = &self.plan;
        let (start, message) =
            (plan.channels.map(|channels| channels.start), plan.channels.map(|channels| channels.message));
        let end_of_message = plan.channels.map(|channels| channels.end_of_message);
        let mut ids = Vec::new();
        match &mut self.state {
            State::Reasoning if plan.may_reason(self.used) => return Ok(plan.engine.reasoning.clone()),
            State::Reasoning => ids.extend(end_of_message),
            State::FreeAnswer => return Ok(plan.engine.answer.clone()),
            State::Answer(constraint) | State::Call(constraint) => {
                let mut mask = constraint.mask()?;
                if let Some(id) = end_of_message.filter(|_| goes_on && constraint.can_end()) {
                    allow(&mut mask, id);
                }
                return Ok(mask);
            }
            State::Ending | State::Ended => ids.push(plan.end),
            State::Opening => ids.extend(start),
            State::Header(header) => {
                let vocabulary = plan.engine.tokenizer.vocabulary();
                for (text, _) in plan.headers(header, self.answered) {
                    let Some(rest) = text.as_bytes().strip_prefix(header.text.as_slice()) else { continue };
                    if rest.is_empty() {
                        ids.extend(message);
                    }
                    ids.extend((1..=rest.len()).filter_map(|len| vocabulary.find(&rest[..len])));
                }
            }
        }
        let mut mask = vec![0; plan.engine.tokenizer.vocab_size().div_ceil(32)];
        for id in ids {
            allow(&mut mask, id);
        }
        Ok(mask)
    }

    /// Takes the token that was chosen. One that the mask does not allow is an error.
    pub fn commit(&mut self, id: u32) -> Result<(), TextError> {
        let plan = Arc::clone(&self.plan);
        let is = |marker: fn(ChannelTokens) -> u32| plan.channels.is_some_and(|found| marker(found) == id);
        let (is_start, is_message) = (is(|found| found.start), is(|found| found.message));
        let is_end_of_message = is(|found| found.end_of_message);
        let is_end = id == plan.end;
        let is_text = plan.engine.tokenizer.token_kind(id) == Some(TokenKind::Normal);
        let goes_on = self.may_go_on();
        self.used += 1;
        match &mut self.state {
            State::Opening if is_start => self.open_header(true),
            State::Header(header) if is_message => {
                let headers = plan.headers(header, self.answered);
                let found = headers.iter().find(|(text, _)| text.as_bytes() == header.text);
                let Some((_, recipient)) = found else { return Err(not_allowed(id)) };
                let recipient = *recipient;
                self.open_body(recipient);
            }
            State::Header(header) if is_text => {
                header.text.extend_from_slice(plan.engine.tokenizer.token_bytes(id).unwrap_or_default());
                let headers = plan.headers(header, self.answered);
                if !headers.iter().any(|(text, _)| text.as_bytes().starts_with(&header.text)) {
                    return Err(not_allowed(id));
                }
            }
            State::Reasoning if is_end_of_message => self.state = State::Opening,
            State::Reasoning | State::FreeAnswer if is_text => {}
            State::FreeAnswer | State::Ending if is_end => self.state = State::Ended,
            // The model would go on, but there is nobody to write to.
            State::FreeAnswer if is_end_of_message => {
                self.state = if goes_on { State::Opening } else { State::Ending };
            }
            State::Answer(constraint) if is_end || (is_end_of_message && goes_on) => {
                if !constraint.can_end() {
                    return Err(not_allowed(id));
                }
                self.answered = true;
                self.state = if is_end { State::Ended } else { State::Opening };
            }
            State::Call(constraint) if is_end || (is_end_of_message && goes_on) => {
                if !constraint.can_end() {
                    return Err(not_allowed(id));
                }
                self.answered |= matches!(plan.answer, PlannedAnswer::Grammar(_));
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
            State::Header(header) => State::Header(header.clone()),
            State::Reasoning => State::Reasoning,
            State::FreeAnswer => State::FreeAnswer,
            State::Answer(constraint) => State::Answer(Box::new(constraint.fork())),
            State::Call(constraint) => State::Call(Box::new(constraint.fork())),
            State::Ending => State::Ending,
            State::Ended => State::Ended,
        };
        TurnConstraint { plan: Arc::clone(&self.plan), state, ..*self }
    }

    /// Do [`Self::commit`] and [`Self::mask`] take next to no time here? Inside a grammar they may take long, and where one
    /// begins its tables are copied.
    pub fn is_free(&self) -> bool {
        !matches!(self.state, State::Header(_) | State::Answer(_) | State::Call(_))
    }

    /// Has the turn ended?
    pub fn is_done(&self) -> bool {
        matches!(self.state, State::Ended)
    }

    /// May another message follow this one?
    fn may_go_on(&self) -> bool {
        match self.state {
            State::Call(_) => self.plan.parallel_calls,
            // Without tools an answer is the end of a turn.
            _ => !self.plan.tools.is_empty() && self.plan.start == TurnStart::Header,
        }
    }

    fn open_header(&mut self, opened: bool) {
        let may_reason = self.plan.may_reason(self.used);
        self.state = State::Header(Header { opened, text: Vec::new(), may_reason });
    }

    fn open_body(&mut self, recipient: Recipient) {
        self.state = match (recipient, &self.plan.answer) {
            (Recipient::Itself, _) => State::Reasoning,
            (Recipient::User, PlannedAnswer::Grammar(compiled)) => State::Answer(Box::new(compiled.fresh())),
            (Recipient::User, PlannedAnswer::Free | PlannedAnswer::Forbidden) => State::FreeAnswer,
            (Recipient::Tool(index), _) => State::Call(Box::new(self.plan.tools[index].call.fresh())),
        };
    }
}

impl TurnPlan {
    /// May the model reason after so many tokens of the turn?
    fn may_reason(&self, used: usize) -> bool {
        self.reasoning_until.is_none_or(|until| used < until)
    }

    /// The headers that may be written, with their recipients.
    fn headers(&self, header: &Header, answered: bool) -> Vec<(String, Recipient)> {
        let role = if header.opened { "assistant" } else { "" };
        let mut headers = Vec::with_capacity(self.tools.len() + 2);
        let mut add = |name: &str, recipient: Recipient| {
            headers.push((format!("{role} to={name}"), recipient));
        };
        if header.may_reason {
            add(SELF, Recipient::Itself);
        }
        if !matches!(self.answer, PlannedAnswer::Forbidden) && !answered {
            add(USER, Recipient::User);
        }
        for (index, tool) in self.tools.iter().enumerate() {
            add(&tool.name, Recipient::Tool(index));
        }
        headers
    }
}

fn not_allowed(id: u32) -> TextError {
    TextError::Grammar { kind: "the turn", what: format!("token {id} may not come here") }
}

fn allow(mask: &mut [u32], id: u32) {
    if let Some(word) = mask.get_mut(id as usize / 32) {
        *word |= 1 << (id % 32);
    }
}
