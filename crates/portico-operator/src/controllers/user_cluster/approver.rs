//! Approves the certificates that kubelets of hosted clusters ask for to serve with: by them `kubectl logs`,
//! `exec` and `top` reach a node. `portico_hosting::serving` judges; those for clients are Kubernetes' own.
//!
//! One task a cluster lists the waiting requests, judges a bounded number, and sleeps until something
//! changes. Requests of a cluster's users cost this task memory and time within the bounds below, and others
//! nothing. A request that is not approved stays as it is, and is counted by its reason.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::{StreamExt, stream};
use ipnet::IpNet;
use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use portico_api::cluster::Cluster;
use portico_api::exposed_cluster::ExposedCluster;
use portico_api::names::is_object_name;
use portico_dial::Dialer;
use portico_expose::networks;
use portico_hosting::serving::{self, Asked, NodeAddress, REQUESTS, Reserved, Unapproved, judge, node_of};
use portico_kube::untrusted_api::{LONGEST_WATCH, Rows, UntrustedApi, UntrustedApiError};
use portico_pki::Kubeconfig;
use serde_json::Value;
use thiserror::Error;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};
use tracing::debug;

use super::context::{Context, FIRST_RETRY, LAST_RETRY};
use super::subject::{Subject, host_of};
use crate::follow::pause;
use crate::work_counters::WorkCounters;

/// The shortest time from one look to the next.
const LEAST_PAUSE: Duration = Duration::from_secs(1);

/// A request that was not approved is judged again after this time. A Node may say its addresses later than
/// its kubelet asks, and the reason of a refusal may be mended. Kubelets wait for 15 minutes.
const AGAIN: Duration = Duration::from_secs(20);

/// Most lines of one list.
const MOST_LISTED: usize = 200;

/// Most lists of one look. Those that are decided on stay for an hour.
const MOST_LISTS: usize = 5;

/// Most requests that are judged in one look: three requests to the API server each.
const MOST_JUDGED: usize = 32;

/// How many of them are judged at a time. An admission webhook that hangs makes each approval last as long as
/// a request may, 10 s, and so a look 80 s. Of each the answers are held meanwhile.
const AT_ONCE: usize = 4;

/// The approvers, by cluster.
#[derive(Debug, Default)]
pub(super) struct Approvers(Mutex<BTreeMap<String, Approver>>);

/// One that runs until it is dropped.
#[derive(Debug)]
struct Approver {
    /// What it was begun with.
    made_of: u64,
    task: JoinHandle<()>,
}

impl Drop for Approver {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Approvers {
    pub(super) fn end(&self, cluster: &str) {
        self.all().remove(cluster);
    }

    /// Ends those of clusters that are gone.
    pub(super) fn retain(&self, exists: impl Fn(&str) -> bool) {
        self.all().retain(|cluster, _| exists(cluster));
    }

