//! What is remembered of a fault beside its answer: never the client's own words.

/// What is remembered of a fault beside its answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) code: &'static str,
    pub(crate) param: Option<String>,
    pub(crate) sentence: String,
}

impl Refusal {
    /// Of a fault, without what the client sent.
    pub(crate) fn new(code: &'static str, param: Option<&str>, message: &str) -> Self {
        let param = param.map(|param| shortened(param, 120));
        Self { code, param, sentence: own_words(message) }
    }
}

/// Our part of a sentence: what stands in double quotes came from the client, and is left out.
fn own_words(message: &str) -> String {
    let mut out = String::with_capacity(message.len().min(300));
    let (mut inside, mut escaped) = (false, false);
    for c in message.chars() {
        if inside {
            inside = escaped || c != '"';
            escaped = !escaped && c == '\\';
            continue;
        }
        if c == '"' {
            inside = true;
            out.push('…');
        } else {
            out.push(c);
        }
    }
    shortened(&out, 300)
}

fn shortened(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clients_words_are_left_out() {
        let check = |message: &str, expected: &str| assert_eq!(own_words(message), expected);
        check("'top_p' must be from 0 to 1", "'top_p' must be from 0 to 1");
        check("found the string \"my \\\"secret\\\" plan\", sorry", "found the string …, sorry");
        check("found \"ends open", "found …");
        assert_eq!(own_words(&"ä".repeat(400)).chars().count(), 301);
    }
}
