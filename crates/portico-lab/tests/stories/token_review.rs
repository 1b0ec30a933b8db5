//! Tokens of tunnel clients against a real API server. A service account's token opens its own cluster, by a
//! TokenReview that the token itself asks for. It stops doing so when the service account is gone.
//!
//! The gateway holds no credentials; what it trusts is the CA in an annotation.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::ensure;
use portico_lab::control_plane::{ADMINS, Options};
use portico_lab::{ControlPlane, Etcd, Host, Lab, programs, wait};
use serde_json::json;

const SOON: Duration = Duration::from_secs(60);

#[test]
fn the_token_of_a_service_account_opens_its_own_cluster_until_the_account_is_gone() {
    let _turn = crate::turn();
    let lab = Lab::start("tunnel-identity").unwrap();
    let [planes, door, client] = ["planes", "door", "client"].map(|name| lab.host(name).unwrap());
    let etcd = Etcd::start(&planes).unwrap();
    let mut cluster_a = control_plane(&planes, &etcd, "a", 7001);
    let cluster_b = control_plane(&planes, &etcd, "b", 7002);
    let gateway = Gateway::start(&door, &planes, &[("a", 7001, &cluster_a), ("b", 7002, &cluster_b)]);

    let kubectl = cluster_a.access().kubectl(&planes).unwrap();
    kubectl.run(&["create", "serviceaccount", "agent", "-n", "kube-system"]).unwrap();
    let token = kubectl.run(&["create", "token", "agent", "-n", "kube-system"]).unwrap();
    let token = token.trim();
    let refresh = |cluster: &str, token: &str| gateway.refresh(&client, cluster, token);

    assert_eq!(refresh("a", ""), "401 no bearer token was shown");
    // An unauthenticated client gets no reason; the gateway's log has it.
    let not_accepted = "401 the token proves nothing here; the log of the gateway says why";
    assert_eq!(refresh("a", token), not_accepted, "a token that may not review tokens");
    gateway.process.wait_for_log("the right to create tokenreviews.authentication.k8s.io", SOON).unwrap();
    // The rights of deploy/agent.yaml, and no more.
    let role = ["--verb=create", "--resource=tokenreviews.authentication.k8s.io"];
    kubectl.run(&[&["create", "clusterrole", "portico-agent"], &role[..]].concat()).unwrap();
    let binding = ["--clusterrole=portico-agent", "--serviceaccount=kube-system:agent"];
    kubectl.run(&[&["create", "clusterrolebinding", "portico-agent"], &binding[..]].concat()).unwrap();
    let is_accepted = || {
        let answer = refresh("a", token);
        ensure!(answer == "204 ", "{answer}");
        Ok(())
    };
    wait::until("the token to open its cluster", SOON, is_accepted).unwrap();
    assert_eq!(refresh("b", token), not_accepted, "the API server of another cluster does not know it");
    assert_eq!(refresh("a", "eyJhbGciOiJub25lIn0.e30.forged"), not_accepted);
    assert_eq!(refresh("nowhere", token), not_accepted, "whether a cluster exists is not told");

    // A watch through the tunnel, as a pod on a worker would hold one.
    let watch = gateway.watch(&client, "watch", token);
    watch.wait_for_log("\"kind\":\"ConfigMap\"", SOON).unwrap();
    cluster_a.kill_api_server();
    cluster_a.start_again().unwrap();
    wait::until("the token to open its cluster again", SOON, is_accepted).unwrap();
    assert!(
        !gateway.access_lines().contains("reason=revoked"),
        "a restart of the API server revokes nothing"
    );

    // By another name, or the log would have what the first one got.
    let watch = gateway.watch(&client, "second-watch", token);
    watch.wait_for_log("\"kind\":\"ConfigMap\"", SOON).unwrap();
    kubectl.run(&["delete", "serviceaccount", "agent", "-n", "kube-system"]).unwrap();
    watch.wait(SOON).expect("the tunnel is cut, and with it the watch");
    let revoked = gateway.access_lines();
    let revoked: Vec<&str> = revoked.lines().filter(|line| line.contains("reason=revoked")).collect();
    assert_eq!(revoked.len(), 1, "{revoked:?}");
    assert!(revoked[0].contains("cluster=a") && revoked[0].contains("listener=tunnel"), "{revoked:?}");
    assert_eq!(refresh("a", token), not_accepted);
}

fn control_plane(host: &Host, etcd: &Etcd, name: &str, port: u16) -> ControlPlane {
    let options = Options {
        secure_port: port,
        names: vec![format!("apiserver-external.cluster-{name}.svc.cluster.local")],
        controllers: false,
        ..Options::new(name)
    };
    ControlPlane::start(host, etcd, &options).unwrap()
}

/// `portico gateway` on a host of its own, with token review and nothing else.
struct Gateway {
    process: portico_lab::Process,
    address: String,
    ca: PathBuf,
}

