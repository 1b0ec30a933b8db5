//! `portico control-plane`: what the control plane of a Cluster is made of, before it is made. Nothing is
//! written, and no key is made.

use anyhow::{anyhow, bail, ensure};
use clap::{Args, ValueEnum};
use portico_admin::table;
use portico_api::annotations::LAYOUT;
use portico_api::cluster::Cluster;
use portico_api::hosting::Layout;
use portico_api::problem::{Problem, Severity};
use portico_hosting::{ControlPlane, Digests, plan};
use portico_sync::Site;
use serde_json::Value;

use crate::finding::Finding;
use crate::hosted::{Hosted, Installation};
use crate::offline::Source;
use crate::outcome::{Outcome, print};

// `portico control-plane`.
#[derive(Debug, Args)]
pub(crate) struct Flags {
    /// Name of the Cluster; without it, all that have a layout
    #[arg(value_name = "CLUSTER")]
    cluster: Option<String>,
    #[command(flatten)]
    source: Source,
    /// Print this layout, whatever the annotation of the Cluster says
    #[arg(long, value_name = "LAYOUT", value_parser = layout)]
    layout: Option<Layout>,
    /// The image of Portico, for the Konnectivity server
    #[arg(long, value_name = "IMAGE", default_value = "localhost/portico:dev")]
    image: String,
    #[command(flatten)]
    installation: Installation,
    /// How the answer is printed
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    output: Format,
}

/// How a control plane is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// For people: objects and Secrets, one a line
    Table,
    /// The objects, for kubectl and for review; Secrets are named in comments
    Yaml,
    /// For programs: objects, and Secrets without what they hold
    Json,
}

/// Prints the control planes. The answer is "no" if one cannot be made as its Cluster is written.
pub(crate) fn run(flags: &Flags) -> anyhow::Result<Outcome> {
    let site = flags.source.load()?;
    let site = site.ok_or_else(|| anyhow!("name the objects: --manifests DIR, or --kubeconfig FILE"))?;
    let hosted = Hosted::among(&site.originals);
    let settings = flags.installation.settings(&flags.image);
    let (mut planes, mut refused) = (Vec::new(), false);
    for cluster in flags.chosen(&hosted)? {
        let cluster = flags.with_layout(cluster);
        let planned = hosted.scope(&cluster).and_then(|scope| plan(&scope, &settings, &Digests::new()));
        match planned {
            Ok(plane) => {
                tell(&site, &plane.warnings);
                planes.push(plane);
            }
            Err(problems) => {
                tell(&site, &problems);
                refused = true;
            }
        }
    }
    print(&match flags.output {
        Format::Table => planes.iter().map(as_table).collect::<Vec<_>>().join("\n"),
        Format::Yaml => planes.iter().map(as_yaml).collect(),
        Format::Json => serde_json::to_string_pretty(&planes)? + "\n",
    })?;
    Ok(if refused { Outcome::No } else { Outcome::Done })
}

impl Flags {
    /// The Clusters that are asked for.
    fn chosen<'a>(&self, hosted: &Hosted<'a>) -> anyhow::Result<Vec<&'a Cluster>> {
        let Some(name) = &self.cluster else {
            let asks = |cluster: &&&Cluster| self.layout.is_some() || cluster.has_layout();
            let chosen: Vec<_> = hosted.clusters.iter().filter(asks).copied().collect();
            ensure!(
                !chosen.is_empty(),
                "no Cluster has the annotation {LAYOUT}: Portico hosts none of them; --layout prints what \
                 one would be made of"
            );
            return Ok(chosen);
        };
        match hosted.clusters.iter().find(|cluster| *cluster.metadata.name == **name) {
            Some(cluster) => Ok(vec![cluster]),
            None => {
                let names: Vec<&str> =
                    hosted.clusters.iter().map(|cluster| &*cluster.metadata.name).collect();
                bail!("there is no Cluster {name} (there are: {})", names.join(", "))
            }
        }
    }

    /// The Cluster with the layout that is asked for.
    fn with_layout(&self, cluster: &Cluster) -> Cluster {
        let mut cluster = cluster.clone();
        if let Some(layout) = self.layout {
            cluster.metadata.annotations.insert(LAYOUT.into(), layout.name().into());
        }
        cluster
    }
}

/// Standard output is for the objects: what is wrong goes to standard error, with its file and line.
fn tell(site: &Site, problems: &[Problem]) {
    for problem in problems {
        let location = site.loaded.line_of(&problem.object, &problem.field);
        let line = Finding::of_object(problem, location).to_line();
        match problem.severity {
            Severity::Error => tracing::error!("{}", line.trim_end()),
            Severity::Warning => tracing::warn!("{}", line.trim_end()),
        }
    }
}

fn as_table(plane: &ControlPlane) -> String {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let objects: Vec<[String; 3]> = plane
        .objects
        .iter()
        .map(|object| [text(&object["kind"]), text(&object["metadata"]["name"]), detail(object)])
        .collect();
    let secrets: Vec<[String; 3]> = plane
        .secrets
        .iter()
        .map(|secret| [secret.name.clone(), secret.keys.join(", "), secret.holds.clone()])
        .collect();
    format!(
        "CLUSTER {} (Kubernetes {}, {})\n{}\n{}",
        plane.cluster,
        plane.version,
        plane.layout,
        table::render(["KIND", "NAME", "HOLDS"], &objects),
        table::render(["SECRET", "KEYS", "HOLDS"], &secrets)
    )
}

/// What an object holds, in a few words.
fn detail(object: &Value) -> String {
    let spec = &object["spec"];
    let names = |field: &str| {
        let containers = spec["template"]["spec"][field].as_array().into_iter().flatten();
        // A container that only comes before a program is none itself.
        let stays = |one: &&Value| field == "containers" || one["restartPolicy"] == "Always";
        containers.filter(stays).filter_map(|container| container["name"].as_str()).collect::<Vec<_>>()
    };
    let storage = |claim: &Value| claim["resources"]["requests"]["storage"].as_str().map(str::to_owned);
    if let Some(replicas) = spec["replicas"].as_u64() {
        let programs = [names("initContainers"), names("containers")].concat().join(", ");
        let volume = storage(&spec["volumeClaimTemplates"][0]["spec"]);
        let volume = volume.map(|size| format!("; a volume of {size} each")).unwrap_or_default();
        return format!("{replicas} × {programs}{volume}");
    }
    if let Some(data) = object["data"].as_object() {
        return data.keys().cloned().collect::<Vec<_>>().join(", ");
    }
    storage(spec).map(|size| format!("a volume of {size}")).unwrap_or_default()
}

/// What kubectl applies, with the Secrets in comments: an object without its data could replace one that has.
fn as_yaml(plane: &ControlPlane) -> String {
    let mut text = format!(
        "# Cluster {}: Kubernetes {}, {}. Its pods wait for Secrets, which are not among these objects:\n",
        plane.cluster, plane.version, plane.layout
    );
    for secret in &plane.secrets {
        text.push_str(&format!("#   {} ({}): {}\n", secret.name, secret.keys.join(", "), secret.holds));
    }
    for object in &plane.objects {
        text.push_str("---\n");
        text.push_str(&portico_yaml::write(object));
    }
    text
}

fn layout(text: &str) -> Result<Layout, String> {
    text.parse().map_err(|_| "write compact or dedicated".to_owned())
}
