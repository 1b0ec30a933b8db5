//! Makes the words of others fit for logs, conditions and Events. Proxies, certificates, API servers and
//! names of files may hold anything.

use rustls_pki_types::pem;

/// The most characters of [`printable`].
const LONGEST: usize = 500;

/// The longest label of a PEM section that [`pem_problem`] shows.
const LONGEST_LABEL: usize = 32;

/// Whether a terminal obeys a character and does not show it. Such are control characters, and those that
/// break a line or turn its direction (UAX 14, UAX 9).
#[must_use]
pub fn is_obeyed(letter: char) -> bool {
    let turns = |letter| matches!(letter, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2066}'..='\u{2069}');
    letter.is_control() || turns(letter) || matches!(letter, '\u{2028}'..='\u{202e}')
}

/// Returns `text` on one line, without characters that are obeyed, and cut after so many characters.
#[must_use]
pub fn one_line(text: &str, longest: usize) -> String {
    let plain = text.chars().map(|letter| if is_obeyed(letter) { ' ' } else { letter });
    let mut line: String = plain.take(longest).collect();
    if text.chars().nth(longest).is_some() {
        line.push('…');
    }
    line
}

/// [`one_line`] for an error or a log line.
#[must_use]
pub fn printable(text: &str) -> String {
    one_line(text.trim(), LONGEST)
}

/// Returns the first of these names, each as [`one_line`], and how many there are beside them.
pub fn few(names: impl ExactSizeIterator<Item: AsRef<str>>, most: usize, longest: usize) -> String {
    let more = names.len().saturating_sub(most);
    let first: Vec<String> = names.take(most).map(|name| one_line(name.as_ref(), longest)).collect();
    match more {
        0 => first.join(", "),
        more => format!("{} and {more} more", first.join(", ")),
    }
}

/// What is wrong with a PEM text. The parser's own words have a part of the text in them, as numbers. That
/// part may be all of a private key.
pub fn pem_problem(error: &pem::Error) -> String {
    match error {
        pem::Error::MissingSectionEnd { end_marker } => {
            // Of a key on one line it is all that is between the outer dashes.
            let is_of_label = |byte: &u8| matches!(byte, b'A'..=b'Z' | b'0'..=b'9' | b' ');
            let label = end_marker.iter().copied().take_while(is_of_label);
            let label: String = label.take(LONGEST_LABEL).map(char::from).collect();
            format!("the section {label} has no line that ends it")
        }
        pem::Error::IllegalSectionStart { .. } => "a line that begins a section does not end in -----".into(),
        error => error.to_string(),
    }
}

/// For the end of a name that was cut: FNV-1a, 32 bits. It is the same in every version of Portico, which the
/// standard library's hasher does not promise. Others can make a text that has the same.
pub fn stable_hash(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |hash, &byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

#[cfg(test)]
mod tests {
    use rustls_pki_types::PrivateKeyDer;
    use rustls_pki_types::pem::PemObject;

    use super::{few, one_line, pem_problem, stable_hash};

    #[test]
    fn what_is_wrong_with_a_key_in_pem_is_said_in_words_without_the_key() {
        let cut = "the section PRIVATE KEY has no line that ends it";
        for (text, problem) in [
            ("-----BEGIN PRIVATE KEY-----\nSECRET\n", cut),
            ("-----BEGIN PRIVATE KEY----- SECRET -----END PRIVATE KEY-----\n", cut),
            ("-----BEGIN PRIVATE KEY SECRET\n", "a line that begins a section does not end in -----"),
            ("SECRET\n", "no items found"),
        ] {
            let error = PrivateKeyDer::from_pem_slice(text.as_bytes()).unwrap_err();
            assert_eq!(pem_problem(&error), problem);
        }
    }

    #[test]
    fn the_hash_in_names_is_that_of_every_version() {
        assert_eq!((stable_hash(b""), stable_hash(b"a")), (0x811c_9dc5, 0xe40c_292c));
    }

    #[test]
    fn the_first_names_are_shown_and_the_others_counted() {
        let names = ["a", "b\n", "long"];
        assert_eq!(few(names.iter(), 3, 3), "a, b , lon…");
        assert_eq!(few(names.iter(), 2, 3), "a, b  and 1 more");
        assert_eq!(few([""; 0].iter(), 2, 3), "");
    }

    #[test]
    fn a_text_is_cut_only_if_it_is_longer_and_has_no_line_of_its_own() {
        assert_eq!(one_line("no\n\u{1b}[31mway\u{85}", 12), "no  [31mway ");
        assert_eq!(one_line("\u{202e}yaw\u{2028}on\u{2069}", 12), " yaw on ");
        assert_eq!(one_line("äöü", 3), "äöü");
        assert_eq!(one_line("äöüß", 3), "äöü…");
    }
}
