//! `portico operator`: the controllers of a seed without KKP, in one process.

use std::net::IpAddr;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use http::Uri;
use jiff::{SignedDuration, Timestamp};
use portico_api::meta::ObjectKey;
use portico_expose::components::{AdminPeer, GatewaySettings};
use portico_expose::front::{SNI_PORT, TUNNEL_PORT};
use portico_expose::user_cluster::AgentSettings;
use portico_operator::{
    ComponentSettings, ExposureSettings, HostingSettings, Operator, Reached, UserClusterSettings,
    WebhookSettings,
};
use portico_pki::KeyKind;
use portico_tunnel::client::GatewayAddress;
use tokio::net::TcpListener;

use crate::args::{Listen, Port};
use crate::daemon;
use crate::hosted::Installation;
use crate::outcome::Outcome;
use crate::verb::front::FrontFlags;

/// The Service that deploy/operator.yaml has before the webhook.
const WEBHOOK_SERVICE: &str = "portico-operator";

/// Time limit of a pass over the inside of one user cluster: dozens of requests over a long way.
const USER_CLUSTER_TIMEOUT: Duration = Duration::from_secs(60);

/// Between two questions of members of etcd: a question is small, and an alarm is for people.
const ALARM_PERIOD: Duration = Duration::from_secs(30);

/// The time that docs/hosting.md states for a deletion.
const DELETION_PATIENCE: SignedDuration = SignedDuration::from_mins(2);

// `portico operator`.
#[derive(Debug, Args)]
pub(crate) struct Flags {
    #[command(flatten)]
    front: FrontFlags,
    /// External address of a seed node, where clusters are reached if the Seed disables its nodeport-proxy;
    /// may be repeated [default: what DNS says]
    #[arg(long, value_name = "IP", value_delimiter = ',')]
    node_address: Vec<IpAddr>,
    /// Image of Portico, for the agents inside user clusters and for the Konnectivity servers of control
    /// planes; without it none are made, and no control plane is hosted
    #[arg(long, value_name = "IMAGE")]
    image: Option<String>,
    /// A gateway as the agents of all clusters reach it; may be repeated [default: the external name of each
    /// cluster, and the port of --tunnel-port or 8088]
    #[arg(long, value_name = "[tls://|h2c://]HOST:PORT", value_delimiter = ',')]
    agent_gateway: Vec<GatewayAddress>,
    /// The name in the gateways' certificate [default: the one by which agents reach them]
    #[arg(long, value_name = "NAME")]
    agent_server_name: Option<String>,
    #[command(flatten)]
    gateway: GatewayFlags,
    #[command(flatten)]
    hosting: HostingFlags,
    #[command(flatten)]
    webhook: WebhookFlags,
}

// How the gateway is made.
#[derive(Debug, Args)]
#[command(next_help_heading = "Gateway")]
struct GatewayFlags {
    /// Make the gateway too, from this image: what deploy/gateway.yaml has, with the settings of the Seed,
    /// and the certificate of its tunnel listener [default: the gateway is somebody else's]
    #[arg(long, value_name = "IMAGE")]
    gateway_image: Option<String>,
    /// A further argument of the gateway, as in --gateway-argument=--workers=4; may be repeated
    #[arg(long, value_name = "ARGUMENT", requires = "gateway_image", allow_hyphen_values = true)]
    gateway_argument: Vec<String>,
    /// Let only these reach the gateway's admin listener, by a NetworkPolicy: networks, addresses and names
    /// of namespaces; may be repeated [default: no NetworkPolicy]
    #[arg(long, value_name = "CIDR|NAMESPACE", requires = "gateway_image", value_delimiter = ',')]
    admin_from: Vec<AdminPeer>,
}

// How control planes are made.
#[derive(Debug, Args)]
#[command(next_help_heading = "Control planes")]
struct HostingFlags {
    #[command(flatten)]
    installation: Installation,
    /// Keys of new certificates. What exists stays
    #[arg(long, value_name = "KIND", default_value = "ecdsa")]
    keys: Keys,
}

