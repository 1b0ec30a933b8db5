use super::*;

const FACTS: &str = "facts:\n- {key: cni, values: [Cilium], meaning: m}\n\
                     - {key: provider, values: [aws], meaning: m}\n\
                     - {key: strategy, values: [NodePort], meaning: m}\n\
                     - {key: range, setting: range, meaning: m}\n";
const PROVIDERS: &str = "providers:\n- {provider: aws, hosts: [a], reference: r}\n";
const LIMITS: &str = "clusters: []\nshared-listeners: 3\nload-balancers: []\n";
const HEAD: &str =
    "product: p\ntitle: P\nroles:\n- {role: a, names: [A], place: machines, meaning: m}\nflows:\n";

fn of(facts: &str, product: &str, providers: &str) -> Result<String, String> {
    let file = |name, text| File { name, text };
    compile(
        &file("facts.yaml", facts),
        &[file("p.yaml", product)],
        &file("providers.yaml", providers),
        &file("limits.yaml", LIMITS),
    )
}

/// A row, of which `change` replaces a part.
fn row(change: (&str, &str)) -> String {
    let row = "- id: p-1\n  source: A\n  destination: A\n  protocol: TCP\n  ports: '443'\n  \
               setting: range\n  conditions: {cni: Cilium}\n  purpose: x\n  reference: y\n";
    assert!(row.contains(change.0), "{change:?}");
    format!("{HEAD}{}", row.replace(change.0, change.1))
}

fn error(change: (&str, &str)) -> String {
    of(FACTS, &row(change), PROVIDERS).unwrap_err()
}

#[test]
fn a_model_without_mistakes_becomes_rust() {
    let code = of(FACTS, &row(("p-1", "p-1")), PROVIDERS).unwrap();
    assert!(code.contains(r#"Condition { fact: "cni", values: &["Cilium"], is: true }"#), "{code}");
    assert!(code.contains("Ports::Range(range(443, 443))"), "{code}");
}

#[test]
fn a_condition_on_an_unknown_fact_or_value_fails_the_build_with_its_line() {
    let error_of_fact = error(("{cni: Cilium}", "{cnI: Cilium}"));
    assert!(error_of_fact.starts_with("p.yaml:12: \"cnI\" is no fact of facts.yaml"), "{error_of_fact}");
    let error_of_value = error(("{cni: Cilium}", "{cni: {not: [Cilum]}}"));
    assert!(error_of_value.contains("\"Cilum\" is no value of cni; there are Cilium"), "{error_of_value}");
    assert!(error(("{cni: Cilium}", "{cni: 7}")).contains("give a value"));
}

#[test]
fn every_other_mistake_in_a_row_fails_the_build_too() {
    for (change, message) in [
        (("source: A", "source: B"), "no role of p has the name \"B\""),
        (("protocol: TCP", "protocol: SCTP"), "none of TCP, UDP"),
        (("ports: '443'", "ports: '0'"), "from 1 to 65535"),
        (("  ports: '443'\n", ""), "TCP and UDP have ports"),
        (("protocol: TCP", "protocol: '4'"), "IP protocol 4 has none"),
        (("setting: range", "setting: cni"), "no setting in facts.yaml"),
        (("purpose: x", "purpos: x"), "unknown field `purpos`"),
        (("  purpose: x\n", ""), "missing field `purpose`"),
    ] {
        let error = error(change);
        assert!(error.contains(message) && error.starts_with("p.yaml:"), "{error}");
    }
    let twice = format!("{}{}", row(("p-1", "p-1")), &row(("p-1", "p-1"))[HEAD.len()..]);
    assert!(of(FACTS, &twice, PROVIDERS).unwrap_err().contains("stands twice"));
}

#[test]
fn a_provider_without_an_entry_fails_the_build() {
    let error = of(FACTS, &row(("p-1", "p-1")), "providers: []\n").unwrap_err();
    assert!(error.contains("\"aws\" has no entry"), "{error}");
    let both = "providers:\n- {provider: aws, hosts: [a], none: true, reference: r}\n";
    assert!(of(FACTS, &row(("p-1", "p-1")), both).unwrap_err().contains("give one of"));
}
