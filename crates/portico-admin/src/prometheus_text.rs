//! Metrics in the text format that came before OpenMetrics, version 0.0.4. Programs in Go answer in it, and
//! so does a program that stands in for one of them. Its parsers stop at a type that they do not know.

/// The content type of that format.
pub(crate) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Converts `page`, which is OpenMetrics, to that format. It has types of its own, the full name in each
/// comment, no units and no end marker.
pub(crate) fn from_openmetrics(page: &str) -> String {
    let mut text = String::with_capacity(page.len() + page.len() / 8);
    // `# HELP` comes before `# TYPE`, but its name needs the suffix that the type decides.
    let mut help = None;
    for line in page.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            help = rest.split_once(' ');
        } else if let Some((family, kind)) =
            line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' '))
        {
            let (suffix, kind) = match kind {
                "counter" => ("_total", "counter"),
                "info" => ("_info", "gauge"),
                // Only counters are written with it: `Families::counter_as_named`.
                "unknown" => ("", "counter"),
                kind => ("", kind),
            };
            if let Some((_, words)) = help.take().filter(|(named, _)| *named == family) {
                text += &format!("# HELP {family}{suffix} {words}\n");
            }
            text += &format!("# TYPE {family}{suffix} {kind}\n");
        } else if !line.starts_with("# UNIT ") && line != "# EOF" {
            text += line;
            text.push('\n');
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_have_the_names_and_types_of_the_older_format() {
        let page = "\
# HELP portico_build What is running.
# TYPE portico_build info
portico_build_info{version=\"1\"} 1
# HELP passed Passed on.
# TYPE passed counter
# UNIT passed bytes
passed_total{to=\"# EOF\"} 7
# HELP open What is open.
# TYPE open gauge
open 2
# TYPE failure_count unknown
failure_count 1
# EOF
";
        let text = "\
# HELP portico_build_info What is running.
# TYPE portico_build_info gauge
portico_build_info{version=\"1\"} 1
# HELP passed_total Passed on.
# TYPE passed_total counter
passed_total{to=\"# EOF\"} 7
# HELP open What is open.
# TYPE open gauge
open 2
# TYPE failure_count counter
failure_count 1
";
        assert_eq!(from_openmetrics(page), text);
    }
}
