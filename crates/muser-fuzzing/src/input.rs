//! Bytes read as choices, so that most inputs get past the first check.

use serde_json::{Map, Number, Value};

/// A reader that never ends: behind the last byte there are zeros.
#[derive(Clone, Debug)]
pub struct Input<'a>(&'a [u8]);

/// Numbers at which arithmetic goes wrong.
const NUMBERS: [i64; 16] = [
    0,
    1,
    -1,
    2,
    7,
    255,
    256,
    4096,
    65_535,
    1 << 20,
    i32::MAX as i64,
    1 << 32,
    (1 << 53) + 1,
    i64::MAX,
    i64::MIN,
    -256,
];

/// Texts that mean something to somebody.
const TEXTS: [&str; 16] = [
    "",
    "a",
    "Hello",
    "<|eot|>",
    "<|start|>assistant to=self<|message|>",
    "<|image_start|><|patch|><|image_end|>",
    "\u{0}",
    "é\u{301}你好",
    "</atem:parameter>",
    "{\"a\": 1}",
    "[",
    "\u{feff}x",
    "a b\nc",
    "%s%n../..",
    "data:image/png;base64,AAAA",
    "🦊",
];

impl<'a> Input<'a> {
    /// Over these bytes.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Nothing is left.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The next byte.
    pub fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    /// A number below `n`, which is not 0.
    pub fn below(&mut self, n: usize) -> usize {
        let high = if n > 256 { usize::from(self.byte()) << 8 } else { 0 };
        (high | usize::from(self.byte())) % n
    }

    /// Yes or no.
    pub fn flag(&mut self) -> bool {
        self.byte() & 1 == 1
    }

    /// One of these.
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    /// Eight bytes as a number.
    pub fn u64(&mut self) -> u64 {
        (0..8).fold(0, |number, _| number << 8 | u64::from(self.byte()))
    }

    /// Up to `most` bytes, their number before them.
    pub fn bytes(&mut self, most: usize) -> &'a [u8] {
        let len = self.below(most + 1).min(self.0.len());
        let (taken, rest) = self.0.split_at(len);
        self.0 = rest;
        taken
    }

    /// All that is left.
    pub fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }

    /// A text: a known one or any.
    pub fn text(&mut self, most: usize) -> String {
        match self.byte() {
            choice @ 0..128 => TEXTS[usize::from(choice) % TEXTS.len()].to_owned(),
            128.. => String::from_utf8_lossy(self.bytes(most)).into_owned(),
        }
    }

    /// A whole number, often one at an edge.
    pub fn number(&mut self) -> i64 {
        if self.flag() { self.pick(&NUMBERS) } else { i64::from(self.byte() as i8) }
    }

    /// Any JSON of at most so many levels.
    pub fn json(&mut self, depth: usize) -> Value {
        match self.below(if depth == 0 { 6 } else { 8 }) {
            0 => Value::Null,
            1 => Value::Bool(self.flag()),
            2 => self.number().into(),
            3 => Number::from_f64(f64::from_bits(self.u64())).map_or(Value::Null, Value::Number),
            4 | 5 => self.text(40).into(),
            6 => (0..self.below(5)).map(|_| self.json(depth - 1)).collect(),
            _ => {
                let fields = (0..self.below(5)).map(|_| (self.text(12), self.json(depth - 1)));
                Value::Object(fields.collect::<Map<_, _>>())
            }
        }
    }

    /// Changes some places of a JSON value: other values, fields away, fields twice.
    pub fn change(&mut self, value: &mut Value) {
        for _ in 0..self.below(6) {
            self.change_one(value, 0);
        }
    }

    fn change_one(&mut self, value: &mut Value, depth: usize) {
        let go_on = depth < 6 && self.below(8) > 0;
        match value {
            Value::Object(fields) if go_on && !fields.is_empty() => {
                let key = fields.keys().nth(self.below(fields.len())).cloned().unwrap_or_default();
                match self.below(8) {
                    0 => drop(fields.remove(&key)),
                    1 => {
                        let (name, more) = (self.text(12), self.json(2));
                        fields.insert(name, more);
                    }
                    _ => {
                        if let Some(inner) = fields.get_mut(&key) {
                            self.change_one(inner, depth + 1);
                        }
                    }
                }
            }
            Value::Array(items) if go_on && !items.is_empty() => {
                let at = self.below(items.len());
                match self.below(8) {
                    0 => drop(items.remove(at)),
                    1 => {
                        let more = items[at].clone();
                        items.push(more);
                    }
                    _ => self.change_one(&mut items[at], depth + 1),
                }
            }
            _ => *value = self.json(2),
        }
    }
}
