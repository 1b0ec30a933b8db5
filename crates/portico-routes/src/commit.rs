//! From what changed in the book to the next table.
//!
//! A slot at a time: which keys does this Service own now, where do they lead, what did the table say before. Slots that
//! lost a key to another one, or gained it, have been marked by [`RouteBook::apply`], so no slot has to look at another.

use std::mem;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::book::{RouteBook, Slot};
use crate::endpoints;
use crate::route::Backend;
use crate::table::{RouteChange, Update};

/// Differences, in the order in which the gateway can apply them: a route never leads to a backend it has not heard of.
#[derive(Debug, Default)]
struct Changes {
    backends: Vec<RouteChange>,
    routes: Vec<RouteChange>,
    no_routes: Vec<RouteChange>,
    no_backends: Vec<RouteChange>,
}

impl Changes {
    fn in_order(mut self) -> Vec<RouteChange> {
        for mut later in [self.routes, self.no_routes, self.no_backends] {
            self.backends.append(&mut later);
        }
        self.backends
    }
}

/// See [`RouteBook::commit`].
pub(crate) fn commit(book: &mut RouteBook) -> Option<Update> {
    let mut changes = Changes::default();
    for key in mem::take(&mut book.vacated) {
        // Somebody may have claimed it since; then that Service is among those marked.
        if book.owner(&key).is_none() && book.table.remove(&key) {
            changes.no_routes.push(RouteChange::NoRoute(key));
        }
    }
    for slot in mem::take(&mut book.dirty) {
        publish(book, slot, &mut changes);
        if book.slots[slot as usize].is_empty() {
            book.free(slot);
        }
    }
    let changes = changes.in_order();
    (!changes.is_empty()).then(|| Update { table: book.table.clone(), changes })
}

/// Brings the table in line with one Service.
fn publish(book: &mut RouteBook, slot: u32, changes: &mut Changes) {
    let before = mem::take(&mut book.slots[slot as usize].announced);
    let mut after: SmallVec<[Arc<Backend>; 1]> = SmallVec::new();
    let mut owned = book.keys(slot);
    owned.retain(|(key, claim)| book.owner(key) == Some(*claim));
    for keys_of_one_port in owned.chunk_by(|(_, a), (_, b)| a.port == b.port) {
        let port = keys_of_one_port[0].1.port;
        let Some(backend) = backend(book, slot, port, &before) else { continue };
        if !before.iter().any(|old| Arc::ptr_eq(old, &backend)) {
            changes.backends.push(RouteChange::Backend(Arc::clone(&backend)));
        }
        for (key, _) in keys_of_one_port {
            if book.table.lead(key, &backend) {
                changes.routes.push(RouteChange::Route { key: key.clone(), to: backend.id.clone() });
            }
        }
        after.push(backend);
    }
    let gone = before.iter().filter(|old| !after.iter().any(|new| new.id == old.id));
    changes.no_backends.extend(gone.map(|old| RouteChange::NoBackend(old.id.clone())));
    after.shrink_to_fit();
    book.slots[slot as usize].announced = after;
}

/// The backend of one exposed port as it should be: the one in `before`, if that is what it says already.
fn backend(book: &RouteBook, slot: u32, port: u16, before: &[Arc<Backend>]) -> Option<Arc<Backend>> {
    let slot = &book.slots[slot as usize];
    let Slot { key, service: Some(service), .. } = slot else { return None };
    let port = service.ports.get(usize::from(port))?;
    let fresh = Backend {
        id: port.backend_id(key),
        endpoints: endpoints::ready(book.slices_of(slot), &port.name),
        policy: Arc::clone(book.namespaces.get(&key.namespace)?.policy_for(service)),
        send_proxy: service.send_proxy,
        api_server_ca: service.api_server_ca.clone(),
    };
    match before.iter().find(|old| old.id == fresh.id) {
        Some(old) if **old == fresh => Some(Arc::clone(old)),
        _ => Some(Arc::new(fresh)),
    }
}
