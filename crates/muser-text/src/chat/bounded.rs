//! A template's program, with checks where values are made: what a value takes when it is unfolded stays within the fuel
//! that is left.
//!
//! The engine charges for what it copies, after it has copied it, and sees only the outermost list. A list that is added to
//! itself 33 times, a lazily repeated one, `[l, l]` in a loop: each is small while it is shared and without bound as soon
//! as something walks it. Here every value is walked where it is made, never further than the fuel goes, and lazy lists
//! become lists, so that whatever the engine does with a value afterwards is bounded and paid for.

use minijinja::machinery::{
    CodeGenerator, Instruction, Instructions, Token, eval, make_string_output, parse, tokenize,
};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Value, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State};
use std::collections::BTreeMap;

/// Deeper values are refused: dropping and printing them recurses.
const DEEPEST: usize = 200;

/// Bytes of text that weigh as much as one value.
const BYTES_PER_UNIT: usize = 64;

/// Values walked for one unit of fuel.
const WALKED_PER_FUEL: u64 = 4;

/// Is the value a lazy list? Fails if it is too large or too deep.
const LAZY: &str = "_lazy";

/// Fails if the value is too large or too deep.
const WITHIN: &str = "_within";

/// Fails if the value is or holds a namespace.
const STORABLE: &str = "_storable";

/// The list that a lazy list stands for.
const WHOLE: &str = "_whole";

/// Not among the filters and tests that the engine keeps at hand by number.
const BY_NAME: u8 = !0;

/// What it is given, which the compiler does not know.
const SAME: &str = "_same";

/// Gives the environment what the checks call.
pub(crate) fn install(environment: &mut Environment<'_>) {
    environment
        .add_test(LAZY, |state: &State<'_, '_>, value: Value| weigh(state, &value).map(|()| is_lazy(&value)));
    environment.add_test(WITHIN, |state: &State<'_, '_>, value: Value| weigh(state, &value).map(|()| true));
    environment.add_test(STORABLE, |state: &State<'_, '_>, value: Value| {
        if is_namespace(&value) { Err(nested_namespace()) } else { weigh(state, &value).map(|()| true) }
    });
    environment.add_filter(SAME, |value: Value| value);
    environment.add_filter(WHOLE, |value: Value| value.try_iter().map(Iterator::collect::<Value>));
}

/// The source with products that are made when it runs: those of constants are made by the compiler, which has no fuel.
pub(crate) fn without_constant_products(source: &str, syntax: SyntaxConfig) -> Result<String, Error> {
    let (mut out, mut copied, mut follows_operand) = (String::with_capacity(source.len()), 0, false);
    for item in tokenize(source, false, syntax) {
        let (token, span) = item?;
        let start = span.start_offset as usize;
        // A star that follows no operand unpacks arguments.
        if follows_operand
            && matches!(token, Token::Mul)
            && let Some(text) = source.get(copied..start)
        {
            out.push_str(text);
            out.extend(["|", SAME, " "]);
            copied = start;
        }
        follows_operand = !matches!(token, Token::ParenOpen | Token::Comma);
    }
    out.push_str(&source[copied..]);
    Ok(out)
}

/// Renders a template whose syntax is known to be right.
pub(crate) fn render(
    environment: &Environment<'_>,
    name: &str,
    source: &str,
    syntax: SyntaxConfig,
    context: Value,
) -> Result<String, Error> {
    let mut generator = CodeGenerator::new(name, source);
    generator.compile_stmt(&parse(source, name, syntax)?);
    let (program, blocks) = generator.finish();
    let program = checked(&program);
    let blocks: BTreeMap<&str, Instructions<'_>> =
        blocks.iter().map(|(name, block)| (*name, checked(block))).collect();
    let mut text = String::new();
    let mut out = make_string_output(&mut text);
    eval(environment, &program, context, &blocks, &mut out, AutoEscape::None)?;
    Ok(text)
}

/// Charges for a value what it is when unfolded; fails if that is more than the fuel that is left.
fn weigh(state: &State<'_, '_>, value: &Value) -> Result<(), Error> {
    if !matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable | ValueKind::Map) {
        return Ok(());
    }
    let most = state.fuel_levels().map_or(0, |(_, left)| left);
    let mut left = most;
    let outcome = walk(value, 0, &mut left);
    state.consume_fuel((most - left) / WALKED_PER_FUEL)?;
    outcome
}

fn walk(value: &Value, depth: usize, left: &mut u64) -> Result<(), Error> {
    if depth > DEEPEST {
        return Err(Error::new(ErrorKind::InvalidOperation, "values within values, too many levels of them"));
    }
    let bytes = value.as_bytes().map_or(0, <[u8]>::len);
    let units = 1 + (bytes / BYTES_PER_UNIT) as u64;
    *left = left.checked_sub(units).ok_or_else(|| Error::from(ErrorKind::OutOfFuel))?;
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => {
            value.try_iter()?.try_for_each(|item| walk(&item, depth + 1, left))
        }
        ValueKind::Map if depth > 0 && is_namespace(value) => Err(nested_namespace()),
        ValueKind::Map => value.try_iter()?.try_for_each(|key| {
            walk(&key, depth + 1, left)?;
            walk(&value.get_item(&key)?, depth + 1, left)
        }),
        _ => Ok(()),
    }
}