    fn runs(&self, cluster: &str, made_of: u64) -> bool {
        let runs = |approver: &Approver| approver.made_of == made_of && !approver.task.is_finished();
        self.all().get(cluster).is_some_and(runs)
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<String, Approver>> {
        // A panic elsewhere leaves nothing half done here.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Context {
    /// Has the kubelets of a hosted cluster get their certificates, once its API server answers; those of
    /// others are somebody else's.
    pub(super) async fn approve(&self, subject: &Subject, kubeconfig: &Kubeconfig, answers: bool) {
        let name = &*subject.cluster.metadata.name;
        if self.settings.hosted.is_none() || !subject.cluster.is_hosted() {
            return self.approvers.end(name);
        }
        let doors = [Some(&subject.exposed), subject.second.as_ref()];
        let reserved = reserved(&subject.cluster, doors.into_iter().flatten());
        let kubeconfig = kubeconfig.to_yaml();
        let mut hasher = DefaultHasher::new();
        (&kubeconfig, &reserved).hash(&mut hasher);
        let made_of = hasher.finish();
        if self.approvers.runs(name, made_of) {
            return;
        }
        self.approvers.end(name);
        // Nobody asks before. A pass follows when it answers.
        if !answers {
            return;
        }
        // The pass says what is wrong with it.
        let Ok(api) = UntrustedApi::new(&kubeconfig, Dialer::direct()).await else { return };
        let round = Round { cluster: name.to_owned(), api, reserved, counters: self.counters.clone() };
        let task = tokio::spawn(round.repeat());
        self.approvers.all().insert(name.to_owned(), Approver { made_of, task });
    }
}

/// The names and addresses by which the control plane and Services are reached. No node has them. A door that
/// is being closed still has users.
fn reserved<'a>(cluster: &Cluster, doors: impl IntoIterator<Item = &'a ExposedCluster>) -> Reserved {
    let mut reserved = Reserved { cluster: cluster.metadata.name.to_string(), ..Reserved::default() };
    reserved.names.push(host_of(&cluster.status.address.api_server_external_address).to_owned());
    for door in doors {
        let spec = &door.spec;
        let names = [&*spec.address.external_name, host_of(&spec.address.url)];
        reserved.names.extend(names.map(str::to_owned));
        let single = [spec.address.ip, spec.tunnel.map(|tunnel| tunnel.agent_ip)];
        reserved.networks.extend(single.into_iter().flatten().map(|ip| IpNet::from(ip.to_canonical())));
    }
    let addresses: Vec<IpAddr> = reserved.names.iter().filter_map(|name| name.parse().ok()).collect();
    reserved.networks.extend(addresses.into_iter().map(|ip| IpNet::from(ip.to_canonical())));
    // Where the Cluster says nothing, its provider decides which of both it has.
    for kubevirt in [false, true] {
        reserved.networks.extend(networks::services(cluster, kubevirt));
    }
    reserved
}

/// Why a request has no approval of ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
enum NotApproved {
    /// There is something wrong with it.
    #[error(transparent)]
    Judged(#[from] Unapproved),
    /// A policy refuses that, say, or a webhook does not answer.
    #[error("the API server does not take the approval")]
    NotTaken,
}

impl NotApproved {
    /// Its name where it is counted.
    fn reason(self) -> &'static str {
        match self {
            Self::Judged(why) => why.reason(),
            Self::NotTaken => "ServingNotTaken",
        }
    }

    /// Whether the same request may be approved later.
    fn may_change(self) -> bool {
        matches!(self, Self::Judged(Unapproved::Address) | Self::NotTaken)
    }
}

/// The requests that were not approved, and when each was judged.
type Left = BTreeMap<String, (NotApproved, Instant)>;

/// One cluster, again and again.
struct Round {
    cluster: String,
    api: UntrustedApi,
    reserved: Reserved,
    counters: WorkCounters,
}

impl Round {
    async fn repeat(self) {
        let (mut left, mut failures) = (Left::new(), 0);
        loop {
            let wait = match self.once(&mut left).await {
                Ok(()) => {
                    failures = 0;
                    LEAST_PAUSE
                }
                Err(error) => {
                    debug!(cluster = self.cluster, %error, "cannot approve certificates of kubelets");
                    self.counters.failed(error.reason());
                    failures += 1;
                    pause(failures, FIRST_RETRY, LAST_RETRY)
                }
            };
            sleep(wait).await;
        }
    }

    /// Judges what waits, then waits until there is something to look at.
    async fn once(&self, left: &mut Left) -> Result<(), UntrustedApiError> {
        let selected = serving::listed();
        let (waiting, since) = self.list(&selected).await?;
        left.retain(|name, _| waiting.contains(name));
        let due = due(&waiting, left);
        let all = due.len() < MOST_JUDGED;
        let judging: Vec<_> =
            due.into_iter().map(|name| async move { (name, self.judge(name).await) }).collect();
        let mut judging = stream::iter(judging).buffer_unordered(AT_ONCE);
        while let Some((name, judged)) = judging.next().await {
            let judged = match judged {
                // One request of somebody must not keep the others waiting.
                Err(UntrustedApiError::TooLong(_) | UntrustedApiError::Unreadable(_)) => {
                    Err(Unapproved::Unreadable.into())
                }
                judged => judged?,
            };
            match judged {
                Ok(()) => _ = left.remove(name),
                Err(why) => {
                    debug!(cluster = self.cluster, request = name, %why, "a certificate is not approved");
                    if left.insert(name.clone(), (why, Instant::now())).is_none() {
                        self.counters.failed(why.reason());
                    }
                }
            }
        }
        if !all {
            return Ok(());
        }
        let again = left.values().any(|(why, _)| why.may_change());
        let limit = if again { AGAIN } else { LONGEST_WATCH };
        self.api.changed(&format!("{selected}&resourceVersion={since}"), limit).await
    }

