//! The static file of tokens: one a line, each for one cluster.
//!
//! ```text
//! # token,cluster
//! 3c5f0e...,abc
//! ```
//!
//! For manifests from a directory, where no API server can be asked. Tokens are kept and looked up by hash:
//! the time that a look-up takes tells nothing about any token.
//!
//! A file may be read while it is written. So its last line must end: the name of a cluster could be half of
//! another's. A token that is gone stays in force until it has been missing for [`REMOVAL_DELAY`].

use std::collections::HashMap;
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use portico_api::names::Tenant;
use thiserror::Error;
use tokio::time::Instant;

use super::hash::{Hash, hash};

/// Largest file read: a hundred thousand tokens.
const MAX_FILE: u64 = 16 * 1024 * 1024;

/// How long a token must have been missing from the file before its streams are cut: longer than a file takes
/// to be written.
const REMOVAL_DELAY: Duration = Duration::from_secs(1);

/// The tokens of a file, and the clusters they are for.
#[derive(Debug)]
pub struct StaticTokens {
    path: PathBuf,
    /// The tokens of the file, and those in `missing`.
    table: ArcSwap<Table>,
    read: Mutex<FileState>,
}

/// The cluster of each token, by the hash of the token.
type Table = HashMap<Hash, Tenant>;

#[derive(Debug)]
struct FileState {
    /// Hash of the file as it was read last.
    content: Hash,
    /// Since when tokens in force have been missing from it.
    missing: HashMap<Hash, Instant>,
}

/// Why a file of tokens cannot be used. The tokens in force, if there are any, stay.
#[derive(Debug, Error)]
pub enum TokensError {
    /// It cannot be read.
    #[error("reading {}: {source}; give a file this process may read", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// It is much too large.
    #[error("{}: larger than 16 MiB; is it the right file?", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
    },
    /// It is no text.
    #[error("{}: not UTF-8; write TOKEN,CLUSTER in each line", path.display())]
    NoText {
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
    /// The last line does not end.
    #[error(
        "{}: its last line has no end, as if it were half written; end each line with a newline",
        path.display()
    )]
    Cut {
        /// The file.
        path: PathBuf,
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
        let read = FileState { content: hash(&[text.as_bytes()]), missing: HashMap::new() };
        Ok(Self { path, table: ArcSwap::from_pointee(table), read: Mutex::new(read) })
    }

    /// Reads the file again. Returns true if other tokens are in force. New tokens count at once. A removed
    /// token stays in force until it has been missing for `REMOVAL_DELAY`. Until then
    /// [`has_removed_all`](Self::has_removed_all) is false, and the caller must reload again. On an error
    /// those tokens stay that the file had when it could be used last. If a removed token ends by that call,
    /// the next one returns the error.
    pub fn reload(&self) -> Result<bool, TokensError> {
        let mut read = self.read();
        let found = self.read_if_changed(read.content);
        if read.missing.is_empty() && !matches!(found, Ok(Some(_))) {
            return found.map(|_| false);
        }
        let (before, now) = (self.table.load(), Instant::now());
        let (found, unusable) = match found {
            Ok(found) => (found, None),
            Err(error) => (None, Some(error)),
        };
        let mut table = match found {
            Some((content, table)) => {
                read.content = content;
                table
            }
            // What the file had when it could be used last.
            None => {
                let in_file = before.iter().filter(|(hash, _)| !read.missing.contains_key(*hash));
                in_file.map(|(hash, tenant)| (*hash, tenant.clone())).collect()
            }
        };
        let missing = before.iter().filter(|(hash, _)| !table.contains_key(*hash)).filter_map(|(hash, _)| {
            let since = read.missing.get(hash).copied().unwrap_or(now);
            (now.duration_since(since) < REMOVAL_DELAY).then_some((*hash, since))
        });
        let missing: HashMap<_, _> = missing.collect();
        let kept = missing.keys().filter_map(|hash| Some((*hash, before.get(hash)?.clone())));
        table.extend(kept.collect::<Vec<_>>());
        read.missing = missing;
        if table == **before {
            return unusable.map_or(Ok(false), Err);
        }
        self.table.store(table.into());
        Ok(true)
    }

    /// The tokens in the file, if it is another than the one with the hash `content`, and its own hash.
    fn read_if_changed(&self, content: Hash) -> Result<Option<(Hash, Table)>, TokensError> {
        let text = read(&self.path)?;
        let now = hash(&[text.as_bytes()]);
        if now == content { Ok(None) } else { Ok(Some((now, parse(&self.path, &text)?))) }
    }

    /// Whether every token that is gone from the file is out of force.
    pub fn has_removed_all(&self) -> bool {
        self.read().missing.is_empty()
    }

    fn read(&self) -> MutexGuard<'_, FileState> {
        // Nothing in here can be left half done by a panic elsewhere.
        self.read.lock().unwrap_or_else(PoisonError::into_inner)
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
    let mut bytes = Vec::new();
    let file = fs::File::open(path).map_err(failed)?;
    file.take(MAX_FILE + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > MAX_FILE {
        return Err(TokensError::TooLarge { path: path.to_owned() });
    }
    String::from_utf8(bytes).map_err(|_| TokensError::NoText { path: path.to_owned() })
}

