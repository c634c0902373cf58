//! Where the parts of a prompt stood in the request.
//!
//! Every family of routes is brought into one shape before it is checked and rendered, and what is wrong with it shows
//! there: `messages[3].content`. The client sent something else, perhaps `input[5].content`, with the instructions in a
//! field of their own and tools that were left out. [`Places`] remembers, so that `param` and the sentence name what the
//! client wrote.

use crate::error::ApiError;

/// Places of messages, tools and form in a body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Places {
    /// The field with the prompt.
    pub prompt: &'static str,
    /// Of each message; those beyond the list stand where they seem to.
    pub messages: Vec<String>,
    /// Likewise of each tool.
    pub tools: Vec<String>,
    /// The name of a tool's schema where tools are flat, without a `function` in them.
    pub schema: Option<&'static str>,
    /// The field that asked for a form.
    pub form: String,
}

impl Default for Places {
    fn default() -> Self {
        Self {
            prompt: "messages",
            messages: Vec::new(),
            tools: Vec::new(),
            schema: None,
            form: "response_format".into(),
        }
    }
}

impl Places {
    /// The fault with the client's name for the field.
    #[must_use]
    pub fn locate(&self, mut fault: ApiError) -> ApiError {
        if let Some(param) = fault.param.take() {
            let place = self.place(&param);
            if place != param {
                for (open, close) in [("'", "'"), ("(at ", ")")] {
                    let found = format!("{open}{param}{close}");
                    fault.message = fault.message.replace(&found, &format!("{open}{place}{close}"));
                }
            }
            fault.param = Some(place);
        }
        fault
    }

    /// The client's name for a field.
    pub fn place(&self, param: &str) -> String {
        if param == "messages" || param == self.prompt {
            // One of several prompts says which.
            let only = self.messages.first().filter(|place| place.starts_with("prompt["));
            return only.map_or_else(|| self.prompt.to_owned(), Clone::clone);
        }
        if let Some(rest) = param.strip_prefix("response_format") {
            return format!("{}{rest}", self.form);
        }
        if let Some((place, rest)) = entry(param, "messages[", &self.messages) {
            return format!("{place}{rest}");
        }
        if let Some((place, rest)) = entry(param, "tools[", &self.tools) {
            return match (self.schema, rest.strip_prefix(".function")) {
                (Some(schema), Some(rest)) => match rest.strip_prefix(".parameters") {
                    Some(rest) => format!("{place}.{schema}{rest}"),
                    None => format!("{place}{rest}"),
                },
                _ => format!("{place}{rest}"),
            };
        }
        param.to_owned()
    }
}

/// The place of the entry that `param` speaks of, and what follows it.
fn entry<'a>(param: &'a str, list: &str, places: &'a [String]) -> Option<(&'a str, &'a str)> {
    let (index, rest) = param.strip_prefix(list)?.split_once(']')?;
    Some((places.get(index.parse::<usize>().ok()?)?, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_names_what_the_client_wrote() {
        let places = Places {
            prompt: "input",
            messages: vec!["instructions".into(), "input[4]".into()],
            tools: vec!["tools[2].tools[0]".into()],
            schema: Some("input_schema"),
            form: "text.format.schema".into(),
        };
        let check = |param: &str, expected: &str| {
            let fault = ApiError::field(param, format!("Invalid value for '{param}': no"));
            let fault = places.locate(fault);
            assert_eq!(fault.param.as_deref(), Some(expected));
            assert_eq!(fault.message, format!("Invalid value for '{expected}': no"));
        };
        check("messages", "input");
        check("messages[0].content", "instructions.content");
        check("messages[1].content[3].type", "input[4].content[3].type");
        check("messages[9].role", "messages[9].role");
        check("tools[0].function.parameters.properties.a", "tools[2].tools[0].input_schema.properties.a");
        check("tools[0].function.name", "tools[2].tools[0].name");
        check("response_format", "text.format.schema");
        check("top_p", "top_p");
        let plain = Places::default().locate(ApiError::field("tools[1].function.parameters", "x"));
        assert_eq!(plain.param.as_deref(), Some("tools[1].function.parameters"));
    }
}
