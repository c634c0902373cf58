//! Single operations of the device against the processor: which form of each gives its bits.
//!
//! Every form of every operation runs on many inputs: ordinary ones, ones whose results cancel, subnormals, the ends of the range,
//! zeros, infinities, NaN. The first form that is right on all of them is taken; then what is made of the operations is tried.
//! What fails is done by integers.

use std::fmt::Write as _;
use std::sync::{Mutex, PoisonError};

use muser_backend::arith;

use crate::WgpuError;
use crate::device::{Device, Slot, View};
use crate::text::{Constant, Dot, Form, Operations, Source, dot, operation, shader};

/// Inputs of an operation.
pub(crate) const INPUTS: usize = 1 << 16;

/// An input: bits of three values and a word.
type Input = [u32; 4];

/// What was found out about a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    /// What kernels are made with.
    pub operations: Operations,
    /// Forms that were tried, with the number of inputs on which they differ from the processor.
    pub tried: Vec<(String, usize)>,
}

/// What an operation should give.
type Expected = fn(&Input) -> u32;

/// An operation with its forms, the fastest first.
struct Subject {
    what: &'static str,
    forms: &'static [Form],
    /// How the probe calls it.
    call: &'static str,
    expected: Expected,
}

const fn float(input: &Input, at: usize) -> f32 {
    f32::from_bits(input[at])
}

const SUBJECTS: [Subject; 6] = [
    Subject {
        what: "exact_fma",
        forms: &[Form::Native, Form::Guarded, Form::Integers],
        call: "(a, b, c)",
        expected: |i| float(i, 0).mul_add(float(i, 1), float(i, 2)).to_bits(),
    },
    Subject {
        what: "add",
        forms: &[Form::Native, Form::Guarded, Form::Integers],
        call: "(a, c)",
        expected: |i| (float(i, 0) + float(i, 2)).to_bits(),
    },
    Subject {
        what: "mul",
        forms: &[Form::Native, Form::Guarded, Form::Integers],
        call: "(a, b)",
        expected: |i| (float(i, 0) * float(i, 1)).to_bits(),
    },
    Subject {
        what: "divide",
        forms: &[Form::Native, Form::Corrected, Form::Integers],
        call: "(a, b)",
        expected: |i| (float(i, 0) / float(i, 1)).to_bits(),
    },
    Subject {
        what: "root",
        forms: &[Form::Native, Form::Corrected, Form::Integers],
        call: "(a)",
        expected: |i| float(i, 0).sqrt().to_bits(),
    },
    Subject {
        what: "half",
        forms: &[Form::Native, Form::Integers],
        call: "(v.w & 0xffffu)",
        expected: |i| half::f16::from_bits(i[3] as u16).to_f32().to_bits(),
    },
];

const DOTS: [Dot; 3] = [Dot::Packed, Dot::Floats, Dot::Bytes];

fn dot_of(a: u32, b: u32) -> u32 {
    let sum: i32 = a
        .to_le_bytes()
        .into_iter()
        .zip(b.to_le_bytes())
        .map(|(a, b)| i32::from(a as i8) * i32::from(b as i8))
        .sum();
    sum as u32
}

/// Functions made of the operations, and conversions; the first value is what they are called with.
const FUNCTIONS: [(&str, Expected); 9] = [
    ("bitcast<u32>(exp_exact(a))", |i| arith::exp(float(i, 0)).to_bits()),
    ("bitcast<u32>(sigmoid(a))", |i| arith::sigmoid(float(i, 0)).to_bits()),
    ("bitcast<u32>(silu_times(a, b))", |i| arith::silu_times(float(i, 0), float(i, 1)).to_bits()),
    ("bitcast<u32>(tanh_exact(a))", |i| arith::tanh(float(i, 0)).to_bits()),
    ("bitcast<u32>(exp2_exact(c))", |i| arith::attention::exp2(float(i, 2)).to_bits()),
    ("bitcast<u32>(inverse_rms(abs(b), 6656.0f, 1e-5f))", |i| {
        arith::inverse_rms(float(i, 1).abs(), 6656, 1e-5).to_bits()
    }),
    ("bitcast<u32>(nearest(b))", |i| float(i, 1).round_ties_even() as i32 as u32),
    ("bitcast<u32>(f32(bitcast<i32>(v.w)))", |i| (i[3] as i32 as f32).to_bits()),
    ("bitcast<u32>(inverse_rms(b * b, 128.0f, 1e-5f))", |i| {
        arith::inverse_rms(float(i, 1) * float(i, 1), 128, 1e-5).to_bits()
    }),
];