fn parse(path: &Path, text: &str) -> Result<Table, TokensError> {
    if !text.is_empty() && !text.ends_with('\n') {
        return Err(TokensError::Cut { path: path.to_owned() });
    }
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
    use tokio::time::advance;

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
    fn a_file_that_is_no_text_is_not_said_to_be_one_that_may_not_be_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens");
        fs::write(&path, b"secret\xff,a\n").unwrap();
        let error = StaticTokens::load(path.clone()).unwrap_err().to_string();
        assert_eq!(error, format!("{}: not UTF-8; write TOKEN,CLUSTER in each line", path.display()));
    }

    #[test]
    fn a_bad_line_is_named_without_its_token() {
        for (text, problem) in [
            ("secret\n", "tokens:1: there is no comma; write TOKEN,CLUSTER"),
            (
                "\n,a\n",
                "tokens:2: the token is empty, or has characters that no header carries; write TOKEN,CLUSTER",
            ),
            (
                "sec ret,a\n",
                "tokens:1: the token is empty, or has characters that no header carries; write TOKEN,CLUSTER",
            ),
            (
                "secret,A\n",
                "tokens:1: behind the last comma stands no name of a cluster; write TOKEN,CLUSTER",
            ),
            (
                "secret,a\n#\nsecret,b\n",
                "tokens:3: the token of line 1 again; each token belongs to one cluster, once",
            ),
            (
                "secret,ab\nother,a",
                "tokens: its last line has no end, as if it were half written; end each line with a newline",
            ),
        ] {
            assert_eq!(owners(text, "secret"), Err(problem.to_owned()));
        }
    }

    #[test]
    fn a_broken_file_leaves_the_tokens_in_force() {
        let file = File::new("secret,a\n");
        assert!(!file.tokens.reload().unwrap());
        for broken in ["secret\n", "x,b\nx,b\n", "x,b"] {
            file.write(broken);
            assert!(file.tokens.reload().is_err());
            assert!(file.opens("secret"));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_token_that_is_gone_counts_when_a_second_look_misses_it() {
        let file = File::new("secret,a\nstays,b\n");
        file.write("stays,b\nnew,a\n");
        assert!(file.tokens.reload().unwrap() && file.opens("new"), "a new one counts at once");
        assert!(file.opens("secret") && !file.tokens.has_removed_all());
        advance(REMOVAL_DELAY / 2).await;
        assert!(!file.tokens.reload().unwrap() && file.opens("secret"));
        advance(REMOVAL_DELAY / 2).await;
        assert!(file.tokens.reload().unwrap() && !file.opens("secret") && file.tokens.has_removed_all());
        assert!(file.opens("stays"));
        assert!(!file.tokens.reload().unwrap());
    }

    #[tokio::test(start_paused = true)]
    async fn a_token_that_is_gone_counts_no_more_although_the_file_is_broken_since() {
        let file = File::new("secret,a\nstays,b\n");
        file.write("stays,b\n");
        assert!(!file.tokens.reload().unwrap());
        file.write("stays,b");
        assert!(file.tokens.reload().is_err() && file.opens("secret"));
        advance(REMOVAL_DELAY).await;
        assert!(file.tokens.reload().unwrap() && !file.opens("secret") && file.tokens.has_removed_all());
        assert!(file.tokens.reload().is_err() && file.opens("stays"));
        file.write("secret,a\nstays,b\n");
        assert!(file.tokens.reload().unwrap() && file.opens("secret"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_file_that_is_read_at_every_byte_of_its_writing_revokes_nothing() {
        let text = "# tokens\nsecret,a\nother,ab\n";
        let file = File::new(text);
        for _ in 0..3 {
            for end in 0..=text.len() {
                file.write(&text[..end]);
                let _half_written = file.tokens.reload();
                assert!(file.opens("secret") && file.opens("other"), "cut at {end}");
                assert_eq!(file.owner("other").as_deref(), Some("ab"), "cut at {end}");
            }
            assert!(file.tokens.has_removed_all());
            advance(REMOVAL_DELAY).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_token_that_is_given_to_another_cluster_is_so_at_once() {
        let file = File::new("secret,a\n");
        file.write("secret,b\n");
        assert!(file.tokens.reload().unwrap());
        assert_eq!(file.owner("secret").as_deref(), Some("b"));
    }

    /// A file of tokens, and what was read of it.
    struct File {
        _folder: tempfile::TempDir,
        tokens: StaticTokens,
    }

    impl File {
        fn new(text: &str) -> Self {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("tokens");
            fs::write(&path, text).unwrap();
            Self { _folder: folder, tokens: StaticTokens::load(path).unwrap() }
        }

        fn write(&self, text: &str) {
            fs::write(self.tokens.path(), text).unwrap();
        }

        fn owner(&self, token: &str) -> Option<String> {
            self.tokens.owner(&hash(&[token.as_bytes()])).map(|tenant| tenant.to_string())
        }

        fn opens(&self, token: &str) -> bool {
            self.owner(token).is_some()
        }
    }
}
