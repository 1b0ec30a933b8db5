//! Tables for people: columns as wide as their widest cell, two spaces apart, nothing after the last. And
//! numbers as their cells show them.

/// Lays out `rows` below `header`.
pub fn render<const N: usize>(header: [&str; N], rows: &[[String; N]]) -> String {
    let mut widths = header.map(|cell| cell.chars().count());
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    line(&mut text, header, &widths);
    for row in rows {
        line(&mut text, row.each_ref().map(String::as_str), &widths);
    }
    text
}

fn line<const N: usize>(text: &mut String, cells: [&str; N], widths: &[usize; N]) {
    let start = text.len();
    for (cell, width) in cells.iter().zip(widths) {
        text.push_str(cell);
        let gap = width - cell.chars().count() + 2;
        text.extend(std::iter::repeat_n(' ', gap));
    }
    text.truncate(start + text[start..].trim_end().len());
    text.push('\n');
}

/// A number of bytes with three digits or so.
pub fn bytes(count: u64) -> String {
    let units = ["B", "kB", "MB", "GB", "TB"];
    let (mut value, mut unit) = (count as f64, 0);
    while value >= 999.5 && unit + 1 < units.len() {
        value /= 1000.0;
        unit += 1;
    }
    if unit == 0 || value >= 99.95 {
        format!("{value:.0}{}", units[unit])
    } else {
        format!("{value:.1}{}", units[unit])
    }
}

/// An age in its two largest units, as kubectl shows them.
pub fn age(millis: u64) -> String {
    let seconds = millis / 1000;
    match (seconds / 86_400, seconds / 3_600 % 24, seconds / 60 % 60, seconds % 60) {
        (0, 0, 0, seconds) => format!("{seconds}s"),
        (0, 0, minutes, seconds) => format!("{minutes}m{seconds}s"),
        (0, hours, minutes, _) => format!("{hours}h{minutes}m"),
        (days, hours, _, _) => format!("{days}d{hours}h"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_no_line_ends_in_spaces() {
        let rows = [["a".into(), "long cell".into(), String::new()], ["bb".into(), "c".into(), "d".into()]];
        let text = render(["X", "Y", "Z"], &rows);
        assert_eq!(text, "X   Y          Z\na   long cell\nbb  c          d\n");
    }

    #[test]
    fn bytes_are_shown_with_three_digits_or_so() {
        let shown = [0, 999, 1_000, 99_949, 99_950, 999_499, 999_500, 12_300_000_000].map(bytes);
        assert_eq!(shown, ["0B", "999B", "1.0kB", "99.9kB", "100kB", "999kB", "1.0MB", "12.3GB"]);
    }

    #[test]
    fn ages_are_shown_in_their_two_largest_units() {
        let shown = [900, 59_000, 61_000, 3_660_000, 90_000_000].map(age);
        assert_eq!(shown, ["0s", "59s", "1m1s", "1h1m", "1d1h"]);
    }
}
