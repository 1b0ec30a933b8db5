//! Objects read once, as a gateway would read them: for the verbs that only report.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::ensure;
use clap::{ArgGroup, Args, ValueEnum};
use ipnet::IpNet;
use portico_admin::listing::OutputFormat;
use portico_api::annotations::{EXPOSE, ExposeKeys};
use portico_api::problem::Severity;
use portico_source::{Loaded, list_objects};
use portico_sync::{ReadAs, Site, SiteSettings};

use crate::args::{annotation_key, duration, network};
use crate::daemon;
use crate::finding::Finding;
use crate::hosted::Hosted;

// The flags of `portico check` and `portico routes`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("objects").required(true))]
pub(crate) struct Flags {
    /// Directory of manifests, or of a copy of a seed's objects (kubectl get -o yaml)
    #[arg(value_name = "DIR", group = "objects")]
    directory: Option<PathBuf>,
    /// Read the objects of a live seed instead, by this kubeconfig; nothing is written
    #[arg(long, value_name = "FILE", group = "objects")]
    kubeconfig: Option<PathBuf>,
    /// How long reading a live seed may take, all together
    #[arg(long, value_name = "TIME", default_value = "1m", value_parser = duration, requires = "kubeconfig")]
    timeout: Duration,
    /// What DIR is: for a gateway with --manifests, or a copy of a seed where KKP's controllers run [default:
    /// a copy, if a Cluster's namespace has Services with a UID]
    #[arg(long, value_name = "WHAT", conflicts_with = "kubeconfig")]
    read_as: Option<ReadAsFlag>,
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
    /// The Seed that counts, where there are several; without it, each Cluster belongs to the one that lists
    /// its datacenter
    #[arg(long, value_name = "NAME")]
    seed: Option<String>,
    /// Networks that endpoints of Services must be in
    #[arg(long, value_name = "CIDR", value_delimiter = ',', value_parser = network)]
    endpoint_networks: Vec<IpNet>,
}

/// What a directory may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ReadAsFlag {
    /// What a gateway with --manifests serves: Portico plans Services and NodePorts
    Directory,
    /// A copy of the objects of a seed, where KKP's controllers have done so
    Seed,
}

/// Objects, and what is to be reported of them. Nothing is written.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) site: Site,
    /// Whether they are those of a live seed.
    pub(crate) is_live: bool,
    /// What is wrong with the flags.
    questionable: Vec<Finding>,
}

/// Every object of a live seed, read once.
fn list_live(
    kubeconfig: Option<&Path>,
    namespace: Option<&str>,
    timeout: Duration,
) -> anyhow::Result<Loaded> {
    daemon::run(async {
        let client = portico_kube::client(kubeconfig).await?;
        anyhow::Ok(list_objects(&client, namespace, timeout).await?)
    })
}

// Where the objects of an installation are, for verbs that need nothing else of them.
#[derive(Debug, Args)]
pub(crate) struct Source {
    /// Directory of manifests, or of a copy of a seed's objects (kubectl get -o yaml)
    #[arg(long, value_name = "DIR", conflicts_with = "kubeconfig")]
    pub(crate) manifests: Option<PathBuf>,
    /// Read the objects of a live seed, by this kubeconfig; nothing is written
    #[arg(long, value_name = "FILE")]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// How long reading a live seed may take, all together
    #[arg(long, value_name = "TIME", default_value = "1m", value_parser = duration)]
    timeout: Duration,
}

impl Source {
    /// Reads the objects; `None` if no source was named. What cannot be read is reported in the log.
    pub(crate) fn load(&self) -> anyhow::Result<Option<Site>> {
        match (&self.manifests, &self.kubeconfig) {
            (Some(directory), _) => read(directory).map(Some),
            (None, Some(kubeconfig)) => {
                let site = Site::of_seed(list_live(Some(kubeconfig), None, self.timeout)?, &settings());
                tell(&site);
                Ok(Some(site))
            }
            (None, None) => Ok(None),
        }
    }
}

