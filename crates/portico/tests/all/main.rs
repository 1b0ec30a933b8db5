//! The `portico` binary from outside: real processes, real sockets.
//!
//! [`common`] starts the binary, [`proof`] has what the large tests share: many connections, a cluster's
//! stand-in, usage. [`secure`] has what tests of the tunnel under TLS share.
#![allow(clippy::unwrap_used, reason = "a test may")]

mod agent;
mod agent_reach;
mod check;
mod churn;
mod command_line;
mod common;
mod control_plane;
mod demo;
mod deployed;
mod etcd;
mod fd_exhaustion;
mod firewalled;
mod gateway;
mod hostile;
mod ipv6;
mod isolation;
mod join;
mod join_move;
mod konnectivity;
mod konnectivity_agent;
mod konnectivity_api_server;
mod konnectivity_slow_reader;
mod kubeconfig;
mod mesh;
mod metrics;
mod migrate;
mod migrate_many;
mod network_faults;
mod nodes;
mod operator;
mod ports;
mod preflight;
mod proof;
mod routes;
mod scale;
mod secure;
mod seed;
mod slow_loris;
mod status;
mod tunnel_identity;
