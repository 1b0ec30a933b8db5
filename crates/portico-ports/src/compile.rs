//! Turns the files in `model/` into Rust. The build script runs this, so a mistake in the model fails the
//! build with its file and line. Tests run it too, on files that are wrong.
//!
//! It checks that no field is unknown, and that ids stand once. Each condition must name a known fact and
//! values it can have. Each source and destination must be a role of its product.

#[path = "compile/tables.rs"]
mod tables;

use std::collections::BTreeSet;
use std::fmt::Write as _;

use portico_yaml::{Documents, Node};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// A file of the model: its name and its text.
pub(crate) struct File<'a> {
    pub(crate) name: &'a str,
    pub(crate) text: &'a str,
}

/// One text or several.
#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMore {
    One(String),
    More(Vec<String>),
}

impl OneOrMore {
    fn all(&self) -> &[String] {
        match self {
            Self::One(one) => std::slice::from_ref(one),
            Self::More(more) => more,
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FactsFile {
    facts: Vec<Fact>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fact {
    key: String,
    #[serde(default)]
    values: Vec<String>,
    #[serde(default)]
    flag: bool,
    setting: Option<Setting>,
    default: Option<String>,
    meaning: String,
}

#[derive(Deserialize, Clone, Copy, PartialEq)]
#[serde(rename_all = "kebab-case")]
enum Setting {
    Port,
    Range,
}

impl Fact {
    fn values(&self) -> Vec<&str> {
        if self.flag { vec!["true", "false"] } else { self.values.iter().map(String::as_str).collect() }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ProductFile {
    product: String,
    title: String,
    #[serde(default)]
    defaults: serde_json::Map<String, Value>,
    roles: Vec<Role>,
    flows: Vec<Row>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Role {
    role: String,
    names: Vec<String>,
    #[serde(rename = "place")]
    address_kind: AddressKind,
    #[serde(default)]
    on: Vec<String>,
    #[serde(default)]
    includes: Vec<String>,
    meaning: String,
}

#[derive(Deserialize, Debug)]
#[serde(rename_all = "kebab-case")]
enum AddressKind {
    Machines,
    Network,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Row {
    id: String,
    source: String,
    component: Option<String>,
    destination: String,
    protocol: OneOrMore,
    ports: Option<OneOrMore>,
    setting: Option<String>,
    #[serde(default)]
    conditions: serde_json::Map<String, Value>,
    overridable: Option<Overridable>,
    purpose: String,
    reference: String,
    #[serde(default)]
    beside_the_table: bool,
    #[serde(default)]
    listeners: Vec<String>,
}

#[derive(Deserialize, Debug)]
#[serde(rename_all = "kebab-case")]
enum Overridable {
    Yes,
    No,
    DefaultRange,
}

/// Reads the model and writes it as Rust.
///
/// # Errors
/// The first mistake, as `FILE:LINE: what is wrong`.
pub(crate) fn compile(
    facts: &File<'_>,
    products: &[File<'_>],
    providers: &File<'_>,
    limits: &File<'_>,
) -> Result<String, String> {
    let (facts_tree, facts_file): (Node, FactsFile) = read(facts)?;
    let known = facts_file.facts;
    let mut out = String::new();
    push(&mut out, format_args!("pub(super) static FACTS: &[Fact] = &[\n"));
    for (index, fact) in known.iter().enumerate() {
        let at = |what: String| at(facts, &facts_tree, &format!("facts[{index}]"), &what);
        let kinds = [!fact.values.is_empty(), fact.flag, fact.setting.is_some()];
        if kinds.iter().filter(|is| **is).count() != 1 {
            return Err(at(format!("{}: give one of values, flag and setting", fact.key)));
        }
        if let Some(default) = &fact.default {
            check_value(fact, default).map_err(at)?;
        }
        let kind = match fact.setting {
            Some(Setting::Port) => "FactKind::Port".to_owned(),
            Some(Setting::Range) => "FactKind::Range".to_owned(),
            None if fact.flag => "FactKind::Flag".to_owned(),
            None => format!("FactKind::Choice(&{:?})", fact.values),
        };
        let Fact { key, default, meaning, .. } = fact;
        push(
            &mut out,
            format_args!(
                "Fact {{ key: {key:?}, kind: {kind}, default: {default:?}, meaning: {meaning:?} }},\n"
            ),
        );
    }
    out.push_str("];\n");
    let mut ids = BTreeSet::new();
    out.push_str("pub(super) static PRODUCTS: &[Product] = &[\n");
    for file in products {
        product(&mut out, file, &known, &mut ids)?;
    }
    out.push_str("];\n");
    tables::providers(&mut out, providers, &known)?;
    tables::limits(&mut out, limits, &known)?;
    Ok(out)
}

fn product(
    out: &mut String,
    file: &File<'_>,
    known: &[Fact],
    ids: &mut BTreeSet<String>,
) -> Result<(), String> {
    let (tree, product): (Node, ProductFile) = read(file)?;
    let ProductFile { product: key, title, defaults, roles, flows } = product;
    let defaults = conditions(&defaults, known)
        .map_err(|what| at(file, &tree, "defaults", &what))?
        .iter()
        .map(|(fact, test)| format!("({fact:?}, {:?})", test.values.first().cloned().unwrap_or_default()))
        .collect::<Vec<_>>();
    push(
        out,
        format_args!(
            "Product {{ key: {key:?}, title: {title:?}, defaults: &[{}],\nroles: &[\n",
            defaults.join(", ")
        ),
    );
    for (index, role) in roles.iter().enumerate() {
        let Role { role: word, names, address_kind, on, includes, meaning } = role;
        let is_role = |other: &&String| !roles.iter().any(|role| role.role == **other);
        if let Some(other) = includes.iter().chain(on).find(is_role) {
            return Err(at(file, &tree, &format!("roles[{index}]"), &format!("{other:?} is no role here")));
        }
        push(
            out,
            format_args!(
                "Role {{ product: {key:?}, key: {word:?}, names: &{names:?}, \
                 address_kind: AddressKind::{address_kind:?}, on: &{on:?}, includes: &{includes:?}, \
                 meaning: {meaning:?} }},\n"
            ),
        );
    }
    out.push_str("],\nrows: &[\n");
    for (index, flow) in flows.iter().enumerate() {
        let at = |field: &str, what: String| at(file, &tree, &format!("flows[{index}]{field}"), &what);
        if !ids.insert(flow.id.clone()) {
            return Err(at(".id", format!("the id {:?} stands twice", flow.id)));
        }
        row(out, &key, flow, &roles, known).map_err(|(field, what)| at(field, what))?;
    }
    out.push_str("] },\n");
    Ok(())
}

fn row(
    out: &mut String,
    product: &str,
    row: &Row,
    roles: &[Role],
    known: &[Fact],
) -> Result<(), (&'static str, String)> {
    let end = |field: &'static str, name: &str| {
        let role = roles.iter().find(|role| role.names.iter().any(|known| known == name));
        role.map(|role| format!("End {{ role: {:?}, name: {name:?} }}", role.role))
            .ok_or_else(|| (field, format!("no role of {product} has the name {name:?}")))
    };
    let (source, destination) = (end(".source", &row.source)?, end(".destination", &row.destination)?);
    let mut protocols = Vec::new();
    for protocol in row.protocol.all() {
        protocols.push(match protocol.as_str() {
            "TCP" => "Protocol::Tcp",
            "UDP" => "Protocol::Udp",
            "4" => "Protocol::IpInIp",
            other => return Err((".protocol", format!("{other:?} is none of TCP, UDP, \"4\""))),
        });
    }
    let mut ports = Vec::new();
    for text in row.ports.as_ref().map(OneOrMore::all).unwrap_or_default() {
        ports.push(match text.as_str() {
            "provider" => "Ports::Provider".to_owned(),
            text => {
                let range: portico_api::port_range::PortRange =
                    text.parse().map_err(|error| (".ports", format!("{text:?}: {error}")))?;
                format!("Ports::Range(range({}, {}))", range.first(), range.last())
            }
        });
    }
    if ports.is_empty() != protocols.contains(&"Protocol::IpInIp") {
        return Err((".ports", "TCP and UDP have ports, IP protocol 4 has none".to_owned()));
    }
    if let Some(setting) = &row.setting {
        let is = |fact: &&Fact| fact.key == *setting && fact.setting.is_some();
        known
            .iter()
            .find(is)
            .ok_or_else(|| (".setting", format!("{setting:?} is no setting in facts.yaml")))?;
    }
    let tests = conditions(&row.conditions, known).map_err(|what| (".conditions", what))?;
    let tests: Vec<String> = tests
        .iter()
        .map(|(fact, test)| {
            format!("Condition {{ fact: {fact:?}, values: &{:?}, is: {} }}", test.values, test.is)
        })
        .collect();
    let overridable =
        row.overridable.as_ref().map_or("None".to_owned(), |word| format!("Some(Overridable::{word:?})"));
    let Row { id, component, setting, purpose, reference, beside_the_table, listeners, .. } = row;
    push(
        out,
        format_args!(
            "Row {{ product: {product:?}, id: {id:?}, source: {source}, component: {component:?}, \
             destination: {destination}, protocols: &[{}], ports: &[{}], setting: {setting:?}, conditions: \
             &[{}], overridable: {overridable}, purpose: {purpose:?}, reference: {reference:?}, \
             beside_the_table: {beside_the_table}, listeners: &{listeners:?} }},\n",
            protocols.join(", "),
            ports.join(", "),
            tests.join(", "),
        ),
    );
    Ok(())
}

/// What a condition asks of one fact.
struct Test {
    values: Vec<String>,
    is: bool,
}

/// `{fact: value}`, `{fact: [value, value]}` and `{fact: {not: [value]}}`.
fn conditions(
    written: &serde_json::Map<String, Value>,
    known: &[Fact],
) -> Result<Vec<(String, Test)>, String> {
    let mut tests = Vec::new();
    for (key, value) in written {
        let fact = known.iter().find(|fact| fact.key == *key).ok_or_else(|| {
            let keys: Vec<&str> = known.iter().map(|fact| fact.key.as_str()).collect();
            format!("{key:?} is no fact of facts.yaml; there are {}", keys.join(", "))
        })?;
        let (values, is) = match value.get("not") {
            Some(values) => (texts(values), false),
            None => (texts(value), true),
        };
        let values = values
            .filter(|values| !values.is_empty())
            .ok_or_else(|| format!("{key}: give a value, a list of values, or not: with a list of values"))?;
        values.iter().try_for_each(|value| check_value(fact, value))?;
        tests.push((key.clone(), Test { values, is }));
    }
    Ok(tests)
}

fn texts(value: &Value) -> Option<Vec<String>> {
    match value {
        Value::String(text) => Some(vec![text.clone()]),
        Value::Bool(flag) => Some(vec![flag.to_string()]),
        Value::Array(values) => values.iter().map(|value| texts(value)?.pop()).collect(),
        _ => None,
    }
}

fn check_value(fact: &Fact, value: &str) -> Result<(), String> {
    let values = fact.values();
    if values.contains(&value) {
        return Ok(());
    }
    Err(format!("{value:?} is no value of {}; there are {}", fact.key, values.join(", ")))
}

fn read<T: DeserializeOwned>(file: &File<'_>) -> Result<(Node, T), String> {
    let tree = Documents::new(file.text).next().ok_or_else(|| format!("{}: it is empty", file.name))?;
    let tree = tree.map_err(|error| format!("{}:{}: {error}", file.name, error.line))?;
    let typed = tree.typed().map_err(|error| format!("{}:{}: {error}", file.name, error.line))?;
    Ok((tree, typed))
}

fn at(file: &File<'_>, tree: &Node, path: &str, what: &str) -> String {
    format!("{}:{}: {what}", file.name, tree.line_of(path))
}

fn push(out: &mut String, text: std::fmt::Arguments<'_>) {
    // Writing to a String cannot fail.
    let _ = out.write_fmt(text);
}

#[cfg(test)]
#[path = "compile/tests.rs"]
mod tests;
