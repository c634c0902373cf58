//! Medians and spreads.

/// The middle value (the mean of two); `None` of nothing.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted: Vec<f64> = values.iter().copied().filter(|v| v.is_finite()).collect();
    sorted.sort_by(f64::total_cmp);
    let half = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        n if n % 2 == 1 => Some(sorted[half]),
        _ => Some(f64::midpoint(sorted[half - 1], sorted[half])),
    }
}

/// The same of values that there are some of; not a number of nothing.
pub fn middle(values: &[f64]) -> f64 {
    median(values).unwrap_or(f64::NAN)
}

/// Largest minus smallest, as a share of the median.
pub fn spread(values: &[f64]) -> Option<f64> {
    let middle = median(values)?;
    let largest = values.iter().copied().fold(f64::MIN, f64::max);
    let smallest = values.iter().copied().fold(f64::MAX, f64::min);
    (middle > 0.0).then_some((largest - smallest) / middle)
}

/// A figure with as many digits as such measurements carry.
pub fn round(value: f64, digits: i32) -> f64 {
    let scale = 10f64.powi(digits);
    (value * scale).round() / scale
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_and_the_width() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(spread(&[4.0, 5.0, 6.0]), Some(0.4));
        assert_eq!(spread(&[]), None);
        assert_eq!(round(1.23456, 3), 1.235);
    }
}
