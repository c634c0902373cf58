//! Metadata values: borrowed views into the mapped file.
//!
//! Arrays are not unpacked: an [`Array`] is a range of bytes that was walked once when the file was opened, so that its
//! iterators need no allocation and cannot run past the end.

use crate::cursor::{Cursor, Fault};

/// Type of a metadata value, by its id in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "names of the format")]
pub enum ValueType {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    Bool = 7,
    String = 8,
    Array = 9,
    U64 = 10,
    I64 = 11,
    F64 = 12,
}

use ValueType as T;

impl ValueType {
    /// The type of this id.
    pub fn from_id(id: u32) -> Option<ValueType> {
        Some(match id {
            0 => T::U8,
            1 => T::I8,
            2 => T::U16,
            3 => T::I16,
            4 => T::U32,
            5 => T::I32,
            6 => T::F32,
            7 => T::Bool,
            8 => T::String,
            9 => T::Array,
            10 => T::U64,
            11 => T::I64,
            12 => T::F64,
            _ => return None,
        })
    }

    /// Name for messages.
    pub fn name(self) -> &'static str {
        match self {
            T::U8 => "u8",
            T::I8 => "i8",
            T::U16 => "u16",
            T::I16 => "i16",
            T::U32 => "u32",
            T::I32 => "i32",
            T::F32 => "f32",
            T::Bool => "bool",
            T::String => "string",
            T::Array => "array",
            T::U64 => "u64",
            T::I64 => "i64",
            T::F64 => "f64",
        }
    }

    /// Bytes of a value, for the types that have a fixed size.
    pub fn fixed_bytes(self) -> Option<usize> {
        match self {
            T::U8 | T::I8 | T::Bool => Some(1),
            T::U16 | T::I16 => Some(2),
            T::U32 | T::I32 | T::F32 => Some(4),
            T::U64 | T::I64 | T::F64 => Some(8),
            T::String | T::Array => None,
        }
    }
}

/// A metadata value.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(missing_docs, reason = "names of the format")]
pub enum Value<'a> {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(&'a str),
    Array(Array<'a>),
    U64(u64),
    I64(i64),
    F64(f64),
}

impl<'a> Value<'a> {
    /// Its type.
    pub fn value_type(self) -> ValueType {
        match self {
            Value::U8(_) => T::U8,
            Value::I8(_) => T::I8,
            Value::U16(_) => T::U16,
            Value::I16(_) => T::I16,
            Value::U32(_) => T::U32,
            Value::I32(_) => T::I32,
            Value::F32(_) => T::F32,
            Value::Bool(_) => T::Bool,
            Value::String(_) => T::String,
            Value::Array(_) => T::Array,
            Value::U64(_) => T::U64,
            Value::I64(_) => T::I64,
            Value::F64(_) => T::F64,
        }
    }

    /// The value of any integer type.
    pub fn as_integer(self) -> Option<i128> {
        Some(match self {
            Value::U8(v) => v.into(),
            Value::I8(v) => v.into(),
            Value::U16(v) => v.into(),
            Value::I16(v) => v.into(),
            Value::U32(v) => v.into(),
            Value::I32(v) => v.into(),
            Value::U64(v) => v.into(),
            Value::I64(v) => v.into(),
            _ => return None,
        })
    }

    /// The value of either float type.
    pub fn as_float(self) -> Option<f64> {
        match self {
            Value::F32(v) => Some(v.into()),
            Value::F64(v) => Some(v),
            _ => None,
        }
    }

    /// The text of a string.
    pub fn as_str(self) -> Option<&'a str> {
        match self {
            Value::String(text) => Some(text),
            _ => None,
        }
    }

    /// The value in words for error messages, cut to a line.
    pub fn describe(self) -> String {
        match self {
            Value::String(text) => {
                let mut shown: String = text.chars().take(60).collect();
                if shown.len() < text.len() {
                    shown.push('…');
                }
                format!("{shown:?}")
            }
            Value::Array(array) => format!("an array of {} {}", array.len, array.element.name()),
            Value::Bool(v) => v.to_string(),
            Value::F32(v) => format!("{v:?}"),
            Value::F64(v) => format!("{v:?}"),
            other => other.as_integer().map_or_else(String::new, |v| v.to_string()),
        }
    }

    /// Reads one value of type `ty`, checking it wholly: lengths, nesting, UTF-8 of a scalar string, bools.
    pub(crate) fn read(cursor: &mut Cursor<'a>, ty: ValueType, depth: usize) -> Result<Value<'a>, Fault> {
        Ok(match ty {
            T::U8 => Value::U8(cursor.array::<1>("a u8")?[0]),
            T::I8 => Value::I8(i8::from_le_bytes(cursor.array("an i8")?)),
            T::U16 => Value::U16(u16::from_le_bytes(cursor.array("a u16")?)),
            T::I16 => Value::I16(i16::from_le_bytes(cursor.array("an i16")?)),
            T::U32 => Value::U32(cursor.u32("a u32")?),
            T::I32 => Value::I32(i32::from_le_bytes(cursor.array("an i32")?)),
            T::F32 => Value::F32(f32::from_le_bytes(cursor.array("an f32")?)),
            T::Bool => match cursor.array::<1>("a bool")?[0] {
                byte @ (0 | 1) => Value::Bool(byte == 1),
                byte => return Err(format!("expected a bool (0 or 1), found {byte}")),
            },
            T::String => Value::String(cursor.text("a string")?),
            T::Array => Value::Array(Array::read(cursor, depth)?),
            T::U64 => Value::U64(cursor.u64("a u64")?),
            T::I64 => Value::I64(i64::from_le_bytes(cursor.array("an i64")?)),
            T::F64 => Value::F64(f64::from_le_bytes(cursor.array("an f64")?)),
        })
    }
}

