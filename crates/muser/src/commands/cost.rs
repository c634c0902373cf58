//! `muser cost`: the arithmetic of one token, and where each figure comes from.
//!
//! Three kinds of figures: read from the file (tensor table, metadata), derived from these by the arithmetic of
//! `muser_model::cost`, and measured on this machine now. A time that rests on a measurement is called measured.

use std::io::Write as _;

use anyhow::Result;
use muser_bench::bandwidth::Probe;
use muser_bench::stats::round;
use muser_image::Grid;
use muser_model::cost::{Cost, CostOptions, PictureCost};
use muser_model::{Geometry, Projector};
use serde::Serialize;

use crate::COMMIT;
use crate::cli::CostArgs;
use crate::model_file::ModelSource;
use crate::output::{Console, sanitize};
use crate::projector;

/// Where a figure comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Source {
    File,
    Derived,
    Measured,
}

impl Source {
    fn in_words(self) -> &'static str {
        match self {
            Self::File => "read from the file",
            Self::Derived => "derived",
            Self::Measured => "measured",
        }
    }
}

/// One figure.
#[derive(Debug, Serialize)]
struct Figure {
    key: String,
    #[serde(skip)]
    label: String,
    value: Number,
    unit: &'static str,
    source: Source,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(untagged)]
enum Number {
    Whole(u64),
    Real(f64),
}

#[derive(Debug, Serialize)]
struct Report {
    model: String,
    commit: &'static str,
    context: u64,
    slots: u64,
    figures: Vec<Figure>,
}

/// Runs the command.
pub fn run(args: CostArgs, console: &Console) -> Result<()> {
    let source = ModelSource::choose(args.model.as_deref(), console)?;
    let file = source.open()?;
    let geometry = Geometry::from_gguf(&file)?;
    if args.context > geometry.context as u64 {
        console
            .warning(format!("the model is made for {} positions, not {}", geometry.context, args.context));
    }
    let options = CostOptions { context: args.context, slots: args.slots, ..CostOptions::default() };
    let cost = Cost::of_file(&file, &geometry, options);
    let bandwidth =
        if args.no_probe { None } else { Some(Probe::new(args.threads.map(usize::from))?.bytes_per_s()?) };
    let mut figures = figures(&cost, &geometry, bandwidth);
    if let Some(size) = args.image {
        let projector = projector::of_model(&args.mmproj, &source, &geometry)?;
        figures.extend(of_image(&projector, size, args.image_max_tokens, &cost, &geometry));
    }
    let report =
        Report { model: source.label(), commit: COMMIT, context: args.context, slots: args.slots, figures };
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&report)?)?;
        return Ok(());
    }
    let (slots, context) = (report.slots, report.context);
    writeln!(out, "{}: {slots} x {context} positions", sanitize(&report.model))?;
    let width = report.figures.iter().map(|f| f.label.chars().count()).max().unwrap_or(0);
    for figure in &report.figures {
        let value = match figure.value {
            Number::Whole(value) => grouped(value),
            Number::Real(value) => format!("{value}"),
        };
        let unit = figure.unit;
        writeln!(out, "{:width$}  {value:>18} {unit:<12} {}", figure.label, figure.source.in_words())?;
    }
    Ok(())
}

fn figures(cost: &Cost, geometry: &Geometry, bandwidth: Option<f64>) -> Vec<Figure> {
    let mut list = Vec::new();
    let mut add = |key: &str, label: String, value: Number, unit, source| {
        list.push(Figure { key: key.to_owned(), label, value, unit, source });
    };
    let (slots, context) = (cost.options.slots, cost.options.context);
    for share in &cost.shares {
        let (part, ty) = (share.part.name(), share.ty.name());
        let key = format!("{part}.{ty}");
        let n = share.tensors;
        add(&format!("{key}.tensors"), format!("{part}, {ty}: tensors"), Number::Whole(n), "", Source::File);
        let parameters = Number::Whole(share.parameters);
        add(&format!("{key}.parameters"), format!("{part}, {ty}: parameters"), parameters, "", Source::File);
        add(
            &format!("{key}.bytes"),
            format!("{part}, {ty}: size"),
            Number::Whole(share.bytes),
            "bytes",
            Source::Derived,
        );
    }
    let mut derived = |key: &str, label: &str, value: u64, unit| {
        add(key, label.to_owned(), Number::Whole(value), unit, Source::Derived);
    };
    derived("parameters", "all parameters", cost.parameters, "");
    derived("tensor_bytes", "all tensors", cost.tensor_bytes, "bytes");
    derived("streamed_bytes", "weights read for every token", cost.streamed_bytes, "bytes");
    derived("kv_row_bytes", "keys and values of a position in a layer", cost.kv.row_bytes, "bytes");
    derived("kv_bytes_per_position", "of a position in all layers", cost.kv.bytes_per_position, "bytes");
    derived(
        "kv_bytes_per_position_beyond_window",
        "of a position when the window is full",
        cost.kv.bytes_per_position_beyond_window,
        "bytes",
    );
    derived("kv_slot_bytes", "of one sequence at this context", cost.kv.slot_bytes(), "bytes");
    derived("kv_slot_block_bytes", "of one sequence in whole blocks", cost.kv.slot_block_bytes, "bytes");
    derived("memory_bytes", "memory for weights and all sequences", cost.memory_bytes(), "bytes");
    derived("matrix_flops", "matrix work of a token", cost.matrix_flops, "FLOP");
    derived("attention_flops", "attention work of a token at this context", cost.attention_flops, "FLOP");
    derived("token_bytes", "bytes read for a token at this context", cost.token_bytes(), "bytes");
    let intensity = Number::Real(round(cost.flops_per_byte(), 3));
    add("flops_per_byte", "work for each byte".to_owned(), intensity, "FLOP/byte", Source::Derived);
    let whole = |value: usize| Number::Whole(value as u64);
    add("layers", "layers".to_owned(), whole(geometry.layers()), "", Source::File);
    add(
        "window",
        "window of the sliding layers".to_owned(),
        whole(geometry.window),
        "positions",
        Source::File,
    );
    add("model_context", "most positions".to_owned(), whole(geometry.context), "positions", Source::File);
    if let Some(bytes_per_s) = bandwidth.filter(|b| *b > 0.0) {
        // A step of all slots reads the weights once and every sequence's keys and values.
        let step_bytes = cost.streamed_bytes.saturating_add(slots.saturating_mul(cost.kv.slot_bytes()));
        let seconds = step_bytes as f64 / bytes_per_s;
        let mut measured = |key: &str, label: String, value: f64, unit| {
            add(key, label, Number::Real(value), unit, Source::Measured);
        };
        measured("bandwidth_gb_s", "memory reads at".to_owned(), round(bytes_per_s / 1e9, 2), "GB/s");
        let label = format!("time to read what a step of {slots} needs");
        measured("step_ms", label, round(1e3 * seconds, 3), "ms");
        let label = format!("at most, {slots} at {context} positions");
        measured("most_tok_s", label, round(slots as f64 / seconds, 2), "tok/s");
    }
    list
}

