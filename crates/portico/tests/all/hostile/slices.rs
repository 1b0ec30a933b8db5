//! What an author of Services and EndpointSlices can make the gateway connect to.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;

use portico_lab::manifests;
use tempfile::TempDir;

use crate::common::{PATIENCE, Process, directory, free_port, get, metric, port_of, wait_until};
use crate::proof::{LOOPBACK, echo};

/// A Service exposed by port, with an allow list or without, and its EndpointSlice.
fn manifest(namespace: &str, node_port: u16, allow: Option<&str>, (address, port): (&str, u16)) -> String {
    let expose = ("nodeport-proxy.k8s.io/expose", "NodePort");
    let annotations: Vec<_> =
        [expose].into_iter().chain(allow.map(|allow| ("portico.k8c.io/allow", allow))).collect();
    manifests::service(namespace, "api", &annotations, Some(node_port))
        + &manifests::slice(namespace, "api", address.parse().unwrap(), port)
}

/// A gateway with an honest cluster, and a port on which a thief is exposed.
struct Scene {
    folder: TempDir,
    admin: u16,
    honest: u16,
    thief: u16,
    upstream: u16,
    _gateway: Process,
}

impl Scene {
    fn new() -> Self {
        let [honest, thief, admin] = [(); 3].map(|()| free_port());
        let upstream = echo(LOOPBACK).port();
        let folder =
            directory(&[("honest.yaml", &manifest("cluster-a", honest, None, ("127.0.0.1", upstream)))]);
        let (path, listen) = (folder.path().to_str().unwrap(), format!("127.0.0.1:{admin}"));
        let from = ["gateway", "--manifests", path, "--admin-listen", &listen, "--workers", "1"];
        let mut gateway =
            Process::start(&[&from[..], &["--sni-listen", "off", "--tunnel-listen", "off"]].concat());
        assert_eq!(port_of(&gateway.wait_for("listener=admin")), admin);
        wait_until("it is ready", || get(admin, "/readyz").0 == 200);
        Self { folder, admin, honest, thief, upstream, _gateway: gateway }
    }

    /// Has the thief's EndpointSlice name `endpoint`, and waits until that is known.
    fn steal(&self, namespace: &str, endpoint: (&str, u16)) {
        fs::remove_file(self.folder.path().join("thief.yaml")).unwrap_or_default();
        wait_until("the last one is gone", || !get(self.admin, "/routes").1.contains("thief"));
        let manifest = manifest(namespace, self.thief, None, endpoint);
        fs::write(self.folder.path().join("thief.yaml"), manifest).unwrap();
        wait_until("it is known", || get(self.admin, "/routes").1.contains(namespace));
    }

    /// What a client of `port` gets for a request, to the end or the first four bytes.
    fn answer(port: u16) -> Vec<u8> {
        let mut stream = None;
        // A route is known a moment before its port is open.
        wait_until("the port is open", || {
            stream = TcpStream::connect(("127.0.0.1", port)).ok();
            stream.is_some()
        });
        let mut stream = stream.unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        // It may be refused before it has sent anything.
        let _ = stream.write_all(b"GET / HTTP/1.0\r\n\r\n");
        let mut answer = vec![0; 4];
        match stream.read(&mut answer) {
            Ok(read) => answer.truncate(read),
            Err(error) if error.kind() == ErrorKind::ConnectionReset => answer.clear(),
            Err(error) => panic!("port {port} neither answers nor ends: {error}"),
        }
        answer
    }

    fn honest_is_served(&self) {
        assert_eq!(Self::answer(self.honest), b"GET ");
    }
}

#[test]
fn no_slice_leads_to_a_listener_of_the_gateway() {
    let scene = Scene::new();
    let refused = |why: &str| metric(scene.admin, &format!("portico_refusals_total{{{why}}}"));
    let (own_listener, no_address) =
        ("reason=\"own_listener\",side=\"gateway\"", "reason=\"not_ready\",side=\"upstream\"");
    let machines = [
        ("127.0.0.1", own_listener),
        ("::ffff:127.0.0.1", own_listener),
        ("0.0.0.0", no_address),
        ("::ffff:0.0.0.0", no_address),
        ("::", no_address),
    ];
    for own in [scene.admin, scene.honest, scene.thief] {
        for (machine, why) in machines {
            scene.steal("thief", (machine, own));
            let before = refused(why);
            assert_eq!(Scene::answer(scene.thief), b"", "{machine} port {own}");
            wait_until("it is refused for where it leads", || refused(why) == before + 1);
            scene.honest_is_served();
        }
    }
    assert_eq!((refused(own_listener), refused(no_address)), (6, 9), "each client is refused once");
    let open = || metric(scene.admin, "portico_cluster_open_connections{cluster=\"a\"}");
    wait_until("nothing goes round in the gateway", || open() == 0);
}

#[test]
fn a_service_that_waits_for_the_name_of_another_does_not_get_it_while_that_one_is_made_anew() {
    let scene = Scene::new();
    let named = |namespace: &str| {
        let mapping = ("nodeport-proxy.k8s.io/port-mapping", "{\"secure\":\"b.example.com\"}");
        let annotations = [("nodeport-proxy.k8s.io/expose", "SNI"), mapping];
        manifests::service(namespace, "api", &annotations, None)
    };
    let [own, thief] = ["own.yaml", "thief.yaml"].map(|name| scene.folder.path().join(name));
    let says = |text: &str| get(scene.admin, "/routes?o=table").1.contains(text);
    fs::write(&own, named("cluster-b")).unwrap();
    wait_until("it is known", || says("cluster-b/api"));
    fs::write(thief, named("thief")).unwrap();
    let returned = || says("conflict: cluster-b/api-secure has it");
    wait_until("it waits", returned);
    fs::remove_file(&own).unwrap();
    wait_until("it is gone", || !says("cluster-b/api"));
    assert!(says("kept for b, which had it"));
    fs::write(own, named("cluster-b")).unwrap();
    wait_until("it has it again", returned);
}

#[test]
fn no_slice_leads_past_the_allow_list_of_another_tenant() {
    let scene = Scene::new();
    let open = ("127.0.0.1", scene.upstream);
    let stolen = ("127.0.0.1", echo(LOOPBACK).port());
    let manifest = manifest("cluster-b", free_port(), Some("192.0.2.0/24"), stolen);
    fs::write(scene.folder.path().join("b.yaml"), manifest).unwrap();
    wait_until("it is known", || get(scene.admin, "/routes").1.contains("cluster-b"));
    for thief in ["thief", "cluster-thief"] {
        scene.steal(thief, stolen);
        wait_until("the list follows the endpoint", || Scene::answer(scene.thief).is_empty());
        assert!(get(scene.admin, "/routes").1.contains("shared-endpoint"));
        scene.honest_is_served();
        scene.steal(thief, open);
        assert_eq!(Scene::answer(scene.thief), b"GET ", "what nobody guards is open");
    }
}
