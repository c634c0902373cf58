//! `--parallel`: how many requests are computed together.

use std::str::FromStr;

use muser_engine::MOST_PARALLEL;

/// A number, or as many as memory bears.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parallel {
    /// As many as memory bears.
    Auto,
    /// So many.
    Fixed(usize),
}

impl FromStr for Parallel {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse::<usize>() {
            _ if text == "auto" => Ok(Self::Auto),
            Ok(number) if (1..=MOST_PARALLEL).contains(&number) => Ok(Self::Fixed(number)),
            _ => Err(format!("expected `auto` or a number from 1 to {MOST_PARALLEL}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Parallel;

    #[test]
    fn a_number_within_the_limits_or_auto() {
        assert_eq!("auto".parse(), Ok(Parallel::Auto));
        assert_eq!("1".parse(), Ok(Parallel::Fixed(1)));
        assert_eq!("256".parse(), Ok(Parallel::Fixed(256)));
        for refused in ["0", "257", "-1", "", "Auto", "4 "] {
            let error = refused.parse::<Parallel>().expect_err(refused);
            assert_eq!(error, "expected `auto` or a number from 1 to 256");
        }
    }
}
