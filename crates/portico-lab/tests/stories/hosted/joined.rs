//! Machines become nodes of hosted clusters by `portico join`, two of the first two clusters each and one of
//! the third. What people do with a cluster works there: Services, names, Jobs, rights, definitions,
//! webhooks. Every API server of a cluster reaches its nodes, also where there is more than one.

use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use portico_lab::{Authority, Image, Kubectl, Node, operated, say, wait};
use serde_json::{Value, json};

use super::cluster::{API_SERVERS, Hosted, STARTING};
use crate::konnectivity::{metrics_server, uses};
use crate::support::SOON;

/// Flags of kubectl for one API server.
pub(super) fn by(server: &str) -> [&str; 3] {
    [server, "--tls-server-name=kubernetes", "--request-timeout=20s"]
}

/// Names and addresses of pods of each machine; the machine's number is the second of two.
fn machine(cluster: usize, number: usize) -> (String, String) {
    (format!("joined-{cluster}-{number}"), format!("172.25.{}.0/24", 240 + cluster * 2 + number))
}

/// For each cluster its machines, on each of which a pod of its name runs.
pub(super) fn machines_join_by_one_command(clusters: &[Hosted<'_>]) -> Vec<Vec<Node>> {
    // All of them at once.
    let nodes: Vec<Vec<Node>> = thread::scope(|scope| {
        let joining: Vec<Vec<_>> = clusters
            .iter()
            .enumerate()
            .map(|(index, cluster)| {
                let machines = (0..if index < 2 { 2 } else { 1 }).map(|number| machine(index, number));
                machines.map(|machine| scope.spawn(move || cluster.join(machine))).collect()
            })
            .collect();
        let joined = |joining: Vec<thread::ScopedJoinHandle<'_, Node>>| {
            joining.into_iter().map(|one| one.join().unwrap()).collect()
        };
        joining.into_iter().map(joined).collect()
    });
    for (cluster, nodes) in clusters.iter().zip(&nodes) {
        for node in nodes {
            cluster.runs_a_pod_on(node);
        }
    }
    clusters.iter().zip(&nodes).for_each(|(cluster, nodes)| cluster.lists_its_nodes(nodes));
    (0..2).for_each(|index| pods_are_reached_from_the_other_machine(index, &nodes[index]));
    // Each by its own strategy: what runs inside asks its API server, and is asked, by the door in force.
    thread::scope(|scope| {
        let all = clusters.iter().zip(&nodes);
        let serving: Vec<_> =
            all.map(|(cluster, nodes)| scope.spawn(move || cluster.serves_its_pods(nodes))).collect();
        serving.into_iter().for_each(|one| one.join().unwrap());
    });
    clusters[0].does_what_clusters_do();
    nodes
}

/// Two machines of the only cluster that has any, each with a pod of its name and one with a page.
pub(super) fn two_machines_join(cluster: &Hosted<'_>) -> Vec<Node> {
    let nodes: Vec<Node> = thread::scope(|scope| {
        let joining = [0, 1].map(|number| scope.spawn(move || cluster.join(machine(0, number))));
        joining.map(|one| one.join().unwrap()).into()
    });
    nodes.iter().for_each(|node| cluster.runs_a_pod_on(node));
    pods_are_reached_from_the_other_machine(0, &nodes);
    let names: Vec<&str> = nodes.iter().map(|node| node.host().name()).collect();
    services_lead_to_pods_of_every_node(&cluster.kubectl, &names);
    nodes
}

