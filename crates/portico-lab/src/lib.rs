//! Hosts, firewalls and real Kubernetes on one machine, for tests and contributors.
