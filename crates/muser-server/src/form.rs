//! The form of a turn: what `response_format`, `grammar`, `tools` and `tool_choice` ask for, as a constraint on tokens.
//!
//! The constraint itself is `muser-text`'s: reasoning is free, the answer follows its grammar, calls follow their tools'
//! schemas. Here the API's words become its rules. All choices' constraints are made before the request is handed in,
//! so that no grammar is compiled on the engine's thread and a bad one is a 400.

use std::sync::{Arc, Mutex};

use muser_engine::{Constraint, ConstraintFactory, TokenMask};
use muser_text::TextError;
use muser_text::grammar::{AnswerRule, Grammar, TurnPlan, TurnRules, TurnStart};
use muser_text::{OutputMode, OutputOptions};
use serde_json::Value;

use crate::conversation::{sentence, text_fault};
use crate::error::ApiError;
use crate::generation_params::{Conversation, GenerationParams, Prompt, ResponseFormat, ToolChoice};
use crate::masks::MaskedTurn;
use crate::notice::Notice;
use crate::text::TextPipeline;
use crate::work_room::still_wanted;

/// The constraint for `work`, if it asks for one, and what of its tools is not kept. `limit`: where the output
/// is cut off.
pub(crate) fn constraint(
    text: &TextPipeline,
    work: &GenerationParams,
    options: &OutputOptions,
    limit: usize,
) -> Result<(Option<ConstraintFactory>, Notice), ApiError> {
    let Some(rules) = rules(work, options, limit) else {
        return Ok((at_least(text, work, options), Notice::new(&work.left_out, std::iter::empty())));
    };
    let plan = TurnPlan::new_while(text.grammars()?, &rules, &still_wanted)
        .map_err(|fault| form_fault(&fault, work))?;
    let left_out = plan.left_out().into_iter().map(|found| {
        let field = schema_field(work, &found.tool, &found.path);
        (work.places.place(&field), found.what)
    });
    let notice = Notice::new(&work.left_out, left_out);
    let plan = Arc::new(plan);
    let made = Mutex::new((0..work.choices).map(|_| Some(MaskedTurn::new(plan.begin()))).collect::<Vec<_>>());
    let factory: ConstraintFactory = Box::new(move |choice| {
        let turn = made.lock().ok().and_then(|mut made| made.get_mut(choice as usize)?.take());
        // `None` only if the engine asked twice for one choice, which it does not.
        Box::new(turn.unwrap_or_else(MaskedTurn::lost))
    });
    Ok((Some(factory), notice))
}

/// A fault of a form or of a tool's schema as an answer that names the place, as [`crate::places::Places`] takes it.
fn form_fault(fault: &TextError, work: &GenerationParams) -> ApiError {
    match fault {
        TextError::Schema { tool: Some(tool), path, what } => {
            let field = schema_field(work, tool, path);
            let tool = Value::from(tool.as_str());
            ApiError::field(&field, format!("The schema of tool {tool} is not usable: {what} (at {field})"))
        }
        TextError::Schema { tool: None, path, what } => {
            let field = joined("response_format", path);
            ApiError::field(&field, format!("The JSON schema is not usable: {what} (at {field})"))
        }
        TextError::Grammar { .. } => ApiError::field("response_format", sentence(fault)),
        other => text_fault(other),
    }
}

/// Where a place of a tool's schema is, as [`crate::places::Places`] takes it.
fn schema_field(work: &GenerationParams, tool: &str, path: &str) -> String {
    let Prompt::Chat(conversation) = &work.prompt else { return "tools".into() };
    match conversation.tool_names().position(|name| name == tool) {
        Some(index) => joined(&format!("tools[{index}].function.parameters"), path),
        None => "tools".into(),
    }
}

fn joined(field: &str, path: &str) -> String {
    if path.is_empty() { field.to_owned() } else { format!("{field}.{path}") }
}