fn is_lazy(value: &Value) -> bool {
    value.kind() == ValueKind::Iterable
        || value.as_object().is_some_and(|list| list.type_name().ends_with("::MergeSeq"))
}

/// Namespaces are the only values that change after they were made: one within another would grow unseen, or hold itself.
fn is_namespace(value: &Value) -> bool {
    value.as_object().is_some_and(|object| object.type_name().ends_with("::Namespace"))
}

fn nested_namespace() -> Error {
    Error::new(ErrorKind::InvalidOperation, "a namespace within another value")
}

/// The program with its checks.
fn checked<'source>(program: &Instructions<'source>) -> Instructions<'source> {
    let old: Vec<&Instruction<'source>> = (0..).map_while(|at| program.get(at)).collect();
    // Where each instruction comes to stand, with the checks before it; the last is the end.
    let mut starts = vec![0];
    for (at, instruction) in old.iter().enumerate() {
        let last = starts[starts.len() - 1];
        starts.push(last + before(&old, at).len() as u32 + 1 + after(instruction, 0).len() as u32);
    }
    let mut out = Instructions::new(program.name(), program.source());
    for (at, instruction) in (0..).zip(&old) {
        let mut own = (*instruction).clone();
        if let Some(target) = target(&mut own) {
            *target = starts.get(*target as usize).copied().unwrap_or(*target);
        }
        let end = starts[at as usize + 1];
        let group = before(&old, at as usize).into_iter().chain([own]).chain(after(instruction, end));
        for made in group {
            match (program.get_span(at), program.get_line(at)) {
                (Some(span), _) => out.add_with_span(made, span),
                (None, Some(line)) => out.add_with_line(made, u16::try_from(line).unwrap_or(u16::MAX)),
                (None, None) => out.add(made),
            };
        }
    }
    out
}

/// The place that an instruction names.
fn target<'a>(instruction: &'a mut Instruction<'_>) -> Option<&'a mut u32> {
    match instruction {
        Instruction::Jump(target)
        | Instruction::JumpIfFalse(target)
        | Instruction::JumpIfFalseOrPop(target)
        | Instruction::JumpIfTrueOrPop(target)
        | Instruction::Iterate(target)
        | Instruction::BuildMacro(_, target, _) => Some(target),
        _ => None,
    }
}

/// Checks of an operand, which is on top of the stack: comparing takes as long as the smaller side is large.
fn before<'source>(program: &[&Instruction<'source>], at: usize) -> Vec<Instruction<'source>> {
    let top = |test| {
        [Instruction::DupTop, Instruction::PerformTest(test, Some(1), BY_NAME), Instruction::DiscardTop]
    };
    // Arguments with names are no operands, and no test takes them for a value.
    let named = at.checked_sub(1).is_some_and(|last| match program[last] {
        Instruction::BuildKwargs(_) | Instruction::MergeKwargs(_) => true,
        Instruction::LoadConst(value) => value.is_kwargs(),
        _ => false,
    });
    match program[at] {
        Instruction::Eq
        | Instruction::Ne
        | Instruction::Gt
        | Instruction::Gte
        | Instruction::Lt
        | Instruction::Lte
        | Instruction::In
        | Instruction::CompareAndPreserve(_)
        | Instruction::UnpackLists(_)
        | Instruction::GetItem => top(WITHIN).into(),
        Instruction::ApplyFilter(_, count, _)
        | Instruction::PerformTest(_, count, _)
        | Instruction::CallMethod(_, count)
            if !named && count.is_some_and(|count| count > 1) =>
        {
            top(WITHIN).into()
        }
        // The namespace is on top, what it is to hold below.
        Instruction::SetAttr(_) => {
            [Instruction::Swap].into_iter().chain(top(STORABLE)).chain([Instruction::Swap]).collect()
        }
        _ => Vec::new(),
    }
}

/// Checks of a result, for instructions that make values out of others; `end` is where the next instruction stands.
fn after<'source>(instruction: &Instruction<'source>, end: u32) -> Vec<Instruction<'source>> {
    match instruction {
        Instruction::Add
        | Instruction::Mul
        | Instruction::Slice
        | Instruction::BuildList(_)
        | Instruction::BuildTuple(_)
        | Instruction::BuildMap(_)
        | Instruction::ApplyFilter(..)
        | Instruction::CallFunction(..)
        | Instruction::CallMethod(..)
        | Instruction::CallObject(_) => vec![
            Instruction::DupTop,
            Instruction::PerformTest(LAZY, Some(1), BY_NAME),
            Instruction::JumpIfFalse(end),
            Instruction::ApplyFilter(WHOLE, Some(1), BY_NAME),
        ],
        _ => Vec::new(),
    }
}
