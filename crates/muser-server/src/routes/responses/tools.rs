//! The tools of `/v1/responses`, of which agents send more kinds than functions.
//!
//! The model is shown functions. A custom tool becomes one with a single string; the tools of a namespace become functions
//! with the namespace before their names. [`Toolbox`] remembers what each was, so that a call is given back as the client
//! knows it. What is hosted elsewhere, or of a kind that is not known here, is left out and said once in the log: only a
//! `tool_choice` that names it is refused.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use crate::body::say_once;
use crate::conversation::{allowed_tools, tool_choice};
use crate::custom_tools;
use crate::error::ApiError;
use crate::generation_params::ToolChoice;

/// What a called name stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Called {
    /// The name as the client knows it.
    pub name: String,
    /// The namespace that it is in.
    pub namespace: Option<String>,
    /// Whether its one input is text.
    pub custom: bool,
}

/// The tools of a request.
#[derive(Debug, Clone, Default)]
pub struct Toolbox {
    /// As functions, for the one normaliser.
    pub functions: Vec<Value>,
    /// Where each stood.
    pub places: Vec<String>,
    /// Where those stood that are left out, and why.
    pub left_out: Vec<(String, String)>,
    by_shown_name: HashMap<String, Called>,
}

impl Toolbox {
    /// The tools of a body's list.
    pub fn of(list: &[Value]) -> Result<Self, ApiError> {
        let mut found = Self::default();
        for (index, tool) in list.iter().enumerate() {
            found.add(tool, &format!("tools[{index}]"), None)?;
        }
        Ok(found)
    }

    fn add(&mut self, tool: &Value, place: &str, namespace: Option<(&str, &str)>) -> Result<(), ApiError> {
        let Some(fields) = tool.as_object() else {
            return Err(ApiError::field(place, "A tool must be an object"));
        };
        let kind = match fields.get("type") {
            Some(Value::String(kind)) => kind.as_str(),
            None | Some(Value::Null) => "function",
            Some(_) => return Err(ApiError::field(format!("{place}.type"), "'type' must be a string")),
        };
        match kind {
            "function" => {
                // Some clients send the shape of chat completions.
                let inner = fields.get("function").and_then(Value::as_object).unwrap_or(fields);
                let mut function = Map::new();
                for key in ["name", "description", "parameters", "strict"] {
                    if let Some(value) = inner.get(key).filter(|value| !value.is_null()) {
                        function.insert(key.into(), value.clone());
                    }
                }
                self.push(json!({"type": "function", "function": function}), place, namespace, false)
            }
            "custom" => self.push(custom_tools::as_function(fields), place, namespace, true),
            "namespace" if namespace.is_none() => self.add_namespace(fields, place),
            other => {
                say_once("/v1/responses", "a tool of a kind that is not known here is left out", other);
                let why = format!("left out, tools of type {} are not to be had here", Value::from(other));
                self.left_out.push((place.to_owned(), why));
                Ok(())
            }
        }
    }

    fn add_namespace(&mut self, fields: &Map<String, Value>, place: &str) -> Result<(), ApiError> {
        let Some(name) = fields.get("name").and_then(Value::as_str).filter(|name| !name.is_empty()) else {
            return Err(ApiError::field(format!("{place}.name"), "A namespace needs a name"));
        };
        let Some(tools) = fields.get("tools").and_then(Value::as_array) else {
            return Err(ApiError::field(format!("{place}.tools"), "A namespace needs a list of tools"));
        };
        let about = fields.get("description").and_then(Value::as_str).unwrap_or_default();
        for (index, tool) in tools.iter().enumerate() {
            // What is said of all of them is said once.
            let about = if index == 0 { about } else { "" };
            self.add(tool, &format!("{place}.tools[{index}]"), Some((name, about)))?;
        }
        Ok(())
    }

    fn push(
        &mut self,
        mut tool: Value,
        place: &str,
        namespace: Option<(&str, &str)>,
        custom: bool,
    ) -> Result<(), ApiError> {
        let name = match tool["function"].get("name") {
            Some(Value::String(name)) if !name.is_empty() => name.clone(),
            _ => return Err(ApiError::field(format!("{place}.name"), "A tool needs a name")),
        };
        let shown = shown_name(&name, namespace.map(|(name, _)| name));
        if let Some((_, about)) = namespace {
            let own = tool["function"]["description"].as_str().unwrap_or_default();
            if !about.is_empty() {
                tool["function"]["description"] = format!("{about}\n\n{own}").trim_end().into();
            }
            tool["function"]["name"] = shown.as_str().into();
        }
        let namespace = namespace.map(|(name, _)| name.to_owned());
        self.by_shown_name.insert(shown, Called { name, namespace, custom });
        self.functions.push(tool);
        self.places.push(place.to_owned());
        Ok(())
    }

