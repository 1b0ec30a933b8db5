//! Sets of ports, as ranges: what one list has and another has not.

use std::fmt;

use portico_api::port_range::PortRange;
use serde::{Serialize, Serializer};

/// A set of ports, kept as ranges in order that do not touch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PortSet(Vec<PortRange>);

impl PortSet {
    /// The ranges, in order.
    pub fn ranges(&self) -> &[PortRange] {
        &self.0
    }

    /// Whether it has no port.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether it has every port of `range`.
    pub fn contains(&self, range: PortRange) -> bool {
        self.0.iter().any(|own| own.first() <= range.first() && range.last() <= own.last())
    }

    /// Adds the ports of `range`.
    pub fn add(&mut self, range: PortRange) {
        let (mut first, mut last) = (range.first(), range.last());
        // Ranges that touch become one.
        self.0.retain(|own| {
            let touches = own.first() <= last.saturating_add(1) && first <= own.last().saturating_add(1);
            if touches {
                (first, last) = (first.min(own.first()), last.max(own.last()));
            }
            !touches
        });
        let index = self.0.partition_point(|own| own.first() < first);
        self.0.extend(PortRange::new(first, last));
        self.0[index..].rotate_right(1);
    }

    /// Its ports that `other` has not.
    #[must_use]
    pub fn without(&self, other: &Self) -> Self {
        let mut left = Self::default();
        for range in &self.0 {
            let mut from = u32::from(range.first());
            for gap in other.0.iter().filter(|gap| gap.last() >= range.first() && gap.first() <= range.last())
            {
                left.add_between(from, u32::from(gap.first()));
                from = from.max(u32::from(gap.last()) + 1);
            }
            left.add_between(from, u32::from(range.last()) + 1);
        }
        left
    }

    /// Adds the ports from `first` to below `end`.
    fn add_between(&mut self, first: u32, end: u32) {
        let (Ok(first), Some(Ok(last))) = (u16::try_from(first), end.checked_sub(1).map(u16::try_from))
        else {
            return;
        };
        if let Ok(range) = PortRange::new(first, last) {
            self.add(range);
        }
    }
}

impl FromIterator<PortRange> for PortSet {
    fn from_iter<I: IntoIterator<Item = PortRange>>(ranges: I) -> Self {
        let mut set = Self::default();
        ranges.into_iter().for_each(|range| set.add(range));
        set
    }
}

impl fmt::Display for PortSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts: Vec<String> = self.0.iter().map(|&range| text(range)).collect();
        f.write_str(&texts.join(", "))
    }
}

impl Serialize for PortSet {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter().map(|&range| text(range)))
    }
}

/// `443` or `30000-32767`.
pub fn text(range: PortRange) -> String {
    if range.size() == 1 { range.first().to_string() } else { range.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(text: &str) -> PortSet {
        text.split(' ').filter(|word| !word.is_empty()).map(|word| word.parse().unwrap()).collect()
    }

    #[test]
    fn ranges_that_touch_become_one() {
        assert_eq!(set("5 7 6 1-3 65535 65534").to_string(), "1-3, 5-7, 65534-65535");
        assert_eq!(set("1-65535 5").to_string(), "1-65535");
    }

    #[test]
    fn what_another_has_not_is_left() {
        for (one, other, left) in [
            ("30000-32767", "6443", "30000-32767"),
            ("30000-32767", "30000-32767", ""),
            ("1-10", "3-4 8", "1-2, 5-7, 9-10"),
            ("1-65535", "1 65535", "2-65534"),
            ("6443 8088", "", "6443, 8088"),
        ] {
            assert_eq!(set(one).without(&set(other)).to_string(), left, "{one} without {other}");
        }
    }
}
