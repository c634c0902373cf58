//! What holds of every plan, whatever the devices.

use muser_backend::KvType;
use muser_fit::{Asked, Device, KNOWN, Kind, ModelSize, Plan, Wish, host, plan, plan_auto};
use proptest::prelude::*;

fn released() -> ModelSize {
    ModelSize::released().expect("constants")
}

fn wish(context: Asked, parallel: Asked, kv: KvType) -> Wish {
    Wish { context, parallel, kv, draft: 0 }
}

fn usual() -> Wish {
    wish(Asked::usual(32_768), Asked::usual(1), KvType::Int16)
}

fn device(id: usize, kind: Kind, free: u64, read: f64) -> Device {
    let name = format!("{}:{id}", if kind == Kind::Cuda { "cuda" } else { "wgpu" });
    Device { id: name.clone(), name, kind, free, total: free, read: read * 1e9, compute: 1e14, link: 2e10 }
}

/// What every plan must be.
fn check(model: &ModelSize, devices: &[Device], plan: &Plan) {
    let mut next = 0;
    let mut used = vec![false; devices.len()];
    for part in &plan.parts {
        assert_eq!(part.range.first(), next, "every layer exactly once, in order: {plan:?}");
        next = part.range.end();
        let device = &devices[part.device];
        assert!(!std::mem::replace(&mut used[part.device], true), "a device once");
        let room = device.free.saturating_sub(device.reserve());
        assert!(part.kv + part.scratch <= room, "K and V in memory");
        match device.kind {
            Kind::Processor => assert!(part.bytes() <= room + plan.from_file, "what is beyond is said"),
            Kind::Cuda | Kind::Wgpu => assert!(part.bytes() + part.left == room, "never beyond: {part:?}"),
        }
    }
    assert_eq!(next, model.layers.len(), "{plan:?}");
    let weights: u64 = plan.parts.iter().map(|part| part.weights).sum();
    assert_eq!(weights, model.bytes(), "every weight once");
    assert!(plan.expected.one > 0.0 && plan.expected.eight >= plan.expected.one, "{:?}", plan.expected);
    assert!(plan.expected.prompt > 0.0 && plan.expected.prompt.is_finite());
    assert!(!plan.change.is_empty());
    plan.in_three_lines(devices).iter().for_each(|line| assert!(!line.is_empty() && !line.contains('\n')));
}

fn kinds() -> impl Strategy<Value = Kind> {
    prop_oneof![Just(Kind::Cuda), Just(Kind::Wgpu)]
}