/// What an image of so many pixels costs.
fn of_image(
    projector: &Projector,
    (width, height): (u32, u32),
    most_tokens: u32,
    cost: &Cost,
    geometry: &Geometry,
) -> Vec<Figure> {
    let grid = Grid::choose(width, height, projector.config.unit() as u32, most_tokens);
    let sides = (grid.rows, grid.cols);
    let image = PictureCost::of(&projector.config, projector.adapter, sides, cost, geometry);
    let projector_bytes =
        projector.file.tensors().iter().map(|tensor| projector.file.tensor_data(tensor).len() as u64).sum();
    [
        ("image.tokens", format!("image of {width}x{height}: tokens"), image.tokens, ""),
        ("image.patches", "its patches, rows of the tower".to_owned(), image.patches, ""),
        ("image.matrix_flops", "matrix work of the tower".to_owned(), image.matrix_flops, "FLOP"),
        ("image.attention_flops", "attention work of the tower".to_owned(), image.attention_flops, "FLOP"),
        (
            "image.text_flops",
            "matrix work of the text model for its tokens".to_owned(),
            image.text_flops,
            "FLOP",
        ),
        ("image.row_bytes", "its rows, while they are kept".to_owned(), image.row_bytes, "bytes"),
        ("image.projector_bytes", "all tensors of the projector".to_owned(), projector_bytes, "bytes"),
    ]
    .map(|(key, label, value, unit)| {
        let source = Source::Derived;
        Figure { key: key.to_owned(), label, value: Number::Whole(value), unit, source }
    })
    .into()
}

/// Digits in groups of three.
fn grouped(value: u64) -> String {
    let digits = value.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use muser_gguf::GgmlType;
    use muser_model::synth::{self, Mix, Preset, SynthOptions};

    use super::*;

    fn value(list: &[Figure], key: &str) -> Option<(Number, Source)> {
        list.iter().find(|f| f.key == key).map(|f| (f.value, f.source))
    }

    #[test]
    fn the_official_file_to_the_byte_with_its_sources() {
        let table = synth::table(&SynthOptions::new(Preset::B30, Mix::Medium(GgmlType::Q4_K))).unwrap();
        let table = table.iter().map(|(name, dims, ty)| (name.as_str(), dims.as_slice(), *ty));
        let geometry = Geometry::released();
        let options = CostOptions { context: 32_768, slots: 4, ..CostOptions::default() };
        let list = figures(&Cost::of_table(table, &geometry, options), &geometry, Some(20e9));
        for (key, number, source) in [
            ("parameters", 27_854_794_240, Source::Derived),
            ("tensor_bytes", 16_743_567_360, Source::Derived),
            ("streamed_bytes", 15_987_099_648, Source::Derived),
            ("embedding.Q4_K.bytes", 756_467_712, Source::Derived),
            ("output.Q5_K.tensors", 1, Source::File),
            ("kv_row_bytes", 1024, Source::Derived),
            ("kv_slot_bytes", 517_996_544, Source::Derived),
            ("layers", 52, Source::File),
        ] {
            assert_eq!(value(&list, key), Some((Number::Whole(number), source)), "{key}");
        }
        // 15,987,099,648 + 4 * 517,996,544 bytes at 20 GB/s.
        assert_eq!(value(&list, "step_ms"), Some((Number::Real(902.954), Source::Measured)));
        assert_eq!(value(&list, "most_tok_s"), Some((Number::Real(4.43), Source::Measured)));
        let without = figures(&Cost::of_table([], &geometry, options), &geometry, None);
        assert!(without.iter().all(|f| f.source != Source::Measured));
    }

    #[test]
    fn digits_are_grouped() {
        for (value, expected) in [(0, "0"), (999, "999"), (1000, "1,000"), (15_987_099_648, "15,987,099,648")]
        {
            assert_eq!(grouped(value), expected);
        }
    }
}
