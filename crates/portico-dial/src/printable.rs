//! Words of a peer made fit for our log: proxies and certificates say what they like.

/// Most characters that are repeated.
const LONGEST: usize = 200;

/// The text in one line, without control characters, cut if it is long.
pub(crate) fn printable(text: &str) -> String {
    text.trim()
        .chars()
        .take(LONGEST)
        .map(|letter| if letter.is_control() { '\u{b7}' } else { letter })
        .collect()
}