fn devices() -> impl Strategy<Value = Vec<Device>> {
    let cards = proptest::collection::vec((kinds(), 0..40_u64, 50.0..4000.0_f64), 0..4);
    (cards, proptest::option::of((1..64_u64, 10.0..400.0_f64))).prop_map(|(cards, ram)| {
        let mut devices: Vec<Device> = cards
            .into_iter()
            .enumerate()
            .map(|(id, (kind, free, read))| device(id, kind, free << 30, read))
            .collect();
        devices.extend(ram.map(|(free, read)| host(free << 30, Some(read * 1e9))));
        devices
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn plans_fit_and_are_whole_and_always_the_same(devices in devices(), parallel in 1..9_u32, kv8: bool) {
        prop_assume!(!devices.is_empty());
        let model = released();
        let kv = if kv8 { KvType::Int8 } else { KvType::Int16 };
        let wish = wish(Asked::usual(32_768), Asked::usual(parallel), kv);
        let found = plan_auto(&model, &devices, &wish);
        prop_assert_eq!(&found, &plan_auto(&model, &devices, &wish));
        match found {
            Ok(plan) => check(&model, &devices, &plan),
            Err(none) => {
                prop_assert!(none.layers.is_none() && !none.shortages.is_empty(), "{}", none);
                for short in &none.shortages {
                    prop_assert!(short.needed >= short.has, "{}", none);
                }
                for way in &none.ways {
                    check(&model, &devices, &way.plan);
                }
            }
        }
    }

    #[test]
    fn more_memory_never_makes_a_plan_worse(mut devices in devices(), which in 0..5_usize, more in 1..20_u64) {
        prop_assume!(!devices.is_empty());
        let model = released();
        let wish = wish(Asked::fixed(16_384), Asked::fixed(2), KvType::Int16);
        let before = plan_auto(&model, &devices, &wish);
        let which = which % devices.len();
        devices[which].free += more << 30;
        let after = plan_auto(&model, &devices, &wish);
        if let Ok(before) = before {
            let after = after.expect("what fitted fits");
            // The reserve of a device is a share of its size, which has not changed here.
            prop_assert!(after.seconds <= before.seconds * (1.0 + 1e-9), "{:?} {:?}", before, after);
            check(&model, &devices, &after);
        }
    }

    #[test]
    fn asked_for_orders_and_numbers_are_kept(first in 1..51_usize, ram in 4..40_u64, card in 4..40_u64) {
        let model = released();
        let devices = [device(0, Kind::Cuda, card << 30, 900.0), host(ram << 30, None)];
        let counted = [(devices[0].clone(), Some(first)), (devices[1].clone(), None)];
        match plan(&model, &counted, None, &usual()) {
            Ok(plan) => {
                check(&model, &devices, &plan);
                prop_assert_eq!(plan.parts.len(), 2);
                prop_assert_eq!((plan.parts[0].device, plan.parts[0].range.count()), (0, first));
            }
            Err(none) => {
                let missing = none.shortages.iter().any(|short| short.needed > short.has);
                prop_assert!(missing, "{}", none);
            }
        }
    }
}

#[test]
fn of_equal_devices_the_first_one_is_taken() {
    let devices = [0, 1, 2].map(|id| device(id, Kind::Cuda, 24 << 30, 936.0));
    let plan = plan_auto(&released(), &devices, &usual()).expect("each has room");
    assert_eq!(plan.parts.iter().map(|part| part.device).collect::<Vec<_>>(), [0]);
}

#[test]
fn what_is_left_to_others_is_a_share_and_no_less_than_they_need() {
    let left = |kind, gib: u64| device(0, kind, gib << 30, 1.0).reserve() >> 20;
    assert_eq!([8, 100].map(|gib| left(Kind::Processor, gib)), [1024, 5120]);
    assert_eq!([24, 100].map(|gib| left(Kind::Cuda, gib)), [512, 2048]);
    assert_eq!([8, 100].map(|gib| left(Kind::Wgpu, gib)), [256, 2048]);
}

#[test]
fn every_known_card_has_a_plan_with_an_ordinary_processor() {
    let model = released();
    for card in KNOWN {
        let devices = [card.device("cuda:0"), host(32 << 30, None)];
        let plan = plan_auto(&model, &devices, &usual()).expect("with a processor there is one");
        check(&model, &devices, &plan);
        let whole = plan.parts.len() == 1 && plan.parts[0].device == 0;
        assert_eq!(whole, card.gigabytes >= 24, "{}: {plan:?}", card.name);
        assert_eq!((plan.context, plan.parallel), (32_768, 1));
    }
}

#[test]
fn the_table_of_one_row_a_token_stays_out_of_a_small_card() {
    let model = released();
    let devices = [device(0, Kind::Cuda, 12 << 30, 360.0), host(32 << 30, None)];
    let plan = plan_auto(&model, &devices, &usual()).expect("fits");
    assert_eq!(plan.parts.iter().map(|part| part.device).collect::<Vec<_>>(), [1, 0], "the processor first");
    assert!(plan.parts[0].weights > model.table && plan.parts[1].range.has_output());
    // What is left on the card is less than a layer takes.
    assert!(plan.parts[1].left < 400 << 20, "{plan:?}");
}

#[test]
fn what_does_not_fit_says_what_is_missing_and_what_would_fit() {
    let model = released();
    let card = device(0, Kind::Cuda, 12 << 30, 360.0);
    let ram = host(32 << 30, None);
    let fixed = wish(Asked::fixed(131_072), Asked::fixed(8), KvType::Int16);
    let none = plan(&model, &[(card.clone(), None)], Some(&ram), &fixed).expect_err("17 GB on 12");
    let text = none.to_string();
    assert!(text.contains("cuda:0 would need") && text.contains("are missing"), "{text}");
    assert!(none.ways.iter().any(|way| way.ask == "cpu before the others"), "{text}");
    // Layers that are too many for a part, with its own figures.
    let counted = [(card.clone(), Some(50)), (ram.clone(), Some(2))];
    let none = plan(&model, &counted, None, &usual()).expect_err("50 layers on 12 GB");
    assert_eq!(none.shortages.len(), 1);
    assert_eq!(none.shortages[0].device, "cuda:0");
    assert!(none.shortages[0].needed > 15_000_000_000, "{none}");
    assert!(none.ways[0].ask.contains("without numbers"), "{none}");
    // Numbers that do not add up.
    let counted = [(card.clone(), Some(20)), (ram.clone(), Some(20))];
    let none = plan(&model, &counted, None, &usual()).expect_err("12 layers are nowhere");
    assert!(none.to_string().starts_with("40 layers are shared out, the model has 52"), "{none}");
    let counted = [(card.clone(), Some(52)), (ram.clone(), None)];
    let none = plan(&model, &counted, None, &usual()).expect_err("none is left for the processor");
    assert!(none.to_string().starts_with("52 layers and one for each of 1 other devices"), "{none}");
    // K and V alone.
    let wide = wish(Asked::fixed(131_072), Asked::fixed(6), KvType::Int16);
    let card = device(0, Kind::Cuda, 24 << 30, 936.0);
    let none = plan(&model, &[(card.clone(), None)], Some(&ram), &wide).expect_err("no room for K and V");
    assert_eq!(none.ways.len(), 3, "the nearest of four: {none}");
    let none = plan(&model, &[(card, None)], None, &wide).expect_err("no room for K and V");
    let asks: Vec<&str> = none.ways.iter().map(|way| way.ask.as_str()).collect();
    assert!(asks.contains(&"--parallel 1") && asks.iter().any(|ask| ask.starts_with("--ctx ")), "{asks:?}");
}

#[test]
fn less_is_planned_only_where_less_is_allowed() {
    let model = released();
    let card = [device(0, Kind::Cuda, 20 << 30, 936.0)];
    let asked = |context, parallel| plan_auto(&model, &card, &wish(context, parallel, KvType::Int16));
    asked(Asked::fixed(131_072), Asked::fixed(4)).expect_err("too much");
    let fewer = asked(Asked::fixed(32_768), Asked::usual(16)).expect("fewer sequences");
    assert!(fewer.context == 32_768 && fewer.parallel < 16, "{fewer:?}");
    assert!(fewer.change.contains("no room for 16 x 32768"), "{}", fewer.change);
    let shorter = asked(Asked::usual(131_072), Asked::fixed(2)).expect("a shorter context");
    assert!(shorter.context < 131_072 && shorter.parallel == 2, "{shorter:?}");
}

#[test]
fn a_machine_with_little_memory_reads_from_the_file_and_says_so() {
    let model = released();
    let devices = [host(12 << 30, None)];
    let plan = plan_auto(&model, &devices, &usual()).expect("slowly");
    assert!(plan.from_file > 5_000_000_000, "{plan:?}");
    assert!(plan.expected.one < 0.2, "{plan:?}");
    let lines = plan.in_three_lines(&devices);
    assert!(lines[1].contains("memory lacks") && lines[1].contains("read from the file"), "{lines:?}");
    plan_auto(&model, &[host(1 << 30, None)], &usual()).expect_err("not even K and V");
}

#[test]
fn kv_in_8_bits_is_named_where_it_makes_a_difference() {
    let model = released();
    let devices = [device(0, Kind::Cuda, 16 << 30, 717.0), host(32 << 30, None)];
    let wide = wish(Asked::fixed(65_536), Asked::fixed(2), KvType::Int16);
    let plan = plan_auto(&model, &devices, &wide).expect("fits");
    assert!(plan.change.contains("--kv 8:"), "{}", plan.change);
    let large = [device(0, Kind::Cuda, 80 << 30, 2039.0), host(32 << 30, None)];
    let plan = plan_auto(&model, &large, &wide).expect("fits");
    assert!(plan.change.starts_with("a faster device"), "{}", plan.change);
}
