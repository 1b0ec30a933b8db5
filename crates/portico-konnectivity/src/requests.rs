//! The counts of requests about Leases, as upstream has them: answers, by status and reason.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use portico_api::text::one_line;
use tokio::time::Instant;

use crate::counting::Histogram;

/// Kinds of answers that are counted: an API server has a dozen.
const MAX_ANSWERS: usize = 64;

/// Characters of a reason: of those that Kubernetes has, the longest has half as many.
const LONGEST_REASON: usize = 64;

/// Requests by what the API server answered, with their times in `N` buckets and one above them.
#[derive(Debug, Default)]
pub struct Requests<const N: usize>(Mutex<BTreeMap<(u16, String), Histogram<N>>>);

impl<const N: usize> Requests<N> {
    /// How many, by HTTP status and reason.
    #[must_use]
    pub fn answers(&self) -> Vec<(u16, String, u64)> {
        let all = self.all();
        let answers = all.iter().map(|((status, reason), times)| (*status, reason.clone(), times.counts()));
        answers.map(|(status, reason, counts)| (status, reason, counts.sum())).collect()
    }

    /// Seconds in all, and a histogram, by HTTP status. Each bound of `bounds` has its count, and the last
    /// one is for those above all of them.
    #[must_use]
    pub fn times(&self, bounds: &[f64; N]) -> BTreeMap<u16, (f64, Vec<(f64, u64)>)> {
        let mut by_status: BTreeMap<u16, (f64, Vec<(f64, u64)>)> = BTreeMap::new();
        for ((status, _), times) in self.all().iter() {
            let more = times.buckets(bounds);
            let (seconds, buckets) = by_status.entry(*status).or_default();
            *seconds += times.seconds();
            if buckets.is_empty() {
                *buckets = more;
            } else {
                buckets.iter_mut().zip(more).for_each(|((_, count), (_, more))| *count += more);
            }
        }
        by_status
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<(u16, String), Histogram<N>>> {
        // A panic elsewhere leaves nothing half done here.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a request and counts its answer. Without one, nothing is counted here.
    pub(crate) async fn counted<T>(
        &self,
        bounds: &[f64; N],
        request: impl Future<Output = kube::Result<T>>,
    ) -> kube::Result<T> {
        let begun = Instant::now();
        let answer = request.await;
        match &answer {
            Ok(_) => self.answered(bounds, 200, "", begun.elapsed()),
            Err(kube::Error::Api(status)) => {
                self.answered(bounds, status.code, &status.reason, begun.elapsed());
            }
            Err(_) => {}
        }
        answer
    }

    /// Counts one answer.
    pub(crate) fn answered(&self, bounds: &[f64; N], status: u16, reason: &str, took: Duration) {
        let mut all = self.all();
        let key = (status, one_line(reason, LONGEST_REASON));
        if all.len() < MAX_ANSWERS || all.contains_key(&key) {
            all.entry(key).or_default().observe(bounds, took);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_of_any_length_takes_little_memory() {
        let requests = Requests::<1>::default();
        requests.answered(&[1.0], 500, &"r".repeat(1_000_000), Duration::ZERO);
        let [(500, reason, 1)] = &requests.answers()[..] else { panic!("one answer") };
        assert_eq!(reason.chars().count(), LONGEST_REASON + 1, "with a sign that it was cut");
    }
}
