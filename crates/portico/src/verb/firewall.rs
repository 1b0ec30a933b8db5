//! `portico firewall`: rules for one role, in the language of a firewall, and how rules in force differ.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::{Args, Subcommand, ValueEnum};
use portico_admin::listing::OutputFormat;
use portico_admin::table;
use portico_ports::firewall::{Missing, Ruleset, Target, Writing, rules};
use portico_ports::in_force::{Comparison, InForce, compare};
use portico_ports::model;
use portico_ports::{Facts, Inventory};

use crate::outcome::{Outcome, print};
use crate::requirements::Known;

// `portico firewall`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct Command {
    #[command(subcommand)]
    diff: Option<Sub>,
    /// The firewall to write rules for
    #[arg(long = "for", value_name = "FIREWALL", required = true)]
    target: Option<TargetFlag>,
    #[command(flatten)]
    scope: Scope,
    /// Refuse everything that the rules do not name. Read the notes before it is used: SSH, for one, is not
    /// in the model
    #[arg(long)]
    default_deny: bool,
    /// Label of the pods or nodes that a policy is for; may be repeated
    #[arg(long, value_name = "KEY=VALUE", value_parser = label)]
    selector: Vec<(String, String)>,
    /// Namespace of a policy
    #[arg(long, value_name = "NS", default_value = "portico")]
    namespace: String,
}

// Whose rules.
#[derive(Debug, Args)]
struct Scope {
    /// What the machines are: worker, seed, master, front, ...; several of machines that are several things.
    /// `portico ports` lists what talks to what
    #[arg(long, value_name = "ROLE", value_delimiter = ',')]
    role: Vec<String>,
    /// The product whose requirements they are: kkp, kublr or portico
    #[arg(long, value_name = "PRODUCT", default_value = "kkp")]
    product: String,
    /// Addresses and networks by role (YAML)
    #[arg(long, value_name = "FILE")]
    inventory: Option<PathBuf>,
    #[command(flatten)]
    known: Known,
}

// `portico firewall diff`.
#[derive(Debug, Subcommand)]
enum Sub {
    /// Compare the rules that a role needs with rules in force: what is missing, what is open and needless
    ///
    /// Exit code 1 if something is missing.
    #[command(after_help = "\
Examples:
  nft -j list ruleset | portico firewall diff - --role worker --strategy Tunneling --inventory site.yaml
  iptables-save >rules.txt && portico firewall diff rules.txt --role worker --inventory site.yaml
  aws ec2 describe-security-groups --group-ids sg-1 >group.json && portico firewall diff group.json ...")]
    Diff(Diff),
}

#[derive(Debug, Args)]
struct Diff {
    /// What `nft -j list ruleset`, `iptables-save`, `ip6tables-save` or `aws ec2 describe-security-groups`
    /// has printed; - for standard input
    file: PathBuf,
    #[command(flatten)]
    scope: Scope,
    /// How the answer is printed
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    output: OutputFormat,
}

/// Firewalls that rules can be written for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum TargetFlag {
    /// For `nft -f`
    Nftables,
    /// A script for iptables and ip6tables
    Iptables,
    /// A CloudFormation template with a security group
    Aws,
    /// An ARM template with a network security group
    Azure,
    /// VPC firewall rules, as the Compute API takes them
    Gcp,
    /// A script of `openstack security group` commands
    Openstack,
    /// Terraform, provider AWS
    TerraformAws,
    /// A Kubernetes NetworkPolicy
    #[value(name = "networkpolicy")]
    NetworkPolicy,
    /// A policy of Cilium, of pods or of nodes
    Cilium,
    /// Plain text for a firewall team
    Ticket,
}

impl From<TargetFlag> for Target {
    fn from(flag: TargetFlag) -> Self {
        match flag {
            TargetFlag::Nftables => Self::Nftables,
            TargetFlag::Iptables => Self::Iptables,
            TargetFlag::Aws => Self::Aws,
            TargetFlag::Azure => Self::Azure,
            TargetFlag::Gcp => Self::Gcp,
            TargetFlag::Openstack => Self::Openstack,
            TargetFlag::TerraformAws => Self::TerraformAws,
            TargetFlag::NetworkPolicy => Self::NetworkPolicy,
            TargetFlag::Cilium => Self::Cilium,
            TargetFlag::Ticket => Self::Ticket,
        }
    }
}

/// Prints the rules, or how those in force differ.
pub(crate) fn run(command: &Command) -> anyhow::Result<Outcome> {
    if let Some(Sub::Diff(diff)) = &command.diff {
        return run_diff(diff);
    }
    let Some(target) = command.target else { bail!("--for is missing: name the firewall") };
    let rules = command.scope.rules()?;
    let writing = Writing {
        default_deny: command.default_deny,
        selector: &command.selector,
        namespace: &command.namespace,
    };
    let written = Target::from(target).write(&rules, &writing)?;
    for note in written.notes {
        tracing::warn!("{note}");
    }
    print(&written.text)?;
    Ok(Outcome::Done)
}

