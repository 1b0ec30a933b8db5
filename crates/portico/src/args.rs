//! The values of flags for which a number or a path is not enough: addresses that may be `off`, durations as
//! people write them, sizes, PROXY protocol by listener.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;
use std::{env, fmt};

use anyhow::{bail, ensure};
use ipnet::IpNet;
use portico_api::meta::ObjectKey;
use portico_api::names::is_object_name;
use portico_api::network::Network;
use portico_gateway::ProxyMode;
use portico_kube::{Client, ClientError, client_of};

/// The word that turns a listener or a limit off.
const OFF: &str = "off";

/// Where a listener binds, or `off`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Listen(pub(crate) Option<SocketAddr>);

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == OFF {
            return Ok(Self(None));
        }
        let wrong = |_| "give an address and port such as 0.0.0.0:6443 or [::]:6443, or off".to_owned();
        text.parse().map(|address| Self(Some(address))).map_err(wrong)
    }
}

/// A limit in time, or `off`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limit(pub(crate) Option<Duration>);

impl FromStr for Limit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == OFF {
            return Ok(Self(None));
        }
        positive_duration(text).map(|limit| Self(Some(limit))).map_err(|error| format!("{error}, or off"))
    }
}

/// A port, or `off`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Port(pub(crate) Option<u16>);

impl FromStr for Port {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == OFF {
            return Ok(Self(None));
        }
        let port = text.parse().ok().filter(|&port: &u16| port != 0);
        port.map(|port| Self(Some(port))).ok_or_else(|| "give a port from 1 to 65535, or off".to_owned())
    }
}

/// A Service by `NAMESPACE/NAME`, which may become part of a path of the API.
pub(crate) fn object_key(text: &str) -> Result<ObjectKey, String> {
    match text.split('/').collect::<Vec<_>>()[..] {
        [namespace, name] if is_object_name(namespace) && is_object_name(name) => {
            Ok(ObjectKey::new(namespace, name))
        }
        _ => Err("give NAMESPACE/NAME, such as portico/portico".to_owned()),
    }
}

/// A network, or an address.
pub(crate) fn network(text: &str) -> Result<IpNet, String> {
    text.parse::<Network>().map(IpNet::from).map_err(|error| format!("{error}; write 10.0.0.0/8 or 10.0.0.1"))
}

/// The key of an annotation: `prefix/name` or `name`, as Kubernetes has them.
pub(crate) fn annotation_key(text: &str) -> Result<String, String> {
    let (prefix, name) = text.split_once('/').map_or((None, text), |(prefix, name)| (Some(prefix), name));
    let is_word = |part: &str| {
        let ends = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
        let bytes = part.as_bytes();
        ends(bytes.first())
            && ends(bytes.last())
            && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(byte))
    };
    if is_word(name) && prefix.is_none_or(is_word) {
        Ok(text.to_owned())
    } else {
        Err("give the key of an annotation, such as nodeport-proxy.k8s.io/expose".to_owned())
    }
}

/// A duration as people write it: `500ms`, `5s`, `1m 30s`, `1h`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    const WANTED: &str = "give a duration such as 500ms, 5s, 1m30s or 1h";
    let parsed: jiff::SignedDuration = text.parse().map_err(|_| WANTED.to_owned())?;
    Duration::try_from(parsed).map_err(|_| format!("{WANTED}, not below zero"))
}

/// A [`duration`] above zero, for waits that would otherwise never succeed.
pub(crate) fn positive_duration(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        Duration::ZERO => Err("give a duration above zero, such as 5s".to_owned()),
        duration => Ok(duration),
    }
}

/// The least that a [`size`] may be: windows of some streams, without which nothing goes well.
const LEAST: usize = 4 << 20;

/// Bytes for a whole process, as [`bytes`] reads them.
pub(crate) fn size(text: &str) -> Result<usize, String> {
    let size = bytes(text).filter(|size| *size >= LEAST);
    size.ok_or_else(|| "give a size such as 64Mi, 4Mi or more".to_owned())
}

