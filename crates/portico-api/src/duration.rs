//! Durations as Go writes them: `60s`, `1m30s`, `1.5h`.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::Serialize;
use thiserror::Error;

/// A duration in Go's text form. It is signed so that a negative one can be reported.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GoDuration {
    nanoseconds: i64,
}

/// Why a text is no duration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum DurationError {
    /// No digits at the place of a number.
    #[error("a number is missing, as in 90s or 1m30s")]
    Number,
    /// A number without `h`, `m`, `s`, `ms`, `us` or `ns`.
    #[error("a unit is missing or unknown, as in 90s or 1m30s")]
    Unit,
    /// More than 292 years.
    #[error("it is too long")]
    TooLong,
}

impl GoDuration {
    /// The duration, unless it is negative.
    pub fn get(self) -> Option<Duration> {
        u64::try_from(self.nanoseconds).ok().map(Duration::from_nanos)
    }

    /// Whether it is zero, which means "not set" wherever KKP has a duration.
    pub fn is_zero(self) -> bool {
        self.nanoseconds == 0
    }
}

impl FromStr for GoDuration {
    type Err = DurationError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (negative, mut rest) = match text.as_bytes().first() {
            Some(b'-') => (true, &text[1..]),
            Some(b'+') => (false, &text[1..]),
            _ => (false, text),
        };
        if rest == "0" {
            return Ok(Self::default());
        }
        if rest.is_empty() {
            return Err(DurationError::Number);
        }
        let mut sum: i64 = 0;
        while !rest.is_empty() {
            let (part, after) = one_part(rest)?;
            sum = sum.checked_add(part).ok_or(DurationError::TooLong)?;
            rest = after;
        }
        Ok(Self { nanoseconds: if negative { -sum } else { sum } })
    }
}

/// Reads one number with its unit, and returns its nanoseconds and what follows.
fn one_part(text: &str) -> Result<(i64, &str), DurationError> {
    let (whole, rest) = split_digits(text);
    let (fraction, rest) = match rest.strip_prefix('.') {
        Some(rest) => split_digits(rest),
        None => ("", rest),
    };
    if whole.is_empty() && fraction.is_empty() {
        return Err(DurationError::Number);
    }
    let end = rest.find(|c: char| c == '.' || c.is_ascii_digit()).unwrap_or(rest.len());
    let (unit, rest) = rest.split_at(end);
    let unit: i64 = match unit {
        "ns" => 1,
        "us" | "µs" | "μs" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        "m" => 60_000_000_000,
        "h" => 3_600_000_000_000,
        _ => return Err(DurationError::Unit),
    };
    let whole: i64 = if whole.is_empty() { 0 } else { whole.parse().map_err(|_| DurationError::TooLong)? };
    let whole = whole.checked_mul(unit).ok_or(DurationError::TooLong)?;
    let nanoseconds = whole.checked_add(fraction_of(fraction, unit)).ok_or(DurationError::TooLong)?;
    Ok((nanoseconds, rest))
}

fn split_digits(text: &str) -> (&str, &str) {
    text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()))
}

/// The decimal fraction `0.DIGITS` of `unit`, cut to nanoseconds as Go does.
fn fraction_of(digits: &str, unit: i64) -> i64 {
    let mut sum = 0;
    let mut scale = unit;
    // Each step divides the scale by ten, so it is zero after at most 13 digits.
    for digit in digits.bytes() {
        let tenths = i64::from(digit - b'0') * scale;
        sum += tenths / 10;
        scale /= 10;
        if scale == 0 {
            break;
        }
    }
    sum
}

impl Serialize for GoDuration {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl fmt::Display for GoDuration {
    /// In seconds with as many decimals as needed, `90s`; Go reads it back as the same duration.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = if self.nanoseconds < 0 { "-" } else { "" };
        let nanoseconds = self.nanoseconds.unsigned_abs();
        let (seconds, rest) = (nanoseconds / 1_000_000_000, nanoseconds % 1_000_000_000);
        if rest == 0 {
            return write!(f, "{sign}{seconds}s");
        }
        let decimals = format!("{rest:09}");
        write!(f, "{sign}{seconds}.{}s", decimals.trim_end_matches('0'))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn millis(text: &str) -> i128 {
        i128::from(text.parse::<GoDuration>().unwrap().nanoseconds) / 1_000_000
    }

    #[test]
    fn durations_mean_what_they_mean_in_go() {
        for (text, expected) in [
            ("0", 0),
            ("0s", 0),
            ("60s", 60_000),
            ("1m30s", 90_000),
            ("1.5h", 5_400_000),
            (".5s", 500),
            ("1.s", 1_000),
            ("100ms", 100),
            ("1h2m3.25s", 3_723_250),
            ("-3s", -3_000),
            ("+3s", 3_000),
            ("5000µs", 5),
        ] {
            assert_eq!(millis(text), expected, "{text}");
        }
    }

    #[test]
    fn what_go_refuses_is_refused() {
        for text in ["", "-", "60", "s", ".s", "1m30", "1 s", "1d", "9999999999h", "1s-1s", "٣s"] {
            assert!(text.parse::<GoDuration>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_printed_duration_is_read_back_as_the_same() {
        for text in ["0", "90s", "1.25s", "-1ms", "1ns"] {
            let duration: GoDuration = text.parse().unwrap();
            assert_eq!(duration.to_string().parse(), Ok(duration));
        }
    }
}
