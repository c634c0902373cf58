//! What a turn may hold, compiled: shared by all choices of a request, and by whoever asks for the same again.

use super::cache::Compiled;
use super::engine::GrammarEngine;
use super::{Grammar, Wanted};
use crate::ChannelTokens;
use crate::error::TextError;
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
    /// The names of tools whose schemas must be kept as they are. Of others' schemas is kept what can be.
    pub strict_tools: Vec<String>,
    /// May more than one call be made?
    pub parallel_calls: bool,
    /// The turn holds no reasoning.
    pub no_reasoning: bool,
    /// Where the turn is cut off. A turn that must be a call reasons only as long as a call still fits.
    pub max_tokens: Option<usize>,
}

/// Something that a tool's schema says and that is not kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftOut {
    /// The tool's name.
    pub tool: String,
    /// Where in its schema, as in `properties.a.items`; empty at its root.
    pub path: String,
    /// What.
    pub what: String,
}

/// A turn's rules, compiled.
#[derive(Debug)]
pub struct TurnPlan {
    pub(super) engine: Arc<GrammarEngine>,
    pub(super) channels: Option<ChannelTokens>,
    /// The token that ends the turn.
    pub(super) end: u32,
    pub(super) start: TurnStart,
    pub(super) answer: PlannedAnswer,
    pub(super) tools: Vec<PlannedTool>,
    pub(super) parallel_calls: bool,
    /// Tokens of the turn after which no reasoning begins, and what there is ends. `None`: as long as the model likes.
    pub(super) reasoning_until: Option<usize>,
}

#[derive(Clone, Debug)]
pub(super) enum PlannedAnswer {
    Free,
    Grammar(Arc<Compiled>),
    Forbidden,
}

#[derive(Debug)]
pub(super) struct PlannedTool {
    pub(super) name: String,
    pub(super) call: Arc<Compiled>,
}

impl TurnPlan {
    /// Compiles all that the rules name, so that a bad grammar shows here.
    pub fn new(engine: Arc<GrammarEngine>, rules: &TurnRules) -> Result<TurnPlan, TextError> {
        TurnPlan::new_while(engine, rules, &|| true)
    }

    /// The same for as long as somebody waits for it.
    ///
    /// # Errors
    /// [`TextError::Abandoned`] soon after nobody does.
    pub fn new_while(
        engine: Arc<GrammarEngine>,
        rules: &TurnRules,
        wanted: Wanted<'_>,
    ) -> Result<TurnPlan, TextError> {
        let channels = engine.tokenizer.channels();
        let header = rules.start == TurnStart::Header;
        if header && channels.is_none() {
            return Err(TextError::vocabulary(
                "tokenizer.ggml.tokens",
                "the markers <|start|>, <|message|>, <|eom|> and <|eot|>",
                "a vocabulary without them",
            ));
        }
        if rules.answer == AnswerRule::Forbidden && (rules.tools.is_empty() || !header) {
            return Err(TextError::request("tool_choice", "tools to choose from", "none"));
        }
        let Some(end) = channels.map(|channels| channels.end_of_turn).or(engine.tokenizer.eos()) else {
            return Err(TextError::vocabulary(
                "tokenizer.ggml.eos_token_id",
                "a token that ends text",
                "no such key",
            ));
        };
        let tools = rules.tools.iter().filter_map(|tool| planned(&engine, rules, tool, wanted));
        let tools: Vec<PlannedTool> = tools.collect::<Result<_, _>>()?;
        let answer = match &rules.answer {
            AnswerRule::Free => PlannedAnswer::Free,
            AnswerRule::Grammar(grammar) => PlannedAnswer::Grammar(engine.compiled(grammar, wanted)?),
            AnswerRule::Forbidden => PlannedAnswer::Forbidden,
        };
        let parallel_calls = rules.parallel_calls;
        let reasoning_until = reasoning_until(rules, &tools);
        Ok(TurnPlan {
            engine,
            channels,
            end,
            start: rules.start,
            answer,
            tools,
            parallel_calls,
            reasoning_until,
        })
    }

    /// What of the tools' schemas is not kept.
    pub fn left_out(&self) -> Vec<LeftOut> {
        let of_tool = |tool: &PlannedTool| {
            let left_out = |remark: &super::clean::Remark| LeftOut {
                tool: tool.name.clone(),
                path: remark.path.clone(),
                what: remark.what.clone(),
            };
            tool.call.left_out.iter().map(left_out).collect::<Vec<_>>()
        };
        self.tools.iter().flat_map(of_tool).collect()
    }
}

fn planned(
    engine: &GrammarEngine,
    rules: &TurnRules,
    tool: &Value,
    wanted: Wanted<'_>,
) -> Option<Result<PlannedTool, TextError>> {
    let function = tool.get("function").unwrap_or(tool);
    let name = function.get("name")?.as_str()?.to_owned();
    let strict = rules.strict_tools.contains(&name);
    let parameters = function.get("parameters").unwrap_or(&Value::Null);
    let call = engine.compiled_call(&name, parameters, strict, wanted);
    Some(call.map(|call| PlannedTool { name, call }))
}

/// A turn that must be a call has to leave room for it: half of what there is, or more where the shortest call is longer.
fn reasoning_until(rules: &TurnRules, tools: &[PlannedTool]) -> Option<usize> {
    if rules.no_reasoning {
        return Some(0);
    }
    let limit = rules.max_tokens.filter(|_| rules.answer == AnswerRule::Forbidden)?;
    let least = tools.iter().map(|tool| tool.call.least_tokens).max().unwrap_or(0);
    Some(limit.saturating_sub(least.max(limit / 2)))
}
