//! Of two API servers one loses its Konnectivity server, and then goes with it.

use std::time::Instant;

use anyhow::{Result, ensure};
use portico_lab::kubectl::condition;
use portico_lab::{Node, say, wait};
use rustix::process::{Signal, kill_process};

use super::cluster::{Hosted, STARTING};
use super::joined::by;
use crate::konnectivity::streams::Exec;

/// What is open by the other API server goes on, and each new request by it is answered. So are those by the
/// gateway, while the API server goes. The one that comes answers its first one.
pub(super) fn an_api_server_goes_with_its_konnectivity_server(cluster: &Hosted<'_>, node: &Node) {
    let (kubectl, seed, pod) = (cluster.past_the_gateway(), cluster.seed.kubectl(), node.host().name());
    let servers = cluster.api_servers();
    let [(leaves, loses), (_, stays)] = &servers[..] else { panic!("{servers:?}") };
    let echo = ["exec", pod, "--", "echo", "here"];
    let asks = |server: &str| kubectl.run(&[&by(server)[..], &echo].concat());
    // Not limited to the time of one request.
    let mut exec = Exec::start(&kubectl, &by(stays)[..2], pod);
    let killed = Instant::now();
    for process in cluster.seed.node().pod_processes(&cluster.uid_of(leaves), "portico").unwrap() {
        kill_process(process, Signal::KILL).unwrap();
    }
    asks(stays).unwrap();
    assert!(exec.beat(), "what was open beside another Konnectivity server");
    wait::until("exec by the API server whose Konnectivity server was killed", STARTING, || asks(loses))
        .unwrap();
    let took = killed.elapsed().as_secs_f64();
    say(format_args!(
        "{}: a Konnectivity server was killed, and carried again after {took:.1} s",
        cluster.name
    ));

    let start = Instant::now();
    seed.run(&["delete", "pod", leaves, "-n", &cluster.namespace(), "--wait=false"]).unwrap();
    let is_replaced = || -> Result<()> {
        let pods = seed.get(&["pods", "-n", &cluster.namespace(), "-l", "app=apiserver"])?;
        let pods = pods["items"].as_array().map_or(&[][..], Vec::as_slice);
        let is_old = |pod: &serde_json::Value| pod["metadata"]["name"] == **leaves;
        ensure!(
            pods.len() == servers.len() && pods.iter().all(|pod| condition(pod, "Ready") && !is_old(pod))
        );
        Ok(())
    };
    let mut answered = 0;
    while is_replaced().is_err() {
        assert!(start.elapsed() < STARTING, "{:?}", is_replaced());
        assert_eq!(asks(stays).unwrap().trim(), "here", "by the API server that stays");
        assert_eq!(cluster.kubectl.run(&echo).unwrap().trim(), "here", "by the gateway");
        assert!(exec.beat(), "what was open by the API server that stays");
        answered += 2;
    }
    assert!(answered > 0, "nobody asked meanwhile");
    let took = start.elapsed().as_secs_f64();
    let (_, comes) = cluster.api_servers().into_iter().find(|server| !servers.contains(server)).unwrap();
    let ready = Instant::now();
    assert_eq!(asks(&comes).unwrap().trim(), "here", "by the API server that came");
    let later = ready.elapsed().as_secs_f64();
    assert!(exec.beat(), "what was open by the API server that stays");
    say(format_args!(
        "{}: an API server was replaced in {took:.1} s, {answered} requests to its nodes were answered, and \
         so was the first by the new one, in {later:.1} s",
        cluster.name
    ));
}
