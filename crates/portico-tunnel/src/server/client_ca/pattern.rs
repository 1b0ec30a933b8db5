//! A file of CAs as an operator names it, and the tenants that these CAs may name: `[TENANT=]FILE`.

use std::convert::Infallible;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use portico_api::names::Tenant;
use thiserror::Error;

/// CA certificates of tunnel clients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientCaFile {
    /// The PEM file.
    pub path: PathBuf,
    /// The tenants that these CAs may name; `None` for any.
    pub tenants: Option<TenantPattern>,
}

/// Some tenants: a name, or names with a `*` that stands for any characters but `:`. So `*` is every cluster
/// and no namespace, and `namespace:*` the other way round.
#[derive(Clone, PartialEq, Eq)]
pub struct TenantPattern(Box<str>);

/// Why a text names no file of CAs.
#[derive(Debug, Error)]
pub enum ClientCaFileError {
    /// No file stands there.
    #[error("{0:?} names no file; write FILE, or CLUSTER=FILE")]
    NoFile(String),
    /// More than one star.
    #[error("{0:?} has more than one *; give one --tunnel-client-ca for each pattern")]
    Stars(String),
}

impl TenantPattern {
    /// Whether it stands for this tenant.
    #[must_use]
    pub fn matches(&self, tenant: &Tenant) -> bool {
        let Some((start, end)) = self.0.split_once('*') else { return *self.0 == *tenant.as_str() };
        let rest = tenant.as_str().strip_prefix(start).and_then(|rest| rest.strip_suffix(end));
        rest.is_some_and(|any| !any.contains(':'))
    }
}

impl From<PathBuf> for ClientCaFile {
    fn from(path: PathBuf) -> Self {
        Self { path, tenants: None }
    }
}

impl FromStr for ClientCaFile {
    type Err = ClientCaFileError;

    /// The text before the first `=` is a pattern if its characters are those of one. A file of such a name
    /// is written with its folder: `./a=b`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let allowed = |byte: u8| {
            byte.is_ascii_lowercase() || byte.is_ascii_digit() || [b'-', b'*', b':'].contains(&byte)
        };
        let (tenants, path) = match text.split_once('=') {
            Some((pattern, path)) if pattern.bytes().all(allowed) && !pattern.is_empty() => {
                if pattern.matches('*').count() > 1 {
                    return Err(ClientCaFileError::Stars(pattern.to_owned()));
                }
                (Some(TenantPattern(pattern.into())), path)
            }
            _ => (None, text),
        };
        if path.is_empty() {
            return Err(ClientCaFileError::NoFile(text.to_owned()));
        }
        let Ok(path) = PathBuf::from_str(path) as Result<_, Infallible>;
        Ok(Self { path, tenants })
    }
}

impl fmt::Display for TenantPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for TenantPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> (Option<String>, String) {
        let ClientCaFile { path, tenants } = text.parse().unwrap();
        (tenants.map(|tenants| tenants.to_string()), path.display().to_string())
    }

    #[test]
    fn a_file_may_be_bound_to_a_tenant_or_a_pattern() {
        for (text, pattern, path) in [
            ("ca.crt", None, "ca.crt"),
            ("/etc/a=b/ca.crt", None, "/etc/a=b/ca.crt"),
            ("./a=b", None, "./a=b"),
            ("CA=b", None, "CA=b"),
            ("abc=/etc/ca.crt", Some("abc"), "/etc/ca.crt"),
            ("prod-*=ca=1.crt", Some("prod-*"), "ca=1.crt"),
            ("namespace:mail=ca.crt", Some("namespace:mail"), "ca.crt"),
        ] {
            assert_eq!(parsed(text), (pattern.map(str::to_owned), path.to_owned()), "{text}");
        }
        for wrong in ["", "abc=", "a*b*=ca.crt"] {
            assert!(wrong.parse::<ClientCaFile>().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_star_stands_for_clusters_or_for_namespaces_and_never_for_both() {
        let matches = |pattern: &str, namespace: &str| {
            let file: ClientCaFile = format!("{pattern}=ca.crt").parse().unwrap();
            file.tenants.unwrap().matches(&Tenant::of_namespace(namespace))
        };
        for (pattern, namespace) in [
            ("abc", "cluster-abc"),
            ("*", "cluster-abc"),
            ("a*", "cluster-a"),
            ("a*c", "cluster-abc"),
            ("namespace:abc", "abc"),
            ("namespace:*", "abc"),
        ] {
            assert!(matches(pattern, namespace), "{pattern} {namespace}");
        }
        for (pattern, namespace) in [
            ("abc", "abc"),
            ("abc", "cluster-abcd"),
            ("*", "abc"),
            ("n*", "abc"),
            ("*abc", "abc"),
            ("ab*bc", "cluster-abc"),
            ("namespace:*", "cluster-abc"),
            ("namespace:abc", "cluster-abc"),
        ] {
            assert!(!matches(pattern, namespace), "{pattern} {namespace}");
        }
    }
}