/// The machines leave again.
pub(super) fn machines_leave(clusters: &[Hosted<'_>], nodes: Vec<Vec<Node>>) {
    for (cluster, nodes) in clusters.iter().zip(nodes) {
        for mut node in nodes {
            let name = node.host().name().to_owned();
            let printed = node.leave().unwrap();
            assert!(printed.contains(&format!("kubectl delete node {name}")), "{printed}");
            cluster.kubectl.run(&["delete", "node", &name]).unwrap();
        }
    }
}

impl Hosted<'_> {
    /// A machine with everything that its pods run, as there is no registry.
    fn join(&self, (name, pods): (String, String)) -> Node {
        let start = Instant::now();
        let admin = self.kubectl.kubeconfig().display().to_string();
        let printed = self.portico(&["join", "token", "--cluster-kubeconfig", &admin]).unwrap();
        let command = printed.replace("\\\n", " ");
        let command = command.lines().find_map(|line| line.strip_prefix("portico ")).unwrap();
        let words: Vec<&str> = command.split_whitespace().collect();
        let host = self.client.lab().host(&name).unwrap();
        let node = Node::join_by(&host, &words, &self.kubectl, &pods).unwrap();
        let seconds = start.elapsed().as_secs_f64();
        say(format_args!("{}: {name} is a Node after {seconds:.1} s", self.name));
        let images = [Image::portico(), Image::busybox(), Image::kube_proxy(), Image::coredns()];
        let further = [Image::webhook(), Image::metrics_server()];
        images.into_iter().chain(further).for_each(|image| node.import(&image.unwrap()).unwrap());
        self.tell_agents("konnectivity-agent").unwrap();
        node
    }

    /// Agents of this Deployment are configured with what public DNS would answer: the lab has none.
    pub(super) fn tell_agents(&self, deployment: &str) -> Result<()> {
        let front = self.seed.kubectl().get(&["service", "portico", "-n", "portico"])?;
        let ip = front.pointer("/status/loadBalancer/ingress/0/ip").and_then(Value::as_str);
        let front = ip.with_context(|| format!("no address: {front}"))?.parse()?;
        operated::tell_agents(&self.kubectl, deployment, self.name, front)
    }

    /// A pod that is reached by Konnectivity, at a kubelet with a certificate that the operator approved.
    fn runs_a_pod_on(&self, node: &Node) {
        let (start, kubectl) = (Instant::now(), &self.kubectl);
        let name = node.host().name();
        let script = "echo \"it runs\"; sleep 3600";
        kubectl.apply_json(&pod(name, json!({"nodeName": name}), script)).unwrap();
        let (kubectl, servers) = (self.past_the_gateway(), self.api_servers());
        for (_, server) in &servers {
            wait::until("the log by Konnectivity", STARTING, || {
                let log = kubectl.run(&[&by(server)[..], &["logs", name]].concat())?;
                ensure!(log.trim() == "it runs", "{log}");
                Ok(())
            })
            .unwrap();
            let said =
                kubectl.run(&[&by(server)[..], &["exec", name, "--", "echo", "it works"]].concat()).unwrap();
            assert_eq!(said.trim(), "it works", "{server}");
        }
        let words = ["exec", name, "--", "echo", "it works"];
        assert_eq!(self.kubectl.run(&words).unwrap().trim(), "it works", "by the gateway");
        let seconds = start.elapsed().as_secs_f64();
        say(format_args!("{}: logs and exec of a pod on {name} after {seconds:.1} s", self.name));
    }

    /// kubectl for one of its API servers, [named](by) with each command. The gateway chooses one for each
    /// connection.
    pub(super) fn past_the_gateway(&self) -> Kubectl {
        Kubectl::new(self.seed.host(), self.kubectl.kubeconfig()).unwrap()
    }

    /// Each of its API servers: the pod, and the flag of kubectl that names it.
    pub(super) fn api_servers(&self) -> Vec<(String, String)> {
        let pods = ["pods", "-n", &self.namespace(), "-l", "app=apiserver"];
        let pods = self.seed.kubectl().get(&pods).unwrap();
        let one = |pod: &Value| {
            let server = format!("--server=https://{}:6443", pod["status"]["podIP"].as_str().unwrap());
            (pod["metadata"]["name"].as_str().unwrap().to_owned(), server)
        };
        let servers: Vec<_> = pods["items"].as_array().unwrap().iter().map(one).collect();
        assert_eq!(servers.len(), if self.layout == "dedicated" { API_SERVERS } else { 1 }, "{servers:?}");
        servers
    }

    /// By the paths of its strategy, and no certificate waits.
    fn lists_its_nodes(&self, nodes: &[Node]) {
        let admin = self.kubectl.kubeconfig().display().to_string();
        let ask = || self.portico(&["nodes", "--cluster-kubeconfig", &admin]);
        let said = wait::until("all paths", SOON, ask).unwrap();
        assert!(said.contains("its own agent"), "{said}");
        for node in nodes {
            let line = said.lines().find(|line| line.starts_with(node.host().name())).unwrap();
            let pods = if self.name == operated::HOSTED[0].0 { "  agent  " } else { "  direct  " };
            // Konnectivity's two agents may both be on the machine that joined first.
            let by_other = |other: &Node| line.contains(&format!("by {}", other.host().name()));
            let way_back = line.contains("its own agent") || nodes.iter().any(by_other);
            assert!(line.contains(pods) && way_back, "{said}");
        }
    }

    /// Services, names, and metrics of nodes.
    fn serves_its_pods(&self, nodes: &[Node]) {
        let (start, kubectl) = (Instant::now(), &self.kubectl);
        let names: Vec<&str> = nodes.iter().map(|node| node.host().name()).collect();
        services_lead_to_pods_of_every_node(kubectl, &names);
        names_of_services_are_known(kubectl, names[0]);
        metrics_server::answers(kubectl, names[0]);
        let seconds = start.elapsed().as_secs_f64();
        say(format_args!("{}: Services, names, top in {seconds:.1} s", self.name));
    }

    /// What upstream's conformance tests ask beside that, in short, of the parts that the control plane is
    /// for.
    fn does_what_clusters_do(&self) {
        let (start, kubectl) = (Instant::now(), &self.kubectl);
        jobs_end_and_read_their_configuration(kubectl);
        rights_are_what_was_given(kubectl);
        definitions_are_served_and_hold(kubectl);
        let authority = Authority::new("webhook authority").unwrap();
        uses::deploy_webhook(kubectl, self.client, &authority);
        uses::admits(kubectl);
        let seconds = start.elapsed().as_secs_f64();
        say(format_args!("{}: Jobs, rights, definitions, webhooks in {seconds:.1} s", self.name));
    }
}

