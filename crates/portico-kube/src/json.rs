//! The cost of a text of JSON once it is a tree.

/// Whether `json` may hold more than `most` values. As a tree each takes some hundred bytes, however short it
/// is as text: `[{"":0},{"":0}]` grows by a factor of ninety.
///
/// Counts the outermost value and each byte behind which another one begins, also in strings. So the count
/// may be too high, and never too low.
pub fn may_hold_more_than(json: &[u8], most: usize) -> bool {
    let others = json.iter().filter(|byte| matches!(byte, b'{' | b'[' | b',')).take(most).count();
    1 + others > most
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_value_is_overlooked() {
        for (text, values) in [("0", 1), ("[0]", 2), (r#"{"a":[1,2]}"#, 4), (r#"[{"":0},{"":0}]"#, 5)] {
            assert!(may_hold_more_than(text.as_bytes(), values - 1), "{text}");
            assert!(!may_hold_more_than(text.as_bytes(), values), "{text}");
        }
    }
}
