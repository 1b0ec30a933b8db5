//! What a client of the tunnel port can do before it has shown an identity that is accepted.

use portico_lab::frames::{self, kind};

use crate::proof::{authority, report};
use crate::secure::SecureSite;
use crate::support::{Bystander, Limited, SMALL, agent_tls, next_of};

#[test]
fn a_gateway_in_256_mib_serves_a_bystander_and_refuses_a_client_without_an_identity() {
    let site = SecureSite::new();
    let limited = Limited::start(&site, SMALL, &["--tunnel-client-ca", &site.pki.path("ca.crt")]);
    let gateway = &limited.gateway;
    let bystander = Bystander::start(&site, gateway, "a");
    let mut nobody = gateway.raw(&agent_tls(&site, None));
    nobody.send(&frames::opening(&[])).unwrap();
    nobody.send(&frames::connect(1, &authority("a"), None)).unwrap();
    assert_eq!(next_of(&mut nobody, 1).kind, kind::HEADERS);
    assert_eq!(gateway.metric("portico_tunnel_unproven_connections"), 1);
    bystander.make(20);
    let seen = bystander.stop();
    report(format_args!("p99 {:?}, {} MiB", seen.p99(), limited.peak() >> 20));
    assert!(seen.requests() >= 20 && limited.lives() && gateway.is_ready());
}
