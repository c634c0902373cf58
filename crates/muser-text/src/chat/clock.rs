//! `strftime_now` of templates: the date in UTC, from a clock that tests can set.

use minijinja::{Error, ErrorKind};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// Where templates get the time from.
#[derive(Clone)]
pub struct Clock(Arc<dyn Fn() -> SystemTime + Send + Sync>);

impl std::fmt::Debug for Clock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Clock")
    }
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

impl Clock {
    /// The system's clock.
    pub fn system() -> Clock {
        Clock(Arc::new(SystemTime::now))
    }

    /// A clock that always shows this time.
    pub fn fixed(time: SystemTime) -> Clock {
        Clock(Arc::new(move || time))
    }

    /// The time now in Python's `strftime` notation; a directive that is not known here is an error.
    pub(crate) fn format(&self, format: &str) -> Result<String, Error> {
        // A clock before 1970 is not set: it shows the first day.
        let seconds = (self.0)().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs() as i64;
        let days = seconds / 86_400;
        let of_day = seconds % 86_400;
        let (year, month, day) = civil_date(days);
        let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
        let weekday = WEEKDAYS[((days + 4) % 7) as usize];
        let month_name = MONTHS[month as usize - 1];
        let hour_of_12 = (hour + 11) % 12 + 1;
        let mut out = String::new();
        let mut chars = format.chars();
        while let Some(c) = chars.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let mut directive = chars.next();
            let padded = directive != Some('-');
            if !padded {
                directive = chars.next();
            }
            let two = |value: i64| if padded { format!("{value:02}") } else { value.to_string() };
            let part = match directive {
                Some('Y') => year.to_string(),
                Some('y') => two(year % 100),
                Some('m') => two(month),
                Some('d') => two(day),
                Some('H') => two(hour),
                Some('I') => two(hour_of_12),
                Some('M') => two(minute),
                Some('S') => two(second),
                Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
                Some('B') => month_name.to_owned(),
                Some('b') => month_name[..3].to_owned(),
                Some('A') => weekday.to_owned(),
                Some('a') => weekday[..3].to_owned(),
                Some('j') => {
                    let day_of_year = days - days_before_year(year) + 1;
                    if padded { format!("{day_of_year:03}") } else { day_of_year.to_string() }
                }
                Some('F') => format!("{year}-{month:02}-{day:02}"),
                Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
                Some('Z') => "UTC".to_owned(),
                Some('z') => "+0000".to_owned(),
                Some('%') => "%".to_owned(),
                other => {
                    let shown = other.map(String::from).unwrap_or_default();
                    return Err(Error::new(
                        ErrorKind::InvalidOperation,
                        format!("strftime_now does not know the directive %{shown}"),
                    ));
                }
            };
            out.push_str(&part);
        }
        Ok(out)
    }
}

/// A time in UTC, such as `2026-08-12T09:30:00Z`.
pub fn utc(unix_seconds: u64) -> String {
    let (year, month, day) = civil_date((unix_seconds / 86_400) as i64);
    let second = unix_seconds % 86_400;
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", second / 3600, second / 60 % 60, second % 60)
}

/// Now, likewise.
pub fn utc_now() -> String {
    utc(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs())
}

/// Days from 1970-01-01 to the first of January of a year.
fn days_before_year(year: i64) -> i64 {
    let past = year - 1;
    past * 365 + past / 4 - past / 100 + past / 400 - 719_162
}

/// Year, month and day of a day number from 0 (1970-01-01) on, in the Gregorian calendar.
fn civil_date(days: i64) -> (i64, i64, i64) {
    let mut year = 1970 + days / 366;
    while days_before_year(year + 1) <= days {
        year += 1;
    }
    let leap = days_before_year(year + 1) - days_before_year(year) == 366;
    let mut rest = days - days_before_year(year);
    let lengths = [31, if leap { 29 } else { 28 }, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    for (month, length) in (1..).zip(lengths) {
        if rest < length {
            return (year, month, rest + 1);
        }
        rest -= length;
    }
    (year, 12, 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn check(seconds: u64, format: &str, expected: &str) {
        let clock = Clock::fixed(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(clock.format(format).expect("known directives"), expected);
    }

    #[test]
    fn dates_as_python_writes_them() {
        check(0, "%Y-%m-%d %H:%M:%S %A %j", "1970-01-01 00:00:00 Thursday 001");
        check(1_786_492_800, "%Y-%m-%d", "2026-08-12");
        check(951_782_400, "%d %b %Y, %a, day %j", "29 Feb 2000, Tue, day 060");
        check(1_735_689_599, "%B %-d, %I:%M %p", "December 31, 11:59 PM");
        check(4_107_542_400, "%F %y%%", "2100-03-01 00%");
    }

    #[test]
    fn dates_are_civil() {
        for (seconds, expected) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_709_251_199, "2024-02-29T23:59:59Z"),
            (1_786_527_000, "2026-08-12T09:30:00Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(utc(seconds), expected);
        }
    }

    #[test]
    fn every_day_follows_the_one_before() {
        let mut last = civil_date(0);
        for days in 1..1_000_000 {
            let (year, month, day) = civil_date(days);
            let next_day = (year, month, day) == (last.0, last.1, last.2 + 1);
            let next_month = (year, month, day) == (last.0, last.1 + 1, 1);
            let next_year = (year, month, day) == (last.0 + 1, 1, 1);
            assert!(
                next_day || next_month && last.2 >= 28 || next_year && (last.1, last.2) == (12, 31),
                "{days}"
            );
            last = (year, month, day);
        }
    }

    #[test]
    fn unknown_directives_are_errors() {
        for format in ["%Q", "%", "%-"] {
            assert!(Clock::system().format(format).is_err(), "{format}");
        }
    }
}