    /// The names of the requests that nobody has decided on, and the version of the list.
    async fn list(&self, selected: &str) -> Result<(Vec<String>, String), UntrustedApiError> {
        let columns = ["Name", "Condition"];
        let Rows { rows, version, .. } = self.api.rows(selected, columns, MOST_LISTED, MOST_LISTS).await?;
        Ok((waiting(rows), version))
    }

    /// Approves one request, unless there is something wrong with it.
    async fn judge(&self, name: &str) -> Result<Result<(), NotApproved>, UntrustedApiError> {
        let path = format!("{REQUESTS}/{name}");
        // It may be gone by now.
        let Some(object) = self.api.get(&path).await? else { return Ok(Ok(())) };
        let Ok(request) = serde_json::from_value::<CertificateSigningRequest>(object.clone()) else {
            return Ok(Err(Unapproved::Unreadable.into()));
        };
        let spec = &request.spec;
        let ByteString(text) = &spec.request;
        let user = spec.username.as_deref().unwrap_or_default();
        let asked = Asked {
            signer: &spec.signer_name,
            user,
            groups: spec.groups.as_deref().unwrap_or_default(),
            usages: spec.usages.as_deref().unwrap_or_default(),
            request: text,
        };
        let addresses = match node_of(user).filter(|node| is_object_name(node)) {
            Some(node) => self.api.get(&format!("/api/v1/nodes/{node}")).await?,
            None => None,
        };
        let addresses = addresses.as_ref().map(node_addresses).unwrap_or_default();
        if let Err(why) = judge(&asked, &addresses, &self.reserved) {
            return Ok(Err(why.into()));
        }
        let message = "the names and addresses in it are those of the Node";
        match self.api.approve(&path, object, "PorticoApproved", message).await {
            Ok(()) => self.counters.wrote("CertificateSigningRequest"),
            // Somebody else was there first, or it is gone.
            Err(UntrustedApiError::Refused { code: 404 | 409, .. }) => {}
            // It answered a moment ago, so this may be about one request only.
            Err(error @ (UntrustedApiError::Refused { .. } | UntrustedApiError::NoAnswer(_))) => {
                debug!(cluster = self.cluster, request = name, %error, "an approval is not taken");
                return Ok(Err(NotApproved::NotTaken));
            }
            Err(error) => return Err(error),
        }
        Ok(Ok(()))
    }
}

/// The names of the requests that nobody has decided on.
fn waiting(rows: Vec<[String; 2]>) -> Vec<String> {
    let pending = rows.into_iter().filter(|[_, condition]| condition == "Pending");
    pending.map(|[name, _]| name).filter(|name| is_object_name(name)).collect()
}

fn node_addresses(node: &Value) -> Vec<NodeAddress> {
    let addresses = node["status"]["addresses"].as_array().into_iter().flatten();
    let address = |address: &Value| {
        let text = address["address"].as_str()?;
        match address["type"].as_str()? {
            "InternalIP" | "ExternalIP" => Some(NodeAddress::Ip(text.parse().ok()?)),
            "Hostname" | "InternalDNS" | "ExternalDNS" => Some(NodeAddress::Name(text.to_owned())),
            _ => None,
        }
    };
    addresses.filter_map(address).collect()
}

/// Which requests are to be judged now. Those that were never judged come first, or requests that fail again
/// and again would hold them up.
fn due<'a>(waiting: &'a [String], left: &Left) -> Vec<&'a String> {
    let is_due = |name: &&String| match left.get(*name) {
        Some((why, judged)) => why.may_change() && judged.elapsed() >= AGAIN,
        None => true,
    };
    let mut due: Vec<&String> = waiting.iter().filter(is_due).collect();
    due.sort_by_key(|name| left.get(*name).map(|(_, judged)| *judged));
    due.truncate(MOST_JUDGED);
    due
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use base64::Engine;
    use base64::prelude::BASE64_STANDARD;
    use http::{Request, Response};
    use kube::Client;
    use kube::client::Body;
    use portico_kube::untrusted_api::REQUEST_TIMEOUT;
    use portico_lab::faulty_api::{Answer, FaultyApi, FaultyPort};
    use portico_lab::pki::Certificate;
    use portico_pki::Credential;
    use serde_json::json;
    use tokio::task::yield_now;
    use tower::service_fn;

