//! Flows: the rows of the model that an installation needs, with its own ports.

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use serde_json::Value;

use crate::facts::Facts;
use crate::model::{self, Condition, Ports, Product, Protocol, Row};
use crate::nearest::UnknownWord;

/// A row, with the ports that it has in this installation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flow {
    /// The row it follows from.
    pub row: &'static Row,
    /// The ports of the destination; none for IP-in-IP.
    pub ports: Vec<Ports>,
    /// The hosts of the destination, where they are known by name: those of a provider's API.
    pub hosts: Vec<String>,
    /// The addresses of the destination, where objects tell them.
    pub addresses: Vec<String>,
    /// Why this installation needs it; empty where only the model was asked.
    pub reasons: Vec<String>,
}

impl Flow {
    /// The flow of a row, with the ports that `facts` know.
    pub fn of(row: &'static Row, facts: &Facts) -> Self {
        let own = row.setting.and_then(|setting| facts.ports(setting));
        let mut flow = Self {
            row,
            ports: own.map_or_else(|| row.ports.to_vec(), |range| vec![Ports::Range(range)]),
            hosts: Vec::new(),
            addresses: Vec::new(),
            reasons: Vec::new(),
        };
        if row.ports.contains(&Ports::Provider)
            && let Some(key) = facts.get("provider")
            && let Some(provider) = model::providers().iter().find(|provider| provider.key == key)
        {
            flow.hosts = provider.hosts.iter().map(|&host| host.to_owned()).collect();
            if !flow.hosts.is_empty() {
                flow.ports = vec![Ports::from(provider.port)];
            }
        }
        flow
    }

    /// The protocols of the row.
    pub fn protocols(&self) -> &'static [Protocol] {
        self.row.protocols
    }
}

impl From<u16> for Ports {
    /// One port; port 0, which nobody can open, stands for "any of the provider's".
    fn from(port: u16) -> Self {
        portico_api::port_range::PortRange::new(port, port).map_or(Self::Provider, Self::Range)
    }
}

/// The contract of `-o json`.
impl Serialize for Flow {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let row = self.row;
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("id", row.id)?;
        map.serialize_entry("product", row.product)?;
        map.serialize_entry("source", row.source.name)?;
        map.serialize_entry("component", &row.component)?;
        map.serialize_entry("destination", row.destination.name)?;
        match row.protocols {
            [one] => map.serialize_entry("protocol", one)?,
            more => map.serialize_entry("protocol", more)?,
        }
        map.serialize_entry("ports", &self.ports)?;
        map.serialize_entry("conditions", &Conditions(row.conditions))?;
        map.serialize_entry("overridable", &row.overridable)?;
        map.serialize_entry("purpose", row.purpose)?;
        map.serialize_entry("reference", row.reference)?;
        for (key, values) in
            [("hosts", &self.hosts), ("addresses", &self.addresses), ("reasons", &self.reasons)]
        {
            if !values.is_empty() {
                map.serialize_entry(key, values)?;
            }
        }
        map.end()
    }
}

/// Conditions as the model writes them: `{"strategy": "Tunneling", "air-gap": false}`.
struct Conditions(&'static [Condition]);

impl Serialize for Conditions {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let value = |text: &&str| match *text {
            "true" => Value::Bool(true),
            "false" => Value::Bool(false),
            text => Value::from(text),
        };
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for condition in self.0 {
            let mut values: Vec<Value> = condition.values.iter().map(value).collect();
            let wanted = match (condition.is, values.len()) {
                (true, 1) => values.remove(0),
                (true, _) => Value::Array(values),
                (false, _) => serde_json::json!({ "not": values }),
            };
            map.serialize_entry(condition.fact, &wanted)?;
        }
        map.end()
    }
}

/// Which flows are asked for.
#[derive(Debug, Clone, Default)]
pub struct Query {
    /// The flows of these products; of all if there is none.
    pub products: Vec<&'static Product>,
    /// With this role at one end, by its key or its name in a table.
    pub role: Option<String>,
    /// What is known of the installation.
    pub facts: Facts,
}

impl Query {
    /// The products that are asked about.
    pub fn products(&self) -> Vec<&'static Product> {
        if self.products.is_empty() { model::products().iter().collect() } else { self.products.clone() }
    }

    /// The flows, in the order of the tables. A flow that depends on an unknown fact is among them.
    ///
    /// # Errors
    /// If there is no such role.
    pub fn flows(&self) -> Result<Vec<Flow>, UnknownWord> {
        let products = self.products();
        let roles = self.role.as_deref().map(|word| model::role(&products, word)).transpose()?;
        let mut flows = Vec::new();
        for product in products {
            let role = roles.as_ref().map(|roles| roles.iter().find(|role| role.product == product.key));
            let wanted = |row: &&Row| match role {
                None => true,
                Some(None) => false,
                Some(Some(role)) => {
                    product.concerns(row.source, role.key) || product.concerns(row.destination, role.key)
                }
            };
            let rows = product.rows.iter().filter(wanted).filter(|row| self.facts.allow(row));
            flows.extend(rows.map(|row| Flow::of(row, &self.facts)));
        }
        Ok(flows)
    }
}
