//! Requests about Leases as metrics, with the labels of the upstream programs.

use portico_konnectivity::requests::Requests;

/// One histogram with its label: seconds in all, and the buckets.
type Times = ([(&'static str, String); 1], f64, Vec<(f64, u64)>);

/// How many were answered how. `code` is the label of the HTTP status.
pub(super) fn answers<const N: usize>(
    requests: &Requests<N>,
    code: &'static str,
) -> impl Iterator<Item = ([(&'static str, String); 2], u64)> {
    let answers = requests.answers().into_iter();
    answers.map(move |(status, reason, count)| ([(code, status.to_string()), ("reason", reason)], count))
}

/// How long they took.
pub(super) fn times<const N: usize>(
    requests: &Requests<N>,
    code: &'static str,
    bounds: &[f64; N],
) -> impl Iterator<Item = Times> {
    let times = requests.times(bounds).into_iter();
    times.map(move |(status, (seconds, buckets))| ([(code, status.to_string())], seconds, buckets))
}
