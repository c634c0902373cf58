//! Text of kernels: constants, the operations in the forms that this device needs, the prelude, the kernel's own files.

use std::fmt::Write as _;

use muser_gguf::GgmlType;

use crate::device::Slot;

/// How an operation of floats is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    /// The driver's operation.
    Native,
    /// The driver's operation where nothing is subnormal, else integers.
    Guarded,
    /// The driver's operation, corrected by two fused multiply-adds; integers at the ends of the range.
    Corrected,
    /// Integers alone.
    Integers,
}

/// How four products of int8 are added up; all are exact.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dot {
    /// `dot4I8Packed`.
    Packed,
    /// f32, whose sums of small integers are exact in any order.
    Floats,
    /// Byte by byte.
    Bytes,
}

/// The forms of all operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Operations {
    /// `a * b + c`, rounded once.
    pub fma: Form,
    /// `a + b`.
    pub add: Form,
    /// `a * b`.
    pub mul: Form,
    /// `a / b`.
    pub divide: Form,
    /// Square root.
    pub root: Form,
    /// f16 to f32.
    pub half: Form,
    /// Dot products of four int8.
    pub dot: Dot,
}

impl Operations {
    /// Nothing is taken from the driver but integers, conversions and rounding.
    pub const INTEGERS: Self = Self {
        fma: Form::Integers,
        add: Form::Integers,
        mul: Form::Integers,
        divide: Form::Integers,
        root: Form::Integers,
        half: Form::Integers,
        dot: Dot::Bytes,
    };
}

/// A mantissa of ones is where a corrected quotient or root may end in a tie that is none; integers take it.
///
/// Body of an operation in a form, under the name `name`; `fma` and `mul` inside are those of the prelude.
pub(crate) fn operation(what: &str, form: Form, name: &str) -> String {
    let (arguments, call) = match what {
        "exact_fma" => ("a: f32, b: f32, c: f32", "fma_integers(a, b, c)"),
        "add" => ("a: f32, b: f32", "add_integers(a, b)"),
        "mul" => ("a: f32, b: f32", "mul_integers(a, b)"),
        "divide" => ("a: f32, b: f32", "divide_integers(a, b)"),
        "half" => ("h: u32", "half_integers(h)"),
        _ => ("a: f32", "root_integers(a)"),
    };
    let native = match what {
        "exact_fma" => "fma(a, b, c)",
        "add" => "a + b",
        "mul" => "a * b",
        "divide" => "a / b",
        "half" => "unpack2x16float(h).x",
        _ => "sqrt(a)",
    };
    // Where a driver that flushes subnormals could be wrong.
    let risk = match what {
        "exact_fma" => {
            "is_tiny(a) || is_tiny(b) || is_tiny(c) || (is_small(r) && (magnitude(c) != 0u || (magnitude(a) != 0u && magnitude(b) != 0u)))"
        }
        "add" => "is_tiny(a) || is_tiny(b) || (is_small(r) && (magnitude(a) | magnitude(b)) != 0u)",
        _ => "is_tiny(a) || is_tiny(b) || (is_small(r) && magnitude(a) != 0u && magnitude(b) != 0u)",
    };
    let body = match (what, form) {
        (_, Form::Integers) => format!("return {call};"),
        ("divide", Form::Corrected) => format!(
            "if ((magnitude(a) >> 23u) - 64u > 126u || (magnitude(b) >> 23u) - 64u > 126u) {{ return {call}; }}\n  \
             if ((bitcast<u32>(b) & 0x7fffffu) == 0x7fffffu) {{ return {call}; }}\n  let y0 = pin(1.0f / b); let y = exact_fma(exact_fma(negated(b), y0, 1.0f), y0, y0);\n  \
             let q = pin(a * y);\n  if ((magnitude(q) >> 23u) - 64u > 126u) {{ return {call}; }}\n  \
             return exact_fma(exact_fma(negated(b), q, a), y, q);"
        ),
        ("root", Form::Corrected) => format!(
            "if ((bitcast<u32>(a) >> 23u) - 64u > 126u || (bitcast<u32>(a) & 0x7ffffeu) == 0x7ffffeu) {{ return {call}; }}\n  \
             let s = pin(sqrt(a));\n  \
             return exact_fma(exact_fma(negated(s), s, a), pin(0.5f / s), s);"
        ),
        (_, Form::Guarded | Form::Corrected) => {
            format!("let r = pin({native});\n  if ({risk}) {{ return {call}; }}\n  return r;")
        }
        (_, Form::Native) => format!("return pin({native});"),
    };
    format!("fn {name}({arguments}) -> f32 {{\n  {body}\n}}\n")
}

