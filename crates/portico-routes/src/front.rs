//! The Services by which clients reach the gateway itself. A Service leads to it if one of its endpoints is
//! the gateway's own address with the port of a listener.
//!
//! They say whether the gateway sees the addresses of its clients, and where its replicas are.

use std::collections::BTreeSet;

use crate::facts::SliceFacts;
use crate::index::RouteIndex;
use crate::route::{Front, RouteKey};

impl RouteIndex {
    /// How clients from outside reach this gateway, as of the last commit; `None` where no Service of type
    /// LoadBalancer or NodePort leads to it.
    pub fn front(&self) -> Option<&Front> {
        self.front.as_ref()
    }

    pub(crate) fn find_front(&self) -> Option<Front> {
        let mut front: Option<Front> = None;
        for key in &self.fronts {
            let Some(entry) = self.services.get(key) else { continue };
            let Some(reach) = &entry.reach else { continue };
            if !entry.slices.iter().any(|slice| self.leads_here(slice)) {
                continue;
            }
            let found = front.get_or_insert_with(|| Front {
                service: key.clone(),
                keeps_addresses: true,
                replicas: BTreeSet::new(),
            });
            if found.keeps_addresses && !reach.keeps_addresses {
                found.service = key.clone();
                found.keeps_addresses = false;
            }
            let with_port = entry.slices.iter().filter(|slice| !slice.ports.is_empty());
            found.replicas.extend(with_port.flat_map(SliceFacts::addresses));
        }
        front
    }

    /// Addresses and ports are looked through one after the other: a slice may have a thousand addresses and
    /// twenty thousand ports.
    fn leads_here(&self, slice: &SliceFacts) -> bool {
        slice.addresses().any(|address| self.own().addresses.contains(&address))
            && slice.ports.iter().any(|(_, port)| self.listens_on(*port))
    }

    fn listens_on(&self, port: u16) -> bool {
        self.own().ports.contains(&port) || self.claims.owner(&RouteKey::Port(port)).is_some()
    }
}