/// Bytes as Kubernetes writes them: `128Mi`, `1Gi`, or a plain number.
pub(crate) fn bytes(text: &str) -> Option<usize> {
    let units = [("Ki", 10), ("Mi", 20), ("Gi", 30)];
    let (digits, shift) = units
        .into_iter()
        .find_map(|(unit, shift)| text.strip_suffix(unit).map(|digits| (digits, shift)))
        .unwrap_or((text, 0));
    digits.parse().ok().and_then(|number: usize| number.checked_mul(1 << shift))
}

/// The kinds of listener that PROXY protocol can be set for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ListenerKind {
    /// `--sni-listen`.
    Sni,
    /// `--tunnel-listen`.
    Tunnel,
    /// Every NodePort listener.
    NodePort,
}

/// The value of `--proxy-protocol`: `LISTENER=off|optional|required`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ProxySetting {
    pub(crate) listener: ListenerKind,
    pub(crate) mode: ProxyMode,
}

impl FromStr for ProxySetting {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (listener, mode) = text
            .split_once('=')
            .ok_or("give LISTENER=MODE, such as sni=required; LISTENER is sni, tunnel or node-port")?;
        let listener = match listener {
            "sni" => ListenerKind::Sni,
            "tunnel" => ListenerKind::Tunnel,
            "node-port" => ListenerKind::NodePort,
            other => return Err(format!("{other:?} is no listener; give sni, tunnel or node-port")),
        };
        let mode = match mode {
            OFF => ProxyMode::Off,
            "optional" => ProxyMode::Optional,
            "required" => ProxyMode::Required,
            other => return Err(format!("{other:?} is no mode; give off, optional or required")),
        };
        Ok(Self { listener, mode })
    }
}

impl fmt::Display for ListenerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sni => "sni",
            Self::Tunnel => "tunnel",
            Self::NodePort => "node-port",
        })
    }
}

/// The way to the seed of a person, by the kubeconfigs that kubectl would choose. They are the named one,
/// those of `$KUBECONFIG`, or that of the home folder. Without any it is the service account of the pod.
///
/// `$KUBECONFIG` that names no file is an error: another seed would be taken instead, without a word.
pub(crate) async fn client_of_person(named: Option<&Path>) -> anyhow::Result<Client> {
    let kubeconfigs = kubeconfig_of(named, env::var_os("KUBECONFIG"), env::home_dir())?;
    match client_of(&kubeconfigs).await {
        Err(ClientError::NotInCluster(_)) => bail!(
            "nothing says how to reach the seed: name a kubeconfig by --kubeconfig or $KUBECONFIG. There is \
             no ~/.kube/config, and this is no pod with a service account"
        ),
        client => Ok(client?),
    }
}

/// Whether a file is there, or it cannot be told. To read that one then says why.
fn may_exist(path: &Path) -> bool {
    !matches!(path.try_exists(), Ok(false))
}

