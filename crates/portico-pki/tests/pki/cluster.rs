//! All Secrets of one cluster: made, renewed, and never made anew once something depends on them.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use jiff::Timestamp;
use portico_pki::inventory::{KUBECONFIG, LEAVES, Leaf, SERVICE_ACCOUNT_KEYS, Server, Signer, Stored};
use portico_pki::{
    Authority, BadKeys, ClusterPki, Credential, KeyKind, Kubeconfig, LostWhy, Pair, Reason, Review, Secrets,
    ServiceAccountKeys, Why,
};

use crate::{days, names, now};

pub(crate) fn pki() -> ClusterPki {
    ClusterPki {
        cluster: "a".to_owned(),
        namespace: "cluster-a".to_owned(),
        external_name: "a.north.example.com".to_owned(),
        api_server: names(&["a.north.example.com", "kubernetes"], &["127.0.0.1"]),
        konnectivity: names(&["konnectivity-server.a.north.example.com"], &["10.240.16.1", "2001:db8::7"]),
        external_url: Some("https://a.north.example.com:6443".to_owned()),
        internal_url: "https://apiserver-external.cluster-a.svc.cluster.local.".to_owned(),
        control_plane_url: "https://127.0.0.1:6443".to_owned(),
        keys: KeyKind::default(),
    }
}

/// All Secrets of a cluster with RSA keys, of which each takes a while.
pub(crate) static RSA: LazyLock<Secrets> =
    LazyLock::new(|| made(&ClusterPki { keys: KeyKind::Rsa2048, ..pki() }));

fn apply(secrets: &mut Secrets, review: &Review) {
    for due in &review.due {
        let data = due.data.iter().map(|(&key, value)| (key.to_owned(), value.clone()));
        secrets.entry(due.secret.to_owned()).or_default().extend(data);
    }
}

pub(crate) fn made(pki: &ClusterPki) -> Secrets {
    let mut secrets = Secrets::new();
    let review = pki.review(&secrets, false, now()).unwrap();
    apply(&mut secrets, &review);
    secrets
}

fn due(review: &Review) -> BTreeSet<&str> {
    review.due.iter().map(|due| due.secret).collect()
}

/// Every Secret that a cluster has.
fn all() -> BTreeSet<&'static str> {
    let leaves =
        LEAVES.iter().filter(|leaf| Signer::OF_A_CLUSTER.contains(&leaf.signer)).map(|leaf| leaf.secret);
    let authorities = Signer::OF_A_CLUSTER.map(Signer::secret);
    leaves.chain(authorities).chain([SERVICE_ACCOUNT_KEYS]).collect()
}

#[test]
fn a_new_cluster_gets_every_secret_once() {
    let mut secrets = Secrets::new();
    let first = pki().review(&secrets, false, now()).unwrap();
    assert_eq!((due(&first), &*first.lost), (all(), &[][..]));
    assert!(first.due.iter().all(|due| due.why == Why::Missing));
    apply(&mut secrets, &first);
    for leaf in LEAVES.iter().filter(|leaf| Signer::OF_A_CLUSTER.contains(&leaf.signer)) {
        assert!(secrets[leaf.secret].keys().eq(leaf.keys().into_iter().collect::<BTreeSet<_>>()));
    }
    let second = pki().review(&secrets, true, now()).unwrap();
    assert_eq!((second.due.len(), second.lost.len()), (0, 0), "{second:?}");
    assert_eq!(second.next, Some(now() + days(335)));
}

#[test]
fn a_creation_that_is_cut_off_anywhere_is_completed() {
    let whole = pki().review(&Secrets::new(), false, now()).unwrap();
    for written in 0..whole.due.len() {
        let mut secrets = Secrets::new();
        apply(&mut secrets, &Review { due: whole.due[..written].to_vec(), ..Review::default() });
        let before = secrets.clone();
        let rest = pki().review(&secrets, false, now()).unwrap();
        assert_eq!((rest.due.len(), rest.lost.len()), (whole.due.len() - written, 0), "after {written}");
        apply(&mut secrets, &rest);
        assert!(before.iter().all(|(name, data)| secrets[name] == *data), "after {written}");
    }
}

