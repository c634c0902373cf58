//! GBNF, the grammar notation of llama.cpp, as Lark.
//!
//! ```text
//! root  ::= item+ "!"            # a comment
//! item  ::= [a-z0-9_-] | "x" ("," item)? | [^\n]{2,5} | .
//! ```
//!
//! Rules are renamed since Lark's names are narrower. What is beyond this subset is an error that names the line.

use crate::error::TextError;
use std::cell::Cell;
use std::collections::HashMap;
use std::fmt::Write as _;

/// The same grammar in Lark's notation.
pub(crate) fn to_lark(source: &str) -> Result<String, TextError> {
    let mut parser = Parser { rest: source, source, rules: HashMap::new(), counted: Cell::new((0, 1)) };
    let body = parser.rules()?;
    let undefined = parser.rules.iter().filter(|(_, rule)| !rule.defined).min_by_key(|(_, rule)| rule.line);
    if let Some((name, rule)) = undefined {
        return Err(error_at(rule.line, &format!("rule {name:?} is used but not defined")));
    }
    let Some(root) = parser.rules.get("root") else {
        return Err(TextError::Grammar { kind: KIND, what: "there is no rule \"root\"".to_owned() });
    };
    Ok(format!("start: rule{}\n{body}", root.number))
}

const KIND: &str = "the GBNF grammar";

struct Parser<'a> {
    rest: &'a str,
    source: &'a str,
    rules: HashMap<&'a str, Rule>,
    /// A place in the source and the line that it is on, so that lines are counted once.
    counted: Cell<(usize, usize)>,
}

struct Rule {
    number: usize,
    /// Where it was first seen.
    line: usize,
    defined: bool,
}

fn error_at(line: usize, what: &str) -> TextError {
    TextError::Grammar { kind: KIND, what: format!("line {line}: {what}") }
}

impl<'a> Parser<'a> {
    fn rules(&mut self) -> Result<String, TextError> {
        let mut out = String::new();
        self.skip(true);
        while !self.rest.is_empty() {
            let name = self.name().ok_or_else(|| self.error("expected a rule's name"))?;
            let rule = self.rule(name);
            let number = rule.number;
            if std::mem::replace(&mut rule.defined, true) {
                return Err(self.error(&format!("rule {name:?} is defined twice")));
            }
            self.skip(false);
            if !self.take("::=") {
                return Err(self.error("expected ::="));
            }
            self.skip(true);
            let alternatives = self.alternatives(0)?;
            // Writing to a string cannot fail.
            let _ = writeln!(out, "rule{number}: {alternatives}");
            self.skip(true);
        }
        Ok(out)
    }

    fn alternatives(&mut self, depth: usize) -> Result<String, TextError> {
        let mut out = self.sequence(depth)?;
        loop {
            self.skip(depth > 0);
            // An alternative may stand on the next line of a rule.
            let before = self.rest;
            self.skip(true);
            if !self.take("|") {
                self.rest = before;
                return Ok(out);
            }
            self.skip(true);
            let _ = write!(out, " | {}", self.sequence(depth)?);
        }
    }

    fn sequence(&mut self, depth: usize) -> Result<String, TextError> {
        let mut items: Vec<String> = Vec::new();
        loop {
            self.skip(depth > 0);
            let Some(first) = self.rest.chars().next() else { break };
            let item = match first {
                '"' => self.literal()?,
                '[' => self.class()?,
                '.' => {
                    self.take(".");
                    "/(?s:.)/".to_owned()
                }
                '(' => {
                    self.take("(");
                    let inner = self.alternatives(depth + 1)?;
                    self.skip(true);
                    if !self.take(")") {
                        return Err(self.error("expected )"));
                    }
                    format!("({inner})")
                }
                c if c.is_ascii_alphabetic() => {
                    // The name of the next rule ends this one.
                    let before = self.rest;
                    let name = self.name().unwrap_or_default();
                    self.skip(depth > 0);
                    if self.rest.starts_with("::=") {
                        self.rest = before;
                        break;
                    }
                    format!("rule{}", self.rule(name).number)
                }
                _ => break,
            };
            items.push(self.repeated(item)?);
        }
        Ok(if items.is_empty() { "\"\"".to_owned() } else { items.join(" ") })
    }

