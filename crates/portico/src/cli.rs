//! The command line: verbs, their help and their examples. The spellings are a contract that manifests and
//! scripts rely on.

use anyhow::bail;
use clap::error::ErrorKind;
use clap::{Parser, Subcommand};

use crate::logging::LogFormat;
use crate::outcome::{Outcome, print};
use crate::{offline, verb};

/// The front door of hosted Kubernetes control planes.
///
/// A seed cluster hosts the control planes of many user clusters. Portico makes each of them reachable, by
/// TCP port, by server name or by CONNECT authority. What to expose it reads from a directory of manifests or
/// from the seed's Kubernetes API.
#[derive(Debug, Parser)]
#[command(name = "portico", version = env!("PORTICO_VERSION"), max_term_width = 110)]
#[command(arg_required_else_help = true, disable_help_subcommand = true)]
#[command(after_help = "\
Exit codes: 0 done, 1 the answer is \"no\" (a check failed), 2 wrong usage or configuration.
Logs go to standard error; RUST_LOG sets the level, for example RUST_LOG=debug.")]
pub(crate) struct Cli {
    /// How log lines look
    #[arg(long, global = true, value_name = "FORMAT", default_value = "text")]
    pub(crate) log_format: LogFormat,
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

/// What to do. Only the flags of the verb that is asked for are built: those of all take 400 KB of stack, and
/// a program that stays keeps them. So what is built later must say nothing about the verb: structs of flags
/// have no doc comments, which clap would show in place of those here.
#[derive(Debug, Subcommand)]
#[command(defer = true)]
pub(crate) enum Verb {
    /// Serve every exposed control plane, until told to stop
    ///
    /// Reads objects, opens listeners, routes connections: by destination port (NodePort, LoadBalancer), by
    /// the server name of the ClientHello, or by the authority of a CONNECT request (Tunneling). TLS is
    /// passed through and never opened. Changes of one cluster never touch a byte of another.
    #[command(after_help = "\
Examples:
  Serve what a directory describes, tunnels in plain text on a trusted network:
    portico gateway --manifests /etc/portico --tunnel-plaintext

  The same behind a load balancer that sends PROXY headers, with an access line a connection:
    portico gateway --manifests /etc/portico --sni-listen '[::]:6443' \\
      --proxy-protocol sni=required --trusted-proxy 10.0.0.0/8 --access-log json

  Replace a running gateway without losing a connection attempt (both are started like this):
    portico gateway --manifests /etc/portico --take-over /run/portico/take-over.sock")]
    Gateway(Box<verb::gateway::flags::Flags>),
    /// Hold the address of the kubernetes service on a worker node, and carry its connections to a gateway
    ///
    /// For user clusters with the strategy Tunneling: pods reach their API server at one address, the same on
    /// every node. Each TCP connection there becomes a CONNECT stream over one of a few HTTP/2
    /// connections to gateways.
    #[command(after_help = "\
Examples:
  On a worker node, with a service account token as identity (deploy/agent.yaml):
    portico agent --gateway gateway.example.com:8088 --tls-ca ca.crt \\
      --token-file /var/run/secrets/tokens/portico \\
      --forward 6443=apiserver-external.cluster-a.svc.cluster.local:443

  On this machine, without an address of its own:
    portico agent --gateway gateway.example.com:8088 --tls-cert node.crt --tls-key node.key --address off \\
      --forward 127.0.0.1:16443=apiserver-external.cluster-a.svc.cluster.local:443

  Through a corporate proxy, to a gateway that has one port for everything:
    portico agent --gateway gateway.example.com:443 --proxy http://proxy.corp.example:3128 \\
      --proxy-credentials /etc/portico/proxy --token-file token \\
      --forward 6443=api.cluster-a.example.com:443")]
    Agent(Box<verb::agent::Command>),
    /// Carry connections of an API server to nodes, pods and webhooks: Konnectivity
    ///
    /// Agents in the user cluster connect to servers beside the API server, and dial what it asks for. Wire
    /// and flags are those of the upstream programs; either half works with an upstream peer.
    #[command(subcommand)]
    #[command(after_help = "\
Example:
  portico konnectivity agent --proxy-server-host=192.0.2.1 --ca-cert=ca.crt \\
    --service-account-token-path=token")]
    Konnectivity(verb::konnectivity::Verb),
    /// Keep the ports of the front LoadBalancer Service in line
    ///
    /// Clusters with the strategy NodePort are reachable through the one load balancer of the seed if its
    /// Service has their ports. One replica leads and writes, others wait. Bursts of changes become one
    /// update; at --listener-limit the newest clusters wait and the old ones stay.
    #[command(after_help = "\
Examples:
  In a pod (deploy/front.yaml):
    portico front --service portico/portico

