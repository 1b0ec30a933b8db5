//! The names on a page of metrics, to be held against a manual.

/// The full name of each metric, with the suffix of its type: OpenMetrics leaves it out where it says the
/// type, the older text format does not.
pub fn names(page: &str) -> Vec<String> {
    let types = page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    let full = |(name, kind): (&str, &str)| {
        let suffix = match kind {
            // Upstream's Konnectivity has counters whose names end in `_count`, on pages of the older format.
            "counter" if !name.ends_with("_count") => "_total",
            "info" => "_info",
            _ => "",
        };
        format!("{}{suffix}", name.strip_suffix(suffix).unwrap_or(name))
    };
    types.map(full).collect()
}