    use super::*;
    use crate::status::StatusHandle;

    #[test]
    fn while_a_cluster_migrates_no_node_gets_a_name_or_an_address_of_either_door() {
        let exposed: ExposedCluster = serde_json::from_value(json!({"metadata": {"name": "a"}, "spec": {
            "exposeStrategy": "LoadBalancer", "seed": "north",
            "address": {"externalName": "203.0.113.10", "ip": "203.0.113.10",
                "url": "https://[2001:db8::1]:31234"},
            "migration": {"state": "Closing", "since": "2026-01-02T03:04:05Z", "second": {
                "exposeStrategy": "Tunneling", "tunnel": {"agentIP": "100.64.30.11"},
                "address": {"externalName": "a.example.com", "ip": "203.0.113.9",
                    "url": "https://other.example.com:6443"}}}}}))
        .unwrap();
        let (second, mut cluster) = (exposed.by_second().unwrap(), Cluster::default());
        cluster.status.address.api_server_external_address = "https://lb.example.com".into();
        let services = reserved(&cluster, []).networks;
        let first = reserved(&cluster, [&exposed]);
        assert_eq!(first.names, ["lb.example.com", "203.0.113.10", "2001:db8::1"]);
        let both = reserved(&cluster, [&exposed, &second]);
        assert_eq!(both.names[3..], ["a.example.com", "other.example.com"]);
        let expected = ["203.0.113.10", "203.0.113.9", "100.64.30.11", "203.0.113.10", "2001:db8::1"]
            .map(|ip| IpNet::from(ip.parse::<IpAddr>().unwrap()));
        assert_eq!(both.networks, [&expected[..], &services].concat());
    }

    #[test]
    fn requests_that_fail_again_and_again_hold_up_no_other() {
        let waiting: Vec<String> = (0..200).map(|number| format!("csr-{number:03}")).collect();
        let long_ago = Instant::now().checked_sub(2 * AGAIN).unwrap();
        let failed = |name: &String| (name.clone(), (Unapproved::Address.into(), long_ago));
        let mut left: Left = waiting[..199].iter().map(failed).collect();
        left.insert("csr-000".to_owned(), (Unapproved::Names.into(), long_ago));
        let due = due(&waiting, &left);
        assert_eq!((due.len(), &**due[0]), (MOST_JUDGED, "csr-199"));
        assert!(!due.contains(&&waiting[0]), "nothing about it changes");
    }

