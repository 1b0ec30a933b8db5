//! Each row of the tables is in the model, and the model has no row of a table that the table has not.
//! `tests/fixtures` holds the tables as published.

use std::collections::{BTreeMap, BTreeSet};

use portico_ports::model::{self, Overridable, Protocol, Row};

/// The cells of each row of a Markdown table, by its first cell.
fn fixture(text: &str) -> BTreeMap<String, Vec<String>> {
    let cells = |line: &str| -> Vec<String> {
        line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect()
    };
    let rows = text.lines().filter(|line| line.starts_with('|')).skip(2).map(cells);
    rows.map(|mut cells| (cells.remove(0), cells)).collect()
}

/// The rows of the model that claim to be in a table, by the end of their id.
fn model_rows(product: &str) -> BTreeMap<String, &'static Row> {
    let rows = model::product(product).expect("a product").rows.iter().filter(|row| !row.beside_the_table);
    rows.map(|row| (row.id.rsplit('-').next().unwrap_or_default().to_owned(), row)).collect()
}

fn ports(row: &Row) -> String {
    row.ports.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

fn conditions(row: &Row) -> Vec<String> {
    row.conditions.iter().map(ToString::to_string).collect()
}

#[test]
fn the_model_has_the_rows_of_the_kkp_table_and_no_others() {
    let (table, rows) = (fixture(include_str!("../fixtures/kkp.md")), model_rows("kkp"));
    assert_eq!(table.len(), 13);
    let keys = |keys: Vec<&String>| keys.into_iter().cloned().collect::<BTreeSet<_>>();
    assert_eq!(keys(table.keys().collect()), keys(rows.keys().collect()));
    for (number, cells) in &table {
        let row = rows[number];
        let [source, component, destination, strategy, protocol, written, purpose, overridable] = &cells[..]
        else {
            panic!("row {number}: {cells:?}");
        };
        assert_eq!(row.source.name, source, "row {number}");
        assert_eq!(row.component, Some(component.as_str()), "row {number}");
        assert_eq!(row.destination.name, destination, "row {number}");
        assert_eq!(row.purpose, purpose, "row {number}");
        assert_eq!(row.protocols, [Protocol::Tcp], "row {number}");
        assert_eq!(protocol, "TCP");
        let ports = match written.trim_end_matches('*') {
            "provider specific" => "provider",
            ports => ports,
        };
        assert_eq!(self::ports(row), ports, "row {number}");
        let expected = match (overridable.as_str(), written.len() - written.trim_end_matches('*').len()) {
            ("yes", 1) => Some(Overridable::Yes),
            ("default range", 2) => Some(Overridable::DefaultRange),
            ("no", 0) => Some(Overridable::No),
            ("n/a", 0) => None,
            other => panic!("row {number}: {other:?}"),
        };
        assert_eq!(row.overridable, expected, "row {number}");
        let strategies: Vec<String> =
            conditions(row).into_iter().filter(|text| text.starts_with("strategy")).collect();
        let expected = if strategy == "Any" { Vec::new() } else { vec![format!("strategy={strategy}")] };
        assert_eq!(strategies, expected, "row {number}");
        assert!(row.reference.ends_with(&format!("row {number}")), "row {number}: {}", row.reference);
    }
}

#[test]
fn the_model_has_the_rows_of_the_kublr_tables_and_no_others() {
    let (table, rows) = (fixture(include_str!("../fixtures/kublr.md")), model_rows("kublr"));
    assert_eq!(table.len(), 24);
    let keys = |keys: Vec<&String>| keys.into_iter().cloned().collect::<BTreeSet<_>>();
    assert_eq!(keys(table.keys().collect()), keys(rows.keys().collect()));
    for (number, cells) in &table {
        let row = rows[number];
        let [written, protocol, source, destination, condition, notes] = &cells[..] else {
            panic!("row {number}: {cells:?}");
        };
        assert_eq!(if row.ports.is_empty() { "-".to_owned() } else { ports(row) }, *written, "row {number}");
        let protocols = row.protocols.iter().map(|protocol| protocol.name()).collect::<Vec<_>>().join("/");
        assert_eq!(protocols, protocol.trim_end_matches(" (IP-in-IP)"), "row {number}");
        assert_eq!((row.source.name, row.destination.name), (&**source, &**destination), "row {number}");
        let expected: &[&str] = match condition.as_str() {
            "-" => &[],
            "Canal (default)" => &["cni=Canal"],
            "Calico" => &["cni=Calico"],
            "Weave" => &["cni=Weave"],
            "Flannel" => &["cni=Flannel"],
            "Bring-your-own-infrastructure" => &["bring-your-own=true"],
            "non-air-gap deployment" => &["air-gap=false"],
            "air-gap deployment" => &["air-gap=true"],
            "master LB" => &["master-lb=true"],
            "ingress LB" => &["ingress-lb=true"],
            other => panic!("row {number}: {other:?}"),
        };
        assert_eq!(conditions(row), expected, "row {number}");
        assert_eq!(row.purpose, notes, "row {number}");
        assert_eq!((row.overridable, row.component), (None, None), "row {number}");
        let (table, line) = number.split_once('.').unwrap();
        assert!(row.reference.ends_with(&format!("table {table}, row {line}")), "{}", row.reference);
    }
    assert!(model::product("kublr").unwrap().defaults.contains(&("cni", "Canal")));
}

#[test]
fn rows_that_are_in_no_table_say_where_they_come_from() {
    let beside: Vec<&Row> = model::products()
        .iter()
        .flat_map(|product| product.rows)
        .filter(|row| row.beside_the_table)
        .collect();
    assert!(beside.iter().any(|row| row.reference.starts_with("Cilium documentation")));
    for row in beside {
        assert!(!row.reference.contains("table of") && !row.reference.contains(", row "), "{}", row.id);
    }
}
