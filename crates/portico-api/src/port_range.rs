//! A range of ports as Kubernetes writes it: `30000-32767`.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// A range of port numbers, both ends included, never empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PortRange {
    first: u16,
    last: u16,
}

/// Why a text is no port range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum PortRangeError {
    /// Not two numbers from 1 to 65535.
    #[error("it must read FIRST-LAST, FIRST+COUNT or FIRST, with ports from 1 to 65535")]
    Syntax,
    /// The first is greater than the last.
    #[error("its first port is greater than its last")]
    Backwards,
}

impl PortRange {
    /// The default of Kubernetes and KKP.
    pub const NODE_PORTS: Self = Self { first: 30_000, last: 32_767 };

    /// The range from `first` to `last`, both included.
    ///
    /// # Errors
    /// If `first` is 0 or greater than `last`.
    pub const fn new(first: u16, last: u16) -> Result<Self, PortRangeError> {
        match (first, last) {
            (0, _) => Err(PortRangeError::Syntax),
            (first, last) if first > last => Err(PortRangeError::Backwards),
            (first, last) => Ok(Self { first, last }),
        }
    }

    /// Its first port.
    pub fn first(self) -> u16 {
        self.first
    }

    /// Its last port.
    pub fn last(self) -> u16 {
        self.last
    }

    /// Whether `port` is one of them.
    pub fn contains(self, port: u16) -> bool {
        (self.first..=self.last).contains(&port)
    }

    /// How many ports it has, at least 1.
    pub fn size(self) -> u32 {
        u32::from(self.last) - u32::from(self.first) + 1
    }
}

impl FromStr for PortRange {
    type Err = PortRangeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let number = |text: &str| {
            let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            digits.then(|| text.parse::<u16>().ok()).flatten().ok_or(PortRangeError::Syntax)
        };
        let text = text.trim();
        if let Some((first, count)) = text.split_once('+') {
            let first = number(first)?;
            let last = first.checked_add(number(count)?).ok_or(PortRangeError::Syntax)?;
            return Self::new(first, last);
        }
        match text.split_once('-') {
            Some((first, last)) => Self::new(number(first.trim())?, number(last.trim())?),
            None => Self::new(number(text)?, number(text)?),
        }
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_three_spellings_of_kubernetes_are_read() {
        let range = |text: &str| text.parse::<PortRange>().unwrap();
        assert_eq!(range("30000-32767"), PortRange::NODE_PORTS);
        assert_eq!(range("30000+2767"), PortRange::NODE_PORTS);
        assert_eq!(range("443").size(), 1);
        assert_eq!(range("1-65535").size(), 65_535);
    }

    #[test]
    fn what_is_no_range_is_refused() {
        for text in ["", "-", "0-10", "10-5", "1-65536", "a-b", "65535+1", "+5", "5+", "--"] {
            assert!(text.parse::<PortRange>().is_err(), "{text:?}");
        }
    }
}
