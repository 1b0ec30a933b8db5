//! Did you mean: the nearest of the words that would have been right.

use std::fmt;

/// A word that is none of those there are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownWord {
    kind: &'static str,
    word: String,
    known: Vec<String>,
}

impl std::error::Error for UnknownWord {}

impl UnknownWord {
    /// `word` is no `kind`; these are.
    pub fn new<'a>(kind: &'static str, word: &str, known: impl IntoIterator<Item = &'a str>) -> Self {
        Self { kind, word: word.to_owned(), known: known.into_iter().map(str::to_owned).collect() }
    }

    /// The known word that was probably meant.
    pub fn nearest(&self) -> Option<&str> {
        let word = self.word.to_lowercase();
        let distance = |known: &String| distance(&word, &known.to_lowercase());
        let nearest = self.known.iter().min_by_key(|known| distance(known))?;
        let close = word.chars().count().max(nearest.chars().count()) / 2;
        let begins = !word.is_empty() && nearest.to_lowercase().starts_with(&word);
        (begins || distance(nearest) <= close).then_some(nearest.as_str())
    }
}

impl fmt::Display for UnknownWord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, word, known } = self;
        write!(f, "{word:?} is no {kind}; there are {}", known.join(", "))?;
        match self.nearest() {
            Some(nearest) => write!(f, "; did you mean {nearest}?"),
            None => Ok(()),
        }
    }
}

/// How many letters must be inserted, removed or replaced to make one word of the other.
fn distance(one: &str, other: &str) -> usize {
    let other: Vec<char> = other.chars().collect();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (line, letter) in one.chars().enumerate() {
        let mut diagonal = line;
        row[0] = line + 1;
        for (column, &opposite) in other.iter().enumerate() {
            let replaced = diagonal + usize::from(letter != opposite);
            diagonal = row[column + 1];
            row[column + 1] = replaced.min(row[column] + 1).min(diagonal + 1);
        }
    }
    row.last().copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_with_a_slip_finds_the_one_that_was_meant() {
        let nearest =
            |word| UnknownWord::new("role", word, ["master", "worker", "seed"]).nearest().map(String::from);
        assert_eq!(nearest("wroker").as_deref(), Some("worker"));
        assert_eq!(nearest("WORKERS").as_deref(), Some("worker"));
        assert_eq!(nearest("se").as_deref(), Some("seed"));
        assert_eq!(nearest("gateway"), None);
        assert_eq!(nearest(""), None);
    }

    #[test]
    fn all_words_are_named() {
        let text = UnknownWord::new("cni", "cilum", ["Canal", "Cilium"]).to_string();
        assert_eq!(text, "\"cilum\" is no cni; there are Canal, Cilium; did you mean Cilium?");
    }
}