  From elsewhere, for a load balancer with at most 50 listeners:
    portico front --service portico/portico --kubeconfig seed.kubeconfig --listener-limit 50")]
    Front(verb::front::Flags),
    /// Make clusters reachable, from one object each: the controllers of a seed without KKP
    ///
    /// For the Seed: the gateway, its load balancer, and the certificate of its tunnel listener. For each
    /// Cluster: namespace, Services, load balancer, address. Each has a condition that says how it stands.
    /// And all that `portico front` does. One replica leads and writes, others wait. Where KKP's
    /// controllers run, it only watches, and says so.
    #[command(after_help = "\
Examples:
  In a pod (deploy/operator.yaml):
    portico operator --service portico/portico --gateway-image registry.example.com/portico:1

  Install the kinds, then make a cluster whose API server runs elsewhere reachable:
    portico crds | kubectl apply --server-side -f -
    kubectl apply -f deploy/operator.yaml
    kubectl annotate cluster a portico.k8c.io/endpoints=192.0.2.7:6443")]
    Operator(Box<verb::operator::Flags>),
    /// Print the definitions of the kinds that Portico works with, for kubectl apply
    ///
    /// KubermaticConfiguration, Seed and Cluster as KKP has them, and ExposedCluster. On a seed with KKP,
    /// which has its own definitions, only --own is needed.
    #[command(after_help = "\
Examples:
  portico crds | kubectl apply --server-side -f -
  portico crds --own | kubectl apply -f -")]
    Crds(verb::crds::Flags),
    /// Write a kubeconfig for a user cluster, with its present address
    ///
    /// Takes the address from the status of the Cluster, CA and credentials from a Secret in its namespace,
    /// under the names that KKP gives them. Needs the right to read both, and nothing else. With --as, the
    /// cluster signs a certificate of that user, by these credentials, which are not handed out then.
    #[command(after_help = "\
Examples:
  portico kubeconfig a --kubeconfig seed.kubeconfig -o a.kubeconfig
  kubectl --kubeconfig a.kubeconfig get nodes

  For one person, for a day, with the rights that the cluster binds:
    portico kubeconfig a --kubeconfig seed.kubeconfig --as alice --group dev --for 24h -o alice.kubeconfig
    kubectl --kubeconfig a.kubeconfig create clusterrolebinding dev --clusterrole=view --group=dev

  For somebody who may only look, where the cluster has such credentials:
    portico kubeconfig a --kubeconfig seed.kubeconfig --secret viewer-kubeconfig")]
    Kubeconfig(verb::kubeconfig::Flags),
    /// Make this machine a node of a cluster that Portico hosts
    ///
    /// `portico join token CLUSTER` prints the whole command. This one runs as root on the machine, which has
    /// containerd and a kubelet. It asks the cluster, whose authority --ca-hash pins. It looks for what
    /// would keep the machine out. Then it writes the files of the kubelet under the names that kubeadm gives
    /// them, starts it, and waits until it has its certificate. Running it again does no harm. Exit code 1 if
    /// something keeps the machine out: then nothing was written.
    #[command(after_help = "\
Examples:
  On the machine of an administrator, for any number of machines within a day:
    portico join token a --kubeconfig seed.kubeconfig --ttl 24h

  What would happen on this machine, with the command that it printed:
    portico join --server https://a.example.com:6443 --token TOKEN --ca-hash sha256:HASH --dry-run