/// Reads a directory of objects. What cannot be read is reported in the log.
pub(crate) fn read(directory: &Path) -> anyhow::Result<Site> {
    let site = Site::read(directory, None, &settings())?;
    ensure!(
        site.loaded.files > 0,
        "no manifest is in {}: no file ends in .yaml, .yml or .json; name the directory that holds them",
        directory.display()
    );
    tell(&site);
    Ok(site)
}

fn settings() -> SiteSettings {
    SiteSettings::default()
}

fn tell(site: &Site) {
    for problem in &site.loaded.problems {
        let file = problem.file.as_ref().map(|file| file.display().to_string()).unwrap_or_default();
        tracing::warn!(file, line = problem.line, "{}; {}", problem.message, problem.remedy);
    }
}

impl Flags {
    /// Reads the directory, or the live seed.
    pub(crate) fn load(&self) -> anyhow::Result<Report> {
        let settings = SiteSettings {
            state_dir: self.state_dir.clone(),
            namespace: self.namespace.clone(),
            expose_annotations: ExposeKeys::from_iter([self.expose_annotation.as_str()]),
            endpoint_networks: self.endpoint_networks.clone(),
            seed: self.seed.clone(),
            node_addresses: self.node_address.clone(),
        };
        let Some(directory) = &self.directory else {
            let site = self.load_live(&settings)?;
            let questionable = self.questionable(&site, None);
            return Ok(Report { site, is_live: true, questionable });
        };
        let read_as = self.read_as.map(|what| match what {
            ReadAsFlag::Directory => ReadAs::Directory,
            ReadAsFlag::Seed => ReadAs::Seed,
        });
        let site = Site::read(directory, read_as, &settings)?;
        let questionable = self.questionable(&site, Some(directory));
        Ok(Report { site, is_live: false, questionable })
    }

    fn load_live(&self, settings: &SiteSettings) -> anyhow::Result<Site> {
        let listed = list_live(self.kubeconfig.as_deref(), self.namespace.as_deref(), self.timeout)?;
        Ok(Site::of_seed(listed, settings))
    }

    /// For no object at all, every check succeeds: an error, because the flags are likely to be wrong.
    fn questionable(&self, site: &Site, directory: Option<&Path>) -> Vec<Finding> {
        let mut found = Vec::new();
        if directory.is_some() && site.loaded.files == 0 {
            let message =
                "no manifest is there: no file ends in .yaml, .yml or .json (hidden ones do not count)";
            let remedy = "name the directory that holds the manifests";
            let message = message.to_owned();
            found.push(Finding::of_question(Severity::Error, "no-manifest", directory, message, remedy));
        } else if let Some(namespace) = self.namespace.as_ref().filter(|_| !site.has_namespace) {
            let message = format!("no Service and no Cluster belongs to the namespace {namespace:?}");
            let remedy = "correct --namespace, or leave it out; that of a Cluster is cluster-NAME";
            found.push(Finding::of_question(Severity::Warning, "empty-namespace", None, message, remedy));
        }
        found
    }
}

impl Report {
    /// All problems, and where a gateway in the seed would differ from KKP's proxy.
    pub(crate) fn findings_and_differences(&self) -> Vec<Finding> {
        let loaded = &self.site.loaded;
        let differences = self.site.differences.iter();
        let differences = differences
            .map(|problem| Finding::of_object(problem, loaded.line_of(&problem.object, &problem.field)));
        let mut findings: Vec<Finding> = self.findings().into_iter().chain(differences).collect();
        findings.sort();
        findings
    }

    /// All problems, in the order of the list.
    pub(crate) fn findings(&self) -> Vec<Finding> {
        let loaded = &self.site.loaded;
        let manifest = loaded.problems.iter().map(Finding::of_manifest);
        let mut objects = self.site.pipeline.problems();
        objects.extend(Hosted::among(&self.site.originals).problems());
        let objects = objects
            .iter()
            .map(|problem| Finding::of_object(problem, loaded.line_of(&problem.object, &problem.field)));
        let mut findings: Vec<Finding> =
            self.questionable.iter().cloned().chain(manifest).chain(objects).collect();
        findings.sort();
        findings
    }
}