/// Body of the dot product of four int8, under the name `name`.
pub(crate) fn dot(form: Dot, name: &str) -> String {
    let body = match form {
        Dot::Packed => "return dot4I8Packed(a, b);".to_owned(),
        Dot::Bytes | Dot::Floats => {
            let byte = |v: &str, i: u32| format!("(i32({v} << {}u) >> 24u)", 24 - 8 * i);
            let term = |i: u32| match form {
                Dot::Floats => format!("f32({}) * f32({})", byte("a", i), byte("b", i)),
                _ => format!("{} * {}", byte("a", i), byte("b", i)),
            };
            let sum = (0..4).map(term).collect::<Vec<_>>().join(" + ");
            if form == Dot::Floats { format!("return i32({sum});") } else { format!("return {sum};") }
        }
    };
    format!("fn {name}(a: u32, b: u32) -> i32 {{\n  {body}\n}}\n")
}

impl Operations {
    /// The operations under their names.
    pub(crate) fn text(self) -> String {
        let forms = [
            ("exact_fma", self.fma),
            ("add", self.add),
            ("mul", self.mul),
            ("divide", self.divide),
            ("root", self.root),
            ("half", self.half),
        ];
        forms.iter().map(|(what, form)| operation(what, *form, what)).collect::<String>()
            + &dot(self.dot, "dot4")
    }
}

/// A shader file of this crate.
macro_rules! shader {
    ($name:literal) => {
        include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/shaders/", $name, ".wgsl"))
    };
}
pub(crate) use shader;

/// A constant of a kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Constant {
    Number(u32),
    Bool(bool),
}

/// What a kernel is made of.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    /// Its name, which its constants are part of.
    pub(crate) name: String,
    /// Its text without the operations.
    body: String,
    pub(crate) slots: Vec<Slot>,
}

impl Source {
    /// `files` in order; the last one is the kernel and says by its bindings what the slots are.
    pub(crate) fn new(name: &str, constants: &[(&str, Constant)], files: &[&str]) -> Self {
        let (mut full, mut body) = (name.to_owned(), String::new());
        for (constant, value) in constants {
            let (ty, value) = match value {
                Constant::Number(number) => ("u32", format!("{number}u")),
                Constant::Bool(value) => ("bool", value.to_string()),
            };
            let _ = writeln!(body, "const {constant}: {ty} = {value};");
            let _ = write!(full, "/{}{}", constant.to_lowercase(), value.trim_end_matches('u'));
        }
        body.extend(files.iter().copied());
        let slots = files.last().map_or_else(Vec::new, |text| slots_of(text));
        Self { name: full, body, slots }
    }

    /// The whole text.
    pub(crate) fn text(&self, operations: Operations) -> String {
        [&operations.text()[..], shader!("prelude"), &self.body].concat()
    }

    /// The whole text with another prelude, for tests of what finds a wrong one.
    pub(crate) fn text_with(&self, operations: Operations, prelude: &str) -> String {
        [&operations.text()[..], prelude, &self.body].concat()
    }
}

/// What the bindings of a kernel are, by their declarations.
fn slots_of(text: &str) -> Vec<Slot> {
    let declarations = text.lines().filter(|line| line.starts_with("@group(0)"));
    let slot = |line: &str| match () {
        () if line.contains("var<uniform>") => Slot::Uniform,
        () if line.contains("read_write") => Slot::Write,
        () => Slot::Read,
    };
    declarations.map(slot).collect()
}

/// What a block type's kernels must know: `None` where there are none.
pub(crate) fn block_constants(ty: GgmlType) -> Option<Vec<(&'static str, Constant)>> {
    if block_text(ty).is_empty() {
        return None;
    }
    let mins =
        matches!(ty, GgmlType::Q4_1 | GgmlType::Q5_1 | GgmlType::Q2_K | GgmlType::Q4_K | GgmlType::Q5_K);
    Some(vec![
        ("TYPE", Constant::Number(ty.id())),
        ("BLOCK_LEN", Constant::Number(ty.block_len() as u32)),
        ("BLOCK_BYTES", Constant::Number(ty.block_bytes() as u32)),
        ("UNIT", Constant::Number(unit_len(ty) as u32)),
        ("MINS", Constant::Bool(mins)),
        ("WIDE", Constant::Bool(ty == GgmlType::NVFP4)),
    ])
}

/// Values whose sum is one exact integer, and whose activations have one scale.
pub(crate) fn unit_len(ty: GgmlType) -> usize {
    if ty == GgmlType::NVFP4 { 256 } else { ty.block_len() }
}

/// The section of `blocks.wgsl` of a type; empty where there is none.
pub(crate) fn block_text(ty: GgmlType) -> &'static str {
    let all = shader!("blocks");
    let mut sections = all.split("//! ").skip(1);
    let of = |section: &'static str| {
        section.split_once('\n').filter(|(name, _)| *name == ty.name()).map(|(_, text)| text)
    };
    sections.find_map(of).unwrap_or("")
}

/// The number that kernels of float weights know a type by.
pub(crate) fn float_number(ty: GgmlType) -> Option<u32> {
    match ty {
        GgmlType::F32 => Some(0),
        GgmlType::F16 => Some(1),
        GgmlType::BF16 => Some(2),
        _ => None,
    }
}
