//! Tables in the documentation are generated from the model. They stand between comments that name them:
//!
//! ```text
//! <!-- generated: rows kkp -->
//! <!-- end -->
//! ```
//!
//! `PORTICO_WRITE_DOCS=1 cargo test -p portico-ports --test all docs` writes them anew.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

use portico_ports::model::{self, FactKind};
use portico_ports::{Flow, Query, render};

const BEGIN: &str = "<!-- generated: ";
const END: &str = "<!-- end -->\n";

fn docs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs")
}

fn table<const N: usize>(header: [&str; N], rows: impl Iterator<Item = [String; N]>) -> String {
    let mut text = format!("| {} |\n| {} |\n", header.join(" | "), ["---"; N].join(" | "));
    for row in rows {
        let cells: Vec<String> = row.iter().map(|cell| cell.replace('|', "\\|")).collect();
        let _ = writeln!(text, "| {} |", cells.join(" | "));
    }
    text
}

fn rows(product: &str) -> String {
    let product = model::product(product).expect("a product");
    let query = Query { products: vec![product], ..Query::default() };
    let flows: Vec<Flow> = query.flows().expect("no role is asked for");
    render::markdown(&flows)
}

fn facts() -> String {
    let values = |fact: &model::Fact| match fact.kind {
        FactKind::Choice(values) => values.join(", "),
        FactKind::Flag => "true, false".to_owned(),
        FactKind::Port => "a port".to_owned(),
        FactKind::Range => "a range of ports".to_owned(),
    };
    let default = |fact: &model::Fact| {
        let own = model::products().iter().filter_map(|product| {
            let (_, value) = product.defaults.iter().find(|(key, _)| *key == fact.key)?;
            Some(format!("{}: {value}", product.key))
        });
        let own: Vec<String> = own.collect();
        if own.is_empty() { fact.default.unwrap_or("-").to_owned() } else { own.join(", ") }
    };
    let rows = model::facts()
        .iter()
        .map(|fact| [format!("`{}`", fact.key), values(fact), default(fact), fact.meaning.to_owned()]);
    table(["Key", "Values", "Default for rules", "Meaning"], rows)
}

fn roles() -> String {
    let rows = model::products().iter().flat_map(|product| product.roles).map(|role| {
        [role.product.to_owned(), format!("`{}`", role.key), role.names.join(", "), role.meaning.to_owned()]
    });
    table(["Product", "Role", "Names in its tables", "Meaning"], rows)
}

fn providers() -> String {
    let rows = model::providers().iter().map(|provider| {
        let place = match provider.field {
            Some(field) if provider.secret => format!("`{field}` (in a Secret, not read)"),
            Some(field) => format!("the field `{field}` of the datacenter"),
            None if provider.hosts.is_empty() => "none".to_owned(),
            None => provider.hosts.join(", "),
        };
        let port = if place == "none" { "-".to_owned() } else { provider.port.to_string() };
        [format!("`{}`", provider.key), place, port, provider.reference.to_owned()]
    });
    table(["Provider", "Where its API is", "Port, unless the address has one", "Source"], rows)
}

fn load_balancers() -> String {
    let number = |number: Option<u32>| number.map_or("-".to_owned(), |number| number.to_string());
    let rows = model::load_balancers().iter().map(|known| {
        let adjustable = match (known.listeners_adjustable, known.count_adjustable) {
            (true, true) => "both",
            (true, false) => "listeners",
            (false, true) => "load balancers",
            (false, false) => "no",
        };
        [
            format!("`{}`", known.key),
            known.title.to_owned(),
            number(known.listeners),
            number(known.count),
            adjustable.to_owned(),
            known.reference.to_owned(),
        ]
    });
    table(["`--lb`", "Load balancer", "Listeners", "Load balancers", "Raised on request", "Source"], rows)
}

fn clusters() -> String {
    let rows = model::cluster_costs().iter().map(|cost| {
        [
            cost.strategy.to_owned(),
            cost.node_ports.to_string(),
            cost.service_ports.to_string(),
            cost.listeners.to_string(),
            cost.load_balancers.to_string(),
            cost.reference.to_owned(),
        ]
    });
    let header = [
        "Strategy",
        "NodePorts",
        "NodePorts of load balancer Services",
        "Listeners",
        "Load balancers",
        "Source",
    ];
    table(header, rows)
}

fn generate(name: &str) -> String {
    match name.split_once(' ').unwrap_or((name, "")) {
        ("rows", product) => rows(product),
        ("facts", "") => facts(),
        ("roles", "") => roles(),
        ("providers", "") => providers(),
        ("load-balancers", "") => load_balancers(),
        ("clusters", "") => clusters(),
        _ => panic!("no table {name:?} can be generated"),
    }
}

/// The page with every table generated anew, and how many there are.
fn renewed(page: &str) -> (String, usize) {
    let (mut text, mut rest, mut count) = (String::new(), page, 0);
    while let Some(begin) = rest.find(BEGIN) {
        let (before, after) = rest.split_at(begin);
        let (first, after) = after.split_once('\n').expect("the comment ends its line");
        let name = first[BEGIN.len()..].trim_end_matches(" -->");
        let (_, after) = after.split_once(END).expect("each generated table has an end");
        let _ = write!(text, "{before}{first}\n{}{END}", generate(name));
        (rest, count) = (after, count + 1);
    }
    (text + rest, count)
}

#[test]
fn tables_in_the_documentation_are_those_of_the_model() {
    let mut tables = 0;
    for entry in fs::read_dir(docs()).expect("the folder docs is there") {
        let path = entry.expect("an entry").path();
        if path.extension().is_none_or(|end| end != "md") {
            continue;
        }
        let page = fs::read_to_string(&path).expect("a page is text");
        let (new, count) = renewed(&page);
        tables += count;
        if env::var_os("PORTICO_WRITE_DOCS").is_some() {
            fs::write(&path, &new).expect("a page can be written");
        } else {
            let advice = "PORTICO_WRITE_DOCS=1 cargo test -p portico-ports --test all docs";
            assert!(new == page, "{} differs from the model; write it anew: {advice}", path.display());
        }
    }
    assert!(tables >= 8, "{tables} tables: the pages have lost theirs");
}