/// Tries the operations of a device.
pub(crate) fn probe(device: &Device) -> Result<Probe, WgpuError> {
    probe_with(device, shader!("prelude"))
}

/// The same with another prelude.
pub(crate) fn probe_with(device: &Device, prelude: &str) -> Result<Probe, WgpuError> {
    let mut tried = Vec::new();
    let inputs = operation_inputs();
    // The first one decides what the others may use.
    let mut found = Operations::INTEGERS;
    for subject in &SUBJECTS[..1] {
        found.fma = first_right(device, prelude, found, &[subject], &inputs, &mut tried)?[0];
    }
    let rest: Vec<&Subject> = SUBJECTS[1..].iter().collect();
    let forms = first_right(device, prelude, found, &rest, &inputs, &mut tried)?;
    [found.add, found.mul, found.divide, found.root, found.half] =
        [forms[0], forms[1], forms[2], forms[3], forms[4]];
    found.dot = dots(device, prelude, found, &inputs, &mut tried)?;
    for operations in [found, Operations { dot: found.dot, ..Operations::INTEGERS }] {
        match functions(device, prelude, operations, &mut tried)? {
            None => return Ok(Probe { operations, tried }),
            Some(difference) if operations.fma == Form::Integers && operations.add == Form::Integers => {
                return Err(difference);
            }
            Some(_) => {}
        }
    }
    Err(WgpuError::SelfTest { kernel: "the functions of the prelude".into(), what: format!("{tried:?}") })
}

/// The first form of each subject that is right.
fn first_right(
    device: &Device,
    prelude: &str,
    operations: Operations,
    subjects: &[&Subject],
    inputs: &[Input],
    tried: &mut Vec<(String, usize)>,
) -> Result<Vec<Form>, WgpuError> {
    let (mut text, mut calls, mut expected) = (String::new(), Vec::new(), Vec::new());
    for subject in subjects {
        for form in subject.forms {
            let name = format!("{}_{}", subject.what, format!("{form:?}").to_lowercase());
            text += &operation(subject.what, *form, &format!("probe_{name}"));
            calls.push(format!("bitcast<u32>(probe_{name}{})", subject.call));
            expected.push((name, subject.expected));
        }
    }
    let differing = run(device, prelude, operations, &text, &calls, inputs)?;
    let counts: Vec<usize> = differing
        .chunks(inputs.len())
        .zip(&expected)
        .map(|(found, (_, expected))| count(inputs, found, *expected).0)
        .collect();
    tried.extend(expected.iter().zip(&counts).map(|((name, _), count)| (name.clone(), *count)));
    let mut at = 0;
    let mut forms = Vec::new();
    for subject in subjects {
        let right = subject.forms.iter().enumerate().find(|(i, _)| counts[at + i] == 0);
        let Some((_, form)) = right else {
            let (what, last) = (subject.what, at + subject.forms.len() - 1);
            let what_differs = format!("{} of {} inputs differ even by integers", counts[last], inputs.len());
            return Err(WgpuError::SelfTest { kernel: format!("operation {what}"), what: what_differs });
        };
        forms.push(*form);
        at += subject.forms.len();
    }
    Ok(forms)
}

fn dots(
    device: &Device,
    prelude: &str,
    operations: Operations,
    inputs: &[Input],
    tried: &mut Vec<(String, usize)>,
) -> Result<Dot, WgpuError> {
    let names: Vec<String> = DOTS.iter().map(|form| format!("dot_{form:?}").to_lowercase()).collect();
    let text: String =
        DOTS.iter().zip(&names).map(|(form, name)| dot(*form, &format!("probe_{name}"))).collect();
    let calls: Vec<String> =
        names.iter().map(|name| format!("bitcast<u32>(probe_{name}(v.w, v.x))")).collect();
    let found = run(device, prelude, operations, &text, &calls, inputs)?;
    let counts: Vec<usize> =
        found.chunks(inputs.len()).map(|found| count(inputs, found, |i| dot_of(i[3], i[0])).0).collect();
    tried.extend(names.into_iter().zip(counts.iter().copied()));
    let right = DOTS.iter().zip(&counts).find(|(_, count)| **count == 0);
    right.map(|(form, _)| *form).ok_or_else(|| WgpuError::SelfTest {
        kernel: "dot products of int8".into(),
        what: format!("{counts:?} of {} differ", inputs.len()),
    })
}

