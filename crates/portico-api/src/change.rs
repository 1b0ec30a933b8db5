//! One change to one object: the same type and the same two words from a source to the data plane.
//!
//! The words are those of kube-rs: `Apply` and `Delete`. [`Keyed`] says which key names a deleted value.

use std::net::IpAddr;
use std::sync::Arc;

use crate::cluster::Cluster;
use crate::configuration::KubermaticConfiguration;
use crate::endpoint_slice::EndpointSlice;
use crate::exposed_cluster::ExposedCluster;
use crate::meta::ObjectKey;
use crate::names::{ClusterName, HostName, Tenant};
use crate::policy::ClusterPolicy;
use crate::seed::Seed;
use crate::service::Service;

/// A value with an identity that stays while its contents change.
pub trait Keyed {
    /// Names the value among all values of its type.
    type Key;

    /// The key of this value.
    fn key(&self) -> Self::Key;
}

/// One change to one value of type `T`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change<T: Keyed> {
    /// The value is new or changed: this is its present state.
    Apply(T),
    /// The value with this key no longer exists.
    Delete(T::Key),
}

impl<T: Keyed<Key: Clone>> Change<T> {
    /// The key of the value that changed.
    pub fn key(&self) -> T::Key {
        match self {
            Self::Apply(value) => value.key(),
            Self::Delete(key) => key.clone(),
        }
    }
}

macro_rules! keyed_by_metadata {
    ($($kind:ty),+) => {$(
        impl Keyed for $kind {
            type Key = ObjectKey;

            fn key(&self) -> ObjectKey {
                self.metadata.key()
            }
        }
    )+};
}

keyed_by_metadata!(Service, EndpointSlice, Seed, KubermaticConfiguration);

impl Keyed for Cluster {
    type Key = ClusterName;

    fn key(&self) -> ClusterName {
        ClusterName::new(&self.metadata.name)
    }
}

impl Keyed for ExposedCluster {
    type Key = ClusterName;

    fn key(&self) -> ClusterName {
        self.name()
    }
}

impl Keyed for ClusterPolicy {
    type Key = Tenant;

    fn key(&self) -> Tenant {
        self.tenant.clone()
    }
}

/// The address of a Service. It has nothing else that could change.
impl Keyed for IpAddr {
    type Key = Self;

    fn key(&self) -> Self {
        *self
    }
}

/// A name, which has nothing else that could change.
impl Keyed for HostName {
    type Key = Self;

    fn key(&self) -> Self {
        self.clone()
    }
}

impl<T: Keyed + ?Sized> Keyed for Box<T> {
    type Key = T::Key;

    fn key(&self) -> T::Key {
        (**self).key()
    }
}

impl<T: Keyed + ?Sized> Keyed for Arc<T> {
    type Key = T::Key;

    fn key(&self) -> T::Key {
        (**self).key()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_applied_and_a_deleted_value_have_the_same_key() {
        let mut service = Service::default();
        service.metadata.namespace = "cluster-a".into();
        service.metadata.name = "apiserver-external".into();
        let key = ObjectKey::new("cluster-a", "apiserver-external");
        assert_eq!(Change::Apply(Arc::new(service)).key(), key);
        assert_eq!(Change::<Service>::Delete(key.clone()).key(), key);
    }
}
