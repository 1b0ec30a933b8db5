//! One copy of each text that many objects repeat: namespaces, Service names, port names.
//!
//! 10,000 user clusters have 10,000 Services called `apiserver-external`: with one copy, the name costs each
//! of them a pointer.

use std::collections::HashSet;
use std::sync::Arc;

/// Below this many texts there is no sweep: they hold less than 100 KB.
const SWEEP_FROM: usize = 1024;

/// The texts in use, and some that no longer are.
#[derive(Debug, Default)]
pub struct Interner {
    texts: HashSet<Arc<str>>,
    /// Number of texts that were in use at the last sweep.
    swept: usize,
}

impl Interner {
    /// Returns the one copy of `text`.
    pub fn get(&mut self, text: &str) -> Arc<str> {
        match self.texts.get(text) {
            Some(known) => Arc::clone(known),
            None => self.add(text.into()),
        }
    }

    /// Returns the one copy of `text`: this one, if it is the first.
    pub fn share(&mut self, text: &Arc<str>) -> Arc<str> {
        match self.texts.get(text) {
            Some(known) => Arc::clone(known),
            None => self.add(Arc::clone(text)),
        }
    }

    fn add(&mut self, text: Arc<str>) -> Arc<str> {
        if self.texts.len() >= SWEEP_FROM.max(2 * self.swept) {
            self.sweep();
        }
        self.texts.insert(Arc::clone(&text));
        text
    }

    /// Drops texts that no object holds. Runs when the number of texts has doubled, so the cost per text is
    /// constant. Clusters that come and go for years leave nothing behind.
    fn sweep(&mut self) {
        self.texts.retain(|text| Arc::strong_count(text) > 1);
        self.texts.shrink_to(2 * self.texts.len());
        self.swept = self.texts.len();
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
    fn the_first_copy_is_the_one_that_is_shared() {
        let mut interner = Interner::default();
        let first: Arc<str> = "secure".into();
        assert!(Arc::ptr_eq(&first, &interner.share(&first)));
        assert!(Arc::ptr_eq(&first, &interner.share(&"secure".into())));
    }

    #[test]
    fn texts_that_no_object_holds_are_dropped() {
        let mut interner = Interner::default();
        let held = interner.get("held");
        for number in 0..10 * SWEEP_FROM {
            interner.get(&number.to_string());
        }
        assert!(interner.texts.len() <= SWEEP_FROM);
        assert!(Arc::ptr_eq(&held, &interner.get("held")));
    }
}