/// The lab has no network plugin: each of two machines of a cluster gets a route to the pods of the other.
fn pods_are_reached_from_the_other_machine(cluster: usize, nodes: &[Node]) {
    for (number, node) in nodes.iter().enumerate() {
        let (_, pods) = machine(cluster, 1 - number);
        let by = nodes[1 - number].host().address().to_string();
        node.host().run(&["ip", "route", "add", &pods, "via", &by]).unwrap();
    }
}

fn pod(name: &str, place: Value, script: &str) -> Value {
    let mut spec = place;
    spec["terminationGracePeriodSeconds"] = json!(0);
    spec["containers"] = json!([{"name": "any", "image": "lab/busybox:1", "imagePullPolicy": "Never",
        "command": ["sh", "-c", script]}]);
    let metadata = json!({"name": name, "labels": {"app": name}});
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
}

/// kube-proxy translates on the first, and the pods of all answer.
fn services_lead_to_pods_of_every_node(kubectl: &Kubectl, nodes: &[&str]) {
    for node in nodes {
        let script = format!("mkdir /www; echo {node} > /www/index.html; httpd -f -p 8080 -h /www");
        let mut web = pod(&format!("web-{node}"), json!({"nodeName": node}), &script);
        web["metadata"]["labels"] = json!({"app": "web"});
        kubectl.apply_json(&web).unwrap();
    }
    let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"},
        "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": 8080}]}});
    kubectl.apply_json(&service).unwrap();
    let service = kubectl.get(&["service", "web"]).unwrap();
    let address = service["spec"]["clusterIP"].as_str().unwrap();
    let ask = format!("printf 'GET / HTTP/1.0\\r\\n\\r\\n' | nc -w 5 {address} 80");
    let mut silent = nodes.to_vec();
    wait::until("answers of every pod", STARTING, || {
        let said = kubectl.run(&["exec", nodes[0], "--", "sh", "-c", &ask])?;
        silent.retain(|node| !said.trim().ends_with(node));
        ensure!(silent.is_empty(), "Service web led to {said}, not yet to {silent:?}");
        Ok(())
    })
    .unwrap();
}

