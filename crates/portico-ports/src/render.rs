//! Flows as CSV, as a Markdown table and as cells of a table.

use std::fmt::Write as _;

use crate::flow::Flow;

/// The columns, in order.
pub const COLUMNS: [&str; 10] = [
    "ID",
    "SOURCE",
    "COMPONENT",
    "DESTINATION",
    "PROTOCOL",
    "PORTS",
    "CONDITIONS",
    "OVERRIDABLE",
    "PURPOSE",
    "REFERENCE",
];

/// The cells of a flow.
pub fn cells(flow: &Flow) -> [String; 10] {
    let row = flow.row;
    let list = |texts: Vec<String>, between: &str| texts.join(between);
    [
        row.id.to_owned(),
        row.source.name.to_owned(),
        row.component.unwrap_or("-").to_owned(),
        destination(flow),
        list(row.protocols.iter().map(ToString::to_string).collect(), "/"),
        ports(flow),
        list(row.conditions.iter().map(ToString::to_string).collect(), " "),
        row.overridable.map_or("", |word| word.name()).to_owned(),
        row.purpose.to_owned(),
        row.reference.to_owned(),
    ]
}

/// The ports of a flow: `6443, 8088`; `-` for IP-in-IP.
pub fn ports(flow: &Flow) -> String {
    let ports: Vec<String> = flow.ports.iter().map(ToString::to_string).collect();
    if ports.is_empty() { "-".to_owned() } else { ports.join(", ") }
}

/// The destination, and where it is, if that is known.
fn destination(flow: &Flow) -> String {
    let places: Vec<&str> = flow.hosts.iter().chain(&flow.addresses).map(String::as_str).collect();
    let name = flow.row.destination.name;
    if places.is_empty() { name.to_owned() } else { format!("{name} ({})", places.join(", ")) }
}

/// Flows as CSV (RFC 4180), with a header.
pub fn csv(flows: &[Flow]) -> String {
    let mut text = String::new();
    csv_line(&mut text, COLUMNS.map(str::to_lowercase).iter());
    flows.iter().for_each(|flow| csv_line(&mut text, cells(flow).iter()));
    text
}

fn csv_line<'a>(text: &mut String, cells: impl Iterator<Item = &'a String>) {
    for (number, cell) in cells.enumerate() {
        if number > 0 {
            text.push(',');
        }
        // A cell that begins like this is a formula to a spreadsheet.
        let is_formula = cell.len() > 1 && cell.starts_with(['=', '+', '-', '@']);
        if cell.contains(['"', ',', '\n', '\r']) || is_formula {
            // Writing to a String cannot fail.
            let _ = write!(text, "\"{}\"", cell.replace('"', "\"\""));
        } else {
            text.push_str(cell);
        }
    }
    text.push_str("\r\n");
}

/// Flows as a Markdown table.
pub fn markdown(flows: &[Flow]) -> String {
    let header = COLUMNS.map(|word| format!("{}{}", &word[..1], word[1..].to_lowercase()));
    let mut text = String::new();
    markdown_line(&mut text, &header);
    markdown_line(&mut text, &COLUMNS.map(|_| "---".to_owned()));
    flows.iter().for_each(|flow| markdown_line(&mut text, &cells(flow)));
    text
}

fn markdown_line(text: &mut String, cells: &[String]) {
    let cells: Vec<String> = cells.iter().map(|cell| cell.replace('|', "\\|")).collect();
    // Writing to a String cannot fail.
    let _ = writeln!(text, "| {} |", cells.join(" | "));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flow::Query;

    #[test]
    fn a_markdown_table_has_as_many_cells_in_each_line() {
        let text = markdown(&Query::default().flows().unwrap());
        let bars = |line: &str| line.replace("\\|", "").matches('|').count();
        assert!(text.lines().all(|line| bars(line) == COLUMNS.len() + 1), "{text}");
    }

    #[test]
    fn a_csv_cell_with_a_comma_is_quoted() {
        let text = csv(&Query::default().flows().unwrap());
        assert!(text.contains("\"6443, 8088\""), "{text}");
        assert!(text.starts_with("id,source,component,"), "{text}");
    }
}
