//! The table at the end: medians, ratios within a round, and whether the bar holds.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::Serialize;

/// The order of the columns.
const COLUMNS: [&str; 7] =
    ["nginx", "HAProxy", "Envoy", "upstream", "Portico's server", "Portico's agent", US];
const US: &str = "Portico";
/// The columns that must keep a bar. Beside Portico's agent, upstream's server decides what others wait for.
const JUDGED: [&str; 2] = ["Portico's server", US];

/// What Portico promises for a row (design, "Numbers we hold ourselves to").
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Bar {
    /// At most this many times what a peer needs, by the median of the ratios within a round.
    Times {
        /// The peer.
        peer: &'static str,
        /// The factor.
        factor: f64,
    },
    /// At most this much.
    AtMost(f64),
    /// Measured for orientation.
    Open,
}

/// One line of the table.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    /// What was measured.
    pub(crate) name: String,
    /// The unit of the samples.
    pub(crate) unit: &'static str,
    /// What is promised.
    pub(crate) bar: Bar,
    /// Samples by proxy; where rounds were run, equal places belong to the same round.
    pub(crate) samples: BTreeMap<&'static str, Vec<f64>>,
    /// Why a proxy has no figure, or what its figure means, by proxy.
    pub(crate) notes: BTreeMap<&'static str, String>,
    /// Whether one of the [`JUDGED`] failed here, so that no figure can hold the bar.
    pub(crate) failed: bool,
}

impl Row {
    /// A line without figures yet.
    pub(crate) fn new(name: impl Into<String>, unit: &'static str, bar: Bar) -> Self {
        Self { name: name.into(), unit, bar, samples: BTreeMap::new(), notes: BTreeMap::new(), failed: false }
    }

    /// Adds a figure.
    pub(crate) fn add(&mut self, proxy: &'static str, sample: f64) {
        self.samples.entry(proxy).or_default().push(sample);
    }

    /// Adds to what is said of a proxy's figure.
    pub(crate) fn note(&mut self, proxy: &'static str, text: &str) {
        let note = self.notes.entry(proxy).or_default();
        if !note.is_empty() {
            note.push_str(", ");
        }
        note.push_str(text);
    }

    /// Notes that a proxy did not do its work. A row in which Portico failed does not hold.
    pub(crate) fn fail(&mut self, proxy: &'static str, reason: &str) {
        self.failed |= JUDGED.contains(&proxy);
        self.note(proxy, reason);
    }

    /// Notes failed requests. They are in no figure, so one is enough for the row not to hold.
    pub(crate) fn count_failures(&mut self, proxy: &'static str, count: u64) {
        if count > 0 {
            self.fail(proxy, &format!("{count} failed"));
        }
    }

    /// The median of a proxy's figures.
    pub(crate) fn median(&self, proxy: &str) -> Option<f64> {
        quantile(self.samples.get(proxy)?, 0.5)
    }

    /// Lower quartile, median and upper quartile of Portico's figures over the peer's, round by round.
    pub(crate) fn ratio(&self, peer: &str) -> Option<[f64; 3]> {
        let ours = self.samples.get(US)?;
        let theirs = self.samples.get(peer)?;
        let ratios: Vec<f64> = ours.iter().zip(theirs).map(|(ours, theirs)| ours / theirs).collect();
        Some([quantile(&ratios, 0.25)?, quantile(&ratios, 0.5)?, quantile(&ratios, 0.75)?])
    }

    /// Whether the promise holds; `None` without a promise, or with neither figure nor failure.
    pub(crate) fn holds(&self) -> Option<bool> {
        match self.bar {
            Bar::Times { .. } | Bar::AtMost(_) if self.failed => Some(false),
            Bar::Times { peer, factor } => self.ratio(peer).map(|[_, median, _]| median <= factor),
            Bar::AtMost(most) => {
                let worst = JUDGED.into_iter().filter_map(|column| self.median(column)).reduce(f64::max);
                worst.map(|worst| worst <= most)
            }
            Bar::Open => None,
        }
    }
}

/// The whole report for programs: each row with its samples, medians, ratios and verdict.
pub(crate) fn json(rows: &[Row]) -> serde_json::Value {
    let rows: Vec<_> = rows
        .iter()
        .map(|row| {
            let by_proxy = |value: &dyn Fn(&str) -> serde_json::Value| -> serde_json::Value {
                row.samples.keys().map(|&proxy| (proxy.to_owned(), value(proxy))).collect()
            };
            let ratios = by_proxy(&|proxy| row.ratio(proxy).map(|three| three.to_vec()).into());
            serde_json::json!({
                "row": row,
                "median": by_proxy(&|proxy| row.median(proxy).into()),
                "portico_ratio_quartiles": ratios,
                "holds": row.holds(),
            })
        })
        .collect();
    serde_json::json!({"rows": rows})
}

/// The value at a quantile between 0 (the least) and 1 (the greatest).
pub(crate) fn quantile(samples: &[f64], at: f64) -> Option<f64> {
    let mut sorted: Vec<f64> = samples.iter().copied().filter(|sample| sample.is_finite()).collect();
    sorted.sort_by(f64::total_cmp);
    let last = sorted.len().checked_sub(1)?;
    let index = at * last as f64;
    let (below, above) = (index.floor() as usize, index.ceil() as usize);
    Some(sorted[below] + (sorted[above] - sorted[below]) * index.fract())
}