/// A kind of keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Keys {
    /// ECDSA on P-256
    Ecdsa,
    /// RSA with 2,048 bits, for tools that know nothing else
    Rsa,
}

// How mistakes are refused when they are made.
#[derive(Debug, Args)]
#[command(next_help_heading = "Admission webhook")]
struct WebhookFlags {
    /// Where the API server asks, over TLS, whether a change contradicts other objects; off for none. While
    /// nobody answers, and in doubt, everything is admitted
    #[arg(long, value_name = "ADDRESS", default_value = "off")]
    webhook_listen: Listen,
    /// How the API server reaches that listener where no Service leads to it [default: by port 443 of the
    /// Service portico-operator, in the namespace of --service]
    #[arg(long, value_name = "https://HOST:PORT", value_parser = https_url)]
    webhook_url: Option<Uri>,
}

impl WebhookFlags {
    /// Opens the listener, if there is one.
    async fn settings(&self, front: &FrontFlags) -> anyhow::Result<Option<WebhookSettings>> {
        let Listen(Some(address)) = self.webhook_listen else { return Ok(None) };
        let listener = TcpListener::bind(address).await.with_context(|| {
            format!("cannot listen on {address}; choose another address with --webhook-listen, or off")
        })?;
        tracing::info!(listener = "webhook", address = %listener.local_addr()?, "listening");
        let namespace = front.service.namespace.to_string();
        let service = || Reached::Service(ObjectKey::new(&namespace, WEBHOOK_SERVICE));
        let settings = front.settings();
        Ok(Some(WebhookSettings {
            listener,
            reached: self.webhook_url.clone().map_or_else(service, Reached::Url),
            expose_annotation: settings.plan.expose_annotation,
            seed_is_named: settings.seed.is_some(),
            clock: Timestamp::now,
            namespace,
        }))
    }
}

/// A URL of nothing but host and port.
fn https_url(text: &str) -> Result<Uri, String> {
    let wrong = || "give a URL such as https://operator.example.com:9443".to_owned();
    let url: Uri = text.parse().map_err(|_| wrong())?;
    let is_whole = url.scheme_str() == Some("https") && url.host().is_some() && url.path() == "/";
    if is_whole && url.query().is_none() { Ok(url) } else { Err(wrong()) }
}

