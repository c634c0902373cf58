//! Values with their units, for people.

/// A value in words; `–` where there is none.
pub fn said(value: Option<f64>, unit: &str) -> String {
    let Some(value) = value else { return "–".to_owned() };
    let size = value.abs();
    let digits = |value: f64, few: bool| number(value, usize::from(few && value.fract() != 0.0));
    match unit {
        "share" => format!("{} %", digits(100.0 * value, size < 0.1)),
        "s" => match size {
            _ if size == 0.0 => "0 s".to_owned(),
            _ if size < 0.01 => format!("{value:.1} ms", value = 1e3 * value),
            _ if size < 1.0 => format!("{:.0} ms", 1e3 * value),
            _ if size < 120.0 => format!("{} s", digits(value, size < 10.0)),
            _ if size < 7200.0 => format!("{} min", digits(value / 60.0, false)),
            _ => format!("{:.1} h", value / 3600.0),
        },
        "bytes" => bytes(value),
        "bytes/s" => format!("{} GB/s", digits(value / 1e9, size < 1e10)),
        "tokens/s" => format!("{} tok/s", digits(value, size < 10.0)),
        "tokens" => format!("{} tokens", digits(value, size < 10.0)),
        _ => digits(value, size < 10.0),
    }
}

fn bytes(value: f64) -> String {
    let (name, step) = match value.abs() {
        size if size >= 1_073_741_824.0 => ("GiB", 1_073_741_824.0),
        size if size >= 1_048_576.0 => ("MiB", 1_048_576.0),
        size if size >= 1024.0 => ("KiB", 1024.0),
        _ => return format!("{value:.0} B"),
    };
    let few = usize::from(value.abs() / step < 10.0);
    format!("{} {name}", number(value / step, few))
}

/// Digits in groups of three.
fn number(value: f64, after: usize) -> String {
    let text = format!("{:.after$}", value.abs());
    let whole = text.split('.').next().unwrap_or_default().len();
    let mut out = String::with_capacity(text.len() + 4);
    if value < 0.0 && text.bytes().any(|digit| (b'1'..=b'9').contains(&digit)) {
        out.push('-');
    }
    for (at, digit) in text.chars().enumerate() {
        if at > 0 && at < whole && (whole - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A time span in words of two units at most.
pub fn span(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
        _ => format!("{} days", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_in_words() {
        for (value, unit, expected) in [
            (None, "s", "–"),
            (Some(0.0), "s", "0 s"),
            (Some(0.0021), "s", "2.1 ms"),
            (Some(0.25), "s", "250 ms"),
            (Some(4.25), "s", "4.2 s"),
            (Some(-12.4), "s", "-12 s"),
            (Some(1350.0), "s", "22 min"),
            (Some(9000.0), "s", "2.5 h"),
            (Some(0.5), "share", "50 %"),
            (Some(0.0123), "share", "1.2 %"),
            (Some(0.0), "bytes", "0 B"),
            (Some(1_572_864.0), "bytes", "1.5 MiB"),
            (Some(16e9), "bytes", "15 GiB"),
            (Some(19.94e9), "bytes/s", "20 GB/s"),
            (Some(6.27), "tokens/s", "6.3 tok/s"),
            (Some(1_234_567.0), "tokens", "1,234,567 tokens"),
            (Some(12.0), "requests", "12"),
            (Some(-0.01), "requests", "0.0"),
        ] {
            assert_eq!(said(value, unit), expected, "{value:?} {unit}");
        }
        for (seconds, expected) in [(9, "9 s"), (125, "2 min"), (7380, "2 h 3 min"), (400_000, "4 days")] {
            assert_eq!(span(seconds), expected);
        }
    }
}