    /// What a name that the model called stands for.
    pub fn called(&self, shown: &str) -> Called {
        self.by_shown_name.get(shown).cloned().unwrap_or_else(|| Called {
            name: shown.to_owned(),
            namespace: None,
            custom: false,
        })
    }

    /// The name under which the model knows a tool; a name alone finds a tool in a namespace if there is only one such.
    pub fn shown(&self, name: &str, namespace: Option<&str>) -> Option<String> {
        let exact = shown_name(name, namespace);
        if self.by_shown_name.contains_key(&exact) {
            return Some(exact);
        }
        let mut others = self
            .by_shown_name
            .iter()
            .filter(|(_, called)| {
                called.name == name && namespace.is_none_or(|n| called.namespace.as_deref() == Some(n))
            })
            .map(|(shown, _)| shown);
        let only = others.next()?;
        others.next().is_none().then(|| only.clone())
    }

    /// The name of a tool that a history speaks of, which need not be among the tools any more.
    pub fn shown_in_history(&self, name: &str, namespace: Option<&str>) -> String {
        self.shown(name, namespace).unwrap_or_else(|| shown_name(name, namespace))
    }

    /// The body's `tool_choice`, and the tools that it allows if not all.
    pub fn choice(&self, value: Option<&Value>) -> Result<(ToolChoice, Option<Vec<String>>), ApiError> {
        if let Some((choice, tools)) = allowed_tools(value)? {
            let mut names = Vec::new();
            for (index, tool) in tools.iter().enumerate() {
                if tool.get("name").is_none() || !is_ours(tool) {
                    continue;
                }
                names.push(self.named(tool, &format!("tool_choice.tools[{index}]"))?);
            }
            return Ok((choice, Some(names)));
        }
        match value {
            Some(named @ Value::Object(_)) => {
                if !is_ours(named) {
                    return Err(ApiError::unsupported(
                        "tool_choice",
                        format!(
                            "'tool_choice' asks for a tool of type {}, which is not to be had here",
                            named["type"]
                        ),
                    ));
                }
                if named.get("function").is_some() {
                    return Ok((tool_choice(value)?, None));
                }
                Ok((ToolChoice::Named(self.named(named, "tool_choice")?), None))
            }
            other => Ok((tool_choice(other)?, None)),
        }
    }

    fn named(&self, tool: &Value, place: &str) -> Result<String, ApiError> {
        let name = tool["name"].as_str().ok_or_else(|| {
            ApiError::field(place, "'tool_choice' must be auto, none, required or name a function")
        })?;
        self.shown(name, tool["namespace"].as_str()).ok_or_else(|| {
            ApiError::field(
                place,
                format!("'tool_choice' names {}, which is not among the tools", Value::from(name)),
            )
        })
    }
}

/// Whether a choice names something that the model can call.
fn is_ours(tool: &Value) -> bool {
    matches!(tool["type"].as_str(), None | Some("function" | "custom" | "namespace"))
}