/// By the name server that a kubelet tells its pods.
fn names_of_services_are_known(kubectl: &Kubectl, pod: &str) {
    kubectl.wait_rolled_out("kube-system", "coredns", STARTING).unwrap();
    for (name, address) in [("kubernetes.default", "10.240.16.1"), ("kube-dns.kube-system", "10.240.16.10")] {
        let name = format!("{name}.svc.cluster.local");
        wait::until(&format!("the address of {name}"), SOON, || {
            let said = kubectl.run(&["exec", pod, "--", "nslookup", "-type=a", &name])?;
            ensure!(said.contains(address), "{said}");
            Ok(())
        })
        .unwrap();
    }
}

fn jobs_end_and_read_their_configuration(kubectl: &Kubectl) {
    kubectl.run(&["create", "configmap", "settings", "--from-literal=colour=green"]).unwrap();
    let mut pod = pod("job", json!({"restartPolicy": "Never"}), "echo $COLOUR; cat /settings/colour");
    pod["spec"]["volumes"] = json!([{"name": "settings", "configMap": {"name": "settings"}}]);
    let container = &mut pod["spec"]["containers"][0];
    container["volumeMounts"] = json!([{"name": "settings", "mountPath": "/settings"}]);
    let from = json!({"configMapKeyRef": {"name": "settings", "key": "colour"}});
    container["env"] = json!([{"name": "COLOUR", "valueFrom": from}]);
    let job = json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "reads"},
        "spec": {"completions": 2, "parallelism": 2, "template": {"spec": pod["spec"]}}});
    kubectl.apply_json(&job).unwrap();
    wait::until("the Job", STARTING, || {
        let job = kubectl.get(&["job", "reads"])?;
        ensure!(job["status"]["succeeded"] == 2, "{}", job["status"]);
        Ok(())
    })
    .unwrap();
    assert_eq!(kubectl.run(&["logs", "job/reads"]).unwrap().trim(), "green\ngreen");
}

fn rights_are_what_was_given(kubectl: &Kubectl) {
    kubectl.run(&["create", "serviceaccount", "reader"]).unwrap();
    kubectl.run(&["create", "role", "reader", "--verb=get", "--resource=configmaps"]).unwrap();
    kubectl
        .run(&["create", "rolebinding", "reader", "--role=reader", "--serviceaccount=default:reader"])
        .unwrap();
    let reader = "--as=system:serviceaccount:default:reader";
    kubectl.run(&["get", "configmap", "settings", reader]).unwrap();
    let refused = kubectl.run(&["delete", "configmap", "settings", reader]).unwrap_err();
    assert!(format!("{refused:#}").contains("(Forbidden)"), "{refused:#}");
}

fn definitions_are_served_and_hold(kubectl: &Kubectl) {
    let schema = json!({"type": "object", "properties": {"spec": {"type": "object", "properties":
        {"size": {"type": "integer", "minimum": 1}}}}});
    let definition = json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "boxes.example.com"}, "spec": {"group": "example.com", "scope": "Namespaced",
            "names": {"plural": "boxes", "singular": "box", "kind": "Box"},
            "versions": [{"name": "v1", "served": true, "storage": true,
                "schema": {"openAPIV3Schema": schema}}]}});
    kubectl.apply_json(&definition).unwrap();
    kubectl.wait_served("boxes.example.com").unwrap();
    let of_size = |size: i32| {
        json!({"apiVersion": "example.com/v1", "kind": "Box", "metadata": {"name": "box"},
            "spec": {"size": size}})
    };
    let refused = kubectl.apply_json(&of_size(0)).unwrap_err();
    assert!(format!("{refused:#}").contains("greater than or equal to 1"), "{refused:#}");
    kubectl.apply_json(&of_size(2)).unwrap();
    assert_eq!(kubectl.get(&["box", "box"]).unwrap()["spec"]["size"], 2);
}