/// The whole report in Markdown.
pub(crate) fn table(rows: &[Row]) -> String {
    let has_part = |column: &str| {
        rows.iter().any(|row| row.samples.contains_key(column) || row.notes.contains_key(column))
    };
    let columns: Vec<_> = COLUMNS.into_iter().filter(|column| has_part(column)).collect();
    let compared = |peer: &&str| rows.iter().any(|row| *peer != US && row.ratio(peer).is_some());
    let peers: Vec<_> = columns.iter().copied().filter(|peer| compared(peer)).collect();
    let mut lines = vec![vec![String::new()]];
    lines[0].extend(columns.iter().copied().map(str::to_owned));
    lines[0].extend(peers.iter().map(|peer| format!("÷ {peer}")));
    lines[0].extend(["bar", "holds"].map(str::to_owned));
    for row in rows {
        let mut line = vec![format!("{}, {}", row.name, row.unit)];
        line.extend(columns.iter().map(|&proxy| {
            let figure = row.median(proxy).map_or_else(|| "–".to_owned(), figure);
            row.notes.get(proxy).map_or(figure.clone(), |note| format!("{figure} ({note})"))
        }));
        line.extend(peers.iter().map(|peer| {
            row.ratio(peer)
                .map_or_else(String::new, |[low, median, high]| format!("{median:.2} [{low:.2}–{high:.2}]"))
        }));
        line.push(match row.bar {
            Bar::Times { peer, factor } if (factor - 1.0).abs() < f64::EPSILON => format!("≤ {peer}"),
            Bar::Times { peer, factor } => format!("≤ {} × {peer}", (factor * 100.0).round() / 100.0),
            Bar::AtMost(most) => format!("≤ {}", figure(most)),
            Bar::Open => String::new(),
        });
        line.push(match row.holds() {
            Some(true) => "yes".to_owned(),
            Some(false) => "**no**".to_owned(),
            None => String::new(),
        });
        lines.push(line);
    }
    markdown(&lines)
}

fn markdown(lines: &[Vec<String>]) -> String {
    let columns = lines[0].len();
    let widths: Vec<usize> = (0..columns)
        .map(|column| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0))
        .collect();
    let mut text = String::new();
    for (number, line) in lines.iter().enumerate() {
        for (cell, width) in line.iter().zip(&widths) {
            let _ = write!(text, "| {cell:<width$} ");
        }
        text.push_str("|\n");
        if number == 0 {
            for width in &widths {
                let _ = write!(text, "|{:-<1$}", "", width + 2);
            }
            text.push_str("|\n");
        }
    }
    text
}

/// Three significant digits, thousands apart.
fn figure(value: f64) -> String {
    if value >= 1000.0 {
        let whole = format!("{value:.0}");
        let head = (whole.len() - 1) % 3 + 1;
        let mut text = whole[..head].to_owned();
        for group in whole.as_bytes()[head..].chunks(3) {
            text.push(',');
            text.extend(group.iter().map(|&digit| char::from(digit)));
        }
        text
    } else if value >= 100.0 || value == 0.0 || value.fract() == 0.0 {
        format!("{value:.0}")
    } else if value >= 10.0 {
        format!("{value:.1}")
    } else {
        format!("{value:.2}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ratio_is_taken_within_a_round() {
        let mut row = Row::new("new connection", "µs", Bar::Times { peer: "nginx", factor: 1.0 });
        // The machine was twice as slow in the second round, for both.
        for (ours, theirs) in [(9.0, 10.0), (18.0, 20.0), (9.0, 10.0)] {
            row.add("Portico", ours);
            row.add("nginx", theirs);
        }
        assert_eq!(row.ratio("nginx"), Some([0.9, 0.9, 0.9]));
        assert_eq!(row.holds(), Some(true));
    }

    #[test]
    fn a_row_without_a_figure_of_ours_neither_holds_nor_fails() {
        let mut row = Row::new("idle", "bytes", Bar::AtMost(2048.0));
        row.add("nginx", 14_600.0);
        assert_eq!(row.holds(), None);
    }

    #[test]
    fn a_row_that_portico_fails_does_not_hold_whatever_its_figures_are() {
        for bar in [Bar::Times { peer: "nginx", factor: 1.0 }, Bar::AtMost(2.0)] {
            let mut row = Row::new("round trip beside an attack", "p99 ÷ at rest", bar);
            row.fail("nginx", "breaks");
            assert_eq!(row.holds(), None, "the failure of a peer is no matter of the bar");
            row.fail("Portico", "breaks");
            assert_eq!(row.holds(), Some(false));
            row.add("Portico", 1.0);
            row.add("nginx", 1.0);
            assert_eq!(row.holds(), Some(false));
        }
    }

    #[test]
    fn a_quick_answer_to_most_requests_does_not_make_up_for_one_that_failed() {
        let mut row = Row::new("new connection beside an attack", "p99 ÷ at rest", Bar::AtMost(2.0));
        row.add("Portico", 1.0);
        row.count_failures("Portico", 0);
        assert_eq!(row.holds(), Some(true));
        row.count_failures("Portico", 1);
        assert_eq!(row.holds(), Some(false));
        assert_eq!(row.notes["Portico"], "1 failed");
    }

    #[test]
    fn porticos_server_keeps_the_bar_with_an_agent_of_upstreams_too() {
        let mut row = Row::new("beside four stopped readers", "p99 ÷ undisturbed", Bar::AtMost(2.0));
        row.add("Portico", 1.0);
        row.add("Portico's server", 1.2);
        row.add("Portico's agent", 50.0);
        row.fail("Portico's agent", "stands still");
        assert_eq!(row.holds(), Some(true), "upstream's server is no program of ours");
        row.samples.insert("Portico's server", vec![50.0]);
        assert_eq!(row.holds(), Some(false));
    }

    #[test]
    fn figures_read_like_the_design_table() {
        for (value, text) in
            [(14_600.0, "14,600"), (61.4, "61.4"), (0.283, "0.28"), (278.2, "278"), (8.0, "8")]
        {
            assert_eq!(figure(value), text);
        }
    }
}
