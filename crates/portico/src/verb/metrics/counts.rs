//! What `portico metrics` counts about itself. Names, labels and units are a promise, listed in
//! `docs/monitoring.md`.

use std::fmt;
use std::sync::Arc;

use portico_admin::exposition::{Exposition, Families};
use portico_operator::monitored::{Monitored, ScrapeCounts};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::registry::Unit;

pub(super) fn exposition(known: Arc<Monitored>, counts: Arc<ScrapeCounts>) -> Exposition {
    Exposition::of(Metrics { known: move || known.targets(None).len() as u64, counts })
}

struct Metrics<F> {
    known: F,
    counts: Arc<ScrapeCounts>,
}

impl<F> fmt::Debug for Metrics<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Metrics")
    }
}

impl<F: Fn() -> u64 + Send + Sync + 'static> Collector for Metrics<F> {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut out = Families(encoder);
        out.info("build", "What is running.", [("version", env!("PORTICO_VERSION"))])?;
        let help = "Programs of control planes whose metrics can be scraped.";
        out.one_gauge("metrics_targets", help, None, (self.known)())?;
        let scrapes = self.counts.ended();
        let scrapes = scrapes
            .iter()
            .map(|((source, result), count)| ([("program", source.name()), ("result", *result)], *count));
        let help = "Scrapes by program and how they ended: ok, or why there was no answer.";
        out.counter("metrics_scrapes", help, None, scrapes)?;
        let bytes = |count: u64| [([] as [(&str, &str); 0], count)];
        let help = "Bytes that programs answered.";
        out.counter("metrics_read", help, Some(&Unit::Bytes), bytes(self.counts.bytes_read()))?;
        let help = "Bytes of them that were passed on.";
        out.counter("metrics_kept", help, Some(&Unit::Bytes), bytes(self.counts.bytes_kept()))
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use portico_api::names::ClusterName;
    use portico_hosting::monitoring::{Source, Target};
    use portico_lab::metrics::names;
    use portico_operator::monitored::Scraper;
    use prometheus_client::encoding::text;
    use prometheus_client::registry::Registry;

    use super::*;

    #[tokio::test]
    async fn every_metric_is_in_the_manual() {
        let manual = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/monitoring.md"));
        let scraper = Scraper::default();
        // Without credentials nothing is tried, and that is counted.
        let target = Target {
            cluster: ClusterName::new("a"),
            pod: "apiserver".into(),
            source: Source::ApiServer,
            address: Ipv4Addr::LOCALHOST.into(),
            port: 1,
        };
        scraper.scrape(&target, None).await.unwrap_err();
        let counts = scraper.counts();
        let mut registry = Registry::with_prefix("portico");
        registry.register_collector(Box::new(Metrics { known: || 1, counts }));
        let mut metrics = String::new();
        text::encode(&mut metrics, &registry).unwrap();
        let names = names(&metrics);
        assert!(names.len() > 4, "{metrics}");
        for name in names.iter().filter(|name| *name != "portico_build_info") {
            assert!(manual.contains(&format!("`{name}`")), "{name} is not in the manual");
        }
    }
}