fn rules(work: &GenerationParams, options: &OutputOptions, limit: usize) -> Option<TurnRules> {
    let answer = match &work.form {
        ResponseFormat::Free => AnswerRule::Free,
        ResponseFormat::JsonObject => AnswerRule::Grammar(Grammar::JsonObject),
        ResponseFormat::JsonSchema(schema) => AnswerRule::Grammar(Grammar::JsonSchema(schema.clone())),
        ResponseFormat::Grammar(grammar) => AnswerRule::Grammar(notation(grammar)),
        ResponseFormat::Regex(pattern) => AnswerRule::Grammar(Grammar::Regex(pattern.clone())),
        ResponseFormat::Choice(choices) => AnswerRule::Grammar(Grammar::Choice(choices.clone())),
    };
    let asked = match &work.prompt {
        Prompt::Chat(conversation) => Some(conversation.as_ref()),
        _ => None,
    };
    let conversation = asked.filter(|conversation| !conversation.tools.is_empty());
    // "none" is a choice to be kept: tools that were not shown are sometimes called all the same.
    let no_calls = asked.is_some_and(|found| found.tool_choice == ToolChoice::None);
    if answer == AnswerRule::Free && conversation.is_none() && !no_calls {
        return None;
    }
    let must_call = conversation.is_some_and(|conversation| {
        matches!(conversation.tool_choice, ToolChoice::Required | ToolChoice::Named(_))
    });
    Some(TurnRules {
        start: if options.mode == OutputMode::Chat { TurnStart::Header } else { TurnStart::Answer },
        answer: if must_call { AnswerRule::Forbidden } else { answer },
        tools: conversation.map(callable).unwrap_or_default(),
        strict_tools: conversation.map(|conversation| conversation.strict_tools.clone()).unwrap_or_default(),
        parallel_calls: conversation.is_some_and(|conversation| conversation.parallel_calls),
        no_reasoning: asked.is_some_and(|conversation| conversation.strength.as_deref() == Some("none")),
        max_tokens: Some(limit),
    })
}

fn callable(conversation: &Conversation) -> Vec<Value> {
    let chosen = |tool: &&Value| match (&conversation.tool_choice, &conversation.allowed) {
        (ToolChoice::Named(name), _) => tool["function"]["name"] == name.as_str(),
        (_, Some(names)) => names.iter().any(|name| tool["function"]["name"] == name.as_str()),
        (_, None) => true,
    };
    conversation.tools.iter().filter(chosen).cloned().collect()
}

/// The constraint for a text of at least some tokens, if that is all that is asked for.
fn at_least(
    text: &TextPipeline,
    work: &GenerationParams,
    options: &OutputOptions,
) -> Option<ConstraintFactory> {
    let (left, ends) = (work.min_tokens, text.ending_ids(options));
    if left == 0 {
        return None;
    }
    Some(Box::new(move |_| Box::new(AtLeast { left, ends: ends.clone() })))
}

/// Clients send both notations in one field. GBNF defines with `::=`, Lark with `:`; only the first definition tells, for literals
/// may hold anything.
fn notation(grammar: &str) -> Grammar {
    let says_nothing =
        |line: &&str| ["#", "//", "%"].iter().any(|start| line.trim_start().starts_with(start));
    let defines = grammar.lines().filter(|line| !says_nothing(line)).find_map(|line| line.split_once(':'));
    if defines.is_some_and(|(_, rest)| rest.starts_with(":=")) {
        Grammar::Gbnf(grammar.to_owned())
    } else {
        Grammar::Lark(grammar.to_owned())
    }
}

/// Keeps the model from ending its turn for some tokens.
struct AtLeast {
    left: u32,
    ends: Vec<u32>,
}

impl Constraint for AtLeast {
    fn mask(&mut self, allowed: &mut TokenMask) -> bool {
        if self.left == 0 {
            return false;
        }
        allowed.allow_all();
        self.ends.iter().for_each(|id| allowed.forbid(*id));
        true
    }

    fn commit(&mut self, _: u32) -> Result<(), String> {
        self.left = self.left.saturating_sub(1);
        Ok(())
    }