/// Tries the functions; what differs, if something does.
fn functions(
    device: &Device,
    prelude: &str,
    operations: Operations,
    tried: &mut Vec<(String, usize)>,
) -> Result<Option<WgpuError>, WgpuError> {
    let inputs = function_inputs();
    let calls: Vec<String> = FUNCTIONS.iter().map(|(call, _)| (*call).to_owned()).collect();
    let found = run(device, prelude, operations, "", &calls, &inputs)?;
    let mut difference = None;
    for ((call, expected), found) in FUNCTIONS.iter().zip(found.chunks(inputs.len())) {
        let (differ, first) = count(&inputs, found, *expected);
        tried.push(((*call).to_owned(), differ));
        if let Some(at) = first {
            let what = format!(
                "{differ} of {} inputs differ, first {:x?}: {:08x}, expected {:08x}",
                inputs.len(),
                inputs[at],
                found[at],
                expected(&inputs[at])
            );
            difference.get_or_insert(WgpuError::SelfTest { kernel: (*call).to_owned(), what });
        }
    }
    Ok(difference)
}

/// How many results differ, and the first of them. All NaN are equal.
fn count(inputs: &[Input], found: &[u32], expected: Expected) -> (usize, Option<usize>) {
    let is_nan = |bits: u32| bits & 0x7fff_ffff > 0x7f80_0000;
    let differs = |(input, found): (&Input, &u32)| {
        let expected = expected(input);
        expected != *found && !(is_nan(expected) && is_nan(*found))
    };
    let places: Vec<usize> =
        inputs.iter().zip(found).enumerate().filter(|(_, pair)| differs(*pair)).map(|(i, _)| i).collect();
    (places.len(), places.first().copied())
}

/// Results of every call on every input, call by call.
fn run(
    device: &Device,
    prelude: &str,
    operations: Operations,
    text: &str,
    calls: &[String],
    inputs: &[Input],
) -> Result<Vec<u32>, WgpuError> {
    let mut cases = String::new();
    for (number, call) in calls.iter().enumerate() {
        let _ = writeln!(cases, "    case {number}u: {{ return {call}; }}");
    }
    let dispatch = format!(
        "{text}fn operation(v: vec4<u32>, a: f32, b: f32, c: f32) -> u32 {{\n  switch p.operation {{\n{cases}    \
         default: {{ return 0u; }}\n  }}\n}}\n"
    );
    let source = Source::new(
        "probe",
        &[("INPUTS", Constant::Number(inputs.len() as u32))],
        &[&dispatch, shader!("probe")],
    );
    let slots = [Slot::Uniform, Slot::Read, Slot::Write];
    let kernel = device.kernel("probe", source.text_with(operations, prelude), &slots)?;
    device.compile(&kernel)?;
    let given = device.filled(inputs, "inputs of the probe")?;
    let results = device.buffer((calls.len() * inputs.len() * 4) as u64, "results of the probe")?;
    let params: Vec<u32> =
        (0..calls.len()).flat_map(|n| std::iter::repeat_n([0, n as u32], 32).flatten()).collect();
    let params = device.filled(&params, "parameters of the probe")?;
    let mut recorder = device.recorder();
    for n in 0..calls.len() as u64 {
        let bytes = (inputs.len() * 4) as u64;
        let views = [
            View { buffer: &params, offset: n * 256, bytes: 16 },
            View::from(&given),
            View { buffer: &results, offset: n * bytes, bytes },
        ];
        let bindings = device.bind(&kernel, &views)?;
        recorder.dispatch(&kernel, &bindings, [inputs.len() as u32 / 64, 1, 1]);
    }
    device.submit(recorder)?;
    let mut found = vec![0u32; calls.len() * inputs.len()];
    device.read(&results, 0, bytemuck::cast_slice_mut(&mut found))?;
    Ok(found)
}

/// Numbers from a counter.
fn mixed(i: u32) -> u32 {
    let x = (i ^ (i >> 16)).wrapping_mul(0x7feb_352d);
    let x = (x ^ (x >> 15)).wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}