/// Arrays inside arrays inside arrays: more levels are refused, since reading them costs stack.
const MAX_ARRAY_DEPTH: usize = 4;

/// A metadata array: element type, length, and the bytes in the map.
#[derive(Clone, Copy, PartialEq)]
pub struct Array<'a> {
    element: ValueType,
    len: usize,
    bytes: &'a [u8],
}

impl std::fmt::Debug for Array<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "[{}; {}]", self.element.name(), self.len)
    }
}

impl<'a> Array<'a> {
    /// Type of the elements.
    pub fn element(self) -> ValueType {
        self.element
    }

    /// Number of elements.
    pub fn len(self) -> usize {
        self.len
    }

    /// No elements?
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// The elements of an array of strings as bytes, in order, borrowed from the map; `None` for other elements.
    ///
    /// Strings inside arrays are not checked as UTF-8 when the file is opened: there are hundreds of thousands of them.
    pub fn byte_strings(self) -> Option<ByteStrings<'a>> {
        (self.element == T::String)
            .then(|| ByteStrings { cursor: Cursor::new(self.bytes, 0), left: self.len })
    }

    /// The elements as they are in the file.
    pub fn raw_bytes(self) -> &'a [u8] {
        self.bytes
    }

    /// The scalar elements (numbers and bools), in order; `None` for strings and nested arrays.
    pub fn scalars(self) -> Option<impl ExactSizeIterator<Item = Value<'a>>> {
        let width = self.element.fixed_bytes()?;
        Some(self.bytes.chunks_exact(width).map(move |chunk| {
            Value::read(&mut Cursor::new(chunk, 0), self.element, 0).unwrap_or(Value::U8(0))
        }))
    }

    fn read(cursor: &mut Cursor<'a>, depth: usize) -> Result<Array<'a>, Fault> {
        if depth >= MAX_ARRAY_DEPTH {
            return Err(format!("arrays are nested deeper than {MAX_ARRAY_DEPTH} levels"));
        }
        let id = cursor.u32("an array element type")?;
        let element = ValueType::from_id(id)
            .ok_or_else(|| format!("expected an array element type 0 to 12, found {id}"))?;
        let count = cursor.u64("an array length")?;
        // The least bytes an element can take: a string has its length, an array its type and length.
        let least = element.fixed_bytes().unwrap_or(if element == T::String { 8 } else { 12 }) as u64;
        if count > cursor.left() as u64 / least {
            return Err(format!(
                "an array of {count} {} does not fit: {} bytes are left",
                element.name(),
                cursor.left()
            ));
        }
        let start = *cursor;
        match element {
            T::String => {
                for _ in 0..count {
                    cursor.string("a string in an array")?;
                }
            }
            T::Array => {
                for _ in 0..count {
                    Array::read(cursor, depth + 1)?;
                }
            }
            T::Bool => {
                let bytes = cursor.take(count, "an array of bools")?;
                if let Some(byte) = bytes.iter().find(|byte| **byte > 1) {
                    return Err(format!("expected bools (0 or 1) in an array, found {byte}"));
                }
            }
            _ => {
                cursor.take(count * least, "an array")?;
            }
        }
        let len_bytes = (cursor.pos() - start.pos()) as u64;
        let bytes = start.peek(len_bytes)?;
        Ok(Array { element, len: count as usize, bytes })
    }
}

/// Strings of an array, see [`Array::byte_strings`].
#[derive(Clone)]
pub struct ByteStrings<'a> {
    cursor: Cursor<'a>,
    left: usize,
}

impl<'a> Iterator for ByteStrings<'a> {
    type Item = &'a [u8];

    #[inline]
    fn next(&mut self) -> Option<&'a [u8]> {
        if self.left == 0 {
            return None;
        }
        self.left -= 1;
        self.cursor.string("a string in an array").ok()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (0, Some(self.left))
    }
}
