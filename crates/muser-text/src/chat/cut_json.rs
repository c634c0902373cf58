//! JSON of calls that were cut off: what a client was sent comes back, and what of it can be read is read.

use serde_json::{Map, Value};

/// The object that a text holds, or of which it is the beginning; `None` if it is neither.
///
/// A string that was cut off ends where the text does; a number, a word or a key that was cut off is left out.
pub(super) fn object(text: &str) -> Option<Map<String, Value>> {
    if let Ok(whole) = serde_json::from_str::<Value>(text) {
        return match whole {
            Value::Object(fields) => Some(fields),
            _ => None,
        };
    }
    let (mut open, mut in_string, mut escaped) = (Vec::new(), false, false);
    // Where the text could be cut so that closing what is open gives JSON, and what is open there.
    let mut whole_until = None;
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            _ if in_string => {}
            b'{' | b'[' => {
                open.push(if byte == b'{' { b'}' } else { b']' });
                whole_until = Some((at + 1, open.len()));
            }
            b'}' | b']' => {
                if open.pop() != Some(byte) || open.is_empty() {
                    return None;
                }
                whole_until = Some((at + 1, open.len()));
            }
            b',' => whole_until = Some((at, open.len())),
            _ => {}
        }
    }
    let closed = |end: usize, quote: &str, open: &[u8]| {
        let closers: String = open.iter().rev().map(|byte| char::from(*byte)).collect();
        match serde_json::from_str(&format!("{}{quote}{closers}", &text[..end])) {
            // Of an object without a key nothing can be read.
            Ok(Value::Object(fields)) if !fields.is_empty() => Some(fields),
            _ => None,
        }
    };
    if in_string {
        // An escape that was cut off is not part of the string; the longest one has six characters.
        let ends =
            (0..=6).filter_map(|back| text.len().checked_sub(back)).filter(|end| text.is_char_boundary(*end));
        if let Some(found) = ends.map(|end| closed(end, "\"", &open)).find_map(|found| found) {
            return Some(found);
        }
    } else if let Some(found) = closed(text.len(), "", &open) {
        return Some(found);
    }
    let (end, depth) = whole_until?;
    closed(end, "", open.get(..depth)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_can_be_read_is_read() {
        let check = |text: &str, expected: Option<Value>| {
            assert_eq!(object(text).map(Value::Object), expected, "{text}");
        };
        check(r#"{"a": 1}"#, Some(json!({"a": 1})));
        check(r#"{"city":"Par"#, Some(json!({"city": "Par"})));
        check(r#"{"city":"Par\"#, Some(json!({"city": "Par"})));
        check(r#"{"city":"Par\u00e"#, Some(json!({"city": "Par"})));
        check(r#"{"a":[1,{"b":"c"#, Some(json!({"a": [1, {"b": "c"}]})));
        check(r#"{"mode":4"#, Some(json!({"mode": 4})));
        check(r#"{"a":1,"b":tr"#, Some(json!({"a": 1})));
        check(r#"{"a":1,"b"#, Some(json!({"a": 1})));
        check(r#"{"a":[1,2],"b":{"c":-"#, Some(json!({"a": [1, 2], "b": {}})));
        for neither in ["", "{", "[1]", "5", "{'a': 1}", r#"{"a"#, "{\"a\":1}}", "a,b", "{\"a\":1]"] {
            check(neither, None);
        }
    }

    #[test]
    fn the_beginning_of_an_object_is_never_a_fault() {
        let whole = r#"{"a": "x\n\"é", "list": [1, true, null, {"b": -2.5e3}], "c": {"d": "🙂"}}"#;
        for end in (1..whole.len()).filter(|end| whole.is_char_boundary(*end)) {
            let read = object(&whole[..end]);
            let before_the_first = end < whole.find('x').expect("there");
            assert_eq!(read.is_none(), before_the_first, "{}", &whole[..end]);
        }
    }
}
