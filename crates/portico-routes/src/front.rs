//! The Services by which clients reach the gateway itself. A Service leads to it if one of its endpoints is
//! the gateway's own address with the port of a listener.
//!
//! They say whether the gateway sees the addresses of its clients, and where its replicas are.

use std::collections::BTreeSet;
use std::net::IpAddr;

use crate::endpoints;
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
            let leads_here = endpoints::all(&entry.slices)
                .any(|endpoint| self.is_own(endpoint.ip()) && self.listens_on(endpoint.port()));
            if !leads_here {
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
            found.replicas.extend(endpoints::all(&entry.slices).map(|endpoint| endpoint.ip()));
        }
        front
    }

    fn is_own(&self, address: IpAddr) -> bool {
        self.own().addresses.contains(&address)
    }

    fn listens_on(&self, port: u16) -> bool {
        self.own().ports.contains(&port) || self.claims.owner(&RouteKey::Port(port)).is_some()
    }
}
