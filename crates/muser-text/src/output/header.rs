//! Message headers in the model's output: `assistant to=NAME`, in the variants that models really write.

/// Longest recipient, in bytes: what goes on longer is not a header.
pub(crate) const MAX_RECIPIENT: usize = 256;

/// Whom a message is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Recipient<'a> {
    /// The model itself: reasoning.
    Itself,
    /// The user: the answer.
    User,
    /// A tool.
    Tool(&'a str),
}

impl Recipient<'_> {
    pub(crate) fn of_name(name: &str) -> Recipient<'_> {
        match name {
            "self" => Recipient::Itself,
            "" | "user" => Recipient::User,
            tool => Recipient::Tool(tool),
        }
    }
}

/// What the text of a header so far can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reading<'a> {
    /// A whole header or the beginning of one, for this recipient as far as it is known.
    Header(Recipient<'a>),
    /// Not a header: text without markup. What follows a leading `assistant`, if there is one.
    Text {
        /// Was there a leading `assistant`?
        assistant: bool,
        /// The text.
        rest: &'a str,
    },
}

const ROLE: &str = "assistant";
const TO: &str = "to=";

/// Reads header text: optional `assistant`, optional `to=NAME`, white space around both.
pub(crate) fn read(text: &str) -> Reading<'_> {
    let trimmed = text.trim_start();
    if ROLE.starts_with(trimmed) {
        return Reading::Header(Recipient::User);
    }
    let (assistant, after_role) = match trimmed.strip_prefix(ROLE) {
        Some(rest) if rest.is_empty() || rest.starts_with(char::is_whitespace) => (true, rest),
        _ => (false, trimmed),
    };
    let rest = after_role.trim_start();
    let not_a_header = Reading::Text { assistant, rest: if assistant { rest } else { text } };
    if TO.starts_with(rest) {
        return Reading::Header(Recipient::User);
    }
    let Some(name) = rest.strip_prefix(TO) else { return not_a_header };
    let (name, after) = name.split_once(char::is_whitespace).unwrap_or((name, ""));
    if name.len() > MAX_RECIPIENT || !after.trim().is_empty() {
        return not_a_header;
    }
    Reading::Header(Recipient::of_name(name))
}

/// Where in a body's text a header without its opening could begin: ` to=NAME` at the end, or the start of it.
pub(crate) fn tail_start(text: &str) -> usize {
    const MARK: &str = " to=";
    if let Some(at) = text.rfind(MARK) {
        let name = &text[at + MARK.len()..];
        if name.len() <= MAX_RECIPIENT && !name.contains(char::is_whitespace) {
            return at;
        }
    }
    let prefix = (1..MARK.len()).rev().find(|len| text.ends_with(&MARK[..*len]));
    text.len() - prefix.unwrap_or(0)
}

/// The recipient of a whole tail as [`tail_start`] finds it.
pub(crate) fn tail_recipient(tail: &str) -> Option<Recipient<'_>> {
    let name = tail.strip_prefix(" to=")?;
    (!name.is_empty()).then(|| Recipient::of_name(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers() {
        let tool = |name: &'static str| Reading::Header(Recipient::Tool(name));
        for text in [
            "",
            " ",
            "ass",
            "assistant",
            " assistant ",
            " t",
            " to",
            " to=",
            "assistant to=user ",
            " to=user",
        ] {
            assert_eq!(read(text), Reading::Header(Recipient::User), "{text:?}");
        }
        assert_eq!(read(" to=self"), Reading::Header(Recipient::Itself));
        assert_eq!(read("assistant to=self"), Reading::Header(Recipient::Itself));
        assert_eq!(read(" to=fs.Read-1"), tool("fs.Read-1"));
        assert_eq!(read("to=f"), tool("f"));
        let text = |assistant, rest| Reading::Text { assistant, rest };
        assert_eq!(read(" Hello"), text(false, " Hello"));
        assert_eq!(read("assistants"), text(false, "assistants"));
        assert_eq!(read("assistant Hello "), text(true, "Hello "));
        assert_eq!(read(" to=5 is"), text(false, " to=5 is"));
        assert!(matches!(read(&format!(" to={}", "x".repeat(300))), Reading::Text { .. }));
    }

    #[test]
    fn tails() {
        let tail = |text: &'static str| &text[tail_start(text)..];
        assert_eq!(tail("think to=f"), " to=f");
        assert_eq!(tail("think to=f x"), "");
        assert_eq!(tail("think to=f "), " ");
        assert_eq!(tail("think to=f to"), " to");
        assert_eq!(tail("thinkto=f"), "");
        assert_eq!(tail(" to=a to=b"), " to=b");
        assert_eq!(tail_recipient(" to=b"), Some(Recipient::Tool("b")));
        assert_eq!(tail_recipient(" to="), None);
        assert_eq!(tail_recipient(" t"), None);
    }
}
