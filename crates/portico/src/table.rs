//! Tables for people: columns as wide as their widest cell, two spaces apart, nothing after the last.

/// Lays out `rows` below `header`.
pub(crate) fn render<const N: usize>(header: [&str; N], rows: &[[String; N]]) -> String {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_no_line_ends_in_spaces() {
        let rows = [["a".into(), "long cell".into(), String::new()], ["bb".into(), "c".into(), "d".into()]];
        let text = render(["X", "Y", "Z"], &rows);
        assert_eq!(text, "X   Y          Z\na   long cell\nbb  c          d\n");
    }
}
