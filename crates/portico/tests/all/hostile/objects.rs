//! What authors of objects at a Kubernetes API can do to a gateway that reads them, in a small pod.

use std::fmt::Write as _;
use std::io::{Read, Write as _};
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};

use portico_lab::cgroup::LimitedGroup;
use portico_lab::{ApiServer, Kubectl, manifests};
use serde_json::{Value, json};

use crate::common::{PATIENCE, Process, get, metric, port_of, wait_until};
use crate::proof::{echo, hello, host};

/// The memory of a small pod.
const SMALL: u64 = 256 << 20;

/// EndpointSlices of a megabyte, each with twenty million endpoints.
const HUGE: usize = 6;

/// A Service exposed by the name of `cluster`, in any namespace, and its endpoint.
fn exposed(namespace: &str, cluster: &str, endpoint: SocketAddr) -> String {
    let mapping = json!({"secure": host(cluster)}).to_string();
    let annotations =
        [("nodeport-proxy.k8s.io/expose", "SNI"), ("nodeport-proxy.k8s.io/port-mapping", &*mapping)];
    manifests::service(namespace, "api", &annotations, None)
        + &manifests::slice(namespace, "api", endpoint.ip(), endpoint.port())
}

/// A slice of `service` with a thousand addresses and as many ports as fit.
fn huge_slice(number: usize, service: &str) -> Value {
    let addresses = (0..1_000).map(|n| format!("10.{number}.{}.{}", n / 250, n % 250));
    let endpoints: Vec<_> =
        addresses.map(|ip| json!({"addresses": [ip], "conditions": {"ready": true}})).collect();
    let ports: Vec<_> = (1..=20_000).map(|n| json!({"name": format!("p{n}"), "port": n})).collect();
    json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"name": format!("huge-{number}"), "namespace": "cluster-thief",
            "labels": {"kubernetes.io/service-name": service}},
        "endpoints": endpoints, "ports": ports})
}

/// What the thief, whose namespace is `cluster-thief`, writes.
fn hostile(kubectl: &Kubectl) {
    let mut objects = exposed("cluster-thief", "thief", "192.0.2.1:6443".parse().unwrap());
    for (name, kind, address) in [
        ("names", "FQDN", "honest.example.com"),
        ("translated", "IPv6", "64:ff9b::a9fe:a9fe"),
        ("mine", "IPv6", "2001:db8::7"),
    ] {
        let _ = write!(
            objects,
            "---\n{{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, addressType: {kind}, metadata: \
             {{name: {name}, namespace: cluster-thief, labels: {{kubernetes.io/service-name: api}}}}, \
             endpoints: [{{addresses: ['{address}'], conditions: {{ready: true}}}}], \
             ports: [{{name: secure, port: 6443}}]}}\n"
        );
    }
    // One port without a name leads to every port of its slices.
    objects.push_str(
        "---\n{apiVersion: v1, kind: Service, metadata: {name: wide, namespace: cluster-thief, annotations: \
         {nodeport-proxy.k8s.io/expose: Tunneling}}, spec: {ports: [{port: 443}]}}\n",
    );
    kubectl.apply(&objects).unwrap();
    for number in 0..HUGE {
        // The slices belong to a Service that is exposed and to one that is not, in turn.
        let service = if number % 2 == 0 { "wide" } else { "unexposed" };
        kubectl.run_with_input(&["create", "-f", "-"], &huge_slice(number, service).to_string()).unwrap();
    }
    // The name of another, which is older by now, in a namespace that sorts first.
    kubectl.apply(&exposed("cluster-0-thief", "honest", "192.0.2.1:6443".parse().unwrap())).unwrap();
}

/// Whether a client of this name is carried to the honest endpoint, which sends back what it gets.
fn is_served(sni: u16, cluster: &str) -> bool {
    let mut stream = TcpStream::connect(("127.0.0.1", sni)).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let hello = hello(cluster);
    stream.write_all(&hello).unwrap();
    let mut answer = vec![0; hello.len()];
    stream.read_exact(&mut answer).is_ok() && answer == hello
}