/// Everything would break at once: kubelets, kubeconfigs, tokens.
#[test]
fn what_the_cluster_depends_on_is_never_made_anew() {
    for secret in Signer::OF_A_CLUSTER.map(Signer::secret).into_iter().chain([SERVICE_ACCOUNT_KEYS]) {
        let mut secrets = made(&pki());
        secrets.remove(secret);
        let review = pki().review(&secrets, true, now() + days(360)).unwrap();
        assert_eq!(review.lost.iter().map(|lost| lost.secret).collect::<Vec<_>>(), [secret]);
        assert!(matches!(&review.lost[0].why, LostWhy::Missing(keys) if keys.len() == 2));
        // What it signed stays as it is, though it is late; the rest is renewed.
        let signed = |name: &str| {
            LEAVES.iter().any(|leaf| leaf.secret == name && leaf.signer.secret() == secret)
                || secret == "ca" && secrets[name].contains_key(KUBECONFIG)
        };
        assert!(!review.due.is_empty() && due(&review).iter().all(|name| !signed(name)), "{review:?}");
    }
    let lost = |secrets: &Secrets, used| pki().review(secrets, used, now()).unwrap().lost;
    // A certificate says that its authority has been used, even if nothing else does.
    let mut secrets = made(&pki());
    secrets.remove("etcd-ca");
    assert_eq!(
        lost(&secrets, false)[0].to_string(),
        "Secret etcd-ca: ca.crt and ca.key are missing, and the cluster has used it; restore the Secret from \
         a backup. The members of etcd and the API server trust each other by it. Portico does not make it \
         anew, and leaves what it signed as it is"
    );
    let mut secrets = made(&pki());
    secrets.get_mut("ca").unwrap().remove("ca.key");
    assert!(lost(&secrets, false)[0].to_string().starts_with("Secret ca: ca.key is missing, "));
    let other = Authority::create("other", KeyKind::default(), now()).unwrap();
    secrets.get_mut("ca").unwrap().insert("ca.key".to_owned(), other.key);
    assert!(matches!(lost(&secrets, true)[0].why, LostWhy::Authority(_)));
}

/// Nothing follows them.
#[test]
fn authorities_that_end_within_a_year_are_told_of_and_go_on_signing() {
    let early = now() - days(3_290);
    let mut secrets = made(&pki());
    let old = Authority::create("root-ca", KeyKind::default(), early).unwrap();
    secrets.insert("ca".to_owned(), [("ca.crt", old.certificate), ("ca.key", old.key)].map(owned).into());
    let ending_and_lost = |secrets: &Secrets, now| {
        let review = pki().review(secrets, true, now).unwrap();
        (review.ending_authorities(now), review.lost.len())
    };
    let end = early + days(3_650);
    let ca = format!("authorities end, and with each all that it signed: Secret ca on {end}. Portico ");
    let (text, lost) = ending_and_lost(&secrets, now());
    assert!(text.unwrap().starts_with(&ca) && lost == 0);
    // Of one that nothing can be signed with any more it is said too, and of the others in their time.
    let (text, lost) = ending_and_lost(&secrets, end + days(1));
    assert!(text.unwrap().starts_with(&ca) && lost == 1);
    let all = ending_and_lost(&made(&pki()), now() + days(3_286)).0.unwrap();
    assert!(["Secret ca on ", "Secret etcd-ca on "].iter().all(|text| all.contains(text)), "{all}");
    assert_eq!(ending_and_lost(&made(&pki()), now() + days(3_284)), (None, 0));
}

fn owned((key, value): (&str, String)) -> (String, String) {
    (key.to_owned(), value)
}

#[test]
fn another_address_changes_no_credential() {
    let secrets = made(&pki());
    let moved = ClusterPki { external_url: Some("https://203.0.113.9:31000".to_owned()), ..pki() };
    let review = moved.review(&secrets, true, now()).unwrap();
    assert_eq!(due(&review), ["admin-kubeconfig"].into());
    assert_eq!(review.due[0].why, Why::Beside);
    let before = Kubeconfig::parse(&secrets["admin-kubeconfig"][KUBECONFIG]).unwrap();
    let after = Kubeconfig::parse(&review.due[0].data[KUBECONFIG]).unwrap();
    assert_eq!(after.server, "https://203.0.113.9:31000");
    assert_eq!(after.credential, before.credential);
    // Before the address is known there is no kubeconfig for users, and everything else.
    let unknown = ClusterPki { external_url: None, ..pki() };
    assert!(!made(&unknown).contains_key("admin-kubeconfig"));
}

/// Programs read the files again when their certificate is renewed, and the kubeconfig only at their start.
#[test]
fn a_kubeconfig_of_a_program_names_the_files_beside_it_and_a_renewal_changes_those_alone() {
    let mut secrets = made(&pki());
    let of_program = |leaf: &&Leaf| leaf.stored == Stored::Kubeconfig(Server::ControlPlane);
    let programs: BTreeSet<&str> = LEAVES.iter().filter(of_program).map(|leaf| leaf.secret).collect();
    assert_eq!(programs.len(), 3);
    let before = secrets.clone();
    let late = now() + days(340);
    apply(&mut secrets, &pki().review(&before, true, late).unwrap());
    for name in &programs {
        for held in [&before[*name], &secrets[*name]] {
            let inline = Kubeconfig::parse(&held[KUBECONFIG]).unwrap();
            let pair = Pair { certificate: held["client.crt"].clone(), key: held["client.key"].clone() };
            assert_eq!(inline.credential, Credential::Certificate(pair));
            let text = held["kubeconfig-files"].replace(
                "    client-certificate: client.crt\n    client-key: client.key\n",
                "    token: t\n",
            );
            let of_files = Kubeconfig::parse(&text).unwrap();
            assert_eq!(of_files, Kubeconfig { credential: Credential::Token("t".to_owned()), ..inline });
        }
        assert_eq!(before[*name]["kubeconfig-files"], secrets[*name]["kubeconfig-files"]);
        assert_ne!(before[*name]["client.crt"], secrets[*name]["client.crt"]);
    }
}