fn kubeconfig_of(
    named: Option<&Path>,
    listed: Option<OsString>,
    home: Option<PathBuf>,
) -> anyhow::Result<Vec<PathBuf>> {
    if let Some(path) = named {
        return Ok(vec![path.to_owned()]);
    }
    let Some(listed) = listed.filter(|listed| !listed.is_empty()) else {
        let home = home.map(|home| home.join(".kube/config"));
        return Ok(home.filter(|path| may_exist(path)).into_iter().collect());
    };
    let files: Vec<_> = env::split_paths(&listed).filter(|path| may_exist(path)).collect();
    ensure!(
        !files.is_empty(),
        "$KUBECONFIG is {}, and no such file exists; correct or unset it, or name a file by --kubeconfig",
        listed.display()
    );
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_as_people_write_them() {
        for (text, millis) in
            [("500ms", 500), ("5s", 5_000), ("1m30s", 90_000), ("1m 30s", 90_000), ("1h", 3_600_000)]
        {
            assert_eq!(duration(text), Ok(Duration::from_millis(millis)), "{text:?}");
        }
        for text in ["", "5", "s", "-5s", "5 s s", "five"] {
            assert!(duration(text).is_err(), "{text:?}");
        }
        assert!(positive_duration("0s").is_err());
    }

    #[test]
    fn sizes_are_read_as_kubernetes_writes_them() {
        for (text, bytes) in
            [("64Mi", 64 << 20), ("1Gi", 1 << 30), ("8192Ki", 8 << 20), ("5000000", 5_000_000)]
        {
            assert_eq!(size(text), Ok(bytes), "{text:?}");
        }
        for text in ["", "Mi", "64M", "64 Mi", "-1Mi", "3Mi", "17179869184Gi", "64"] {
            assert!(size(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn off_turns_a_listener_or_a_limit_off() {
        assert_eq!("off".parse(), Ok(Listen(None)));
        assert_eq!("off".parse(), Ok(Limit(None)));
        assert_eq!("[::]:6443".parse::<Listen>().unwrap().0, Some("[::]:6443".parse().unwrap()));
        assert!("6443".parse::<Listen>().is_err());
    }

    #[test]
    fn a_service_has_a_namespace_and_a_name() {
        assert_eq!(object_key("portico/front"), Ok(ObjectKey::new("portico", "front")));
        for text in ["front", "/front", "portico/", "a/b/c", "", "../front", "a?b/front", "a/%2e"] {
            assert!(object_key(text).is_err(), "{text:?}");
        }
        assert_eq!("off".parse(), Ok(Port(None)));
        assert!("0".parse::<Port>().is_err());
    }

    #[test]
    fn an_annotation_has_a_key_that_kubernetes_would_accept() {
        for text in ["nodeport-proxy.k8s.io/expose", "expose", "a/b_c"] {
            assert_eq!(annotation_key(text), Ok(text.to_owned()));
        }
        for text in ["", "/", "a/", "/b", "a/b/c", "a b", "-a", "a/b."] {
            assert!(annotation_key(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn proxy_protocol_is_set_listener_by_listener() {
        let setting: ProxySetting = "node-port=required".parse().unwrap();
        assert_eq!(setting, ProxySetting { listener: ListenerKind::NodePort, mode: ProxyMode::Required });
        for text in ["sni", "sni=on", "admin=optional", "=off"] {
            assert!(text.parse::<ProxySetting>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_kubeconfig_is_chosen_as_kubectl_does_and_a_missing_one_leads_nowhere_else() {
        let folder = tempfile::tempdir().unwrap();
        let home = folder.path().to_owned();
        let (config, other, missing) = (home.join(".kube/config"), home.join("other"), home.join("missing"));
        std::fs::create_dir(home.join(".kube")).unwrap();
        std::fs::write(&other, "").unwrap();
        let of = |named: Option<&Path>, listed: &[&PathBuf]| {
            kubeconfig_of(named, Some(env::join_paths(listed).unwrap()), Some(home.clone()))
        };
        assert_eq!(of(None, &[]).unwrap(), [] as [PathBuf; 0], "the pod's own");
        std::fs::write(&config, "").unwrap();
        assert_eq!(of(None, &[]).unwrap(), [&*config]);
        assert_eq!(kubeconfig_of(None, None, Some(home.clone())).unwrap(), [&*config]);
        assert_eq!(of(None, &[&missing, &other, &config]).unwrap(), [&*other, &*config]);
        let error = of(None, &[&missing]).unwrap_err().to_string();
        assert!(error.starts_with("$KUBECONFIG is ") && error.contains("/missing, and no such"), "{error}");
        assert_eq!(of(Some(&other), &[&missing]).unwrap(), [&*other]);
    }
}
