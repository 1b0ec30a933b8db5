//! The small tables of the model: APIs of cloud providers, costs of clusters, limits of load balancers.

use portico_yaml::Node;
use serde::Deserialize;

use super::{Fact, File, at, check_value, push, read};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ProvidersFile {
    providers: Vec<Provider>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Provider {
    provider: String,
    #[serde(default)]
    hosts: Vec<String>,
    region: Option<String>,
    field: Option<String>,
    port_field: Option<String>,
    port: Option<u16>,
    #[serde(default)]
    secret: bool,
    #[serde(default)]
    none: bool,
    reference: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct LimitsFile {
    clusters: Vec<ClusterCost>,
    shared_listeners: u32,
    load_balancers: Vec<LoadBalancer>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct ClusterCost {
    strategy: String,
    node_ports: u32,
    service_ports: u32,
    listeners: u32,
    load_balancers: u32,
    reference: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LoadBalancer {
    key: String,
    title: String,
    listeners: Option<u32>,
    count: Option<u32>,
    #[serde(default)]
    adjustable: Vec<Adjustable>,
    reference: String,
}

/// A quota that a provider raises on request.
#[derive(Deserialize, PartialEq)]
#[serde(rename_all = "kebab-case")]
enum Adjustable {
    Listeners,
    Count,
}

/// Where the APIs of cloud providers are.
pub(super) fn providers(out: &mut String, file: &File<'_>, known: &[Fact]) -> Result<(), String> {
    let (tree, table): (Node, ProvidersFile) = read(file)?;
    let fact = known.iter().find(|fact| fact.key == "provider");
    let fact = fact.ok_or_else(|| at(file, &tree, "", "facts.yaml has no fact provider"))?;
    out.push_str("pub(super) static PROVIDERS: &[Provider] = &[\n");
    for (index, provider) in table.providers.iter().enumerate() {
        let at = |what: String| at(file, &tree, &format!("providers[{index}]"), &what);
        check_value(fact, &provider.provider).map_err(at)?;
        let Provider { provider: key, hosts, region, field, port_field, port, secret, none, reference } =
            provider;
        let ways = [!hosts.is_empty(), field.is_some(), *none];
        if ways.iter().filter(|is| **is).count() != 1 {
            return Err(at(format!("{key}: give one of hosts, field and none")));
        }
        let port = port.unwrap_or(443);
        push(
            out,
            format_args!(
                "Provider {{ key: {key:?}, hosts: &{hosts:?}, region: {region:?}, field: {field:?}, \
                 port_field: {port_field:?}, port: {port}, secret: {secret}, reference: {reference:?} }},\n"
            ),
        );
    }
    out.push_str("];\n");
    let is_missing = |key: &&String| !table.providers.iter().any(|row| row.provider == **key);
    match fact.values.iter().find(is_missing) {
        Some(key) => Err(at(file, &tree, "", &format!("the provider {key:?} has no entry"))),
        None => Ok(()),
    }
}

/// What clusters take, and what load balancers can hold.
pub(super) fn limits(out: &mut String, file: &File<'_>, known: &[Fact]) -> Result<(), String> {
    let (tree, table): (Node, LimitsFile) = read(file)?;
    let fact = known.iter().find(|fact| fact.key == "strategy");
    let fact = fact.ok_or_else(|| at(file, &tree, "", "facts.yaml has no fact strategy"))?;
    out.push_str("pub(super) static CLUSTER_COSTS: &[ClusterCost] = &[\n");
    for (index, cost) in table.clusters.iter().enumerate() {
        check_value(fact, &cost.strategy)
            .map_err(|what| at(file, &tree, &format!("clusters[{index}]"), &what))?;
        let ClusterCost { strategy, node_ports, service_ports, listeners, load_balancers, reference } = cost;
        push(
            out,
            format_args!(
                "ClusterCost {{ strategy: {strategy:?}, node_ports: {node_ports}, service_ports: \
                 {service_ports}, listeners: {listeners}, load_balancers: {load_balancers}, reference: \
                 {reference:?} }},\n"
            ),
        );
    }
    push(out, format_args!("];\npub(super) const SHARED_LISTENERS: u32 = {};\n", table.shared_listeners));
    out.push_str("pub(super) static LOAD_BALANCERS: &[LoadBalancer] = &[\n");
    for LoadBalancer { key, title, listeners, count, adjustable, reference } in &table.load_balancers {
        let raised = |what: Adjustable| adjustable.contains(&what);
        let (listeners_raised, count_raised) = (raised(Adjustable::Listeners), raised(Adjustable::Count));
        push(
            out,
            format_args!(
                "LoadBalancer {{ key: {key:?}, title: {title:?}, listeners: {listeners:?}, \
                 listeners_adjustable: {listeners_raised}, count: {count:?}, \
                 count_adjustable: {count_raised}, reference: {reference:?} }},\n"
            ),
        );
    }
    out.push_str("];\n");
    Ok(())
}
