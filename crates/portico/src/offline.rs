//! A directory of manifests read once, as a gateway would read it: for the verbs that only report.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use clap::Args;
use ipnet::IpNet;
use portico_admin::listing::OutputFormat;
use portico_api::annotations::EXPOSE;
use portico_api::problem::Severity;
use portico_routes::endpoint_rules::EndpointRules;
use portico_sync::{Site, SiteSettings};

use crate::args::annotation_key;
use crate::finding::Finding;

/// The flags of `portico check` and `portico routes`.
#[derive(Debug, Args)]
pub(crate) struct Flags {
    /// Directory of manifests
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// How the answer is printed
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    pub(crate) output: OutputFormat,
    /// Where a gateway remembers NodePorts and strategies [default: DIR/.portico]
    #[arg(long, value_name = "FOLDER")]
    state_dir: Option<PathBuf>,
    /// Look only at the Services of this namespace
    #[arg(long, value_name = "NS")]
    namespace: Option<String>,
    /// The annotation by which a Service asks to be exposed
    #[arg(long, value_name = "KEY", default_value = EXPOSE, value_parser = annotation_key)]
    expose_annotation: String,
    /// External address of a seed node, where clusters are reached if the Seed disables its nodeport-proxy;
    /// may be repeated
    #[arg(long, value_name = "IP", value_delimiter = ',')]
    node_address: Vec<IpAddr>,
    /// Networks that endpoints of Services must be in
    #[arg(long, value_name = "CIDR", value_delimiter = ',')]
    endpoint_networks: Vec<IpNet>,
}

/// A directory, and what is to be reported of it. Nothing is written.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) site: Site,
    /// What is wrong with the flags.
    questionable: Vec<Finding>,
}

impl Flags {
    /// Reads the directory.
    pub(crate) fn load(&self) -> anyhow::Result<Report> {
        let site = Site::read(&SiteSettings {
            directory: self.directory.clone(),
            state_dir: self.state_dir.clone(),
            namespace: self.namespace.clone(),
            expose_annotation: self.expose_annotation.clone(),
            endpoints: EndpointRules { loopback: true, networks: self.endpoint_networks.clone().into() },
            node_addresses: self.node_address.clone(),
        })?;
        let questionable = self.questionable(&site);
        Ok(Report { site, questionable })
    }

    /// For no object at all, every check succeeds: an error, because the flags are likely to be wrong.
    fn questionable(&self, site: &Site) -> Vec<Finding> {
        let mut found = Vec::new();
        if site.loaded.files == 0 {
            let message =
                "no manifest is there: no file ends in .yaml, .yml or .json (hidden ones do not count)";
            let remedy = "name the directory that holds the manifests";
            let file: Option<&Path> = Some(&self.directory);
            found.push(Finding::of_question(Severity::Error, "no-manifest", file, message.into(), remedy));
        } else if let Some(namespace) = self.namespace.as_ref().filter(|_| !site.has_namespace) {
            let message = format!("no Service and no Cluster belongs to the namespace {namespace:?}");
            let remedy = "correct --namespace, or leave it out; that of a Cluster is cluster-NAME";
            found.push(Finding::of_question(Severity::Warning, "empty-namespace", None, message, remedy));
        }
        found
    }
}

impl Report {
    /// All problems, in the order of the list.
    pub(crate) fn findings(&self) -> Vec<Finding> {
        let loaded = &self.site.loaded;
        let manifest = loaded.problems.iter().map(Finding::of_manifest);
        let objects = self.site.pipeline.problems();
        let objects = objects
            .iter()
            .map(|problem| Finding::of_object(problem, loaded.line_of(&problem.object, &problem.field)));
        let mut findings: Vec<Finding> =
            self.questionable.iter().cloned().chain(manifest).chain(objects).collect();
        findings.sort();
        findings
    }
}