  A machine without systemd, which keeps this running:
    portico join --server https://a.example.com:6443 --token TOKEN --ca-hash sha256:HASH \\
      --kubelet /usr/local/bin/kubelet

  To another address of the same cluster:
    portico join move --server https://a.example.com:31234

  Out again:
    portico join remove")]
    Join(Box<verb::join::Command>),
    /// The nodes of a cluster, and by which path each of them speaks
    ///
    /// What the cluster's API server says: whether a node is ready, how its pods reach the API server, how
    /// that reaches its kubelet, and what is wrong. `portico why CLUSTER/NODE` tries the way to one node.
    /// Exit code 1 if a node is not ready, or lacks its path.
    #[command(after_help = "\
Examples:
  portico nodes a --kubeconfig seed.kubeconfig
  portico nodes --cluster-kubeconfig a.kubeconfig -o json")]
    Nodes(verb::nodes::Flags),
    /// Print what the control plane of a cluster is made of, before it is made
    ///
    /// The objects of a Cluster with the annotation portico.k8c.io/layout (compact or dedicated): workloads
    /// with every flag, configuration, policies, and the Secrets that they need by name. For review, and for
    /// tools that compare. The same Cluster gives the same objects, under each expose strategy. No key is
    /// made, and nothing is written. Exit code 1 if a Cluster cannot be hosted as it is written.
    #[command(after_help = "\
Examples:
  portico control-plane --manifests manifests/
  portico control-plane a --manifests manifests/ -o yaml > a.yaml

  What a cluster would be made of, in one pod:
    portico control-plane a --kubeconfig seed.kubeconfig --layout compact

  Which images have to be in a mirror:
    portico control-plane --manifests manifests/ -o json | jq -r '..|.image?|strings' | sort -u")]
    ControlPlane(Box<verb::control_plane::Flags>),
    /// Start etcd in the pods of a control plane, and look after it
    ///
    /// For the pods that the operator makes: `install` copies this program into a pod whose containers have
    /// upstream's images, `run` starts etcd there and stays with it.
    #[command(subcommand)]
    #[command(after_help = "\
Example:
  portico etcd run -- etcd --data-dir=/var/lib/etcd/data")]
    Etcd(verb::etcd::Verb),
    /// Give Prometheus the control planes of a seed, and of their metrics what is of use
    ///
    /// A control plane exposes some twenty thousand series; of those the ones are passed on that dashboards
    /// and alerts ask for, with the names and labels of KKP. /targets lists them for `http_sd_configs`,
    /// /scrape/CLUSTER/POD/PROGRAM has the metrics of one program. deploy/monitoring.yaml installs it.
    #[command(after_help = "\
Examples:
  portico metrics --kubeconfig seed.kubeconfig
  curl 127.0.0.1:8007/targets?cluster=a
  curl 127.0.0.1:8007/scrape/a/control-plane-0/apiserver")]
    Metrics(verb::metrics::Flags),
    /// Find every problem in a directory of manifests, or in a live seed
    ///
    /// Prints each with file, line, object and remedy. Exit code 1 if one of them is an error. Of a live seed
    /// (--kubeconfig), or a copy of its objects, it is a dry run. It says what each cluster would get from
    /// Portico, where that differs from what KKP's nodeport-proxy does today, and what is to be done. An
    /// error is then something that would break. Nothing is written.
    #[command(after_help = "\
Examples:
  portico check manifests/
  portico check --kubeconfig seed.kubeconfig
  kubectl get -A -o yaml \\
    services,endpointslices,clusters,seeds,kubermaticconfigurations > copy/1.yaml && portico check copy/
  portico check manifests/ -o json | jq -r '.[] | select(.severity == \"error\") | .message'")]
    Check(offline::Flags),
    /// List what a directory of manifests, or a live seed, would expose
    ///
    /// One line for each port, server name and authority: where it leads, by which object, whether it is
    /// ready.
    #[command(after_help = "\
Examples:
  portico routes manifests/
  portico routes manifests/ -o json | jq -r '.routes[] | select(.state != \"ready\") | .backend'")]
    Routes(offline::Flags),
    /// Say how each cluster of a seed stands, on one line each
    ///
    /// With the first broken link of the way to it, as `portico why` finds it from object to load balancer.
    /// For one CLUSTER all links, and what this machine sees of name and TLS answer too. Exit code 1 if a
    /// cluster cannot be reached.
    #[command(after_help = "\
Examples:
  portico status --kubeconfig seed.kubeconfig
  portico status a
  portico status -o json | jq -r '.clusters[] | select(.ok | not) | .name'