/// Runs until told to stop.
pub(crate) fn run(flags: &Flags) -> anyhow::Result<Outcome> {
    let (Port(sni), front) = (&flags.front.sni_port, flags.front.settings());
    let exposure = ExposureSettings {
        front: flags.front.service.clone(),
        // In addresses it stands even where it is not published.
        sni_port: sni.unwrap_or(SNI_PORT),
        node_ips: flags.node_address.clone(),
        name_servers: Vec::new(),
    };
    let planes = flags.image.as_ref().map(|image| flags.hosting.installation.settings(image));
    let user_clusters = UserClusterSettings {
        agents: AgentSettings {
            image: flags.image.clone(),
            gateways: flags.agent_gateway.iter().map(ToString::to_string).collect(),
            server_name: flags.agent_server_name.clone(),
            tunnel_port: flags.front.tunnel_port.0.unwrap_or(TUNNEL_PORT),
        },
        namespace: flags.front.service.namespace.to_string(),
        pass_timeout: USER_CLUSTER_TIMEOUT,
        name_servers: Vec::new(),
        hosted: planes.clone(),
    };
    let components = flags.gateway.gateway_image.clone().map(|image| ComponentSettings {
        gateway: GatewaySettings {
            front: flags.front.service.clone(),
            image,
            expose_annotation: front.plan.expose_annotation.clone(),
            arguments: flags.gateway.gateway_argument.clone(),
            admin_from: flags.gateway.admin_from.clone(),
        },
        seed: front.seed.clone(),
        clock: Timestamp::now,
    });
    let hosting = planes.map(|plan| HostingSettings {
        plan,
        namespace: flags.front.service.namespace.to_string(),
        keys: match flags.hosting.keys {
            Keys::Ecdsa => KeyKind::EcdsaP256,
            Keys::Rsa => KeyKind::Rsa2048,
        },
        clock: Timestamp::now,
        alarm_period: ALARM_PERIOD,
        deletion_patience: DELETION_PATIENCE,
    });
    daemon::run(async {
        let webhook = flags.webhook.settings(&flags.front).await?;
        let serving = flags.front.serve(|client| {
            let operator = Operator::new(client, front, exposure).with_user_clusters(user_clusters);
            let operator = match components {
                Some(components) => operator.with_components(components),
                None => operator,
            };
            let operator = match hosting {
                Some(hosting) => operator.with_hosting(hosting),
                None => operator,
            };
            match webhook {
                Some(webhook) => operator.with_webhook(webhook),
                None => operator,
            }
        });
        serving.await
    })
    .map(|()| Outcome::Done)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::Parser;
    use portico_api::configuration::KubermaticConfiguration;
    use portico_api::seed::Seed;
    use portico_expose::components::{Part, components, usable};
    use portico_yaml::Documents;
    use serde_json::{Value, json};

    use super::*;
    use crate::cli::{Cli, Verb};

    const MANIFEST: &str = include_str!("../../../../deploy/operator.yaml");
    const MANUAL: &str = include_str!("../../../../docs/operator.md");

    /// Reads the arguments of the first container of a Deployment, as its process does.
    fn parse(deployment: &Value) -> Verb {
        let list = deployment.pointer("/spec/template/spec/containers/0/args").unwrap();
        let list: Vec<String> = serde_json::from_value(list.clone()).unwrap();
        let list = list.iter().map(|argument| argument.replace("$(POD_IP)", "127.0.0.1"));
        Cli::try_parse_from(["portico".to_owned()].into_iter().chain(list)).unwrap().verb
    }

    fn manifest() -> impl Iterator<Item = Value> {
        Documents::new(MANIFEST).map(|document| document.unwrap().to_value())
    }

    #[test]
    fn the_gateway_takes_the_arguments_that_it_is_given() {
        let settings = json!({"sniListenerIdleTimeout": "90s", "tunnelingConnectionIdleTimeout": "1h",
            "tunnelingStreamIdleTimeout": "1500ms", "downstreamTCPKeepaliveTime": "60s",
            "downstreamTCPKeepaliveInterval": "10s", "downstreamTCPKeepaliveProbes": 3,
            "upstreamTCPKeepaliveTime": "60s", "upstreamTCPKeepaliveInterval": "10s",
            "upstreamTCPKeepaliveProbes": 1000});
        let seed: Seed = serde_json::from_value(json!({"metadata": {"name": "north"},
            "spec": {"nodeportProxy": {"envoy": {"connectionSettings": settings}}}}))
        .unwrap();
        let gateway = GatewaySettings {
            front: ObjectKey::new("portico", "portico"),
            image: String::new(),
            expose_annotation: portico_api::annotations::EXPOSE.into(),
            arguments: vec!["--workers=4".into()],
            admin_from: Vec::new(),
        };
        let balancer = usable(&seed).unwrap();
        let made = components(&seed, &balancer, &KubermaticConfiguration::default(), &gateway, true);
        let (_, deployment) = made.objects.iter().find(|(part, _)| *part == Part::Deployment).unwrap();
        let Verb::Gateway(flags) = parse(&deployment.fields) else { panic!("another verb") };
        assert_eq!(flags.listeners.workers, Some(4));
        assert_eq!(flags.timeouts.upstream_keepalive_probes, Some(127));
        let idle = flags.timeouts.tunnel_stream_idle_timeout.unwrap().0;
        assert_eq!(idle, Some(std::time::Duration::from_millis(1_500)));
    }

    #[test]
    fn the_operator_takes_the_arguments_of_its_manifest() {
        let deployment = manifest().find(|object| object["kind"] == "Deployment").unwrap();
        let Verb::Operator(flags) = parse(&deployment) else { panic!("another verb") };
        assert_eq!(flags.gateway.gateway_image.as_deref(), Some("localhost/portico:dev"));
        // The Service that the API server is configured to ask leads to the port that is listened on.
        let port = flags.webhook.webhook_listen.0.unwrap().port();
        let ports = deployment.pointer("/spec/template/spec/containers/0/ports").unwrap().as_array().unwrap();
        let named = ports.iter().find(|known| known["containerPort"] == port).unwrap();
        let service = manifest().find(|object| object["kind"] == "Service").unwrap();
        assert_eq!(service["metadata"]["name"], WEBHOOK_SERVICE);
        assert_eq!(
            service["spec"]["ports"],
            json!([{"name": "webhook", "port": 443,
            "targetPort": named["name"]}])
        );
        let labels = deployment.pointer("/spec/template/metadata/labels").unwrap();
        let selector = service["spec"]["selector"].as_object().unwrap();
        assert!(selector.iter().all(|(key, value)| labels[key] == *value), "{selector:?}");
        // The ports that a NetworkPolicy admits are those that are listened on.
        const POLICIES: &str = include_str!("../../../../deploy/network-policy.yaml");
        let mut policies = Documents::new(POLICIES).map(|document| document.unwrap().to_value());
        let policy = policies.find(|policy| policy["metadata"]["name"] == "portico-operator").unwrap();
        assert_eq!(policy["spec"]["podSelector"]["matchLabels"], service["spec"]["selector"]);
        let admitted = policy["spec"]["ingress"].as_array().unwrap().iter();
        let admitted: BTreeSet<_> = admitted.map(|rule| rule["ports"][0]["port"].as_u64()).collect();
        let listened = ports.iter().map(|port| port["containerPort"].as_u64()).collect();
        assert_eq!(admitted, listened);
    }

    #[test]
    fn a_url_of_the_webhook_is_one_of_https_and_of_nothing_but_host_and_port() {
        for good in ["https://operator.example.com", "https://192.0.2.7:9443/", "https://[2001:db8::7]:9443"]
        {
            assert!(https_url(good).is_ok(), "{good}");
        }
        for bad in ["", "operator:9443", "http://operator", "https://operator/review", "https://o/?a=b"] {
            assert!(https_url(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_manual_has_the_rights_of_the_manifest_and_no_others() {
        let (_, section) = MANUAL.split_once("## Its rights").unwrap();
        let (section, _) = section.split_once("\n## ").unwrap();
        // One row has too many names for a table.
        let (section, named) = section.split_once("The names of the secrets of clusters:").unwrap();
        let named = named.split('`').skip(1).step_by(2).map(|name| format!("`{name}`"));
        let named = named.collect::<Vec<_>>().join(", ");
        let listed = section.lines().filter_map(|line| line.strip_prefix("| ")?.split_once(" | "));
        let listed = listed.map(|(right, _)| right).filter(|&right| right != "Right");
        let listed: Vec<_> =
            listed.map(|right| right.replace("of clusters, by the names below", &named)).collect();
        let mut granted = Vec::new();
        for role in manifest() {
            let place = match (&role["kind"], &role["metadata"]["namespace"]) {
                (kind, _) if kind != "Role" => String::new(),
                (_, namespace) if namespace == "portico" => " in its namespace".to_owned(),
                (_, namespace) => format!(" in `{}`", namespace.as_str().unwrap()),
            };
            for rule in role.get("rules").and_then(Value::as_array).into_iter().flatten() {
                let list = |field: &str| -> Vec<String> {
                    rule.get(field)
                        .map(|list| serde_json::from_value(list.clone()).unwrap())
                        .unwrap_or_default()
                };
                let names = list("resourceNames").iter().map(|name| format!("`{name}`")).collect::<Vec<_>>();
                let names = if names.is_empty() { String::new() } else { format!(" {}", names.join(", ")) };
                let verbs = list("verbs").join(", ").replace("get, list, watch", "read");
                granted.push(format!("{}{names}{place}: {verbs}", list("resources").join(", ")));
            }
        }
        assert_eq!(listed, granted);
    }
}
