//! Text of somebody else, made fit for conditions, Events and logs.

/// Returns `text` on one line, without control characters, and cut after so many characters.
pub fn one_line(text: &str, longest: usize) -> String {
    let plain = text.chars().map(|letter| if letter.is_control() { ' ' } else { letter });
    let mut line: String = plain.take(longest).collect();
    if text.chars().nth(longest).is_some() {
        line.push('…');
    }
    line
}

#[cfg(test)]
mod tests {
    use super::one_line;

    #[test]
    fn a_text_is_cut_only_if_it_is_longer_and_has_no_line_of_its_own() {
        assert_eq!(one_line("no\n\u{1b}[31mway\u{85}", 12), "no  [31mway ");
        assert_eq!(one_line("äöü", 3), "äöü");
        assert_eq!(one_line("äöüß", 3), "äöü…");
    }
}
