//! What a text of JSON costs once it is a tree.

/// Whether `json` may hold more than `most` values. As a tree each takes some hundred bytes, however short it
/// is as text: `[{"":0},{"":0}]` grows by a factor of ninety.
///
/// Counted are the bytes that begin a value or part two of them, those in strings too: a text may be taken
/// for more than it holds, and never for less.
pub fn may_hold_more_than(json: &[u8], most: usize) -> bool {
    json.iter().filter(|byte| matches!(byte, b'{' | b'[' | b',')).nth(most).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_value_is_overlooked() {
        for (text, counted) in [("[]", 1), (r#"{"a":[1,2]}"#, 3), (r#"[{"":0},{"":0}]"#, 4)] {
            assert!(may_hold_more_than(text.as_bytes(), counted - 1), "{text}");
            assert!(!may_hold_more_than(text.as_bytes(), counted), "{text}");
        }
    }
}
