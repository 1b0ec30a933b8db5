//! The names on a page of metrics, to be held against a manual.

/// The full name of each metric, with the suffix of its type: OpenMetrics leaves it out where it says the
/// type, the older text format does not.
pub fn names(page: &str) -> Vec<String> {
    let types = page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    let full = |(name, kind): (&str, &str)| {
        let suffix = match kind {
            "counter" => "_total",
            "info" => "_info",
            _ => "",
        };
        format!("{}{suffix}", name.strip_suffix(suffix).unwrap_or(name))
    };
    types.map(full).collect()
}
