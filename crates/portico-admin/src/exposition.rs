//! Metrics in the OpenMetrics text format, family by family, straight into the answer.
//!
//! Nothing is counted here and nothing kept: a collector reads its counters at each scrape and writes them
//! down.

use std::fmt;
use std::io;
use std::sync::Arc;

use hyper::StatusCode;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, EncodeLabelSet, NoLabelSet, text,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};

use crate::body::{stream, whole};
use crate::prometheus_text;
use crate::server::{self, Answer, typed};

/// The content type of the OpenMetrics text format, version 1.0.0.
const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Everything that is counted, ready to be written.
#[derive(Debug)]
pub struct Exposition(Registry);

impl Exposition {
    /// What `collector` counts. Names begin with `portico_`.
    pub fn of(collector: impl Collector) -> Self {
        let mut registry = Registry::with_prefix("portico");
        registry.register_collector(Box::new(collector));
        Self(registry)
    }

    /// Exposes the metrics of `own` under Portico's prefix, and those of `other` under the names that it
    /// gives: those are the names of another program, which dashboards know.
    pub fn with_names_of_another(own: impl Collector, other: impl Collector) -> Self {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(other));
        registry.sub_registry_with_prefix("portico").register_collector(Box::new(own));
        Self(registry)
    }

    /// The page that Prometheus scrapes.
    pub fn page(self: Arc<Self>) -> Answer {
        typed(CONTENT_TYPE, stream(move |out| self.write(out)))
    }

    /// Like [`Self::page`], but written at once. It is for a process that counts little and has no thread to
    /// spare.
    pub fn whole_page(&self) -> Answer {
        let mut text = String::new();
        match text::encode(&mut text, &self.0) {
            Ok(()) => typed(CONTENT_TYPE, whole(text)),
            Err(fmt::Error) => unformatted(),
        }
    }

    /// Like [`Self::whole_page`], but in the older text format, whatever the client asks for. It is for
    /// metrics that replace those of a Go program, which only has this format. OpenMetrics has no counter
    /// whose name ends in `_count`.
    pub fn older_page(&self) -> Answer {
        let mut text = String::new();
        match text::encode(&mut text, &self.0) {
            Ok(()) => typed(prometheus_text::CONTENT_TYPE, whole(prometheus_text::from_openmetrics(&text))),
            Err(fmt::Error) => unformatted(),
        }
    }

    /// Writes all metrics as they are now.
    fn write(&self, out: &mut dyn io::Write) -> io::Result<()> {
        let mut adapter = Adapter { out, error: None };
        let outcome = text::encode(&mut adapter, &self.0);
        let lost = || io::Error::other("a metric could not be formatted");
        outcome.map_err(|fmt::Error| adapter.error.unwrap_or_else(lost))
    }
}

fn unformatted() -> Answer {
    server::text(StatusCode::INTERNAL_SERVER_ERROR, "a metric could not be formatted\n".into())
}

/// Lets text be written to a byte stream, keeping the error that `fmt` cannot carry.
struct Adapter<'a> {
    out: &'a mut dyn io::Write,
    error: Option<io::Error>,
}

impl fmt::Write for Adapter<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.out.write_all(text.as_bytes()).map_err(|error| {
            self.error = Some(error);
            fmt::Error
        })
    }
}

/// Writes one family of metrics after the other.
pub struct Families<'a>(pub DescriptorEncoder<'a>);

impl Families<'_> {
    /// Names of what runs, as labels of a metric that is always 1.
    pub fn info(&mut self, name: &str, help: &str, labels: impl EncodeLabelSet) -> fmt::Result {
        self.0.encode_descriptor(name, help, None, MetricType::Info)?.encode_info(&labels)
    }

    /// A gauge without labels.
    pub fn one_gauge(&mut self, name: &str, help: &str, unit: Option<&Unit>, value: u64) -> fmt::Result {
        self.0.encode_descriptor(name, help, unit, MetricType::Gauge)?.encode_gauge(&value)
    }

    /// A counter without labels.
    pub fn one_counter(&mut self, name: &str, help: &str, value: u64) -> fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        metric.encode_counter::<NoLabelSet, u64, u64>(&value, None)
    }

    /// A gauge, one value for each set of labels.
    pub fn gauge<L: EncodeLabelSet, V: EncodeGaugeValue>(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<&Unit>,
        values: impl IntoIterator<Item = (L, V)>,
    ) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, unit, MetricType::Gauge)?;
        values.into_iter().try_for_each(|(labels, value)| family.encode_family(&labels)?.encode_gauge(&value))
    }

    /// A counter, one value for each set of labels.
    pub fn counter<L: EncodeLabelSet, V: EncodeCounterValue>(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<&Unit>,
        values: impl IntoIterator<Item = (L, V)>,
    ) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, unit, MetricType::Counter)?;
        values.into_iter().try_for_each(|(labels, value)| {
            family.encode_family(&labels)?.encode_counter::<NoLabelSet, V, u64>(&value, None)
        })
    }

    /// A counter of another program, whose name does not end as OpenMetrics wants it: the type is unknown
    /// there, and counter in the older format.
    pub fn counter_as_named<L: EncodeLabelSet>(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (L, u64)>,
    ) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, None, MetricType::Unknown)?;
        values.into_iter().try_for_each(|(labels, value)| family.encode_family(&labels)?.encode_gauge(&value))
    }

    /// Like [`Self::counter_as_named`], for one value without labels.
    pub fn one_counter_as_named(&mut self, name: &str, help: &str, value: u64) -> fmt::Result {
        self.0.encode_descriptor(name, help, None, MetricType::Unknown)?.encode_gauge(&value)
    }

    /// A histogram without labels; `buckets` are upper bounds with the number of values in each, not
    /// cumulative.
    pub fn one_histogram(
        &mut self,
        name: &str,
        help: &str,
        unit: &Unit,
        sum: f64,
        buckets: &[(f64, u64)],
    ) -> fmt::Result {
        let count = buckets.iter().map(|(_, count)| count).sum();
        let mut metric = self.0.encode_descriptor(name, help, Some(unit), MetricType::Histogram)?;
        metric.encode_histogram::<NoLabelSet>(sum, count, buckets, None)
    }

    /// A histogram for each set of labels: its sum, and its buckets as in
    /// [`one_histogram`](Self::one_histogram).
    pub fn histogram<L: EncodeLabelSet, B: AsRef<[(f64, u64)]>>(
        &mut self,
        name: &str,
        help: &str,
        unit: &Unit,
        values: impl IntoIterator<Item = (L, f64, B)>,
    ) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, Some(unit), MetricType::Histogram)?;
        values.into_iter().try_for_each(|(labels, sum, buckets)| {
            let buckets = buckets.as_ref();
            let count = buckets.iter().map(|(_, count)| count).sum();
            family.encode_family(&labels)?.encode_histogram::<NoLabelSet>(sum, count, buckets, None)
        })
    }
}
