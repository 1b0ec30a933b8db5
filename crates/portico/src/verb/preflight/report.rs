//! Findings as a table for people, as JSON for programs, and as JUnit for CI systems.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use portico_admin::table;
use portico_preflight::verdict::{Finding, Status};

use super::flags::Format;

/// Prints the findings in one of the formats.
pub(super) fn render(format: Format, findings: &[Finding]) -> anyhow::Result<String> {
    Ok(match format {
        Format::Table => text(findings),
        Format::Json => serde_json::to_string_pretty(findings)? + "\n",
        Format::Junit => junit(findings),
    })
}

fn word(status: Status) -> &'static str {
    match status {
        Status::Failed => "failed",
        Status::Inconclusive => "unproven",
        Status::Skipped => "skipped",
        Status::Note => "note",
        Status::Passed => "passed",
    }
}

fn opens(finding: &Finding) -> String {
    finding.transport.map_or_else(String::new, |transport| transport.to_string())
}

/// What does not work comes first, line by line; what works is counted, row by row.
fn text(findings: &[Finding]) -> String {
    let mut lines: Vec<[String; 7]> = Vec::new();
    let mut passed: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    let mut sorted: Vec<&Finding> = findings.iter().collect();
    sorted.sort_by_key(|finding| finding.status);
    for finding in sorted {
        if finding.status == Status::Passed && !matches!(finding.check, "path-mtu" | "tls" | "clock") {
            *passed.entry((finding.row.id, finding.check)).or_default() += 1;
            continue;
        }
        let Finding { status, row, check, from, to, seen, .. } = finding;
        let cells = [word(*status), row.id, check, from, to, &opens(finding), &seen.to_string()];
        lines.push(cells.map(str::to_owned));
    }
    for ((row, check), count) in passed {
        let times = if count == 1 { "once".to_owned() } else { format!("{count} times") };
        lines.push(["passed", row, check, "", "", "", &times].map(str::to_owned));
    }
    let mut text = table::render(["STATUS", "ROW", "CHECK", "FROM", "TO", "OPENS", "SEEN"], &lines);
    remedies(&mut text, findings);
    summary(&mut text, findings);
    text
}

/// Who has to change what: each remedy once.
fn remedies(text: &mut String, findings: &[Finding]) {
    let mut listed: Vec<(&str, &str)> = Vec::new();
    for remedy in findings.iter().filter_map(|finding| finding.remedy.as_ref()) {
        if !listed.contains(&(&remedy.who, &remedy.what)) {
            listed.push((&remedy.who, &remedy.what));
        }
    }
    if !listed.is_empty() {
        text.push_str("\nWho has to change what:\n");
    }
    for (who, what) in listed {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "- {who}: {what}");
    }
}

fn summary(text: &mut String, findings: &[Finding]) {
    let count = |status| findings.iter().filter(|finding| finding.status == status).count();
    let (failed, unproven, skipped) =
        (count(Status::Failed), count(Status::Inconclusive), count(Status::Skipped));
    let _ = writeln!(
        text,
        "\n{} passed, {failed} failed, {unproven} unproven, {skipped} skipped.",
        count(Status::Passed)
    );
}

/// One suite a row, one case a check. What is unproven is a failure of another type.
fn junit(findings: &[Finding]) -> String {
    let mut rows: BTreeMap<&str, Vec<&Finding>> = BTreeMap::new();
    for finding in findings {
        rows.entry(finding.row.id).or_default().push(finding);
    }
    let mut text =
        String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites name=\"portico preflight\">\n");
    for (row, findings) in rows {
        let of =
            |wanted: &[Status]| findings.iter().filter(|finding| wanted.contains(&finding.status)).count();
        let _ = writeln!(
            text,
            "  <testsuite name=\"{}\" tests=\"{}\" failures=\"{}\" skipped=\"{}\">",
            escaped(row),
            findings.len(),
            of(&[Status::Failed, Status::Inconclusive]),
            of(&[Status::Skipped])
        );
        findings.iter().for_each(|finding| case(&mut text, finding));
        text.push_str("  </testsuite>\n");
    }
    text.push_str("</testsuites>\n");
    text
}

fn case(text: &mut String, finding: &Finding) {
    let Finding { row, check, from, to, seen, .. } = finding;
    let name = format!("{check} {from} to {to} {}", opens(finding));
    let class = format!("{}.{}", row.product, row.id);
    let _ = write!(text, "    <testcase classname=\"{}\" name=\"{}\"", escaped(&class), escaped(name.trim()));
    let seen = escaped(&seen.to_string());
    let _ = match finding.status {
        Status::Passed | Status::Note => writeln!(text, "><system-out>{seen}</system-out></testcase>"),
        Status::Skipped => writeln!(text, "><skipped message=\"{seen}\"/></testcase>"),
        Status::Failed | Status::Inconclusive => {
            let remedy = finding.remedy.as_ref().map(|remedy| format!("{}: {}", remedy.who, remedy.what));
            writeln!(
                text,
                "><failure type=\"{}\" message=\"{seen}\">{}</failure></testcase>",
                word(finding.status),
                escaped(&remedy.unwrap_or_default())
            )
        }
    };
}

/// Text in XML. Control characters, which XML 1.0 cannot hold, become spaces.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            letter if letter.is_control() => escaped.push(' '),
            letter => escaped.push(letter),
        }
    }
    escaped
}