#[test]
fn no_object_at_an_api_server_takes_the_memory_the_names_or_the_endpoints_of_others() {
    let api = ApiServer::start("hostile-objects").unwrap();
    let kubectl = api.kubectl();
    // This machine, by an address that is not loopback: an endpoint as good as any pod's.
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    socket.connect((api.host().address(), 1)).unwrap();
    let own: IpAddr = socket.local_addr().unwrap().ip();
    let [honest, other] = [(); 2].map(|()| echo(SocketAddr::new(own, 0)));
    let crds = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/crds.yaml");
    kubectl.run(&["apply", "-f", crds]).unwrap();
    kubectl.wait_served("exposedclusters.portico.k8c.io").unwrap();
    for (name, ranges) in [
        ("honest", "[127.0.0.0/8]"),
        // IPv4 in the clothes of IPv6.
        ("0-thief", "['::ffff:127.0.0.0/104']"),
        ("thief", "[192.0.2.0/24]"),
    ] {
        kubectl.run(&["create", "namespace", &format!("cluster-{name}")]).unwrap();
        let spec = format!("{{exposeStrategy: NodePort, seed: north, allowedIPRanges: {ranges}}}");
        let exposed = format!(
            "{{apiVersion: portico.k8c.io/v1alpha1, kind: ExposedCluster, metadata: {{name: {name}}}, \
             spec: {spec}}}\n"
        );
        kubectl.apply(&exposed).unwrap();
    }
    kubectl.apply(&exposed("cluster-honest", "honest", honest)).unwrap();
    kubectl.apply(&exposed("cluster-0-thief", "mapped", other).replace("name: api", "name: own")).unwrap();
    hostile(kubectl);

    let path = format!("/portico-objects-{}", std::process::id());
    let group = LimitedGroup::make(path, SMALL).expect("a control group has a memory limit");
    let kubeconfig = api.admin().unwrap().display().to_string();
    let mut command = group.command(env!("CARGO_BIN_EXE_portico")).expect("a command joins its group");
    command.args(["gateway", "--workers", "1", "--kubeconfig", &kubeconfig, "--tunnel-listen", "off"]);
    command.args(["--sni-listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]);
    let mut gateway = Process::of(&mut command);
    let admin = port_of(&gateway.wait_for("listener=admin"));
    let sni = port_of(&gateway.wait_for("listener=sni"));
    wait_until("it is ready", || get(admin, "/readyz").0 == 200);

    assert!(is_served(sni, "honest") && is_served(sni, "mapped") && !is_served(sni, "thief"));
    let (_, routes) = get(admin, "/routes");
    let routes: Value = serde_json::from_str(&routes).unwrap();
    let of_thief = routes["routes"].as_array().unwrap().iter().filter(|row| row["cluster"] == "thief");
    let most = of_thief.map(|row| row["endpoints"].as_array().unwrap().len()).max();
    assert_eq!(most, Some(128));
    for (reason, count) in
        [("too-many-endpoints", 2), ("fqdn-endpoints", 1), ("endpoint-refused", 1), ("host-conflict", 1)]
    {
        let name = format!("portico_problems{{severity=\"error\",reason=\"{reason}\"}}");
        assert_eq!(metric(admin, &name), count, "{reason}: {}", get(admin, "/readyz?verbose").1);
    }
    // What changes is followed all the same.
    let patch = r#"{"spec": {"allowedIPRanges": ["192.0.2.0/24"]}}"#;
    kubectl.run(&["patch", "exposedcluster", "honest", "--type=merge", "-p", patch]).unwrap();
    wait_until("its list is another", || !is_served(sni, "honest"));
    assert!(is_served(sni, "mapped"));
    assert!(group.pids().is_ok_and(|pids| pids.contains(&gateway.id().cast_signed())));
}
