//! Tests of every instantiation of every kernel by its text alone: no float operation outside the prelude, SPIR-V that a checker
//! accepts, MSL 3.0, workgroup memory and bindings within the least adapter.

use std::collections::HashSet;
use std::io::Write as _;
use std::process::{Command, Stdio};

use muser_gguf::GgmlType;
use naga::valid::{Capabilities, SubgroupOperationSet, ValidationFlags, Validator};

use crate::text::Constant::{Bool, Number};
use crate::text::{Constant, Dot, Form, Operations, Source, shader};
use crate::{eight, products, program};

/// The forms that a device with good arithmetic has, and those of one without.
const FORMS: [Operations; 3] = [
    Operations {
        fma: Form::Native,
        add: Form::Native,
        mul: Form::Native,
        divide: Form::Native,
        root: Form::Native,
        half: Form::Native,
        dot: Dot::Packed,
    },
    Operations {
        fma: Form::Guarded,
        add: Form::Guarded,
        mul: Form::Guarded,
        divide: Form::Corrected,
        root: Form::Corrected,
        half: Form::Native,
        dot: Dot::Floats,
    },
    Operations::INTEGERS,
];

/// Combined hashes of the MSL text of all kernels, for each of [`FORMS`]: what Macs are given, unrun, changes only knowingly.
const MSL: [&str; 3] = ["036cb008e331aa5e", "3229f2f10951d427", "d1022c775b0facd3"];

fn all() -> Vec<Source> {
    let types = || GgmlType::all().filter(|ty| ty.is_decodable() && *ty != GgmlType::Q8_K);
    let mut all: Vec<Source> = types()
        .flat_map(|ty| {
            let products =
                [(1, false), (4, false), (4, true)].map(|(n, scaled)| products::any_source(ty, scaled, n));
            products.into_iter().chain([false, true].map(|scaled| program::embed_source(ty, scaled)))
        })
        .map(|source| source.expect("a kernel for every type"))
        .collect();
    let few = types().filter(|ty| eight::takes(*ty, (8, 8)));
    all.extend(few.flat_map(|ty| eight::TOKENS.map(|tokens| eight::source(ty, tokens))));
    let mut add = |name: &str, constants: &[(&str, Constant)], files: &[&str]| {
        all.push(Source::new(name, constants, files));
    };
    for mode in 0..3 {
        add("norm_sums", &[("MODE", Number(mode))], &[shader!("rows"), shader!("norm_sums")]);
        for top in [false, true] {
            let constants = [("MODE", Number(mode)), ("STORE", Bool(mode > 0 && !top)), ("ROW", Bool(top))];
            add("norm_apply", &constants, &[shader!("quant"), shader!("norm_apply")]);
        }
    }
    for (dim, digits) in [(64, 1), (64, 2), (96, 2), (128, 1), (128, 2), (256, 2)] {
        let shared = [("DIM", Number(dim)), ("DIGITS", Number(digits))];
        for (kind, rotate) in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)] {
            let constants = [&shared[..], &[("KIND", Number(kind)), ("ROTATE", Number(rotate))]].concat();
            add("rope_store", &constants, &[shader!("heads"), shader!("rope_store")]);
        }
        for (batch, own) in [(1, false), (2, false), (4, false), (4, true)] {
            let constants = [&shared[..], &[("BATCH", Number(batch)), ("OWN", Bool(own))]].concat();
            add("attention", &constants, &[shader!("attention")]);
        }
        for gated in [false, true] {
            let constants = [("DIM", Number(dim)), ("GATED", Bool(gated))];
            add("combine", &constants, &[shader!("quant"), shader!("combine")]);
        }
    }
    for capped in [false, true] {
        add("logits", &[("CAPPED", Bool(capped))], &[shader!("ranks"), shader!("logits")]);
    }
    add("argmax", &[], &[shader!("ranks"), shader!("argmax")]);
    add("silu", &[], &[shader!("quant"), shader!("silu")]);
    add("tap", &[], &[shader!("quant"), shader!("tap")]);
    add("scale_rows", &[], &[shader!("scale_rows")]);
    add("plain_read", &[], &[shader!("read")]);
    all
}

fn validated(source: &Source, operations: Operations) -> (naga::Module, naga::valid::ModuleInfo) {
    let text = source.text(operations);
    let module = naga::front::wgsl::parse_str(&text)
        .unwrap_or_else(|error| panic!("{}: {}", source.name, error.emit_to_string(&text)));
    let mut validator = Validator::new(ValidationFlags::all(), Capabilities::all());
    validator
        .subgroup_stages(naga::valid::ShaderStages::all())
        .subgroup_operations(SubgroupOperationSet::all());
    let info = validator.validate(&module).unwrap_or_else(|error| panic!("{}: {error:?}", source.name));
    (module, info)
}

