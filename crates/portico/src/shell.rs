//! Command lines that are printed for people to paste.

/// Returns `text` as one word of a POSIX shell.
pub(crate) fn word(text: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./=,".contains(&byte);
    if !text.is_empty() && text.bytes().all(is_plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_can_be_pasted_into_a_shell() {
        assert_eq!(word("team=a,stage=test"), "team=a,stage=test");
        assert_eq!(word("stage in (test, dev)"), "'stage in (test, dev)'");
        assert_eq!(word(""), "''");
        assert_eq!(word("!x'y"), r"'!x'\''y'");
    }
}
