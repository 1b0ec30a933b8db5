//! The links of one cluster, in order.

use crate::links::Link;

/// Links, until one is broken.
#[derive(Debug, Default)]
pub struct Chain {
    /// In the order in which each depends on those before it.
    pub links: Vec<Link>,
    /// Addresses of the load balancer in front.
    pub(crate) front: Vec<String>,
}

impl Chain {
    /// Adds a link, unless one before it is broken.
    pub(crate) fn push(&mut self, link: Link) {
        if self.broken().is_none() {
            self.links.push(link);
        }
    }

    /// The link that is broken, if one is.
    pub fn broken(&self) -> Option<&Link> {
        self.links.iter().find(|link| link.is_broken())
    }
}