/// Names of the functions in some text.
fn functions(text: &str) -> HashSet<String> {
    let names = text.split("fn ").skip(1).filter_map(|rest| rest.split('(').next());
    names.map(str::to_owned).collect()
}

#[test]
fn floats_are_rounded_in_the_prelude_and_nowhere_else() {
    let operations = FORMS[0];
    let allowed = functions(&(operations.text() + shader!("prelude")));
    assert!(allowed.contains("exact_fma") && allowed.contains("exp2_exact") && !allowed.contains("quantise"));
    let mut checked = 0;
    for source in all() {
        let (module, info) = validated(&source, operations);
        let own =
            module.functions.iter().filter(|(_, f)| !f.name.as_ref().is_some_and(|n| allowed.contains(n)));
        let own = own.map(|(handle, f)| (f, &info[handle]));
        let entry =
            module.entry_points.iter().enumerate().map(|(i, e)| (&e.function, info.get_entry_point(i)));
        for (function, facts) in own.chain(entry) {
            for (handle, expression) in function.expressions.iter() {
                let kind = facts[handle].ty.inner_with(&module.types).scalar_kind();
                let float = kind == Some(naga::ScalarKind::Float);
                let rounds = match expression {
                    naga::Expression::Binary { op, .. } => {
                        use naga::BinaryOperator::{Add, Divide, Modulo, Multiply, Subtract};
                        matches!(op, Add | Subtract | Multiply | Divide | Modulo)
                    }
                    naga::Expression::Math { .. } | naga::Expression::Unary { .. } => true,
                    _ => false,
                };
                assert!(!(float && rounds), "{}: {:?} in {:?}", source.name, expression, function.name);
                checked += 1;
            }
        }
    }
    assert!(checked > 10_000, "expressions");
}

#[test]
fn kernels_fit_the_least_adapter() {
    for source in all() {
        let (module, _) = validated(&source, FORMS[0]);
        let workgroup =
            module.global_variables.iter().filter(|(_, v)| v.space == naga::AddressSpace::WorkGroup);
        let bytes: u32 = workgroup.map(|(_, v)| module.types[v.ty].inner.size(module.to_ctx())).sum();
        assert!(bytes <= 16 << 10, "{}: {bytes} bytes of workgroup memory", source.name);
        let invocations: u32 = module.entry_points[0].workgroup_size.iter().product();
        assert!(invocations <= 256, "{}: {invocations} invocations", source.name);
        assert!(source.slots.len() <= 12, "{}: {} bindings", source.name, source.slots.len());
    }
}

#[test]
fn spirv_passes_the_checker() {
    let checker = || {
        Command::new("spirv-val")
            .args(["--target-env", "vulkan1.3", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
    };
    let installed = checker().is_ok();
    if !installed {
        muser_testkit::skip(
            muser_testkit::Need::Vulkan,
            "spirv-val is not installed; SPIR-V is made and not checked",
        );
    }
    for source in all() {
        let (module, info) = validated(&source, FORMS[1]);
        let options = naga::back::spv::Options {
            lang_version: (1, 3),
            zero_initialize_workgroup_memory: naga::back::spv::ZeroInitializeWorkgroupMemoryMode::None,
            ..naga::back::spv::Options::default()
        };
        let words = naga::back::spv::write_vec(&module, &info, &options, None).expect("SPIR-V");
        if !installed {
            continue;
        }
        let mut child = checker().expect("the checker starts");
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        child.stdin.take().expect("a pipe").write_all(&bytes).expect("it reads");
        let result = child.wait_with_output().expect("it ends");
        assert!(result.status.success(), "{}: {}", source.name, String::from_utf8_lossy(&result.stdout));
    }
}

#[test]
fn metal_text_is_the_one_that_was_looked_at() {
    let mut found = Vec::new();
    for operations in FORMS {
        let mut hasher = blake3::Hasher::new();
        for source in all() {
            let (module, info) = validated(&source, operations);
            let options =
                naga::back::msl::Options { lang_version: (3, 0), ..naga::back::msl::Options::default() };
            let pipeline = naga::back::msl::PipelineOptions::default();
            let (text, _) = naga::back::msl::write_string(&module, &info, &options, &pipeline)
                .unwrap_or_else(|error| panic!("{}: {error}", source.name));
            hasher.update(source.name.as_bytes()).update(text.as_bytes());
        }
        found.push(hasher.finalize().to_hex()[..16].to_owned());
    }
    assert_eq!(found, MSL, "another text for Metal: look at it, then note its hashes here");
}
