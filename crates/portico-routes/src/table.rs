//! The route table: immutable, shared, and as cheap to copy as three pointers.
//!
//! The maps are persistent hash tries: a lookup does not grow with the number of routes in any way that can be measured, and
//! a changed table shares all that did not change with the one before it.

use std::sync::Arc;

use portico_api::names::{Authority, HostName};

use crate::route::{Backend, BackendId, RouteKey};

/// A persistent map whose nodes are shared between tables and threads.
pub type SharedMap<K, V> = imbl::HashMap<K, V>;

/// Every route at one moment.
#[derive(Debug, Clone, Default)]
pub struct RouteTable {
    /// By NodePort number.
    pub ports: SharedMap<u16, Arc<Backend>>,
    /// By server name.
    pub hosts: SharedMap<HostName, Arc<Backend>>,
    /// By CONNECT authority.
    pub authorities: SharedMap<Authority, Arc<Backend>>,
}

/// A table and how it differs from the one before it.
#[derive(Debug, Clone)]
pub struct Update {
    /// The table as it is now.
    pub table: RouteTable,
    /// What changed; each key and each backend at most once.
    pub changes: Vec<RouteChange>,
}

/// One difference between two tables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RouteChange {
    /// A backend that is new, or whose endpoints, policy or settings changed. Comes before the routes that lead to it.
    Backend(Arc<Backend>),
    /// A key that leads to `to`, and did not before.
    Route {
        /// The key.
        key: RouteKey,
        /// Where it leads now.
        to: BackendId,
    },
    /// A key that leads nowhere any more.
    NoRoute(RouteKey),
    /// A backend that no route leads to any more. Comes after the routes that led to it.
    NoBackend(BackendId),
}
