//! The table of `docs/fit.md`, generated; `MUSER_UPDATE_DOCS=1 cargo test -p muser-fit --test page` writes it anew.

use std::fmt::Write as _;
use std::path::Path;

use muser_backend::KvType;
use muser_fit::{Asked, KNOWN, ModelSize, Wish, gigabytes, host, plan_auto};

const BEGIN: &str = "<!-- table: generated -->\n";
const END: &str = "<!-- end of the table -->\n";

fn table() -> String {
    let model = ModelSize::released().expect("constants");
    let mut text = String::from(
        "| card | as | layers on it | of its memory | one sequence | eight | prompts | with `--kv 8` |\n|--:|---|---|--:|--:|--:|--:|--:|\n",
    );
    for size in [8, 12, 16, 24, 32, 48, 80, 96, 141] {
        let card = KNOWN.iter().find(|card| card.gigabytes == size).expect("a card of each size");
        let devices = [card.device("cuda:0"), host(32 << 30, None)];
        let of = |kv| {
            let wish = Wish { context: Asked::usual(32_768), parallel: Asked::usual(1), kv, draft: 0 };
            plan_auto(&model, &devices, &wish).expect("with a processor there is a plan")
        };
        let plan = of(KvType::Int16);
        let part = plan.parts.iter().find(|part| part.device == 0);
        let (layers, bytes) = part.map_or(("none".into(), 0), |part| match part.range.count() {
            52 => ("all".to_owned(), part.bytes()),
            n => (format!("{n} of 52"), part.bytes()),
        });
        let e = plan.expected;
        let rate = |value: f64| if value < 10.0 { format!("{value:.1}") } else { format!("{value:.0}") };
        let _ = writeln!(
            text,
            "| {size} GB | {} | {layers} | {} | {} | {} | {} | {} |",
            card.name,
            gigabytes(bytes),
            rate(e.one),
            rate(e.eight),
            rate(e.prompt),
            rate(of(KvType::Int8).expected.one),
        );
    }
    text
}

#[test]
fn the_table_is_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/fit.md");
    let page = std::fs::read_to_string(&path).expect("docs/fit.md");
    let (before, rest) = page.split_once(BEGIN).expect("where the table begins");
    let (_, after) = rest.split_once(END).expect("where it ends");
    let current = format!("{before}{BEGIN}{}{END}{after}", table());
    if std::env::var_os("MUSER_UPDATE_DOCS").is_some() {
        std::fs::write(&path, &current).expect("docs/fit.md can be written");
        return;
    }
    assert!(page == current, "docs/fit.md is stale: MUSER_UPDATE_DOCS=1 cargo test -p muser-fit --test page");
}
