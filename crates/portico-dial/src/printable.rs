//! Text of a peer, made fit for logs: proxies and certificates may hold anything.

/// The most characters that are kept.
const LONGEST: usize = 500;

/// Returns the text as one line, without control characters, cut if it is long.
#[must_use]
pub fn printable(text: &str) -> String {
    text.trim()
        .chars()
        .take(LONGEST)
        .map(|letter| if letter.is_control() { '\u{b7}' } else { letter })
        .collect()
}
