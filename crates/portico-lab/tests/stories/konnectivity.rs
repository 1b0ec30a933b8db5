//! The way back from a real API server to a real worker that it cannot reach, by `deploy/konnectivity` as it
//! is. The server is a sidecar of the API server, agents are pods of the worker.
//!
//! Everything that kube-apiserver sends that way is used, in each mode of its egress selector and by each way
//! from agents to the server. Those ways are a NodePort, a load balancer, the gateway by server name, and a
//! corporate proxy. Then server and agents are killed, frozen, cut off and replaced. What a step says about
//! times is printed and never asserted: this machine does much else.

mod agents;
pub(crate) mod metrics_server;
mod server;
mod story;
pub(crate) mod streams;
pub(crate) mod uses;

use std::collections::BTreeSet;
use std::time::Instant;

use anyhow::ensure;
use portico_lab::control_plane::Options;
use portico_lab::firewall::{Direction, Firewall, Traffic, Verdict};
use portico_lab::process::freeze;
use portico_lab::{Authority, Image, Seed, UserCluster, konnectivity, long_form, say, wait};
use rustix::process::{Signal, kill_process};
use serde_json::json;

use self::agents::{Agent, Agents, Road};
use self::server::Mode;
use self::story::{AGENT_PORT, EXTERNAL_NAME, Story};
use self::streams::{Knocking, Streams, new_requests_work};
use crate::squid::{SQUID_PORT, Squid};
use crate::support::{SOON, Watch, Way};
use crate::tunnel::seed::deploy_gateways;

/// Where the API server listens: the number of its NodePort, as with KKP. Pods then reach it, too.
const API_PORT: u16 = 30_043;

#[test]
fn an_api_server_reaches_a_worker_through_konnectivity_whatever_happens_on_the_way() {
    // First, since it may have to be built.
    let webhook = Image::webhook().unwrap();
    let (_turn, lab, seed) = crate::seeded("konnectivity-story");
    let cluster = create_cluster(&seed);
    server::deploy(&seed, &cluster, Mode::GrpcUnix);
    let issuer = Authority::new("gateways").unwrap();
    let [gateway, _other] = deploy_gateways(&seed, &lab, &issuer, &[&issuer]);
    cluster.wait_ready(&seed).unwrap();
    let access = cluster.access(&seed, &format!("https://{}:{API_PORT}", seed.host().address()));
    let client = lab.host("client").unwrap();
    let way = Way::new("direct", &client, &access);
    way.wait_open();
    konnectivity::grant(&way.kubectl).unwrap();

    let worker = lab.host("worker-1").unwrap();
    let wall = Firewall::allow_in_only(&worker, &[]).unwrap();
    let worker = UserCluster::join_worker_on(&worker, &access).unwrap();
    for image in [&Image::portico().unwrap(), &webhook, &Image::busybox().unwrap()] {
        worker.import(image).unwrap();
    }
    say("the worker has joined; nothing reaches it from outside");
    gateway.wait_rolled_out(&seed);
    lab.name_resolves(&format!("konnectivity-server.{EXTERNAL_NAME}"), gateway.address).unwrap();
    let story = Story { worker, way, cluster, client, seed, _wall: wall };
    story.nobody_reaches_the_kubelet_directly();

    let agents = Agents::deploy(&story, &Road::NodePort);
    uses::prepare(&story);
    uses::everything(&story);
    story.what_is_open_elsewhere_outlives_an_agent(&agents);
    story.a_frozen_agent_is_left_for_the_other(&agents);
    story.a_killed_server_is_started_again(&agents);
    story.what_stands_still_goes_on(&agents);
    story.an_agent_that_is_cut_off_is_left_for_the_other(&agents);
    story.agents_that_were_cut_off_come_back(&agents);

    let balanced = Road::LoadBalancer { address: server::balance(&story.seed, &story.cluster) };
    story.agents_move_unnoticed(&agents, &balanced, "to a load balancer");
    let by_name = Road::Gateway { address: gateway.address };
    story.agents_move_unnoticed(&agents, &by_name, "to the gateway");
    // The second time the kubelet waits for ten seconds, and agents have had that many refusals.
    story.a_killed_server_is_started_again(&agents);
    let proxy = lab.host("proxy").unwrap();
    let squid = Squid::start(&proxy, &format!("konnectivity-server.{EXTERNAL_NAME}"), 6443);
    story.agents_move_unnoticed(&agents, &Road::Proxy { address: proxy.address() }, "to a corporate proxy");
    {
        let ways = [(proxy.address(), SQUID_PORT), (story.seed.host().address(), API_PORT)];
        let _only = Firewall::allow_out_only_to(story.worker.host(), &ways).unwrap();
        agents.restart(&story);
        uses::the_most(&story);
    }
    let by_proxy = agents.ready(&story);
    agents.take(&story, &by_name);
    // The end of their grace period.
    by_proxy.iter().for_each(Agent::kill);
    wait::until("the proxy to write down whom it let where", SOON, || {
        // It does once the connections end.
        let destinations = squid.destinations();
        let only = BTreeSet::from([format!("konnectivity-server.{EXTERNAL_NAME}:6443")]);
        ensure!(destinations == only, "it let agents go to {destinations:?}");
        Ok(())
    })
    .unwrap();
    for mode in [Mode::HttpConnectUnix, Mode::HttpConnectTls] {
        server::switch(&story.seed, &story.cluster, mode);
        story.way.wait_open();
        new_requests_work(&story, &format!("an update of the API server to {mode:?}"));
        long_form(uses::the_most as fn(&Story), uses::everything)(&story);
    }
}

