//! How Portico lists and watches.

use kube::runtime::watcher;

/// Objects in one page of a list. Bounds the memory for a response; the same as in client-go.
const PAGE: u32 = 500;

/// Length of one watch request in seconds. A connection that died silently is noticed this long after at the
/// latest; another request costs the API server next to nothing.
const WATCH_SECONDS: u32 = 60;

/// Returns the configuration of a watch: lists in pages, watches in short requests.
pub fn config() -> watcher::Config {
    watcher::Config::default().page_size(PAGE).timeout(WATCH_SECONDS)
}