fn shown_name(name: &str, namespace: Option<&str>) -> String {
    match namespace {
        None => name.to_owned(),
        // Some namespaces end with what sets them off.
        Some(namespace) if namespace.ends_with(['.', '_', '/', ':', '-']) => format!("{namespace}{name}"),
        Some(namespace) => format!("{namespace}.{name}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn toolbox(tools: Value) -> Result<Toolbox, Option<String>> {
        Toolbox::of(tools.as_array().expect("list")).map_err(|fault| fault.param)
    }

    fn agents() -> Value {
        json!([
            {"type": "function", "name": "shell", "parameters": {}, "strict": false},
            {"type": "namespace", "name": "multi_agent_v1", "description": "Agents.", "tools": [
                {"type": "function", "name": "spawn", "description": "Starts one.", "parameters": {}},
                {"type": "custom", "name": "tell", "description": "Says."},
                {"type": "tool_search"},
            ]},
            {"type": "namespace", "name": "mcp__fs__", "tools": [{"type": "function", "name": "read"}]},
            {"type": "custom", "name": "apply_patch", "format": {"type": "text"}},
            {"type": "web_search"}, {"type": "tool_search"}, {"type": "mcp", "server_label": "x"},
            {"type": "local_shell"}, {"type": "apply_patch"}, {"type": "of_next_year"},
        ])
    }

    #[test]
    fn kinds_of_all_sorts_become_functions_or_nothing() {
        let tools = toolbox(agents()).expect("valid");
        let names: Vec<&str> =
            tools.functions.iter().filter_map(|tool| tool["function"]["name"].as_str()).collect();
        assert_eq!(
            names,
            ["shell", "multi_agent_v1.spawn", "multi_agent_v1.tell", "mcp__fs__read", "apply_patch"]
        );
        assert_eq!(tools.places[1], "tools[1].tools[0]");
        let left_out: Vec<&str> = tools.left_out.iter().map(|(place, _)| place.as_str()).collect();
        assert_eq!(
            left_out,
            ["tools[1].tools[2]", "tools[4]", "tools[5]", "tools[6]", "tools[7]", "tools[8]", "tools[9]"]
        );
        assert_eq!(tools.functions[1]["function"]["description"], "Agents.\n\nStarts one.");
        let called = |name: &str| {
            let called = tools.called(name);
            (called.name, called.namespace, called.custom)
        };
        assert_eq!(called("multi_agent_v1.tell"), ("tell".into(), Some("multi_agent_v1".into()), true));
        assert_eq!(called("shell"), ("shell".into(), None, false));
        assert_eq!(called("never"), ("never".into(), None, false));
    }

    #[test]
    fn a_history_may_name_a_tool_with_or_without_its_namespace() {
        let tools = toolbox(agents()).expect("valid");
        assert_eq!(tools.shown_in_history("spawn", Some("multi_agent_v1")), "multi_agent_v1.spawn");
        assert_eq!(tools.shown_in_history("spawn", None), "multi_agent_v1.spawn");
        assert_eq!(tools.shown_in_history("gone", Some("old")), "old.gone");
        assert_eq!(tools.shown_in_history("shell", None), "shell");
    }

    #[test]
    fn a_choice_must_be_one_that_can_be_kept() {
        let tools = toolbox(agents()).expect("valid");
        let choose = |choice: Value| tools.choice(Some(&choice)).map_err(|fault| fault.param);
        let named = |name: &str| Ok((ToolChoice::Named(name.into()), None));
        assert_eq!(choose(json!("required")), Ok((ToolChoice::Required, None)));
        assert_eq!(choose(json!({"type": "function", "name": "spawn"})), named("multi_agent_v1.spawn"));
        assert_eq!(choose(json!({"type": "custom", "name": "apply_patch"})), named("apply_patch"));
        let allowed = json!({"type": "allowed_tools", "mode": "required", "tools": [
            {"type": "function", "name": "shell"}, {"type": "mcp", "server_label": "x"}]});
        assert_eq!(choose(allowed), Ok((ToolChoice::Required, Some(vec!["shell".into()]))));
        for (choice, param) in [
            (json!({"type": "web_search"}), "tool_choice"),
            (json!({"type": "apply_patch"}), "tool_choice"),
            (json!({"type": "mcp", "server_label": "x", "name": "y"}), "tool_choice"),
            (json!({"type": "function", "name": "no"}), "tool_choice"),
            (json!({"type": "allowed_tools", "mode": "perhaps", "tools": []}), "tool_choice.mode"),
            (
                json!({"type": "allowed_tools", "tools": [{"type": "function", "name": "no"}]}),
                "tool_choice.tools[0]",
            ),
        ] {
            assert_eq!(choose(choice.clone()), Err(Some(param.into())), "{choice}");
        }
    }

    #[test]
    fn what_is_no_tool_is_named() {
        for (tool, param) in [
            (json!(3), "tools[0]"),
            (json!({"type": 3}), "tools[0].type"),
            (json!({"type": "function"}), "tools[0].name"),
            (json!({"type": "custom", "name": ""}), "tools[0].name"),
            (json!({"type": "namespace", "tools": []}), "tools[0].name"),
            (json!({"type": "namespace", "name": "n"}), "tools[0].tools"),
            (json!({"type": "namespace", "name": "n", "tools": [{}]}), "tools[0].tools[0].name"),
        ] {
            assert_eq!(toolbox(json!([tool])).err(), Some(Some(param.into())));
        }
    }
}
