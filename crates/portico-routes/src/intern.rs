//! One copy of each text that many objects repeat: namespaces, Service names, port names.
//!
//! Ten thousand user clusters have ten thousand Services called `apiserver-external`; kept once, the name costs each of
//! them a pointer.

use std::collections::HashSet;
use std::sync::Arc;

/// Below this many texts nothing is swept: less than 100 KB is not worth looking for.
const SWEEP_FROM: usize = 1024;

/// The texts in use, and some that no longer are.
#[derive(Debug)]
pub(crate) struct Interner {
    texts: HashSet<Arc<str>>,
    sweep_at: usize,
}

impl Default for Interner {
    fn default() -> Self {
        Self { texts: HashSet::new(), sweep_at: SWEEP_FROM }
    }
}

impl Interner {
    /// The one copy of `text`.
    pub(crate) fn get(&mut self, text: &str) -> Arc<str> {
        if let Some(known) = self.texts.get(text) {
            return Arc::clone(known);
        }
        if self.texts.len() >= self.sweep_at {
            self.sweep();
        }
        let new: Arc<str> = text.into();
        self.texts.insert(Arc::clone(&new));
        new
    }

    /// Forgets what nobody else holds. Runs when the number of texts has doubled, so that its cost per text is constant
    /// and clusters that come and go for years leave nothing behind.
    fn sweep(&mut self) {
        self.texts.retain(|text| Arc::strong_count(text) > 1);
        self.sweep_at = SWEEP_FROM.max(2 * self.texts.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_texts_share_one_copy() {
        let mut interner = Interner::default();
        assert!(Arc::ptr_eq(&interner.get("secure"), &interner.get("secure")));
    }

    #[test]
    fn texts_that_nobody_holds_are_forgotten() {
        let mut interner = Interner::default();
        let held = interner.get("held");
        for number in 0..10 * SWEEP_FROM {
            interner.get(&number.to_string());
        }
        assert!(interner.texts.len() <= SWEEP_FROM);
        assert!(Arc::ptr_eq(&held, &interner.get("held")));
    }
}