    fn repeated(&mut self, item: String) -> Result<String, TextError> {
        for operator in ["*", "+", "?"] {
            if self.take(operator) {
                return Ok(format!("{item}{operator}"));
            }
        }
        if self.take("{") {
            let Some((counts, rest)) = self.rest.split_once('}') else {
                return Err(self.error("expected }"));
            };
            let numbers: Vec<&str> = counts.split(',').map(str::trim).collect();
            let valid = |text: &&str| text.is_empty() || text.parse::<u16>().is_ok();
            if numbers.len() > 2 || numbers[0].is_empty() && numbers.len() == 1 || !numbers.iter().all(valid)
            {
                return Err(self.error("expected {m}, {m,} or {m,n} with numbers up to 65535"));
            }
            self.rest = rest;
            let least = if numbers[0].is_empty() { "0" } else { numbers[0] };
            return Ok(match numbers.get(1) {
                None => format!("{item}{{{least}}}"),
                Some(most) => format!("{item}{{{least},{most}}}"),
            });
        }
        Ok(item)
    }

    /// A literal, as a JSON string, which is how Lark writes them.
    fn literal(&mut self) -> Result<String, TextError> {
        let mut text = String::new();
        let mut chars = self.rest[1..].chars();
        loop {
            match chars.next() {
                Some('"') => break,
                Some('\\') => match escape(&mut chars) {
                    Some(c) => text.push(c),
                    None => return Err(self.error("an escape that is not known")),
                },
                Some(c) => text.push(c),
                None => return Err(self.error("a literal does not end")),
            }
        }
        self.rest = chars.as_str();
        Ok(serde_json::Value::from(text).to_string())
    }

    /// A character class, as a regular expression.
    fn class(&mut self) -> Result<String, TextError> {
        let mut chars = self.rest[1..].chars();
        let mut out = String::from("/[");
        let mut empty = true;
        if let Some(rest) = chars.as_str().strip_prefix('^') {
            out.push('^');
            chars = rest.chars();
        }
        loop {
            match chars.next() {
                Some(']') => break,
                // A range.
                Some('-') if !empty && !chars.as_str().starts_with(']') => out.push('-'),
                Some('\\') => match escape(&mut chars) {
                    Some(c) => push_in_class(&mut out, c),
                    None => return Err(self.error("an escape that is not known")),
                },
                Some(c) => push_in_class(&mut out, c),
                None => return Err(self.error("a character class does not end")),
            }
            empty = false;
        }
        if empty {
            return Err(self.error("a character class is empty"));
        }
        self.rest = chars.as_str();
        out.push_str("]/");
        Ok(out)
    }

    fn name(&mut self) -> Option<&'a str> {
        let end = self.rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '-' || c == '_'));
        let (name, rest) = self.rest.split_at(end.unwrap_or(self.rest.len()));
        if !name.starts_with(|c: char| c.is_ascii_alphabetic()) {
            return None;
        }
        self.rest = rest;
        Some(name)
    }

    fn rule(&mut self, name: &'a str) -> &mut Rule {
        let (number, line) = (self.rules.len(), self.line());
        self.rules.entry(name).or_insert(Rule { number, line, defined: false })
    }

    fn take(&mut self, token: &str) -> bool {
        match self.rest.strip_prefix(token) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    /// Skips blanks and comments, and line breaks if `lines`.
    fn skip(&mut self, lines: bool) {
        loop {
            let blank = |c: char| c == ' ' || c == '\t' || (lines && (c == '\n' || c == '\r'));
            self.rest = self.rest.trim_start_matches(blank);
            if !self.rest.starts_with('#') {
                return;
            }
            self.rest = &self.rest[self.rest.find('\n').unwrap_or(self.rest.len())..];
        }
    }

    fn line(&self) -> usize {
        let at = self.source.len() - self.rest.len();
        let (from, line) = self.counted.get();
        // A name that begins the next rule is read twice.
        let line = match at.checked_sub(from) {
            Some(_) => line + newlines(&self.source[from..at]),
            None => line - newlines(&self.source[at..from]),
        };
        self.counted.set((at, line));
        line
    }

    fn error(&self, what: &str) -> TextError {
        error_at(self.line(), what)
    }
}

fn newlines(text: &str) -> usize {
    text.bytes().filter(|byte| *byte == b'\n').count()
}

/// A character of a class, safe inside a regular expression.
fn push_in_class(out: &mut String, c: char) {
    if c.is_ascii_alphanumeric() || !c.is_ascii() {
        out.push(c);
    } else {
        let _ = write!(out, "\\x{:02x}", u32::from(c));
    }
}

/// What follows a backslash.
fn escape(chars: &mut std::str::Chars<'_>) -> Option<char> {
    let len = match chars.next()? {
        'n' => return Some('\n'),
        'r' => return Some('\r'),
        't' => return Some('\t'),
        c @ ('"' | '\\' | '[' | ']' | '-' | '^' | '/' | '.') => return Some(c),
        'x' => 2,
        'u' => 4,
        'U' => 8,
        _ => return None,
    };
    let digits: String = chars.take(len).collect();
    if digits.len() != len {
        return None;
    }
    u32::from_str_radix(&digits, 16).ok().and_then(char::from_u32)
}