fn create_cluster(seed: &Seed) -> UserCluster {
    let options = Options {
        secure_port: API_PORT,
        names: vec![EXTERNAL_NAME.to_owned()],
        api_server_flags: metrics_server::api_server_flags(),
        ..Options::new("north")
    };
    let cluster = UserCluster::create(seed, &options).unwrap();
    let port = json!({"name": "secure", "port": 443, "targetPort": API_PORT, "nodePort": API_PORT});
    let service = json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "apiserver-external", "namespace": cluster.namespace()},
        "spec": {"type": "NodePort", "selector": {"app": "apiserver"}, "ports": [port]},
    });
    seed.kubectl().apply_json(&service).unwrap();
    cluster
}

impl Story {
    /// What the tunnel is for.
    fn nobody_reaches_the_kubelet_directly(&self) {
        let url = format!("https://{}:10250/healthz", self.worker.host().address());
        let error = self.seed.host().run(&["curl", "-sSk", "--connect-timeout", "1", &url]).unwrap_err();
        assert!(error.to_string().contains("exit status: 28"), "{error:#}");
    }

    /// SIGKILL for one of two agents: its streams end, those of the other do not notice.
    fn what_is_open_elsewhere_outlives_an_agent(&self, agents: &Agents) {
        let streams = Streams::open(self, agents);
        let [killed, other] = agents.ready(self);
        killed.kill();
        new_requests_work(self, "an agent was killed");
        streams.beat_of(&other);
        streams.ended_of(&killed);
        agents.wait_ready(self);
        streams.beat_of(&other);
    }

    /// An agent that says nothing any more is found out. Until then, and after, the other one serves.
    fn a_frozen_agent_is_left_for_the_other(&self, agents: &Agents) {
        let streams = Streams::open(self, agents);
        let [frozen, other] = agents.ready(self);
        freeze(frozen.process).unwrap();
        new_requests_work(self, "an agent stood still");
        streams.beat_of(&other);
        kill_process(frozen.process, Signal::CONT).unwrap();
        new_requests_work(self, "it went on");
        agents.wait_ready(self);
        streams.beat_of(&other);
    }

    /// SIGKILL for the server: the API server's own clients notice nothing, and the tunnel comes back.
    fn a_killed_server_is_started_again(&self, agents: &Agents) {
        let watch: Watch<'_> = self.way.watch();
        kill_process(server::process(&self.seed, &self.cluster), Signal::KILL).unwrap();
        let killed = Instant::now();
        wait::until("the server to be started again", SOON, || server::is_ready(&self.seed, &self.cluster))
            .unwrap();
        say(format_args!("the server was killed: started after {:.1} s", killed.elapsed().as_secs_f64()));
        new_requests_work(self, "the server was there again");
        watch.beat();
        agents.wait_ready(self);
    }

    /// Each part stands still for a moment: what is open waits, and goes on.
    fn what_stands_still_goes_on(&self, agents: &Agents) {
        let streams = Streams::open(self, agents);
        let [agent, other] = agents.ready(self);
        freeze(agent.process).unwrap();
        streams.beat_of(&other);
        kill_process(agent.process, Signal::CONT).unwrap();
        streams.beat_of(&agent);
        let server = server::process(&self.seed, &self.cluster);
        freeze(server).unwrap();
        // What does not go into the cluster does not wait.
        self.way.ask().unwrap();
        kill_process(server, Signal::CONT).unwrap();
        new_requests_work(self, "the server stood still");
        streams.beat_of(&agent);
        streams.beat_of(&other);
    }

    /// A firewall between one of two agents and the server: its streams end, and those of the other go on.
    fn an_agent_that_is_cut_off_is_left_for_the_other(&self, agents: &Agents) {
        let streams = Streams::open(self, agents);
        let [cut_off, other] = agents.ready(self);
        let wall = cut_off.cut_off(self);
        new_requests_work(self, "a firewall cut off an agent");
        streams.beat_of(&other);
        streams.ended_of(&cut_off);
        agents.wait_not_ready(self, 1);
        wall.lift().unwrap();
        new_requests_work(self, "the firewall let it through again");
        agents.wait_ready(self);
        streams.beat_of(&other);
    }

    /// A firewall between both agents and the server.
    fn agents_that_were_cut_off_come_back(&self, agents: &Agents) {
        let road = Traffic::all(Direction::Out).to_port(AGENT_PORT);
        let wall = Firewall::stop(self.worker.host(), &road, Verdict::Drop).unwrap();
        agents.wait_not_ready(self, 2);
        wall.lift().unwrap();
        new_requests_work(self, "the firewall let agents through again");
        agents.wait_ready(self);
    }

    /// A rolling update that gives agents another way to the server. What old agents carry goes on with them,
    /// within their grace period, and new requests go by the new ones.
    fn agents_move_unnoticed(&self, agents: &Agents, road: &Road, what: &str) {
        let streams = Streams::open(self, agents);
        let before = agents.ready(self);
        let knocking = Knocking::start(self);
        agents.take(self, road);
        knocking.all_were_answered(&format!("a rolling update of the agents {what}"));
        before.iter().for_each(|agent| streams.beat_of(agent));
        drop(streams);
        long_form(uses::the_most as fn(&Story), uses::everything)(self);
    }
}
