//! `portico kubeconfig CLUSTER`: the way into a user cluster, by its present address.
//!
//! Address, CA and credentials are what [`portico_reach::admin`] finds. Only that is written: nothing changes
//! on the seed. With `--as` the credentials are a certificate for one person, which the cluster signs
//! ([`portico_reach::personal`]).

use std::fs;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail, ensure};
use clap::{ArgGroup, Args};
use portico_api::names::is_object_name;
use portico_pki::Kubeconfig;
use portico_pki::inventory::ADMIN_KUBECONFIG;
use portico_reach::admin::{NoSecret, of_cluster, of_secret};
use portico_reach::personal::sign_for_person;

use crate::args::client_of_person;
use crate::daemon;
use crate::outcome::{Outcome, print};

mod person;

use self::person::Person;

/// As many links as Linux follows.
const MOST_LINKS: usize = 40;

// `portico kubeconfig`.
#[derive(Debug, Args)]
pub(crate) struct Flags {
    /// Name of the Cluster
    #[arg(value_name = "CLUSTER", value_parser = label)]
    cluster: String,
    /// Write this file, readable by its owner alone, instead of standard output. A file that exists is only
    /// replaced if it is a kubeconfig of this cluster and of nothing else
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// How to reach the seed [default: as kubectl does: $KUBECONFIG, ~/.kube/config, or the pod's own]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Secret in the namespace of the cluster that holds the credentials, for example viewer-kubeconfig
    #[arg(long, value_name = "NAME", default_value = ADMIN_KUBECONFIG, value_parser = label)]
    secret: String,
    #[command(flatten)]
    personal: Person,
}

// The administrator of a user cluster: as the seed knows it, or by a kubeconfig of its own.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("which").required(true))]
pub(crate) struct AdminFlags {
    /// Name of the Cluster
    #[arg(value_name = "CLUSTER", group = "which", value_parser = label)]
    cluster: Option<String>,
    /// How to reach the seed [default: as kubectl does: $KUBECONFIG, ~/.kube/config, or the pod's own]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// The kubeconfig of an administrator of the cluster; the seed is not asked then
    #[arg(long, value_name = "FILE", group = "which", conflicts_with = "kubeconfig")]
    cluster_kubeconfig: Option<PathBuf>,
}

impl AdminFlags {
    /// The kubeconfig of the administrator.
    pub(crate) async fn read(&self) -> anyhow::Result<Kubeconfig> {
        match (&self.cluster_kubeconfig, &self.cluster) {
            (Some(path), _) => {
                let cannot = || format!("cannot use {}", path.display());
                Kubeconfig::parse(&fs::read_to_string(path).with_context(cannot)?).with_context(cannot)
            }
            (None, Some(name)) => {
                let seed = client_of_person(self.kubeconfig.as_deref()).await?;
                of_cluster(&seed, name).await
            }
            (None, None) => bail!("name a Cluster, or give --cluster-kubeconfig"),
        }
    }
}

/// Writes the kubeconfig.
pub(crate) fn run(flags: &Flags) -> anyhow::Result<Outcome> {
    let found = daemon::run(async {
        let client = client_of_person(flags.kubeconfig.as_deref()).await?;
        let admin = of_secret(&client, &flags.cluster, &flags.secret).await.map_err(name_another)?;
        match &flags.personal.user {
            Some(user) => {
                let Person { group, lifetime, .. } = &flags.personal;
                sign_for_person(admin, user, group.as_deref(), *lifetime).await
            }
            None => Ok(admin),
        }
    })?;
    match &flags.output {
        Some(path) => write(path, &found)?,
        None => print(&found.to_yaml())?,
    }
    Ok(Outcome::Done)
}

/// Says what to do about a Secret that is missing: only this verb can name another.
fn name_another(error: anyhow::Error) -> anyhow::Error {
    if error.is::<NoSecret>() {
        anyhow!("{error}; --secret names another that holds a kubeconfig")
    } else {
        error
    }
}

/// Replaces the file at once, or not at all. A file with other clusters in it is left alone.
fn write(path: &Path, kubeconfig: &Kubeconfig) -> anyhow::Result<()> {
    let cannot = || format!("cannot write {}", path.display());
    match fs::read_to_string(path) {
        Ok(text) => {
            let same = Kubeconfig::parse(&text).is_ok_and(|before| before.cluster == kubeconfig.cluster);
            ensure!(
                same,
                "{} exists and is no kubeconfig of cluster {} alone; name another file",
                path.display(),
                kubeconfig.cluster
            );
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error).with_context(cannot),
    }
    let path = &behind_links(path);
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // Readable by its owner alone from the first byte.
    let mut file = tempfile::NamedTempFile::new_in(folder).with_context(cannot)?;
    file.write_all(kubeconfig.to_yaml().as_bytes()).with_context(cannot)?;
    file.persist(path).with_context(cannot)?;
    Ok(())
}