#[test]
fn secrets_of_before_get_the_keys_that_they_lack_and_keep_their_certificates() {
    let whole = made(&pki());
    let mut secrets = whole.clone();
    for data in secrets.values_mut() {
        data.retain(|key, _| !["kubeconfig-files", "client.crt", "client.key"].contains(&&**key));
    }
    let review = pki().review(&secrets, true, now() + days(1)).unwrap();
    let lacking = vec!["client.crt", "client.key", "kubeconfig-files"];
    assert!(review.due.len() == 3 && review.lost.is_empty(), "{review:?}");
    assert!(review.due.iter().all(|due| due.why == Why::Incomplete(lacking.clone())), "{review:?}");
    assert_eq!(review.due[0].why.to_string(), "it lacks client.crt, client.key, kubeconfig-files");
    apply(&mut secrets, &review);
    assert_eq!(secrets, whole);
}

#[test]
fn a_new_name_renews_the_server_and_nothing_else() {
    let secrets = made(&pki());
    let mut wider = pki();
    wider.api_server.ips.insert("203.0.113.9".parse().unwrap());
    let review = wider.review(&secrets, true, now()).unwrap();
    assert_eq!(due(&review), ["apiserver-tls"].into());
    assert!(matches!(&review.due[0].why, Why::Renewal(Reason::NamesDiffer { .. })), "{review:?}");
}

#[test]
fn everything_that_may_be_made_anew_is_renewed_a_month_before_its_end() {
    let mut secrets = made(&pki());
    let late = now() + days(340);
    let review = pki().review(&secrets, true, late).unwrap();
    let leaves: BTreeSet<&str> = LEAVES
        .iter()
        .filter(|leaf| Signer::OF_A_CLUSTER.contains(&leaf.signer))
        .map(|leaf| leaf.secret)
        .collect();
    assert_eq!(due(&review), leaves);
    assert!(review.due.iter().all(|due| matches!(due.why, Why::Renewal(Reason::Expiring(_)))));
    apply(&mut secrets, &review);
    assert_eq!(pki().review(&secrets, true, late).unwrap().next, Some(late + days(335)));
}

#[test]
fn keys_of_service_accounts_may_be_several_and_the_one_that_signs_is_among_them() {
    for kind in [KeyKind::EcdsaP256, KeyKind::Rsa2048] {
        let [old, new] = [(); 2].map(|()| ServiceAccountKeys::create(kind).unwrap());
        let both = new.clone().accepting(&old).unwrap();
        assert_eq!(both.verifying.matches("BEGIN PUBLIC KEY").count(), 2);
        assert_eq!(both.clone().accepting(&old).unwrap(), both);
        assert_eq!(ServiceAccountKeys::read(&both.signing, &both.verifying), Ok(both.clone()));
        assert_eq!(ServiceAccountKeys::read(&new.signing, &old.verifying), Err(BadKeys::Mismatch));
        assert!(ServiceAccountKeys::read("", &old.verifying).is_err());
        assert!(!format!("{both:?}").contains("PRIVATE"));
    }
}

#[test]
fn rsa_is_a_choice_for_everything_of_a_cluster() {
    let secrets = &*RSA;
    let length = |secret: &str, key: &str| secrets[secret][key].len();
    assert!(length("ca", "ca.key") > 1_600 && length("etcd-tls-certificate", "etcd-tls.key") > 1_600);
    assert!(length(SERVICE_ACCOUNT_KEYS, "sa.key") > 1_600);
    // Another kind is no reason to issue again.
    assert!(pki().review(secrets, true, now()).unwrap().due.is_empty());
}

#[test]
fn nothing_secret_is_in_a_log() {
    let review = pki().review(&Secrets::new(), false, now()).unwrap();
    assert!(!format!("{review:?}").contains("BEGIN"), "{review:?}");
    let pair = Pair { certificate: String::new(), key: "secret".to_owned() };
    assert!(!format!("{pair:?}").contains("secret"));
    let _: Timestamp = review.next.unwrap();
}

#[test]
fn without_anything_but_its_secrets_what_ends_is_issued_again_with_the_names_it_has() {
    let mut secrets = made(&pki());
    let as_found = |secrets: &Secrets| ClusterPki::as_found("a", "cluster-a", secrets, KeyKind::default());
    let review = |secrets: &Secrets, now| as_found(secrets).review(secrets, true, now).unwrap();
    assert_eq!(as_found(&secrets), ClusterPki { external_name: "a".to_owned(), ..pki() });
    assert!(review(&secrets, now()).due.is_empty());
    secrets.remove("admin-kubeconfig");
    secrets.get_mut("konnectivityproxy-tls").unwrap().clear();
    let later = now() + days(340);
    let endings = review(&secrets, later).endings();
    assert!(endings.due.iter().all(|due| matches!(due.why, Why::Renewal(Reason::Expiring(_)))));
    assert!(due(&endings).contains("apiserver-tls"), "{endings:?}");
    apply(&mut secrets, &endings);
    let rest = pki().review(&secrets, true, later).unwrap();
    assert_eq!(due(&rest), BTreeSet::from(["admin-kubeconfig", "konnectivityproxy-tls"]));
}