impl Scope {
    /// The rules, or an error with everything that must be known first.
    fn rules(&self) -> anyhow::Result<Ruleset> {
        let product = model::product(&self.product)?;
        if self.role.is_empty() {
            let roles: Vec<&str> = product.roles.iter().map(|role| role.key).collect();
            bail!("--role is missing: name the role of the machines ({})", roles.join(", "));
        }
        let mut roles = Vec::new();
        for word in &self.role {
            roles.extend(model::role(&[product], word)?);
        }
        let facts = self.known.facts()?;
        let inventory = match &self.inventory {
            Some(file) => read_inventory(file, &facts)?,
            None => Inventory::default(),
        };
        rules(product, &roles, &facts, &inventory)
            .map_err(|missing| ask(&missing, &self.role.join(","), self.inventory.as_deref()))
    }
}

/// Reads an inventory; the error has everything that is wrong with it, a line each.
pub(crate) fn read_inventory(file: &Path, facts: &Facts) -> anyhow::Result<Inventory> {
    let text =
        fs::read_to_string(file).with_context(|| format!("reading the inventory {}", file.display()))?;
    Inventory::read(&text, facts).map_err(|problems| {
        let lines: Vec<String> =
            problems.iter().map(|problem| format!("{}:{problem}", file.display())).collect();
        anyhow::anyhow!("the inventory cannot be used\n{}", lines.join("\n"))
    })
}

/// What must be known, with an inventory to fill in.
fn ask(missing: &[Missing], role: &str, inventory: Option<&Path>) -> anyhow::Error {
    let mut text = format!("rules for {role} need to know more; nothing is opened to everybody instead");
    for missing in missing {
        text.push_str(&format!("\n- {missing}"));
    }
    let roles: Vec<&str> = missing
        .iter()
        .filter_map(|missing| match missing {
            Missing::Addresses { role, .. } => Some(role.key),
            _ => None,
        })
        .collect();
    if !roles.is_empty() {
        let file =
            inventory.map_or_else(|| "a file for --inventory".to_owned(), |file| file.display().to_string());
        text.push_str(&format!("\nFill in, in {file} (any stands for every address):\n"));
        text.push_str(&roles.iter().map(|role| format!("{role}: []\n")).collect::<String>());
    }
    anyhow::anyhow!(text.trim_end().to_owned())
}

fn run_diff(diff: &Diff) -> anyhow::Result<Outcome> {
    let rules = diff.scope.rules()?;
    let text = if diff.file == Path::new("-") {
        std::io::read_to_string(std::io::stdin()).context("reading standard input")?
    } else {
        fs::read_to_string(&diff.file).with_context(|| format!("reading {}", diff.file.display()))?
    };
    let in_force = InForce::read(&text).with_context(|| diff.file.display().to_string())?;
    let comparison = compare(&rules, &in_force);
    match diff.output {
        OutputFormat::Json => print(&format!("{}\n", serde_json::to_string_pretty(&comparison)?))?,
        OutputFormat::Table => print(&comparison_table(&comparison))?,
    }
    Ok(if comparison.missing.is_empty() { Outcome::Done } else { Outcome::No })
}

fn comparison_table(comparison: &Comparison) -> String {
    let mut rows = Vec::new();
    for missing in &comparison.missing {
        let ports = if missing.ports.is_empty() { "-".to_owned() } else { missing.ports.join(", ") };
        let direction = missing.direction.to_owned();
        rows.push([
            "missing".to_owned(),
            direction,
            missing.peer.clone(),
            missing.protocol.to_owned(),
            ports,
            missing.rows.join(" "),
        ]);
    }
    for needless in &comparison.needless {
        let (what, rule) = match &*needless.needed_by {
            [] => ("needless", needless.rule.clone()),
            rows => ("wider", format!("{} (needed in part: {})", needless.rule, rows.join(" "))),
        };
        rows.push([
            what.to_owned(),
            needless.direction.to_owned(),
            needless.peer.clone(),
            needless.protocol.clone(),
            needless.ports.clone(),
            rule,
        ]);
    }
    let mut text = match (rows.is_empty(), comparison.not_judged.is_empty()) {
        (true, true) => "Everything needed is open, and nothing else.\n".to_owned(),
        (true, false) => "Everything needed is open. Whether anything else is depends on these:\n".to_owned(),
        (false, _) => {
            table::render(["WHAT", "DIRECTION", "PEER", "PROTOCOL", "PORTS", "ROWS OR RULE"], &rows)
        }
    };
    if !comparison.not_judged.is_empty() {
        text.push_str("\nNOT JUDGED\n");
        comparison.not_judged.iter().for_each(|rule| text.push_str(&format!("{rule}\n")));
    }
    text
}

fn label(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("give KEY=VALUE, such as app.kubernetes.io/name=portico-gateway".to_owned()),
    }
}
