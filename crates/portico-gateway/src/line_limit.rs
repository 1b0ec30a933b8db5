//! Bounds the warnings that anyone on the network can cause, by tenant.
//!
//! Each cluster has a limit of its own. All clients that ask for no known cluster share one. So the warnings
//! about one cluster do not hide those about another.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use portico_api::names::Tenant;
use portico_net::line_limit::{LineLimit, Pace};
use tokio::time::Instant;

/// From so many tenants on, those without a line lately are forgotten.
const PRUNE_AT: usize = 1_024;

/// Limits of warnings by tenant, where nothing else of the tenant is at hand.
#[derive(Debug)]
pub(crate) struct TenantLines {
    started: Instant,
    limits: Mutex<Limits>,
}

#[derive(Debug)]
struct Limits {
    /// `None` is for clients that asked for no tenant that is known.
    all: HashMap<Option<Tenant>, LineLimit>,
    prune_at: usize,
}

impl TenantLines {
    pub(crate) fn new() -> Self {
        let limits = Mutex::new(Limits { all: HashMap::new(), prune_at: PRUNE_AT });
        Self { started: Instant::now(), limits }
    }

    /// Returns how many warnings about this tenant were left out since the last one, or `None` if this one is
    /// left out too.
    pub(crate) fn admit(&self, tenant: Option<&Tenant>) -> Option<u64> {
        let mut limits = self.limits.lock().unwrap_or_else(PoisonError::into_inner);
        let now = self.started.elapsed();
        if limits.all.len() >= limits.prune_at {
            limits.all.retain(|_, limit| !limit.is_full(now));
            limits.prune_at = PRUNE_AT.max(2 * limits.all.len());
        }
        limits.all.entry(tenant.cloned()).or_default().admit(Pace::WARNINGS, now)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn warnings_are_ten_and_then_one_each_ten_seconds() {
        let lines = TenantLines::new();
        let written: Vec<_> = (0..1_000).filter_map(|_| lines.admit(None)).collect();
        assert_eq!(written, [0; 10]);
        tokio::time::advance(Duration::from_secs(10)).await;
        assert_eq!((lines.admit(None), lines.admit(None)), (Some(990), None));
    }

    #[tokio::test(start_paused = true)]
    async fn the_flood_of_one_tenant_does_not_silence_another() {
        let lines = TenantLines::new();
        let [a, b] = ["a", "b"].map(Tenant::of_text);
        assert_eq!((0..1_000).filter_map(|_| lines.admit(Some(&a))).count(), 10);
        assert_eq!((lines.admit(Some(&b)), lines.admit(None)), (Some(0), Some(0)));
    }

    #[tokio::test(start_paused = true)]
    async fn tenants_without_a_line_lately_are_forgotten() {
        let lines = TenantLines::new();
        for round in 0..10 {
            for number in 0..1_000 {
                lines.admit(Some(&Tenant::of_text(&format!("{round}-{number}"))));
            }
            tokio::time::advance(Duration::from_secs(10)).await;
        }
        assert!(lines.limits.lock().unwrap().all.len() <= 2 * PRUNE_AT);
    }
}
