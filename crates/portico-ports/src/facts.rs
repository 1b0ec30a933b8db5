//! The known facts about an installation: its strategy, its network plugin, its own ports.

use std::collections::BTreeMap;

use portico_api::port_range::{PortRange, PortRangeError};
use thiserror::Error;

use crate::model::{self, Condition, FactKind, Product, Row};
use crate::nearest::UnknownWord;

/// What is known. A fact that is not here may be anything.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    choices: BTreeMap<&'static str, &'static str>,
    ports: BTreeMap<&'static str, PortRange>,
}

/// Why a fact cannot be taken.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum FactError {
    /// No such key or value.
    #[error(transparent)]
    Unknown(#[from] UnknownWord),
    /// Not KEY=VALUE.
    #[error("{0:?} is no KEY=VALUE, such as cni=Cilium")]
    Syntax(String),
    /// A port that is none.
    #[error("{key}={value}: {error}")]
    Ports {
        /// The setting.
        key: &'static str,
        /// What was given.
        value: String,
        /// What is wrong with it.
        error: PortRangeError,
    },
    /// A range where one port is wanted.
    #[error("{key}={value}: it is one port, from 1 to 65535, not a range")]
    OnePort {
        /// The setting.
        key: &'static str,
        /// What was given.
        value: String,
    },
}

impl Facts {
    /// Takes `KEY=VALUE`.
    ///
    /// # Errors
    /// If there is no such key, or it has no such value.
    pub fn assign(&mut self, assignment: &str) -> Result<(), FactError> {
        let (key, value) =
            assignment.split_once('=').ok_or_else(|| FactError::Syntax(assignment.to_owned()))?;
        self.set(key.trim(), value.trim())
    }

    /// Takes `value` for `key`. Upper and lower case do not matter.
    ///
    /// # Errors
    /// If there is no such key, or it has no such value.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), FactError> {
        let fact = model::fact(key)?;
        match fact.kind {
            FactKind::Choice(_) | FactKind::Flag => {
                let values = fact.values();
                let known = values.iter().find(|known| known.eq_ignore_ascii_case(value));
                let known = known.ok_or_else(|| UnknownWord::new(fact.key, value, values.iter().copied()))?;
                self.choices.insert(fact.key, known);
            }
            FactKind::Port | FactKind::Range => {
                let error = |error| FactError::Ports { key: fact.key, value: value.to_owned(), error };
                let range: PortRange = value.parse().map_err(error)?;
                if fact.kind == FactKind::Port && range.size() != 1 {
                    return Err(FactError::OnePort { key: fact.key, value: value.to_owned() });
                }
                self.ports.insert(fact.key, range);
            }
        }
        Ok(())
    }

    /// Takes a range for a setting that objects tell.
    pub(crate) fn set_ports(&mut self, setting: &'static str, range: PortRange) {
        self.ports.insert(setting, range);
    }

    /// The value of a choice or flag, if it is known.
    pub fn get(&self, key: &str) -> Option<&'static str> {
        self.choices.get(key).copied()
    }

    /// The port or range of a setting, if it is known.
    pub fn ports(&self, setting: &str) -> Option<PortRange> {
        self.ports.get(setting).copied()
    }

    /// These facts, with the defaults of `product` for what is not known.
    pub fn or_defaults(&self, product: &Product) -> Self {
        self.or(product.defaults)
    }

    /// These facts, with the defaults that all products share for what is not known: clusters supply the
    /// rest.
    pub fn or_general_defaults(&self) -> Self {
        self.or(&[])
    }

    fn or(&self, defaults: &[(&'static str, &'static str)]) -> Self {
        let general = model::facts().iter().filter_map(|fact| Some((fact.key, fact.default?)));
        let mut all = Self::default();
        all.choices.extend(general);
        all.choices.extend(defaults.iter().copied());
        all.choices.extend(self.choices.iter().map(|(key, value)| (*key, *value)));
        all.ports = self.ports.clone();
        all
    }

    /// Whether a condition holds; `None` if its fact is not known.
    pub fn judge(&self, condition: &Condition) -> Option<bool> {
        let value = self.get(condition.fact)?;
        Some(condition.values.contains(&value) == condition.is)
    }

    /// Whether a row may be needed: no condition of it is known to fail.
    pub fn allow(&self, row: &Row) -> bool {
        row.conditions.iter().all(|condition| self.judge(condition) != Some(false))
    }

    /// The facts that decide about `row` and are not known.
    pub fn missing<'row>(&self, row: &'row Row) -> impl Iterator<Item = &'row Condition> {
        row.conditions.iter().filter(|condition| self.judge(condition).is_none())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use portico_api::strategy::ExposeStrategy;

    use super::*;

    #[test]
    fn the_strategies_of_the_model_are_those_of_clusters() {
        let fact = model::facts().iter().find(|fact| fact.key == "strategy").unwrap();
        let all = ExposeStrategy::ALL.map(ExposeStrategy::name);
        assert_eq!(fact.values(), all);
        let costs: Vec<_> = model::cluster_costs().iter().map(|cost| cost.strategy).collect();
        assert_eq!(costs, all, "what a cluster takes is in limits.yaml");
        let rows = model::product("portico").unwrap().rows.iter();
        let conditions = rows.flat_map(|row| row.conditions).filter(|condition| condition.fact == "strategy");
        let named: BTreeSet<_> = conditions.flat_map(|condition| condition.values).copied().collect();
        assert_eq!(named, BTreeSet::from(all), "what flows with a strategy is in portico.yaml");
    }

    #[test]
    fn a_fact_is_set_whatever_its_case() {
        let mut facts = Facts::default();
        facts.assign("cni=cilium").unwrap();
        facts.assign("AIR-GAP = true").unwrap();
        facts.assign("node-port-range=31000-31999").unwrap();
        assert_eq!((facts.get("cni"), facts.get("air-gap")), (Some("Cilium"), Some("true")));
        assert_eq!(facts.ports("node-port-range"), "31000-31999".parse().ok());
    }

    #[test]
    fn what_is_no_fact_is_refused_with_the_nearest() {
        let mut facts = Facts::default();
        let error = |facts: &mut Facts, text: &str| facts.assign(text).unwrap_err().to_string();
        assert!(error(&mut facts, "stratgy=NodePort").ends_with("did you mean strategy?"));
        assert!(error(&mut facts, "strategy=Tuneling").ends_with("did you mean Tunneling?"));
        assert!(error(&mut facts, "strategy").contains("KEY=VALUE"));
        assert!(error(&mut facts, "seed-api-port=443-445").contains("not a range"));
        assert!(error(&mut facts, "node-port-range=9-1").contains("greater"));
        assert_eq!(facts, Facts::default());
    }

    #[test]
    fn a_condition_on_what_is_not_known_is_undecided() {
        let condition = Condition { fact: "provider", values: &["fake", "edge"], is: false };
        let mut facts = Facts::default();
        assert_eq!(facts.judge(&condition), None);
        facts.set("provider", "aws").unwrap();
        assert_eq!(facts.judge(&condition), Some(true));
        facts.set("provider", "edge").unwrap();
        assert_eq!(facts.judge(&condition), Some(false));
    }
}