    /// The API server of a cluster in which the Node `one` asks for these certificates. It approves them all.
    fn cluster_with(requests: &'static [&'static str]) -> Client {
        let asked = Certificate::server(&["one"]).common_name("system:node:one").organisation("system:nodes");
        let asked = asked.with(|params| {
            params.key_usages.clear();
            params.extended_key_usages.clear();
        });
        let spec = json!({"signerName": serving::SIGNER, "username": "system:node:one",
            "groups": ["system:nodes"], "usages": ["digital signature", "server auth"],
            "request": BASE64_STANDARD.encode(asked.request().unwrap())});
        let request = json!({"spec": spec});
        let node = json!({"status": {"addresses": [{"type": "Hostname", "address": "one"}]}});
        let rows: Vec<Value> = requests.iter().map(|name| json!({"cells": [name, "Pending"]})).collect();
        let list = json!({"metadata": {"resourceVersion": "1"}, "rows": rows,
            "columnDefinitions": [{"name": "Name"}, {"name": "Condition"}]});
        let service = service_fn(move |asked: Request<Body>| {
            let answer = match asked.uri().path() {
                REQUESTS => &list,
                path if path.starts_with(REQUESTS) => &request,
                _ => &node,
            };
            let answer = Response::new(Body::from(answer.to_string().into_bytes()));
            async move { Ok::<_, Infallible>(answer) }
        });
        Client::new(service, "default")
    }

    /// A round over the API server at this port, and what it counts.
    async fn round(port: &FaultyPort) -> (Round, StatusHandle) {
        let credential = Credential::Token("secret".to_owned());
        let (server, authority) = (port.url().to_owned(), port.authority().cert());
        let kubeconfig = Kubeconfig { cluster: "a".to_owned(), server, authority, credential };
        let api = UntrustedApi::new(&kubeconfig.to_yaml(), Dialer::direct()).await.unwrap();
        let status = StatusHandle::default();
        let counters = WorkCounters::new("user-cluster", &status);
        let round = Round { cluster: "a".to_owned(), api, reserved: Reserved::default(), counters };
        (round, status)
    }

    /// Waits until nothing but the clock goes on, and lets the requests that are not answered end.
    async fn time_passes_once(is_so: impl Fn() -> bool) {
        let began = std::time::Instant::now();
        while !is_so() {
            assert!(began.elapsed() < Duration::from_secs(20), "it waits for too few at a time");
            yield_now().await;
        }
        tokio::time::pause();
        tokio::time::advance(REQUEST_TIMEOUT).await;
        tokio::time::resume();
    }

    #[tokio::test]
    async fn a_request_whose_approval_is_refused_or_not_answered_holds_up_no_other() {
        let faulty = FaultyApi::default();
        faulty.rules(|rules| {
            rules.answers = vec![("refused/approval", Answer::Status(422), usize::MAX)];
            rules.mute_to = Some("unanswered/approval");
        });
        let port = faulty.serve(&cluster_with(&["refused", "unanswered", "right"])).await.unwrap();
        let (round, status) = round(&port).await;
        let work = || status.get().controllers.get("user-cluster").cloned().unwrap_or_default();
        let mut left = Left::new();
        let one_is_left = || {
            let work = work();
            let handled = work.writes.values().chain(work.errors.values()).sum::<u64>();
            handled == 2 && faulty.rules(|rules| rules.unanswered) == 1
        };
        let (looked, ()) = tokio::join!(round.once(&mut left), time_passes_once(one_is_left));
        looked.unwrap();
        let why: BTreeMap<&str, NotApproved> = left.iter().map(|(name, (why, _))| (&**name, *why)).collect();
        let not_taken = ["refused", "unanswered"].map(|name| (name, NotApproved::NotTaken));
        assert_eq!(why, not_taken.into());
        assert_eq!(work().writes["CertificateSigningRequest"], 1);
        assert_eq!(work().errors["ServingNotTaken"], 2);
        let waiting = ["refused", "unanswered"].map(str::to_owned);
        assert!(due(&waiting, &left).is_empty());
        left.values_mut().for_each(|(_, judged)| *judged -= AGAIN);
        assert_eq!(due(&waiting, &left), [&waiting[0], &waiting[1]]);
    }

    #[tokio::test]
    async fn several_approvals_that_are_not_answered_are_waited_for_at_the_same_time() {
        let faulty = FaultyApi::default();
        faulty.rules(|rules| rules.mute_to = Some("/approval"));
        let port = faulty.serve(&cluster_with(&["one", "two", "three", "four", "five"])).await.unwrap();
        let (round, _) = round(&port).await;
        let mut left = Left::new();
        let time_passes = async {
            for unanswered in [AT_ONCE, 5] {
                time_passes_once(|| faulty.rules(|rules| rules.unanswered) == unanswered).await;
            }
        };
        let (looked, ()) = tokio::join!(round.once(&mut left), time_passes);
        looked.unwrap();
        assert_eq!(left.len(), 5);
    }

    #[test]
    fn only_what_nobody_has_decided_on_waits_and_a_name_that_is_none_is_not_followed() {
        let rows = [
            ["csr-1", "Pending"],
            ["csr-2", "Approved,Issued"],
            ["../nodes", "Pending"],
            ["a/approval", "Pending"],
            ["csr-3?x", "Pending"],
            ["csr-4", "Pending"],
        ];
        let rows = rows.map(|row| row.map(str::to_owned)).to_vec();
        assert_eq!(waiting(rows), ["csr-1", "csr-4"]);
    }
}
