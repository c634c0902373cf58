//! `docs/step-time.svg`: how long a step takes by its rows, beside what memory and arithmetic allow, from a receipt.

use std::fmt::Write as _;

use serde_json::Value;

/// The receipt that the picture shows.
pub(crate) const RECEIPT: &str = "cuda-h200-speed-rows";
/// Multiplications and additions of a row, with two digits a weight, and int8 operations per second of the card.
const OPERATIONS_A_ROW: f64 = 26.6e9 * 2.0 * 2.0;
const OPERATIONS_A_SECOND: f64 = 1979e12;

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 60.0;
const BOTTOM: f64 = 370.0;

/// Rows and milliseconds of the steps whose names `rows_of` understands, ascending.
fn points(tests: &[Value], rows_of: impl Fn(&str) -> Option<f64>) -> Vec<(f64, f64)> {
    let mut points: Vec<(f64, f64)> = tests
        .iter()
        .filter_map(|test| Some((rows_of(test["test"].as_str()?)?, test["median_ms"].as_f64()?)))
        .collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    points
}

fn between<'a>(text: &'a str, before: &str, after: &str) -> Option<&'a str> {
    text.strip_prefix(before)?.strip_suffix(after)
}

/// The picture of a receipt's report; `None` if it lacks what is drawn.
pub(crate) fn draw(report: &Value) -> Option<String> {
    let tests = report["tests"].as_array()?;
    let bytes = report["weight_bytes_per_token"].as_f64()?;
    let bandwidth = report["bandwidth"].as_f64()? * 1e9;
    let decode = |depth: &'static str| {
        let after = format!(" sequence(s) at depth {depth}, the largest logit alone");
        points(tests, move |name| between(name, "decode, ", &after)?.parse().ok())
    };
    let prefill = points(tests, |name| {
        let rows: f64 = between(name, "prefill of ", " tokens at depth 0")?.parse().ok()?;
        (rows <= 2048.0).then_some(rows)
    });
    let floor: Vec<(f64, f64)> = (0..=44)
        .map(|i| {
            let rows = 2f64.powf(f64::from(i) / 4.0);
            (rows, 1e3 * (bytes / bandwidth).max(rows * OPERATIONS_A_ROW / OPERATIONS_A_SECOND))
        })
        .collect();
    let lines = [
        ("decode, depth 0", "#1667c7", "", decode("0")),
        ("decode, depth 8,192", "#c75b16", "", decode("8192")),
        ("prefill, depth 0", "#2a8a3e", "", prefill),
        ("floor: memory, then int8 arithmetic", "#777777", "5 4", floor),
    ];
    if lines.iter().any(|line| line.3.is_empty()) {
        return None;
    }
    Some(svg(&lines))
}

/// A line's name, colour and dashes, and its points: rows and milliseconds.
type Line<'a> = (&'a str, &'a str, &'a str, Vec<(f64, f64)>);

fn svg(lines: &[Line<'_>]) -> String {
    // Both axes in powers of two: rows from 1 to 2,048, milliseconds from 2 to 512.
    let x = |rows: f64| LEFT + rows.log2() / 11.0 * (WIDTH - LEFT - 30.0);
    let y = |ms: f64| BOTTOM - (ms.log2() - 1.0) / 8.0 * (BOTTOM - 20.0);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <title>Time of a step by its rows</title>\n<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#ffffff\"/>\n"
    );
    for power in 0..=11 {
        let (rows, at) = (1 << power, x(f64::from(1 << power)));
        let _ = writeln!(
            out,
            "<line x1=\"{at:.1}\" y1=\"20\" x2=\"{at:.1}\" y2=\"{BOTTOM}\" stroke=\"#eeeeee\"/>"
        );
        let _ =
            writeln!(out, "<text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{rows}</text>", BOTTOM + 17.0);
    }
    for power in 1..=9 {
        let (ms, at) = (1 << power, y(f64::from(1 << power)));
        let _ = writeln!(
            out,
            "<line x1=\"{LEFT}\" y1=\"{at:.1}\" x2=\"{}\" y2=\"{at:.1}\" stroke=\"#eeeeee\"/>",
            WIDTH - 30.0
        );
        let _ =
            writeln!(out, "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{ms}</text>", LEFT - 6.0, at + 4.0);
    }
    let _ = writeln!(
        out,
        "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">rows of a step</text>",
        WIDTH / 2.0,
        HEIGHT - 12.0
    );
    let _ = writeln!(
        out,
        "<text x=\"16\" y=\"{}\" text-anchor=\"middle\" transform=\"rotate(-90 16 {0})\">milliseconds</text>",
        HEIGHT / 2.0
    );
    for (i, (name, color, dashes, points)) in lines.iter().enumerate() {
        let path: Vec<String> =
            points.iter().map(|(rows, ms)| format!("{:.1},{:.1}", x(*rows), y(*ms))).collect();
        let _ = writeln!(
            out,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"2\" stroke-dasharray=\"{dashes}\"/>",
            path.join(" ")
        );
        if dashes.is_empty() {
            for (rows, ms) in points {
                let _ = writeln!(
                    out,
                    "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"{color}\"/>",
                    x(*rows),
                    y(*ms)
                );
            }
        }
        let at = 36.0 + 18.0 * i as f64;
        let _ = writeln!(
            out,
            "<line x1=\"80\" y1=\"{0}\" x2=\"104\" y2=\"{0}\" stroke=\"{color}\" stroke-width=\"2\" stroke-dasharray=\"{dashes}\"/>",
            at - 4.0
        );
        let _ = writeln!(out, "<text x=\"110\" y=\"{at}\">{name}</text>");
    }
    out.push_str("</svg>\n");
    out
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::draw;

    #[test]
    fn each_measured_step_is_a_point_and_a_report_without_steps_has_no_picture() {
        let step = |name: &str, ms: f64| json!({ "test": name, "median_ms": ms });
        let report = json!({ "bandwidth": 4000.0, "weight_bytes_per_token": 16e9, "tests": [
            step("decode, 1 sequence(s) at depth 0, the largest logit alone", 5.0),
            step("decode, 64 sequence(s) at depth 0, the largest logit alone", 12.0),
            step("decode, 64 sequence(s) at depth 0", 15.0),
            step("decode, 1 sequence(s) at depth 8192, the largest logit alone", 5.2),
            step("prefill of 512 tokens at depth 0", 60.0),
            step("prefill of 32768 tokens at depth 0", 4700.0),
        ]});
        let picture = draw(&report).expect("it has all lines");
        assert_eq!(picture.matches("<circle").count(), 4);
        // 5 ms: (log2(5) - 1) / 8 of the way up from 370 to 20.
        assert!(picture.contains("cx=\"60.0\" cy=\"312.2\""), "{picture}");
        assert_eq!(draw(&json!({ "tests": [], "bandwidth": 1.0, "weight_bytes_per_token": 1.0 })), None);
    }
}