/// The file that a link leads to: that is written, and not the link. It need not exist.
fn behind_links(path: &Path) -> PathBuf {
    let follow = |path: &PathBuf| {
        let target = fs::read_link(path).ok()?;
        Some(path.parent()?.join(target))
    };
    let paths = std::iter::successors(Some(path.to_owned()), follow);
    paths.take(MOST_LINKS + 1).last().unwrap_or_else(|| path.to_owned())
}

/// The name of an object, as it can stand in a path of the API.
pub(crate) fn label(text: &str) -> Result<String, String> {
    if is_object_name(text) {
        Ok(text.to_owned())
    } else {
        Err("give the name of one object, such as a or p4k2m7xzq9".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use portico_pki::Credential;

    use super::*;

    fn kubeconfig(cluster: &str, server: &str) -> Kubeconfig {
        let credential = Credential::Token("secret".to_owned());
        let (cluster, server, authority) = (cluster.to_owned(), server.to_owned(), "CA".to_owned());
        Kubeconfig { cluster, server, authority, credential }
    }

    #[test]
    fn a_file_is_replaced_if_it_is_of_this_cluster_and_of_nothing_else() {
        use std::os::unix::fs::PermissionsExt;

        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.kubeconfig");
        for server in ["https://old:1", "https://new:2"] {
            write(&path, &kubeconfig("a", server)).unwrap();
            let text = fs::read_to_string(&path).unwrap();
            assert_eq!(Kubeconfig::parse(&text).unwrap(), kubeconfig("a", server));
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        }
        for other in [kubeconfig("b", "https://b:1").to_yaml(), "contexts: []\n".to_owned()] {
            fs::write(&path, &other).unwrap();
            let error = write(&path, &kubeconfig("a", "https://a:1")).unwrap_err().to_string();
            assert!(error.ends_with("is no kubeconfig of cluster a alone; name another file"), "{error}");
            assert_eq!(fs::read_to_string(&path).unwrap(), other);
        }
        let link = dir.path().join("link");
        let behind = dir.path().join("behind");
        write(&behind, &kubeconfig("a", "https://old:1")).unwrap();
        std::os::unix::fs::symlink(&behind, &link).unwrap();
        write(&link, &kubeconfig("a", "https://new:2")).unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        let text = fs::read_to_string(&behind).unwrap();
        assert_eq!(Kubeconfig::parse(&text).unwrap().server, "https://new:2");
        assert_eq!(fs::metadata(&behind).unwrap().permissions().mode() & 0o777, 0o600);
        // A link need not lead to a file, and may lead to another link.
        fs::remove_file(&behind).unwrap();
        fs::create_dir(dir.path().join("folder")).unwrap();
        let first = dir.path().join("folder/first");
        std::os::unix::fs::symlink("../link", &first).unwrap();
        write(&first, &kubeconfig("a", "https://new:3")).unwrap();
        for link in [&first, &link] {
            assert!(fs::symlink_metadata(link).unwrap().is_symlink());
        }
        let text = fs::read_to_string(&behind).unwrap();
        assert_eq!(Kubeconfig::parse(&text).unwrap().server, "https://new:3");
        let astray = dir.path().join("astray");
        std::os::unix::fs::symlink("nowhere/a", &astray).unwrap();
        let error = format!("{:#}", write(&astray, &kubeconfig("a", "https://a:1")).unwrap_err());
        assert!(error.starts_with("cannot write ") && error.contains("/nowhere/"), "{error}");
        assert!(fs::symlink_metadata(&astray).unwrap().is_symlink());
        let nowhere = dir.path().join("nowhere/a");
        let error = write(&nowhere, &kubeconfig("a", "https://a:1")).unwrap_err().to_string();
        assert!(error.starts_with("cannot write ") && error.contains("nowhere/a"), "{error}");
    }

    #[test]
    fn what_is_no_name_never_becomes_a_path() {
        for bad in ["", "a/b", "..", "a?b", "A", "a b", "%2e"] {
            assert!(label(bad).is_err(), "{bad}");
        }
        assert_eq!(label("p4k2m7xzq9").unwrap(), "p4k2m7xzq9");
    }
}