    fn fork(&self) -> Option<Box<dyn Constraint>> {
        Some(Box::new(AtLeast { left: self.left, ends: self.ends.clone() }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conversation::conversation;
    use serde_json::json;

    fn rules_for(choice: ToolChoice, form: ResponseFormat) -> Option<TurnRules> {
        let tools = ["f", "g"].map(|name| json!({"function": {"name": name}}));
        let messages = [json!({"role": "user", "content": "a"})];
        let conversation = conversation(&messages, &tools, choice).expect("valid");
        let mut work = GenerationParams::new(Prompt::Chat(Box::new(conversation)));
        work.form = form;
        rules(&work, &OutputOptions { mode: OutputMode::Chat, ..OutputOptions::default() }, 100)
    }

    #[test]
    fn a_choice_of_tools_decides_who_may_be_called() {
        let auto = rules_for(ToolChoice::Auto, ResponseFormat::Free).expect("rules");
        assert_eq!((auto.tools.len(), auto.answer), (2, AnswerRule::Free));
        let required = rules_for(ToolChoice::Required, ResponseFormat::Free).expect("rules");
        assert_eq!((required.tools.len(), required.answer), (2, AnswerRule::Forbidden));
        let named = rules_for(ToolChoice::Named("g".into()), ResponseFormat::Free).expect("rules");
        assert_eq!(named.tools[0]["function"]["name"], "g");
        assert_eq!(named.tools.len(), 1);
        let none = rules_for(ToolChoice::None, ResponseFormat::Free).expect("rules");
        assert_eq!((none.tools.len(), none.answer), (0, AnswerRule::Free));
        assert_eq!(none.max_tokens, Some(100));
        let json = rules_for(ToolChoice::None, ResponseFormat::JsonObject).expect("rules");
        assert_eq!(json.answer, AnswerRule::Grammar(Grammar::JsonObject));
    }

    #[test]
    fn a_turn_may_end_after_the_least_number_of_tokens() {
        let mut constraint = AtLeast { left: 2, ends: vec![5] };
        for expected in [true, true, false] {
            let mut allowed = TokenMask::new(40);
            assert_eq!(constraint.mask(&mut allowed), expected);
            assert_eq!((allowed.allows(5), allowed.allows(6)), (false, expected));
            constraint.commit(6).expect("taken");
        }
    }

    #[test]
    fn faults_name_the_place_in_the_request() {
        let tools = [json!({"type": "function", "function": {"name": "f"}}), json!({"name": "g"})];
        let messages = [json!({"role": "user", "content": "a"})];
        let mut work = GenerationParams::new(Prompt::Chat(Box::new(
            conversation(&messages, &tools, ToolChoice::Auto).expect("valid"),
        )));
        let check = |work: &GenerationParams, tool: Option<&str>, path: &str, expected: (&str, &str)| {
            let fault = TextError::Schema {
                tool: tool.map(str::to_owned),
                path: path.into(),
                what: "it is odd".into(),
            };
            let fault = work.places.locate(form_fault(&fault, work));
            assert_eq!((fault.param.as_deref(), fault.message.as_str()), (Some(expected.0), expected.1));
        };
        let plain = work.places.clone();
        work.places.tools = vec!["tools[0]".into(), "tools[3]".into()];
        work.places.schema = Some("input_schema");
        check(
            &work,
            Some("g"),
            "properties.a",
            (
                "tools[3].input_schema.properties.a",
                "The schema of tool \"g\" is not usable: it is odd (at tools[3].input_schema.properties.a)",
            ),
        );
        work.places = plain;
        check(
            &work,
            Some("f"),
            "",
            (
                "tools[0].function.parameters",
                "The schema of tool \"f\" is not usable: it is odd (at tools[0].function.parameters)",
            ),
        );
        work.places.form = "text.format.schema".into();
        check(
            &work,
            None,
            "items",
            (
                "text.format.schema.items",
                "The JSON schema is not usable: it is odd (at text.format.schema.items)",
            ),
        );
        let grammar = TextError::Grammar { kind: "the regular expression", what: "no".into() };
        assert_eq!(form_fault(&grammar, &work).message, "The regular expression is not usable: no");
    }

    #[test]
    fn both_notations_are_told_apart() {
        assert_eq!(notation("root ::= \"a\""), Grammar::Gbnf("root ::= \"a\"".into()));
        assert_eq!(notation("start: \"a\""), Grammar::Lark("start: \"a\"".into()));
        for lark in
            ["start: \"::=\"", "// a ::= b\n%ignore /[ ::=]/\nstart: /x ::= y/", "", "start\n: \"::=\""]
        {
            assert_eq!(notation(lark), Grammar::Lark(lark.into()), "{lark}");
        }
        for gbnf in ["# a: b\nroot ::= \": x\"", "\n  root\n ::= \"a\"", "// x: y\nroot ::= [:=]"] {
            assert_eq!(notation(gbnf), Grammar::Gbnf(gbnf.into()), "{gbnf}");
        }
    }
}