const SPECIAL: [u32; 16] = [
    0,
    0x8000_0000,
    0x7f80_0000,
    0xff80_0000,
    0x7fc0_0000,
    0x3f80_0000,
    0xbf80_0000,
    0x7f7f_ffff,
    0xff7f_ffff,
    0x0080_0000,
    0x807f_ffff,
    1,
    0x8000_0001,
    0x3f7f_ffff,
    0x4b00_0001,
    0x0000_1234,
];

fn operation_inputs() -> Vec<Input> {
    let sign = |bits: u32| bits & 0x8000_0000;
    let with_exponent = |bits: u32, low: u32, count: u32| {
        let exponent = low + (mixed(bits ^ 0x5bd1) % count);
        sign(bits) | (exponent << 23) | (bits & 0x7f_ffff)
    };
    (0..INPUTS as u32)
        .map(|i| {
            let word = |j: u32| mixed(4 * i + j);
            let [a, b, c] = match i % 16 {
                // Near one.
                0..=5 => [0, 1, 2].map(|j| with_exponent(word(j), 117, 20)),
                // Results that cancel.
                6..=8 => {
                    let (a, b) = (with_exponent(word(0), 112, 30), with_exponent(word(1), 112, 30));
                    let product = -(f32::from_bits(a) * f32::from_bits(b));
                    let near =
                        if i % 16 == 6 { product.to_bits() } else { product.to_bits() ^ (word(2) & 7) };
                    if i % 16 == 8 { [a, b, (a ^ 0x8000_0000) ^ (word(2) & 3)] } else { [a, b, near] }
                }
                // Any exponent.
                9 | 10 => [0, 1, 2].map(word),
                // Subnormal operands and results.
                11 => {
                    [word(0) & 0x807f_ffff, with_exponent(word(1), 100, 150), with_exponent(word(2), 0, 30)]
                }
                12 => [with_exponent(word(0), 30, 40), with_exponent(word(1), 30, 40), word(2) & 0x807f_ffff],
                13 => [
                    with_exponent(word(0), 1, 20),
                    with_exponent(word(1), 100, 130),
                    with_exponent(word(2), 1, 20),
                ],
                14 => [0, 1, 2].map(|j| SPECIAL[(word(j) % 16) as usize]),
                _ => {
                    let place = (word(3) % 3) as usize;
                    let mut all = [0, 1, 2].map(|j| with_exponent(word(j), 97, 60));
                    all[place] = SPECIAL[(word(3) / 3 % 16) as usize];
                    all
                }
            };
            [a, b, c, word(3)]
        })
        .collect()
}

fn function_inputs() -> Vec<Input> {
    (0..INPUTS as u32)
        .map(|i| {
            let word = |j: u32| mixed(4 * i + j + 77);
            let unit = |j: u32| (word(j) >> 8) as f32 / (1 << 23) as f32 - 1.0;
            let a = match i % 8 {
                0 => 100.0 * unit(0),
                1 => 1.0 * unit(0),
                2 => -87.33654 + 1e-3 * unit(0),
                3 => [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, 88.376_26, -88.0, 88.5, -87.33654]
                    [(word(0) % 8) as usize],
                4 => 88.0 + unit(0),
                _ => 12.0 * unit(0),
            };
            let b = match i % 4 {
                0 => 127.5 * unit(1),
                1 => 4e6 * unit(1),
                2 => ((word(1) % 512) as f32 - 256.0) * 0.5,
                _ => 1e-3 * unit(1),
            };
            let c = if i % 4 == 0 { 1e-2 * unit(2) } else { 119.0 * unit(2) };
            [a.to_bits(), b.to_bits(), c.to_bits(), if i % 2 == 0 { word(3) } else { word(3) % (1 << 26) }]
        })
        .collect()
}

/// The probe of this adapter and driver: made once in a process.
pub(crate) fn cached(device: &Device) -> Result<Probe, WgpuError> {
    static KNOWN: Mutex<Vec<(String, Probe)>> = Mutex::new(Vec::new());
    let key = format!("{} {} {}", device.facts.name, device.facts.api, device.facts.driver);
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, probe)) = known().iter().find(|(name, _)| *name == key) {
        return Ok(probe.clone());
    }
    let probe = probe(device)?;
    known().push((key, probe.clone()));
    Ok(probe)
}