impl Gateway {
    fn start(door: &Host, planes: &Host, clusters: &[(&str, u16, &ControlPlane)]) -> Gateway {
        let dir = door.dir();
        let manifests = dir.join("manifests");
        fs::create_dir_all(&manifests).unwrap();
        for (name, port, plane) in clusters {
            let ca = plane.access().authority().cert();
            let objects = objects(name, *port, &planes.address().to_string(), &ca);
            fs::write(manifests.join(format!("{name}.json")), objects).unwrap();
        }
        // The gateway's own certificate, by the CA of the first cluster: any would do.
        let authority = clusters[0].2.access().authority();
        let names = [door.address().to_string()];
        authority.server("gateway", &names).unwrap().write(&dir, "gateway").unwrap();
        authority.client("admin", Some(ADMINS)).unwrap().write(&dir, "admin").unwrap();
        let ca = dir.join("ca.crt");
        fs::write(&ca, authority.cert()).unwrap();
        let file = |name: &str| dir.join(name).display().to_string();
        let args = [
            "gateway".to_owned(),
            format!("--manifests={}", manifests.display()),
            "--sni-listen=off".to_owned(),
            "--tunnel-listen=0.0.0.0:8088".to_owned(),
            format!("--tunnel-tls-cert={}", file("gateway.crt")),
            format!("--tunnel-tls-key={}", file("gateway.key")),
            "--tunnel-token-review".to_owned(),
            // Shorter than what operators want, so that the story is.
            "--tunnel-token-review-interval=5s".to_owned(),
            "--access-log=text".to_owned(),
        ];
        let process = door.spawn("gateway", programs::portico().unwrap(), args).unwrap();
        process.wait_for_log("routes in force", SOON).unwrap();
        Gateway { process, address: format!("{}:8088", door.address()), ca }
    }

    /// What the gateway says about a token: the status and the sentence.
    fn refresh(&self, client: &Host, cluster: &str, token: &str) -> String {
        let (ca, url) = (self.ca.display().to_string(), format!("https://{}", self.address));
        let host = format!("Host: apiserver-external.cluster-{cluster}.svc.cluster.local:443");
        let authorization = format!("Authorization: Bearer {token}");
        let words = ["curl", "-sS", "--http2", "--max-time", "20", "--noproxy", "*", "--cacert", &ca];
        let ask = ["-X", "OPTIONS", "--request-target", "*", "-H", &host, "-H", &authorization];
        let tell = ["-w", "%{http_code} %header{x-portico-reason}", &url];
        client.run(&[&words[..], &ask, &tell].concat()).unwrap()
    }

    /// A watch through a tunnel that the token opens, on the ConfigMaps of cluster a. The API server knows it
    /// by a certificate, so that nothing but the tunnel rests on the token. Begins with what the API
    /// server has in memory: etcd is shared with other clusters, whose writes it would wait for
    /// otherwise.
    fn watch(&self, client: &Host, name: &str, token: &str) -> portico_lab::Process {
        let ca = self.ca.display().to_string();
        let proxy = format!("https://{}", self.address);
        let authorization = format!("Authorization: Bearer {token}");
        let [cert, key] =
            ["admin.crt", "admin.key"].map(|name| self.ca.with_file_name(name).display().to_string());
        let url = concat!(
            "https://apiserver-external.cluster-a.svc.cluster.local",
            "/api/v1/configmaps?watch=true&resourceVersion=0"
        );
        let way = ["-sS", "-N", "--max-time", "600", "--noproxy", "", "--proxytunnel", "--proxy", &proxy];
        let who = ["--proxy-cacert", &ca, "--proxy-header", &authorization, "--cacert", &ca];
        client.spawn(name, "curl", [&way[..], &who, &["--cert", &cert, "--key", &key, url]].concat()).unwrap()
    }

    fn access_lines(&self) -> String {
        self.process.log()
    }
}

fn objects(name: &str, port: u16, address: &str, ca: &str) -> String {
    let namespace = format!("cluster-{name}");
    json!({
        "apiVersion": "v1",
        "kind": "List",
        "items": [
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {
                    "name": "apiserver-external",
                    "namespace": namespace,
                    "annotations": {
                        "nodeport-proxy.k8s.io/expose": "Tunneling",
                        "portico.k8c.io/api-server-ca": ca,
                    },
                },
                "spec": {"ports": [{"name": "secure", "port": 443}]},
            },
            {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {
                    "name": "apiserver-external-1",
                    "namespace": namespace,
                    "labels": {"kubernetes.io/service-name": "apiserver-external"},
                },
                "addressType": "IPv4",
                "endpoints": [{"addresses": [address], "conditions": {"ready": true}}],
                "ports": [{"name": "secure", "port": port}],
            },
        ],
    })
    .to_string()
}
