//! Rules for clouds against what their vendors publish, and the model against its schema. The checks are a
//! Python program (`tests/cloud/check.py`), since the vendors' models are Python packages.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use portico_ports::firewall::{Ruleset, Target, Writing, rules};
use portico_ports::{Facts, Inventory, model};
use serde_json::Value;

const INVENTORY: &str = "worker: [10.0.1.0/24, 10.0.9.7, '2001:db8:1::/64']\nfront: [203.0.113.9, \
                         '2001:db8:9::9']\nuser: [any]\nmaster: [10.0.2.0/24]\n\
                         seed: [10.0.3.0/24, 203.0.113.9]\nseed-api: [10.0.3.7]\n\
                         dns: [10.0.0.53, '2001:db8::53']\n\
                         master-ingress: [203.0.113.10]\n\
                         provider-api: [198.51.100.0/24]\ninternet: [any]\n";

/// Python with the packages that `scripts/setup` has brought.
fn python() -> PathBuf {
    let home = || env::var_os("HOME").map(|home| Path::new(&home).join(".cache"));
    let cache = env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(home).unwrap_or_default();
    let python = cache.join("portico/cloud-schemas/bin/python");
    assert!(python.exists(), "{} is missing: run `scripts/setup cloud`", python.display());
    python
}

/// Which of these texts are wrong, by number, and what is said about them. One process for all: starting
/// Python with a vendor's package takes seconds.
fn wrong(check: &str, texts: &[String]) -> (Vec<usize>, String) {
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cloud/check.py");
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let file = |number: usize| folder.path().join(number.to_string());
    let mut command = Command::new(python());
    command.arg(program).arg(check);
    for (number, text) in texts.iter().enumerate() {
        fs::write(file(number), text).expect("a file can be written");
        command.arg(file(number));
    }
    let output = command.output().expect("python can be started");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{check}: {said}");
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let is_wrong = |number: &usize| printed.lines().any(|line| Path::new(line) == file(*number));
    ((0..texts.len()).filter(is_wrong).collect(), said)
}

fn ruleset(product: &str, role: &str, facts: &[&str]) -> Ruleset {
    let product = model::product(product).expect("a product");
    let mut known = Facts::default();
    facts.iter().for_each(|fact| known.assign(fact).expect("a fact"));
    let inventory = Inventory::read(INVENTORY, &known).expect("an inventory");
    rules(product, &[product.role(role).expect("a role")], &known, &inventory).expect("all is known")
}

/// Every kind of rule that there is, with and without default deny, is right; and all of `bad` is wrong, so
/// that the check is one.
fn every_rule_is_accepted(target: Target, name: &str, bad: &[&dyn Fn(&str) -> String]) {
    let mut texts = Vec::new();
    for (product, role, facts) in [
        ("kkp", "worker", ["strategy=Tunneling", "cni=Cilium"].as_slice()),
        ("kkp", "front", &["strategy=NodePort"]),
        ("kkp", "seed", &["strategy=Tunneling", "provider=aws"]),
        ("kublr", "worker", &["cni=Calico"]),
        // The front and the seed share a machine, and both ask the seed's API.
        ("portico", "seed-api", &[]),
    ] {
        let ruleset = ruleset(product, role, facts);
        for default_deny in [false, true] {
            let writing = Writing { default_deny, selector: &[], namespace: "portico" };
            texts.push(target.write(&ruleset, &writing).unwrap().text);
        }
    }
    let good = texts.len();
    texts.extend(bad.iter().map(|spoil| spoil(&texts[0])).collect::<Vec<_>>());
    assert!(!texts[good..].contains(&texts[0]));
    let (wrong, said) = wrong(name, &texts);
    assert_eq!(wrong, (good..texts.len()).collect::<Vec<_>>(), "{said}");
}

/// The rule that `begin` stands before, up to and with `end`, stands once more.
fn doubled(text: &str, begin: &str, end: &str) -> String {
    let begin = text.find(begin).expect("there is a rule");
    let end = begin + text[begin..].find(end).expect("the rule ends") + end.len();
    format!("{}{}{}", &text[..end], &text[begin..end], &text[end..])
}

#[test]
fn aws_templates_fit_the_schemas_of_cloudformation() {
    every_rule_is_accepted(
        Target::Aws,
        "aws",
        &[&|text| text.replacen("\"CidrIp\"", "\"Cidr\"", 1), &|text| {
            let mut template: Value = serde_json::from_str(text).expect("it is JSON");
            let rules = &mut template["Resources"]["SecurityGroup"]["Properties"]["SecurityGroupIngress"];
            let rules = rules.as_array_mut().expect("a list");
            rules.push(rules[0].clone());
            template.to_string()
        }],
    );
}

#[test]
fn azure_templates_fit_microsofts_model_of_a_security_group() {
    every_rule_is_accepted(Target::Azure, "azure", &[&|text| text.replacen("\"Inbound\"", "\"In\"", 1)]);
}

#[test]
fn gcp_rules_are_messages_of_the_compute_api() {
    every_rule_is_accepted(Target::Gcp, "gcp", &[&|text| text.replacen("\"direction\"", "\"direktion\"", 1)]);
}

#[test]
fn openstack_commands_are_understood_by_the_openstack_client() {
    every_rule_is_accepted(
        Target::Openstack,
        "openstack",
        &[&|text| text.replacen("--dst-port", "--portal", 1), &|text| {
            doubled(text, "openstack security group rule create", "\n")
        }],
    );
}

#[test]
fn terraform_is_hcl_with_arguments_that_the_provider_has() {
    every_rule_is_accepted(
        Target::TerraformAws,
        "terraform-aws",
        &[&|text| text.replacen("vpc_id      =", "vpc =", 1), &|text| {
            let rule = "resource \"aws_vpc_security_group_ingress_rule\" \"";
            doubled(text, rule, "}\n").replacen(rule, &format!("{rule}other_"), 1)
        }],
    );
}

#[test]
fn the_files_of_the_model_fit_their_schema() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("model");
    let read =
        |key: &str| fs::read_to_string(folder.join(format!("{key}.yaml"))).expect("a file of the model");
    let mut texts: Vec<String> = model::products().iter().map(|product| read(product.key)).collect();
    texts.push(texts[0].replacen("purpose:", "purpos:", 1));
    let (wrong, said) = wrong("model", &texts);
    assert_eq!(wrong, [texts.len() - 1], "{said}");
}