  As a plugin of kubectl, with the kubeconfig that kubectl uses:
    ln -s $(which portico) ~/.local/bin/kubectl-portico && kubectl portico status")]
    Status(verb::status::Flags),
    /// Say why a cluster cannot be reached: the first broken link, with its evidence and remedy
    ///
    /// From the object to configuration, condition, Service, endpoints, gateways, load balancer, name and TLS
    /// answer. Gateways are asked through the seed's API server, so a kubeconfig is all that is needed. Name
    /// and answer are tried from this machine. For CLUSTER/NODE also the node, its agent, and the way back
    /// from the API server to its kubelet. Exit code 1 if a link is broken.
    #[command(after_help = "\
Examples:
  portico why a --kubeconfig seed.kubeconfig
  portico why a.north.example.com --kubeconfig seed.kubeconfig
  portico why a/worker-1
  portico why a -o json | jq -r '.[] | select(.state == \"broken\") | .remedy'")]
    Why(verb::why::Flags),
    /// Move a cluster to another expose strategy, while users and nodes keep the address they know
    ///
    /// The operator opens the new way in beside the old one, proves it, tells everybody of it, and closes the
    /// old one once you say so (--finish). --plan says beforehand what would happen, who acts in each step,
    /// what users notice and the way back, and what stands in the way. Without it, this writes one change to
    /// the Cluster, and the operator does the rest. Exit code 1 if something stands in the way, or a wait
    /// ends before it is done.
    ///
    /// With --selector it is that of many Clusters: so many at a time as --max-parallel says, and the next
    /// begins once one is through. That takes waiting, so --to waits there without --wait. The same command
    /// again goes on where it ended.
    #[command(after_help = "\
Examples:
  portico migrate a --to Tunneling --plan --kubeconfig seed.kubeconfig
  portico migrate a --to Tunneling --plan --manifests copy/ -o json | jq '.blockers'
  portico migrate a --to Tunneling
  portico status a

  Once nodes are moved and users have new kubeconfigs (docs/migration.md), close the old way in:
    portico migrate a --finish

  Or go back, from any step:
    portico migrate a --rollback --wait=30m

  Many clusters, five at a time:
    portico migrate --selector team=a --to Tunneling --plan
    portico migrate --selector team=a --to Tunneling --max-parallel 5 --wait=3h
    portico migrate --selector team=a --finish")]
    Migrate(Box<verb::migrate::Flags>),
    /// List network requirements: what talks to what, on which ports, under which condition
    ///
    /// Of KKP, Kublr and Portico, from one model. What is known of an installation narrows the list: its
    /// strategy, its network plugin, other facts (--set). With --manifests or --kubeconfig, the requirements
    /// of a running one, with its own ports, addresses and reasons.
    #[command(after_help = "\
Examples:
  portico ports --product kkp --strategy Tunneling --role worker
  portico ports --set air-gap=true -o json | jq -r '.[] | select(.protocol == \"UDP\") | .ports[]'
  portico ports --manifests copy/

  What to open and what to close for another strategy, another network plugin or another version:
    portico ports diff NodePort Tunneling --product kkp
    portico ports diff cni=Canal cni=Calico
    portico ports diff before.json after.json")]
    Ports(verb::ports::Command),
    /// Say how many clusters still fit on a seed, and which limit is hit first
    ///
    /// Counts NodePorts, listeners of the front load balancer, load balancers and addresses, by strategy.
    /// Figures and their origin are in the port model.
    #[command(after_help = "\
Examples:
  portico capacity --manifests copy/ --lb aws-nlb
  portico capacity --kubeconfig seed.kubeconfig --add 20 --strategy NodePort --lb aws-nlb
  portico capacity --lb hetzner-lb31 --addresses 16 -o json")]
    Capacity(verb::capacity::Flags),
    /// Write firewall rules for one role, from the port model and an inventory of addresses
    ///
    /// Asks for what it would have to guess: no rule is ever opened to every address unless the inventory
    /// says so (any). Allows only; --default-deny refuses the rest.
    #[command(after_help = "\
Examples:
  portico firewall --for nftables --role worker --strategy Tunneling --inventory site.yaml | nft -f -
  portico firewall --for ticket --role front --strategy NodePort --inventory site.yaml
  portico firewall --for terraform-aws --role front --strategy Tunneling --inventory site.yaml

