//! The static file of tokens: one a line, each for one cluster.
//!
//! ```text
//! # token,cluster
//! 3c5f0e...,abc
//! ```
//!
//! For manifests from a directory, where no API server can be asked. Tokens are kept and looked up by hash:
//! the time that a look-up takes tells nothing about any token.

use std::collections::HashMap;
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use arc_swap::ArcSwap;
use portico_api::names::Tenant;
use thiserror::Error;

use super::hash::{Hash, hash};

/// Largest file read: a hundred thousand tokens.
const MAX_FILE: u64 = 16 * 1024 * 1024;

/// The tokens of a file, and the clusters they are for.
#[derive(Debug)]
pub struct StaticTokens {
    path: PathBuf,
    table: ArcSwap<HashMap<Hash, Tenant>>,
    /// Hash of the file that `table` was made of.
    read: Mutex<Hash>,
}

/// Why a file of tokens cannot be used. The tokens in force, if there are any, stay.
#[derive(Debug, Error)]
pub enum TokensError {
    /// It cannot be read.
    #[error("reading {}: {source}; give a file this process may read", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// It is much too large.
    #[error("{}: larger than 16 MiB; is it the right file?", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
    },
    /// A line is not what it should be.
    #[error("{}:{line}: {problem}; write TOKEN,CLUSTER", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Which line, counted from one.
        line: usize,
        /// What is wrong with it. Never the token.
        problem: &'static str,
    },
    /// One token is there twice.
    #[error(
        "{}:{second}: the token of line {first} again; each token belongs to one cluster, once",
        path.display()
    )]
    Twice {
        /// The file.
        path: PathBuf,
        /// The line that has it first.
        first: usize,
        /// The line that has it again.
        second: usize,
    },
}

impl StaticTokens {
    /// Reads the file.
    pub fn load(path: PathBuf) -> Result<Self, TokensError> {
        let text = read(&path)?;
        let table = parse(&path, &text)?;
        Ok(Self { path, table: ArcSwap::from_pointee(table), read: Mutex::new(hash(&[text.as_bytes()])) })
    }

    /// Reads the file again. Returns true if it changed and its tokens are in force. On an error the old ones
    /// stay.
    pub fn reload(&self) -> Result<bool, TokensError> {
        let text = read(&self.path)?;
        let now = hash(&[text.as_bytes()]);
        let mut before = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        if *before == now {
            return Ok(false);
        }
        self.table.store(parse(&self.path, &text)?.into());
        *before = now;
        Ok(true)
    }

    /// Whether every user of this machine may read the secrets.
    pub fn is_readable_by_all(&self) -> bool {
        use std::os::unix::fs::PermissionsExt;
        fs::metadata(&self.path).is_ok_and(|metadata| metadata.permissions().mode() & 0o004 != 0)
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The cluster that a token, by its hash, is for.
    pub(super) fn owner(&self, hash: &Hash) -> Option<Tenant> {
        self.table.load().get(hash).cloned()
    }
}

fn read(path: &Path) -> Result<String, TokensError> {
    let failed = |source| TokensError::Read { path: path.to_owned(), source };
    let mut text = String::new();
    let file = fs::File::open(path).map_err(failed)?;
    file.take(MAX_FILE + 1).read_to_string(&mut text).map_err(failed)?;
    if text.len() as u64 > MAX_FILE { Err(TokensError::TooLarge { path: path.to_owned() }) } else { Ok(text) }
}

fn parse(path: &Path, text: &str) -> Result<HashMap<Hash, Tenant>, TokensError> {
    let mut lines: HashMap<Hash, (usize, Tenant)> = HashMap::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let number = index + 1;
        let wrong = |problem| TokensError::Line { path: path.to_owned(), line: number, problem };
        let (token, cluster) = line.rsplit_once(',').ok_or_else(|| wrong("there is no comma"))?;
        let (token, cluster) = (token.trim(), cluster.trim());
        if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(wrong("the token is empty, or has characters that no header carries"));
        }
        let tenant = Tenant::parse(cluster)
            .ok_or_else(|| wrong("behind the last comma stands no name of a cluster"))?;
        let hash = hash(&[token.as_bytes()]);
        if let Some((first, _)) = lines.get(&hash) {
            return Err(TokensError::Twice { path: path.to_owned(), first: *first, second: number });
        }
        lines.insert(hash, (number, tenant));
    }
    Ok(lines.into_iter().map(|(hash, (_, cluster))| (hash, cluster)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owners(text: &str, token: &str) -> Result<Option<String>, String> {
        let table = parse(Path::new("tokens"), text).map_err(|error| error.to_string())?;
        Ok(table.get(&hash(&[token.as_bytes()])).map(ToString::to_string))
    }

    #[test]
    fn each_line_gives_a_token_to_a_cluster() {
        let text = "# comment\n\n one,a \ntwo,with,commas , b\n";
        assert_eq!(owners(text, "one"), Ok(Some("a".to_owned())));
        assert_eq!(owners(text, "two,with,commas"), Ok(Some("b".to_owned())));
        assert_eq!(owners(text, "three"), Ok(None));
        assert_eq!(owners("", "one"), Ok(None), "a file without tokens lets nobody in, and is no mistake");
    }

    #[test]
    fn a_bad_line_is_named_without_its_token() {
        for (text, problem) in [
            ("secret", "tokens:1: there is no comma; write TOKEN,CLUSTER"),
            (
                "\n,a",
                "tokens:2: the token is empty, or has characters that no header carries; write TOKEN,CLUSTER",
            ),
            (
                "sec ret,a",
                "tokens:1: the token is empty, or has characters that no header carries; write TOKEN,CLUSTER",
            ),
            ("secret,A", "tokens:1: behind the last comma stands no name of a cluster; write TOKEN,CLUSTER"),
            (
                "secret,a\n#\nsecret,b",
                "tokens:3: the token of line 1 again; each token belongs to one cluster, once",
            ),
        ] {
            assert_eq!(owners(text, "secret"), Err(problem.to_owned()));
        }
    }

    #[test]
    fn a_broken_file_leaves_the_tokens_in_force() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens");
        fs::write(&path, "secret,a").unwrap();
        let tokens = StaticTokens::load(path.clone()).unwrap();
        assert!(!tokens.reload().unwrap());
        for broken in ["secret", "x,b\nx,b"] {
            fs::write(&path, broken).unwrap();
            assert!(tokens.reload().is_err());
            assert!(tokens.owner(&hash(&[b"secret"])).is_some());
        }
        fs::write(&path, "other,a").unwrap();
        assert!(tokens.reload().unwrap());
        assert!(tokens.owner(&hash(&[b"secret"])).is_none());
    }
}
