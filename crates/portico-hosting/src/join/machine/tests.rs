use portico_pki::Kubeconfig;

use super::*;

const CA: &str = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";

fn object() -> Value {
    let kubelet = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n\
                   cgroupDriver: systemd\nclusterDNS: [10.240.16.10]\n\
                   authentication: {anonymous: {enabled: false}, x509: {clientCAFile: /elsewhere}}\n";
    json!({"data": {"kubelet": kubelet, "client-ca.crt": CA}})
}

fn machine<'a>(name: &'a NodeName, own: &'a Value) -> Machine<'a> {
    Machine { name, address: None, labels: &[], taints: &[], own }
}

#[test]
fn the_files_are_those_of_kubeadm_and_only_the_one_with_the_token_is_secret() {
    let (token, paths) = ("abcdef.0123456789abcdef".parse().unwrap(), Paths::below(Path::new("/")));
    let (name, kubelet) = ("worker-1".parse().unwrap(), KubeletConfig::read(&object()).unwrap());
    let config = kubelet.of(&machine(&name, &Value::Null), &paths);
    let cluster = Cluster { server: "https://a.example.com:6443", authority: "CA", token: &token };
    let files = files(&cluster, &kubelet, &config, &paths);
    let written: Vec<(&str, u32)> =
        files.iter().map(|file| (file.path.to_str().unwrap(), file.mode)).collect();
    assert_eq!(
        written,
        [
            ("/etc/kubernetes/pki/ca.crt", 0o644),
            ("/var/lib/kubelet/config.yaml", 0o644),
            ("/etc/kubernetes/bootstrap-kubelet.conf", 0o600)
        ]
    );
    assert_eq!(files[0].content, CA, "what signs its clients, which signs no server");
    let bootstrap = Kubeconfig::parse(&files[2].content).unwrap();
    assert_eq!((&*bootstrap.server, &*bootstrap.authority), ("https://a.example.com:6443", "CA"));
    assert!(files[2].content.contains("abcdef.0123456789abcdef"));
    assert!(files[..2].iter().all(|file| !file.content.contains("0123456789abcdef")));
}

#[test]
fn the_machines_own_settings_go_before_the_clusters_and_these_before_nothing() {
    let name = "worker-1".parse().unwrap();
    let own = json!({"cgroupDriver": "cgroupfs", "authentication": {"webhook": {"enabled": true}}});
    let machine = machine(&name, &own);
    let config = KubeletConfig::read(&object()).unwrap().of(&machine, &Paths::below(Path::new("/r")));
    assert_eq!(config["cgroupDriver"], "cgroupfs");
    assert_eq!(config["clusterDNS"], json!(["10.240.16.10"]));
    let x509 = json!({"clientCAFile": "/r/etc/kubernetes/pki/ca.crt"});
    let wanted = json!({"anonymous": {"enabled": false}, "webhook": {"enabled": true}, "x509": x509});
    assert_eq!(config["authentication"], wanted);
    assert_eq!(config["containerRuntimeEndpoint"], CONTAINERD);
}

#[test]
fn taints_of_the_command_line_replace_those_of_the_settings() {
    let name = "worker-1".parse().unwrap();
    let own = json!({"registerWithTaints": [{"key": "own", "effect": "NoExecute"}]});
    let (kubelet, paths) = (KubeletConfig::read(&object()).unwrap(), Paths::below(Path::new("/")));
    let without = machine(&name, &own);
    assert_eq!(kubelet.of(&without, &paths)["registerWithTaints"], own["registerWithTaints"]);
    let taints = ["dedicated=gpu:NoSchedule".parse().unwrap()];
    let config = kubelet.of(&Machine { taints: &taints, ..without }, &paths);
    let wanted = json!([{"key": "dedicated", "value": "gpu", "effect": "NoSchedule"}]);
    assert_eq!(config["registerWithTaints"], wanted);
}

#[test]
fn ways_of_agents_are_read_where_the_operator_writes_them() {
    let mut object = object();
    assert_eq!(KubeletConfig::read(&object).unwrap().ways(), Ok(Vec::new()), "an older operator");
    object["data"]["reach"] = json!("tunnel a.example.com:8088\n");
    let ways = KubeletConfig::read(&object).unwrap().ways().unwrap();
    assert_eq!(ways[0].address, "a.example.com:8088");
    object["data"]["reach"] = json!("everywhere");
    assert_eq!(KubeletConfig::read(&object).unwrap().ways(), Err(BadReach::Line(1)));
}

#[test]
fn flags_say_what_the_configuration_has_no_fields_for() {
    let (name, labels) = ("worker-1".parse().unwrap(), ["a=b", "c="].map(|label| label.parse().unwrap()));
    let machine = Machine {
        address: Some("192.0.2.7".parse().unwrap()),
        labels: &labels,
        ..machine(&name, &Value::Null)
    };
    let arguments = arguments(&machine, &Paths::below(Path::new("/"))).join(" ");
    for wanted in [
        "--bootstrap-kubeconfig=/etc/kubernetes/bootstrap-kubelet.conf ",
        "--kubeconfig=/etc/kubernetes/kubelet.conf ",
        "--hostname-override=worker-1 ",
        "--node-ip=192.0.2.7 ",
        "--node-labels=a=b,c=",
    ] {
        assert!(arguments.contains(wanted), "{arguments}");
    }
}

#[test]
fn a_unit_is_whole_where_there_is_none_and_else_replaces_the_command_alone() {
    let paths = Paths::below(Path::new("/"));
    let arguments = ["--a=b c".to_owned(), "--d=50%".to_owned()];
    let kubelet = Path::new("/usr/bin/kubelet");
    let whole = unit(kubelet, &arguments, false, &paths);
    assert_eq!(whole.path, Path::new("/etc/systemd/system/kubelet.service"));
    assert!(whole.content.contains("ExecStart=/usr/bin/kubelet \\\n  \"--a=b c\" \\\n  --d=50%%\n"));
    assert!(whole.content.contains("[Install]"));
    let part = unit(kubelet, &arguments, true, &paths);
    assert_eq!(part.path, Path::new("/etc/systemd/system/kubelet.service.d/50-portico.conf"));
    assert!(part.content.starts_with("[Service]\nExecStart=\nExecStart=/usr/bin/kubelet"));
}

#[test]
fn a_configuration_that_portico_did_not_write_is_refused_with_what_is_missing() {
    let kubeadm = json!({"data": {"kubelet": object()["data"]["kubelet"]}});
    assert_eq!(KubeletConfig::read(&kubeadm), Err(BadKubeletConfig::ClientCa));
    for kubelet in [json!(null), json!(""), json!("a: ["), json!("kind: Pod"), json!("[]"), json!(7)] {
        let object = json!({"data": {"kubelet": kubelet, "client-ca.crt": CA}});
        assert!(matches!(KubeletConfig::read(&object), Err(BadKubeletConfig::Config(_))), "{object}");
    }
}