  What is missing in rules that are in force, and what is open without need:
    iptables-save | portico firewall diff - --role worker --strategy Tunneling --inventory site.yaml")]
    Firewall(verb::firewall::Command),
    /// Prove from a real machine that every port it needs is open
    ///
    /// Tries each required flow of the machine's roles towards every machine of the inventory. Where `portico
    /// preflight --listen` runs there, the way back is tried too. What is tried: TCP, UDP, IP-in-IP, name
    /// servers, TLS with its chain, the path MTU, clocks, ports that are taken here. Each result names the
    /// row of the model, what was seen, and who has to change what. Changes nothing, and is safe on machines
    /// in production: at a pace, and with not a byte to a service that is not asked for TLS. Exit code 1 if a
    /// flow does not work or could not be proven.
    #[command(after_help = "\
Examples:
  On every machine, before anything is installed (inventory.yaml: `worker: [10.0.1.1, 10.0.1.2]`):
    portico preflight --role worker --inventory inventory.yaml --listen

  Then on one of them, or on each:
    portico preflight --role worker --inventory inventory.yaml --strategy Tunneling
  The same where clusters run already, with their own ports and addresses:
    portico preflight --role worker --inventory inventory.yaml --manifests /etc/portico --cluster north

  For a CI system, with a Kublr cluster:
    portico preflight --product kublr --role master --inventory inventory.yaml --cni Calico -o junit")]
    Preflight(Box<verb::preflight::flags::Flags>),
    /// Try it: three user clusters, one per expose strategy, on this machine
    ///
    /// Starts a gateway, a node agent and three stand-in API servers on loopback. Certificates and
    /// kubeconfigs are in a temporary folder. Prints lines to paste for curl, kubectl and openssl. Needs
    /// no root, no container engine and no Kubernetes. A port that is taken is stepped over. Ctrl-C stops
    /// it and removes the folder.
    ///
    /// With --kubernetes, the same with nothing stood in for. It is a seed cluster where the operator makes
    /// the gateway, and three user clusters with real API servers and workers. They run until Ctrl-C, which
    /// takes everything down. Starts the program portico-lab of Portico's checkout ($PORTICO_LAB, beside this
    /// one, or on the PATH); if that or something it runs is missing, says what to do.
    #[command(after_help = "\
Examples:
  portico demo
  portico demo --sni-port 16443 --admin-port 18002
  portico demo --kubernetes
  portico demo --kubernetes --no-workers")]
    Demo(verb::demo::Flags),
    /// Print the help of a verb
    #[command(after_help = "\
Example:
  portico help gateway")]
    Help {
        /// The verb; all of them without one
        verb: Option<String>,
    },
}

impl Verb {
    /// Does it.
    pub(crate) fn run(&self) -> anyhow::Result<Outcome> {
        match self {
            Self::Gateway(flags) => verb::gateway::run(flags),
            Self::Agent(command) => verb::agent::run(command),
            Self::Konnectivity(verb) => verb::konnectivity::run(verb),
            Self::Front(flags) => verb::front::run(flags),
            Self::Operator(flags) => verb::operator::run(flags),
            Self::Crds(flags) => verb::crds::run(flags),
            Self::Kubeconfig(flags) => verb::kubeconfig::run(flags),
            Self::Join(command) => verb::join::run(command),
            Self::Nodes(flags) => verb::nodes::run(flags),
            Self::Metrics(flags) => verb::metrics::run(flags),
            Self::ControlPlane(flags) => verb::control_plane::run(flags),
            Self::Etcd(verb) => verb::etcd::run(verb),
            Self::Check(flags) => verb::check::run(flags),
            Self::Status(flags) => verb::status::run(flags),
            Self::Why(flags) => verb::why::run(flags),
            Self::Migrate(flags) => verb::migrate::run(flags),
            Self::Routes(flags) => verb::routes::run(flags),
            Self::Capacity(flags) => verb::capacity::run(flags),
            Self::Firewall(command) => verb::firewall::run(command),
            Self::Ports(command) => verb::ports::run(command),
            Self::Preflight(flags) => verb::preflight::run(flags),
            Self::Demo(flags) => verb::demo::run(flags),
            Self::Help { verb } => help(verb.as_deref()),
        }
    }
}

/// What `portico VERB --help` prints; clap's own `help` has no help.
fn help(verb: Option<&str>) -> anyhow::Result<Outcome> {
    match Cli::try_parse_from(["portico"].into_iter().chain(verb).chain(["--help"])) {
        Err(help) if help.kind() == ErrorKind::DisplayHelp => {
            print(&help.render().to_string())?;
            Ok(Outcome::Done)
        }
        Err(error) => error.exit(),
        Ok(_) => bail!("{verb:?} has no help; this is a defect, please report it"),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;
    use portico_api::strategy::ExposeStrategy;

    use super::*;

    #[test]
    fn the_copy_of_a_seed_in_the_help_has_the_domain_too() {
        let mut command = Cli::command();
        let help = command.find_subcommand_mut("check").unwrap().render_long_help().to_string();
        let kinds = "services,endpointslices,clusters,seeds,kubermaticconfigurations > copy/1.yaml";
        assert!(help.contains(kinds), "{help}");
    }

    #[test]
    fn the_command_that_why_names_for_a_node_is_one() {
        for strategy in ExposeStrategy::ALL {
            let command = portico_reach::preflight(strategy);
            let Verb::Preflight(_) = Cli::try_parse_from(command.split(' ')).unwrap().verb else {
                panic!("{command}")
            };
        }
    }

    /// Flags that look like listeners and are none: ports of somebody else, or of a Service.
    const NO_LISTENERS: [&str; 10] = [
        "front --sni-port",
        "front --tunnel-port",
        "operator --sni-port",
        "operator --tunnel-port",
        "migrate --sni-port",
        "status --sni-port",
        "why --sni-port",
        "konnectivity agent --proxy-server-port",
        // It opens the ports of other rows in place of what will be there.
        "preflight --listen",
        "preflight --peers-listen",
    ];

    /// Every flag that opens a port, as `VERB --FLAG`. The demo's are on loopback and for nobody else.
    fn listeners(command: &clap::Command, path: &str, found: &mut Vec<String>) {
        for flag in command.get_arguments().filter_map(clap::Arg::get_long) {
            let named = ["listen", "port", "forward"].iter().any(|end| flag.ends_with(end));
            if named || flag == "node-port-address" {
                found.push(format!("{path} --{flag}"));
            }
        }
        for verb in command.get_subcommands().filter(|verb| verb.get_name() != "demo") {
            let path = format!("{path} {}", verb.get_name());
            listeners(verb, path.trim_start(), found);
        }
    }

    #[test]
    fn every_listener_has_a_row_in_the_port_model_and_every_row_a_listener() {
        let mut flags = Vec::new();
        let mut command = Cli::command();
        command.build();
        listeners(&command, "", &mut flags);
        flags.retain(|flag| !NO_LISTENERS.contains(&flag.as_str()));
        let product = portico_ports::model::product("portico").unwrap();
        let rows: Vec<&str> = product.rows.iter().flat_map(|row| row.listeners).copied().collect();
        for flag in &flags {
            assert!(
                rows.contains(&flag.as_str()),
                "`{flag}` opens a port: add a row to crates/portico-ports/model/portico.yaml"
            );
        }
        for row in rows {
            assert!(
                flags.iter().any(|flag| flag == row),
                "a row of portico.yaml names `{row}`, which is no flag"
            );
        }
    }

    /// Where sockets that accept are made. A new place needs a flag above, or a reason here.
    const BINDING: [&str; 9] = [
        // What `--admin-listen` of every verb opens.
        "portico-admin/src/server.rs",
        // `--forward`.
        "portico-agent/src/listen.rs",
        // `--sni-listen`, `--tunnel-listen` and NodePorts.
        "portico-gateway/src/entry/listen.rs",
        // Whether the kubelet's ports are free, for a moment; nobody is answered.
        "portico-join/src/checks.rs",
        // `--uds-name`, `--server-port` and `--agent-port` of `konnectivity server`.
        "portico-konnectivity/src/server/listen.rs",
        // `preflight --listen`: the ports of the rows that lead to its role, while it runs.
        "portico-preflight/src/responder/tcp.rs",
        // The demo, on loopback.
        "portico/src/verb/demo/ports.rs",
        "portico/src/verb/demo/stand_in.rs",
        // `--webhook-listen`.
        "portico/src/verb/operator.rs",
    ];

    /// Every file of code below `folder`, by its name from there, without its tests.
    fn code_in(folder: &std::path::Path) -> Vec<(String, String)> {
        let mut folders = vec![folder.to_owned()];
        let mut found = Vec::new();
        while let Some(inner) = folders.pop() {
            for entry in std::fs::read_dir(inner).unwrap() {
                let path = entry.unwrap().path();
                let name = path.strip_prefix(folder).unwrap().display().to_string();
                let is_test = name.contains("tests") || name.contains("/examples") || name.contains("/fuzz");
                if path.is_dir() {
                    folders.extend((!is_test && !name.starts_with("portico-lab")).then_some(path));
                } else if name.ends_with(".rs") && !is_test {
                    let text = std::fs::read_to_string(&path).unwrap();
                    found.push((name, text.split("#[cfg(test)]").next().unwrap_or_default().to_owned()));
                }
            }
        }
        found
    }

    #[test]
    fn sockets_that_accept_are_made_only_where_a_row_is_known() {
        let crates = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let accepts = |code: &str| {
            code.contains("Listener::bind(") || code.contains("listen(") && code.contains(".bind(")
        };
        let mut found: Vec<String> = code_in(crates)
            .into_iter()
            .filter(|(name, code)| name.contains("/src/") && accepts(code))
            .map(|(name, _)| name)
            .collect();
        found.sort_unstable();
        assert_eq!(found, BINDING, "these accept connections: name each in BINDING, with its flag");
    }

    /// Where the operator's crate opens connections, and the rows for them. The seed's API is asked by way of
    /// portico-kube. A new place needs a row, or a reason here.
    const DIALLING: [(&str, &[&str]); 7] = [
        ("ask.rs", &["portico-operator-gateway-admin", "portico-operator-etcd"]),
        // Names are looked up, nothing is connected to.
        ("controllers/exposure/resolver.rs", &[]),
        ("controllers/user_cluster/approver.rs", &["portico-operator-api-server"]),
        ("controllers/user_cluster/inside.rs", &["portico-operator-api-server"]),
        ("controllers/user_cluster/proofs.rs", &["portico-operator-sni", "portico-operator-node-port"]),
        ("controllers/user_cluster/proofs/presented.rs", &["portico-operator-api-server"]),
        ("monitored/scrape.rs", &["portico-metrics-control-plane"]),
    ];

    #[test]
    fn the_operator_opens_connections_only_where_a_row_is_known() {
        let source = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../portico-operator/src");
        let mut found: Vec<String> = code_in(&source)
            .into_iter()
            .filter(|(_, code)| code.contains("TcpStream::connect(") || code.contains("Dialer::"))
            .map(|(name, _)| name)
            .collect();
        found.sort_unstable();
        let known = DIALLING.map(|(place, _)| place);
        assert_eq!(found, known, "these open connections: name each in DIALLING, with its rows");
        let product = portico_ports::model::product("portico").unwrap();
        for (place, ids) in DIALLING {
            for id in ids {
                let row = product.rows.iter().find(|row| row.id == *id);
                assert_eq!(row.map(|row| row.source.role), Some("seed"), "{place}: {id}");
            }
        }
    }

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }
}
