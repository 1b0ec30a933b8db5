//! Where objects come from, when that is hostile or out of order.

use std::fs::{self, File};
use std::net::TcpListener;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use crate::common::{Process, directory, get, metric, port_of, wait_until};

const LISTENERS: [&str; 6] =
    ["--sni-listen", "127.0.0.1:0", "--tunnel-listen", "off", "--admin-listen", "127.0.0.1:0"];

fn service(name: &str) -> String {
    format!(
        "{{apiVersion: v1, kind: Service, metadata: {{name: {name}, namespace: cluster-a, annotations: \
         {{nodeport-proxy.k8s.io/expose: SNI, nodeport-proxy.k8s.io/port-mapping: \
         '{{\"\": \"{name}.example.com\"}}'}}}}, spec: {{ports: [{{port: 443}}]}}}}\n"
    )
}

/// Links that lead to `/`, back up and to each other, a pipe, an endless device, gigabytes.
#[test]
fn a_hostile_directory_stops_no_gateway_and_is_reported() {
    let folder = directory(&[("a.yaml", &service("one"))]);
    let path = |name: &str| folder.path().join(name);
    symlink("/", path("everything")).unwrap();
    for (link, to) in [("left", "."), ("right", ".")] {
        symlink(to, path(link)).unwrap();
    }
    symlink("/dev/zero", path("endless.yaml")).unwrap();
    File::create(path("huge.yaml")).unwrap().set_len(5 << 30).unwrap();
    assert!(Command::new("mkfifo").arg(path("pipe.yaml")).status().unwrap().success());

    let manifests = folder.path().to_str().unwrap();
    let mut gateway = Process::start(&[&["gateway", "--manifests", manifests][..], &LISTENERS].concat());
    let admin = port_of(&gateway.wait_for("listener=admin"));
    wait_until("it is ready", || get(admin, "/readyz").0 == 200);
    let (_, page) = get(admin, "/readyz?verbose");
    for name in ["everything", "left", "right", "endless.yaml", "huge.yaml", "pipe.yaml"] {
        assert!(page.contains(&format!("{}:", path(name).display())), "{name}:\n{page}");
    }
    fs::write(path("b.yaml"), service("two")).unwrap();
    wait_until("a new file is read", || get(admin, "/routes").1.contains("two.example.com"));
    assert!(get(admin, "/routes").1.contains("one.example.com"));
}

fn kubeconfig(folder: &Path, server: &str) -> String {
    let path = folder.join("kubeconfig");
    let text = format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
         contexts: [{{name: c, context: {{cluster: c, user: u}}}}]\n\
         clusters: [{{name: c, cluster: {{server: \"{server}\"}}}}]\nusers: [{{name: u, user: {{}}}}]\n"
    );
    fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

/// As from a control-plane node that has lost power, behind a load balancer that has not.
#[test]
fn an_api_server_that_accepts_and_never_answers_is_reported_and_keeps_no_gateway_from_stopping() {
    // Connections wait in the queue of this listener for ever.
    let mute = TcpListener::bind("127.0.0.1:0").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = kubeconfig(folder.path(), &format!("http://{}", mute.local_addr().unwrap()));
    let mut gateway = Process::start(&[&["gateway", "--kubeconfig", &file][..], &LISTENERS].concat());
    let admin = port_of(&gateway.wait_for("listener=admin"));
    assert_eq!(get(admin, "/readyz").0, 503);
    wait_until("the watches are begun", || get(admin, "/metrics").1.contains("kind=\"EndpointSlice\""));
    for kind in ["Service", "EndpointSlice"] {
        assert!(metric(admin, &format!("portico_source_watch_age_seconds{{kind=\"{kind}\"}}")) < 60);
        let listing = format!("portico_source_watch_state{{kind=\"{kind}\",state=\"listing\"}}");
        assert_eq!(metric(admin, &listing), 1);
        assert!(get(admin, "/readyz?verbose").1.contains(&format!("watch of {kind}: not listed yet")));
    }
    gateway.wait_for("cannot ask which kinds are served");
    assert_eq!(get(admin, "/healthz").0, 200);
    gateway.signal("TERM");
    assert!(gateway.wait().success());
}
