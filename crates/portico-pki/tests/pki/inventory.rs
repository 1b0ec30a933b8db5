//! The tables of the manual are those of the code.

use std::collections::BTreeSet;

use portico_pki::inventory::{self, LEAVES, NamesOf, Server, Signer, Stored};
use portico_pki::{Names, Usage};

const MANUAL: &str = include_str!("../../../../docs/pki.md");

fn rows(heading: &str) -> Vec<String> {
    let (_, section) = MANUAL.split_once(heading).expect("the manual has the section");
    let rows = section.lines().skip_while(|line| !line.starts_with('|'));
    rows.take_while(|line| line.starts_with('|')).skip(2).map(ToOwned::to_owned).collect()
}

#[test]
fn the_manual_lists_every_authority() {
    let expected = Signer::ALL.map(|signer| {
        let name = signer.common_name("<external name>");
        format!("| `{}` | `{name}` |", signer.secret())
    });
    let found = rows("## Authorities");
    assert_eq!(found.len(), expected.len());
    for (row, expected) in found.iter().zip(expected) {
        assert!(row.starts_with(&expected), "{row} begins with {expected}");
    }
}

#[test]
fn the_manual_lists_every_certificate() {
    let expected: Vec<String> = LEAVES
        .iter()
        .map(|leaf| {
            let stored = match leaf.stored {
                Stored::Pair(..) => {
                    let keys = leaf.keys().into_iter().map(|key| format!("`{key}`"));
                    keys.collect::<Vec<_>>().join(", ")
                }
                Stored::Kubeconfig(Server::External) => "`kubeconfig` (external)".to_owned(),
                Stored::Kubeconfig(Server::Internal) => "`kubeconfig` (internal)".to_owned(),
                Stored::Kubeconfig(Server::ControlPlane) => {
                    let files = leaf.keys().into_iter().skip(1).map(|key| format!(", `{key}`"));
                    format!("`kubeconfig` (control plane){}", files.collect::<String>())
                }
            };
            let organisation = leaf.organisation.map(|name| format!(", O `{name}`")).unwrap_or_default();
            let usage = match leaf.usage {
                Usage::Server => "server",
                Usage::Client => "client",
                Usage::ServerAndClient => "server, client",
            };
            let names = match leaf.names {
                NamesOf::Client => "none",
                NamesOf::Front => "front",
                NamesOf::Webhook => "webhook",
                NamesOf::ApiServer => "API server",
                NamesOf::Konnectivity => "Konnectivity",
                NamesOf::Etcd => "etcd",
            };
            let (secret, name, signer) = (leaf.secret, leaf.common_name, leaf.signer.secret());
            format!("| `{secret}` | {stored} | `{name}`{organisation} | {usage} | {names} | `{signer}` |")
        })
        .collect();
    assert_eq!(rows("## Certificates"), expected);
}

#[test]
fn no_secret_holds_two_things() {
    let authorities = Signer::ALL.iter().map(|signer| signer.secret());
    let all: Vec<&str> = LEAVES.iter().map(|leaf| leaf.secret).chain(authorities).collect();
    assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len());
}

/// One CA for all, as in KKP, makes any certificate of a cluster a client of its etcd.
#[test]
fn what_one_authority_signs_opens_nothing_of_another() {
    for leaf in &LEAVES {
        let kind = match leaf.signer {
            Signer::Tunnel | Signer::Webhook | Signer::Cluster => leaf.usage == Usage::Server,
            Signer::Clients | Signer::FrontProxy => leaf.usage == Usage::Client,
            Signer::Etcd => leaf.common_name == "etcd" || leaf.common_name == "apiserver",
        };
        assert!(kind, "{leaf:?}");
        assert_eq!(leaf.usage == Usage::Client, leaf.names == NamesOf::Client, "{leaf:?}");
    }
}

#[test]
fn names_of_etcd_and_konnectivity_are_kkps() {
    let etcd = inventory::etcd("cluster-a");
    assert_eq!((etcd.dns.len(), etcd.ips.len()), (19, 1));
    assert!(etcd.dns.contains("etcd-8.etcd.cluster-a.svc.cluster.local"));
    let profile = LEAVES.iter().find(|leaf| leaf.names == NamesOf::Etcd).unwrap().profile(etcd);
    assert_eq!((&*profile.common_name, profile.organisation), ("etcd", None));

    let service = "10.240.16.1".parse().unwrap();
    let Names { dns, ips } = inventory::konnectivity("a.north.example.com", [service]);
    assert!(dns.iter().eq(["a.north.example.com", "konnectivity-server.a.north.example.com"]));
    assert_eq!(ips.len(), 2);
    let by_address = inventory::konnectivity("203.0.113.9", [service]);
    assert!(by_address.dns.is_empty() && by_address.ips.len() == 3);
}
